"""`Fp8`: what a user says about products of 8-bit floats; and the scales of 8-bit floats, which are powers of two."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

FORMATS = {"e4m3": np.dtype(jnp.float8_e4m3fn), "e5m2": np.dtype(jnp.float8_e5m2)}
SCALINGS = ("tensor", "row")
# Of products. float16 has no room for their scales.
RESULTS = np.dtype(jnp.bfloat16)
MANTISSA, BIAS = 23, 127  # of float32
_LARGEST_EXPONENT = 126  # of a scale whose inverse is a normal number too


@dataclasses.dataclass(frozen=True)
class Fp8:
    """The way in which `autocast` multiplies matrices in 8-bit floats: operands, scales, and what is left out.

    Operands of the forward product are rounded to `forward`, cotangents to `backward`: e4m3 has 3 bits of mantissa and
    a largest number of 448, e5m2 has 2 bits and 57,344. Before that they are multiplied by a scale that brings their
    largest magnitude near the largest number of the format. It is computed where the operand is used, at each step, so
    there is no state. (An operand that is no argument is rounded to bfloat16 first.) Products are added up in float32.
    Results are in bfloat16, and so is all else that `autocast` narrows.

    Hopper, Ada and Blackwell GPUs have such products. Elsewhere the numbers are the same, and it is slower than
    bfloat16.

    Attributes:
        forward: the format of the operands of the forward product, `"e4m3"` or `"e5m2"`.
        backward: the format of cotangents.
        scaling: `"tensor"`, one scale an operand; or `"row"`, one scale for each row of the left operand and each
            column of the right one, which keeps more of operands whose rows differ in size. For rows both operands are
            kept for the backward pass, which scales them along other axes; for tensors their 8 bits are.
        power_of_two: whether scales are powers of two, so that scaling is exact; otherwise the largest magnitude
            becomes the largest number of the format.
        min_size: what `1 / (1/m + 1/n + 1/k)` of a product of m x k and k x n numbers must be at least. What FP8 saves
            grows with m n k; finding scales and rounding costs time that grows with m k + k n + m n. In programs for an
            H200 the bound of two layers of a transformer's perceptron with their gradient is the same in FP8 and in
            bfloat16 at 400 (16,384 rows, a width of 512), and 0.69 of it at 1,187 (a width of 1,600).

    Raises:
        ValueError: if an attribute is none of these.

    Example:
        >>> loss_fn = lambda w, x: jnp.mean((x @ w) ** 2)
        >>> w, x = jax.ShapeDtypeStruct((2048, 2048), "float32"), jax.ShapeDtypeStruct((8192, 2048), "float32")
        >>> mpx.explain(loss_fn, "fp8")(w, x).contractions[0].runs_in
        'fp8'

    References:
        Micikevicius et al. 2022, FP8 Formats for Deep Learning (arXiv 2209.05433); scales as in the current scaling of
        Transformer Engine, and the dynamic scaling of torchao.
    """

    forward: Literal["e4m3", "e5m2"] = "e4m3"
    backward: Literal["e4m3", "e5m2"] = "e5m2"
    scaling: Literal["tensor", "row"] = "tensor"
    power_of_two: bool = True
    min_size: int = 450

    def __post_init__(self) -> None:
        for field in ("forward", "backward"):
            _require_one_of(FORMATS, getattr(self, field), field)
        _require_one_of(SCALINGS, self.scaling, "scaling")
        if not isinstance(self.power_of_two, bool):
            raise ValueError(f"`Fp8`: `power_of_two` must be True or False, but got {self.power_of_two!r}.")
        if not isinstance(self.min_size, int) or self.min_size < 0:
            raise ValueError(f"`Fp8`: `min_size` must be an integer of at least 0, but got {self.min_size!r}.")


def scale_exponents(largest: jax.Array, dtype: np.dtype) -> jax.Array:
    """Return exponents of the scales that bring magnitudes near the largest number of a format; 0 for zero.

    Magnitudes are given as the bits of float32 numbers, int32: they are in the order of the numbers. So the difference
    of the exponents is rounded down if that of the mantissas is negative.
    """
    limit = np.float32(jnp.finfo(dtype).max).view(np.int32)
    return jnp.where(largest == 0, 0, jnp.minimum((limit - largest) >> MANTISSA, _LARGEST_EXPONENT))


def power_of_two(exponent: jax.Array) -> jax.Array:
    """Return powers of two, float32, exactly on every device; exponents are those of normal numbers."""
    return lax.bitcast_convert_type((exponent + BIAS) << MANTISSA, np.float32)


def _require_one_of(allowed: Any, given: Any, field: str) -> None:
    if not isinstance(given, str) or given not in allowed:
        names = " or ".join(map(repr, allowed))
        raise ValueError(f"`Fp8`: `{field}` must be {names}, but got {given!r}.")
