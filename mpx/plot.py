"""Plots of what mpx measures and plans, drawn by Matplotlib: `pip install 'mpx-jax[plot]'`.

Each function draws on the axes that it is given, or on those of a new figure, and returns them, so that anything can be
changed or added: `mpx.plot.losses(curves).figure.savefig("losses.svg")`. Legends stand below the axes;
figures with `layout="constrained"`, as new ones are, make room for them. No setting of Matplotlib is changed.

Curves differ in color and in line style, bars in color and in hatch: they can be told apart in grey too. New figures
are transparent and can be read both on paper and on a dark page; `style` makes your own figures so.

`mpx.plot` is imported by its name: `import mpx` alone does not need Matplotlib.
"""

from mpx.tools.plot.curves import loss_scale as loss_scale
from mpx.tools.plot.curves import losses as losses
from mpx.tools.plot.curves import lost_updates as lost_updates
from mpx.tools.plot.exponents import exponents as exponents
from mpx.tools.plot.memory import memory as memory
from mpx.tools.plot.sheet import style as style
from mpx.tools.plot.traffic import traffic as traffic
