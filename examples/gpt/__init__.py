"""GPT-2 on mpx: a comparison of precision recipes that differ in nothing else, and a training of any size."""
