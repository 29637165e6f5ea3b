"""The largest size that fits into a memory."""

import math
from collections.abc import Callable

from mpx import _errors

_LARGEST_SIZE = 2**60


def largest_that_fits(
    bytes_of: Callable[[int], int], memory_bytes: float, *, start: int = 1, resolution: float = 0.0
) -> int:
    """Return the largest size whose bytes fit into a memory, by bisection.

    Bytes must not fall as the size grows. XLA's temporaries may fall a little from one size to the next, with
    another program. Then the answer still fits, and a larger size may fit as well.

    Args:
        bytes_of: the bytes for a size of 1 or more: parameters, layers, examples in a batch.
        memory_bytes: the memory of one device.
        start: the size to try first.
        resolution: a share of the answer, for bytes that take long to find. With 0.03 the search ends at a size that
            fits if one 3% larger does not; with 0, if the next one does not.

    Returns:
        The size; 0 if not even 1 fits.

    Raises:
        ValueError: if `memory_bytes` is not a number above 0, `start` is below 1, `resolution` not from 0 to below 1,
            or all sizes up to 2**60 fit.

    Example:
        >>> layers = lambda n: {"w": jax.ShapeDtypeStruct((n, 4096, 4096), jnp.float32)}
        >>> largest_that_fits(lambda n: memory_plan(layers(n), optax.adam(1e-3)).total_bytes, 80e9)
        298
    """
    if not 0 < memory_bytes < math.inf:
        raise ValueError(
            f"`largest_that_fits`: `memory_bytes` must be above 0, such as 80e9, but got {memory_bytes!r}."
        )
    if not _errors.is_integer(start) or start < 1:
        raise ValueError(f"`largest_that_fits`: `start` must be an integer above 0, but got {start!r}.")
    if not 0 <= resolution < 1:
        raise ValueError(f"`largest_that_fits`: `resolution` must be from 0 to below 1, but got {resolution!r}.")
    low, high = 0, start
    while bytes_of(high) <= memory_bytes:
        low, high = high, 2 * high
        if low > _LARGEST_SIZE:
            raise ValueError(
                f"`largest_that_fits`: even a size of {low:,} fits into {memory_bytes:,} bytes. Does `bytes_of` depend "
                "on its argument?"
            )
    while high - low > max(1, int(low * resolution)):
        middle = (low + high) // 2
        low, high = (middle, high) if bytes_of(middle) <= memory_bytes else (low, middle)
    return low
