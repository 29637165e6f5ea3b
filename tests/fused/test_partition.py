"""Check what becomes a part of a step that a kernel runs, and the reasons for what does
not.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx
from tests.rules import RULES, moment_fields

pytestmark = pytest.mark.optax_promotion

SHAPES = {"large": (32, 64), "small": (128,), "ragged": (3, 50), "scalar": ()}


def shapes(dtype=jnp.bfloat16, **of_leaves):
    return {
        name: jax.ShapeDtypeStruct(shape, dtype)
        for name, shape in (of_leaves or SHAPES).items()
    }


def rows_of(tx, params=None, **extra_args):
    return {
        row.path: row
        for row in mpx.fused_update(tx)
        .plan(shapes() if params is None else params, **extra_args)
        .rows
    }


def elementwise(function):
    return optax.stateless(lambda updates, params: jax.tree.map(function, updates))


def less_its_largest_of_three(u):
    blocks = u.reshape(-1, 3)
    return (blocks - jnp.max(blocks, 1, keepdims=True)).reshape(u.shape)


def in_blocks(size, rule=None):
    return mpx.low_precision_state(
        rule or optax.adamw(1e-2), {"mu|nu": mpx.Blockwise8bit(size)}, min_size=512
    )


def signs_kept():
    init = lambda params: jax.tree.map(lambda p: jnp.zeros(p.shape, bool), params)
    return optax.GradientTransformation(
        init,
        lambda updates, state, params: (updates, jax.tree.map(jnp.signbit, updates)),
    )


def test_large_leaves_have_a_kernel_each_and_small_ones_are_left_to_xla():
    rows = rows_of(
        mpx.master_weights(optax.adamw(1e-2), storage="split"),
        shapes(**SHAPES, odd=(31, 75)),
    )
    assert {name: row.runs for name, row in rows.items()} == {
        "large": "a kernel", "small": "XLA", "ragged": "XLA", "scalar": "XLA", "odd": "XLA"
    }  # fmt: skip
    assert rows["small"].reason == "it is small and has no blocks"
    assert rows["odd"].reason == "its 2325 elements cannot be divided into rows of 128"


LEFT_TO_XLA = {
    "a sort": (
        elementwise(lambda u: jnp.sort(u.ravel()).reshape(u.shape)),
        "arrays come from `sort`",
    ),
    "a sum": (
        elementwise(lambda u: u - u.mean(-1, keepdims=True)),
        r"`reduce_sum` mixes elements|come from `\w+`",
    ),
    "a transposition": (elementwise(lambda u: u + u.T.reshape(u.shape)), "`transpose`"),
    "a row beside a column": (elementwise(lambda u: u[:1] + u[:, :1]), r"`\w+`"),
    "adafactor": (RULES["adafactor"].make(), r"`\w+`"),
    "muon": (RULES["contrib.muon"].make(), r"`(scan|while|dot_general)`"),
    "MultiSteps": (
        optax.MultiSteps(optax.adamw(1e-2), 2).gradient_transformation(),
        "`cond`",
    ),
    "bool state": (signs_kept(), "kernels do not read or write `bool`"),
    "erf": (elementwise(jax.lax.erf), "Triton has no `erf`"),
    "16-bit division": (
        elementwise(lambda u: u / (u + 1)),
        "Triton has no `div` of bfloat16",
    ),
    "large blocks": (in_blocks(8192), "its blocks have more than 4096 elements"),
    "blocks of three": (
        elementwise(less_its_largest_of_three),
        "its blocks are not powers of two",
    ),
}


@pytest.mark.parametrize("name", LEFT_TO_XLA)
def test_what_is_left_to_xla_says_why(name):
    tx, reason = LEFT_TO_XLA[name]
    row = rows_of(tx, shapes(w=(128, 192)))["w"]
    assert row.runs == "XLA"
    assert re.search(reason, row.reason), row.reason


def test_float64_is_left_to_xla_and_float32_beside_it_is_not():
    with jax.enable_x64(True):
        params = {
            name: jax.ShapeDtypeStruct((32, 64), dtype)
            for name, dtype in {"f": np.float32, "d": np.float64}.items()
        }
        rows = rows_of(optax.adam(1e-2), params)
    assert rows["d"].reason == "kernels do not compute in `float64`"
    assert rows["f"].runs == "a kernel"


# The bytes of an element that a step must read and write.
BYTES = {
    "f32": (jnp.float32, optax.adamw(1e-2), 7 * 4),
    "split": (jnp.bfloat16, mpx.master_weights(optax.adamw(1e-2), storage="split"), 3 * 2 + 2 * 2 + 4 * 4),
    "full": (jnp.bfloat16, mpx.master_weights(optax.adamw(1e-2)), 2 * 2 + 6 * 4),
    "Kahan, bf16": (
        jnp.bfloat16,
        optax.chain(
            mpx.low_precision_state(optax.adamw(1e-2), {"mu|nu": "bf16"}, min_size=0), mpx.kahan_summation()
        ),
        9 * 2,
    ),
    "split, 8-bit": (
        jnp.bfloat16, mpx.master_weights(in_blocks(256), storage="split"), 3 * 2 + 2 * 2 + 4 + 4 * 4 / 256
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BYTES)
def test_the_bytes_of_a_plan_are_those_of_the_arrays_that_a_step_reads_and_writes(name):
    dtype, tx, expected = BYTES[name]
    row = rows_of(tx, shapes(dtype))["large"]
    assert row.moved_bytes / row.size == expected


IN_XLA = {"adafactor", "lbfgs", "novograd", "sm3"} | {
    f"contrib.{name}" for name in ("dpsgd", "galore", "mechanize", "muon", "sophia")
}


@pytest.mark.parametrize("name", RULES)
def test_rules_that_work_on_each_element_by_itself_run_in_a_kernel(name):
    """Optax's rules, with split masters and averages in 8 bits: 40 of 49 in a kernel."""
    rule, fields = RULES[name], moment_fields(name)
    tx = (
        rule.make()
        if fields is None
        else mpx.low_precision_state(rule.make(), {fields: mpx.Blockwise8bit()})
    )
    params = {"w": jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)}
    grads = (
        {"w": jax.ShapeDtypeStruct((2, 512, 512), jnp.bfloat16)}
        if rule.per_example
        else params
    )
    fused, zeros = (
        mpx.fused_update(mpx.master_weights(tx, storage="split")),
        {"w": jnp.zeros((512, 512))},
    )
    (row,) = fused.plan(params, grads, **rule.extra_args(zeros, zeros)).rows
    assert (row.runs != "a kernel") == (name in IN_XLA), row.reason
