"""Measures of the numerics of a training run, for `optax.snapshot` and `watch`.

A measure is computed on the device, inside the step, and kept in the optimizer state;
`optax.tree.get(opt_state, name)` reads it wherever the loop waits for the device
anyway. XLA on CPU gives training runs by AdamW, momentum and Lion the same bits with
all measures as without. Before `mpx.loss_scaling` a measure sees scaled gradients:
measure the underflow of float16 there. Inside it gradients are true ones, and after an
optimizer they are updates.
"""

from mpx.monitor.fates import EXPONENTS as EXPONENTS
from mpx.monitor.fates import ExponentHistogram as ExponentHistogram
from mpx.monitor.measures import exponent_histogram as exponent_histogram
from mpx.monitor.measures import lost_updates as lost_updates
from mpx.monitor.measures import overflow as overflow
from mpx.monitor.measures import underflow as underflow
from mpx.monitor.measures import watch as watch
from mpx.monitor.report import LeafUnderflow as LeafUnderflow
from mpx.monitor.report import ScaledShares as ScaledShares
from mpx.monitor.report import UnderflowReport as UnderflowReport
