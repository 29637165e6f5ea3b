"""`explain`: which part of a function runs in which precision under `autocast`."""

import dataclasses
import math
import os
import pathlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core
from jax.extend import source_info_util
from jax.extend.core import JaxprEqn
from jax.typing import DTypeLike

from mpx import _tables, _trees
from mpx._autocast import contraction
from mpx._autocast.plan import Step
from mpx._autocast.rules import DEFAULT_RULES, Rule
from mpx._autocast.transform import autocast_of, make_autocast
from mpx._fp8 import Fp8
from mpx._jaxprs import CONTRACTIONS, dtype_of, open_jaxpr
from mpx._policy import Policy

_WIDE = {"f32", "f64", "-", "complex64", "complex128"}
_SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64"}


@dataclasses.dataclass(frozen=True)
class Row:
    """Operations of one source line that run in one way.

    Attributes:
        where: the line of the user's code, `file:line (function)`.
        operations: names of the primitives.
        shapes: those of the operands of a contraction; empty for other operations.
        runs_in: the dtype or algorithm.
        reason: why it is not the compute dtype; empty where it is.
        count: how often they run in a call of the function. A `while` loop counts as one iteration, and all branches of
            a `cond` count.
        flops: floating-point operations of all runs together. Operations other than contractions take one an element.
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
    """The tables that `explain` returns; they print, with `rich.print` too.

    Attributes:
        contractions: the matrix products and convolutions, narrowed or not, in the order of the program.
        others: the other floating-point operations that the table narrows or keeps, by source line.
    """

    contractions: tuple[Row, ...]
    others: tuple[Row, ...]

    @property
    def narrowed_share(self) -> float:
        """The share of the contractions' FLOPs that run narrowed, from 0 to 1; NaN if there are none."""
        total = sum(row.flops for row in self.contractions)
        narrowed = sum(row.flops for row in self.contractions if row.runs_in not in _WIDE)
        return narrowed / total if total else math.nan

    def _parts(self) -> Iterator[_tables.Table]:
        share = "of no FLOPs" if self.contractions else "none"
        if not math.isnan(self.narrowed_share):
            share = f"{self.narrowed_share:.1%} of their FLOPs narrowed"
        lines = [("where", "operation", "operands", "runs in", "why", "count", "FLOPs")]
        for r in self.contractions:
            why = r.reason or "narrowed"
            lines.append((r.where, r.operations, r.shapes, r.runs_in, why, f"{r.count:,}", f"{r.flops:,}"))
        if not any(row.reason for row in self.contractions):
            lines = [(*line[:4], *line[5:]) for line in lines]  # all are narrowed, as the title says
        yield _tables.Table(f"Contractions: {share}", lines, right=(-1, -2))
        lines = [("where", "operations", "run in", "count", "FLOPs")]
        lines += [(r.where, r.operations, r.runs_in, f"{r.count:,}", f"{r.flops:,}") for r in self.others]
        if self.others:
            yield _tables.Table("Other operations, by line", lines, right=(-1, -2))


def explain(
    fun: Callable[..., Any],
    policy_or_dtype: Policy | Fp8 | DTypeLike | None = None,
    *,
    rules: Mapping[Any, Rule] | None = None,
) -> Callable[..., Explanation]:
    """Explain what `autocast` does to a function: which contractions it narrows, which it keeps and why, line by line.

    Nothing runs. Explain a gradient (`explain(jax.grad(loss), policy)`) to see the backward pass too.

    Args:
        fun: a function, or one that `autocast` returned.
        policy_or_dtype: as for `autocast`; None for a function that `autocast` returned.
        rules: as for `autocast`.

    Returns:
        A function of the arguments of `fun`, or of their shapes (`jax.ShapeDtypeStruct`), that returns an
        `Explanation`: rows of source lines with FLOPs, which `print` and `rich.print` show as tables.

    Raises:
        ValueError: if a policy is missing, or given for a function that has its own; at the call, if a shape has a
            dtype of 64 bits and such types are off.

    Example:
        >>> loss = lambda w, x: jax.nn.log_softmax(x @ w).sum()
        >>> explanation = explain(loss, "bf16")(jnp.ones((64, 8)), jnp.ones((4, 64)))
        >>> [(row.operations, row.shapes, row.runs_in, row.flops) for row in explanation.contractions]
        [('dot_general', 'f32[4,64] f32[64,8]', 'bf16', 4096)]
        >>> explanation.narrowed_share
        1.0
    """
    record = autocast_of(fun)
    if record is not None and (policy_or_dtype is not None or rules is not None):
        raise ValueError("`explain` needs a policy or rules only for a function without `autocast`: this one has both.")
    if record is None:
        if policy_or_dtype is None:
            raise ValueError(
                "`explain` needs a policy or a dtype, unless the function is one that `autocast` returned. Add one, "
                "such as 'bf16': `mpx.explain(fun, 'bf16')`, on the command line `--policy bf16`."
            )
        rules = DEFAULT_RULES if rules is None else rules
        record = make_autocast(fun, policy_or_dtype, rules, checkpoint=None, gradient_dtype=None)

    def explained(*args: Any, **kwargs: Any) -> Explanation:
        _require_dtypes_that_are_on((args, kwargs))
        return _summed(_walk(record.trace(args, kwargs).plan.steps))

    return explained


def _require_dtypes_that_are_on(arguments: Any) -> None:
    """Raise for shapes of 64 bits for which JAX would take 32. With NumPy's arrays users expect that of it."""
    off = [
        f"{_trees.path_string(path[1:])} ({_trees.dtype_and_shape(leaf)})"
        for path, leaf in jax.tree.leaves_with_path(arguments)
        if isinstance(leaf, jax.ShapeDtypeStruct) and jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype
    ]
    if off:
        raise ValueError(
            f"`explain`: 64-bit types are off, so that the function would see 32-bit ones for {', '.join(off)}. Set "
            "JAX_ENABLE_X64=1 (`jax.config.update('jax_enable_x64', True)`), or give shapes of 32 bits."
        )


_Placed = tuple[Step, int, tuple[JaxprEqn, ...]]  # a step, how often it runs, and the equations around it


def _walk(steps: Iterable[Step], times: int = 1, outer: tuple[JaxprEqn, ...] = ()) -> Iterator[_Placed]:
    """Yield all steps of a plan and of those inside, also of programs that are kept whole."""
    for step in steps:
        eqn = step.eqn
        inside = [plan.steps for plan in step.plans]
        if not inside and eqn.primitive.name != "pallas_call":
            kept = Step(eqn, "keep", None, (), (), reason=step.reason)
            jaxprs = jex_core.jaxprs_in_params(eqn.params)
            inside = [[kept._replace(eqn=inner) for inner in open_jaxpr(jaxpr).eqns] for jaxpr in jaxprs]
        for steps_inside in inside:
            yield from _walk(steps_inside, times * eqn.params.get("length", 1), (eqn, *outer))
        if not inside:
            yield step, times, outer


def _summed(steps: Iterable[_Placed]) -> Explanation:
    """Add up the steps of a line that run in one way."""
    contractions: dict[tuple[str, str, str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    others: dict[tuple[str, str], list[Any]] = defaultdict(lambda: [[], 0, 0])
    for step, times, outer in steps:
        eqn, where, runs_in = step.eqn, line_of(step.eqn, outer), _runs_in(step)
        if eqn.primitive.name in CONTRACTIONS:
            shapes = " ".join(map(_shape, eqn.invars[:2]))
            found = contractions[where, eqn.primitive.name, shapes, runs_in, step.reason or ""]
            found[0] += times
            found[1] += times * contraction.flops(eqn)
        elif _is_arithmetic(eqn):
            found = others[where, runs_in]
            found[0].append(eqn.primitive.name)
            found[1] += times
            found[2] += times * max(v.aval.size for v in [*eqn.invars, *eqn.outvars])
    return Explanation(
        tuple(Row(*key, *numbers) for key, numbers in contractions.items()),
        tuple(
            Row(where, ", ".join(dict.fromkeys(names)), "", runs_in, "", count, flops)
            for (where, runs_in), (names, count, flops) in others.items()
        ),
    )


def _is_arithmetic(eqn: JaxprEqn) -> bool:
    operands = [*eqn.invars, *eqn.outvars]
    has_floats = any(jnp.issubdtype(dtype_of(v), jnp.floating) for v in operands)
    is_moved = DEFAULT_RULES.get(eqn.primitive.name) == "follow"
    return has_floats and not is_moved and all(hasattr(v.aval, "size") for v in operands)


def _runs_in(step: Step) -> str:
    if step.compute is not None:
        return step.compute.name
    dtypes = {dtype_of(v) for v in step.eqn.invars if jnp.issubdtype(dtype_of(v), jnp.inexact)}
    return " ".join(sorted(_SHORT.get(str(dtype), str(dtype)) for dtype in dtypes)) or "-"


def _shape(v: Any) -> str:
    dtype = str(np.dtype(v.aval.dtype)) if hasattr(v.aval, "dtype") else "?"
    return f"{_SHORT.get(dtype, dtype)}[{','.join(map(str, v.aval.shape))}]"


def line_of(eqn: JaxprEqn, outer: tuple[JaxprEqn, ...]) -> str:
    """Return where an operation stands in the user's code: its own line, else that of an operation around it."""
    return next(filter(None, map(_users_line, (eqn, *outer))), None) or source_info_util.summarize(eqn.source_info)


def _users_line(eqn: JaxprEqn) -> str | None:
    """Return the line of the user's own code: the innermost one that is in no installed package, if any."""
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
