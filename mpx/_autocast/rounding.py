"""Keep roundings: a function has one value, wherever it is called.

XLA may leave out a conversion to 16 bits and back, and does so by what stands around
it. A CPU has no products in 16 bits: XLA may round neither operands nor results. A GPU
has them: XLA does not round a small result which it adds up from parts. Then a sampler,
which has one token at a time, computes other logits than a trainer with whole
sequences. No compiler leaves out `reduce_precision`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import jet
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from mpx._autocast.precision import ContractionPrecision
from mpx._shardings import dividing_devices

# Of a device's part of a result. XLA (jax 0.10) splits a product if that makes less
# than 500 tiles of 64 x 128.
_MOST_OF_PARTS = 500 * 64 * 128


def kept(
    x: jax.Array, precision: ContractionPrecision, *, on_gpu: bool = False
) -> jax.Array:
    """Return a float32 array that is rounded to the 16 bits of a precision, as the
    program says already.

    Other arrays are returned unchanged. `on_gpu` is for results that are read in
    float32. The derivative is one.
    """
    if x.dtype != np.float32 or not precision.is_narrow:
        return x
    most = _MOST_OF_PARTS * dividing_devices()
    # A symbolic size (`jax.export`) may be.
    is_small = not isinstance(x.size, int) or x.size <= most
    return _rounding_kept.bind(x, dtype=precision.dtype, on_gpu=on_gpu and is_small)


def _reduced(x: jax.Array, dtype: Any, **_: bool) -> jax.Array:
    # With all exponents: float16 has subnormal numbers, which fewer bits would flush to
    # zero.
    return lax.reduce_precision(
        x, exponent_bits=8, mantissa_bits=jnp.finfo(dtype).nmant
    )


# A primitive, because the derivative of `reduce_precision` rounds cotangents.
_rounding_kept = Primitive("rounding_kept")
_rounding_kept.def_impl(_reduced)
_rounding_kept.def_abstract_eval(lambda x, **_: x)
ad.primitive_jvps[_rounding_kept] = lambda primals, tangents, **how: (
    _rounding_kept.bind(*primals, **how),
    tangents[0],
)
# Of a function that is linear.
ad.primitive_transposes[_rounding_kept] = lambda cotangent, _, **how: [cotangent]
batching.defvectorized(_rounding_kept)
jet.jet_rules[_rounding_kept] = lambda primals, series, **how: (
    _rounding_kept.bind(*primals, **how),
    series[0],
)
mlir.register_lowering(
    _rounding_kept,
    mlir.lower_fun(
        lambda x, dtype, on_gpu: _reduced(x, dtype) if on_gpu else x,
        multiple_results=False,
    ),
)
mlir.register_lowering(
    _rounding_kept, mlir.lower_fun(_reduced, multiple_results=False), platform="cpu"
)
