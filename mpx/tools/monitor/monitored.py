"""`monitor`: measures in a state whose types no update changes."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mpx import _errors
from mpx._transforms.upcast import settled, widen, with_types_of
from mpx.tools.monitor.barrier import behind_barrier


def monitor(measures: Mapping[str, Any]) -> optax.GradientTransformationExtraArgs:
    """`optax.monitor` with a state whose types no update changes.

    The state of `optax.monitor` holds no measurements before its first update and has another structure after it: so
    it cannot be the carry of a `jax.lax.scan`, the step compiles twice, and `mpx.loss_scaling`, which chooses
    between the old state and the new one, refuses it. This one begins with zeros. Updates pass through.

    Args:
        measures: by name, functions of the updates, or transformations whose `update` returns a measurement in place
            of the updates: the measures here, `optax.measure_with_ema`, or your own. They are first traced with
            gradients that are shaped like the parameters, in float32 where those are narrower, and without extra
            arguments. Each keeps the dtypes that it had then.

    Returns:
        A transformation with an `optax.MonitorState`; `optax.tree.get(opt_state, name)` reads a measurement.

    Raises:
        TypeError: if `measures` is not a dictionary of functions and transformations.

    Example:
        >>> measures = {"underflow": mpx.monitor.underflow("f16"), "norm": optax.tree.norm}
        >>> tx = optax.chain(mpx.monitor.monitor(measures), optax.sgd(0.1))
        >>> params = jnp.ones(4)
        >>> state = tx.init(params)
        >>> _, state = jax.jit(tx.update)(jnp.full(4, 2.0**-30), state, params)
        >>> print(optax.tree.get(state, "underflow"), optax.tree.get(state, "norm") == 2.0**-29)
        1.0 True
    """
    if not isinstance(measures, Mapping) or not all(callable(m) or _is_transformation(m) for m in measures.values()):
        raise TypeError(
            "`monitor` needs a dictionary from names to measures, such as "
            f"`{{'underflow': underflow('f16')}}`, but got {measures!r}."
        )
    inner = optax.with_extra_args_support(optax.monitor({name: _apart(m) for name, m in measures.items()}))

    def init_fn(params):
        # Updates are float32 where parameters are narrower: so will the measurements be.
        wide = widen(params, np.dtype(np.float32))
        state: Any = settled(inner.init(wide), params)
        _, shapes = jax.eval_shape(inner.update, wide, state, params)
        return state._replace(measurements=jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes.measurements))

    def update_fn(updates, state, params=None, **extra_args):
        _errors.require_state(state, optax.MonitorState, "monitor")
        _, new = inner.update(updates, state, params, **extra_args)
        return updates, with_types_of(state, new)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _is_transformation(measure: Any) -> bool:
    return callable(getattr(measure, "init", None)) and callable(getattr(measure, "update", None))


def _apart(measure: Any) -> optax.GradientTransformationExtraArgs:
    """A measure whose arithmetic is not fused with that of the training."""
    if not _is_transformation(measure):
        function = measure
        measure = optax.stateless(lambda updates, params: function(updates))
    measure = optax.with_extra_args_support(measure)

    def update_fn(updates, state, params=None, **extra_args):
        updates, params = behind_barrier((updates, params))
        return measure.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(measure.init, update_fn)
