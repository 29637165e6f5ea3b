"""`any_precision_adamw`: torchdistx's AnyPrecisionAdamW from the wrappers of mpx."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.typing import DTypeLike

from mpx._stored.state_format import StateFormat
from mpx._transforms.kahan_summation import kahan_summation
from mpx._transforms.low_precision_state import Rounding, low_precision_state


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
    rounding: Rounding | None = None,
    key: jax.Array | None = None,
    mask: Any | Callable[[optax.Params], Any] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """AdamW for pure 16-bit training: each moment in a dtype of its own, and Kahan
    summation of the parameters.

    It has the options and defaults of torchdistx's AnyPrecisionAdamW, but computes in
    float32 and rounds once where something is stored; and weight decay is part of the
    update. (torchdistx multiplies bfloat16 weights by `1 - learning_rate *
    weight_decay`, which rounds to 1.) With bfloat16 moments and Kahan summation a
    training run takes 10 bytes a parameter, gradients included. Without Kahan summation
    use it for float32 parameters.

    Args:
        learning_rate: a number or a schedule.
        b1: decay of the momentum.
        b2: decay of the variance.
        eps: added to the root of the variance.
        weight_decay: decoupled, multiplied by the learning rate.
        use_kahan_summation: whether `kahan_summation` follows.
        momentum_dtype: the format of the stored momentum: any format of
            `low_precision_state`, such as `"bf16"`.
        variance_dtype: the format of the stored variance: any of these but float16.
        compensation_buffer_dtype: the dtype that Kahan summation keeps: bfloat16,
            float16 or float32.
        rounding: how the moments are rounded: `"nearest"`, as in torchdistx, or
            `"stochastic"`. To nearest, a bfloat16 variance with `b2` of 0.999 never
            falls; at random it does. None: 8 bits at random, 16 bits to nearest.
        key: a PRNG key, for stochastic rounding; `jax.random.key(0)` if None.
        mask: which weights decay: a tree of booleans, or a function of the parameters
            that returns one, as in `optax.adamw`; all of them if None.

    Returns:
        A transformation. With float32 everywhere it emits the updates of `optax.adamw`,
        to the bit.

    Raises:
        ValueError: if a dtype is not in these lists, or `rounding` and `key` do not go
            together; at `init`, if `variance_dtype` is float16.

    Example:
        >>> tx = any_precision_adamw(
        ...     1e-3, use_kahan_summation=True, momentum_dtype=jnp.bfloat16
        ... )
        >>> state = tx.init({"w": jnp.ones(4, jnp.bfloat16)})
        >>> {
        ...     name: optax.tree.get(state, name)["w"].dtype.name
        ...     for name in ("mu", "nu", "compensation")
        ... }
        {'mu': 'bfloat16', 'nu': 'bfloat16', 'compensation': 'bfloat16'}

    References:
        pytorch/torchdistx, `AnyPrecisionAdamW`; Zamirai et al. 2020 (arXiv 2010.06192).
    """
    adamw = optax.adamw(
        learning_rate, b1, b2, eps, weight_decay=weight_decay, mask=mask
    )
    # From the root, whatever parameters are called.
    formats = {
        "^0/mu": momentum_dtype,
        "^0/nu": variance_dtype,
    }
    moments = low_precision_state(
        adamw, formats, min_size=0, rounding=rounding, key=key
    )
    # Made in any case, so that a wrong dtype is found.
    compensation = kahan_summation(compensation_buffer_dtype)
    return optax.with_extra_args_support(
        optax.chain(moments, compensation) if use_kahan_summation else moments
    )
