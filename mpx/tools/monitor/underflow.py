"""`underflow_report`: where the exponents of gradients lie in the range of a format, and which loss scale they need."""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

from mpx import _errors, _tables, _trees
from mpx._loss_scale import LossScale, is_power_of_two
from mpx.tools.monitor import exponents

_MAX_SCALE = 2.0**24  # that of `DynamicLossScale`
_TOLERABLE = 0.01  # a share of the gradients that may become zero before another format is the better advice
_LISTED = 10  # leaves in a printed report
_BARS = 32  # lines of the printed histogram, at most
_WIDTH = 40  # characters of its longest bar


@dataclasses.dataclass(frozen=True)
class ScaledShares:
    """What becomes of the gradients of a loss that is multiplied by a scale, as shares of all nonzero finite ones.

    Attributes:
        scale: the loss scale.
        zero: the share that becomes zero.
        subnormal: the share that becomes subnormal and loses bits.
        infinite: the share that overflows.
    """

    scale: float
    zero: float
    subnormal: float
    infinite: float


@dataclasses.dataclass(frozen=True)
class LeafUnderflow:
    """What becomes of the gradients of one parameter.

    Attributes:
        path: of the parameter, "/"-joined.
        numbers: how many of its gradients are nonzero and finite.
        largest: the largest of their magnitudes, without a loss scale; 0 if there are none.
        zero: the share of them that becomes zero without a loss scale.
        zero_if_scaled: that with the recommended one.
        nonfinite: how many gradients are infinite or NaN.
    """

    path: str
    numbers: int
    largest: float
    zero: float
    zero_if_scaled: float
    nonfinite: int


@dataclasses.dataclass(frozen=True, eq=False)
class UnderflowReport:
    """What `underflow_report` found; prints as tables with a histogram, with `rich.print` too.

    All numbers are of true gradients: those of the loss without a scale.

    Attributes:
        dtype: the format.
        headroom: how many doublings of the largest gradient the recommended scale leaves room for.
        histogram: int64 vector; `histogram[i]` gradients have a magnitude from `2**(i - 149)` to below twice that.
        zeros: how many are zero.
        nonfinite: how many are infinite or NaN.
        smallest: the smallest magnitude of those that are nonzero and finite; 0 if there are none.
        largest: the largest.
        recommended_scale: the loss scale, a power of two; 1 if none is needed.
        shares: what becomes of the gradients without a scale, with the present one and with the recommended one.
        leaves: the same for each parameter, the one that loses most comes first.
    """

    dtype: np.dtype
    headroom: int
    histogram: np.ndarray
    zeros: int
    nonfinite: int
    smallest: float
    largest: float
    recommended_scale: float
    shares: tuple[ScaledShares, ...]
    leaves: tuple[LeafUnderflow, ...]

    def shares_at(self, scale: float) -> ScaledShares:
        """What becomes of the gradients at one of the scales of `shares`."""
        return next(shares for shares in self.shares if shares.scale == scale)

    @property
    def is_enough(self) -> bool:
        """Whether at the recommended scale nothing overflows, and at most 1% of the gradients become zero."""
        best = self.shares_at(self.recommended_scale)
        return best.infinite == 0 and best.zero <= _TOLERABLE

    @property
    def verdict(self) -> str:
        """What to do, in a sentence or two."""
        bad = [repr(leaf.path) for leaf in self.leaves if leaf.nonfinite]
        if not bad:
            return self._advice()
        named = _errors.listed(bad, _LISTED)
        return f"{self._advice()} Infinite or NaN already, and left out: {self.nonfinite:,}, in {named}."

    def _advice(self) -> str:
        scale, best = self.recommended_scale, self.shares_at(self.recommended_scale)
        if not self.histogram.any():
            return "There is no nonzero finite gradient, so nothing can be said."
        if _has_range_of_float32(self.dtype):
            return f"No loss scale is needed: {self.dtype} has the exponents of float32."
        if not self.is_enough:
            return (
                f"No loss scale is enough: at {_scale_name(scale)}, {_percent(best.zero)} of the gradients become "
                f"zero. Their range is wider than that of {self.dtype}: use bfloat16."
            )
        if scale == 1 and not best.subnormal:
            return f"No loss scale is needed: {self.dtype} holds all of these gradients as normal numbers."
        return (
            f"A loss scale of {_scale_name(scale)} is recommended; {_percent(best.zero)} of the gradients become zero "
            f"at it, {_percent(self.shares_at(1.0).zero)} without."
        )

    def as_dict(self) -> dict[str, Any]:
        """All of it as dictionaries, lists, strings and numbers, for JSON; the histogram by exponents that occur."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        rows = zip(exponents.EXPONENTS, self.histogram.tolist(), strict=True)
        return found | {
            "dtype": str(self.dtype),
            "histogram": {str(exponent): count for exponent, count in rows if count},
            "shares": [dataclasses.asdict(shares) for shares in self.shares],
            "leaves": [dataclasses.asdict(leaf) for leaf in self.leaves],
            "is_enough": self.is_enough,
            "verdict": self.verdict,
        }

    def __str__(self) -> str:
        """The tables as text."""
        parts = [f"{title}\n{_tables.text_table(lines, right)}" for title, lines, right in self._tables()]
        return "\n\n".join([*parts, self.verdict])

    def __rich__(self) -> Any:
        """The tables as Rich shows them; only Rich calls this, so it is there."""
        from rich.console import Group
        from rich.text import Text

        tables = [_tables.rich_table(title, lines, right) for title, lines, right in self._tables()]
        return Group(*tables, Text(self.verdict))

    def _tables(self) -> Iterator[tuple[str, list[tuple[str, ...]], tuple[int, ...]]]:
        numbers = int(self.histogram.sum())
        found = f"{numbers:,} nonzero, {self.zeros:,} zero, {self.nonfinite:,} infinite or NaN"
        yield f"Gradients in {self.dtype}: {found}", self._histogram_lines(), (1,)
        rows = [
            (_scale_name(s.scale), *[_percent(share) for share in (s.zero, s.subnormal, s.infinite)])
            for s in self.shares
        ]
        yield "By loss scale", [("scale", "become zero", "subnormal", "infinite"), *rows], (1, 2, 3)
        header = ("parameter", "largest", "become zero", f"at {_scale_name(self.recommended_scale)}", "infinite or NaN")
        rows = [
            (
                leaf.path,
                f"{leaf.largest:.3g}",
                _percent(leaf.zero),
                _percent(leaf.zero_if_scaled),
                f"{leaf.nonfinite:,}",
            )
            for leaf in self.leaves[:_LISTED]
        ]
        shown = f"{len(rows)} of {len(self.leaves)} parameters, the worst first"
        yield shown, [header, *rows], (1, 2, 3, 4)

    def _histogram_lines(self) -> list[tuple[str, ...]]:
        """A bar for each power of two, or for a few together; none before the first or after the last there is."""
        header = ("magnitude", "share", f"in {self.dtype}", "")
        (occupied,) = np.nonzero(self.histogram)
        if not occupied.size:
            return [header]
        together = math.ceil((occupied[-1] + 1 - occupied[0]) / _BARS)
        starts = range(occupied[0], occupied[-1] + 1, together)
        counts = np.add.reduceat(self.histogram[: occupied[-1] + 1], list(starts))
        lines: list[tuple[str, ...]] = [header]
        for start, count in zip(starts, counts.tolist(), strict=True):
            exponent = exponents.EXPONENTS[start]
            bar = "#" * math.ceil(_WIDTH * count / counts.max())
            lines.append((f"2^{exponent}", _percent(count / counts.sum()), self._place(exponent), bar))
        return lines

    def _place(self, exponent: int) -> str:
        """What becomes of most numbers from 2**exponent to twice that."""
        middle = math.ldexp(1.5, exponent)
        span = exponents.range_of(self.dtype, "underflow_report")
        if middle <= span.zero_up_to:
            return "zero"
        if middle < span.normal_from:
            return "subnormal"
        return "infinite" if middle >= span.infinite_from else ""


def underflow_report(
    grads: Any, dtype: DTypeLike = "f16", *, loss_scale: LossScale | ArrayLike = 1.0, headroom: int = 4
) -> UnderflowReport:
    """Says how much of some gradients a format would lose, and recommends a loss scale.

    The recommended scale is the largest power of two (up to 2**24, the largest of `DynamicLossScale`) at which the
    largest gradient stays finite, with room for `headroom` more doublings: `largest * scale * 2**headroom` still
    rounds to a finite number. It is 1 if the format holds all of them so without a scale, as normal numbers, or has
    the exponents of float32. Where even at that scale more than 1% of the gradients become zero, their range is wider
    than the format's, and the report says so.

    Gradients that a float16 backward pass has made zero look like zeros: give those of a float32 or bfloat16 backward
    pass, or of a scaled loss. Several batches say more than one: a list of their gradients is a tree too.

    Args:
        grads: a tree of gradients, concrete arrays; leaves that are not floating are left out.
        dtype: the format: f16, bf16, f32, float8_e4m3fn or float8_e5m2.
        loss_scale: by which the loss of these gradients was multiplied, as `mpx.value_and_grad` does: a loss scale
            (`mpx.get_loss_scale(opt_state)`) or a number, a power of two.
        headroom: how many doublings of the largest gradient the scale leaves room for.

    Returns:
        An `UnderflowReport`, which `print` and `rich.print` show as tables; `as_dict()` goes into JSON.

    Raises:
        TypeError: inside `jax.jit`.
        ValueError: if `dtype` is none of these, `loss_scale` no power of two or no number, `headroom` not an integer
            of 0 or more, or the tree has no floating leaf.

    Example:
        >>> grads = {"embed": jnp.array([2.0**-30, 2.0**-20]), "head": jnp.array([2.0**-8, 2.0**-10])}
        >>> report = underflow_report(grads, "f16")
        >>> report.recommended_scale == 2.0**19  # 2**-8 becomes 2**11, with room up to 2**15
        True
        >>> [(shares.scale, shares.zero) for shares in report.shares]
        [(1.0, 0.25), (524288.0, 0.0)]
        >>> print(underflow_report(grads, "bf16").verdict)
        No loss scale is needed: bfloat16 has the exponents of float32.

    References:
        Micikevicius et al. 2018, Mixed Precision Training (arXiv 1710.03740), section 3.2: the scale is chosen from the
        largest gradient, such that their product is finite in float16.
    """
    span = exponents.range_of(dtype, "underflow_report")
    if not _errors.is_integer(headroom) or headroom < 0:
        raise ValueError(f"`underflow_report`: `headroom` must be an integer of 0 or more, but got {headroom!r}.")
    paths, arrays = zip(*_concrete_leaves(grads), strict=True)
    carried = _carried_scale(loss_scale)
    summaries = [_summary(x) for x in arrays]
    numbers = np.array([summary.counts.sum() for summary in summaries])
    smallest = min((summary.smallest for summary in summaries if summary.largest), default=0.0) / carried
    largest = max(summary.largest for summary in summaries) / carried
    recommended = _recommended_scale(span, smallest, largest, int(headroom))
    scales = tuple(sorted({1.0, carried, recommended}))
    spans = tuple([span.scaled(scale / carried) for scale in scales])
    # By leaf, by scale, and by what becomes of the numbers.
    losses = np.array(
        [jax.tree.map(lambda parts: int(parts.sum(dtype=np.int64)), jax.device_get(_losses(x, spans))) for x in arrays]
    )
    by_scale = losses.sum(axis=0) / max(1, numbers.sum())
    zero = losses[:, :, 0] / np.maximum(1, numbers)[:, None]
    leaves = [
        LeafUnderflow(
            path=_trees.path_string(path),
            numbers=int(numbers[i]),
            largest=summary.largest / carried,
            zero=float(zero[i, scales.index(1.0)]),
            zero_if_scaled=float(zero[i, scales.index(recommended)]),
            nonfinite=summary.nonfinite,
        )
        for i, (path, summary) in enumerate(zip(paths, summaries, strict=True))
    ]
    return UnderflowReport(
        dtype=span.dtype,
        headroom=int(headroom),
        histogram=_shifted(np.sum([summary.counts for summary in summaries], axis=0), carried),
        zeros=sum(summary.zeros for summary in summaries),
        nonfinite=sum(summary.nonfinite for summary in summaries),
        smallest=smallest,
        largest=largest,
        recommended_scale=recommended,
        shares=tuple(ScaledShares(s, *map(float, row)) for s, row in zip(scales, by_scale, strict=True)),
        leaves=tuple(sorted(leaves, key=lambda leaf: (leaf.nonfinite == 0, -leaf.zero, -leaf.zero_if_scaled))),
    )


class _Summary(NamedTuple):
    """Of one leaf as it came.

    Attributes:
        counts: int64 vector, how many numbers there are of each power of two.
        zeros: how many are zero.
        nonfinite: how many are infinite or NaN.
        smallest: the smallest magnitude of those that are neither; 0 if there are none.
        largest: the largest.
    """

    counts: np.ndarray
    zeros: int
    nonfinite: int
    smallest: float
    largest: float


def _summary(x: jax.Array) -> _Summary:
    histograms, smallest, largest = jax.device_get(_summarize(x))
    zeros, *counts, nonfinite = histograms.reshape(-1, histograms.shape[-1]).sum(axis=0, dtype=np.int64)
    counts = np.array(counts)
    if not counts.any():
        smallest = largest = np.zeros_like(largest)
    floats = np.float64 if largest.dtype == np.uint64 else np.float32
    return _Summary(counts, int(zeros), int(nonfinite), float(smallest.view(floats)), float(largest.view(floats)))


@jax.jit
def _summarize(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Partial histograms, and the bits of the smallest and the largest magnitude that is nonzero and finite."""
    magnitudes = exponents.magnitudes_of(x)
    counted = exponents.is_nonzero(magnitudes) & exponents.is_finite(magnitudes)
    none, most = (magnitudes.dtype.type(number) for number in (0, np.iinfo(magnitudes.dtype).max))
    smallest = jnp.min(jnp.where(counted, magnitudes, most), initial=most)
    largest = jnp.max(jnp.where(counted, magnitudes, none), initial=none)
    return exponents.partial_histograms(magnitudes), smallest, largest


@functools.partial(jax.jit, static_argnums=1)
def _losses(x: jax.Array, spans: tuple[exponents.Range, ...]) -> list[list[jax.Array]]:
    """How many numbers become zero, subnormal and infinite in each range."""
    magnitudes = exponents.magnitudes_of(x)
    kinds = lambda span: (span.underflows, span.becomes_subnormal, span.overflows)
    return [[exponents.partial_counts(which(magnitudes)) for which in kinds(span)] for span in spans]


def _concrete_leaves(grads: Any) -> list[tuple[_trees.Path, jax.Array]]:
    """The floating leaves with their paths."""
    leaves = [(path, leaf) for path, leaf in _trees.leaves_by_path(grads).items() if _trees.is_floating(leaf)]
    if any(isinstance(leaf, (Tracer, jax.ShapeDtypeStruct)) for _, leaf in leaves):
        raise TypeError(
            "`underflow_report` reads numbers, which a traced program does not have yet: call it outside of `jax.jit`, "
            "on gradients that a step has returned. Inside, `mpx.monitor` measures them."
        )
    if not leaves:
        raise ValueError("`underflow_report` needs gradients, but the tree has no floating array in it.")
    return leaves


def _carried_scale(loss_scale: Any) -> float:
    """The scale that gradients were multiplied by, as a number."""
    number = loss_scale.loss_scale if isinstance(loss_scale, LossScale) else loss_scale
    is_scalar = not isinstance(number, Tracer) and np.ndim(number) == 0
    is_number = is_scalar and jnp.issubdtype(np.asarray(number).dtype, np.number)
    scale = float(np.asarray(number)) if is_number else math.nan
    if not is_power_of_two(scale):
        raise ValueError(
            "`underflow_report`: `loss_scale` must be a loss scale or a number, concrete and a power of two, but got "
            f"{loss_scale!r}."
        )
    return scale


def _recommended_scale(span: exponents.Range, smallest: float, largest: float, headroom: int) -> float:
    """1 if no scale is needed, else the largest power of two that leaves the head-room."""
    fits = lambda scale: math.ldexp(largest, headroom) * scale < span.infinite_from
    if not largest or _has_range_of_float32(span.dtype) or (fits(1.0) and smallest >= span.normal_from):
        return 1.0
    scale = _MAX_SCALE
    while not fits(scale):
        scale /= 2
    return scale


def _has_range_of_float32(dtype: np.dtype) -> bool:
    return jnp.finfo(dtype).maxexp == np.finfo(np.float32).maxexp


def _shifted(histogram: np.ndarray, scale: float) -> np.ndarray:
    """The histogram of numbers divided by a power of two; beyond the outermost exponents they are counted there."""
    shifted = np.zeros_like(histogram)
    places = np.arange(len(histogram)) - (math.frexp(scale)[1] - 1)
    np.add.at(shifted, np.clip(places, 0, len(histogram) - 1), histogram)
    return shifted


def _scale_name(scale: float) -> str:
    return "1" if scale == 1 else f"2**{math.frexp(scale)[1] - 1}"


def _percent(share: float) -> str:
    """Such that what is not nothing does not look so."""
    return "0" if share == 0 else f"{100 * share:.3g}%"
