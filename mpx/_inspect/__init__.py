"""Functions that look into an optimizer state or a chain."""
