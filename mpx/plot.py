"""Plots of what mpx measures and plans, drawn by Matplotlib: `pip install matplotlib`.

Each function draws on the axes that it is given, or on a new figure, and returns the axes, so that anything can be
changed or added: `mpx.plot.losses(curves).figure.savefig("losses.svg")`. New figures are transparent and can be read
both on paper and on a dark page; `style` makes your own figures so. No setting of Matplotlib is changed.

`mpx.plot` is imported by its name: `import mpx` alone does not need Matplotlib.
"""

from mpx.tools.plot import exponents as exponents
from mpx.tools.plot import losses as losses
from mpx.tools.plot import memory as memory
from mpx.tools.plot import style as style
