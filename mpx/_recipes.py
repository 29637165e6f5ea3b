"""Put whole recipes together from the transformations."""

from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np
import optax
from jax.typing import DTypeLike

from mpx import _errors, _trees
from mpx._loss_scale import LossScale
from mpx._policy import Policy, as_policy, policy_text, with_policy
from mpx._stored.state_format import StateFormat
from mpx._transforms.kahan_summation import kahan_summation
from mpx._transforms.loss_scaling import loss_scaling
from mpx._transforms.low_precision_state import Rounding, low_precision_state
from mpx._transforms.master_weights import Storage, master_weights


def mixed_precision(
    inner: optax.GradientTransformation,
    policy: Policy | str,
    *,
    storage: Storage = "split",
    key: jax.Array | None = None,
    loss_scale: LossScale | None = None,
    axis_name: Hashable | tuple[Hashable, ...] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Make any rule train a model under a policy: add master weights and loss scaling where the policy needs them.

    - Parameters stored in less than float32 (by the policy or an override) get `master_weights`.
    - Where gradients are float16, because the model computes in it or stores parameters in it, they get
      `loss_scaling`, around the masters.
    - Under a policy that needs neither, the rule gets neither.

    Args:
        inner: any Optax transformation or chain.
        policy: a `Policy`, or the string of one.
        storage: how masters are kept, as in `master_weights`. `"split"` keeps the 16 bits that a bfloat16 parameter
            lacks: AdamW takes 14 bytes a parameter, where float32 takes 16. Masters of float16 parameters are full.
        key: of `master_weights`, for `storage="split24"`.
        loss_scale: of `loss_scaling`; `DynamicLossScale()` if None.
        axis_name: of `loss_scaling`.

    Raises:
        TypeError: if `inner` is not a transformation.
        ValueError: if the policy string cannot be read; if `storage`, `key`, `loss_scale` or `axis_name` is given and
            the policy has no use for it; at `init`, if the policy stores parameters below float32 and all given ones
            are float32 or wider, or if this stands inside a wrapper that hides them, such as `low_precision_state`.

    Example:
        >>> tx = mixed_precision(optax.adamw(3e-4), "params=bf16,compute=bf16,output=f32")
        >>> type(tx.init({"w": jnp.ones(2, jnp.bfloat16)})).__name__
        'MasterWeightsState'
        >>> tx = mixed_precision(optax.adamw(3e-4), "params=f32,compute=f16,output=f32")
        >>> type(tx.init({"w": jnp.ones(2)})).__name__
        'LossScalingState'
    """
    policy = as_policy(policy, "mixed_precision")
    tx = _errors.as_transformation(inner, "mixed_precision")
    stored = [policy.param_dtype, *(dtype for _, dtype in policy.overrides)]
    needs_masters = any(np.dtype(dtype).itemsize < 4 for dtype in stored)
    needs_scaling = any(np.dtype(dtype) == np.float16 for dtype in (policy.compute_dtype, *stored))
    _require_use("storage", storage != "split", needs_masters, policy, "stores no parameters below float32")
    _require_use("key", key is not None, needs_masters, policy, "stores no parameters below float32")
    _require_use("loss_scale", loss_scale is not None, needs_scaling, policy, "has no float16 in it")
    _require_use("axis_name", axis_name is not None, needs_scaling, policy, "has no float16 in it")
    if needs_masters:
        tx = _checked_at_init(master_weights(tx, storage=storage, key=key), policy)
    if needs_scaling:
        tx = loss_scaling(tx, loss_scale, axis_name=axis_name)
    if not (needs_masters or needs_scaling):
        tx = _errors.with_checked_shapes(tx, "mixed_precision")
    return with_policy(tx, policy)


def any_precision_adamw(
    learning_rate: optax.ScalarOrSchedule = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    use_kahan_summation: bool = False,
    momentum_dtype: DTypeLike | StateFormat = "float32",
    variance_dtype: DTypeLike | StateFormat = "bfloat16",
    compensation_buffer_dtype: DTypeLike = "bfloat16",
    rounding: Rounding = "nearest",
    key: jax.Array | None = None,
    mask: Any | Callable[[optax.Params], Any] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """AdamW for pure 16-bit training: each moment in a dtype of its own, and Kahan summation of the parameters.

    It has the options and defaults of torchdistx's AnyPrecisionAdamW, but computes in float32 and rounds once where
    something is stored; and weight decay is part of the update. (torchdistx multiplies bfloat16 weights by
    `1 - learning_rate * weight_decay`, which rounds to 1.) With bfloat16 moments and Kahan summation a training run
    takes 10 bytes a parameter, gradients included. Without Kahan summation use it for float32 parameters.

    Args:
        learning_rate: a number or a schedule.
        b1: decay of the momentum.
        b2: decay of the variance.
        eps: added to the root of the variance.
        weight_decay: decoupled, multiplied by the learning rate.
        use_kahan_summation: whether `kahan_summation` follows.
        momentum_dtype: the format of the stored momentum: any format of `low_precision_state`, such as `"bf16"`.
        variance_dtype: the format of the stored variance: any of these but float16.
        compensation_buffer_dtype: the dtype that Kahan summation keeps: bfloat16, float16 or float32.
        rounding: how the moments are rounded: `"nearest"`, as in torchdistx, or `"stochastic"`. To nearest, a bfloat16
            variance with `b2` of 0.999 never falls; at random it does.
        key: a PRNG key, for stochastic rounding.
        mask: which weights decay: a tree of booleans, or a function of the parameters that returns one, as in
            `optax.adamw`; all of them if None.

    Returns:
        A transformation. With float32 everywhere it emits the updates of `optax.adamw`, to the bit.

    Example:
        >>> tx = any_precision_adamw(1e-3, use_kahan_summation=True, momentum_dtype=jnp.bfloat16)
        >>> state = tx.init({"w": jnp.ones(4, jnp.bfloat16)})
        >>> {name: optax.tree.get(state, name)["w"].dtype.name for name in ("mu", "nu", "compensation")}
        {'mu': 'bfloat16', 'nu': 'bfloat16', 'compensation': 'bfloat16'}

    References:
        pytorch/torchdistx, `AnyPrecisionAdamW`; Zamirai et al. 2020 (arXiv 2010.06192).
    """
    adamw = optax.adamw(learning_rate, b1, b2, eps, weight_decay=weight_decay, mask=mask)
    formats = {"^0/mu": momentum_dtype, "^0/nu": variance_dtype}  # from the root, whatever parameters are called
    moments = low_precision_state(adamw, formats, min_size=0, rounding=rounding, key=key)
    compensation = kahan_summation(compensation_buffer_dtype)  # made in any case, so that a wrong dtype is found
    return optax.with_extra_args_support(optax.chain(moments, compensation) if use_kahan_summation else moments)


def _checked_at_init(
    tx: optax.GradientTransformationExtraArgs, policy: Policy
) -> optax.GradientTransformationExtraArgs:
    """Refuse parameters that nobody has cast, or that a wrapper around this has widened: masters would do nothing."""
    narrow = lambda tree: any(_trees.is_narrower(leaf) for leaf in jax.tree.leaves(tree))

    def init_fn(params):
        if narrow(policy.cast_to_param(_trees.shapes_of(params))) and not narrow(params):
            raise ValueError(
                f"`mixed_precision`: the policy {policy_text(policy)!r} stores parameters below float32, but all of "
                "those given are float32 or wider. Cast them first: `params = policy.cast_to_param(params)`. If they "
                "are cast, a wrapper around this hides it (`upcast`, `low_precision_state`, `master_weights`): put "
                "this around everything else, as in `mixed_precision(low_precision_state(rule, formats), policy)`."
            )
        return tx.init(params)

    return optax.GradientTransformationExtraArgs(init_fn, tx.update)


def _require_use(argument: str, given: bool, needed: bool, policy: Policy, reason: str) -> None:
    if given and not needed:
        raise ValueError(
            f"`mixed_precision`: `{argument}` was given, but the policy {policy_text(policy)!r} {reason}, so it would "
            f"do nothing. Leave it out, or wrap the rule by hand."
        )
