"""Measure losses and gradients in several precisions, and their errors against float32."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mpx import _errors, _policy, _trees
from mpx._autocast import compute
from mpx._autocast.transform import Autocast, Traced
from mpx._jaxprs import open_jaxpr
from mpx._loss_scale import LossScale
from mpx._policy import Policy
from mpx.tools.advise.advice import AdviceRow, PrecisionErrors
from mpx.tools.advise.contractions import Contraction, asking, contractions_of

_F32 = np.dtype(np.float32)


class Study:
    """Losses and gradients of the same parameters and batches in several precisions, compared with float32."""

    def __init__(
        self, record: Autocast, policy: Policy, params: Any, batches: list[Any], loss_scale: LossScale
    ) -> None:
        self._record, self.policy, self.params, self._batches = record, policy, params, batches
        self._scale = float(loss_scale.scale(jnp.ones((), _F32)))
        leaves, names = jax.tree.leaves_with_path(params), _trees.path_names(params)
        self.floating = [i for i, (_, leaf) in enumerate(leaves) if _trees.is_floating(leaf)]
        self.paths = [names[leaves[i][0]] for i in self.floating]
        traced = self._trace(policy)
        _require_scalar(traced)
        self.contractions = list(contractions_of(traced.plan))
        # Leaves that no contraction uses share a program.
        self._program = functools.cache(self._program_narrowing)
        self._errors_with = functools.cache(self._measured)
        # Not weakly typed, as no stored array is: else programs would be compiled for each kind.
        self.wide = [jnp.asarray(leaves[i][1], _F32) for i in self.floating]
        self._stored = self._stored_by(policy)
        self._reference = self._run(self._program(frozenset()), self.wide, is_narrow=False, scale=1.0)
        self._require_finite_reference()

    def keeping(self, patterns: Iterable[str]) -> Policy:
        """Return the policy with overrides that keep leaves in float32 in front of its own."""
        own = [(pattern, _F32) for pattern in patterns]
        return dataclasses.replace(self.policy, overrides=(*own, *self.policy.overrides))

    def contractions_keeping(self, patterns: Iterable[str]) -> list[Contraction]:
        """Return the contractions of the loss under the policy with these overrides."""
        return list(contractions_of(self._trace(self.keeping(patterns)).plan))

    def errors_keeping(self, rows: Iterable[AdviceRow], *, with_lines: bool = True) -> PrecisionErrors:
        """Return the errors that a training run has if it keeps rows in float32, those of source lines or not."""
        lines = [row.name for row in rows if with_lines and row.kind == "contraction"]
        return self._errors_with(self.keeping(row.pattern for row in rows if row.kind == "leaf"), tuple(lines))

    def errors_of_narrowing(self, positions: tuple[int, ...], contractions: frozenset[int]) -> PrecisionErrors:
        """Return the errors if some leaves and contractions are narrowed, and everything else is float32."""
        floats = [self._stored[i] if i in positions else x for i, x in enumerate(self.wide)]
        scale = self._scale if contractions else 1.0
        return self._errors(self._run(self._program(contractions), floats, is_narrow=False, scale=scale))

    def _measured(self, policy: Policy, lines: tuple[str, ...]) -> PrecisionErrors:
        """Return the errors that a training run with a policy has, with some lines in `full_precision`."""
        record = self._under(policy)
        if lines:
            record = asking(record, [lax.Precision.HIGHEST if c.where in lines else None for c in self.contractions])
        leaves = jax.tree.leaves(policy.cast_to_param(self.params))
        dtypes = [leaf.dtype if _trees.is_narrower(leaf, _F32) else None for leaf in leaves]
        program = self._gradient(record, [*dtypes, *[None] * len(jax.tree.leaves(self._batches[0]))])
        return self._errors(self._run(program, self._stored_by(policy), is_narrow=True, scale=self._scale))

    def _under(self, policy: Policy) -> Autocast:
        """Return the loss under a policy, but in float32: an output dtype would round nothing but the loss."""
        return dataclasses.replace(self._record, policy=policy.with_output_dtype(_F32))

    def _trace(self, policy: Policy) -> Traced:
        return self._under(policy).trace((self.params, self._batches[0]), {})

    def _stored_by(self, policy: Policy) -> list[Any]:
        """Return the floating leaves as a policy stores them, in float32 again: two programs, or XLA drops that."""
        leaves = jax.tree.leaves(_policy.cast_to_full(policy.cast_to_param(self.params)))
        return [jnp.asarray(leaves[i], _F32) for i in self.floating]

    def _program_narrowing(self, narrowed: frozenset[int]) -> Callable[..., Any]:
        """Return the loss and gradient with some contractions narrowed, and no others."""
        precisions = [
            lax.Precision.DEFAULT if i in narrowed else lax.Precision.HIGHEST if c.is_narrowed else None
            for i, c in enumerate(self.contractions)
        ]
        record = asking(self._under(self.policy), precisions)
        if not narrowed:  # a user's rules may narrow other operations, but not those of the reference
            settings = dataclasses.replace(record.settings, compute=compute.F32, gradient_dtype=None)
            record = dataclasses.replace(record, settings=settings)
        return self._gradient(record, None)

    def _gradient(self, record: Autocast, dtypes: list[np.dtype | None] | None) -> Callable[..., Any]:
        """Compile a function from floating leaves, a batch and a scale to the loss and the scaled gradients."""
        leaves, treedef = jax.tree.flatten(self.params)

        def scaled_loss(floats, batch, scale):
            merged = list(leaves)
            for i, x in zip(self.floating, floats, strict=True):
                merged[i] = x
            loss = record.call((treedef.unflatten(merged), batch), {}, dtypes)
            return loss * scale.astype(loss.dtype), loss

        return jax.jit(jax.grad(scaled_loss, has_aux=True))

    def _run(self, program: Callable[..., Any], floats: list[Any], *, is_narrow: bool, scale: float) -> list[Any]:
        """Return the loss and the unscaled gradients of each batch, on the host."""
        results = []
        with contextlib.nullcontext() if is_narrow else jax.default_matmul_precision("highest"):
            for batch in self._batches:
                grads, loss = program(floats, batch, np.float32(scale))
                # Division by a power of two, in float64: in float32 a small gradient would underflow.
                grads = [np.asarray(g) if scale == 1 else np.asarray(g, np.float64) / scale for g in grads]
                results.append((float(loss), grads))
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

    def _errors(self, results: list[Any]) -> PrecisionErrors:
        pairs = list(zip(results, self._reference, strict=True))
        losses = [_error([loss], [true_loss]) for (loss, _), (true_loss, _) in pairs]
        gradients = [_error(grads, true_grads) for (_, grads), (_, true_grads) in pairs]
        return PrecisionErrors(math.fsum(losses) / len(losses), math.fsum(gradients) / len(gradients))


def _error(arrays: list[Any], references: list[Any]) -> float:
    """Return the relative error of arrays, all as one vector, in float64."""
    error, norm = 0.0, 0.0
    for x, reference in zip(arrays, references, strict=True):
        x, reference = np.asarray(x, np.float64), np.asarray(reference, np.float64)
        error += float(np.sum((x - reference) ** 2)) if np.isfinite(x).all() else math.inf
        norm += float(np.sum(reference**2))
    return math.sqrt(error / norm) if norm else math.inf if error else 0.0


def _require_scalar(traced: Traced) -> None:
    """Raise unless the function returns one real floating number."""
    out: list[Any] = [v.aval for v in open_jaxpr(traced.plan.jaxpr).outvars]
    is_one = jax.tree_util.treedef_is_leaf(traced.treedef) and len(out) == 1
    if is_one and out[0].shape == () and jnp.issubdtype(out[0].dtype, jnp.floating):
        return
    found = ", ".join(_trees.dtype_and_shape(aval) for aval in out) or "no array"
    raise TypeError(
        f"`advise` needs a function that returns a real floating scalar, the loss, but it returned {found}. Leave out "
        "what else it returns: `lambda params, batch: loss_fn(params, batch)[0]`."
    )
