"""What is read without a trace in the program that it is read from."""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from mpx import _trees

T = TypeVar("T")


def behind_barrier(tree: T) -> T:
    """The same numbers, of which the compiler does not see that the training reads them too.

    It neither fuses the arithmetic of the two, nor rounds that of the training otherwise because there are two
    readers. It is the bits that pass through the barrier: one of floating-point numbers has XLA on CPU place the
    reshaping of a gradient of one column elsewhere, and LLVM fuse another product of the rule with the sum.
    """
    leaves, treedef = jax.tree.flatten(tree)
    floats = {i: jnp.asarray(x) for i, x in enumerate(leaves) if _trees.is_floating(x)}
    bits = {i: lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}") for i, x in floats.items()}
    bits = lax.optimization_barrier(bits)
    hidden = {i: lax.bitcast_convert_type(x, floats[i].dtype) for i, x in bits.items()}
    return treedef.unflatten([hidden.get(i, x) for i, x in enumerate(leaves)])
