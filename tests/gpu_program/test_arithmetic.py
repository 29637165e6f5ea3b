"""Check that a compiler for GPUs or TPUs takes no rounding out of a step: its program
computes the bits of mpx.

The program is compiled for a device that is not here, and run on this CPU. A rule's own
arithmetic may be rewritten: in AdamW XLA for GPUs makes `m / (a * b)` of `(m / a) / b`.
So mpx around AdamW is compared with mpx around the program of AdamW alone, in float32;
and around a rule that leaves nothing to rewrite, with mpx as it is.

Seen with jax 0.10.2: XLA for an H200 leaves out casts to bfloat16 and back, XLA for a
TPU v5e keeps them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx
from tests.gpu_program.on_cpu import as_written, program_for
from tests.gpu_program.with_casts import WITH_CASTS
from tests.helpers import assert_same_bits, stepper

pytestmark = pytest.mark.optax_promotion

BF16, F16 = (f"params={dtype},compute={dtype},output=f32" for dtype in ("bf16", "f16"))
ADAMW_SETTINGS = {"learning_rate": 1e-2, "weight_decay": 0.1}
ADAMW = optax.adamw(**ADAMW_SETTINGS)
MOMENTUM = optax.sgd(2.0**-7, momentum=0.5)


def moments(rule, formats, **settings):
    return mpx.low_precision_state(rule, formats, min_size=0, **settings)


def kahan(rule):
    return optax.chain(moments(rule, {"mu|nu|trace": "bf16"}), mpx.kahan_summation())


def split_with_8_bits(rule):
    return mpx.mixed_precision(
        moments(rule, {"mu|nu|trace": mpx.Blockwise8bit()}), BF16
    )


def stochastic(rule):
    formats = {"mu": "bf16", "nu": mpx.Blockwise8bit()}
    stored = moments(rule, formats, rounding="stochastic", key=jax.random.key(7))
    return optax.chain(stored, mpx.stochastic_rounding(jax.random.key(8)))


# The dtype of parameters and gradients, and what makes an optimizer of a rule.
RECIPES = {
    "f32": (jnp.float32, lambda rule: rule),
    "full": (
        jnp.bfloat16,
        lambda rule: mpx.mixed_precision(rule, BF16, storage="full"),
    ),
    "split": (jnp.bfloat16, lambda rule: mpx.mixed_precision(rule, BF16)),
    "Kahan, bf16 moments": (jnp.bfloat16, kahan),
    "split, 8-bit moments": (jnp.bfloat16, split_with_8_bits),
    "stochastic": (jnp.bfloat16, stochastic),
    "f16, loss scaling": (jnp.float16, lambda rule: mpx.mixed_precision(rule, F16)),
}
EXACT = ["f32", "full", "split", "Kahan, bf16 moments", "f16, loss scaling"]


def numbers(seed, dtype, lowest, highest):
    """Return numbers of many magnitudes, among them zeros of both signs; their last
    block is not full.
    """
    rng = np.random.default_rng(seed)
    x = rng.choice([-1, 1], 2348) * 10 ** rng.uniform(lowest, highest, 2348)
    x[:2] = 0.0, -0.0
    return {"w": jnp.asarray(x, dtype)}


def compiled_for(device, tx, dtype):
    params = numbers(0, dtype, -3, 1)
    return as_written(program_for(device, stepper(tx), params, tx.init(params), params))


def alone(rule, device):
    """Return a rule that computes as its own program for a device does."""

    def update(*args):
        return program_for(device, rule.update, *args)(*args)

    return optax.GradientTransformation(rule.init, update)


def trained(step, tx, dtype):
    """Yield parameters and state after each of six steps, of which float16 skips one
    for an infinity.
    """
    params = numbers(0, dtype, -3, 1)
    state = tx.init(params)
    for i in range(6):
        factor = np.float16(np.inf if i == 3 else 1024) if dtype == np.float16 else 1
        grads = jax.tree.map(
            lambda g, factor=factor: g * factor, numbers(1 + i, dtype, -5, 0)
        )
        params, state = step(params, state, grads)
        yield params, state


def assert_same_training(actual_step, expected_step, tx, dtype):
    for actual, expected in zip(
        trained(actual_step, tx, dtype), trained(expected_step, tx, dtype), strict=True
    ):
        assert_same_bits(actual, expected)


def test_the_sign_of_a_zero_in_a_program_is_read(h200):
    """Check the check: XLA's text of a constant may leave it out."""
    x = jnp.array([-0.0, 0.0, 1.0])
    add_zero = as_written(
        program_for(h200[0], lambda x: x + jnp.where(x < 1, -0.0, 1.0), x)
    )
    assert_same_bits(add_zero(x), jnp.array([-0.0, 0.0, 2.0]))


@pytest.mark.parametrize(
    ("name", "target"),
    [*((name, "h200") for name in EXACT), *((name, "v5e") for name in EXACT[2:])],
)
def test_the_program_for_a_device_that_is_not_here_computes_the_bits_of_mpx(
    name, target, request
):
    dtype, recipe = RECIPES[name]
    tx, device = recipe(MOMENTUM), request.getfixturevalue(target)[0]
    assert_same_training(
        compiled_for(device, tx, dtype), as_written(stepper(tx)), tx, dtype
    )


@pytest.mark.parametrize(
    "name", [name for name in RECIPES if name not in ("f32", "full")]
)
def test_the_program_for_an_h200_computes_the_bits_of_mpx_around_adamw(name, h200):
    dtype, recipe = RECIPES[name]
    tx = recipe(ADAMW)
    expected = as_written(stepper(recipe(alone(ADAMW, h200[0]))))
    assert_same_training(compiled_for(h200[0], tx, dtype), expected, tx, dtype)


def test_a_skipped_step_in_the_program_for_an_h200_changes_no_bit(h200):
    tx = mpx.mixed_precision(ADAMW, F16)
    steps = list(trained(compiled_for(h200[0], tx, np.float16), tx, np.float16))
    (before, good), (after, skipped) = steps[2:4]
    assert [int(mpx.skipped_steps(state)) for state in (good, skipped)] == [0, 1]
    assert_same_bits((after, skipped.inner_state), (before, good.inner_state))


def both_updates(device, tx):
    """Return the updates of a first step, as the program for a device computes them and
    as mpx does.
    """
    params, grads = numbers(0, jnp.bfloat16, -3, 1), numbers(1, jnp.bfloat16, -3, 1)
    args = grads, tx.init(params), params
    return (
        as_written(program_for(device, tx.update, *args))(*args)[0],
        as_written(tx.update)(*args)[0],
    )


def test_the_update_of_full_masters_is_a_difference_of_parameters_in_the_program_for_an_h200(
    h200,
):
    """With casts the parameter comes out right, since the sum rounds again, but the
    update is another number.
    """
    assert_same_bits(*both_updates(h200[0], RECIPES["full"][1](MOMENTUM)))
    actual, expected = both_updates(h200[0], WITH_CASTS["full"](MOMENTUM))
    assert np.mean(actual["w"] != expected["w"]) > 0.8


@pytest.mark.parametrize("name", ["Kahan", "split"])
def test_the_program_for_an_h200_leaves_casts_there_and_back_out(name, h200):
    tx = WITH_CASTS[name](MOMENTUM)
    compiled = compiled_for(h200[0], tx, jnp.bfloat16)
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        assert_same_training(compiled, as_written(stepper(tx)), tx, jnp.bfloat16)


def test_the_program_for_a_tpu_v5e_keeps_casts_there_and_back(v5e):
    tx = WITH_CASTS["split"](MOMENTUM)
    assert_same_training(
        compiled_for(v5e[0], tx, jnp.bfloat16),
        as_written(stepper(tx)),
        tx,
        jnp.bfloat16,
    )
