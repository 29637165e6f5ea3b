"""`Fp8`, the user's choices for products of 8-bit floats, and scales that are powers of
two.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from mpx._errors import require_choice

FORMATS = {"e4m3": np.dtype(jnp.float8_e4m3fn), "e5m2": np.dtype(jnp.float8_e5m2)}
# The dtype of products. float16 lacks the range for their scales.
RESULTS = np.dtype(jnp.bfloat16)
MANTISSA, BIAS = 23, 127  # of float32
_LARGEST_EXPONENT = 126  # the inverse of a scale is a normal number too


@dataclasses.dataclass(frozen=True)
class Fp8:
    """How `autocast` multiplies matrices in 8-bit floats.

    Operands of the forward product are rounded to `forward`, cotangents to `backward`:
    e4m3 has 3 bits of mantissa and a largest number of 448, e5m2 has 2 bits and 57,344.
    First they are multiplied by a power of two that brings their largest magnitude near
    the largest number of the format. This scale is computed where the operand is used,
    at each step, so there is no state. (An operand that is not an argument is rounded
    to bfloat16 first.) Products are added up in float32. Results are bfloat16, like
    everything else that `autocast` narrows.

    Hopper, Ada and Blackwell GPUs have such products. Other devices give the same
    numbers, slower than in bfloat16.

    Attributes:
        forward: the format of the operands of the forward product, `"e4m3"` or
            `"e5m2"`.
        backward: the format of cotangents.
        min_extent: the smallest `1 / (1/m + 1/n + 1/k)` of a product of m x k and k x n
            numbers that runs in FP8; smaller products run in bfloat16. FP8 saves time
            that grows with m n k, and scaling and rounding cost time that grows with m
            k + k n + m n. In programs for an H200 a transformer's perceptron with its
            gradient has the same bound in FP8 and in bfloat16 at 400, and 0.69 of it at
            1,187.

    Example:
        >>> loss_fn = lambda w, x: jnp.mean((x @ w) ** 2)
        >>> w, x = (
        ...     jax.ShapeDtypeStruct((2048, 2048), "float32"),
        ...     jax.ShapeDtypeStruct((8192, 2048), "float32"),
        ... )
        >>> mpx.explain(loss_fn, "fp8")(w, x).contractions[0].runs_in
        'fp8'

    References:
        Micikevicius et al. 2022, FP8 Formats for Deep Learning (arXiv 2209.05433).
        Transformer Engine calls such scales current scaling, torchao dynamic scaling.
    """

    forward: Literal["e4m3", "e5m2"] = "e4m3"
    backward: Literal["e4m3", "e5m2"] = "e5m2"
    min_extent: int = 450

    def __post_init__(self) -> None:
        for field in ("forward", "backward"):
            require_choice(FORMATS, getattr(self, field), f"`Fp8`: `{field}`")
        if not isinstance(self.min_extent, int) or self.min_extent < 0:
            raise ValueError(
                "`Fp8`: `min_extent` must be an integer of at least 0, but got"
                f" {self.min_extent!r}."
            )


def scale_exponents(largest: jax.Array, dtype: np.dtype) -> jax.Array:
    """Return the exponents of scales that bring magnitudes near the largest number of a
    format; 0 for zero.

    `largest` has the bits of float32 magnitudes, as int32. Bits are ordered like the
    numbers, so the shift rounds the difference of the exponents down where the
    difference of the mantissas is negative.
    """
    limit = np.float32(jnp.finfo(dtype).max).view(np.int32)
    return jnp.where(
        largest == 0, 0, jnp.minimum((limit - largest) >> MANTISSA, _LARGEST_EXPONENT)
    )


def power_of_two(exponent: jax.Array) -> jax.Array:
    """Return powers of two in float32, exact on every device. Exponents must be in the
    range of normal numbers.
    """
    return ((exponent + BIAS) << MANTISSA).view(np.float32)
