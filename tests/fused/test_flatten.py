"""Check that a program without calls computes what the one with calls does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex_core

from mpx._fused.program import flatten
from tests.helpers import all_eqns, assert_same_bits

X = np.linspace(-2, 2, 8, dtype=np.float32)


@jax.custom_jvp
def steep(x):
    return x * 3


steep.defjvp(lambda primals, tangents: (steep(*primals), tangents[0] * 7))


@jax.custom_vjp
def flat(x):
    return x + 1


flat.defvjp(lambda x: (flat(x), None), lambda _, g: (g * 0,))
inside = jax.jit(lambda x, y: (y, x - y, x))
TABLE = np.arange(8, dtype=np.float32)

PROGRAMS = {
    "a call": lambda x: jax.jit(jnp.sin)(x),
    "a call in a call": jax.jit(lambda x: jax.jit(lambda y: jax.jit(jnp.cos)(y) * 2)(x) + 1),
    "a call twice": lambda x: inside(*inside(x, x * 2)[:2]),
    "a custom_jvp": lambda x: steep(steep(x)),
    "a custom_vjp": lambda x: flat(x) * x,
    "a checkpoint": jax.checkpoint(lambda x: jnp.tanh(x)),
    "constants": lambda x: jax.jit(lambda x: x * jnp.asarray(TABLE))(x) + jnp.asarray(TABLE),
    "an input and a literal as results": lambda x: (x, 1.0, jax.jit(lambda x: (x, 2.0))(x)),
    "a result that is not used": lambda x: inside(x, x + 1)[1],
    "a loop, which stays": lambda x: jax.lax.fori_loop(0, 3, lambda i, x: x * 2, jax.jit(jnp.exp)(x)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_without_calls_computes_the_same(name):
    jaxpr = jax.make_jaxpr(PROGRAMS[name])(X)
    program, constants = flatten(jaxpr)
    assert not {"jit", "pjit", "custom_jvp_call", "custom_vjp_call", "remat2"} & {
        e.primitive.name for e in program.eqns
    }
    closed = jex_core.ClosedJaxpr(program.replace(invars=[*program.invars, *constants]), [])
    actual = jex_core.jaxpr_as_fun(closed)(X, *constants.values())
    assert_same_bits(list(actual), list(jex_core.jaxpr_as_fun(jaxpr)(X)))


def test_the_same_calls_are_there_before():
    """Look at the programs, the negative control."""
    names = {eqn.primitive.name for f in PROGRAMS.values() for eqn in all_eqns(jax.make_jaxpr(f)(X))}
    assert {"jit", "custom_jvp_call", "custom_vjp_call"} <= names
