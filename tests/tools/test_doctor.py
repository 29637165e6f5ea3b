"""`mpx.doctor`: what a machine can do, what stands in the way there, and the recipe for it."""

import dataclasses
import hashlib
import importlib.metadata
import io
import json
import math
import pathlib
import types
from base64 import urlsafe_b64encode

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rich.console
from jax import lax

import mpx
from mpx.tools.doctor import arithmetic, measuring, surroundings
from mpx.tools.doctor import examine as doctor
from mpx.tools.doctor.arithmetic import Check, Product, RoundTrip, SubnormalNumbers
from mpx.tools.doctor.measuring import CopyRate, MatmulRate, Peak
from mpx.tools.doctor.recommendation import recommend
from mpx.tools.doctor.surroundings import Devices, Imports, Setting, System

BFLOAT16, FLOAT16 = np.dtype(jnp.bfloat16), np.dtype(np.float16)
PACKAGE = str(pathlib.Path(mpx.__file__).parent)


def rates_of(**teraflops):
    """Rates by name; `default` is that of float32 if nothing else is asked for."""
    names = {name: {"default": "f32 by default"}.get(name, name) for name in teraflops}
    return measuring.with_ratios([MatmulRate(names[name], 8192, speed) for name, speed in teraflops.items()], None)


def products_of(*names):
    return tuple(Product(name, name, True, 1e-7, 24) for name in names)


ALL = products_of("f32", "f32 by default", "bf16", "f16")

# A GPU on which nothing is wrong: TF32 by default, and a compiler that drops roundings.
GPU = doctor.Diagnosis(
    System("Linux", "3.12.0", {"jax": "0.10.2"}, "gpu", "cuda 12080", "550.54.15"),
    (Devices("NVIDIA H200", 8, "device", 150_000_000_000, 1_000_000_000),),
    (),
    Imports("/env/site-packages/mpx", False, "/env/site-packages/mpx"),
    ALL,
    (Product("TF32_TF32_F32", "float32", True, 5e-5, 11), Product("F64_F64_F64", "float64", False, refusal="no")),
    rates_of(f32=50, default=400, tf32=410, bf16=780, f16=770),
    CopyRate(4000.0, 2**30),
    (RoundTrip("a sum of float32 numbers", "bfloat16", "dropped", "kept"),),
    (SubnormalNumbers("float32", "kept", "kept"),),
    (Check("masters are exact", True),),
    seconds=12.0,
)


def problem_in(found, severity):
    """The one problem of a severity."""
    [problem] = [problem for problem in found.problems if problem.severity == severity]
    return problem


@pytest.fixture(scope="module")
def examined():
    parts = []
    return doctor.examine(quick=True, progress=parts.append), parts


# An examination of this machine.


def test_this_machine_computes_in_every_16_bit_dtype_and_float32(examined):
    working = {product.name for product in examined[0].products if product.works}
    assert working >= {"f32", "f32 by default", "bf16", "f16", "f64"}


def test_mpx_is_exact_on_this_machine(examined):
    assert examined[0].is_exact
    assert len(examined[0].checks) == 5


def test_an_algorithm_is_tried_for_each_name_that_jax_has(examined):
    assert len(examined[0].algorithms) == len(lax.DotAlgorithmPreset) - 1  # all but DEFAULT
    assert all(product.works or product.refusal for product in examined[0].algorithms)


def test_the_parts_of_an_examination_are_announced(examined):
    assert examined[1][:2] == ["packages and settings", "devices"]
    assert "rates of products" not in examined[1]


def test_a_quick_examination_times_nothing(examined):
    assert examined[0].rates == ()
    assert examined[0].copying is None
    assert "was not measured" in examined[0].recommendation.reasons[0]


def test_what_is_found_survives_json(examined):
    found = json.loads(examined[0].as_json())
    assert found == examined[0].as_dict()
    assert found["system"]["packages"]["jax"] == jax.__version__
    assert found["is_exact"] is True
    assert found["recommendation"]["policy"] == "params=bf16,compute=bf16,output=f32"


def test_all_that_was_found_is_printed(examined):
    text = str(examined[0])
    for part in (
        "System",
        "Devices",
        "Products",
        "Dot algorithms",
        "Roundings to 16 bits",
        "Recommended",
        jax.__version__,
    ):
        assert part in text


def test_rich_shows_it_too(examined):
    console = rich.console.Console(width=200, file=io.StringIO())
    console.print(examined[0])
    text = console.file.getvalue()
    for part in ("TF32_TF32_F32", "Recommended", jax.__version__):
        assert part in text


@pytest.mark.parametrize("seconds", [0, -1, math.nan, math.inf])
def test_no_time_to_measure_in_is_refused(seconds):
    with pytest.raises(ValueError, match=r"`examine`: `seconds` must be a finite number above 0, but got"):
        doctor.examine(seconds=seconds)


@pytest.mark.parametrize("error", [RuntimeError, AssertionError])
def test_without_a_backend_the_failure_is_the_finding(monkeypatch, error):
    def fail(system):
        raise error("Unable to initialize backend 'cuda'\nand more")

    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setattr(surroundings, "with_backend", fail)
    found = doctor.examine()
    what = problem_in(found, "error").what
    assert what == "JAX finds no device (JAX_PLATFORMS=cuda): Unable to initialize backend 'cuda'"
    assert (found.exit_code, found.recommendation) == (1, None)
    assert json.loads(found.as_json())["recommendation"] is None


# Arithmetic.


def test_the_bits_of_products_are_those_of_their_formats(examined):
    """float64 has 53 significant bits, float32 24, float16 11, bfloat16 8, and the 8-bit formats 4 and 3."""
    bits = {product.name: product.bits for product in examined[0].products if product.works}
    if jax.default_backend() == "cpu":
        assert bits["f32 by default"] == 24
    expected = {"f64": 53, "f32": 24, "f16": 11, "bf16": 8, "float8_e4m3fn": 4, "float8_e5m2": 3}
    assert {name: bits[name] for name in expected if name in bits} == {n: b for n, b in expected.items() if n in bits}


def test_a_wrong_product_does_not_work():
    coarse = arithmetic._try_product("coarse", BFLOAT16, limit=2.0**-18)
    assert not coarse.works
    assert coarse.error > 2.0**-18
    assert "the result is wrong" in coarse.refusal


def test_a_product_that_raises_does_not_work_and_says_why():
    refused = arithmetic._try_product("integers", np.float32, limit=1, result="no dtype")
    assert (refused.works, refused.error) == (False, None)
    assert "no dtype" in refused.refusal


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16])
def test_a_kept_and_a_dropped_rounding_are_told_apart(dtype):
    """The programs round, or do not, on integer bits: no compiler can make one of the other."""
    operands, rounded, unrounded = arithmetic._numbers_to_add(dtype)

    def dropping(x, y, exact):
        return mpx.formats.round_to(x + y, dtype) if exact else x + y

    def wrong(x, y, exact):
        return mpx.formats.round_to(x + y, dtype) * (1 if exact else 2)

    found = arithmetic.round_trip("a sum", dtype, dropping, operands, rounded, unrounded)
    assert found == RoundTrip("a sum", dtype.name, "dropped", "kept")
    assert arithmetic.round_trip("a sum", dtype, wrong, operands, rounded, unrounded).astype == "other"


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16])
@pytest.mark.parametrize("numbers", ["_numbers_to_add", "_matrices", "_one_below_a_spacing", "_twice_below_a_spacing"])
def test_the_two_expected_results_of_a_rounding_differ(numbers, dtype):
    _, rounded, unrounded = getattr(arithmetic, numbers)(dtype)
    assert rounded.dtype == unrounded.dtype == np.float32
    assert np.any(rounded != unrounded)
    assert np.array_equal(rounded, rounded.astype(dtype).astype(np.float32))


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16])
def test_products_after_which_is_rounded_are_exact_in_float32(dtype):
    operands, _, product = arithmetic._matrices(dtype)
    a, b = (operand.astype(np.float64) for operand in operands)
    assert np.array_equal(a @ b, product)
    assert np.max(np.abs(a) @ np.abs(b)) * 64**2 < 2**24  # all partial sums are multiples of 2^-12, of 24 bits


def test_roundings_of_mpx_survive_on_this_machine(examined):
    assert {trip.round_to for trip in examined[0].round_trips} == {"kept"}
    assert {numbers.round_to for numbers in examined[0].subnormals} == {"kept"}


@pytest.mark.optax_promotion
def test_a_training_without_care_fails_the_check_that_mpx_passes():
    """Updates of up to 2^-11 added to a bfloat16 1 change nothing."""
    params, _ = arithmetic._trained(optax.identity())
    naive = arithmetic._check("naive", lambda: (np.asarray(params).astype(np.float32), arithmetic._SUMS))
    assert not naive.exact
    assert naive.detail.endswith("of 64 numbers are wrong")


def test_the_sums_of_the_checks_are_exact_in_float32():
    """Every sum lies between 1/2 and 2 and is a multiple of 2^-13."""
    sums = 1 + 1000 * arithmetic._UPDATES.astype(np.float64)
    assert np.array_equal(sums, arithmetic._SUMS)
    assert np.array_equal(sums * 2**13, np.round(sums * 2**13))
    assert 0.5 < sums.min() < 1 < sums.max() < 2


def test_a_check_that_raises_is_not_exact():
    def fail():
        raise FloatingPointError("invalid value")

    assert arithmetic._check("claim", fail) == Check("claim", False, "invalid value")


def test_the_claims_hold_in_64_bit_mode():
    with jax.enable_x64(True):
        assert all(check.exact for check in arithmetic.try_claims())


# Rates.


def test_a_rate_is_what_it_is_of_that_of_float32_and_of_the_peak():
    rates = [
        MatmulRate("f32", 8192, 50.0),
        MatmulRate("bf16", 8192, 400.0),
        MatmulRate("bf16 by autocast", 8192, 390.0),
    ]
    found = measuring.with_ratios(rates, Peak({"bf16": 1000.0}, None))
    assert [rate.ratio_to_f32 for rate in found] == [1.0, 8.0, 7.8]
    assert [rate.share_of_peak for rate in found] == [None, 0.4, 0.39]


def test_without_a_rate_of_float32_there_is_no_ratio():
    [rate] = measuring.with_ratios([MatmulRate("bf16", 8192, 400.0)], None)
    assert (rate.ratio_to_f32, rate.share_of_peak) == (None, None)


def test_each_precision_is_measured_or_says_why_not():
    rates = measuring.matmul_rates("some device", seconds=0.001, sizes=[16, 32])
    assert [rate.name for rate in rates] == ["f32", "f32 by default", "tf32", "bf16", "bf16 by autocast", "f16"]
    for rate in rates:
        assert (rate.teraflops is None) == bool(rate.refusal)
        assert rate.size in (None, 16, 32)
        assert rate.share_of_peak is None


def test_the_balance_of_a_machine_is_its_fastest_product_against_its_copies():
    copied = measuring.copy_rate("some device", rates_of(f32=1.0, bf16=2.0), seconds=0.001, size=1 << 16)
    assert copied.flops_per_byte == pytest.approx(2.0e12 / (copied.gigabytes_per_second * 1e9))


def test_tensor_cores_have_no_lower_peak_than_float32():
    for peak in measuring.PEAKS.values():
        assert all(teraflops >= peak.teraflops.get("f32", 0) for teraflops in peak.teraflops.values())


def test_an_error_is_said_on_one_short_line():
    assert measuring.first_line(ValueError("\n  first \nsecond")) == "first"
    assert measuring.first_line(ValueError()) == "ValueError"
    assert len(measuring.first_line(ValueError("x" * 1000))) == 160


# What mpx finds itself in.


@pytest.mark.parametrize(
    ("variables", "meaning"),
    [
        ({"NVIDIA_TF32_OVERRIDE": "0"}, "do not use TF32"),
        ({"XLA_FLAGS": "--xla_dump_to=x --xla_allow_excess_precision=false"}, "keeps the roundings"),
        ({"JAX_ENABLE_X64": "1"}, "float64"),
        ({"JAX_DEFAULT_MATMUL_PRECISION": "highest"}, "not lowered"),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, "as it is needed"),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".9"}, ".9 of the device's memory"),
    ],
)
def test_a_setting_is_shown_with_what_it_does(variables, meaning):
    [setting] = surroundings.read_settings(variables | {"HOME": "/", "JAX_DISABLE_JIT": ""})
    assert (setting.name, setting.value) == next(iter(variables.items()))
    assert meaning in setting.meaning


@pytest.mark.parametrize(
    "variables", [{"NVIDIA_TF32_OVERRIDE": "1"}, {"JAX_ENABLE_X64": "0"}, {"JAX_DISABLE_JIT": "false"}]
)
def test_a_setting_that_changes_nothing_has_no_meaning(variables):
    [setting] = surroundings.read_settings(variables)
    assert setting.meaning == ""


def test_autocast_that_lowers_nothing_is_a_warning():
    assert surroundings._autocast_lowers()
    with jax.default_matmul_precision("highest"):
        system = surroundings.with_backend(surroundings.look_at_system())
    assert not system.autocast_lowers
    found = dataclasses.replace(GPU, system=dataclasses.replace(GPU.system, autocast_lowers=False))
    assert "autocast lowers no product" in problem_in(found, "warning").what


class FakeDevice:
    def __init__(self, platform, stats):
        self.platform, self.memory_stats = platform, lambda: stats


def test_memory_is_that_of_the_device_where_it_tells():
    assert surroundings.memory_of(FakeDevice("gpu", {"bytes_limit": 10, "bytes_in_use": 3})) == ("device", 10, 3)
    assert surroundings.memory_of(FakeDevice("gpu", None)) == ("unknown", None, None)


def test_memory_of_a_cpu_is_that_of_the_machine():
    whose, size, used = surroundings.memory_of(FakeDevice("cpu", None))
    assert whose == "host"
    assert 0 < used < size


def test_a_text_without_a_version_has_no_driver():
    assert surroundings.nvidia_driver("") is None
    assert surroundings.nvidia_driver("NVRM version: unknown\nGCC version: 12.2.0") is None


def listed(folder, path, content):
    """A file of a distribution that was installed into a folder, as its list of files has it."""
    file = importlib.metadata.PackagePath(path)
    digest = urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    file.hash = importlib.metadata.FileHash(f"sha256={digest}")
    file.dist = types.SimpleNamespace(locate_file=lambda path: folder / path)
    return file


def test_files_that_another_distribution_overwrote_are_found(tmp_path):
    """Of four files that were installed, one has been overwritten, one is gone, and one is not of the package."""
    (tmp_path / "mpx").mkdir()
    (tmp_path / "mpx/__init__.py").write_bytes(b"another package")
    (tmp_path / "mpx/formats.py").write_bytes(b"ours")
    names = ["mpx/__init__.py", "mpx/formats.py", "mpx/_trees.py", "other/gone.py"]
    files = [listed(tmp_path, name, b"ours") for name in names]
    assert surroundings.changed_files(files) == ("mpx/__init__.py", "mpx/_trees.py")


def test_our_own_distribution_is_no_other_one():
    providers = {"mpx": ["mpx-jax", "mpx_jax", "mixed-precision-for-JAX", "mixed-precision-for-JAX"]}
    assert surroundings.other_distributions(providers) == ("mixed-precision-for-JAX",)
    assert surroundings.other_distributions({}) == ()


@pytest.mark.parametrize(("name", "is_mpx"), [("stranger", False), ("copy", True)])
def test_a_package_in_the_working_directory_is_found(tmp_path, monkeypatch, name, is_mpx):
    folder = tmp_path / name / "mpx"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    if is_mpx:
        (folder / "doctor.py").touch()
    monkeypatch.chdir(folder.parent)
    found = surroundings.look_at_imports()
    assert (found.package, found.in_this_folder_is_mpx) == (PACKAGE, is_mpx)
    assert pathlib.Path(found.in_this_folder).samefile(folder / "__init__.py")
    severity = "warning" if is_mpx else "error"
    assert "started in this folder imports" in problem_in(dataclasses.replace(GPU, imports=found), severity).what


def test_an_empty_folder_called_mpx_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "mpx").mkdir()
    monkeypatch.chdir(tmp_path)
    assert surroundings.look_at_imports().in_this_folder is None


# Problems.


def test_a_healthy_gpu_has_notes_only():
    assert {problem.severity for problem in GPU.problems} == {"note"}
    assert GPU.exit_code == 0


def with_imports(**changes):
    return dataclasses.replace(GPU, imports=dataclasses.replace(GPU.imports, **changes))


@pytest.mark.parametrize(
    ("found", "what", "remedy"),
    [
        (
            with_imports(changed_files=("mpx/__init__.py",), other_distributions=("mixed-precision-for-JAX",)),
            "1 files of mpx are not those installed: mpx/__init__.py",
            "pip uninstall mixed-precision-for-JAX",
        ),
        (with_imports(in_this_folder="/home/mpx.py"), "imports /home/mpx.py", "rename"),
        (
            dataclasses.replace(GPU, checks=(Check("masters are exact", False, "3 of 64 numbers are wrong"),)),
            "not exact: masters are exact. 3 of 64",
            "report it",
        ),
        (
            dataclasses.replace(GPU, round_trips=(RoundTrip("a sum", "bfloat16", "dropped", "dropped"),)),
            "`mpx.formats.round_to` to bfloat16 is lost after a sum",
            "report it",
        ),
        (
            dataclasses.replace(GPU, subnormals=(SubnormalNumbers("float16", "flushed", "flushed"),)),
            "loses subnormal numbers of float16",
            "report it",
        ),
        (
            dataclasses.replace(GPU, products=(Product("bf16", "bfloat16", False, 0.5, 1, "the result is wrong"),)),
            "products in bf16: the result is wrong",
            "do not compute in it",
        ),
        (dataclasses.replace(GPU, failure="no backend"), "JAX finds no device: no backend", "JAX_PLATFORMS=cpu"),
    ],
)
def test_what_spoils_a_training_is_an_error(found, what, remedy):
    problem = problem_in(found, "error")
    assert what in problem.what
    assert remedy in problem.remedy
    assert found.exit_code == 1
    assert found.problems[0] == problem  # errors come first


@pytest.mark.parametrize(
    ("found", "what"),
    [
        (with_imports(other_distributions=("mixed-precision-for-JAX",)), "also brings a package called mpx"),
        (with_imports(installed="/elsewhere/mpx"), "is installed in /elsewhere/mpx"),
        (dataclasses.replace(GPU, system=dataclasses.replace(GPU.system, backend="cpu")), "JAX computes on the CPU"),
        (dataclasses.replace(GPU, devices=(Devices("NVIDIA L4", 1, "device", 100, 95),)), "memory of NVIDIA L4"),
        (
            dataclasses.replace(GPU, rates=(*GPU.rates, MatmulRate("bf16 by autocast", 8192, 78.0))),
            "runs at 10% of its rate under autocast",
        ),
        (
            dataclasses.replace(GPU, settings=(Setting("XLA_FLAGS", "--xla_cpu_enable_fast_math=true", "reorders"),)),
            "fast math",
        ),
        (dataclasses.replace(GPU, settings=(Setting("JAX_DISABLE_JIT", "1", "is slow"),)), "is slow"),
    ],
)
def test_what_costs_or_may_surprise_is_a_warning(found, what):
    assert what in problem_in(found, "warning").what
    assert found.exit_code == 3


def test_a_slow_product_under_autocast_is_no_warning_on_a_cpu():
    """Other programs take a CPU's time now and then."""
    system = dataclasses.replace(GPU.system, backend="cpu", nvidia_driver=None)
    slow = dataclasses.replace(GPU, system=system, rates=(*GPU.rates, MatmulRate("bf16 by autocast", 8192, 78.0)))
    assert slow.exit_code == 0


@pytest.mark.parametrize(
    ("found", "what"),
    [
        (with_imports(package="/home/mpx", installed=None, checkout=True), "from a checkout"),
        (dataclasses.replace(GPU, products=(Product("f32 by default", "float32", True, 5e-5, 11),)), "11 of their 24"),
        (dataclasses.replace(GPU, rates=(MatmulRate("bf16", 8192, 90, 1, 0.1),)), "10% of the published peak"),
    ],
)
def test_how_a_machine_is_is_a_note(found, what):
    assert any(what in problem.what for problem in found.problems if problem.severity == "note")
    assert found.exit_code == 0


def test_a_dropped_rounding_is_said_and_no_fault_of_the_machine():
    assert GPU.drops_roundings
    assert GPU.is_exact
    assert "a sum of float32 numbers (bfloat16)" in problem_in(GPU, "note").what
    kept = dataclasses.replace(GPU, round_trips=(RoundTrip("a sum", "bfloat16", "kept", "kept"),))
    assert not kept.drops_roundings
    assert kept.problems == ()
    assert "No problems." in str(kept)


def test_a_lost_rounding_of_mpx_is_not_exact():
    lost = dataclasses.replace(GPU, round_trips=(RoundTrip("a sum", "bfloat16", "kept", "other"),))
    assert not lost.is_exact


def test_numbers_that_are_not_finite_are_null_in_json():
    found = dataclasses.replace(GPU, rates=(MatmulRate("f32", 8, math.inf, math.nan),), seconds=-math.inf)
    read = json.loads(found.as_json())
    assert (read["rates"][0]["teraflops"], read["rates"][0]["ratio_to_f32"], read["seconds"]) == (None, None, None)


def test_rates_and_shares_are_printed():
    found = dataclasses.replace(
        GPU,
        rates=measuring.with_ratios(GPU.rates, measuring.PEAKS["NVIDIA H200"]),
        copying=CopyRate(4000, 2**30, 195, 0.83),
    )
    line = next(line for line in str(found).splitlines() if line.startswith("bf16 ") and "FLOP" in line)
    assert line.split() == ["bf16", "8192", "780", "TFLOP/s", "15.60", "79%"]
    assert "4000 GB/s" in str(found)


# Recommendations.


@pytest.mark.parametrize(
    ("device", "rates", "policy"),
    [
        ("H200", rates_of(f32=50, default=400, tf32=410, bf16=780, f16=770), "params=bf16,compute=bf16,output=f32"),
        ("T4", rates_of(f32=4, default=4, bf16=2, f16=25), "params=f32,compute=f16,output=f32"),
        ("V100", rates_of(f32=14, default=14, bf16=13, f16=90), "params=f32,compute=f16,output=f32"),
        ("CPU", rates_of(f32=0.1, default=0.1, bf16=0.08, f16=0.08), "params=f32,compute=f32,output=f32"),
        ("CPU with AMX", rates_of(f32=1.0, default=1.0, bf16=4.0, f16=1.0), "params=bf16,compute=bf16,output=f32"),
    ],
)
def test_each_class_of_device_has_its_recipe(device, rates, policy):
    assert recommend(ALL, rates).policy == policy, device


def test_where_float32_is_rounded_to_bfloat16_anyway_bfloat16_is_recommended():
    """As on a TPU: the same products, and half the bytes."""
    rates = rates_of(f32=30, default=180, bf16=190)
    rounded = (*products_of("f32", "bf16"), Product("f32 by default", "float32", True, 2e-3, 8))
    assert recommend(rounded, rates).policy == "params=bf16,compute=bf16,output=f32"
    assert recommend(ALL, rates).policy == "params=f32,compute=f32,output=f32"


def test_reasons_have_the_measured_ratios():
    reasons = recommend(ALL, GPU.rates).reasons
    assert "bfloat16 run at 1.9 times" in reasons[0]  # 780 / 400
    assert "8.2 times" in reasons[1]  # 410 / 50


def test_where_16_bits_are_no_faster_float32_is_for_speed_and_bfloat16_for_memory():
    found = recommend(ALL, rates_of(f32=0.1, default=0.1, bf16=0.07, f16=0.05))
    assert "0.7 times" in found.reasons[0]
    assert found.alternative.policy == "params=bf16,compute=bf16,output=f32"
    assert "To save memory" in str(dataclasses.replace(GPU, rates=rates_of(f32=0.1, bf16=0.07)))


def test_a_dtype_that_computes_wrongly_is_not_recommended():
    broken = (*products_of("f32", "f16"), Product("bf16", "bfloat16", False, 0.5, 1, "the result is wrong"))
    assert recommend(broken, GPU.rates).policy == "params=f32,compute=f16,output=f32"
    assert recommend(broken, ()).policy == "params=f32,compute=f32,output=f32"
    assert recommend(broken, rates_of(f32=1.0, bf16=9.0)).alternative is None


@pytest.mark.optax_promotion
@pytest.mark.parametrize("rates", [rates_of(f32=1, bf16=9), rates_of(f32=1, f16=9), rates_of(f32=1, bf16=1)])
def test_the_code_of_a_recipe_trains(rates):
    recommended = recommend(ALL, rates)
    for recipe in filter(None, (recommended, recommended.alternative)):
        *setup, step = recipe.code.splitlines()
        names = {
            "jax": jax,
            "mpx": mpx,
            "optax": optax,
            "params": {"w": jnp.full((4, 4), 0.5)},
            "batch": jnp.ones((2, 4)),
            "loss_fn": lambda params, batch: jnp.mean((batch @ params["w"]) ** 2),
        }
        exec("\n".join([*setup, "opt_state = tx.init(params)", step]), names)
        policy = mpx.get_policy(recipe.policy)
        assert names["params"]["w"].dtype == policy.param_dtype
        assert float(names["loss"]) == 4.0  # (4 * 0.5)^2, exact in every format
        updates, state = jax.jit(names["tx"].update)(names["grads"], names["opt_state"], names["params"])
        trained = optax.apply_updates(names["params"], updates)
        assert trained["w"].dtype == policy.param_dtype
        assert bool(jnp.all(mpx.master_params(trained, state)["w"] < 0.5))
