"""Check that the benchmarks compute what they say, the same on both sides. No time is judged here."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import adamw_by_hand, autocast_forms, llama, optimizer_step
from benchmarks.autocast_forms import FORMS, HAND, HAND_STREAM, Size, make_form
from tests.autocast.helpers import contractions
from tests.helpers import cases, unfused

pytestmark = pytest.mark.optax_promotion

# ---- the optimizer step ---------------------------------------------------------------------------------------------

# Two are large enough for 8 bits, one of them with a last block that is not full; the others are not.
SHAPES = {"kernel": (64, 96), "embedding": (33, 160), "bias": (96,), "gain": (96,)}


def compared(name):
    """Return what differs after three steps, in programs where no two operations become one that rounds once."""
    recipe = optimizer_step.RECIPES[name]
    params, grads = jax.tree.map(lambda x: x.astype(recipe.dtype), optimizer_step.make_data(SHAPES))
    states = optimizer_step.make_starts(recipe, params)
    steps = optimizer_step.compile_steps(optimizer_step.make_steps(recipe), states, grads, unfused())
    found = optimizer_step.compare_results(steps, jax.tree.map(jnp.copy, states), grads)
    return {row["numbers"]: row for row in found}


@pytest.mark.slow
@pytest.mark.parametrize("name", optimizer_step.RECIPES)
def test_the_step_by_hand_and_the_step_of_mpx_give_the_same_bits(name):
    found = compared(name)
    assert found["parameters"]["of"] == found["masters"]["of"] == sum(map(math.prod, SHAPES.values()))
    assert found["moments"]["of"] >= 2 * found["parameters"]["of"]
    assert {kind: row["differ"] for kind, row in found.items()} == {"parameters": 0, "masters": 0, "moments": 0}


@pytest.mark.slow
def test_the_comparison_sees_a_step_with_another_epsilon(monkeypatch):
    """Change updates of 1e-3 by a ten-thousandth: an epsilon of 1e-7 beside roots of 1e-3.

    Masters of 0.02 can just hold that; few of their bfloat16 roundings do.
    """
    monkeypatch.setattr(adamw_by_hand, "EPS", 1e-7)
    found = compared("split")
    assert found["masters"]["differ"] > found["masters"]["of"] / 2
    assert 0 < found["masters"]["relative"]
    assert found["parameters"]["differ"] < found["parameters"]["of"] / 10
    assert found["moments"]["differ"] == 0


# ---- autocast -------------------------------------------------------------------------------------------------------

SIZE = Size(width=16, layers=1, heads=2, context=8, vocabulary=32, batch=2)


@pytest.mark.parametrize("name", cases(FORMS, {"f32", HAND_STREAM, "autocast"}))
def test_every_form_but_those_in_float32_multiplies_16_bit_matrices(name):
    """Seven products, six of them in the block, and two for each in the backward pass.

    By hand, attention's logits are float32, and so are their cotangents, which two products are made of.
    """
    params, tokens = autocast_forms.make_params(SIZE, jnp.float32), autocast_forms.make_tokens(SIZE)
    found = contractions(jax.grad(make_form(name, SIZE)), params, tokens)
    wide = [c for c in found if jnp.float32 in (c.lhs, c.rhs)]
    assert len(found) == 21
    assert len(wide) == (21 if name in ("f32", "f32, dots") else 2 if "by hand" in name else 0)


@pytest.mark.slow
def test_all_forms_are_the_same_function():
    """A relative error of 2**-8 in each of some operations; other weights give another loss."""
    params, tokens = autocast_forms.make_params(SIZE, jnp.float32), autocast_forms.make_tokens(SIZE)
    forms = [make_form(name, SIZE) for name in ("f32", HAND, HAND_STREAM, "autocast")]
    losses = jax.jit(lambda params: jnp.stack([form(params, tokens) for form in forms]))
    plain, *others = losses(params)
    np.testing.assert_allclose(others, plain, rtol=0.02)
    other = jax.tree.map(lambda p: p + 0.5 * jax.random.normal(jax.random.key(1), p.shape), params)
    assert abs(losses(other)[0] / plain - 1) > 0.02


# ---- Llamas ---------------------------------------------------------------------------------------------------------


def test_the_largest_number_is_the_last_one_below_the_budget_on_a_line():
    """Ten bytes each, and thirty for nothing."""
    assert [llama.most(budget, [(1, 40), (4, 70)]) for budget in (39, 100, 109)] == [0, 7, 7]
