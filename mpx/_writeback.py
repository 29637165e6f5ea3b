"""Choose the update that gives a 16-bit parameter the wanted value when Optax adds it.

Optax's `apply_updates` computes `(p + u).astype(p.dtype)`. A wrapper that has chosen
the new value `p'` must emit an update `u` that makes this sum `p'`. `float32(p') -
float32(p)` does so: both have at most 11 significant bits, so the difference is exact
unless they are many binades apart, and `p + u` is then exactly `p'`. `master' - p` is
not such an update: the sum rounds once more than the cast. A difference rounded to 16
bits misses more often still.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from mpx import formats
from mpx._finite import select
from mpx._straight_through import straight_through

# What `check_chain` finds in a traced program is known by a name in it: JAX has no
# other public way to say something of a value than `checkpoint_name`, which takes a
# string. The prefix keeps it apart from names that users give.
MARK = "mpx:"  # then the name of the transformation that emits a final update
SENT = "sent"  # after `MARK`: other devices receive the new value itself
# Names of calls, below: `fused_update` writes `new` where it meets the sum of a
# parameter and the update that lands on `new`, and what is kept for this case.
LANDING, WHERE_IT_LANDS = "mpx_landing_update", "mpx_where_it_lands"


def round_saturating(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Round to nearest in `dtype` and keep the dtype of `x`; a finite number never
    becomes infinite.

    An infinite parameter could not be repaired by an addition, however finite its
    master.
    """
    if x.dtype != np.float64:
        return formats.round_to(x, dtype, overflow="largest")
    rounded = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=23)
    largest = np.float64(np.finfo(np.float32).max)
    return straight_through(
        jnp.where(jnp.isfinite(x), jnp.clip(rounded, -largest, largest), rounded), x
    )


def landing_update(
    parameter: jax.Array, new: jax.Array, author: str, dtype: DTypeLike | None = None
) -> jax.Array:
    """Return the number that `optax.apply_updates` must add to a parameter to make it
    `new`.

    Args:
        parameter: of any floating dtype.
        new: the wanted value, in a wider dtype; the parameter's dtype must be able to
            hold it.
        author: the transformation that emits the update and relies on nobody changing
            it.
        dtype: that of the update; the dtype of `new` if None. In the dtype of the
            parameter it is exact where both numbers are within a factor of two
            (Sterbenz 1974, "Floating-Point Computation").

    Returns:
        An array; -0.0 where nothing changes, since adding +0.0 would turn -0.0 into
        +0.0.

    Example:
        >>> p, new = jnp.bfloat16(256), jnp.float32(2.0**-10)
        >>> float(
        ...     optax.apply_updates(p, states.landing_update(p, new, "my_wrapper"))
        ... ) == 2.0**-10
        True
    """
    return mpx_landing_update(parameter, new, author, dtype)


@functools.partial(jax.jit, static_argnums=(2, 3))
def mpx_landing_update(
    parameter: jax.Array, new: jax.Array, author: str, dtype: DTypeLike | None
) -> jax.Array:
    # Widen the parameter with a plain cast: if the compiler keeps excess precision in
    # it here, it does so in the addition too, and the sum is still `new`.
    wide = parameter.astype(new.dtype)
    unsigned = np.dtype(f"u{new.dtype.itemsize}")
    # Subtract nothing where nothing changes: inf - inf is NaN.
    difference = jnp.where(
        wide.view(unsigned) == new.view(unsigned), np.array(0, new.dtype), wide - new
    )
    # Change the sign on the bits: a compiler may turn `-(p - new)` into `new - p`,
    # whose zero is +0.0.
    sign = unsigned.type(1 << (8 * new.dtype.itemsize - 1))
    update = (difference.view(unsigned) ^ sign).view(new.dtype)
    update = straight_through(update, new - wide)
    return checkpoint_name(
        update if dtype is None else update.astype(dtype), MARK + author
    )


def applied_bits(parameter: jax.Array, update: jax.Array) -> jax.Array:
    """Return the bits (uint16) that `optax.apply_updates` will make of a bfloat16 or
    float16 parameter.

    The cast of the sum is written as in `optax.apply_updates`, so that both are one
    number of the program. What is stored beside a parameter should follow from this
    number: XLA for a TPU writes two results in one pass over memory if one follows from
    the other, and else computes the whole step twice.
    """
    total = parameter.astype(np.float32) + update
    return total.astype(parameter.dtype).view(np.uint16)


@jax.jit
def mpx_where_it_lands(
    parameter: jax.Array,
    update: jax.Array,
    new: jax.Array,
    kept: jax.Array,
    other: jax.Array,
) -> jax.Array:
    """Return `kept` where the addition of an update to a 16-bit parameter reaches
    `new`, else `other`.
    """
    lands = applied_bits(parameter, update) == new.view(np.uint16)
    return select(lands, kept, other)
