"""`advise`: find out by measurement which leaves need float32."""

import bisect
import dataclasses
import functools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpx import _errors, _trees
from mpx._autocast.explain import Explanation, explain
from mpx._autocast.transform import autocast, autocast_of
from mpx._gradients import value_and_grad
from mpx._loss_scale import LossScale, NoOpLossScale, require_powers_of_two
from mpx._policy import Policy, as_policy
from mpx._tables import Result, Table

_F32 = np.dtype(np.float32)
_FEW_LEAVES = 24
_DIGITS = "[0-9]+"


@dataclasses.dataclass(frozen=True)
class PrecisionErrors:
    """Relative errors against float32: |x - reference| / |reference|, with Euclidean norms.

    An error is infinite where `x` is infinite or NaN, and where only the reference is 0.

    Attributes:
        loss: the error of the loss.
        gradient: the error of the gradient, all leaves as one vector.
    """

    loss: float
    gradient: float

    @property
    def worst(self) -> float:
        """Return the larger one, which a bound limits, and which ranks rows."""
        return max(self.loss, self.gradient)


@dataclasses.dataclass(frozen=True)
class AdviceRow:
    """Leaves that one override can keep in float32, and the errors when only they are narrowed.

    Attributes:
        name: the path of a leaf, or of several leaves with `*` for numbers.
        pattern: the regular expression of the override.
        bytes: how many bytes more the leaves take in float32 than as the policy stores them.
        errors: the errors if all other leaves are kept in float32.
        is_kept: whether the advice is to keep these leaves in float32.
    """

    name: str
    pattern: str
    bytes: int
    errors: PrecisionErrors
    is_kept: bool = False


@dataclasses.dataclass(frozen=True)
class Advice(Result):
    """The result of `advise`; prints as a table, with `rich.print` too.

    Attributes:
        rows: what an override can keep in float32, largest error first.
        policy: the given policy, with overrides that keep leaves in float32 in front of its own.
        bound: the bound that was given.
        before: the errors of the given policy.
        after: the errors of `policy`.
        rest: the errors with all leaves in float32. Contractions of activations cause them, such as the logits of
            attention, which no override reaches: put `mpx.full_precision` around those.
    """

    rows: tuple[AdviceRow, ...]
    policy: Policy
    bound: float
    before: PrecisionErrors
    after: PrecisionErrors
    rest: PrecisionErrors

    @property
    def met(self) -> bool:
        """Return whether `policy` keeps the errors of the loss and the gradient at or under the bound."""
        return self.after.worst <= self.bound

    def as_dict(self) -> dict[str, Any]:
        """Return everything for JSON; the policy as its string."""
        return super().as_dict() | {"policy": str(self.policy)}

    def _parts(self) -> Iterator[Table | str]:
        measured = {"the given policy": self.before, "the overrides": self.after, "all leaves in float32": self.rest}
        yield "\n".join(
            f"Relative errors with {name}: loss {e.loss:.2e}, gradient {e.gradient:.2e}" for name, e in measured.items()
        )
        lines = [("what", "loss", "gradient", "bytes", "keep by")]
        for row in self.rows:
            errors = f"{row.errors.loss:.1e}", f"{row.errors.gradient:.1e}"
            lines.append((row.name, *errors, f"{row.bytes:,}", "override" if row.is_kept else ""))
        yield Table("Errors if one alone is narrowed", lines, range(1, 4))
        verdict = f"The bound {self.bound:g} is met."
        if not self.met:
            verdict = (
                f"The bound {self.bound:g} is not met, even with all of these leaves in float32. `mpx.explain` lists "
                "the contractions that no override reaches, for `mpx.full_precision`."
            )
        yield "\n".join([*(f"override ({row.pattern!r}, 'f32')" for row in self.rows if row.is_kept), verdict])


def advise(
    loss_fn: Callable[[Any, Any], Any],
    params: Any,
    batch: Any,
    policy: Policy | str,
    *,
    bound: float = 1e-2,
    loss_scale: LossScale | None = None,
) -> Advice:
    """Find out which layers need float32: what narrowing each one does to the loss and to the gradient.

    The loss and its gradient are computed in float32 (matrix products at the highest precision), then as a training run
    under the policy computes them, with more or fewer leaves kept in float32 by overrides. A leaf that is kept is
    stored in float32, and so are its contractions. Where the policy's error is above the bound, overrides keep the
    leaves with the largest errors, as few as bisection finds to suffice. If there are more than 24 leaves, those with
    equal paths but for numbers (`layers/0/kernel` and `layers/1/kernel`) are ranked and kept together.

    The loss is taken in float32, whatever the output dtype. An override acts on an array of the batch with the same
    path, too. It compiles a gradient for each row, and at most `3 + log2(rows)` more.

    Args:
        loss_fn: the float32 function from parameters and a batch to a scalar loss. An autocast function gives its
            rules, `checkpoint` and `reduce_dtype`; `policy` takes the place of its own.
        params: float32 parameters; other leaves are left alone. Take parameters of a training run: errors of initial
            parameters say little.
        batch: a pytree of arrays and numbers.
        policy: a policy or its string, whose `param_dtype`, `compute_dtype` and `overrides` are studied.
        bound: the largest relative error that is allowed, of the loss and of the gradient.
        loss_scale: multiplies the loss under the policy, and gradients are divided by it in float64. Give the scale of
            the training run: without one, float16 gradients underflow, and the errors show that.

    Returns:
        An `Advice`: ranked rows, the policy with overrides, and the errors before and after.

    Raises:
        TypeError: if `loss_fn` is no function or does not return a real floating scalar, `policy` is no policy or
            `loss_scale` no loss scale; if parameters are no concrete arrays.
        ValueError: if no parameters are floating, or not all of them float32; if the bound is not above 0, or the loss
            scale no power of two; if the loss or gradient in float32 is infinite or NaN.

    Example:
        >>> loss_fn = lambda params, x: jnp.mean((x @ params["first"] @ params["second"]) ** 2)
        >>> params = {"first": jnp.full((4, 8), 0.3), "second": jnp.full((8, 2), 0.25)}  # 0.25 needs no rounding
        >>> advice = advise(loss_fn, params, jnp.ones((2, 4)), "params=bf16,compute=f32", bound=1e-5)
        >>> [(row.name, row.is_kept) for row in advice.rows]
        [('first', True), ('second', False)]
        >>> advice.policy.overrides, advice.met
        ((('^first$', dtype('float32')),), True)
    """
    policy = as_policy(policy, "advise")
    loss_scale = NoOpLossScale() if loss_scale is None else loss_scale
    require_powers_of_two(loss_scale, "advise")
    if not 0 < bound < math.inf:
        raise ValueError(f"`advise`: `bound` must be a relative error above 0, such as 1e-2, but got {bound!r}.")
    _require_float32(params)
    study = _Study(loss_fn, params, batch, policy, loss_scale)
    ranked = sorted(_rows(study), key=lambda row: -row.errors.worst)
    patterns = [row.pattern for row in ranked]
    is_enough = lambda count: study.errors_keeping(patterns[:count]).worst <= bound
    kept = patterns[: bisect.bisect_left(range(len(patterns)), True, key=is_enough)]
    return Advice(
        rows=tuple(dataclasses.replace(row, is_kept=row.pattern in kept) for row in ranked),
        policy=study.keeping(kept),
        bound=float(bound),
        before=study.errors_keeping([]),
        after=study.errors_keeping(kept),
        rest=study.errors_keeping(patterns),
    )


class _Study:
    """The loss and its gradient under a policy with more or fewer overrides, and their errors against float32."""

    def __init__(self, loss_fn: Any, params: Any, batch: Any, policy: Policy, loss_scale: LossScale) -> None:
        record = autocast_of(loss_fn)
        fun, self._autocast = (loss_fn, autocast) if record is None else (record.fun, record.around)
        # Only floating leaves can be differentiated; the others are put beside them again.
        self.params = jax.tree.map(lambda x: x if _trees.is_floating(x) else None, params)
        merged = lambda x, given: given if x is None else x
        self._loss_fn = lambda floats, batch: fun(
            jax.tree.map(merged, floats, params, is_leaf=lambda x: x is None), batch
        )
        self.policy, self._batch, self._scale = policy, batch, loss_scale
        self._errors_under = functools.cache(self._measured)
        with jax.default_matmul_precision("highest"):
            self._reference = loss, gradient = self._run(jax.value_and_grad(self._loss_fn), self.params, 1.0)
        if not (np.isfinite(loss) and np.isfinite(gradient).all()):
            raise ValueError(
                f"`advise`: there is nothing to compare with: in float32 the loss is {loss:g}, and "
                f"{np.sum(~np.isfinite(gradient)):,} numbers of its gradient are infinite or NaN."
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
        return explain(self._lowered(self.keeping(patterns)))(self.params, self._batch)

    def _lowered(self, policy: Policy) -> Callable[..., Any]:
        """Return the loss under a policy, but in float32: an output dtype would round nothing but the loss."""
        return self._autocast(self._loss_fn, policy.with_output_dtype(_F32))

    def _measured(self, policy: Policy) -> PrecisionErrors:
        """Return the errors that a training run under a policy has."""
        program = value_and_grad(self._lowered(policy), self._scale)
        scale = float(self._scale.scale(jnp.ones((), _F32)))
        found = self._run(program, policy.cast_to_param(self.params), scale)
        return PrecisionErrors(*map(_error, found, self._reference))

    def _run(self, program: Callable[..., Any], params: Any, scale: float) -> tuple[np.ndarray, np.ndarray]:
        """Return the loss and the unscaled gradient, all leaves as one vector, in float64."""
        loss, grads = jax.jit(program)(params, self._batch)
        gradient = np.concatenate([np.asarray(g, np.float64).ravel() for g in jax.tree.leaves(grads)])
        # Division by a power of two, in float64: in float32 a small gradient would underflow.
        return np.asarray(loss, np.float64), gradient / scale


def _error(x: np.ndarray, reference: np.ndarray) -> float:
    if not np.isfinite(x).all():
        return math.inf
    error, norm = np.linalg.norm(x - reference), np.linalg.norm(reference)
    return float(error / norm) if norm else math.inf if error else 0.0


def _rows(study: _Study) -> list[AdviceRow]:
    """Return a row for each group of leaves that the policy stores or multiplies in fewer bits."""
    names = _trees.path_names(study.params)
    sizes = {names[path]: leaf.size for path, leaf in jax.tree.leaves_with_path(study.params)}
    stored = lambda path: np.dtype(study.policy.override_at(path) or study.policy.param_dtype)
    whole = study.explained_keeping()
    found: dict[str, tuple[str, int]] = {}
    for pattern, paths in grouped(sizes).items():
        nbytes = sum(sizes[path] * max(4 - stored(path).itemsize, 0) for path in paths)
        if nbytes or study.explained_keeping(pattern) != whole:
            name = paths[0] if len(paths) == 1 else re.sub(_DIGITS, "*", paths[0])
            found[pattern] = name or "(the array)", nbytes
    alone = lambda pattern: study.errors_keeping(other for other in found if other != pattern)
    return [AdviceRow(name, pattern, nbytes, alone(pattern)) for pattern, (name, nbytes) in found.items()]


def grouped(paths: Iterable[str]) -> dict[str, list[str]]:
    """Return groups of paths by a regular expression that finds these only; of few paths, each is a group."""
    paths = list(paths)
    groups = defaultdict(list)
    for path in paths:
        # The text between two numbers has no digits, so numbers are told apart.
        pattern = re.sub(_DIGITS, _DIGITS, re.escape(path)) if len(paths) > _FEW_LEAVES else re.escape(path)
        groups[f"^{pattern}$"].append(path)
    return groups


def _require_float32(params: Any) -> None:
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
