"""Measures of gradients and updates."""

import functools
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import DTypeLike

from mpx import _trees, formats
from mpx._dtypes import dtype_or_none
from mpx.tools.monitor import exponents
from mpx.tools.monitor.barrier import behind_barrier
from mpx.tools.monitor.exponents import EXPONENTS, ExponentHistogram

Groups = Literal["leaf"] | Mapping[str, str] | None
Measure = Callable[[Any], Any]

_STORED = tuple(np.dtype(kind) for kind in (jnp.bfloat16, np.float16, np.float32))


def underflow(dtype: DTypeLike, *, groups: Groups = None) -> Measure:
    """The share of the gradients that become zero when they are rounded to a format.

    Of all numbers that are neither zero nor infinite nor NaN, how many become zero, from 0 to 1; 0 if there are none.
    Numbers are rounded to nearest, ties to even: up to half of the smallest subnormal they are zero. Whether
    subnormals are lost before that, because a device flushes them, is another matter: see `becomes_subnormal`.
    What arrives in a format has been rounded to it: gradients that a float16 backward pass has made zero are
    zeros here. Measure those of a float32, bfloat16 or scaled one.

    Args:
        dtype: the format: f16, bf16, f32, float8_e4m3fn or float8_e5m2.
        groups: None for one number; `"leaf"` for one of each floating leaf, by its "/"-joined path; or a dictionary
            from names to patterns (regular expressions searched in the path, the first match wins) for one of each
            name. Leaves without a group are not measured, nor those that are not floating.

    Returns:
        A measure for `optax.snapshot` and `monitor`: a function of a tree that returns a float32 scalar, or a
        dictionary of them.

    Raises:
        ValueError: if the format is none of these, or `groups` is not of that form; when it measures, if a group has
            no leaf.

    Example:
        >>> grads = {"embed": jnp.array([2.0**-26, 2.0**-24]), "head": jnp.ones(2)}
        >>> float(underflow("f16")(grads))
        0.25
        >>> underflow("f16", groups={"first": "embed", "rest": ""})(grads)
        {'first': Array(0.5, dtype=float32), 'rest': Array(0., dtype=float32)}
        >>> tx = optax.chain(optax.snapshot("underflow", underflow("f16")), optax.sgd(0.1))
        >>> _, state = tx.update(grads, tx.init(grads))
        >>> print(optax.tree.get(state, "underflow"))
        0.25

    References:
        Micikevicius et al. 2018, Mixed Precision Training (arXiv 1710.03740), section 3.2.
    """
    range_ = exponents.range_of(dtype, "underflow")
    return _share_of(range_.underflows, groups, "underflow")


def becomes_subnormal(dtype: DTypeLike, *, groups: Groups = None) -> Measure:
    """The share of the gradients that become subnormal numbers of a format, and keep fewer bits than others.

    Otherwise as `underflow`, which does not count these: on a device that flushes subnormals to zero add the two.

    Args:
        dtype: as for `underflow`.
        groups: as for `underflow`.

    Returns:
        A measure.

    Raises:
        ValueError: as for `underflow`.

    Example:
        >>> float(becomes_subnormal("f16")(jnp.array([2.0**-26, 2.0**-24, 2.0**-15, 2.0**-14])))
        0.5
    """
    range_ = exponents.range_of(dtype, "becomes_subnormal")
    return _share_of(range_.becomes_subnormal, groups, "becomes_subnormal")


def overflow(dtype: DTypeLike, *, groups: Groups = None) -> Measure:
    """The share of the gradients that become infinite when they are rounded to a format.

    Of all numbers that are neither zero nor infinite nor NaN, as for `underflow`. In float8_e4m3fn, which has no
    infinity, those that become NaN.

    Args:
        dtype: as for `underflow`.
        groups: as for `underflow`.

    Returns:
        A measure.

    Raises:
        ValueError: as for `underflow`.

    Example:
        >>> float(overflow("f16")(jnp.array([1.0, 65519.0, 65520.0, 1e9])))
        0.5
    """
    range_ = exponents.range_of(dtype, "overflow")
    return _share_of(range_.overflows, groups, "overflow")


def exponent_histogram(*, groups: Groups = None) -> Measure:
    """How many of the gradients there are of each power of two: where their exponents lie in the range of a format.

    Counts are float32, so that they can be averaged: exact up to 2**24, then rounded; they neither wrap around nor
    stop. This takes more time than the other measures, and 8 bytes of memory for each number of the largest leaf.

    Args:
        groups: as for `underflow`.

    Returns:
        A measure that returns an `ExponentHistogram`, or a dictionary of them. `EXPONENTS` are those of its `counts`.

    Raises:
        ValueError: if `groups` is not of that form; when it measures, if a group has no leaf.

    Example:
        >>> histogram = exponent_histogram()(jnp.array([0.0, 1.0, 1.5, 2.0**-20, jnp.inf]))
        >>> {e: int(count) for e, count in zip(EXPONENTS, histogram.counts, strict=True) if count}
        {-20: 1, 0: 2}
        >>> print(histogram.zeros, histogram.nonfinite)
        1.0 1.0

    References:
        Micikevicius et al. 2018, Mixed Precision Training (arXiv 1710.03740), figure 3.
    """
    _check_groups(groups, "exponent_histogram")

    def measure(leaves):
        histograms = [exponents.histogram_of(exponents.magnitudes_of(x)) for (x,) in leaves]
        empty = ExponentHistogram(jnp.zeros(len(EXPONENTS), np.float32), *jnp.zeros((2,), np.float32))
        return functools.reduce(lambda a, b: jax.tree.map(operator.add, a, b), histograms, empty)

    return lambda updates: _measured(measure, groups, "exponent_histogram", updates)


def lost_updates(dtype: DTypeLike | None = None, *, groups: Groups = None) -> optax.GradientTransformationExtraArgs:
    """The share of the updates that should have moved a weight, and that the rounding of the weight swallows.

    Of all nonzero updates of finite weights, how many leave `round(round(weight) + update)` where the weight was,
    rounded to the weight's own dtype; 0 if there are none. The update must be what `optax.apply_updates` is given, so
    this stands at the end of a chain. Behind `mpx.master_weights` nothing is lost: it emits updates that land on
    another number, or zeros. Inside, `lost_updates("bf16")` says what would be lost without it.

    Args:
        dtype: bf16, f16 or f32: as if the weights were stored in it. None: what they are stored in.
        groups: as for `underflow`.

    Returns:
        A measure for `monitor` (it needs the parameters, which `optax.snapshot` has not).

    Raises:
        ValueError: if `dtype` is none of these, or `groups` is not of that form; at `update`, without parameters, or
            if a group has no leaf.

    Example:
        >>> tx = optax.chain(optax.sgd(1e-3), mpx.monitor.monitor({"lost": lost_updates()}))
        >>> params = {"w": jnp.array([1.0, 0.125, 0.0], jnp.bfloat16)}
        >>> grads = {"w": jnp.ones(3, jnp.bfloat16)}
        >>> updates, state = tx.update(grads, tx.init(params), params)
        >>> print(optax.tree.get(state, "lost").round(3), optax.apply_updates(params, updates)["w"][0])
        0.333 1
    """
    _check_groups(groups, "lost_updates")
    given = dtype_or_none(dtype)
    if dtype is not None and (given is None or given not in _STORED):
        raise ValueError(f"`lost_updates`: `dtype` must be bf16, f16, f32 or None, but got {dtype!r}.")

    def measure(leaves):
        lost, moving = [], []
        for u, p in leaves:
            is_lost, is_moving = _lost_and_moving(u, p, given or p.dtype)
            lost.append(exponents.count(is_lost))
            moving.append(exponents.count(is_moving))
        return _ratio_of_counts(lost, moving)

    return _with_params(measure, groups, "lost_updates")


def update_to_weight_ratio(*, groups: Groups = None) -> optax.GradientTransformationExtraArgs:
    """The norm of the updates, divided by that of the weights: how far a step goes.

    Both are computed in float32 from numbers that are first brought near 1 by a power of two, so that no square
    overflows or vanishes, whatever the dtypes. 0 if nothing moves; infinite if the weights are zero and something
    does.

    Args:
        groups: as for `underflow`.

    Returns:
        A measure for `monitor` (it needs the parameters, which `optax.snapshot` has not).

    Raises:
        ValueError: if `groups` is not of that form; at `update`, without parameters, or if a group has no leaf.

    Example:
        >>> tx = optax.chain(optax.sgd(1e-2), mpx.monitor.monitor({"ratio": update_to_weight_ratio(groups="leaf")}))
        >>> params = {"a": jnp.full(9, 2.0), "b": jnp.full(4, 1e30)}
        >>> _, state = tx.update(params, tx.init(params), params)
        >>> optax.tree.get(state, "ratio")
        {'a': Array(0.01, dtype=float32), 'b': Array(0.01, dtype=float32)}
    """
    _check_groups(groups, "update_to_weight_ratio")

    def measure(leaves):
        update_norm, update_exponent = _scaled_norm([u for u, _ in leaves])
        weight_norm, weight_exponent = _scaled_norm([p for _, p in leaves])
        ratio = jnp.where(update_norm == 0, 0.0, update_norm / weight_norm)
        exponent = update_exponent - weight_exponent
        half = exponent // 2  # 2**exponent alone may be beyond float32 when the ratio is not
        return ratio * _power_of_two(half) * _power_of_two(exponent - half)

    return _with_params(measure, groups, "update_to_weight_ratio")


def _share_of(is_counted: Callable[[jax.Array], jax.Array], groups: Groups, caller: str) -> Measure:
    """A measure: the share of nonzero finite numbers whose magnitudes a function picks."""
    _check_groups(groups, caller)

    def measure(leaves):
        magnitudes = [exponents.magnitudes_of(x) for (x,) in leaves]
        numbers = [exponents.is_nonzero(m) & exponents.is_finite(m) for m in magnitudes]
        counted = [exponents.count(is_counted(m)) for m in magnitudes]
        return _ratio_of_counts(counted, map(exponents.count, numbers))

    return lambda updates: _measured(measure, groups, caller, updates)


def _with_params(
    measure: Callable[[Sequence[Any]], Any], groups: Groups, caller: str
) -> optax.GradientTransformationExtraArgs:
    """A measure of updates and parameters, in the form that `optax.monitor` calls."""

    def update_fn(updates, state, params=None, **extra_args):
        del extra_args
        if params is None:
            raise ValueError(f"`{caller}` needs the parameters: call `update(grads, state, params)`.")
        return _measured(measure, groups, caller, updates, params), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update_fn)


def _measured(measure: Callable[[Sequence[Any]], Any], groups: Groups, caller: str, *trees: Any) -> Any:
    """Measures the floating leaves that all trees have, in their groups."""
    leaves, *rest = [_trees.leaves_by_path(tree) for tree in trees]
    columns = {path: (x, *[other.get(path) for other in rest]) for path, x in leaves.items()}
    columns = {path: column for path, column in columns.items() if all(map(_trees.is_floating, column))}
    columns = dict(zip(columns, behind_barrier(list(columns.values())), strict=True))
    if groups is None:
        return measure(list(columns.values()))
    grouped: dict[str, list[Any]] = {} if groups == "leaf" else {name: [] for name in groups}
    for path, column in columns.items():
        name = _group_of(_trees.path_string(path), groups)
        if name is not None:
            grouped.setdefault(name, []).append(column)
    empty = [name for name, members in grouped.items() if not members]
    if empty and not isinstance(groups, str):
        patterns = ", ".join(f"{name!r}: {groups[name]!r}" for name in empty)
        paths = ", ".join(map(_trees.path_string, columns)) or "(none)"
        raise ValueError(
            f"`{caller}`: no leaf is in the group {patterns}. A pattern is a regular expression searched in the "
            f"paths of the floating leaves, and the first group that matches has the leaf: {paths}."
        )
    return {name: measure(members) for name, members in grouped.items()}


def _group_of(path: str, groups: Mapping[str, str] | Literal["leaf"]) -> str | None:
    if isinstance(groups, str):
        return path
    return next((name for name, pattern in groups.items() if re.search(pattern, path)), None)


def _check_groups(groups: Any, caller: str) -> None:
    if groups is None or groups == "leaf":
        return
    if not isinstance(groups, Mapping) or not all(isinstance(x, str) for pair in groups.items() for x in pair):
        raise ValueError(
            f"`{caller}`: `groups` must be None, 'leaf' or a dictionary from names to patterns, but got {groups!r}."
        )
    for name, pattern in groups.items():
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(
                f"`{caller}`: the pattern of the group {name!r}, {pattern!r}, is not a regular expression: {error}."
            ) from error


def _ratio_of_counts(counts: Any, totals: Any) -> jax.Array:
    """The sum of the first divided by that of the second; 0 if there is nothing, since NaN would stay in an average."""
    zero = jnp.zeros((), np.float32)
    return functools.reduce(operator.add, counts, zero) / jnp.maximum(functools.reduce(operator.add, totals, zero), 1)


def _lost_and_moving(u: jax.Array, p: jax.Array, dtype: np.dtype) -> tuple[jax.Array, jax.Array]:
    """Which updates a weight of a dtype does not see, and which it should."""
    wide = np.dtype(np.float64) if dtype == np.float64 else np.dtype(np.float32)
    stored = (lambda x: x) if dtype == np.float64 else (lambda x: formats.round_to(x, dtype))
    before = stored(p.astype(wide))
    after = stored(before + u.astype(wide))
    update, weight = exponents.magnitudes_of(u), exponents.magnitudes_of(p)
    is_moving = exponents.is_nonzero(update) & exponents.is_finite(update) & exponents.is_finite(weight)
    return is_moving & _is_same_number(before, after), is_moving


def _is_same_number(a: jax.Array, b: jax.Array) -> jax.Array:
    """Equal bits, or zeros of two signs; subnormals that differ are different numbers, on a CPU too."""
    magnitude_a, magnitude_b = exponents.magnitudes_of(a), exponents.magnitudes_of(b)
    is_same_sign = jnp.signbit(a) == jnp.signbit(b)
    return (magnitude_a == magnitude_b) & (is_same_sign | ~exponents.is_nonzero(magnitude_a))


def _scaled_norm(arrays: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The norm of some arrays together: a float32 number, and the power of two by which it is to be multiplied."""
    wide = [x.astype(np.float32) for x in arrays]
    largest = [jnp.max(exponents.magnitudes_of(x), initial=np.uint32(0)) for x in wide]
    largest = functools.reduce(jnp.maximum, largest, jnp.zeros((), np.uint32))
    exponent = jnp.clip(exponents.exponents_of(largest), -126, 126)
    squares = [jnp.sum(jnp.square(x * _power_of_two(-exponent))) for x in wide]
    return jnp.sqrt(functools.reduce(operator.add, squares, jnp.zeros((), np.float32))), exponent


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """2**exponent in float32, for exponents of normal numbers."""
    return lax.bitcast_convert_type((exponent + 127) << 23, np.float32)
