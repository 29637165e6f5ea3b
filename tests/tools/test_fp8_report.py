"""Check `fp8_report`: what is counted of each operand, where, and in which transformations.

Oracle of the shares: the same numbers rounded by ml_dtypes.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import mpx
from tests.autocast.helpers import normal
from tests.helpers import eight_cpu_devices

SMALL = mpx.Fp8(min_extent=0)
FORMATS = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
by_format = pytest.mark.parametrize("name", FORMATS)

loss_fn = lambda w, x: jnp.sum(x @ w)


def shares(report, operand):
    """Return the shares of an operand, of all products together."""
    (row,) = [row for row in report.operands if row.operand == operand]
    return row.zero, row.subnormal


def all_numbers(dtype):
    """Return all positive finite numbers of an 8-bit format, and those a sixteenth above and below them."""
    bits = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float64)
    found = np.unique(bits[np.isfinite(bits) & (bits > 0)])
    return np.concatenate([found, found[:-1] * (1 + 1 / 16), found * (1 - 1 / 16), found[:3] / 4])


@by_format
def test_shares_are_those_of_rounding_each_number_of_the_format(name):
    """The largest number stands in the operand, so that its scale is 1. Negative control: other shares of the other."""
    dtype = FORMATS[name]
    x = np.resize(all_numbers(dtype), (1 + len(all_numbers(dtype)) // 16, 16))
    x = np.pad(x, ((0, -len(x) % 16), (0, 0))).astype(np.float32)
    rounded, smallest = x.astype(dtype).astype(np.float64), float(ml_dtypes.finfo(dtype).smallest_normal)
    numbers = (x != 0).sum()
    expected = ((rounded == 0) & (x != 0)).sum() / numbers, ((rounded > 0) & (rounded < smallest)).sum() / numbers
    way = lambda forward: mpx.Fp8(min_extent=0, forward=forward)
    of = lambda forward: shares(
        mpx.monitor.fp8_report(mpx.autocast(loss_fn, way(forward)))(jnp.ones((16, 16)), jnp.asarray(x)), "left"
    )
    assert of(name) == pytest.approx(expected)
    assert min(expected) > 0
    assert of({"e4m3": "e5m2", "e5m2": "e4m3"}[name]) != pytest.approx(expected)


def test_cotangents_are_counted_in_the_format_of_the_backward_pass():
    """A cotangent of 2**-40 beside one of 1 is zero in e5m2, whose numbers span 2**32."""
    g = jnp.ones((16, 16)).at[0].set(2.0**-40)
    report = mpx.monitor.fp8_report(mpx.autocast(lambda w, x: jnp.sum(g * (x @ w)), SMALL))(*[jnp.ones((16, 16))] * 2)
    assert [row.operand for row in report.operands] == ["left", "right", "cotangent"]
    assert [row.dtype for row in report.operands] == [FORMATS["e4m3"], FORMATS["e4m3"], FORMATS["e5m2"]]
    assert shares(report, "cotangent") == (1 / 16, 0)
    assert "Most is lost of the cotangent operand of" in report.verdict


def test_what_is_not_finite_is_counted_and_named():
    reported = mpx.monitor.fp8_report(mpx.autocast(loss_fn, SMALL))
    for value in (np.inf, np.nan):
        report = reported(jnp.ones((16, 16)).at[0, 0].set(value), jnp.ones((16, 16)))
    (row,) = [row for row in report.operands if row.operand == "right"]
    assert row.nonfinite > 0
    again = reported(jnp.ones((16, 16)), jnp.ones((16, 16)))  # which begins anew
    assert [row.nonfinite for row in again.operands] == [0, 0, 0]
    assert report.verdict.startswith(f"Infinite or NaN: {row.nonfinite} numbers, first seen in the right operand of")


def test_products_are_counted_in_loops_calls_and_checkpoints():
    def in_loops(w, x):
        layer = jax.checkpoint(jax.jit(lambda x, _: (jnp.tanh(x @ w), None)))
        x, _ = lax.scan(layer, x, length=3)
        return jnp.sum(x)

    report = mpx.monitor.fp8_report(mpx.autocast(in_loops, SMALL))(normal(0, 16, 16), normal(1, 32, 16))
    found = {row.operand: row for row in report.operands}
    assert found.keys() == {"left", "right", "cotangent"}
    assert 0.9 * 3 * 32 * 16 < found["cotangent"].numbers <= 3 * 32 * 16  # but for derivatives of tanh that are zero
    assert all("test_fp8_report.py" in row.where for row in report.operands)


@pytest.mark.slow
def test_devices_and_examples_count_together():
    mesh, spec = eight_cpu_devices(), jax.sharding.PartitionSpec
    w, x = normal(0, 16, 16), normal(1, 128, 16).at[0].set(2.0**40)
    whole = mpx.monitor.fp8_report(mpx.autocast(loss_fn, SMALL))(w, x)

    def split(w, x):
        part = lambda w, x: lax.psum(loss_fn(w, x), "data")
        return jax.shard_map(part, mesh=mesh, in_specs=(spec(), spec("data")), out_specs=spec())(w, x)

    of_devices = mpx.monitor.fp8_report(mpx.autocast(split, SMALL))(w, x)
    left = lambda report: next(row for row in report.operands if row.operand == "left")
    assert left(of_devices).numbers == left(whole).numbers == 128 * 16
    assert shares(of_devices, "left") == shares(whole, "left") == (127 / 128, 0)


def test_a_function_with_an_auxiliary_result_and_one_without_products_in_8_bits():
    args = jnp.ones((16, 16)), jnp.ones((16, 16))
    assert mpx.monitor.fp8_report(mpx.autocast(lambda w, x: (loss_fn(w, x), x), SMALL), has_aux=True)(*args).operands
    with pytest.warns(UserWarning, match="no matrix product of .* runs in fp8"):
        report = mpx.monitor.fp8_report(mpx.autocast(loss_fn, "fp8"))(*args)
    assert report.verdict == "No product runs in 8 bits: `mpx.explain` says why."


def test_the_report_prints_and_goes_into_json():
    report = mpx.monitor.fp8_report(mpx.autocast(loss_fn, SMALL))(jnp.ones((16, 16)), jnp.ones((16, 16)))
    assert str(report).endswith("All numbers are normal in their formats.")
    assert report.as_dict()["operands"][0]["dtype"] == "float8_e4m3fn"
