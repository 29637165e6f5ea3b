"""Smoke tests of the command for the day a GPU is there. Sizes are tiny, and what needs
a GPU is made up.
"""

import importlib
import inspect
import json
import math

import jax
import jax.numpy as jnp
import pytest

import mpx
from benchmarks import on_gpu, workers
from benchmarks.on_gpu_units import SIZES, Unit, all_units
from benchmarks.timing import in_a_loop

pytestmark = pytest.mark.optax_promotion

DEVICE = dict.fromkeys(("jaxlib", "flax", "optax", "numpy", "mpx"), "1.0")
DEVICE |= {
    "device": "NVIDIA H200",
    "driver": "580",
    "jax": "0.11.2",
    "date": "2026-11-22 12:00",
}
DEVICE |= {"backend": "gpu", "FLOP/s": 8e14}
SMALLEST = {unit.name: unit for unit in all_units(SIZES["smallest"])}


def measure(folder, units, run, left=lambda: math.inf):
    book = on_gpu.Book(folder)
    book.check(DEVICE)
    return on_gpu.measure_units(units, book, left, run=run)


def measured(folder, *names):
    """Measure units in this process, at the smallest size, and return the report."""
    call = lambda function, arguments, **_: json.loads(
        json.dumps(workers.call(function, arguments))
    )
    with jax.numpy_rank_promotion("allow"):  # as in a process of its own
        measure(folder, [SMALLEST[name] for name in names], run=call)
    return on_gpu.Book(folder).report()


def test_an_optimizer_step_is_measured_beside_that_by_hand(tmp_path):
    printed = measured(tmp_path, "optimizer: one, full")
    assert "one: 1 tensor, 262,144 parameters" in printed
    assert (
        "| recipe | beside | other, ms | mpx, ms | mpx / other | 95% | target | by"
        " separate calls, ms | moved, GB | moved in the loop, GB |" in printed
    )
    assert "| full | by hand |" in printed
    assert "at most 1.03: " in printed
    assert "Nothing differs." in printed


def test_a_fused_step_is_measured_beside_float32(tmp_path):
    printed = measured(tmp_path, "optimizer: one, fused, 8-bit to nearest")
    assert "| fused, 8-bit to nearest | f32 |" in printed
    assert "Nothing differs." in printed


def flops_of(step, count):
    square = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    return sum(mpx.step_report(in_a_loop(step, count), square, square).flops.values())


def test_a_loop_computes_in_each_step_what_depends_on_the_data_alone():
    """A product of two matrices of 16 x 16 takes 2 * 16**3 FLOPs."""
    assert flops_of(lambda state, data: state + data @ data, 5) == 5 * 2 * 16**3


def test_without_its_barrier_a_loop_on_a_cpu_computes_that_once(monkeypatch):
    monkeypatch.setattr(jax.lax, "optimization_barrier", lambda operands: operands)
    assert flops_of(lambda state, data: state + data @ data, 5) == 2 * 16**3


@pytest.mark.slow  # compiles for five seconds
def test_a_llama_is_measured(tmp_path):
    printed = measured(tmp_path, "llama: tiny, inputs in 8 bits")
    assert "| size | recipe | inputs in 8 bits | ms |" in printed
    assert "| tiny | bf16-split24-8bit | True |" in printed


@pytest.mark.slow  # compiles ten programs
def test_one_value_is_measured(tmp_path):
    printed = measured(tmp_path, "one value: 64x1, 16")
    assert "**one value: mean |difference of log p|**" in printed
    assert "| 64x1 | 16 |" in printed


@pytest.mark.slow  # compiles for five seconds
def test_the_kernels_of_the_step_of_gpt2_have_what_they_lose(tmp_path):
    """Negative control: kernels that lose little are left out."""
    name = "profile: tiny, padded"
    printed = measured(tmp_path, name)
    assert "| step, us | kernels | other events | idle | bound | steps |" in printed
    assert "| kernel | kind | times | us a step | bound | lost |" in printed
    step, *kernels = on_gpu.Book(tmp_path).found["units"][name]["rows"]
    lost = [kernel["lost us"] for kernel in kernels]
    assert step["steps"] == 5
    assert len(lost) == 12
    assert lost == sorted(lost, reverse=True)
    assert 0 < sum(kernel["measured us"] for kernel in kernels) < step["kernels us"]


@pytest.mark.slow  # compiles for five seconds in a process of its own
def test_without_pytorch_only_its_own_turns_fail(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no PyTorch')")
    without = {"PYTHONPATH": str(tmp_path)}
    names = ("torch: 2 torch-cudnn", "torch: 3 padded")
    units = [SMALLEST[name]._replace(environment=without) for name in names]
    measure(tmp_path, units, workers.run_worker)
    printed = on_gpu.Book(tmp_path).report()
    assert "| torch: 2 torch-cudnn | failed | ImportError: " in printed
    assert "needs PyTorch: `pip install torch`" in printed
    assert f"| mpx, jax {jax.__version__}, rung padded |" in printed


@pytest.mark.slow  # compiles for five seconds
def test_parity_at_size_is_measured_beside_float32(tmp_path):
    printed = measured(tmp_path, "parity: f32, 0", "parity: bf16-autocast, 0")
    assert "| bf16-autocast | 0 | 14.0 |" in printed


def test_a_process_has_variables_of_its_own(monkeypatch):
    """Negative control: without, there is none. Both have those of the command."""
    monkeypatch.setenv("MPX_OF_THE_COMMAND", "all")
    for own in ({"MPX_OWN": "one"}, {}):
        read = lambda key, own=own: workers.run_worker(
            "os:getenv", {"key": key}, environment=own
        )
        assert read("MPX_OWN") == [own.get("MPX_OWN")]
        assert read("MPX_OF_THE_COMMAND") == ["all"]


def test_a_profile_has_no_command_buffers():
    profiles = [u for u in SMALLEST.values() if "command_buffer=" in str(u.environment)]
    assert [unit.part for unit in profiles] == ["profile"]


def test_the_fused_steps_come_first_and_gpt2_by_itself_before_its_rungs():
    first = [unit.name for unit in all_units(SIZES["gpu"])][:31]
    assert all(name.startswith("optimizer: one, fused") for name in first[:4])
    assert all(name.startswith("optimizer: gpt2, fused") for name in first[4:8])
    assert first[8:15] == [
        *(f"optimizer: gpt2, {name}" for name in ("f32", "full", "split")),
        "optimizer: gpt2, split + 8-bit",
        "optimizer: gpt2, Kahan + bf16 moments",
        "profile: gpt2-124m, padded",
        "torch: 1 torch",
    ]
    assert first[19:21] == ["torch: 6 torch", "parity: f32, 0"]
    assert first[29:] == ["parity: f32, 2", "ladder: gpt2-124m, 8bit"]


@pytest.mark.parametrize("size", SIZES)
def test_each_unit_has_a_name_of_its_own_and_arguments_that_fit_its_function(size):
    units = all_units(SIZES[size])
    assert len({unit.name for unit in units}) == len(units)
    for unit in units:
        module, name = unit.function.split(":")
        function = getattr(importlib.import_module(module), name)
        inspect.signature(function).bind(**unit.arguments)


def test_what_does_not_fit_is_left_for_the_next_call(tmp_path):
    """With 60 seconds left a unit of 90 begins, one of 200 does not."""
    units = [Unit(f"a: {seconds}", "a", "f", seconds=seconds) for seconds in (200, 90)]
    begun = []

    def run(function, arguments, *, timeout, environment):
        begun.append(timeout)
        return [{"x": 0.25}]

    assert measure(tmp_path, units, run, lambda: 60) == units[:1]
    assert measure(tmp_path, units, run) == []
    assert begun == [50, 200]
    assert "**a**\n\n| x |\n|---|\n| 0.25 |\n| 0.25 |" in on_gpu.Book(tmp_path).report()


def test_the_command_names_what_it_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(on_gpu, "run_worker", lambda *_, timeout: [DEVICE])
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    on_gpu.main(tmp_path, minutes=0, parts="llama", size="smallest", report=False)
    assert capsys.readouterr().out == (
        "0 of 2 units are through.\n"
        "Left out: llama: tiny, inputs in 8 bits; llama: tiny.\n"
        "Repeat the command to go on.\n"
    )
