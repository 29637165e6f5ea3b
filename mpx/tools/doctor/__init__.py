"""Examine a machine: the packages and devices there, which dtypes are worth using, and whether mpx is exact."""
