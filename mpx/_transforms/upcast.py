"""`upcast`: a float32 world for any rule."""

import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from mpx import _errors
from mpx._transforms.float32_world import in_world


def upcast(
    inner: optax.GradientTransformation, dtype: DTypeLike = jnp.float32
) -> optax.GradientTransformationExtraArgs:
    """Give a rule float32 parameters and gradients, whatever the model's dtype; its updates are float32.

    A rule on bfloat16 parameters keeps bfloat16 moments, rounds its hyper-parameters to bfloat16 (0.999 becomes
    1) and divides by an epsilon that float16 does not have. Inside `upcast` it does what it does in float32,
    to the bit. The parameters themselves stay as they are: to keep what their dtype cannot hold of an update,
    use `master_weights`, or `kahan_summation` or `stochastic_rounding` *after* this, in a chain.

    Args:
        inner: any Optax transformation or chain.
        dtype: float32 or float64. Narrower floating leaves of parameters, gradients and extra arguments become
            `dtype`; wider ones and all others stay.

    Returns:
        A transformation with the state of `inner` for float32 parameters, whose structure and dtypes no update changes.

    Raises:
        TypeError: if `inner` is not a transformation; at `update`, if a gradient is not floating or complex.
        ValueError: if `dtype` is neither float32 nor float64; at `init`, if `master_weights`, `kahan_summation` or
            `stochastic_rounding` stands inside; at `update`, if gradients are not those of the parameters, or not of
            their shapes.

    Example:
        >>> params = {"w": jnp.ones(4, jnp.bfloat16)}
        >>> tx = upcast(optax.adam(1e-3))
        >>> state = tx.init(params)
        >>> optax.tree.get(state, "nu")["w"].dtype
        dtype('float32')
        >>> tx.update({"w": jnp.ones(4, jnp.bfloat16)}, state, params)[0]["w"].dtype
        dtype('float32')
    """
    return in_world(inner, _errors.wide_dtype(dtype, "upcast"), "upcast")
