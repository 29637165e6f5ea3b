"""Compute the new state of a rule a second time, on GPUs, so that nothing of it waits in memory for its scales.

The codes of a block need its scale, which is known only after all of the block. XLA for GPUs writes the new moments in
float32 in between, and reads them again: 16 bytes a parameter for two of them, and 8 of memory. Decoding and computing
them twice takes 4 bytes. XLA would merge the two, so that a barrier stands in front of one of them.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend import core as jex_core

from mpx._jaxprs import BLOCKS, PART, constants_of, mixing_culprit, open_jaxpr

T = TypeVar("T")

_ONCE = contextvars.ContextVar("once", default=False)


@contextlib.contextmanager
def computed_once() -> Iterator[None]:
    """Trace without computing anything a second time: for kernels that hold whole blocks, and so have no need of it."""
    token = _ONCE.set(True)
    try:
        yield
    finally:
        _ONCE.reset(token)


def computed_again(function: Callable[[T], tuple[Any, T]], state: T, where: T) -> tuple[Any, T, T | None]:
    """Return what a function of a state returns (something, and a new state), and the new state computed once more.

    The second time it starts from a copy of the leaves that `where` marks. It is None if that would cost more: if a
    part of the new state depends on more of a leaf than one element, say on a matrix product, or if the function has an
    effect, such as printing. Outside of `jax.jit` nothing would be gained. The function is traced once.
    """
    leaves, structure = jax.tree.flatten(state)
    if _ONCE.get() or not any(isinstance(leaf, Tracer) for leaf in leaves):
        return *function(state), None
    traced, shapes = jax.make_jaxpr(lambda *leaves: function(structure.unflatten(leaves)), return_shape=True)(*leaves)
    result, new_state = jax.tree.unflatten(jax.tree.structure(shapes), jex_core.jaxpr_as_fun(traced)(*leaves))
    count = len(jax.tree.leaves(new_state))
    program = open_jaxpr(traced)
    program = program.replace(outvars=program.outvars[len(program.outvars) - count :])
    of_state = jex_core.ClosedJaxpr(program, constants_of(traced))
    inputs = [PART if np.shape(leaf) else None for leaf in leaves]
    if traced.effects or mixing_culprit(of_state, inputs, axis="") is not None:
        return result, new_state, None
    copies = [
        _copy(leaf) if marked else leaf for leaf, marked in zip(leaves, structure.flatten_up_to(where), strict=True)
    ]
    again = jex_core.jaxpr_as_fun(of_state)(*copies)
    return result, new_state, jax.tree.unflatten(jax.tree.structure(new_state), again)


def _copy(x: jax.Array) -> jax.Array:
    """Return an array that XLA for GPUs takes for another one; elsewhere, computing twice would only take longer."""
    with jax.named_scope(BLOCKS):
        barrier = lax.optimization_barrier
        return lax.platform_dependent(x, cuda=barrier, rocm=barrier, default=lambda x: x)
