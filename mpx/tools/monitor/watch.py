"""`watch`: measures in a state whose types no update changes."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mpx import _errors
from mpx._transforms.float32_world import keep_types, stable_state, upcast_tree
from mpx.tools.monitor.measures import behind_barrier


def watch(measures: Mapping[str, Any]) -> optax.GradientTransformationExtraArgs:
    """Keep measurements of the updates in the optimizer state; the updates pass through.

    This is `optax.monitor` with measurements that begin as zeros. In `optax.monitor` they begin with the first update:
    so its state cannot be the carry of a `jax.lax.scan`, the step compiles twice, and `mpx.loss_scaling`, which chooses
    between the old state and the new one, refuses it.

    Args:
        measures: by name, functions of the updates, or transformations whose `update` returns a measurement in place
            of the updates: the measures of `mpx.monitor`, `optax.measure_with_ema`, or your own. They are first traced
            with gradients of the shapes of the parameters, in float32 where those are narrower, and without extra
            arguments. Each measurement keeps the dtypes that it had then.

    Returns:
        A transformation with an `optax.MonitorState`; `optax.tree.get(opt_state, name)` reads a measurement.

    Raises:
        TypeError: if `measures` is not a dictionary of functions and transformations.

    Example:
        >>> measures = {"underflow": mpx.monitor.underflow("f16"), "norm": optax.tree.norm}
        >>> tx = optax.chain(mpx.monitor.watch(measures), optax.sgd(0.1))
        >>> params = jnp.ones(4)
        >>> state = tx.init(params)
        >>> _, state = jax.jit(tx.update)(jnp.full(4, 2.0**-30), state, params)
        >>> print(optax.tree.get(state, "underflow"), optax.tree.get(state, "norm") == 2.0**-29)
        1.0 True
    """
    is_measure = lambda x: callable(x) or callable(getattr(x, "update", None))
    if not isinstance(measures, Mapping) or not all(map(is_measure, measures.values())):
        raise TypeError(
            "`watch` needs a dictionary from names to measures, such as `{'underflow': underflow('f16')}`, but got "
            f"{measures!r}."
        )
    inner = optax.monitor(dict(measures))

    def init_fn(params):
        # Updates are float32 where parameters are narrower: so will the measurements be.
        wide = upcast_tree(params, np.dtype(np.float32))
        state: Any = stable_state(inner.init(wide), params)
        _, shapes = jax.eval_shape(inner.update, wide, state, params)
        return state._replace(measurements=jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes.measurements))

    def update_fn(updates, state, params=None, **extra_args):
        _errors.require_state(state, optax.MonitorState, "watch")
        hidden, hidden_params = behind_barrier((updates, params))
        _, new = inner.update(hidden, state, hidden_params, **extra_args)
        return updates, keep_types(state, new)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
