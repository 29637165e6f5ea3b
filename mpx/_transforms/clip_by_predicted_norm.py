"""`clip_by_predicted_norm`: clip by the global norm before all gradients are known."""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mpx import _trees
from mpx._stored.assignment import whole_components


class ClipByPredictedNormState(NamedTuple):
    """State of `clip_by_predicted_norm`.

    Attributes:
        norm: the global norm of the last gradients, float32; 1 before the first step.
        part: the norm of those that predict, float32.
    """

    norm: jax.Array
    part: jax.Array


def clip_by_predicted_norm(
    max_norm: float, by: str
) -> optax.GradientTransformationExtraArgs:
    """Clip gradients by a prediction of their global norm, which needs few of them.

    `optax.clip_by_global_norm` needs all gradients before the first update, so
    `train_step` must keep them. This element predicts their norm: that of the last step
    times what the norm of a few leaves has grown by since. These leaves must be known
    before the loop over layers: in a backward pass those come first that the model uses
    last, such as the head. The norm of this step is added up in the loop, for the next
    one. In the first step the norm of these leaves is the prediction.

    Args:
        max_norm: what gradients are scaled down to if the prediction is larger.
        by: a regular expression that matches whole components of the "/"-joined paths
            of the leaves that predict, as in `"head|norm"`.

    Returns:
        An element of a chain, with state `ClipByPredictedNormState`. Under
        `train_step` the norm is added up layer by layer, so its last bits may differ
        from the plain step's.

    Raises:
        ValueError: if `max_norm` is not positive; at `init`, if no path matches.

    Example:
        >>> tx = optax.chain(clip_by_predicted_norm(1.0, "head"), optax.sgd(1.0))
        >>> grads = {"head": jnp.float32([3.0]), "layers": jnp.float32([4.0])}
        >>> state = tx.init(grads)
        >>> for _ in range(2):  # by 3, then by 5
        ...     updates, state = tx.update(grads, state)
        ...     print(f"{optax.tree.norm(updates):.3f}")
        1.667
        1.000
    """
    if not max_norm > 0:
        raise ValueError(
            "`clip_by_predicted_norm`: `max_norm` must be positive, but got"
            f" {max_norm}."
        )
    pattern = re.compile(whole_components(by))

    def predicting(tree: Any) -> list[Any]:
        named = _trees.path_names(tree)
        leaves = _trees.leaves_by_path(tree)
        return [x for path, x in leaves.items() if pattern.search(named[path])]

    def init_fn(params):
        if not predicting(params):
            names = list(_trees.path_names(params).values())
            raise ValueError(
                f"`clip_by_predicted_norm`: `by` {by!r} matches no parameter. It must"
                f" match whole components of a path, such as {names[:5]}."
            )
        one = jnp.ones((), np.float32)
        return ClipByPredictedNormState(one, one)

    def update_fn(updates, state, params=None, **extra_args):
        part = optax.tree.norm(predicting(updates)).astype(np.float32)
        # Nothing is known of the whole where a part was zero.
        growth = part / jnp.where(state.part > 0, state.part, part)
        norm = jnp.where(state.part > 0, state.norm * growth, part)
        scale = jnp.where(norm > max_norm, max_norm / norm, np.float32(1))
        clipped = jax.tree.map(lambda g: g * scale.astype(g.dtype), updates)
        norm = optax.tree.norm(updates).astype(np.float32)
        return clipped, ClipByPredictedNormState(norm, part)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
