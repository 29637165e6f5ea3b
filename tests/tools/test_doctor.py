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
from mpx.tools.doctor import environment, exactness
from mpx.tools.doctor import products as doctor_products
from mpx.tools.doctor.environment import Environment
from mpx.tools.doctor.exactness import Check
from mpx.tools.doctor.products import WAYS, Product, Way
from mpx.tools.doctor.recommendation import recommend

BFLOAT16, FLOAT16 = np.dtype(jnp.bfloat16), np.dtype(np.float16)
BF16, F16, F32 = (f"params={p},compute={c},output=f32" for p, c in (("bf16", "bf16"), ("f32", "f16"), ("f32", "f32")))
PACKAGE = str(pathlib.Path(mpx.__file__).parent)


def products_of(bits=24, broken=(), **times_f32):
    """Return products with the given rates; `default` is that of float32 if nothing else is asked for."""
    names = {"default": "f32 by default"}
    return tuple(
        Product(names.get(name, name), name not in broken, 1e-7, bits, teraflops=rate, times_f32=rate)
        for name, rate in times_f32.items()
    )


# A GPU on which nothing is wrong, with TF32 by default.
GPU = doctor.Diagnosis(
    Environment({"python": "3.12.0", "jax": "0.10.2"}, True, "/env/site-packages/mpx"),
    "gpu",
    {"NVIDIA H200": 8},
    products_of(bits=11, f32=0.1, default=1.0, tf32=1.0, bf16=1.9, f16=1.9),
    (Check("masters are exact", True), Check("`round_to` bfloat16 after a sum", True)),
    seconds=12.0,
)


def changed(**changes):
    """Return the healthy GPU with changes of its diagnosis, or of its environment."""
    around = {name: value for name, value in changes.items() if hasattr(GPU.environment, name)}
    others = {name: value for name, value in changes.items() if name not in around}
    return dataclasses.replace(GPU, **{"environment": dataclasses.replace(GPU.environment, **around)} | others)


def problem_in(found, severity):
    """Return the one problem of a severity."""
    [problem] = [problem for problem in found.problems if problem.severity == severity]
    return problem


@pytest.fixture(scope="module")
def examined():
    """Examine this machine once, with rates of small matrices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor_products, "LARGE", {"cpu": 16})
        return doctor.examine(seconds=1e-4)


def test_each_way_to_multiply_has_the_bits_of_its_format_and_a_rate_or_says_why_it_does_not_work(examined):
    """Compare with the significant bits of float32 (24), float16 (11), bfloat16 (8) and the 8-bit formats (4 and 3)."""
    products = {product.name: product for product in examined.products}
    assert list(products) == list(WAYS)
    assert all(products[name].works for name in ("f32", "f32 by default", "bf16", "f16"))
    for name, bits in {"f32": 24, "f16": 11, "bf16": 8, "float8_e4m3fn": 4, "float8_e5m2": 3}.items():
        assert products[name].bits in (bits, None)
    for product in products.values():
        assert product.works == (not product.refusal) == (product.teraflops is not None)
        rate = product.teraflops / products["f32 by default"].teraflops if product.works else None
        assert product.times_f32 == rate


def test_mpx_is_exact_on_this_machine_and_what_is_found_is_printed_and_goes_into_json(examined):
    diagnosis = examined
    assert diagnosis.is_exact
    assert len(diagnosis.checks) == 15
    found = json.loads(json.dumps(diagnosis.as_dict()))
    assert found["environment"]["versions"]["jax"] == jax.__version__
    assert (found["is_exact"], found["exit_code"]) == (True, diagnosis.exit_code)
    for part in ("System", "Products", "Exact to the bit", "Recommended", jax.__version__, "cpu"):
        assert part in str(diagnosis)


@pytest.fixture
def nothing_is_tried(monkeypatch):
    for name, value in (("WAYS", {}), ("try_claims", lambda: ())):
        monkeypatch.setattr(f"mpx.tools.doctor.examine.{name}", value)
    monkeypatch.setattr(environment, "collect_environment", lambda: GPU.environment)


def test_a_quick_examination_times_nothing_and_sees_that_autocast_is_off(monkeypatch, nothing_is_tried):
    monkeypatch.setattr("mpx.tools.doctor.examine.with_rates", lambda *args, **kwargs: 1 / 0)
    assert doctor.examine(quick=True).autocast_narrows
    with jax.default_matmul_precision("highest"):
        assert not doctor.examine(quick=True).autocast_narrows
    with pytest.raises(ZeroDivisionError):
        doctor.examine()


def test_without_a_backend_the_failure_is_the_finding(monkeypatch, nothing_is_tried):
    def fail():
        raise AssertionError("Unable to initialize backend 'cuda'\nand more")

    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setattr(jax, "devices", fail)
    found = doctor.examine()
    what = problem_in(found, "error").what
    assert what == "JAX finds no device: Unable to initialize backend 'cuda' (JAX_PLATFORMS=cuda)"
    assert (found.exit_code, found.recommendation) == (1, None)
    assert "Recommended" not in str(found)


def test_a_wrong_product_and_one_that_raises_do_not_work():
    coarse = doctor_products.try_product("coarse", Way(BFLOAT16, jax.lax.dot, 2.0**-18))
    assert not coarse.works
    assert coarse.error > 2.0**-18
    assert "its error is above" in coarse.refusal

    def fail(a, b):
        raise ValueError("\n  no such dtype \nand more")

    refused = Product("odd", False, refusal="no such dtype")
    assert doctor_products.try_product("odd", Way(BFLOAT16, fail, 1.0)) == refused


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16])
def test_each_rounding_is_on_operands_that_are_exact_and_a_program_that_loses_it_fails(dtype):
    """The negative control rounds nothing. A subnormal number is its own rounding: there the fault is a flush."""
    for name, program, operands, expected in exactness.roundings(dtype, lambda x: x):
        assert np.array_equal(expected, expected.astype(dtype).astype(np.float32)), name
        program = (lambda x: 0 * x) if "subnormal" in name else program
        lost = exactness.check(name, lambda: (jax.jit(program)(*operands), expected))  # noqa: B023
        assert re.fullmatch(rf"\d+ of {expected.size} numbers are wrong", lost.detail), name
        if "product" in name:
            a, b = (operand.astype(np.float64) for operand in operands)
            assert np.max(np.abs(a) @ np.abs(b)) * 64**2 < 2**24  # all partial sums are multiples of 2^-12, of 24 bits


@pytest.mark.optax_promotion
def test_a_training_run_without_mpx_fails_the_check_that_mpx_passes_and_so_does_an_error():
    """Add updates of up to 2^-11 to a bfloat16 1, which change nothing."""
    params, _ = exactness.trained(optax.identity())
    naive = exactness.check("naive", lambda: (np.asarray(params).astype(np.float32), exactness.SUMS))
    assert not naive.exact
    assert naive.detail.endswith("of 64 numbers are wrong")
    assert exactness.check("claim", lambda: 1 / 0) == Check("claim", False, "division by zero")


def test_this_package_is_found_in_its_folder_and_its_own_distribution_is_no_other_one():
    assert environment.collect_environment().package == PACKAGE
    providers = {"mpx": ["mpx-jax", "mpx_jax", "mixed-precision-for-JAX", "mixed-precision-for-JAX"]}
    assert environment.other_distributions(providers) == ("mixed-precision-for-JAX",)
    assert environment.other_distributions({}) == ()


def test_a_package_in_the_working_directory_is_found(tmp_path, monkeypatch):
    """Make a folder called mpx, which is no package yet; then another package, then a copy of this one."""
    (tmp_path / "mpx").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.metadata.packages_distributions", dict)  # which takes long
    assert environment.collect_environment().in_this_folder is None
    for file, severity in (("__init__.py", "error"), ("doctor.py", "warning")):
        (tmp_path / "mpx" / file).touch()
        found = environment.collect_environment()
        assert f"imports {tmp_path / 'mpx/__init__.py'}" in problem_in(changed(environment=found), severity).what


def test_a_healthy_gpu_has_notes_only():
    assert "use 11 of their 24 bits" in problem_in(GPU, "note").what
    assert (GPU.exit_code, GPU.is_exact) == (0, True)
    assert changed(products=products_of(default=1.0)).problems == ()


@pytest.mark.parametrize(
    ("severity", "changes", "what", "remedy"),
    [
        ("error", {"in_this_folder": "/home/mpx.py"}, "imports /home/mpx.py", "rename"),
        ("error", {"checks": (Check("a claim", False, "3 of 64"),)}, "not exact: a claim. 3 of 64", "report"),
        ("error", {"products": (Product("bf16", False, 0.5, 1, "its"),)}, "products in bf16: its", "do not compute"),
        ("error", {"failure": "no backend"}, "JAX finds no device: no backend", "JAX_PLATFORMS=cpu"),
        ("warning", {"other_distributions": ("other",)}, "other also brings a package called mpx", "uninstall other"),
        ("warning", {"backend": "cpu"}, "JAX computes on the CPU", "pip install"),
        ("warning", {"autocast_narrows": False}, "autocast narrows no product", "unset"),
        ("warning", {"products": (Product("float8_e5m2", False, 0.5, 1),)}, "products in float8_e5m2", "do not"),
    ],
)
def test_what_spoils_a_training_run_is_an_error_and_what_may_surprise_a_warning(severity, changes, what, remedy):
    found = changed(**changes)
    problem = problem_in(found, severity)
    assert what in problem.what
    assert remedy in problem.remedy
    assert found.exit_code == {"error": 1, "warning": 3}[severity]
    assert found.problems[0] == problem  # before notes


def test_the_verdict_is_five_lines():
    assert GPU.verdict.splitlines() == [
        f"Recipe for 8 x NVIDIA H200: bf16-split ({BF16})",
        "Why: bfloat16 runs at 1.9 times the rate of float32, float16 at 1.9 times.",
        "Exact to the bit: yes, all 2 checks.",
        "Not supported here: nothing.",
        "No errors, no warnings; notes: 1. All of it: mpx doctor --full",
    ]
    assert str(GPU).startswith(GPU.verdict)


def test_the_verdict_names_what_is_not_supported_what_is_wrong_and_what_to_do():
    checks = (Check("a claim", False, "3 of 64 numbers are wrong"), *GPU.checks)
    found = changed(checks=checks, backend="cpu", products=products_of(broken=("f16",), default=1.0, f16=0.5))
    lines = found.verdict.splitlines()
    assert lines[2:4] == ["Exact to the bit: NO, 1 of 3 checks fail.", "Not supported here: f16."]
    assert [line.partition(":")[0] for line in lines[4:]] == ["Error", "Error", "Warning"]
    assert "not exact: a claim" in lines[4]
    assert "pip install" in lines[-1]


def test_without_rates_the_verdict_is_to_measure_first():
    """A quick examination must not recommend the opposite of what a full one does."""
    found = changed(products=products_of(default=None, bf16=None, f16=None))
    assert found.recommendation is None
    assert found.verdict.splitlines()[0] == "Recipe for 8 x NVIDIA H200: measure first, without --quick"


@pytest.mark.parametrize(
    ("machine", "products", "policy"),
    [
        ("H200", GPU.products, BF16),
        ("T4", products_of(default=1, bf16=0.5, f16=6), F16),
        ("a GPU whose float16 is far faster", products_of(default=1, bf16=2, f16=6), F16),
        ("CPU", products_of(default=1, bf16=0.8, f16=0.8), F32),
        ("TPU, which rounds float32 to bfloat16 anyway", products_of(bits=8, default=1, bf16=1.05), BF16),
        ("a GPU whose bfloat16 is wrong", products_of(broken=("bf16",), default=1, bf16=2, f16=2), F16),
        ("a TPU that was not timed", products_of(bits=8, default=None, bf16=None), BF16),
    ],
)
def test_each_class_of_device_has_its_recipe(machine, products, policy):
    assert recommend(products).policy == policy, machine


@pytest.mark.parametrize(
    ("rate", "advice"), [(18, "2 times the rate of bfloat16: `compute=fp8` is worth"), (9, "nothing")]
)
def test_a_recipe_says_whether_8_bit_products_are_faster(rate, advice):
    assert advice in recommend(products_of(default=1, bf16=9, float8_e4m3fn=rate)).reasons[-1]
    assert not any("fp8" in reason for reason in recommend(products_of(default=1, bf16=9)).reasons)
