"""Keep a rounding: a function has one value, wherever it is called.

XLA may leave out a conversion to 16 bits and back, and does so by what stands around it: on a CPU behind products of
many rows and in front of a softmax, on a GPU where it adds up parts of a product. Then a sampler, which has one token
at a time, computes other logits than the trainer with whole sequences. No compiler leaves out `reduce_precision`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def kept(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Return a float32 array that was rounded to 16 bits, and is so whatever the compiler does; all else as it is.

    The derivative is that of the array. A primitive, because that of `reduce_precision` rounds cotangents.
    """
    return _kept.bind(x, dtype=np.dtype(dtype)) if x.dtype == np.float32 else x


def _rounded(x: jax.Array, dtype: Any) -> jax.Array:
    # With all exponents: float16 has subnormal numbers, which fewer bits would flush to zero.
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=jnp.finfo(dtype).nmant)


_kept = Primitive("rounding_kept")
_kept.def_impl(_rounded)
_kept.def_abstract_eval(lambda x, dtype: x)
ad.primitive_jvps[_kept] = lambda primals, tangents, dtype: (_kept.bind(*primals, dtype=dtype), tangents[0])
batching.defvectorized(_kept)
mlir.register_lowering(_kept, mlir.lower_fun(_rounded, multiple_results=False))
