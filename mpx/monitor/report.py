"""`underflow_report`: how much of some gradients a format loses, and which loss scale
they need.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from mpx._loss_scale import LossScale, is_power_of_two
from mpx._tables import Result, Table, json_values
from mpx.monitor import fates
from mpx.monitor.fates import EXPONENTS, ExponentHistogram

_MAX_SCALE = 2.0**24  # the largest one of `DynamicLossScale`
_HEADROOM = 4  # doublings of the largest gradient that the scale leaves room for
# a share of the gradients that may become zero before another format is the better
# advice
_TOLERABLE = 0.01
_LISTED = 10  # leaves in a printed report


@dataclasses.dataclass(frozen=True)
class ScaledShares:
    """Shares of the nonzero finite gradients that a format loses at a loss scale."""

    scale: float  # the loss scale
    zero: float  # the share that becomes zero
    subnormal: float  # the share that becomes subnormal and loses bits
    infinite: float  # the share that overflows


@dataclasses.dataclass(frozen=True)
class LeafUnderflow:
    """Losses among the gradients of one parameter."""

    path: str  # the "/"-joined path of the parameter
    # of the magnitudes of its finite gradients, without a loss scale; 0 if there are
    # none
    largest: float
    zero: float  # the share that becomes zero without a loss scale
    zero_if_scaled: float  # the share that becomes zero with the recommended loss scale
    nonfinite: int  # count of its infinite or NaN gradients


@dataclasses.dataclass(frozen=True, eq=False)
class UnderflowReport(Result):
    """Result of `underflow_report`, which prints as tables. All numbers are without a
    loss scale.
    """

    dtype: np.dtype  # the format
    histogram: ExponentHistogram  # of all gradients, int64 counts
    largest: float  # the largest nonzero finite magnitude; 0 if there are none
    recommended_scale: float  # the loss scale, a power of two; 1 if none is needed
    # Losses without a scale, with the present one and with the recommended one.
    shares: tuple[ScaledShares, ...]
    leaves: tuple[LeafUnderflow, ...]  # losses of each parameter, the worst first

    def shares_at(self, scale: float) -> ScaledShares:
        """Return the losses at one of the scales of `shares`."""
        return next(shares for shares in self.shares if shares.scale == scale)

    @property
    def verdict(self) -> str:
        """Say what to do, in a sentence or two."""
        if not (count := self.histogram.nonfinite):
            return self._advice()
        # Those that are not finite come first.
        return (
            f"{self._advice()} Infinite or NaN, and left out: {count:,}, in"
            f" {self.leaves[0].path!r} first."
        )

    def _advice(self) -> str:
        scale = _scale_name(self.recommended_scale)
        best = self.shares_at(self.recommended_scale)
        if not self.largest:
            return "There is no nonzero finite gradient, so nothing can be said."
        if _has_range_of_float32(self.dtype):
            return (
                f"No loss scale is needed: {self.dtype} has the exponents of float32."
            )
        if best.zero > _TOLERABLE:  # nothing is infinite: the scale leaves room
            return (
                f"No loss scale is enough: at {scale}, {_percent(best.zero)} of the"
                f" gradients become zero. Their range is too wide for {self.dtype}: use"
                " bfloat16."
            )
        if self.recommended_scale == 1 and not best.subnormal:
            return (
                f"No loss scale is needed: {self.dtype} holds all of these gradients as"
                " normal numbers."
            )
        lost, without = (
            _percent(x.zero + x.infinite) for x in (best, self.shares_at(1.0))
        )
        return (
            f"A loss scale of {scale} is recommended: {lost} of the gradients are lost"
            f" at it, {without} without."
        )

    def as_dict(self) -> dict[str, Any]:
        """Return everything for JSON; the histogram as a dictionary from the exponents
        that occur to their counts.
        """
        counts, zeros, nonfinite = self.histogram
        occurring = {e: n for e, n in zip(EXPONENTS, counts, strict=True) if n}
        return super().as_dict() | json_values(
            {"histogram": occurring, "zeros": zeros, "nonfinite": nonfinite}
        )

    def _parts(self) -> Iterator[Table | str]:
        counts, zeros, nonfinite = self.histogram
        yield (
            f"Gradients in {self.dtype}: {np.sum(counts):,} nonzero, {zeros:,} zero,"
            f" {nonfinite:,} infinite or NaN"
        )
        lines: list[Any] = [("scale", "become zero", "subnormal", "infinite")]
        for s in self.shares:
            shares = map(_percent, (s.zero, s.subnormal, s.infinite))
            lines.append((_scale_name(s.scale), *shares))
        yield Table("By loss scale", lines, (1, 2, 3))
        scaled = f"at {_scale_name(self.recommended_scale)}"
        lines = [("parameter", "largest", "become zero", scaled, "infinite or NaN")]
        for x in self.leaves[:_LISTED]:
            shares = map(_percent, (x.zero, x.zero_if_scaled))
            lines.append((x.path, f"{x.largest:.3g}", *shares, f"{x.nonfinite:,}"))
        title = f"{len(lines) - 1} of {len(self.leaves)} parameters, the worst first"
        yield Table(title, lines, (1, 2, 3, 4))
        yield self.verdict


def underflow_report(
    grads: Any, dtype: DTypeLike = "f16", *, loss_scale: LossScale | ArrayLike = 1.0
) -> UnderflowReport:
    """Count how much of some gradients a format would lose, and recommend a loss scale.

    The recommended scale is the largest power of two (up to 2**24) at which the largest
    gradient stays finite, with room for 4 more doublings, in the way of Micikevicius et
    al. 2018 (arXiv 1710.03740, section 3.2). It is 1 if the format has the exponents of
    float32, or holds all gradients as normal numbers with that room.

    Give it gradients of a float32 or bfloat16 backward pass, or of a scaled loss: what
    float16 has made zero looks like any zero. Several batches say more than one: a list
    of their gradients is a tree too.

    Args:
        grads: a tree of gradients, concrete arrays; leaves that are not floating are
            left out, float64 is rounded to float32.
        dtype: the format: f16, bf16, f32, float8_e4m3fn or float8_e5m2.
        loss_scale: what the loss of these gradients was multiplied by, as
            `mpx.value_and_grad` does: a loss scale (`mpx.get_loss_scale(opt_state)`) or
            a number, a power of two.

    Raises:
        TypeError: inside `jax.jit`.
        ValueError: if `dtype` is another one, `loss_scale` is not a power of two, or
            the tree has no floating leaf.

    Example:
        >>> grads = {
        ...     "embed": jnp.array([2.0**-30, 2.0**-20]),
        ...     "head": jnp.array([2.0**-8, 2.0**-10]),
        ... }
        >>> report = underflow_report(grads, "f16")
        >>> report.recommended_scale == 2.0**19  # 2**-8 is 2**11 then, below 2**15
        True
        >>> [(shares.scale, shares.zero) for shares in report.shares]
        [(1.0, 0.25), (524288.0, 0.0)]
        >>> print(underflow_report(grads, "bf16").verdict)
        No loss scale is needed: bfloat16 has the exponents of float32.
    """
    dtype = fates.format_of(dtype, "underflow_report")
    given: Any = getattr(loss_scale, "loss_scale", loss_scale)
    carried = float(given)
    if not is_power_of_two(carried):
        raise ValueError(
            "`underflow_report`: `loss_scale` must be a loss scale or a number, a"
            f" power of two, but got {loss_scale!r}."
        )

    def unscaled(x):
        return x if carried == 1 else x.astype(np.float32) / np.float32(carried)

    arrays = [(name, unscaled(x)) for name, (x,) in fates.floating_leaves(grads)]
    if not arrays:
        raise ValueError(
            "`underflow_report` needs gradients, but the tree has no floating array"
            " in it."
        )

    def counts_of(count, *edges):  # summed on the host, exactly
        return np.stack(
            [np.asarray(count(x, *edges)).sum(0, np.int64) for _, x in arrays]
        )

    @functools.cache
    def fates_at(scale: float) -> np.ndarray:  # [array, kind]
        return counts_of(_count_fates, fates.edges_of(dtype, scale))

    largest = [float(np.asarray(_largest(x)).view(np.float32)) for _, x in arrays]
    recommended = _recommended_scale(
        dtype, max(largest), is_normal=not fates_at(1.0)[:, 1:3].any()
    )

    def shares_at(scale: float) -> ScaledShares:
        counts = fates_at(scale).sum(axis=0)
        lost = (
            fates.share_of(counts, fate) for fate in ("zero", "subnormal", "infinite")
        )
        return ScaledShares(scale, *map(float, lost))

    def zeros_at(scale):
        return fates.share_of(fates_at(scale), "zero").tolist()

    columns = (
        [name for name, _ in arrays],
        largest,
        zeros_at(1.0),
        zeros_at(recommended),
        fates_at(1.0)[:, -1].tolist(),
    )
    leaves = [LeafUnderflow(*row) for row in zip(*columns, strict=True)]
    leaves.sort(key=lambda x: (x.nonfinite == 0, -x.zero, -x.zero_if_scaled))
    zeros, *counts, nonfinite = counts_of(_count_exponents).sum(axis=0)
    return UnderflowReport(
        dtype=dtype,
        histogram=ExponentHistogram(np.array(counts), zeros, nonfinite),
        largest=max(largest),
        recommended_scale=recommended,
        shares=tuple(map(shares_at, sorted({1.0, carried, recommended}))),
        leaves=tuple(leaves),
    )


# Edges are an argument, so one program serves all scales.
_count_fates = jax.jit(
    lambda x, edges: fates.count(fates.fates_of(x, edges), len(fates.FATES) + 2)
)
_count_exponents = jax.jit(
    lambda x: fates.count(fates.exponents_of(x), len(EXPONENTS) + 2)
)


@jax.jit
def _largest(x: jax.Array) -> jax.Array:
    """Return the bits of the largest finite magnitude."""
    magnitudes = fates.magnitudes_of(x)
    return jnp.max(magnitudes, where=fates.is_number(magnitudes), initial=0)


def _recommended_scale(dtype: np.dtype, largest: float, is_normal: bool) -> float:
    """Return 1 if no scale is needed, else the largest power of two that leaves the
    head-room.
    """
    infinite_from = float(fates.edges_of(dtype)[3].view(np.float32))

    def fits(scale):
        return math.ldexp(largest, _HEADROOM) * scale < infinite_from

    if not largest or _has_range_of_float32(dtype) or (fits(1.0) and is_normal):
        return 1.0
    scale = _MAX_SCALE
    while not fits(scale):
        scale /= 2
    return scale


def _has_range_of_float32(dtype: np.dtype) -> bool:
    return jnp.finfo(dtype).maxexp == np.finfo(np.float32).maxexp


def _scale_name(scale: float) -> str:
    return "1" if scale == 1 else f"2**{math.frexp(scale)[1] - 1}"


def _percent(share: float) -> str:
    """Return a percentage of three digits; only 0 itself is shown as 0."""
    return "0" if share == 0 else f"{100 * share:.3g}%"
