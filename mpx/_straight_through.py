"""Let derivatives pass a rounding as if it were not there: the straight-through
estimator.

The derivative of a rounding is zero almost everywhere, which no learned rate can use.
What is rounded here stands for the number before it.

References:
    Bengio et al. 2013, "Estimating or Propagating Gradients Through Stochastic Neurons"
    (arXiv 1308.3432).
"""

import jax
import jax.numpy as jnp
from jax import lax


@jax.custom_jvp
def straight_through(value: jax.Array, x: jax.Array) -> jax.Array:
    """Return `value`, computed from the bits of `x`, with the derivative of `x` in
    place of its own.
    """
    return value


@straight_through.defjvp
def _(primals, tangents):
    value, x = lax.stop_gradient(primals[0]), primals[1]

    def as_value(number):
        return lax.convert_element_type(number, value.dtype)

    # For second derivatives of a scan, where JAX drops custom rules: subtract a zero
    # that has the derivative. An infinite number has none.
    value = jnp.where(
        jnp.isfinite(x), value - as_value(lax.stop_gradient(x) - x), value
    )
    return value, as_value(tangents[1])
