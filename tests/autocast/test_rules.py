"""The table: whole, consistent, and right about what it says of the primitives."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

import mpx
from mpx._autocast.control_flow import HANDLERS
from mpx._autocast.rules import can_narrow

# torch.amp's lists for CUDA, by the primitives that compute them.
TORCH_HALF = {"dot_general", "conv_general_dilated"}
TORCH_F32 = {
    "pow", "exp", "expm1", "log", "log1p", "rsqrt", "acos", "asin", "cosh", "sinh", "tan", "erf_inv", "reduce_sum",
    "reduce_prod", "cumsum", "cumprod",
}  # fmt: skip


def test_the_tables_say_what_they_promise():
    """What `torch.autocast` keeps in float32 is kept, and may be narrowed by a table of
    one's own.
    """
    by_rule = {
        rule: {name for name, r in mpx.DEFAULT_RULES.items() if r == rule}
        for rule in ("narrow", "enter")
    }
    assert by_rule == {
        "narrow": TORCH_HALF | {"ragged_dot_general"},
        "enter": set(HANDLERS),
    }
    assert "keep" not in mpx.DEFAULT_RULES.values()  # which is the default
    assert not TORCH_F32 & mpx.DEFAULT_RULES.keys()
    assert all(map(can_narrow, TORCH_F32))


def products(x):
    return jnp.tanh(x @ x)


def dtypes_of(fun, *args):
    return {
        eqn.primitive.name: eqn.outvars[0].aval.dtype
        for eqn in jax.make_jaxpr(fun)(*args).eqns
    }


def test_an_extended_table_is_followed():
    x = jnp.ones((8, 8), jnp.float32)
    kept = mpx.autocast(
        products, "bf16", rules=mpx.DEFAULT_RULES | {"dot_general": "keep"}
    )
    assert dtypes_of(kept, x)["dot_general"] == np.float32
    narrowed = mpx.autocast(products, "bf16", rules={"tanh": "narrow"})
    assert {dtypes_of(narrowed, x)[name] for name in ("tanh", "dot_general")} == {
        np.dtype(jnp.bfloat16)
    }
    loop = lambda x: jax.lax.fori_loop(0, 3, lambda _, x: x @ x, x)
    for rule in ("keep", "enter"):  # a loop that is kept is not entered
        program = jax.make_jaxpr(
            mpx.autocast(loop, "bf16", rules=mpx.DEFAULT_RULES | {"scan": rule})
        )(x)
        assert ("bf16" in str(program)) == (rule == "enter")


def test_a_primitive_of_ones_own_is_named_by_itself():
    own = jex_core.Primitive("own")
    own.def_abstract_eval(lambda x: x.update(dtype=x.dtype))
    rules = mpx.DEFAULT_RULES | {own: "narrow"}
    program = mpx.autocast(lambda x: own.bind(x), "f16", rules=rules)
    assert dtypes_of(program, jnp.ones(3, jnp.float32))["own"] == np.float16
    assert (
        dtypes_of(mpx.autocast(lambda x: own.bind(x), "f16"), jnp.ones(3, jnp.float32))[
            "own"
        ]
        == np.float32
    )


def test_a_narrowed_operation_keeps_its_integer_operands():
    """An exponent of 257 has no bfloat16 value."""
    power = mpx.autocast(
        jax.lax.pow, "bf16", rules=mpx.DEFAULT_RULES | {"pow": "narrow"}
    )
    program = jax.make_jaxpr(power)(jnp.float32(-1), jnp.int32(257))
    (eqn,) = [eqn for eqn in program.eqns if eqn.primitive.name == "pow"]
    assert [v.aval.dtype for v in eqn.invars] == [jnp.bfloat16, jnp.int32]


def test_a_bias_of_a_narrowed_addition_gets_a_float32_sum():
    """Of 257 rows. In bfloat16 the sum is 256."""
    add = mpx.autocast(
        lambda b, x: jax.lax.add(x, b).sum(),
        "bf16",
        rules=mpx.DEFAULT_RULES | {"add": "narrow"},
    )
    program = jax.make_jaxpr(jax.grad(add))(jnp.zeros((1, 2)), jnp.ones((257, 2)))
    sums = [
        eqn.invars[0].aval.dtype
        for eqn in program.eqns
        if eqn.primitive.name == "reduce_sum"
    ]
    assert set(sums) == {np.dtype(np.float32)}
    assert (jax.grad(add)(jnp.zeros((1, 2)), jnp.ones((257, 2))) == 257).all()
