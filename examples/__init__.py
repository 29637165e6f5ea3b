"""Example programs, each run with `python -m examples.<name>` from the root of a
checkout.
"""
