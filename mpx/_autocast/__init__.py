"""`autocast`: functions in float32 semantics with their contractions in a lower
precision. The folder has a README.
"""
