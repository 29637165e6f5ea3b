"""`advise`: measure which leaves need float32."""

import bisect
import dataclasses
import functools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from mpx import _errors, _trees
from mpx._autocast.explain import Explanation, explain
from mpx._autocast.transform import autocast, autocast_of
from mpx._gradients import value_and_grad
from mpx._loss_scale import LossScale, NoOpLossScale, require_powers_of_two
from mpx._policy import Policy, as_policy
from mpx.tools.advise.advice import Advice, AdviceRow, PrecisionErrors

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
    study = _Study(loss_fn, _checked_params(params), policy, _checked_batches(batch), loss_scale)
    ranked = sorted(_rows(study, groups), key=lambda row: -row.error)
    patterns = [row.pattern for row in ranked]
    is_enough = lambda count: study.errors_keeping(patterns[:count]).worst <= bound
    kept = patterns[: bisect.bisect_left(range(len(patterns)), True, key=is_enough)]
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


class _Study:
    """The loss and its gradient under a policy with more or fewer overrides, and their errors against float32."""

    def __init__(
        self, loss_fn: Any, params: Any, policy: Policy, batches: Sequence[Any], loss_scale: LossScale
    ) -> None:
        if not callable(loss_fn):
            raise TypeError(f"`advise` needs a function of parameters and a batch, but got {type(loss_fn).__name__}.")
        self._record = autocast_of(loss_fn)
        fun = loss_fn if self._record is None else self._record.fun
        # Only floating leaves can be differentiated; the others are put beside them again.
        self.params = jax.tree.map(lambda x: x if _trees.is_floating(x) else None, params)
        merged = lambda floats: jax.tree.map(
            lambda x, given: given if x is None else x, floats, params, is_leaf=lambda x: x is None
        )
        self._loss_fn = lambda floats, batch: fun(merged(floats), batch)
        self.policy, self._batches, self._scale = policy, batches, loss_scale
        self._errors_under = functools.cache(self._measured)
        with jax.default_matmul_precision("highest"):
            self._reference = self._run(jax.value_and_grad(self._loss_fn), self.params, 1.0)
        for number, (loss, gradient) in enumerate(self._reference):
            if not (np.isfinite(loss) and np.isfinite(gradient).all()):
                raise ValueError(
                    f"`advise`: there is nothing to compare with: in float32 the loss of batch {number} is {loss:g}, "
                    f"and {np.sum(~np.isfinite(gradient)):,} numbers of its gradient are infinite or NaN."
                )

    def keeping(self, patterns: Iterable[str]) -> Policy:
        """Return the policy with overrides that keep leaves in float32 in front of its own."""
        own = [(pattern, _F32) for pattern in patterns]
        return dataclasses.replace(self.policy, overrides=(*own, *self.policy.overrides))

    def errors_keeping(self, patterns: Iterable[str]) -> PrecisionErrors:
        """Return the errors of a training run that keeps some leaves in float32."""
        return self._errors_under(self.keeping(patterns))

    def explained_keeping(self, *patterns: str) -> Explanation:
        """Return what `explain` says of the loss if some leaves are kept in float32."""
        return explain(self._lowered(self.keeping(patterns)))(self.params, self._batches[0])

    def _lowered(self, policy: Policy) -> Callable[..., Any]:
        """Return the loss under a policy, but in float32: an output dtype would round nothing but the loss."""
        policy = policy.with_output_dtype(_F32)
        return (autocast if self._record is None else self._record.around)(self._loss_fn, policy)

    def _measured(self, policy: Policy) -> PrecisionErrors:
        """Return the errors that a training run under a policy has."""
        program = value_and_grad(self._lowered(policy), self._scale)
        scale = float(self._scale.scale(jnp.ones((), _F32)))
        results = self._run(program, policy.cast_to_param(self.params), scale)
        pairs = [zip(*pair, strict=True) for pair in zip(results, self._reference, strict=True)]
        errors = [[_error(x, reference) for x, reference in pair] for pair in pairs]
        return PrecisionErrors(*np.mean(errors, axis=0).tolist())

    def _run(self, program: Callable[..., Any], params: Any, scale: float) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return for each batch the loss and the unscaled gradient, all leaves as one vector, in float64."""
        compiled, results = jax.jit(program), []
        for batch in self._batches:
            loss, grads = compiled(params, batch)
            gradient = np.concatenate([np.asarray(g, np.float64).ravel() for g in jax.tree.leaves(grads)])
            # Division by a power of two, in float64: in float32 a small gradient would underflow.
            results.append((np.asarray(loss, np.float64), gradient / scale))
        return results


def _error(x: np.ndarray, reference: np.ndarray) -> float:
    if not np.isfinite(x).all():
        return math.inf
    error, norm = np.linalg.norm(x - reference), np.linalg.norm(reference)
    return float(error / norm) if norm else math.inf if error else 0.0


def _rows(study: _Study, groups: Groups | None) -> list[AdviceRow]:
    """Return a row for each group of leaves that the policy stores or multiplies in fewer bits."""
    narrowed_flops = lambda explained: sum(row.flops for row in explained.contractions if row.runs_in != "f32")
    names = _trees.path_names(study.params)
    sizes = {names[path]: leaf.size for path, leaf in jax.tree.leaves_with_path(study.params)}
    stored = lambda path: np.dtype(study.policy.override_at(path) or study.policy.param_dtype)
    whole = study.explained_keeping()
    found: dict[str, tuple[str, str, int, int]] = {}
    for name, (pattern, paths) in grouped(sizes, groups).items():
        nbytes = sum(sizes[path] * max(4 - stored(path).itemsize, 0) for path in paths)
        flops = narrowed_flops(whole) - narrowed_flops(study.explained_keeping(pattern))
        if nbytes or flops:
            found[pattern] = (name or "(the array)", pattern, nbytes, flops)
    if not found and not whole.narrowed_share > 0:
        raise ValueError(
            f"`advise`: the policy {str(study.policy)!r} narrows nothing: parameters stay float32, and so do all "
            f"{len(whole.contractions)} contractions of the loss. `explain` says why; a policy such as "
            "'params=bf16,compute=bf16' narrows both."
        )
    errors = {pattern: study.errors_keeping(other for other in found if other != pattern) for pattern in found}
    return [AdviceRow(*row, errors[pattern].loss, errors[pattern].gradient) for pattern, row in found.items()]


def grouped(paths: Iterable[str], groups: Groups | None) -> dict[str, tuple[str, list[str]]]:
    """Return the groups of leaves by name: a regular expression that finds their paths only, and these paths."""
    paths = list(paths)
    if groups is None:
        groups = "patterns" if len(paths) > _FEW_LEAVES else "leaves"
    name_of = groups if callable(groups) else lambda path: path if groups == "leaves" else re.sub(_DIGITS, "*", path)
    members = defaultdict(list)
    for path in paths:
        members[str(name_of(path))].append(path)
    found = {}
    for name, inside in members.items():
        escaped = [re.escape(path) for path in inside]
        if groups == "patterns":  # the text between two numbers has no digits, so numbers are told apart
            escaped = list(dict.fromkeys(re.sub(_DIGITS, _DIGITS, path) for path in escaped))
        found[name] = f"^{escaped[0]}$" if len(escaped) == 1 else f"^(?:{'|'.join(escaped)})$", inside
    return found


def _checked_batches(batch: Any) -> list[Any]:
    batches = batch if isinstance(batch, list) else [batch]
    if not batches:
        raise ValueError("`advise` needs a batch, or a list of some, but got an empty list.")
    types = [(jax.tree.structure(b), [str(jax.typeof(leaf)) for leaf in jax.tree.leaves(b)]) for b in batches]
    if any(kind != types[0] for kind in types):
        raise ValueError(
            "`advise` needs batches of the same structure, shapes and dtypes. A list is several batches: give one "
            "that is a list as a tuple, and cut or pad to one shape."
        )
    return batches


def _checked_params(params: Any) -> Any:
    names = _trees.path_names(params)
    floating = {names[path]: x for path, x in jax.tree.leaves_with_path(params) if _trees.is_floating(x)}
    if not floating:
        raise ValueError(
            "`advise`: `params` have no floating leaves, so no gradient. Parameters are `advise`'s second argument."
        )
    others = [f"{path}: {_trees.dtype_and_shape(x)}" for path, x in floating.items() if x.dtype != _F32]
    if others:
        raise ValueError(
            "`advise` needs float32 parameters, whose values are the reference; 16 bits are rounded already. Give "
            f"the float32 ones, such as `mpx.master_params(params, opt_state)`, for {_errors.listed(others, 3)}."
        )
    return params
