"""The commands of `mpx` on the command line, one a file, and what they share."""
