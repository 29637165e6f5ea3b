"""`newton_schulz`: make the singular values of a matrix nearly one, as Muon does."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def newton_schulz(
    x: jax.Array,
    *,
    coefficients: Sequence[float] = _COEFFICIENTS,
    steps: int = 5,
    eps: float = 1e-8,
) -> jax.Array:
    """Make the singular values of a matrix nearly one, and keep its singular vectors.

    This is the iteration of Muon: `x <- a x + b (x x^T) x + c (x x^T)^2 x`, from
    `x / ||x||`. A matrix with more rows than columns is transposed on the way.

    Args:
        x: `[m, n]`, floating. Give it to `each_matrix` for stacks and shards.
        coefficients: `(a, b, c)`.
        steps: how many times.
        eps: added to the norm, so that a matrix of zeros stays one.

    Returns:
        `[m, n]`, in the dtype of `x`: the operations of `optax.contrib.muon`, in the
        same order.

    Raises:
        ValueError: if `x` has not two axes.

    Example:
        >>> x = newton_schulz(jnp.diag(jnp.array([1.0, 2.0, 4.0])))
        >>> x.round(2)
        Array([[0.7 , 0.  , 0.  ],
               [0.  , 1.13, 0.  ],
               [0.  , 0.  , 0.82]], dtype=float32)

    References:
        Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks".
    """
    if x.ndim != 2:
        raise ValueError(
            f"`newton_schulz` takes one matrix, but got {list(x.shape)}. Apply it to"
            " the last two axes of each leaf by `mpx.each_matrix(mpx.newton_schulz)`."
        )
    a, b, c = coefficients
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = x / (jnp.linalg.norm(x, "fro") + eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if is_tall else x
