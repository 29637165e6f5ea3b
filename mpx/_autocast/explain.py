"""`explain`: which part of a function runs in which precision under `autocast`."""

import dataclasses
import math
import os
import pathlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core
from jax.extend import source_info_util
from jax.typing import DTypeLike

from mpx import _tables
from mpx._autocast import contraction
from mpx._autocast.jaxprs import dtype_of, open_jaxpr
from mpx._autocast.plan import UNKNOWN, Plan, Step
from mpx._autocast.rules import DEFAULT_RULES, REASONS, Rule
from mpx._autocast.transform import autocast_of, make_autocast
from mpx._policy import Policy

_WIDE = {"f32", "f64", "-", "complex64", "complex128"}
_SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64"}


@dataclasses.dataclass(frozen=True)
class Row:
    """Operations of one source line that run in one way.

    Attributes:
        where: the line of the user's code, `file:line (function)`.
        operations: names of the primitives.
        shapes: of the operands of a contraction; empty for other operations.
        runs_in: the dtype or algorithm.
        reason: why it is not the compute dtype; empty where it is.
        count: how often they run in a call of the function. A `while` loop counts as one iteration, and all branches of
            a `cond` count.
        flops: floating-point operations, all runs together; of other operations than contractions one per element.
    """

    where: str
    operations: str
    shapes: str
    runs_in: str
    reason: str
    count: int
    flops: int


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What `explain` found; prints as two tables, with `rich.print` too.

    Attributes:
        contractions: the matrix products and convolutions, lowered or not, in the order of the program.
        others: the other floating-point operations that the table lowers or keeps, by source line.
    """

    contractions: tuple[Row, ...]
    others: tuple[Row, ...]

    @property
    def lowered_share(self) -> float:
        """The share of the contractions' FLOPs that run lowered, from 0 to 1; NaN if there are none."""
        total = sum(row.flops for row in self.contractions)
        lowered = sum(row.flops for row in self.contractions if row.runs_in not in _WIDE)
        return lowered / total if total else math.nan

    def as_dict(self) -> dict[str, Any]:
        """All of it in dictionaries, lists, strings and numbers, for JSON; None for the share of no contractions."""
        return {
            "lowered_share": self.lowered_share if self.contractions else None,
            "contractions": [dataclasses.asdict(row) for row in self.contractions],
            "others": [dataclasses.asdict(row) for row in self.others],
        }

    def __str__(self) -> str:
        """The tables as text."""
        return "\n\n".join(f"{title}\n{_tables.text_table(lines, right=(-1, -2))}" for title, lines in self._tables())

    def __rich__(self) -> Any:
        """The tables as Rich shows them; only Rich calls this, so it is there."""
        from rich.console import Group

        return Group(*[_tables.rich_table(title, lines, right=(-1, -2)) for title, lines in self._tables()])

    def _tables(self) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
        share = f"{self.lowered_share:.1%} of their FLOPs lowered" if self.contractions else "none"
        header = ("where", "operation", "operands", "runs in", "why", "count", "FLOPs")
        yield (
            f"Contractions: {share}",
            [
                header,
                *[
                    (r.where, r.operations, r.shapes, r.runs_in, r.reason, f"{r.count:,}", f"{r.flops:,}")
                    for r in self.contractions
                ],
            ],
        )
        yield (
            "Other operations, by line",
            [
                ("where", "operations", "run in", "count", "FLOPs"),
                *[(r.where, r.operations, r.runs_in, f"{r.count:,}", f"{r.flops:,}") for r in self.others],
            ],
        )


def explain(
    fun: Callable[..., Any],
    policy_or_dtype: Policy | DTypeLike | None = None,
    *,
    rules: Mapping[Any, Rule] | None = None,
) -> Callable[..., Explanation]:
    """Says what `autocast` does to a function: which contractions it lowers, which it keeps and why, line by line.

    Nothing runs. Explain a gradient (`explain(jax.grad(loss), policy)`) to see the backward pass too.

    Args:
        fun: a function, or one that `autocast` returned.
        policy_or_dtype: as for `autocast`; None for a function that `autocast` returned.
        rules: as for `autocast`.

    Returns:
        A function of the arguments of `fun`, or of their shapes (`jax.ShapeDtypeStruct`), that returns an
        `Explanation`: rows of source lines with FLOPs, which `print` and `rich.print` show as tables.

    Raises:
        ValueError: if `policy_or_dtype` is missing, or given for a function that has its own.

    Example:
        >>> loss = lambda w, x: jax.nn.log_softmax(x @ w).sum()
        >>> explanation = explain(loss, "bf16")(jnp.ones((64, 8)), jnp.ones((4, 64)))
        >>> [(row.operations, row.shapes, row.runs_in, row.flops) for row in explanation.contractions]
        [('dot_general', 'f32[4,64] f32[64,8]', 'bf16', 4096)]
        >>> explanation.lowered_share
        1.0
    """
    record = autocast_of(fun)
    if (record is None) == (policy_or_dtype is None):
        raise ValueError(
            "`explain` needs a policy or dtype for a function that is not an autocast function, and none for one that "
            f"is, but got {policy_or_dtype!r}."
        )
    if record is not None and rules is not None:
        raise ValueError("`explain`: `rules` would do nothing for an autocast function, which has its own.")
    rules = DEFAULT_RULES if rules is None else rules
    if record is None:
        # The check above leaves no None here.
        record = make_autocast(fun, cast(Any, policy_or_dtype), rules, checkpoint=None, gradient_dtype=None)

    def explained(*args: Any, **kwargs: Any) -> Explanation:
        contractions: dict[tuple[str, str, str, str, str], list[int]] = defaultdict(lambda: [0, 0])
        others: dict[tuple[str, str], list[Any]] = defaultdict(lambda: [[], 0, 0])
        for step, times, outer in _walk(record.trace(args, kwargs).plan):
            eqn = step.eqn
            where = line_of(eqn, outer)
            if eqn.primitive.name in contraction.CONTRACTIONS:
                shapes = " ".join(_shape(v) for v in eqn.invars[:2])
                found = contractions[where, eqn.primitive.name, shapes, _runs_in(step), step.reason or ""]
                found[0] += times
                found[1] += times * contraction.flops(eqn)
            elif _is_counted(step):
                names, *_ = found = others[where, _runs_in(step)]
                names.append(eqn.primitive.name)
                found[1] += times
                found[2] += times * max(v.aval.size for v in [*eqn.invars, *eqn.outvars])
        return Explanation(
            tuple(Row(*key, count, flops) for key, (count, flops) in contractions.items()),
            tuple(
                Row(where, ", ".join(dict.fromkeys(names)), "", runs_in, "", count, flops)
                for (where, runs_in), (names, count, flops) in others.items()
            ),
        )

    return explained


def _walk(plan: Plan, times: int = 1, outer: tuple[Any, ...] = ()) -> Iterator[tuple[Step, int, tuple[Any, ...]]]:
    """All steps of a plan and of those inside, with how often each one runs."""
    for step in plan.steps:
        inner_times = times * (step.eqn.params["length"] if step.eqn.primitive.name == "scan" else 1)
        inside = list(jex_core.jaxprs_in_params(step.eqn.params))
        if step.plans:
            for inner in step.plans:
                yield from _walk(inner, inner_times, (step.eqn, *outer))
        elif inside and step.eqn.primitive.name != "pallas_call":
            for jaxpr in inside:
                reason = step.reason or REASONS.get(step.eqn.primitive.name, "kept")
                yield from _walk_kept(jaxpr, inner_times, reason, (step.eqn, *outer))
        else:
            yield step, times, outer


def _walk_kept(
    jaxpr: Any, times: int, reason: str, outer: tuple[Any, ...]
) -> Iterator[tuple[Step, int, tuple[Any, ...]]]:
    """The equations of a program that is kept whole."""
    for eqn in open_jaxpr(jaxpr).eqns:
        inside = list(jex_core.jaxprs_in_params(eqn.params))
        for inner in inside:
            yield from _walk_kept(inner, times * eqn.params.get("length", 1), reason, (eqn, *outer))
        if not inside:
            yield Step(eqn, "keep", None, (UNKNOWN,) * len(eqn.invars), (), (), reason), times, outer


def _is_counted(step: Step) -> bool:
    """Whether a step is arithmetic on floating-point numbers."""
    rule = DEFAULT_RULES.get(step.eqn.primitive.name, "keep")
    operands = [*step.eqn.invars, *step.eqn.outvars]
    floats = [v for v in operands if jnp.issubdtype(dtype_of(v), jnp.floating)]
    return rule != "follow" and bool(floats) and all(hasattr(v.aval, "size") for v in operands)


def _runs_in(step: Step) -> str:
    if step.compute is not None:
        return step.compute.name
    dtypes = {dtype_of(v) for v in step.eqn.invars if jnp.issubdtype(dtype_of(v), jnp.inexact)}
    return " ".join(sorted(_SHORT.get(str(dtype), str(dtype)) for dtype in dtypes)) or "-"


def _shape(v: Any) -> str:
    dtype = str(np.dtype(v.aval.dtype)) if hasattr(v.aval, "dtype") else "?"
    return f"{_SHORT.get(dtype, dtype)}[{','.join(map(str, v.aval.shape))}]"


def line_of(eqn: jex_core.JaxprEqn, outer: tuple[jex_core.JaxprEqn, ...]) -> str:
    """Where an operation stands in the user's code: its own line, else that of an operation around it."""
    lines = (line for line in map(_users_line, (eqn, *outer)) if line)
    return next(lines, None) or source_info_util.summarize(eqn.source_info)


def _users_line(eqn: jex_core.JaxprEqn) -> str | None:
    """The line of the user's own code: the innermost one that is in no installed package, if there is one."""
    frames = getattr(eqn.source_info.traceback, "frames", ())
    for frame in frames:
        path = pathlib.Path(frame.file_name)
        if not {"site-packages", "dist-packages"} & set(path.parts) and not path.is_relative_to(_OWN_FOLDER):
            return f"{_short_path(path)}:{frame.line_num} ({frame.function_name.rsplit('.<locals>.')[-1]})"
    return None


_OWN_FOLDER = pathlib.Path(__file__).parents[1]


def _short_path(path: pathlib.Path) -> str:
    short = os.path.relpath(path) if path.is_absolute() else str(path)
    return str(path) if short.startswith("..") else short
