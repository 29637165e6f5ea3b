"""A small byte-level GPT, trained under nine precision recipes that differ in nothing else."""
