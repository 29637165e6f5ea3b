"""The functions of `mpx.plot`, and the style sheet that they share."""

try:
    import matplotlib as matplotlib
except ImportError as error:
    raise ImportError("`mpx.plot` needs Matplotlib: pip install matplotlib.") from error
