"""Measurements of what mpx costs, each beside the same work done without it."""
