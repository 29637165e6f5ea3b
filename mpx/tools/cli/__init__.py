"""What the commands of the command line do, one a file, and what they have in common."""
