"""`advise`: which leaves and contractions need float32, found out by measurement."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike

from mpx import _errors, _tables, _trees
from mpx._autocast import compute
from mpx._autocast.rules import DEFAULT_RULES
from mpx._autocast.transform import Autocast, autocast_of, make_autocast
from mpx._loss_scale import LossScale, NoOpLossScale, require_powers_of_two
from mpx._policy import Policy, as_policy
from mpx.tools.advise.candidates import Groups, candidates_of, fewest, lines_of, with_overrides
from mpx.tools.advise.study import Candidate, Errors, Study

_F32 = np.dtype(np.float32)
_BAR = 10  # characters
_RIGHT = (1, 2, 3, 5, 6)  # columns of the table that hold numbers


@dataclasses.dataclass(frozen=True)
class AdviceRow:
    """What can be kept in float32 by one step, and the error that lowering it alone causes.

    Attributes:
        name: the path of a leaf, or that of several with `*` for numbers; of a contraction `file:line (function)`.
        kind: `"leaf"`: leaves and the contractions with them, which an override keeps in float32. `"contraction"`:
            those of one source line that no leaf reaches as it is, such as the logits of attention, which
            `full_precision` keeps.
        pattern: the regular expression of the override; empty for a contraction.
        loss_error: relative error of the loss if this is lowered and all else is float32.
        gradient_error: that of the gradient.
        share: of the sum of the squares of all rows' errors. Roundings that know nothing of each other add up so.
        bytes: how many more its leaves take in float32 than as the policy stores them.
        flops: of the contractions that run in float32 then, in a call of the loss; a gradient has about twice as many
            more.
        is_kept: whether the advice is to keep it in float32.
    """

    name: str
    kind: Literal["leaf", "contraction"]
    pattern: str
    loss_error: float
    gradient_error: float
    share: float
    bytes: int
    flops: int
    is_kept: bool

    @property
    def error(self) -> float:
        """The larger one of the two errors, by which rows are ranked."""
        return max(self.loss_error, self.gradient_error)


@dataclasses.dataclass(frozen=True)
class Advice:
    """What `advise` found; prints as a table, with `rich.print` too.

    Attributes:
        rows: what can be kept in float32, largest error first.
        overrides: pairs (pattern, float32) for the leaves to keep, for `Policy.overrides`.
        lines: source lines whose contractions are to be wrapped in `mpx.full_precision`, because no overrides alone
            meet the bound; empty where overrides do.
        policy: the given policy with the overrides in front of its own.
        bound: that was given.
        before: the errors of the given policy.
        after: those of `policy`, measured with its overrides in effect and nothing wrapped.
        after_lines: those of `policy` with the lines wrapped as well, measured; None without lines.
    """

    rows: tuple[AdviceRow, ...]
    overrides: tuple[tuple[str, DTypeLike], ...]
    lines: tuple[str, ...]
    policy: Policy
    bound: float
    before: Errors
    after: Errors
    after_lines: Errors | None

    @property
    def met(self) -> bool:
        """Whether `policy`, by itself, keeps the errors of loss and gradient at or under the bound."""
        return self.after.worst <= self.bound

    def as_dict(self) -> dict[str, Any]:
        """All of it as dictionaries, lists, strings and numbers; policies and dtypes by their names."""
        as_errors = lambda errors: (
            None if errors is None else {**dataclasses.asdict(errors), "leaves": dict(errors.leaves)}
        )
        return {
            "rows": [{**dataclasses.asdict(row), "error": row.error} for row in self.rows],
            "overrides": [[pattern, str(np.dtype(dtype))] for pattern, dtype in self.overrides],
            "lines": list(self.lines),
            "policy": str(self.policy),
            "bound": self.bound,
            "met": self.met,
            "before": as_errors(self.before),
            "after": as_errors(self.after),
            "after_lines": as_errors(self.after_lines),
        }

    def __str__(self) -> str:
        """What was measured, the table, and what to do, as text."""
        table = _tables.text_table(self._table("#"), right=_RIGHT)
        return "\n".join([*self._summary(), "", table, "", *self._steps()])

    def __rich__(self) -> Any:
        """The same as Rich shows it; only Rich calls this, so it is there."""
        from rich.console import Group
        from rich.text import Text

        title = "What each one does if it alone is lowered"
        table = _tables.rich_table(title, self._table("\N{FULL BLOCK}"), _RIGHT, folded=(0,))
        return Group(*map(Text, self._summary()), table, *map(Text, self._steps()))

    def _summary(self) -> list[str]:
        measured = [("the given policy", self.before)]
        if self.overrides:
            measured.append(("the overrides below", self.after))
        if self.after_lines is not None:
            measured.append(("overrides and full_precision", self.after_lines))
        return [f"Relative errors with {name}: loss {e.loss:.2e}, gradient {e.gradient:.2e}" for name, e in measured]

    def _table(self, mark: str) -> list[tuple[str, ...]]:
        keep_by = {"leaf": "override", "contraction": "full_precision"}
        rows = [
            (
                *(row.name, f"{row.loss_error:.1e}", f"{row.gradient_error:.1e}", f"{row.share:.1%}"),
                *(mark * round(row.share * _BAR), f"{row.bytes:,}", f"{row.flops:,}"),
                keep_by[row.kind] if row.is_kept else "",
            )
            for row in self.rows
        ]
        return [("what", "loss", "gradient", "share", "", "bytes", "FLOPs", "keep by"), *rows]

    def _steps(self) -> list[str]:
        steps = [f"override ({pattern!r}, 'f32')" for pattern, _ in self.overrides]
        steps += [f"mpx.full_precision around the contractions of {line}" for line in self.lines]
        best = self.after if self.after_lines is None else self.after_lines
        if best.worst > self.bound:
            return [*steps, f"The bound {self.bound:g} is not met, even with all of this in float32: {best.worst:.2e}."]
        if not self.met:
            return [
                *steps,
                f"The bound {self.bound:g} is met with these lines in full_precision, not by overrides alone.",
            ]
        return [*steps, f"The bound {self.bound:g} is met."]


def advise(
    loss_fn: Callable[[Any, Any], Any],
    params: Any,
    batch: Any,
    policy: Policy | str,
    *,
    bound: float = 1e-2,
    groups: Groups | None = None,
    loss_scale: LossScale | None = None,
) -> Advice:
    """Finds out which layers need float32: what each one's lowering does to the loss and to the gradient.

    The loss and its gradient are computed in float32 (matrix products at the highest precision), as the policy says,
    and with one thing lowered at a time: the leaves of a group, stored in the policy's dtype and their contractions
    under `autocast` in its compute dtype; or the contractions of a source line that no leaf reaches. These are
    ranked. If the policy's error is above the bound, the leaves with the largest errors are kept in float32 by
    overrides: as few of that order as it takes, found by bisection, each step of which is measured. Where overrides of
    all leaves do not suffice, the ranking with the contractions is bisected instead, and `Advice.lines` says around
    which lines to put `full_precision`.

    What is lowered is real: programs of 16-bit products, and rounded parameters. An override acts in both places: on
    `policy.cast_to_param`, and on the contractions that `autocast(loss_fn, policy)` runs with the leaf. It speaks of
    paths, so an array of the batch with the path of a leaf is kept too. The loss is taken in float32, whatever the
    output dtype, which rounds nothing but the loss itself, once. Elementwise operations that an autocast function's own
    rules lower are lowered in each row with a contraction; nothing that is advised keeps those.

    The cost: a compilation of the gradient for each row, and at most `6 + log2(rows)` more. Rows without contractions,
    such as biases, norms and embeddings that are looked up, share that of the reference. A run takes one evaluation of
    the gradient for each batch, and there is one for each row too. The float32 gradient of each batch is kept on the
    host.

    Args:
        loss_fn: from parameters and a batch to a scalar loss: the float32 function. Of an autocast function its rules,
            `checkpoint` and `gradient_dtype` are used, and `policy` in place of its own.
        params: float32 parameters. Leaves that are no floating arrays are left alone. Take those of a training: errors
            of initial ones say little.
        batch: what `loss_fn` takes: a pytree of arrays and numbers. A `list` is several of those, of the same shapes,
            over which errors are averaged; anything else, a tuple too, is one.
        policy: a policy or its string, whose `param_dtype`, `compute_dtype` and `overrides` are looked into.
        bound: on the relative errors of the loss and of the gradient, both.
        groups: which leaves are ranked, and kept, together: `"leaves"`, each by itself; `"patterns"`, those with equal
            paths but for numbers (`layers/0/kernel` and `layers/1/kernel`); or a function from a path to the name of
            its group. None: patterns for more than 24 leaves.
        loss_scale: by which the loss is multiplied in the policy's precision, and gradients divided in float64, as in
            the training: without one, float16 gradients underflow, and that is what the errors then show.

    Returns:
        An `Advice`: ranked rows, overrides, the policy with them, and the errors before and after. Prints as a table.

    Raises:
        TypeError: if `loss_fn` is no function or does not return a real floating scalar, `policy` is no policy or
            `loss_scale` no loss scale; if parameters are no concrete arrays.
        ValueError: if the parameters have no floating leaves or others than float32; if the bound is not above 0, the
            loss scale no power of two, or `groups` none of the above; if batches are none or of several shapes; if the
            policy lowers nothing of this loss; if the loss or gradient in float32 is infinite or NaN.

    Example:
        >>> loss_fn = lambda params, x: jnp.mean((x @ params["first"] @ params["second"]) ** 2)
        >>> params = {"first": jnp.full((4, 8), 0.3), "second": jnp.full((8, 2), 0.25)}  # 0.25 needs no rounding
        >>> advice = advise(loss_fn, params, jnp.ones((2, 4)), get_policy("params=bf16,compute=f32"), bound=1e-5)
        >>> [(row.name, row.is_kept) for row in advice.rows]
        [('first', True), ('second', False)]
        >>> advice.policy.overrides, advice.met
        ((('^first$', dtype('float32')),), True)

    References:
        Micikevicius et al. 2018, Mixed Precision Training (arXiv 1710.03740), on which parts need float32.
    """
    batches = _checked_batches(batch)
    loss_scale = NoOpLossScale() if loss_scale is None else loss_scale
    policy = as_policy(policy, "advise")
    _check_settings(policy, bound, groups)
    require_powers_of_two(loss_scale, "advise")
    _check_params(params)
    study = Study(_record_of(loss_fn, policy), params, batches, loss_scale)
    candidates = candidates_of(study, policy, groups)
    alone = [study.errors_of_lowering(candidate) for candidate in candidates]
    order = sorted(range(len(candidates)), key=lambda i: -alone[i].worst)
    ranked = [candidates[i] for i in order]
    before = study.errors_with(policy, ())
    kept = fewest(study, policy, ranked, before, bound)
    return _advice(study, policy, bound, before, list(zip(ranked, [alone[i] for i in order], strict=True)), kept)


def _checked_batches(batch: Any) -> list[Any]:
    batches = batch if isinstance(batch, list) else [batch]
    if not batches:
        raise ValueError("`advise` needs a batch, or a list of some, but got an empty list.")
    types = [(jax.tree.structure(b), [str(jax.typeof(leaf)) for leaf in jax.tree.leaves(b)]) for b in batches]
    different = [i for i, kind in enumerate(types) if kind != types[0]]
    if different:
        raise ValueError(
            f"`advise` needs batches of the same structure, shapes and dtypes, but batch {different[0]} differs from "
            "batch 0. A list is several batches: give one that is a list as a tuple, and cut or pad to one shape."
        )
    return batches


def _check_settings(policy: Any, bound: Any, groups: Any) -> None:
    compute.get_compute(policy)  # raises for float64
    if isinstance(bound, bool) or not isinstance(bound, (int, float, np.number)) or not 0 < bound < math.inf:
        raise ValueError(f"`advise`: `bound` must be a relative error above 0, such as 1e-2, but got {bound!r}.")
    if groups not in (None, "leaves", "patterns") and not callable(groups):
        raise ValueError(
            "`advise`: `groups` must be 'leaves', 'patterns', a function from a path to a name, or None, but got "
            f"{groups!r}."
        )


def _check_params(params: Any) -> None:
    floating = [(_trees.path_string(p), x) for p, x in jax.tree.leaves_with_path(params) if _trees.is_floating(x)]
    if not floating:
        raise ValueError(
            "`advise`: `params` have no floating leaves, so there is no gradient. The parameters come first."
        )
    abstract = [path for path, x in floating if isinstance(x, (Tracer, jax.ShapeDtypeStruct))]
    if abstract:
        raise TypeError(
            "`advise` measures, so it needs concrete parameters, but there are no values for "
            f"{_errors.listed(abstract, 3)}. Call it outside of `jax.jit`."
        )
    others = [f"{path}: {_trees.dtype_and_shape(x)}" for path, x in floating if x.dtype != _F32]
    if others:
        raise ValueError(
            "`advise` needs float32 parameters, whose values are the reference, but got "
            f"{_errors.listed(others, 3)}. Give the float32 ones, such as `mpx.master_params(params, opt_state)`: "
            "those of 16 bits have been rounded already."
        )


def _record_of(loss_fn: Any, policy: Policy) -> Autocast:
    """The loss under autocast with this policy, and a float32 result."""
    if not callable(loss_fn):
        raise TypeError(f"`advise` needs a function of parameters and a batch, but got {type(loss_fn).__name__}.")
    given = autocast_of(loss_fn) or make_autocast(loss_fn, policy, DEFAULT_RULES, checkpoint=None, gradient_dtype=None)
    settings = dataclasses.replace(given.settings, compute=compute.get_compute(policy))
    return Autocast(given.fun, settings, policy.with_output_dtype(_F32), given.checkpoint)


def _advice(
    study: Study,
    policy: Policy,
    bound: float,
    before: Errors,
    ranked: list[tuple[Candidate, Errors]],
    kept: list[Candidate],
) -> Advice:
    shares = _shares([errors.worst for _, errors in ranked])
    rows = tuple(
        AdviceRow(
            name=candidate.name,
            kind="contraction" if candidate.pattern is None else "leaf",
            pattern=candidate.pattern or "",
            loss_error=errors.loss,
            gradient_error=errors.gradient,
            share=share,
            bytes=candidate.bytes,
            flops=candidate.flops,
            is_kept=candidate in kept,
        )
        for (candidate, errors), share in zip(ranked, shares, strict=True)
    )
    new, lines = with_overrides(policy, kept), lines_of(kept)
    own = new.overrides[: len(new.overrides) - len(policy.overrides)]
    after = study.errors_with(new, ()) if own else before
    after_lines = study.errors_with(new, lines) if lines else None
    return Advice(rows, own, lines, new, float(bound), before, after, after_lines)


def _shares(errors: list[float]) -> list[float]:
    """Each one's part of the sum of squares; infinite ones have equal parts, and leave nothing for others."""
    infinite = sum(map(math.isinf, errors))
    if infinite:
        return [1 / infinite if math.isinf(error) else 0.0 for error in errors]
    total = math.fsum(error**2 for error in errors)
    return [error**2 / total if total else 0.0 for error in errors]
