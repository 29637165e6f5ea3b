"""Types of the optimizer states that mpx makes, for annotations and `isinstance`, and
what a wrapper of your own needs.

A state is a `NamedTuple` of arrays and of `StoredLeaf`s, which are arrays kept in few
bits. A wrapper that chooses the values of 16-bit parameters emits its updates by
`landing_update`. A class of `KeptWeight` is a way to keep masters.
"""

from mpx._stored.state_format import StoredLeaf as StoredLeaf
from mpx._stored.weights import KeptWeight as KeptWeight
from mpx._transforms.clip_by_predicted_norm import (
    ClipByPredictedNormState as ClipByPredictedNormState,
)
from mpx._transforms.kahan_summation import KahanSummationState as KahanSummationState
from mpx._transforms.loss_scaling import LossScalingState as LossScalingState
from mpx._transforms.low_precision_state import LowPrecisionState as LowPrecisionState
from mpx._transforms.master_weights import MasterWeightsState as MasterWeightsState
from mpx._transforms.stochastic_rounding import (
    StochasticRoundingState as StochasticRoundingState,
)
from mpx._writeback import landing_update as landing_update
