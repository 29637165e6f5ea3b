"""mpx: mixed-precision training for JAX, exact to the bit.

Small composable Optax transformations: float32 master weights, dynamic loss scaling,
Kahan summation and stochastic rounding around or after any rule; and cast policies for
any pytree.
"""

import importlib as _importlib
from importlib.metadata import PackageNotFoundError as _PackageNotFoundError
from importlib.metadata import version as _version
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from mpx import formats as formats
from mpx import states as states
from mpx._any_precision_adamw import any_precision_adamw as any_precision_adamw
from mpx._autocast.explain import explain as explain
from mpx._autocast.rules import DEFAULT_RULES as DEFAULT_RULES
from mpx._autocast.transform import autocast as autocast
from mpx._autocast.transform import full_precision as full_precision
from mpx._chain import chain as chain
from mpx._checkpoint import checkpoint as checkpoint
from mpx._dtypes import half_dtype as half_dtype
from mpx._finite import all_finite as all_finite
from mpx._finite import select_tree as select_tree
from mpx._fp8 import Fp8 as Fp8
from mpx._fused.fused_update import fused_update as fused_update
from mpx._gradients import grad as grad
from mpx._gradients import value_and_grad as value_and_grad
from mpx._inspect.check_chain import check_chain as check_chain
from mpx._inspect.convert_state import convert_state as convert_state
from mpx._inspect.health import StuckError as StuckError
from mpx._inspect.health import check_health as check_health
from mpx._inspect.masters import is_synced as is_synced
from mpx._inspect.masters import master_params as master_params
from mpx._inspect.masters import resync as resync
from mpx._loss_scale import DynamicLossScale as DynamicLossScale
from mpx._loss_scale import LossScale as LossScale
from mpx._loss_scale import NoOpLossScale as NoOpLossScale
from mpx._loss_scale import StaticLossScale as StaticLossScale
from mpx._mixed_precision import mixed_precision as mixed_precision
from mpx._parallel.each_matrix import each_matrix as each_matrix
from mpx._parallel.newton_schulz import newton_schulz as newton_schulz
from mpx._parallel.zero1 import zero1 as zero1
from mpx._parallel.zero1 import zero1_shardings as zero1_shardings
from mpx._policy import Policy as Policy
from mpx._policy import cast as cast
from mpx._policy import cast_to_full as cast_to_full
from mpx._policy import cast_to_half as cast_to_half
from mpx._policy import get_policy as get_policy
from mpx._recipes import recipes as recipes
from mpx._stored.blockwise import Blockwise4bit as Blockwise4bit
from mpx._stored.blockwise import Blockwise8bit as Blockwise8bit
from mpx._stored.roles import register_state as register_state
from mpx._stored.state_format import StateFormat as StateFormat
from mpx._train_step import train_step as train_step
from mpx._transforms.clip_by_predicted_norm import (
    clip_by_predicted_norm as clip_by_predicted_norm,
)
from mpx._transforms.kahan_summation import kahan_summation as kahan_summation
from mpx._transforms.loss_scaling import get_loss_scale as get_loss_scale
from mpx._transforms.loss_scaling import loss_scaling as loss_scaling
from mpx._transforms.loss_scaling import skipped_steps as skipped_steps
from mpx._transforms.low_precision_state import (
    low_precision_state as low_precision_state,
)
from mpx._transforms.master_weights import master_weights as master_weights
from mpx._transforms.stochastic_rounding import (
    stochastic_rounding as stochastic_rounding,
)
from mpx._transforms.upcast import upcast as upcast

# Tools are imported when they are used: a training script needs none of them.
_TOOLS = {
    "compare_plans": "mpx.tools.plan.compare_plans",
    "memory_plan": "mpx.tools.plan.memory_plan",
    "monitor": "mpx.monitor",
    "step_report": "mpx.tools.program.step_report",
    "underflow_report": "mpx.monitor.report",
}
if _TYPE_CHECKING:
    from mpx import monitor as monitor
    from mpx.monitor.report import underflow_report as underflow_report
    from mpx.tools.plan.compare_plans import compare_plans as compare_plans
    from mpx.tools.plan.memory_plan import memory_plan as memory_plan
    from mpx.tools.program.step_report import step_report as step_report


def __getattr__(name: str) -> _Any:
    if name not in _TOOLS:
        raise AttributeError(f"module 'mpx' has no attribute {name!r}")
    module = _importlib.import_module(_TOOLS[name])
    globals()[name] = module if name == "monitor" else getattr(module, name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted([*globals(), *_TOOLS])


try:
    __version__ = _version("mpx-jax")
except _PackageNotFoundError:  # run from a checkout
    __version__ = "0+unknown"
