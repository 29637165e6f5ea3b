"""`advise`: measure which leaves need float32."""

import bisect
import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax
import numpy as np
from jax.core import Tracer

from mpx import _errors, _trees
from mpx._loss_scale import LossScale, NoOpLossScale, require_powers_of_two
from mpx._policy import Policy, as_policy
from mpx.tools.advise.advice import Advice, AdviceRow
from mpx.tools.advise.study import Study

_F32 = np.dtype(np.float32)
_FEW_LEAVES = 24
_DIGITS = "[0-9]+"

Groups = Literal["leaves", "patterns"] | Callable[[str], str]


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

    The loss and its gradient are computed in float32 (matrix products at the highest precision), then as a training run
    under the policy computes them, with more or fewer leaves kept in float32 by overrides. A leaf that is kept is
    stored in float32, and so are its contractions. Where the policy's error is above the bound, overrides keep the
    leaves with the largest errors, as few as bisection finds to suffice.

    The loss is taken in float32, whatever the output dtype. An override acts on an array of the batch with the same
    path, too. It compiles a gradient for each row, and at most `3 + log2(rows)` more.

    Args:
        loss_fn: the float32 function from parameters and a batch to a scalar loss. An autocast function gives its
            rules, `checkpoint` and `reduce_dtype`; `policy` takes the place of its own.
        params: float32 parameters; other leaves are left alone. Take parameters of a training run: errors of initial
            parameters say little.
        batch: a pytree of arrays and numbers. A `list` is several batches of the same shapes, over which errors are
            averaged; anything else, a tuple too, is one batch.
        policy: a policy or its string, whose `param_dtype`, `compute_dtype` and `overrides` are studied.
        bound: the largest relative error that is allowed, of the loss and of the gradient.
        groups: which leaves are ranked, and kept, together: `"leaves"`, each by itself; `"patterns"`, leaves with equal
            paths but for numbers (`layers/0/kernel` and `layers/1/kernel`); or a function from a path to the name of
            its group. None: patterns for more than 24 leaves.
        loss_scale: multiplies the loss under the policy, and gradients are divided by it in float64. Give the scale of
            the training run: without one, float16 gradients underflow, and the errors show that.

    Returns:
        An `Advice`: ranked rows, overrides, the policy with them, and the errors before and after.

    Raises:
        TypeError: if `loss_fn` is no function or does not return a real floating scalar, `policy` is no policy or
            `loss_scale` no loss scale; if parameters are no concrete arrays.
        ValueError: if no parameters are floating, or not all of them float32; if the bound is not above 0, the loss
            scale no power of two, or `groups` something else; if there is no batch, or batches differ in shape; if the
            policy narrows nothing of this loss; if the loss or gradient in float32 is infinite or NaN.

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
    study = Study(loss_fn, _checked_params(params), policy, batches, loss_scale)
    ranked = sorted(_rows(study, groups), key=lambda row: -row.error)
    patterns = [row.pattern for row in ranked]
    kept = patterns[: _fewest(lambda count: study.errors_keeping(patterns[:count]).worst <= bound, len(patterns))]
    chosen = study.keeping(kept)
    return Advice(
        rows=tuple(dataclasses.replace(row, is_kept=row.pattern in kept) for row in ranked),
        overrides=chosen.overrides[: len(kept)],
        policy=chosen,
        bound=float(bound),
        before=study.errors_keeping([]),
        after=study.errors_keeping(kept),
        rest=study.errors_keeping(patterns),
    )


def _fewest(is_enough: Callable[[int], bool], most: int) -> int:
    """Return the fewest leading rows that are enough; all of them if nothing is."""
    if is_enough(0) or not is_enough(most):
        return 0 if is_enough(0) else most
    return bisect.bisect_left(range(most), True, lo=1, key=is_enough)


def _rows(study: Study, groups: Groups | None) -> list[AdviceRow]:
    """Return a row for each group of leaves that the policy stores or multiplies in fewer bits."""
    names = _trees.path_names(study.params)
    leaves = {names[path]: leaf for path, leaf in jax.tree.leaves_with_path(study.params)}
    found = []
    for name, (pattern, paths) in grouped(leaves, groups).items():
        # An array that stands in the tree twice counts once.
        sizes = {id(leaves[path]): leaves[path].size * study.saved_bytes(path) for path in paths}
        flops = study.narrowed_flops() - study.narrowed_flops(pattern)
        if flops or any(sizes.values()):
            found.append(AdviceRow(name or "(the array)", pattern, sum(sizes.values()), flops, 0.0, 0.0))
    if not found:
        study.require_something_narrow()
    rows = []
    for row in found:
        errors = study.errors_keeping(other.pattern for other in found if other is not row)
        rows.append(dataclasses.replace(row, loss_error=errors.loss, gradient_error=errors.gradient))
    return rows


def grouped(paths: Iterable[str], groups: Groups | None) -> dict[str, tuple[str, list[str]]]:
    """Return the groups of leaves by name: a regular expression that finds their paths only, and these paths."""
    paths = list(paths)
    if groups is None:
        groups = "patterns" if len(paths) > _FEW_LEAVES else "leaves"
    members = defaultdict(list)
    for path in paths:
        members[_group_of(path, groups)].append(path)
    # The text between two numbers has no digits, so the numbers of a path are told apart.
    split = (lambda path: re.split(_DIGITS, path)) if groups == "patterns" else (lambda path: [path])
    pattern_of = lambda path: _DIGITS.join(map(re.escape, split(path)))
    found = {}
    for name, inside in members.items():
        own = "|".join(dict.fromkeys(map(pattern_of, inside)))
        found[name] = f"^(?:{own})$" if "|" in own else f"^{own}$", inside
    return found


def _group_of(path: str, groups: Groups) -> str:
    if not callable(groups):
        return path if groups == "leaves" else re.sub(_DIGITS, "*", path)
    name = groups(path)
    if not isinstance(name, str):
        raise TypeError(
            f"`advise`: `groups` must return the name of a group, a string, but gave {name!r} for {path!r}."
        )
    return name


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


def _checked_params(params: Any) -> Any:
    names = _trees.path_names(params)
    floating = [(names[p], x) for p, x in jax.tree.leaves_with_path(params) if _trees.is_floating(x)]
    if not floating:
        raise ValueError(
            "`advise`: `params` have no floating leaves, so no gradient. Parameters are `advise`'s second argument."
        )
    abstract = [path for path, x in floating if isinstance(x, (Tracer, jax.ShapeDtypeStruct))]
    if abstract:
        raise TypeError(
            "`advise` measures, so it needs concrete parameters: call it outside of `jax.jit`. There are no values for "
            f"{_errors.listed(abstract, 3)}."
        )
    others = [f"{path}: {_trees.dtype_and_shape(x)}" for path, x in floating if x.dtype != _F32]
    if others:
        raise ValueError(
            "`advise` needs float32 parameters, whose values are the reference; 16 bits are rounded already. Give "
            f"the float32 ones, such as `mpx.master_params(params, opt_state)`, for {_errors.listed(others, 3)}."
        )
    return params
