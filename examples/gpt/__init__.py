"""A small byte-level GPT, trained under ten precision recipes that differ in nothing else."""
