"""The functions of `mpx.plot`, a file each, and what they share: themes, axes, curves over steps."""

try:
    import matplotlib as matplotlib
except ImportError as error:
    raise ImportError("`mpx.plot` needs Matplotlib: pip install 'mpx-jax[plot]'.") from error
