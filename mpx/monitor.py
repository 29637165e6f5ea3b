"""Measures of the numerics of a training, for `optax.snapshot` and `monitor`.

What vanishes, overflows or is lost in a rounding shows in no loss curve before it is too late. A measure is computed
on the device inside the step and kept in the optimizer state; `optax.tree.get(opt_state, name)` reads it wherever the
loop waits for the device anyway. There is no callback.

To measure changes no number of the training: updates pass through as they are, and measures read their bits from
behind an `optimization_barrier`. What a compiler makes of two programs is its own affair, but XLA on CPU gives a
training by AdamW, momentum or Lion the same bits with all measures as without, in float32 and with every recipe.

Where a measure stands decides what it sees. In front of `mpx.loss_scaling` gradients are still scaled, as the backward
pass had them: there the underflow of float16 is what it is. Inside they are true gradients, behind a rule updates:

    tx = optax.chain(
        mpx.monitor.monitor({"underflow": mpx.monitor.underflow("f16")}),  # of scaled gradients
        mpx.loss_scaling(
            optax.chain(
                optax.snapshot("exponents", mpx.monitor.exponent_histogram()),  # of true gradients
                mpx.master_weights(
                    optax.chain(
                        optax.adamw(1e-3),
                        mpx.monitor.monitor({"lost": mpx.monitor.lost_updates("bf16")}),  # what masters save
                    )
                ),
            )
        ),
    )
"""

from mpx.tools.monitor.exponents import EXPONENTS as EXPONENTS
from mpx.tools.monitor.exponents import ExponentHistogram as ExponentHistogram
from mpx.tools.monitor.measures import becomes_subnormal as becomes_subnormal
from mpx.tools.monitor.measures import exponent_histogram as exponent_histogram
from mpx.tools.monitor.measures import lost_updates as lost_updates
from mpx.tools.monitor.measures import overflow as overflow
from mpx.tools.monitor.measures import underflow as underflow
from mpx.tools.monitor.measures import update_to_weight_ratio as update_to_weight_ratio
from mpx.tools.monitor.monitored import monitor as monitor
from mpx.tools.monitor.scale_history import ScaleHistory as ScaleHistory
from mpx.tools.monitor.scale_history import ScaleHistoryState as ScaleHistoryState
from mpx.tools.monitor.scale_history import read_scale_history as read_scale_history
from mpx.tools.monitor.scale_history import scale_history as scale_history
