"""The report against NumPy in float64, and against the paper's rule."""

import math

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import mpx
from mpx import underflow_report

FORMATS = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
}


def shares_of_casts(x, dtype, scale):
    """Return the shares of float32 numbers that become zero, subnormal and infinite
    when scaled and cast in NumPy.
    """
    x = x[np.isfinite(x) & (x != 0)].astype(np.float64)
    with np.errstate(all="ignore"):
        cast = np.abs((x * scale).astype(np.float32).astype(dtype).astype(np.float64))
    normal = float(ml_dtypes.finfo(dtype).smallest_normal)
    kinds = cast == 0, (cast > 0) & (cast < normal), ~np.isfinite(cast)
    return [kind.mean() if x.size else 0.0 for kind in kinds]


def gradients(spread, center, size=3000, seed=0):
    rng = np.random.default_rng(seed)
    return np.float32(
        rng.normal(size=size) * np.exp2(rng.normal(size=size) * spread + center)
    )


@pytest.mark.parametrize("dtype", FORMATS)
def test_the_shares_at_every_scale_are_those_of_casts_on_the_host(dtype):
    for spread, center in [(3, -16), (8, -24), (2, 18)]:
        x = gradients(spread, center)
        report = underflow_report({"w": x[:1000], "b": x[1000:]}, dtype)
        for shares in report.shares:
            expected = shares_of_casts(x, FORMATS[dtype], shares.scale)
            np.testing.assert_allclose(
                [shares.zero, shares.subnormal, shares.infinite], expected, rtol=1e-12
            )
        assert {shares.scale for shares in report.shares} == {
            1.0,
            report.recommended_scale,
        }


@settings(max_examples=30)
@given(
    st.lists(
        st.floats(width=32) | st.floats(0, 2.0**-25, width=32), min_size=4, max_size=4
    )
)
@example([2.0**-14, 2.0**-14, 0.0, np.inf])
@example([0.0, 0.0, 0.0, 2.0**100])  # too large for float32 once it is scaled
# Where 16 times the largest, scaled by 16, is infinite.
@example([2.0**-20, 2.0**-14, 0.0, 65520 * 2.0**-8])
def test_the_recommended_scale_is_the_largest_power_of_two_that_leaves_the_headroom(
    numbers,
):
    """The paper's rule, tried out: one more doubling overflows, or the bound of dynamic
    scales is reached.
    """
    x = np.float32(numbers)
    report = underflow_report({"w": x}, "f16")
    used = np.abs(x[np.isfinite(x) & (x != 0)].astype(np.float64))
    scale = report.recommended_scale
    assert math.frexp(scale)[0] == 0.5
    if not used.size:
        assert scale == 1
        return
    assert report.largest == used.max()
    fits = lambda scale: used.max() * scale * 2.0**4 < 65520
    if not (scale == 1 and fits(1) and used.min() >= 2.0**-14 - 2.0**-25):
        assert fits(scale)
        assert scale == 2.0**24 or not fits(2 * scale)
    assert report.shares_at(scale).infinite == 0


def test_gradients_of_a_scaled_loss_are_reported_as_if_they_were_not_scaled():
    x = {
        "w": jnp.asarray(gradients(2, -20)),
        "b": jnp.asarray(gradients(3, -16, seed=1)),
    }
    plain = underflow_report(x)
    scale = mpx.StaticLossScale(2.0**10)
    scaled = underflow_report(scale.scale(x), loss_scale=scale)
    assert (scaled.recommended_scale, scaled.leaves) == (
        plain.recommended_scale,
        plain.leaves,
    )
    np.testing.assert_array_equal(scaled.histogram.counts, plain.histogram.counts)
    assert [shares.scale for shares in scaled.shares] == [
        1.0,
        2.0**10,
        plain.recommended_scale,
    ]
    assert scaled.shares_at(1.0) == plain.shares_at(1.0)
    expected = shares_of_casts(np.concatenate([x["w"], x["b"]]), np.float16, 2.0**10)
    np.testing.assert_allclose(scaled.shares[1].zero, expected[0], rtol=1e-12)
    assert (
        underflow_report(
            jnp.full(3, 2.0**-5), loss_scale=mpx.DynamicLossScale(2.0**15)
        ).largest
        == 2.0**-20
    )
    assert underflow_report(jnp.ones(3), loss_scale=mpx.NoOpLossScale()).largest == 1


def test_leaves_come_by_path_the_worst_first_and_a_list_of_batches_is_a_tree():
    grads = {
        "good": jnp.ones(4),
        "half": jnp.float32([1e-9, 1.0]),
        "layers": [jnp.full(3, 1e-9)],
        "ids": jnp.arange(2),
    }
    report = underflow_report(grads)
    assert [(leaf.path, leaf.zero) for leaf in report.leaves] == [
        ("layers/0", 1.0),
        ("half", 0.5),
        ("good", 0.0),
    ]
    assert report.leaves[0].largest == np.float32(1e-9)
    assert report.shares_at(1.0).zero == 4 / 9
    batches = underflow_report([{"w": jnp.full(2, 1e-9)}, {"w": jnp.full(2, 1.0)}])
    assert ([leaf.path for leaf in batches.leaves], batches.largest) == (
        ["0/w", "1/w"],
        1,
    )


def test_infinite_and_nan_gradients_are_counted_and_named_and_judge_nothing():
    grads = {"fine": jnp.ones(3), "wrong": jnp.float32([np.inf, np.nan, 2.0, 0.0])}
    report = underflow_report(grads)
    assert (report.histogram.nonfinite, report.histogram.zeros, report.largest) == (
        2,
        1,
        2.0,
    )
    assert report.leaves[0].path == "wrong"
    assert report.verdict.endswith(
        "Infinite or NaN, and left out: 2, in 'wrong' first."
    )
    assert report.shares_at(report.recommended_scale).infinite == 0


def test_the_verdict_says_what_to_do():
    cases = [
        ([0.0], "f16", "There is no nonzero finite gradient"),
        ([1e-3, 1.0], "f16", "No loss scale is needed: float16 holds all of these"),
        (
            [1e-38, 1e30],
            "bf16",
            "No loss scale is needed: bfloat16 has the exponents of float32",
        ),
        (
            [1e-9, 1e-3],
            "f16",
            (
                "A loss scale of 2**21 is recommended: 0 of the gradients are lost at"
                " it, 50% without."
            ),
        ),
        (
            [1e-30, 1.0],
            "f16",
            (
                "No loss scale is enough: at 2**11, 50% of the gradients become zero."
                " Their"
            ),
        ),
        (
            [1e6, 1e3],
            "f16",
            (
                "A loss scale of 2**-8 is recommended: 0 of the gradients are lost at"
                " it, 50% without."
            ),
        ),
    ]
    for numbers, dtype, verdict in cases:
        report = underflow_report(jnp.float32(numbers), dtype)
        assert report.verdict.startswith(verdict)
    report = underflow_report(np.float32([2.0**-140, 1.0]), "bf16")
    # What even bfloat16 loses.
    assert (report.recommended_scale, report.shares_at(1.0).zero) == (
        1,
        0.5,
    )
