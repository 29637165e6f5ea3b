"""Read numbers without a trace in the program that computes them."""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from mpx import _trees

T = TypeVar("T")


def behind_barrier(tree: T) -> T:
    """Return the same numbers, in such a way that the compiler does not see that the training run reads them too.

    It then fuses no arithmetic of a measure with that of the step, and rounds nothing in the step otherwise because a
    value has two readers. Bits pass through the barrier rather than floating-point numbers: with those XLA on CPU
    places the reshaping of a gradient of one column elsewhere, and LLVM contracts another product of the optimizer.
    """
    leaves, treedef = jax.tree.flatten(tree)
    floats = {i: jnp.asarray(x) for i, x in enumerate(leaves) if _trees.is_floating(x)}
    bits = {i: lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}") for i, x in floats.items()}
    bits = lax.optimization_barrier(bits)
    hidden = {i: lax.bitcast_convert_type(x, floats[i].dtype) for i, x in bits.items()}
    return treedef.unflatten([hidden.get(i, x) for i, x in enumerate(leaves)])
