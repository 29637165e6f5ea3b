"""Whole recipes, put together from the transformations."""

from collections.abc import Hashable

import jax
import numpy as np
import optax

from mpx import _checks, _trees
from mpx._loss_scale import LossScale
from mpx._policy import Policy, get_policy
from mpx._transforms.loss_scaling import loss_scaling
from mpx._transforms.master_weights import Storage, master_weights


def mixed_precision(
    inner: optax.GradientTransformation,
    policy: Policy | str,
    *,
    storage: Storage = "full",
    loss_scale: LossScale | None = None,
    axis_name: Hashable | tuple[Hashable, ...] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Makes any rule train a model under a policy: masters where they are needed, loss scaling where it is.

    - Parameters stored in less than float32 (by the policy or an override) get `master_weights`.
    - Where gradients are float16, because the model computes in it or stores parameters in it, they get
      `loss_scaling`, around the masters.
    - Under a policy that needs neither, the rule stays what it is.

    Args:
        inner: any Optax transformation or chain.
        policy: a `Policy`, or the string of one.
        storage: of the masters, as in `master_weights`.
        loss_scale: of `loss_scaling`; `DynamicLossScale()` if None.
        axis_name: of `loss_scaling`.

    Returns:
        A transformation.

    Raises:
        TypeError: if `inner` is not a transformation.
        ValueError: if the policy string cannot be read; if `storage`, `loss_scale` or `axis_name` is given and the
            policy has no use for it; at `init`, if the policy stores parameters below float32 and none is.

    Example:
        >>> tx = mixed_precision(optax.adamw(3e-4), "params=bf16,compute=bf16,output=f32", storage="split")
        >>> type(tx.init({"w": jnp.ones(2, jnp.bfloat16)})).__name__
        'MasterWeightsState'
        >>> tx = mixed_precision(optax.adamw(3e-4), "params=f32,compute=f16,output=f32")
        >>> type(tx.init({"w": jnp.ones(2)})).__name__
        'LossScalingState'
    """
    policy = get_policy(policy) if isinstance(policy, str) else policy
    if not isinstance(policy, Policy):
        raise TypeError(
            f"`mixed_precision`: `policy` must be a Policy or the string of one, but got {type(policy).__name__}."
        )
    tx = _checks.as_transformation(inner, "mixed_precision")
    stored = [policy.param_dtype, *(dtype for _, dtype in policy.overrides)]
    needs_masters = any(np.dtype(dtype).itemsize < 4 for dtype in stored)
    needs_scaling = any(np.dtype(dtype) == np.float16 for dtype in (policy.compute_dtype, *stored))
    _require_use("storage", storage != "full", needs_masters, policy, "stores no parameters below float32")
    _require_use("loss_scale", loss_scale is not None, needs_scaling, policy, "has no float16 in it")
    _require_use("axis_name", axis_name is not None, needs_scaling, policy, "has no float16 in it")
    if needs_masters:
        tx = _checked_at_init(master_weights(tx, storage=storage), policy)
    if needs_scaling:
        tx = loss_scaling(tx, loss_scale, axis_name=axis_name)
    return tx


def _checked_at_init(
    tx: optax.GradientTransformationExtraArgs, policy: Policy
) -> optax.GradientTransformationExtraArgs:
    """Refuses parameters that nobody has cast, on which masters would do nothing."""
    narrow = lambda tree: any(_trees.is_narrower(leaf, np.dtype(np.float32)) for leaf in jax.tree.leaves(tree))

    def init_fn(params):
        shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype) if _trees.is_floating(p) else p, params)
        if narrow(policy.cast_to_param(shapes)) and not narrow(params):
            raise ValueError(
                f"`mixed_precision`: the policy {str(policy)!r} stores parameters below float32, but all of those "
                "given are float32 or wider. Cast them first: `params = policy.cast_to_param(params)`."
            )
        return tx.init(params)

    return optax.GradientTransformationExtraArgs(init_fn, tx.update)


def _require_use(argument: str, given: bool, needed: bool, policy: Policy, reason: str) -> None:
    if given and not needed:
        raise ValueError(
            f"`mixed_precision`: `{argument}` was given, but the policy {str(policy)!r} {reason}, so it would do "
            f"nothing. Leave it out, or wrap the rule by hand."
        )
