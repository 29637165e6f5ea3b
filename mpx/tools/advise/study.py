"""Losses and gradients in several precisions, and their errors against float32."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mpx import _errors, _policy, _trees
from mpx._autocast import compute
from mpx._autocast.transform import Autocast
from mpx._jaxprs import open_jaxpr
from mpx._loss_scale import LossScale
from mpx._policy import Policy
from mpx.tools.advise.contractions import Contraction, asking, contractions_of

_F32 = np.dtype(np.float32)


@dataclasses.dataclass(frozen=True)
class Errors:
    """How far a loss and its gradient are from float32, means over the batches.

    A relative error is |x - reference| / |reference|, of a gradient with the Euclidean norm. It is infinite where `x`
    is infinite or NaN, and where only the reference is 0.

    Attributes:
        loss: of the loss.
        gradient: of the gradient, all leaves as one vector.
        leaves: of the gradient of each leaf: pairs of a path and an error.
    """

    loss: float
    gradient: float
    leaves: tuple[tuple[str, float], ...]

    @property
    def worst(self) -> float:
        """The larger one of the errors of the loss and of the whole gradient: what a bound is for."""
        return max(self.loss, self.gradient)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """What can be kept in float32: the fields are those of a row.

    Attributes:
        name: of the row.
        pattern: of the override, None for a contraction.
        positions: of its leaves among the floating ones.
        contractions: those that it lowers, by their numbers.
        flops: of these.
        bytes: that its leaves take more.
    """

    name: str
    pattern: str | None
    positions: tuple[int, ...]
    contractions: frozenset[int]
    flops: int
    bytes: int


class Study:
    """Losses and gradients of the same parameters and batches in several precisions, against those in float32."""

    def __init__(self, record: Autocast, params: Any, batches: list[Any], loss_scale: LossScale) -> None:
        self._record, self.params, self._batches = record, params, batches
        self._scale = float(np.asarray(loss_scale.loss_scale))
        leaves = jax.tree.leaves_with_path(params)
        self.floating = [i for i, (_, leaf) in enumerate(leaves) if _trees.is_floating(leaf)]
        self.paths = [_trees.path_string(leaves[i][0]) for i in self.floating]
        _require_scalar(record, params, batches[0])
        self.contractions = self.contractions_with(self._policy.overrides)
        # Remembered by what is lowered: leaves that no contraction uses share a program.
        self._program = functools.cache(self._program_lowering)
        self.errors_with = functools.cache(self._errors_with)
        # Not weakly typed, as no stored one is: else programs would be compiled for each kind.
        self.wide = [jnp.asarray(leaves[i][1], _F32) for i in self.floating]
        self._stored = self._floats(self._policy)
        self._reference = self._run(self._program(frozenset()), self.wide, highest=True, scale=1.0)
        self._require_finite_reference()

    @property
    def _policy(self) -> Policy:
        assert self._record.policy is not None, "made by `_record_of`"
        return self._record.policy

    def contractions_with(self, overrides: tuple[tuple[str, Any], ...]) -> list[Contraction]:
        """The contractions of the loss under the policy with these overrides in place of its own."""
        record = self._with_policy(dataclasses.replace(self._policy, overrides=overrides))
        return list(contractions_of(record.trace((self.params, self._batches[0]), {}).plan))

    def errors_of_lowering(self, candidate: Candidate) -> Errors:
        """The errors if one thing is lowered and all else is float32."""
        floats = [self._stored[i] if i in candidate.positions else x for i, x in enumerate(self.wide)]
        scale = self._scale if candidate.contractions else 1.0
        return self._errors(self._run(self._program(candidate.contractions), floats, highest=True, scale=scale))

    def _errors_with(self, policy: Policy, lines: tuple[str, ...]) -> Errors:
        """The errors of a policy, as a training with it has them, with lines in `full_precision`."""
        record = self._with_policy(policy.with_output_dtype(_F32))
        if lines:
            wide = [lax.Precision.HIGHEST if c.where in lines else None for c in self.contractions]
            record = asking(record, wide)
        leaves = [leaf for _, leaf in jax.tree.leaves_with_path(policy.cast_to_param(self.params))]
        grids = [leaf.dtype if _trees.is_narrower(leaf, _F32) else None for leaf in leaves]
        grids += [None] * len(jax.tree.leaves(self._batches[0]))
        program = self._gradient(record, grids)
        return self._errors(self._run(program, self._floats(policy), highest=False, scale=self._scale))

    def _with_policy(self, policy: Policy) -> Autocast:
        return dataclasses.replace(self._record, policy=policy)

    def _floats(self, policy: Policy) -> list[Any]:
        """The floating leaves as a policy stores them, in float32 again: two programs, so that none drops that."""
        leaves = jax.tree.leaves(_policy.cast_to_full(policy.cast_to_param(self.params)))
        return [jnp.asarray(leaves[i], _F32) for i in self.floating]

    def _program_lowering(self, lowered: frozenset[int]) -> Callable[..., Any]:
        """Loss and gradient with some contractions lowered, and no other one."""
        asked = [
            lax.Precision.DEFAULT if i in lowered else lax.Precision.HIGHEST if c.is_lowered else None
            for i, c in enumerate(self.contractions)
        ]
        record = asking(self._record, asked)
        if not lowered:  # nothing else either: a user's rules may lower sums
            settings = dataclasses.replace(record.settings, compute=compute.F32, gradient_dtype=None)
            record = dataclasses.replace(record, settings=settings)
        return self._gradient(record, None)

    def _gradient(self, record: Autocast, grids: list[np.dtype | None] | None) -> Callable[..., Any]:
        """A compiled function of floating leaves, a batch and a scale: the loss, and the scaled gradients."""
        leaves, treedef = jax.tree.flatten(self.params)

        def scaled_loss(floats, batch, scale):
            merged = list(leaves)
            for i, x in zip(self.floating, floats, strict=True):
                merged[i] = x
            loss = record.call((treedef.unflatten(merged), batch), {}, grids)
            return loss * scale.astype(loss.dtype), loss

        def gradient(floats, batch, scale):
            grads, loss = jax.grad(scaled_loss, has_aux=True)(floats, batch, scale)
            return loss, grads

        return jax.jit(gradient)

    def _run(self, program: Callable[..., Any], floats: list[Any], *, highest: bool, scale: float) -> list[Any]:
        """Loss and gradients for each batch, on the host."""
        results = []
        for batch in self._batches:
            if highest:
                with jax.default_matmul_precision("highest"):
                    loss, grads = program(floats, batch, np.float32(scale))
            else:
                loss, grads = program(floats, batch, np.float32(scale))
            results.append((float(loss), [_unscaled(np.asarray(g), scale) for g in grads]))
        return results

    def _require_finite_reference(self) -> None:
        for number, (loss, grads) in enumerate(self._reference):
            bad = [path for path, g in zip(self.paths, grads, strict=True) if not np.isfinite(g).all()]
            if bad or not math.isfinite(loss):
                raise ValueError(
                    f"`advise`: in float32 the loss of batch {number} is {loss:g}"
                    + (f", and the gradient of {_errors.listed(bad, 3)} is not finite" if bad else "")
                    + ". There is nothing to compare with: mend that first."
                )

    def _errors(self, results: list[Any]) -> Errors:
        columns = []
        for (loss, grads), (true_loss, true_grads) in zip(results, self._reference, strict=True):
            squares = [_squares(g, true) for g, true in zip(grads, true_grads, strict=True)]
            total = [math.fsum(column) for column in zip(*squares, strict=True)]
            pairs = [_squares(loss, true_loss), total, *squares]
            columns.append([_ratio(*pair) for pair in pairs])
        loss, gradient, *leaves = (math.fsum(column) / len(column) for column in zip(*columns, strict=True))
        return Errors(loss, gradient, tuple(zip(self.paths, leaves, strict=True)))


def _unscaled(gradient: np.ndarray, scale: float) -> np.ndarray:
    return gradient if scale == 1 else gradient.astype(np.float64) / scale


def _squares(x: Any, reference: Any) -> tuple[float, float]:
    """The squares of the norms of a difference (infinite for infinities and NaN) and of the reference, in float64."""
    x, reference = np.asarray(x, np.float64), np.asarray(reference, np.float64)
    difference = float(np.sum((x - reference) ** 2)) if np.isfinite(x).all() else math.inf
    return difference, float(np.sum(reference**2))


def _ratio(difference: float, reference: float) -> float:
    if difference == 0:
        return 0.0
    return math.sqrt(difference / reference) if reference else math.inf


def _require_scalar(record: Autocast, params: Any, batch: Any) -> None:
    """Raises unless the function returns one real floating number."""
    traced = record.trace((params, batch), {})
    out: list[Any] = [v.aval for v in open_jaxpr(traced.plan.jaxpr).outvars]
    if jax.tree_util.treedef_is_leaf(traced.treedef) and len(out) == 1:
        if out[0].shape == () and jnp.issubdtype(out[0].dtype, jnp.floating):
            return
    found = ", ".join(_trees.dtype_and_shape(aval) for aval in out) or "no array"
    raise TypeError(
        f"`advise` needs a function that returns a real floating scalar, the loss, but it returned {found}. Leave out "
        "what else it returns: `lambda params, batch: loss_fn(params, batch)[0]`."
    )
