"""The table: whole, consistent, and right about what it says of the primitives."""

from collections import Counter

import jax
import jax.extend.core.primitives
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex_core

import mpx
from mpx._autocast.control_flow import HANDLERS
from mpx._autocast.rules import GROUPS, REASONS

EXPORTED = sorted(
    value.name for value in vars(jax.extend.core.primitives).values() if isinstance(value, jex_core.Primitive)
)
# torch.amp's lists for CUDA, as FIELD_NOTES has them, by the primitives that compute them.
TORCH_HALF = {"dot_general", "conv_general_dilated"}
TORCH_F32 = {
    "pow", "exp", "expm1", "log", "log1p", "rsqrt", "acos", "asin", "cosh", "sinh", "tan", "erf_inv", "reduce_sum",
    "reduce_prod", "cumsum", "cumprod",
}  # fmt: skip


def test_every_primitive_that_jax_exports_stands_in_the_table():
    """A new release of jax fails here, and not in a user's training run."""
    assert set(EXPORTED) - mpx.DEFAULT_RULES.keys() == set()


def test_every_primitive_stands_in_one_group_with_a_reason():
    counts = Counter(name for group in GROUPS for name in group.primitives)
    assert [name for name, count in counts.items() if count > 1] == []
    assert mpx.DEFAULT_RULES.keys() == REASONS.keys()
    assert all(group.reason for group in GROUPS)
    assert mpx.DEFAULT_RULES["polynomial"] == "keep"  # of jax 0.12


def test_the_tables_say_what_they_promise():
    by_rule = {rule: {name for name in REASONS if mpx.DEFAULT_RULES[name] == rule} for rule in ("narrow", "enter")}
    assert by_rule == {"narrow": TORCH_HALF | {"ragged_dot_general"}, "enter": set(HANDLERS)}
    different = {name for name in mpx.FAST_RULES if mpx.FAST_RULES[name] != mpx.DEFAULT_RULES.get(name)}
    assert {(mpx.DEFAULT_RULES[name], mpx.FAST_RULES[name]) for name in different} == {
        ("keep", "narrow_if_representable")
    }
    for rules in (mpx.DEFAULT_RULES, mpx.FAST_RULES):
        assert {rules[name] for name in TORCH_F32} == {"keep"}


def products(x):
    return jnp.tanh(x @ x)


def dtypes_of(fun, *args):
    return {eqn.primitive.name: eqn.outvars[0].aval.dtype for eqn in jax.make_jaxpr(fun)(*args).eqns}


def test_an_extended_table_is_followed():
    x = jnp.ones((3, 3), jnp.float32)
    kept = mpx.autocast(products, "bf16", rules=mpx.DEFAULT_RULES | {"dot_general": "keep"})
    assert dtypes_of(kept, x)["dot_general"] == np.float32
    narrowed = mpx.autocast(products, "bf16", rules=mpx.DEFAULT_RULES | {"tanh": "narrow"})
    assert dtypes_of(narrowed, x)["tanh"] == jnp.bfloat16
    loop = lambda x: jax.lax.fori_loop(0, 3, lambda _, x: x @ x, x)
    for rule in ("keep", "enter"):  # a loop that is kept is not entered
        program = jax.make_jaxpr(mpx.autocast(loop, "bf16", rules=mpx.DEFAULT_RULES | {"scan": rule}))(x)
        assert ("bf16" in str(program)) == (rule == "enter")


def test_a_primitive_of_ones_own_is_named_by_itself():
    own = jex_core.Primitive("own")
    own.def_abstract_eval(lambda x: x.update(dtype=x.dtype))
    rules = mpx.DEFAULT_RULES | {own: "narrow"}
    program = mpx.autocast(lambda x: own.bind(x), "f16", rules=rules)
    assert dtypes_of(program, jnp.ones(3, jnp.float32))["own"] == np.float16
    assert dtypes_of(mpx.autocast(lambda x: own.bind(x), "f16"), jnp.ones(3, jnp.float32))["own"] == np.float32


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"dot_genral": "keep"}, "no primitive of jax is called that"),
        ({"dot_general": "lowered"}, "can be narrow or narrow_if_representable or follow or keep"),
        ({"scan": "narrow"}, "can be enter or keep"),
        ({"dynamic_slice": "narrow"}, "can be follow or keep"),
        ({"custom_jvp_call": "narrow_if_representable"}, "can be follow or keep"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused(rules, message):
    with pytest.raises(ValueError, match=message):
        mpx.autocast(products, "bf16", rules=mpx.DEFAULT_RULES | rules)


def test_what_is_no_whole_table_is_refused():
    with pytest.raises(TypeError, match="must be a mapping"):
        mpx.autocast(products, "bf16", rules=["dot_general"])
    with pytest.raises(ValueError, match=r"`rules=mpx.DEFAULT_RULES \| \{\.\.\.\}`"):
        mpx.autocast(products, "bf16", rules={"exp": "keep"})


def test_fast_rules_run_activations_in_the_compute_dtype_and_norms_in_float32():
    def gelu(x):
        return jax.nn.gelu(x @ x)

    def norm(x):
        return jax.nn.standardize(x @ x) * jax.lax.rsqrt(((x @ x) ** 2).mean())

    x = jnp.ones((3, 3), jnp.float32)
    fast = lambda fun: [
        (eqn.primitive.name, eqn.outvars[0].aval.dtype)
        for eqn in jax.make_jaxpr(mpx.autocast(fun, "bf16", rules=mpx.FAST_RULES))(x).eqns
        if eqn.primitive.name not in ("convert_element_type", "dot_general")
    ]
    assert {dtype for _, dtype in fast(gelu)} == {np.dtype(jnp.bfloat16)}
    assert {dtype for _, dtype in fast(norm)} == {np.dtype(np.float32)}


def test_fast_rules_leave_an_operand_alone_that_the_compute_dtype_does_not_represent():
    """Rounding it first would lose its last bits. A bias is rounded, as it is where one casts by hand."""
    fun = lambda x, w, b: {"activation": x + x @ w, "bias": x @ w + b[None]}
    add = mpx.autocast(fun, "bf16", rules=mpx.FAST_RULES)
    matrix = jnp.ones((3, 3), jnp.float32)
    program = jax.make_jaxpr(add)(matrix, matrix, matrix[0])
    dtypes = [eqn.outvars[0].aval.dtype for eqn in program.eqns if eqn.primitive.name == "add"]
    assert dtypes == [np.float32, jnp.bfloat16]


def test_a_narrowed_operation_keeps_its_integer_operands():
    """An exponent of 257 has no bfloat16 value."""
    power = mpx.autocast(jax.lax.pow, "bf16", rules=mpx.DEFAULT_RULES | {"pow": "narrow"})
    program = jax.make_jaxpr(power)(jnp.float32(-1), jnp.int32(257))
    (eqn,) = [eqn for eqn in program.eqns if eqn.primitive.name == "pow"]
    assert [v.aval.dtype for v in eqn.invars] == [jnp.bfloat16, jnp.int32]


def test_fast_rules_add_up_in_float32_what_a_loop_carries():
    """A thousand halves, from zeros, which every dtype represents: in bfloat16 the sum stops at 128."""
    total = lambda xs: jax.lax.scan(lambda c, x: (c + x @ x, None), jnp.zeros((2, 2)), xs)[0]
    from_argument = lambda xs, c: jax.lax.scan(lambda c, x: (c + x @ x, None), c, xs)[0]
    xs = jnp.full((1000, 2, 2), 0.5)
    assert (mpx.autocast(total, "bf16", rules=mpx.FAST_RULES)(xs) == 500).all()
    assert (mpx.autocast(from_argument, "bf16", rules=mpx.FAST_RULES)(xs, jnp.zeros((2, 2))) == 500).all()


@pytest.mark.parametrize("shape", [(1, 2), (2,)])
def test_fast_rules_add_up_the_gradient_of_a_bias_in_float32(shape):
    """1,001 rows: bfloat16 has no such number. With an axis of one element jax broadcasts in the sum."""
    loss = lambda b: (jnp.ones((1001, 3)) @ jnp.ones((3, 2)) + jnp.broadcast_to(b, (1, 2))).sum()
    gradient = jax.grad(mpx.autocast(loss, "bf16", rules=mpx.FAST_RULES))(jnp.ones(shape))
    assert (gradient == 1001).all()


def test_fast_rules_do_not_round_the_gradients_of_stacked_biases():
    """257 rows: a stack of biases of bfloat16 goes through the loop in float32."""

    def loss(biases):
        product = lambda: jnp.ones((257, 3), jnp.float32) @ jnp.ones((3, 2), jnp.float32)
        step = lambda c, b: (c + (product() + b.reshape(1, 2)).sum(), None)
        return jax.lax.scan(step, jnp.float32(0), biases)[0]

    gradient = mpx.grad(mpx.autocast(loss, "bf16", rules=mpx.FAST_RULES))(jnp.ones((2, 2), jnp.bfloat16))
    assert (gradient == 257).all()
