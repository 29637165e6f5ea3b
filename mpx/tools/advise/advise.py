"""`advise`: measure which leaves and contractions need float32."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from mpx import _errors, _trees
from mpx._autocast import compute
from mpx._autocast.rules import DEFAULT_RULES
from mpx._autocast.transform import Autocast, autocast_of, make_autocast
from mpx._loss_scale import LossScale, NoOpLossScale, require_powers_of_two
from mpx._policy import Policy, as_policy
from mpx.tools.advise.advice import Advice
from mpx.tools.advise.candidates import Groups, fewest, rows_of
from mpx.tools.advise.study import Study

_F32 = np.dtype(np.float32)


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
    """Find out which layers need float32: what narrowing each one does to the loss and to the gradient.

    The loss and its gradient are computed in float32 (matrix products at the highest precision), as the policy says,
    and with one thing narrowed at a time: the leaves of a group, stored in the policy's dtype, and their contractions,
    which `autocast` runs in its compute dtype; or the contractions of a source line that no leaf reaches. Where the
    policy's error is above the bound, overrides keep the leaves with the largest errors in float32, as few as bisection
    finds to suffice. Where no overrides suffice, `Advice.lines` names the lines around which to put `full_precision`.

    The loss is taken in float32, whatever the output dtype. Operations that the rules of an autocast function narrow
    are narrowed in each row with a contraction. An override acts on an array of the batch with the same path, too.

    It compiles a gradient for each row with contractions, and at most `6 + log2(rows)` more.

    Args:
        loss_fn: the float32 function from parameters and a batch to a scalar loss. Of an autocast function its rules,
            `checkpoint` and `gradient_dtype` are used, and `policy` in place of its own.
        params: float32 parameters; other leaves are left alone. Take those of a training run: errors of initial
            parameters say little.
        batch: a pytree of arrays and numbers. A `list` is several batches of the same shapes, over which errors are
            averaged; anything else, a tuple too, is one batch.
        policy: a policy or its string, whose `param_dtype`, `compute_dtype` and `overrides` are studied.
        bound: the largest relative error that is allowed, of the loss and of the gradient.
        groups: which leaves are ranked, and kept, together: `"leaves"`, each by itself; `"patterns"`, those with equal
            paths but for numbers (`layers/0/kernel` and `layers/1/kernel`); or a function from a path to the name of
            its group. None: patterns for more than 24 leaves.
        loss_scale: multiplies the loss in the policy's precision, and gradients are divided by it in float64. Give that
            of the training run: without one, float16 gradients underflow, and the errors show that.

    Returns:
        An `Advice`: ranked rows, overrides, the policy with them, and the errors before and after.

    Raises:
        TypeError: if `loss_fn` is no function or does not return a real floating scalar, `policy` is no policy or
            `loss_scale` no loss scale; if parameters are no concrete arrays.
        ValueError: if floating parameters are none or not float32; if the bound is not above 0, the loss scale no power
            of two, or `groups` none of the above; if there is no batch, or batches differ in shape; if the policy
            narrows nothing of this loss; if the loss or gradient in float32 is infinite or NaN.

    Example:
        >>> loss_fn = lambda params, x: jnp.mean((x @ params["first"] @ params["second"]) ** 2)
        >>> params = {"first": jnp.full((4, 8), 0.3), "second": jnp.full((8, 2), 0.25)}  # 0.25 needs no rounding
        >>> advice = advise(loss_fn, params, jnp.ones((2, 4)), "params=bf16,compute=f32", bound=1e-5)
        >>> [(row.name, row.is_kept) for row in advice.rows]
        [('first', True), ('second', False)]
        >>> advice.policy.overrides, advice.met
        ((('^first$', dtype('float32')),), True)

    References:
        Micikevicius et al. 2018, Mixed Precision Training (arXiv 1710.03740), on which parts need float32.
    """
    batches = _checked_batches(batch)
    policy = as_policy(policy, "advise")
    loss_scale = NoOpLossScale() if loss_scale is None else loss_scale
    require_powers_of_two(loss_scale, "advise")
    if isinstance(bound, bool) or not isinstance(bound, (int, float, np.number)) or not 0 < bound < math.inf:
        raise ValueError(f"`advise`: `bound` must be a relative error above 0, such as 1e-2, but got {bound!r}.")
    if groups not in (None, "leaves", "patterns") and not callable(groups):
        raise ValueError(
            "`advise`: `groups` must be 'leaves', 'patterns', a function from a path to a name, or None, but got "
            f"{groups!r}."
        )
    _check_params(params)
    study = Study(_record_of(loss_fn, policy), policy, params, batches, loss_scale)
    ranked = sorted(rows_of(study, groups), key=lambda row: -row.error)
    kept = fewest(study, ranked, bound)
    lines = tuple(row.name for row in kept if row.kind == "contraction")
    shares = _shares([row.error for row in ranked])
    chosen = study.keeping(row.pattern for row in kept if row.kind == "leaf")
    return Advice(
        rows=tuple([dataclasses.replace(r, share=x, is_kept=r in kept) for r, x in zip(ranked, shares, strict=True)]),
        overrides=chosen.overrides[: len(kept) - len(lines)],
        lines=lines,
        policy=chosen,
        bound=float(bound),
        before=study.errors_keeping([]),
        after=study.errors_keeping(kept, with_lines=False),
        after_lines=study.errors_keeping(kept) if lines else None,
    )


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


def _check_params(params: Any) -> None:
    names = _trees.path_names(params)
    floating = [(names[p], x) for p, x in jax.tree.leaves_with_path(params) if _trees.is_floating(x)]
    if not floating:
        raise ValueError(
            "`advise`: `params` have no floating leaves, so no gradient. Parameters are `advise`'s second argument."
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
    """Return the loss under autocast with this policy."""
    if not callable(loss_fn):
        raise TypeError(f"`advise` needs a function of parameters and a batch, but got {type(loss_fn).__name__}.")
    given = autocast_of(loss_fn) or make_autocast(loss_fn, policy, DEFAULT_RULES, checkpoint=None, gradient_dtype=None)
    settings = dataclasses.replace(given.settings, compute=compute.get_compute(policy))
    return Autocast(given.fun, settings, policy, given.checkpoint)


def _shares(errors: list[float]) -> list[float]:
    """Return each one's part of the sum of squares; infinite ones have equal parts, and leave nothing for others."""
    largest = max(errors) or 1.0
    squares = [1.0 if error == largest else (error / largest) ** 2 for error in errors]
    return [square / (math.fsum(squares) or 1.0) for square in squares]
