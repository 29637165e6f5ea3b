"""Measures of gradients and updates, which leave no trace in the measured program, and
`watch`, which keeps them.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import DTypeLike

from mpx import _errors, _trees, formats
from mpx._dtypes import UP_TO_FLOAT32
from mpx._transforms.upcast import keep_types, stable_state, upcast_tree
from mpx.monitor import fates

T = TypeVar("T")
Groups = Literal["leaf"] | None


def underflow(dtype: DTypeLike, *, groups: Groups = None) -> Callable[[Any], Any]:
    """Measure the share of the gradients that become zero when they are rounded to a
    format.

    The share, from 0 to 1, is of all nonzero finite numbers; without any it is 0.
    Subnormal numbers of the format count as kept, although some devices flush them to
    zero. Measure gradients of a float32, bfloat16 or scaled backward pass: what float16
    has already made zero counts as zero here.

    Args:
        dtype: the format: f16, bf16, f32, float8_e4m3fn or float8_e5m2.
        groups: None for one number, `"leaf"` for one of each leaf, by its "/"-joined
            path. Leaves that are not floating are not measured.

    Returns:
        A measure for `optax.snapshot` and `watch`: a function of a tree to a float32
            scalar, or a dictionary of them.

    Example:
        >>> grads = {"embed": jnp.array([2.0**-26, 2.0**-24]), "head": jnp.ones(2)}
        >>> float(underflow("f16")(grads))
        0.25
        >>> underflow("f16", groups="leaf")(grads)
        {'embed': Array(0.5, dtype=float32), 'head': Array(0., dtype=float32)}
    """
    return _share_of("zero", dtype, groups, "underflow")


def overflow(dtype: DTypeLike, *, groups: Groups = None) -> Callable[[Any], Any]:
    """Measure the share of the gradients that overflow when they are rounded to a
    format, as `underflow` does.

    An overflow is infinite, or NaN in float8_e4m3fn, which has no infinity.

    Example:
        >>> float(overflow("f16")(jnp.array([1.0, 65519.0, 65520.0, 1e9])))
        0.5
    """
    return _share_of("infinite", dtype, groups, "overflow")


def exponent_histogram(*, groups: Groups = None) -> Callable[[Any], Any]:
    """Count the gradients by power of two: an `ExponentHistogram`, or a dictionary of
    them with `groups="leaf"`.

    Counts are float32, so that they can be averaged: exact up to 2**24, then rounded.
    This takes more time than the other measures, and 8 bytes of memory for each number
    of the largest leaf.

    Example:
        >>> histogram = exponent_histogram()(
        ...     jnp.array([0.0, 1.0, 1.5, 2.0**-20, jnp.inf])
        ... )
        >>> {
        ...     e: int(count)
        ...     for e, count in zip(
        ...         mpx.monitor.EXPONENTS, histogram.counts, strict=True
        ...     )
        ...     if count
        ... }
        {-20: 1, 0: 2}
        >>> print(histogram.zeros, histogram.nonfinite)
        1.0 1.0
    """

    def histogram(sums):
        return fates.ExponentHistogram(sums[1:-1], sums[0], sums[-1])

    kinds = len(fates.EXPONENTS) + 2
    return _measure("exponent_histogram", fates.exponents_of, kinds, histogram, groups)


def lost_updates(
    dtype: DTypeLike | None = None, *, groups: Groups = None
) -> optax.GradientTransformationExtraArgs:
    """Measure the share of the updates that should have moved a weight, but are lost
    when the weight is rounded.

    An update of a finite weight is lost if it is not zero and `round(round(weight) +
    update)` is `round(weight)`. The share is 0 if nothing should have moved. Put this
    at the end of a chain, where it sees what `optax.apply_updates` gets. After
    `mpx.master_weights` nothing is lost; inside of it, `lost_updates("bf16")` tells
    what would be lost without it.

    Args:
        dtype: bf16, f16 or f32: as if the weights were stored in it. None: the dtype
            that they are stored in.
        groups: as for `underflow`.

    Returns:
        A measure for `watch` (it needs the parameters, which `optax.snapshot` does not
        have).

    Example:
        >>> tx = optax.chain(
        ...     optax.sgd(1e-3), mpx.monitor.watch({"lost": lost_updates()})
        ... )
        >>> params = {"w": jnp.array([1.0, 0.125, 0.0], jnp.bfloat16)}
        >>> grads = {"w": jnp.ones(3, jnp.bfloat16)}
        >>> updates, state = tx.update(grads, tx.init(params), params)
        >>> print(
        ...     optax.tree.get(state, "lost").round(3),
        ...     optax.apply_updates(params, updates)["w"][0],
        ... )
        0.333 1
    """
    if dtype is not None:
        dtype = _errors.require_one_of(UP_TO_FLOAT32, dtype, "`lost_updates`: `dtype`")

    def kinds_of(u, p):
        """Give an update that its weight does not see the kind of what becomes zero,
        and others that of what stays.
        """
        own = dtype or p.dtype
        wide = _trees.promoted(own, np.float32)

        def stored(x):
            return x if own == wide else formats.round_to(x, own)

        before = stored(p.astype(wide))
        is_moving = fates.is_number(fates.magnitudes_of(u)) & jnp.isfinite(p)
        is_seen = stored(before + u.astype(wide)) != before
        return jnp.where(is_moving, 1 + is_seen, 0)

    measured = _measure(
        "lost_updates", kinds_of, 4, lambda sums: fates.share_of(sums, "zero"), groups
    )

    def update_fn(updates, state, params=None, **extra_args):
        del extra_args
        if params is None:
            raise ValueError(
                "`lost_updates` needs the parameters: call `update(grads, state,"
                " params)`."
            )
        return measured(updates, params), state

    return optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(), update_fn
    )


def watch(measures: Mapping[str, Any]) -> optax.GradientTransformationExtraArgs:
    """Keep measurements of the updates in the optimizer state; the updates pass
    through.

    This is `optax.monitor` with measurements that begin as zeros and keep their dtypes.
    There they begin with the first update: so its state is no carry of a
    `jax.lax.scan`, and the step compiles twice.

    Args:
        measures: by name, functions of the updates, or transformations whose `update`
            returns a measurement in place of the updates: the measures of
            `mpx.monitor`, `optax.measure_with_ema`, or your own. They are first traced
            with gradients like the parameters, in float32 where those are narrower, and
            without extra arguments.

    Returns:
        A transformation with an `optax.MonitorState`; `optax.tree.get(opt_state, name)`
        reads a measurement.

    Example:
        >>> measures = {
        ...     "underflow": mpx.monitor.underflow("f16"),
        ...     "norm": optax.tree.norm,
        ... }
        >>> tx = optax.chain(mpx.monitor.watch(measures), optax.sgd(0.1))
        >>> params = jnp.ones(4)
        >>> state = tx.init(params)
        >>> _, state = jax.jit(tx.update)(jnp.full(4, 2.0**-30), state, params)
        >>> print(
        ...     optax.tree.get(state, "underflow"),
        ...     optax.tree.get(state, "norm") == 2.0**-29,
        ... )
        1.0 True
    """
    inner = optax.monitor(dict(measures))

    def init_fn(params):
        # Updates are float32 where parameters are narrower: so will the measurements
        # be.
        wide = upcast_tree(params, np.dtype(np.float32))
        state: Any = stable_state(inner.init(wide), params)
        _, shapes = jax.eval_shape(inner.update, wide, state, params)
        return state._replace(measurements=optax.tree.zeros_like(shapes.measurements))

    def update_fn(updates, state, params=None, **extra_args):
        _errors.require_state(state, optax.MonitorState, "watch")
        hidden, hidden_params = _behind_barrier((updates, params))
        _, new = inner.update(hidden, state, hidden_params, **extra_args)
        return updates, keep_types(state, new)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _share_of(
    fate: str, dtype: DTypeLike, groups: Groups, caller: str
) -> Callable[[Any], Any]:
    """Return a measure of the share of the nonzero finite numbers that meet one
    fate.
    """
    edges = fates.edges_of(fates.format_of(dtype, caller))

    def kinds_of(x):
        return fates.fates_of(x, edges)

    def share(sums):
        return fates.share_of(sums, fate)

    return _measure(caller, kinds_of, len(fates.FATES) + 2, share, groups)


def _behind_barrier(tree: T) -> T:
    """Return the same numbers, but hide from the compiler that the training run reads
    them too.

    Otherwise it fuses a measure with the step, and may round the step's numbers in
    another place because they have two readers. Bits pass through the barrier, not
    floating-point numbers: with those, XLA on CPU moves the reshaping of a gradient of
    one column, and LLVM contracts another product of the optimizer.
    """
    floats, put = _trees.partition_leaves(tree, _trees.is_floating)
    bits = [jnp.asarray(x).view(f"uint{8 * x.dtype.itemsize}") for x in floats]
    hidden = lax.optimization_barrier(bits)
    return put([x.view(of.dtype) for x, of in zip(hidden, floats, strict=True)])


def _measure(
    caller: str,
    kinds_of: Callable[..., jax.Array],
    kinds: int,
    result: Callable[[jax.Array], Any],
    groups: Groups,
) -> Callable[..., Any]:
    """Return a function of gradients or updates, and perhaps of weights.

    `kinds_of` gives each number of a floating leaf its kind; `result` makes the
    measurement of their counts.
    """
    if groups not in (None, "leaf"):
        raise ValueError(
            f"`{caller}`: `groups` must be None or 'leaf', but got {groups!r}."
        )

    def measured(*trees: Any) -> Any:
        leaves = _behind_barrier([leaf for _, leaf in fates.floating_leaves(*trees)])
        # In float32, sums of counts neither wrap around nor stop.
        counts = [
            jnp.sum(fates.count(kinds_of(*leaf), kinds).astype(np.float32), axis=0)
            for leaf in leaves
        ]
        return result(sum(counts, jnp.zeros(kinds, np.float32)))

    def by_leaf(*trees: Any) -> Any:
        return {name: measured(*leaf) for name, leaf in fates.floating_leaves(*trees)}

    return measured if groups is None else by_leaf
