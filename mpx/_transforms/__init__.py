"""The gradient transformations, one a file; `mpx/__init__.py` is their index."""
