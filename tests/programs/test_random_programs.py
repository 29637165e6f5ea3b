"""Random programs under autocast: the value and each gradient are nearly as right as
casting everything by hand.
"""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import mpx
from mpx._autocast import border, contraction, wide_gradients
from tests.helpers import BF16, F16, F32, cases
from tests.programs import random_programs
from tests.programs.test_programs import cast

SEEDS = range(3)
SCALE = mpx.StaticLossScale(2.0**8)
EXAMPLES = hypothesis.settings.default.max_examples**2 // 50  # 8 by default, 200 in CI


def results(value_and_grad, dtype):
    """Return the values of all seeds as one array, and those of each gradient."""
    compiled = jax.jit(value_and_grad)
    rows = [
        jax.tree.leaves(compiled(*cast(random_programs.make(seed), dtype)))
        for seed in SEEDS
    ]
    return [
        np.concatenate([np.asarray(x, np.float64).ravel() for x in column])
        for column in zip(*rows, strict=True)
    ]


def check(operations, how, reduce_dtype, dtype):
    """Raise if a value or a gradient of a program is more wrong than twice by hand and
    two roundings of all of it.

    1.1 times is the most that was seen.
    """
    loss = random_programs.loss(operations)
    scaled = lambda p, batch: loss(p, batch).astype(F32) * SCALE.loss_scale
    ours = results(
        mpx.value_and_grad(mpx.autocast(loss, how, reduce_dtype=reduce_dtype), SCALE),
        dtype,
    )
    ours[0] *= SCALE.loss_scale
    exact, by_hand = (
        results(jax.value_and_grad(scaled), in_dtype) for in_dtype in (F32, how)
    )
    hypothesis.assume(all(np.isfinite(x).all() for x in by_hand))
    size = np.linalg.norm
    found = np.array([size(x - y) for x, y in zip(ours, exact, strict=True)])
    most = np.array(
        [
            2 * size(x - y) + jnp.finfo(how).eps * size(y)
            for x, y in zip(by_hand, exact, strict=True)
        ]
    )
    assert (found <= most).all(), (
        f"errors and the largest that are allowed: {found}, {most}"
    )


drawn = given(
    random_programs.programs,
    st.sampled_from([BF16, BF16, F16]),
    st.sampled_from([None, F32]),
    st.sampled_from([F32, BF16]),
)


@hypothesis.settings(max_examples=EXAMPLES)
@drawn
def test_a_random_program_is_nearly_as_right_as_by_hand(
    operations, how, reduce_dtype, dtype
):
    check(operations, how, reduce_dtype, dtype)


LOST = {
    "of a weight that a loop slices": (
        border,
        "with_derivative_of",
        lambda x, value: value,
    ),
    "of a product with a float32 sum": (
        wide_gradients,
        "_derivative_of",
        lambda f, is_wide: lambda *operands: 0 * f(*operands),
    ),
    "of a product with a bias": (
        contraction,
        "with_rounded_cotangent",
        lambda x, dtype: lax.stop_gradient(x),
    ),
}


@pytest.mark.parametrize("name", cases(LOST, ["of a product with a bias"]))
def test_a_derivative_that_is_lost_is_found(name, monkeypatch):
    """The negative control."""
    monkeypatch.setattr(*LOST[name])
    quickly = hypothesis.settings(
        max_examples=100, phases=[hypothesis.Phase.generate], database=None
    )
    with pytest.raises(AssertionError, match="errors"):
        quickly(drawn(check))()
