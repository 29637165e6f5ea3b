"""Check the facts about primitives, and that values are followed through programs of
every form.
"""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core as jex_core

from mpx._primitives import _ROWS, PRIMITIVES

X = {
    "floats": np.linspace(0.1, 0.9, 8, dtype=np.float32),
    "integers": np.arange(8, dtype=np.int32),
    "truth": np.arange(8) % 3 == 0,
    "complex": np.linspace(0.1, 0.9, 8, dtype=np.complex64),
}


def applied(name):
    """Yield the function of `jax.lax` of this name, with operands of the first kind of
    numbers that it takes.
    """
    function = getattr(lax, name.removesuffix("_p"), None)
    # Of jax 0.12, which takes a sequence of coefficients.
    if name == "polynomial" and function:
        function = lambda x, a: lax.polynomial(x, [a, a])
    count = {"clamp": 3, "select_n": 3}.get(name, 1)
    for x in X.values():
        for operands in ([x] * count, [x] * 2, [X["truth"], x, x]):
            try:
                program = jax.make_jaxpr(function)(*operands)
            except (TypeError, ValueError):
                continue
            if name in {eqn.primitive.name for eqn in program.eqns}:
                return function, operands
    return None


# Newer releases of jax, TPUs and kernels have these. All others are primitives of the
# oldest release.
ELSEWHERE = {
    "broadcast_to",
    "one_minus_square",
    "polynomial",
    "reciprocal",
    "roll",
    "stack",
    "stop_gradient",
    "unstack",
}


@pytest.mark.skipif(
    not jax.__version__.startswith("0.10."),
    reason=(
        "newer releases may rename primitives; a list of names for each release would"
        " lift it"
    ),
)
def test_every_name_is_that_of_a_primitive():
    """A misspelled name would say nothing; and each primitive stands in one row."""
    names = {p.name for p in gc.get_objects() if isinstance(p, jex_core.Primitive)}
    assert PRIMITIVES.keys() - names - ELSEWHERE == set()
    assert len(PRIMITIVES) == sum(len(row.split()) for row in _ROWS)


def test_an_elementwise_function_of_a_part_is_the_part_of_the_function():
    """Negative control: sums along an axis, and reversals."""
    elementwise = [name for name, facts in PRIMITIVES.items() if facts.elementwise]
    checked = {name: found for name in elementwise if (found := applied(name))}
    assert len(checked) >= 60
    run = jax.jit(
        lambda given: {
            name: checked[name][0](*operands) for name, operands in given.items()
        }
    )
    of = lambda which: {
        name: [x[which] for x in operands] for name, (_, operands) in checked.items()
    }
    wholes, parts = run(of(slice(None))), run(of(slice(2, 5)))
    for name in checked:
        whole, part = (jax.tree.leaves(results[name])[0] for results in (wholes, parts))
        np.testing.assert_array_equal(whole[2:5], part, err_msg=name)
    for function in (lax.cumsum, lambda x: lax.rev(x, (0,))):
        assert (function(X["floats"])[2:5] != function(X["floats"][2:5])).any()


def test_an_element_is_moved_unchanged():
    """Distinct integers in, the same integers out."""
    functions = (
        lambda x: x.reshape(2, 4),
        lambda x: x[::-1],
        lambda x: x[jnp.array([3, 3])],
        lambda x: jnp.tile(x, 2),
    )
    for function in functions:
        names = {
            eqn.primitive.name for eqn in jax.make_jaxpr(function)(jnp.arange(8)).eqns
        }
        assert {PRIMITIVES[name].moves for name in names & PRIMITIVES.keys()} & {
            "same",
            "moved",
        }
        assert set(np.ravel(function(jnp.arange(8))).tolist()) <= set(range(8))
