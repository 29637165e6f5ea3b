"""Commands of the command line, one a file, and what they have in common."""
