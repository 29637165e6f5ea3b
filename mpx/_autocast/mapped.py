"""Products of a vector and a matrix, which a `jax.vmap` around `autocast` may make
products of two matrices.

A solver or a sampler that is called with the vector field or the density of one example
maps it over a batch later. So such a product is a primitive of its own, with the
derivatives of its float32 program. JAX's rule for a batch tells what the product
becomes: a product of two matrices runs in the compute dtype, any other one stays.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental import jet
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.interpreters import ad, batching

from mpx._autocast import contraction
from mpx._autocast import wide_gradients as wide

# Runs a contraction in the compute dtype.
Narrow = Callable[[JaxprEqn, list[Any]], jax.Array]


def product(eqn: JaxprEqn, operands: list[Any], narrow: Narrow) -> jax.Array:
    """Run a product in float32, or by `narrow` where a `jax.vmap` makes a product of
    matrices of it.
    """
    as_traced = functools.partial(eqn.primitive.bind, **eqn.params)
    return _bound(as_traced, operands, narrow)


def _bound(function: Callable[..., Any], operands: Any, narrow: Narrow) -> jax.Array:
    return _mapped.bind(
        *operands, program=jax.make_jaxpr(function)(*operands), narrow=narrow
    )


def _product_transposed(
    cotangent: Any, lhs: Any, rhs: Any, program: ClosedJaxpr, narrow: Narrow
) -> list[Any]:
    """Return the cotangent of the one operand that the product is linear in."""
    if type(cotangent) is ad.Zero:
        return [None, None]
    is_left = ad.is_undefined_primal(lhs)
    x, other = (lhs, rhs) if is_left else (rhs, lhs)

    def pull(cotangent, other):
        def forward(x):
            pair = (x, other) if is_left else (other, x)
            return wide.run_program(*pair, program=program)

        return jax.linear_transpose(forward, x.aval)(cotangent)[0]

    result = _bound(pull, (cotangent, other), narrow)
    return [result, None] if is_left else [None, result]


def _product_batched(
    operands: list[Any], axes: list[int | None], program: ClosedJaxpr, narrow: Narrow
) -> tuple[Any, int]:
    one = functools.partial(wide.run_program, program=program)
    batched = jax.make_jaxpr(jax.vmap(one, axes))(*operands)

    def contracted(eqn: JaxprEqn, operands: list[Any]) -> Any:
        if contraction.why_no_gain(eqn) is not None:
            return product(eqn, operands, narrow)
        return lax.convert_element_type(narrow(eqn, operands), np.float32)

    return wide.evaluated(batched, operands, contracted), 0


_mapped = wide.primitive_of_a_program("product_that_may_be_mapped")
ad.defjvp(
    _mapped,
    lambda t, lhs, rhs, **params: _mapped.bind(t, rhs, **params),
    lambda t, lhs, rhs, **params: _mapped.bind(lhs, t, **params),
)
ad.primitive_transposes[_mapped] = _product_transposed
batching.primitive_batchers[_mapped] = _product_batched
jet.jet_rules[_mapped] = lambda primals, series, program, narrow: jet.jet(
    functools.partial(wide.run_program, program=program), primals, series
)
