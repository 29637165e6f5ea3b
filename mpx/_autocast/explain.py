"""`explain`: the precision of each line of a function under `autocast`."""

import dataclasses
import math
import os
import pathlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import source_info_util
from jax.extend.core import JaxprEqn
from jax.typing import DTypeLike

from mpx import _tables
from mpx._autocast import contraction
from mpx._autocast.plan import PlacedStep, Settings, Step, walk
from mpx._autocast.precision import FP8
from mpx._autocast.rules import DEFAULT_RULES
from mpx._autocast.transform import autocast, autocast_of
from mpx._fp8 import Fp8
from mpx._jaxprs import dtype_of
from mpx._policy import Policy
from mpx._primitives import facts_of

_WIDE = {"f32", "f64", "-", "complex64", "complex128"}
_SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64"}


@dataclasses.dataclass(frozen=True)
class Row:
    """Contractions of one source line that run in the same precision.

    Attributes:
        where: the line of the user's code, `file:line (function)`.
        operations: the name of the primitive.
        shapes: the operands' shapes.
        runs_in: the dtype or algorithm.
        reason: why it is not the precision asked for; empty if it is.
        count: how often they run in one call of the function. A `while` loop counts as
            one iteration; every branch of a `cond` counts.
        flops: floating-point operations of all runs together.
    """

    where: str
    operations: str
    shapes: str
    runs_in: str
    reason: str
    count: int
    flops: int


@dataclasses.dataclass(frozen=True)
class Explanation(_tables.Result):
    """The table that `explain` returns. `print` shows it.

    Attributes:
        contractions: the matrix products and convolutions, narrowed or not, in the
            order of the program.
        others: how many other floating-point operations run; float32 ones, if no table
            of the user's narrows them.
        asked_for: the precision asked for, such as `bf16` or `fp8`.
        wide_gradients: why gradients of weights are unrounded float32 sums
            (`reduce_dtype`); empty if they are not.
    """

    contractions: tuple[Row, ...]
    others: int
    asked_for: str
    wide_gradients: str = ""

    @property
    def narrowed_share(self) -> float:
        """The share of the contractions' FLOPs that run narrowed, FP8 included, from 0
        to 1; NaN if there are none.
        """
        return self._share(lambda row: not _WIDE.issuperset(row.runs_in.split()))

    @property
    def fp8_share(self) -> float:
        """The share of the contractions' FLOPs that run in 8-bit floats, from 0 to 1;
        NaN if there are none.
        """
        return self._share(lambda row: row.runs_in == FP8.name)

    def _share(self, counts: Callable[[Row], bool]) -> float:
        total = sum(row.flops for row in self.contractions)
        counted = sum(row.flops for row in self.contractions if counts(row))
        return counted / total if total else math.nan

    def _parts(self) -> Iterator[_tables.Table]:
        share = "of no FLOPs" if self.contractions else "none"
        if not math.isnan(self.narrowed_share):
            share = f"{self.narrowed_share:.1%} of their FLOPs narrowed"
            if self.asked_for == FP8.name or self.fp8_share:
                share += f", {self.fp8_share:.1%} to FP8"
        if self.others:
            share += f"; {self.others:,} other operations"
        if self.wide_gradients:
            share += (
                "; gradients of weights are float32 sums, because"
                f" {self.wide_gradients}"
            )
        lines = [("where", "operation", "operands", "runs in", "why", "count", "FLOPs")]
        for row in map(dataclasses.astuple, self.contractions):
            *words, reason, count, flops = row
            lines.append((*words, reason or "narrowed", f"{count:,}", f"{flops:,}"))
        if not any(row.reason for row in self.contractions):
            # The title says that all are narrowed.
            lines = [(*line[:4], *line[5:]) for line in lines]
        yield _tables.Table(f"Contractions: {share}", lines, right=(-1, -2))


def explain(
    fun: Callable[..., Any], policy_or_dtype: Policy | Fp8 | DTypeLike | None = None
) -> Callable[..., Explanation]:
    """Explain what `autocast` does to a function: which contractions it narrows, which
    it keeps and why, line by line.

    Nothing runs. Explain a gradient (`explain(jax.grad(loss), policy)`) to see the
    backward pass too.

    Args:
        fun: a function, or one that `autocast` returned.
        policy_or_dtype: as for `autocast`; None for a function that `autocast`
            returned.

    Returns:
        A function that takes the arguments of `fun`, or their shapes
        (`jax.ShapeDtypeStruct`), and returns an `Explanation`: source lines with FLOPs,
        which `print` shows as a table.

    Raises:
        ValueError: if a policy is missing, or given for a function that has its own.

    Example:
        >>> loss = lambda w, x: jax.nn.log_softmax(x @ w).sum()
        >>> explanation = explain(loss, "bf16")(jnp.ones((64, 8)), jnp.ones((4, 64)))
        >>> [
        ...     (row.operations, row.shapes, row.runs_in, row.flops)
        ...     for row in explanation.contractions
        ... ]
        [('dot_general', 'f32[4,64] f32[64,8]', 'bf16', 4096)]
        >>> explanation.narrowed_share
        1.0
    """
    record = autocast_of(fun)
    if policy_or_dtype is not None:
        if record is not None:
            raise ValueError(
                "`explain` takes no policy for a function that `autocast` returned: it"
                " has its own."
            )
        record = autocast_of(autocast(fun, policy_or_dtype))
    if record is None:
        raise ValueError(
            "`explain` needs a policy or a dtype for a function that `autocast` did not"
            " return, such as `mpx.explain(fun, 'bf16')`, or `--policy bf16` on the"
            " command line."
        )
    trace, settings = record.trace, record.settings

    def explained(*args: Any, **kwargs: Any) -> Explanation:
        return _summed(walk(trace(args, kwargs).plan.steps), settings)

    return explained


def _why_wide_gradients(settings: Settings) -> str:
    if not settings.has_wide_gradients:
        return ""
    if settings.reduce_dtype is not None:
        return "`reduce_dtype` is float32"
    return (
        f"{jax.device_count()} devices are in sight; on one they are rounded to"
        f" {settings.precision.name}"
    )


def _summed(steps: Iterable[PlacedStep], settings: Settings) -> Explanation:
    """Add up the steps of each line that run in the same precision."""
    counts: Counter[tuple[str, str, str, str, str]] = Counter()
    flops, others = counts.copy(), 0
    for step, times, outer in steps:
        eqn = step.eqn
        if facts_of(eqn).contraction:
            row = (
                _source_line(eqn, outer),
                eqn.primitive.name,
                " ".join(map(_operand, eqn.invars[:2])),
                _runs_in(step),
                step.reason or "",
            )
            counts[row] += times
            flops[row] += times * contraction.flops(eqn)
        elif _is_arithmetic(eqn):
            others += times
    return Explanation(
        tuple(Row(*row, count, flops[row]) for row, count in counts.items()),
        others,
        settings.precision.name,
        _why_wide_gradients(settings),
    )


def _is_arithmetic(eqn: JaxprEqn) -> bool:
    operands = [*eqn.invars, *eqn.outvars]
    has_floats = any(jnp.issubdtype(dtype_of(v), jnp.floating) for v in operands)
    is_moved = DEFAULT_RULES.get(eqn.primitive.name) == "follow"
    return (
        has_floats and not is_moved and all(hasattr(v.aval, "size") for v in operands)
    )


def _runs_in(step: Step) -> str:
    if not step.precision.is_plain and step.action != "map":
        return step.precision.name
    dtypes = {
        dtype_of(v) for v in step.eqn.invars if jnp.issubdtype(dtype_of(v), jnp.inexact)
    }
    return " ".join(sorted(map(_short_name, dtypes))) or "-"


def _operand(v: Any) -> str:
    return f"{_short_name(v.aval.dtype)}[{','.join(map(str, v.aval.shape))}]"


def _short_name(dtype: Any) -> str:
    return _SHORT.get(str(dtype), str(dtype))


def _source_line(eqn: JaxprEqn, outer: tuple[JaxprEqn, ...]) -> str:
    """Return the line of the user's code for an operation, or for the nearest operation
    around it that has one.
    """
    found = filter(None, map(_users_line, (eqn, *outer)))
    return next(found, None) or source_info_util.summarize(eqn.source_info)


def _users_line(eqn: JaxprEqn) -> str | None:
    """Return the innermost line that is not in an installed package, if any."""
    for frame in getattr(eqn.source_info.traceback, "frames", ()):
        path = pathlib.Path(frame.file_name)
        is_installed = {"site-packages", "dist-packages"} & {*path.parts}
        if not (is_installed or path.is_relative_to(_OWN_FOLDER)):
            name = frame.function_name.rsplit(".<locals>.")[-1]
            return f"{_short_path(path)}:{frame.line_num} ({name})"
    return None


_OWN_FOLDER = pathlib.Path(__file__).parents[1]


def _short_path(path: pathlib.Path) -> str:
    short = os.path.relpath(path)
    return str(path) if short.startswith("..") else short
