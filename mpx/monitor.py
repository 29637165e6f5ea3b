"""Measures of the numerics of a training run, for `optax.snapshot` and `watch`.

A measure is computed on the device, inside the step, and kept in the optimizer state; `optax.tree.get(opt_state, name)`
reads it wherever the loop waits for the device anyway. Updates pass through unchanged, and measures read their bits
from behind an `optimization_barrier`: XLA on CPU gives training runs by AdamW, momentum and Lion the same bits with all
measures as without.

Before `mpx.loss_scaling` a measure sees scaled gradients: measure the underflow of float16 there. Inside it gradients
are true ones, and after an optimizer they are updates.
"""

from mpx.tools.monitor.exponents import EXPONENTS as EXPONENTS
from mpx.tools.monitor.exponents import ExponentHistogram as ExponentHistogram
from mpx.tools.monitor.measures import exponent_histogram as exponent_histogram
from mpx.tools.monitor.measures import lost_updates as lost_updates
from mpx.tools.monitor.measures import overflow as overflow
from mpx.tools.monitor.measures import underflow as underflow
from mpx.tools.monitor.measures import watch as watch
