"""Plots of what mpx measures and plans, drawn by Matplotlib: `pip install matplotlib`.

Each function draws on the axes that it is given, or on a new figure, and returns the axes, so that anything can be
changed or added: `mpx.plot.losses(curves).figure.savefig("losses.svg")`. Legends stand below the axes; figures with
`layout="constrained"`, which new ones have, make room for them. No setting of Matplotlib is changed.

Curves differ in color and in line style, bars in color and in hatch: they can be told apart in grey too. New figures
are transparent and can be read both on paper and on a dark page; `style` makes your own figures so.

`mpx.plot` is imported by its name: `import mpx` alone does not need Matplotlib.
"""

from mpx.tools.plot.bars import memory as memory
from mpx.tools.plot.bars import traffic as traffic
from mpx.tools.plot.exponents import exponents as exponents
from mpx.tools.plot.losses import losses as losses
from mpx.tools.plot.sheet import style as style
