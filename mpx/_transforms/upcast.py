"""`upcast`: run any rule in float32."""

import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from mpx import _errors
from mpx._transforms.float32_world import run_in_float32


def upcast(
    inner: optax.GradientTransformation, dtype: DTypeLike = jnp.float32
) -> optax.GradientTransformationExtraArgs:
    """Give a rule float32 parameters and gradients, whatever the model's dtype; its updates are float32.

    A rule on bfloat16 parameters keeps bfloat16 moments, rounds its hyper-parameters to bfloat16 (0.999 becomes 1) and
    divides by an epsilon that float16 does not have. Inside `upcast` it computes as in float32, to the bit. The
    parameters themselves keep their dtype, which cannot hold all of an update. To keep the rest, use `master_weights`
    around the rule, or `kahan_summation` or `stochastic_rounding` *after* this, in a chain.

    Args:
        inner: any Optax transformation or chain.
        dtype: float32 or float64. Narrower floating leaves of parameters, gradients and extra arguments become `dtype`;
            all other leaves keep theirs.

    Returns:
        A transformation with the state of `inner` for float32 parameters. No update changes its structure or dtypes.

    Example:
        >>> params = {"w": jnp.ones(4, jnp.bfloat16)}
        >>> tx = upcast(optax.adam(1e-3))
        >>> state = tx.init(params)
        >>> optax.tree.get(state, "nu")["w"].dtype
        dtype('float32')
        >>> tx.update({"w": jnp.ones(4, jnp.bfloat16)}, state, params)[0]["w"].dtype
        dtype('float32')
    """
    return run_in_float32(inner, _errors.wide_dtype(dtype, "upcast"), "upcast")
