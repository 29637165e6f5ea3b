"""`mpx.doctor`: what works on a machine, what stands in the way there, and the recipe for it."""

import dataclasses
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx
from mpx import doctor
from mpx.doctor import Check, Product
from mpx.tools import doctor as examination
from mpx.tools.doctor import WAYS, Way

BFLOAT16, FLOAT16 = np.dtype(jnp.bfloat16), np.dtype(np.float16)


def products_of(bits=24, broken=(), **rates):
    """Return products with the given rates; `default` is that of float32 if nothing else is asked for."""
    names = {"default": "f32 by default"}
    return tuple(
        Product(names.get(name, name), "it is wrong" if name in broken else "", bits, rate)
        for name, rate in rates.items()
    )


# A GPU on which nothing is wrong, with TF32 by default.
GPU = doctor.Diagnosis(
    {"python": "3.12.0", "jax": "0.10.2"},
    "/env/site-packages/mpx",
    devices={"NVIDIA H200": 8},
    products=products_of(bits=11, f32=5.0, default=50.0, tf32=50.0, bf16=95.0, f16=95.0),
    checks=(Check("masters are exact", True), Check("`round_to` bfloat16 after a sum", True)),
)


@pytest.fixture(scope="module")
def examined():
    """Examine this machine once, with rates of small matrices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(examination, "LARGE", {"cpu": 16})
        patch.setattr(examination, "SECONDS", 1e-4)
        return doctor.examine()


def test_each_way_to_multiply_has_the_bits_of_its_format_and_a_rate_or_says_why_it_does_not_work(examined):
    """Compare with the significant bits of float32 (24), float16 (11), bfloat16 (8) and the 8-bit formats (4 and 3)."""
    found = {product.name: product for product in examined.products}
    assert list(found) == list(WAYS)
    assert not any(found[name].refusal for name in ("f32", "f32 by default", "bf16", "f16"))
    for name, bits in {"f32": 24, "f16": 11, "bf16": 8, "float8_e4m3fn": 4, "float8_e5m2": 3}.items():
        assert found[name].bits in (bits, None)
    for product in found.values():
        assert bool(product.refusal) == (product.teraflops is None)


def test_mpx_is_exact_on_this_machine_and_what_is_found_is_printed_and_goes_into_json(examined):
    assert examined.is_exact
    assert len(examined.checks) == 10
    found = json.loads(json.dumps(examined.as_dict()))
    assert found["versions"]["jax"] == jax.__version__
    assert found["package"] == str(pathlib.Path(mpx.__file__).parent)
    assert (found["is_exact"], found["exit_code"]) == (True, examined.exit_code)
    for part in ("System", "Products", "Exact to the bit: yes, all 10", "Recommended", jax.__version__, "x cpu"):
        assert part in str(examined)


def test_a_quick_examination_times_nothing_and_sees_that_autocast_is_off(monkeypatch):
    monkeypatch.setattr("mpx.tools.doctor.WAYS", {"bf16": WAYS["bf16"]})
    monkeypatch.setattr("mpx.tools.doctor.try_claims", lambda: ())
    monkeypatch.setattr(examination, "_teraflops", lambda way: 2.0)
    assert doctor.examine().products[0].teraflops == 2.0
    quick = doctor.examine(quick=True)
    assert (quick.products[0].teraflops, quick.recommendation, quick.autocast_narrows) == (None, None, True)
    with jax.default_matmul_precision("highest"):
        assert not doctor.examine(quick=True).autocast_narrows


def test_without_a_backend_the_failure_is_the_finding(monkeypatch):
    def fail():
        raise AssertionError("Unable to initialize backend 'cuda'\nand more")

    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setattr(jax, "devices", fail)
    found = doctor.examine()
    [problem] = found.problems
    assert problem.what == "JAX finds no device: Unable to initialize backend 'cuda' (JAX_PLATFORMS=cuda)"
    assert (found.exit_code, found.recommendation) == (1, None)
    assert "Recommended" not in str(found)


def test_a_wrong_product_and_one_that_raises_do_not_work():
    coarse = examination.try_product("coarse", Way(BFLOAT16, jax.lax.dot, 2.0**-18), is_timed=True)
    assert re.fullmatch(r"its error of \d\.\de-0\d is above 3\.8e-06", coarse.refusal)
    assert (coarse.bits, coarse.teraflops) == (8, None)

    def fail(a, b):
        raise ValueError("\n  no such dtype \nand more")

    refused = Product("odd", "no such dtype")
    assert examination.try_product("odd", Way(BFLOAT16, fail, 1.0), is_timed=True) == refused


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16])
def test_each_rounding_is_on_operands_that_are_exact_and_a_program_that_loses_it_fails(dtype):
    """The negative control rounds nothing. A subnormal number is its own rounding: there the fault is a flush."""
    for name, program, operands, expected in examination.roundings(dtype, lambda x: x):
        assert np.array_equal(expected, expected.astype(dtype).astype(np.float32)), name
        program = (lambda x: 0 * x) if "subnormal" in name else program
        lost = examination.check(name, lambda: jax.jit(program)(*operands), expected)  # noqa: B023
        assert re.fullmatch(rf"\d+ of {expected.size} numbers are wrong", lost.detail), name
        if "product" in name:
            a, b = (operand.astype(np.float64) for operand in operands)
            assert np.max(np.abs(a) @ np.abs(b)) * 64**2 < 2**24  # all partial sums are multiples of 2^-12, of 24 bits


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16])
def test_a_rounding_of_the_end_alone_is_found_between_two_sums(dtype):
    """Rounding once at the end gives the next number: 1 + 1 is the distance to it."""
    named = {name: rest for name, *rest in examination.roundings(dtype, lambda x: x)}
    _, (large, ones), expected = named["between sums of 16-bit numbers"]
    at_the_end = (large.astype(np.float32) + ones + ones).astype(dtype).astype(np.float32)
    assert not examination.check("", lambda: at_the_end, expected).exact


@pytest.mark.optax_promotion
def test_a_training_run_without_mpx_fails_the_check_that_mpx_passes_and_so_does_an_error():
    """Add updates of up to 2^-11 to a bfloat16 1, which change nothing."""
    params, _ = examination.trained(optax.identity())
    naive = examination.check("naive", lambda: np.asarray(params).astype(np.float32), examination.SUMS)
    assert naive.detail.endswith("of 64 numbers are wrong")
    assert not naive.exact
    assert examination.check("claim", lambda: 1 / 0, examination.SUMS) == Check("claim", False, "division by zero")


@pytest.mark.parametrize(
    ("severity", "changes", "what", "remedy"),
    [
        ("error", {"checks": (Check("a claim", False, "3 of 64"),)}, "not exact: a claim. 3 of 64", "report"),
        ("error", {"products": (Product("bf16", "its", 1),)}, "products in bf16: its", "do not compute"),
        ("error", {"failure": "no backend"}, "JAX finds no device: no backend", "JAX_PLATFORMS=cpu"),
        ("warning", {"autocast_narrows": False}, "autocast narrows no product", "unset"),
        ("warning", {"products": (Product("float8_e5m2", "its", 1),)}, "products in float8_e5m2", "do not"),
    ],
)
def test_what_spoils_a_training_run_is_an_error_and_what_may_surprise_a_warning(severity, changes, what, remedy):
    found = dataclasses.replace(GPU, **changes)
    [problem] = found.problems
    assert problem.severity == severity
    assert what in problem.what
    assert remedy in problem.remedy
    assert found.exit_code == {"error": 1, "warning": 3}[severity]
    assert f"{severity}: {what}" in str(found)


def test_a_healthy_gpu_has_no_problems_and_errors_come_before_warnings():
    assert (GPU.problems, GPU.exit_code, GPU.is_exact) == ((), 0, True)
    assert "No problems." in str(GPU)
    assert "8 x NVIDIA H200" in str(GPU)
    both = dataclasses.replace(GPU, autocast_narrows=False, checks=(*GPU.checks, Check("a claim", False)))
    assert [problem.severity for problem in both.problems] == ["error", "warning"]
    assert "Exact to the bit: NO, 1 of 3 checks fail." in str(both)


@pytest.mark.parametrize(
    ("machine", "found", "recipe"),
    [
        ("H200", GPU.products, "bf16-split"),
        ("T4", products_of(default=1, bf16=0.5, f16=6), "f16-scaled"),
        ("a GPU whose float16 is far faster", products_of(default=1, bf16=2, f16=6), "f16-scaled"),
        ("CPU", products_of(default=1, bf16=0.8, f16=0.8), "f32"),
        ("TPU, which rounds float32 to bfloat16 anyway", products_of(bits=8, default=1, bf16=1.05), "bf16-split"),
        ("a GPU whose bfloat16 is wrong", products_of(broken=("bf16",), default=1, bf16=2, f16=2), "f16-scaled"),
        ("a TPU that was not timed", products_of(bits=8, default=None, bf16=None), "bf16-split"),
    ],
)
def test_each_class_of_device_has_its_recipe(machine, found, recipe):
    assert dataclasses.replace(GPU, products=found).recommendation.recipe == recipe, machine


@pytest.mark.parametrize(("rate", "advice"), [(18, "2 times the rate of bfloat16: `compute=fp8` is"), (9, "nothing")])
def test_a_recipe_says_whether_8_bit_products_are_faster(rate, advice):
    found = dataclasses.replace(GPU, products=products_of(default=1, bf16=9, float8_e4m3fn=rate))
    assert advice in found.recommendation.reasons[-1]
