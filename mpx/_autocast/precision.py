"""The precisions of a contraction: a 16-bit dtype, 8-bit floats, or an algorithm for
float32 operands.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mpx import _policy
from mpx._dtypes import dtype_or_none
from mpx._fp8 import RESULTS, Fp8
from mpx._recipes import nearest


@dataclasses.dataclass(frozen=True)
class ContractionPrecision:
    """The precision of contractions."""

    name: str  # as users write it: `bf16`, `f16`, `f32`, `tf32`, `bf16x3`, `fp8`
    dtype: np.dtype  # of operands and results
    # how hardware multiplies float32 operands; None for the default
    algorithm: lax.DotAlgorithmPreset | None = None
    fp8: Fp8 | None = None  # how matrix products of 8-bit floats run, if they do

    @property
    def is_narrow(self) -> bool:
        """Return whether operands are rounded to a 16-bit format."""
        return self.dtype.itemsize == 2

    @property
    def is_plain(self) -> bool:
        """Return whether contractions run as in a plain float32 program."""
        return not self.is_narrow and self.algorithm is None


BF16 = ContractionPrecision("bf16", np.dtype(jnp.bfloat16))
F16 = ContractionPrecision("f16", np.dtype(np.float16))
F32 = ContractionPrecision("f32", np.dtype(np.float32))
FP8 = ContractionPrecision("fp8", RESULTS, fp8=Fp8())
_TF32 = ContractionPrecision("tf32", F32.dtype, lax.DotAlgorithmPreset.TF32_TF32_F32)
_BF16X3 = ContractionPrecision(
    "bf16x3", F32.dtype, lax.DotAlgorithmPreset.BF16_BF16_F32_X3
)
_NO_DTYPES = {precision.name: precision for precision in (_TF32, _BF16X3, FP8)}
_BY_DTYPE = {precision.dtype: precision for precision in (BF16, F16, F32)}


def get_precision(policy_or_dtype: Any) -> ContractionPrecision:
    """Read what a user gives to `autocast`: a policy, a dtype or its name, `"tf32"`,
    `"bf16x3"`, FP8.

    Raises:
        ValueError: if it is anything else, or `"tf32"` on a TPU, which has no such
            numbers.
    """
    if isinstance(policy_or_dtype, _policy.Policy):
        policy_or_dtype = policy_or_dtype.fp8 or policy_or_dtype.compute_dtype
    if isinstance(policy_or_dtype, Fp8):
        return dataclasses.replace(FP8, fp8=policy_or_dtype)
    if isinstance(policy_or_dtype, str) and policy_or_dtype in _NO_DTYPES:
        return _on_this_backend(_NO_DTYPES[policy_or_dtype])
    dtype = dtype_or_none(policy_or_dtype)
    if dtype is None:
        raise ValueError(
            "`autocast` needs a policy or its string ('compute=bf16'), a dtype"
            " (bfloat16, float16, float32), or one of 'bf16', 'f16', 'f32', 'tf32',"
            f" 'bf16x3', 'fp8' (or an `mpx.Fp8`), but got {policy_or_dtype!r}. "
            + nearest(str(policy_or_dtype))
        )
    return precision_of_dtype(dtype)


def precision_of_dtype(dtype: np.dtype) -> ContractionPrecision:
    """Return the precision of a dtype."""
    if dtype not in _BY_DTYPE:
        hint = (
            " Products of 8-bit floats are 'fp8'."
            if dtype.name.startswith("float8")
            else ""
        )
        raise ValueError(
            "`autocast` computes in bfloat16, float16 or float32, but got"
            f" {dtype}.{hint}"
        )
    return _BY_DTYPE[dtype]


def widest(
    asked: Iterable[ContractionPrecision | None],
) -> ContractionPrecision | None:
    """Return the one precision that is asked for, float32 if several are, or None."""
    found = {*asked} - {None}
    return F32 if len(found) > 1 else next(iter(found), None)


def _on_this_backend(precision: ContractionPrecision) -> ContractionPrecision:
    """Take TF32 where it exists: on NVIDIA GPUs. A CPU multiplies float32 numbers
    unrounded, which is more exact.
    """
    backend = jax.default_backend()
    if precision is not _TF32 or backend not in ("cpu", "tpu"):
        return precision
    if backend == "tpu":
        raise ValueError(
            "`autocast`: a TPU has no TF32; use 'bf16x3', whose error is as small, or"
            " 'bf16'."
        )
    return dataclasses.replace(precision, algorithm=None)
