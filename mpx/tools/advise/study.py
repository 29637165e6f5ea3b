"""Measure losses and gradients under a policy with more or fewer overrides, and their errors against float32."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpx import _errors, _trees
from mpx._autocast.explain import Explanation, explain
from mpx._autocast.rules import DEFAULT_RULES
from mpx._autocast.transform import autocast, autocast_of, make_autocast
from mpx._gradients import value_and_grad
from mpx._loss_scale import LossScale
from mpx._policy import Policy
from mpx.tools.advise.advice import PrecisionErrors

_F32 = np.dtype(np.float32)
Result = tuple[float, list[np.ndarray]]  # a loss and its gradients


class Study:
    """Losses and gradients of the same parameters and batches in several precisions, compared with float32."""

    def __init__(
        self, loss_fn: Any, params: Any, policy: Policy, batches: Sequence[Any], loss_scale: LossScale
    ) -> None:
        if not callable(loss_fn):
            raise TypeError(f"`advise` needs a function of parameters and a batch, but got {type(loss_fn).__name__}.")
        make = functools.partial(make_autocast, rules=DEFAULT_RULES, checkpoint=None, reduce_dtype=None)
        self._record = autocast_of(loss_fn) or make(loss_fn, policy)
        # Only floating leaves can be differentiated; the others are put beside them again.
        self.params = jax.tree.map(lambda x: x if _trees.is_floating(x) else None, params)
        merged = lambda floats: jax.tree.map(
            lambda x, given: given if x is None else x, floats, params, is_leaf=lambda x: x is None
        )
        self._loss_fn = lambda floats, batch: self._record.fun(merged(floats), batch)
        self.policy, self._batches, self._scale = policy, batches, loss_scale
        self._errors_under = functools.cache(self._measured)
        self._explained = functools.cache(self._explain)
        _require_scalar(jax.eval_shape(self._loss_fn, self.params, batches[0]))
        with jax.default_matmul_precision("highest"):
            self._reference = self._run(jax.value_and_grad(self._loss_fn), self.params, 1.0)
        self._require_finite_reference()

    def keeping(self, patterns: Iterable[str]) -> Policy:
        """Return the policy with overrides that keep leaves in float32 in front of its own."""
        own = [(pattern, _F32) for pattern in patterns]
        return dataclasses.replace(self.policy, overrides=(*own, *self.policy.overrides))

    def errors_keeping(self, patterns: Iterable[str]) -> PrecisionErrors:
        """Return the errors of a training run that keeps some leaves in float32."""
        return self._errors_under(self.keeping(patterns))

    def saved_bytes(self, path: str) -> int:
        """Return how many bytes fewer than in float32 the policy stores a number of a leaf in."""
        stored = np.dtype(self.policy.override_at(path) or self.policy.param_dtype)
        return max(4 - stored.itemsize, 0)

    def narrowed_flops(self, *patterns: str) -> int:
        """Return the FLOPs that do not run in float32 if some leaves are kept in it."""
        return sum(row.flops for row in self._explained(patterns).contractions if row.runs_in != "f32")

    def require_something_narrow(self) -> None:
        """Raise if the policy narrows no contraction either."""
        explained = self._explained(())
        if not explained.narrowed_share > 0:
            raise ValueError(
                f"`advise`: the policy {str(self.policy)!r} narrows nothing: parameters stay float32, and so do all "
                f"{len(explained.contractions)} contractions of the loss. `explain` says why; a policy such as "
                "'params=bf16,compute=bf16' narrows both."
            )

    def _explain(self, patterns: tuple[str, ...]) -> Explanation:
        return explain(self._lowered(self.keeping(patterns)))(self.params, self._batches[0])

    def _lowered(self, policy: Policy) -> Callable[..., Any]:
        """Return the loss under a policy, but in float32: an output dtype would round nothing but the loss."""
        settings = self._record.settings
        return autocast(
            self._loss_fn,
            policy.with_output_dtype(_F32),
            rules=settings.rules,
            checkpoint=self._record.checkpoint,
            reduce_dtype=settings.reduce_dtype,
        )

    def _measured(self, policy: Policy) -> PrecisionErrors:
        """Return the errors that a training run under a policy has."""
        scale = float(self._scale.scale(jnp.ones((), _F32)))
        program = value_and_grad(self._lowered(policy), self._scale)
        results = self._run(program, policy.cast_to_param(self.params), scale)
        pairs = list(zip(results, self._reference, strict=True))
        losses = [_error([loss], [true_loss]) for (loss, _), (true_loss, _) in pairs]
        gradients = [_error(grads, true_grads) for (_, grads), (_, true_grads) in pairs]
        return PrecisionErrors(math.fsum(losses) / len(losses), math.fsum(gradients) / len(gradients))

    def _run(self, program: Callable[..., Any], params: Any, scale: float) -> list[Result]:
        """Return the loss and the unscaled gradients of each batch, on the host."""
        compiled, results = jax.jit(program), []
        for batch in self._batches:
            loss, grads = compiled(params, batch)
            # Division by a power of two, in float64: in float32 a small gradient would underflow.
            results.append((float(loss), [np.asarray(g, np.float64) / scale for g in jax.tree.leaves(grads)]))
        return results

    def _require_finite_reference(self) -> None:
        names = _trees.path_names(self.params)
        paths = [names[path] for path, _ in jax.tree.leaves_with_path(self.params)]
        for number, (loss, grads) in enumerate(self._reference):
            bad = [path for path, g in zip(paths, grads, strict=True) if not np.isfinite(g).all()]
            if bad or not math.isfinite(loss):
                raise ValueError(
                    f"`advise`: in float32 the loss of batch {number} is {loss:g}"
                    + (f", and the gradient of {_errors.listed(bad, 3)} is not finite" if bad else "")
                    + ". There is nothing to compare with: mend that first."
                )


def _error(arrays: Sequence[Any], references: Sequence[Any]) -> float:
    """Return the relative error of arrays, all as one vector, in float64."""
    error, norm = 0.0, 0.0
    for x, reference in zip(arrays, references, strict=True):
        x, reference = np.asarray(x, np.float64), np.asarray(reference, np.float64)
        error += float(np.sum((x - reference) ** 2)) if np.isfinite(x).all() else math.inf
        norm += float(np.sum(reference**2))
    return math.sqrt(error / norm) if norm else math.inf if error else 0.0


def _require_scalar(result: Any) -> None:
    """Raise unless the function returns one real floating number."""
    out = jax.tree.leaves(result)
    is_one = jax.tree_util.treedef_is_leaf(jax.tree.structure(result)) and len(out) == 1
    if is_one and out[0].shape == () and jnp.issubdtype(out[0].dtype, jnp.floating):
        return
    found = ", ".join(_trees.dtype_and_shape(aval) for aval in out) or "no array"
    raise TypeError(
        f"`advise` needs a function that returns a real floating scalar, the loss, but it returned {found}. Leave out "
        "what else it returns: `lambda params, batch: loss_fn(params, batch)[0]`."
    )
