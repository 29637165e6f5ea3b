"""Everything that is not training: plans, the report of a compiled program, and the
command line.
"""
