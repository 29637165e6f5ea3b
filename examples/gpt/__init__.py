"""A small byte-level GPT, trained under seven precision recipes that differ in nothing else."""
