"""Hold the peaks of plans against those of programs of models that others write, and of
the Llama of the examples.
"""

import dataclasses
import functools
from typing import Any

import jax
import optax
import pytest

import mpx
from benchmarks.reading import flash_attention
from examples import llama
from mpx.tools.program import target_devices
from tests.gpu_program.others import Model, program

pytestmark = [pytest.mark.many_devices, pytest.mark.optax_promotion]

but = dataclasses.replace


def case(
    model: Model, recipe: str = "bf16-split-8bit", devices: int = 1
) -> tuple[Model, str, int]:
    return model, recipe, devices


GPT = Model()
VIT = Model(patch=768, words=1000, batch=64, sequence=256)
BILLION = Model(
    width=2048,
    layers=24,
    hidden=8192,
    head_size=128,
    batch=1,
    sequence=4096,
    scan=True,
    checkpoint=True,
)
LARGE = but(BILLION, width=5120, layers=40, hidden=20_480, words=32_000)
WORDS = but(BILLION, layers=18, words=256_000)
LONG = but(BILLION, sequence=32_768)
EXPERTS = Model(
    hidden=2048, experts=8, batch=4, sequence=2048, scan=True, checkpoint=True
)
GATED = Model(
    width=1024, hidden=2816, batch=4, sequence=2048, words=32_000, is_gated=True
)

CASES = {
    "GPT, unrolled": case(but(GPT, layers=6)),
    "GPT, in a scan": case(but(GPT, scan=True)),
    "GPT, with checkpoints": case(but(GPT, scan=True, checkpoint=True)),
    "GPT in float32": case(but(GPT, scan=True, layers=6), "f32"),
    "ViT": case(but(VIT, scan=True)),
    "experts": case(EXPERTS),
    "1.4B": case(BILLION),
    "256k words": case(WORDS),
    "32k tokens": case(LONG),
    "13B on 8": case(LARGE, devices=8),
    # Models that no formula was made for.
    "heads of 80": case(
        Model(
            width=1280,
            layers=32,
            hidden=5120,
            head_size=80,
            batch=2,
            sequence=2048,
            scan=True,
        ),
        "bf16-split",
    ),
    "gates on 8": case(
        but(
            GATED,
            width=2048,
            layers=16,
            hidden=8192,
            batch=2,
            words=128_256,
            scan=True,
            head_size=128,
        ),
        devices=8,
    ),
    "rows of 11,008 on 8": case(  # of which a device has 5.4 blocks
        but(
            GATED,
            width=4096,
            layers=16,
            hidden=11_008,
            batch=1,
            scan=True,
            checkpoint=True,
            head_size=128,
        ),
        devices=8,
    ),
}
SLOW = {
    "13B": case(LARGE),
    "256k words, in parts": case(but(WORDS, parts=8)),
    "32k tokens, a kernel": case(but(LONG, kernel=True)),
    "1.4B on 8": case(BILLION, devices=8),
    "256k words on 8": case(WORDS, devices=8),
    "gates, 16k tokens": case(
        but(
            GATED,
            layers=8,
            batch=1,
            sequence=16_384,
            scan=True,
            checkpoint=True,
            kernel=True,
            parts=8,
        )
    ),
    "GPT, 12 unrolled": case(GPT),
    "GPT, unrolled with checkpoints": case(but(GPT, checkpoint=True)),
    "gates, unrolled": case(but(GATED, layers=6)),
    "experts, unrolled": case(but(EXPERTS, layers=4, scan=False, checkpoint=False)),
    "unrolled on 8": case(
        but(BILLION, layers=6, words=32_000, kernel=True, scan=False), devices=8
    ),
    "48 layers": case(
        but(
            GPT, width=1600, layers=48, hidden=6400, batch=4, scan=True, checkpoint=True
        )
    ),
}
# What XLA chooses: in which layout or dtype it keeps what, and when devices add
# gradients up.
HAVE_ENDS = {
    "32k tokens",
    "1.4B on 8",
    "13B on 8",
    "rows of 11,008 on 8",
    *(name for name in CASES | SLOW if "unrolled" in name),
}


def written(m: Model) -> dict[str, Any]:
    """Return what a plan is told of how a program is written."""
    how = {
        "attention": "kernel" if m.kernel else "xla",
        "logits": "parts" if m.parts > 1 else "whole",
    }
    return {
        **how,
        "scan": m.scan,
        "checkpoint": m.checkpoint,
        "heads": m.width // m.head_size,
    }


def plan_of(m, recipe, args, tx, **how):
    mesh = getattr(args[2].sharding, "mesh", None)
    layout = (
        {
            "mesh": mesh,
            "axis": None,
            "param_specs": jax.tree.map(lambda p: p.sharding.spec, args[0]),
        }
        if mesh
        else {}
    )
    return mpx.memory_plan(
        args[0], tx, recipe, batch=m.batch, sequence=m.sequence, **layout, **how
    )


@functools.cache
def planned_and_compiled(m, recipe, count):
    """Return a function that plans a model's step, and the report of its program."""
    step, args, tx = program(
        m, recipe, target_devices("h200", count) if count > 1 else ()
    )
    with flash_attention():
        report = mpx.step_report(step, *args, target="h200", donate_argnums=(0, 1))
    return functools.partial(plan_of, m, recipe, args, tx), report


@pytest.mark.parametrize(
    "name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_the_peak_of_a_program_is_at_most_5_percent_above_its_plan_and_15_percent_below(
    h200, name
):
    """Of a plan with two ends they hold for the one or the other; without a word on the
    program its peak is between.
    """
    del h200  # skips where nothing compiles for GPUs
    m, recipe, count = (CASES | SLOW)[name]
    plan, report = planned_and_compiled(m, recipe, count)
    found = plan(**written(m))
    inputs = m.batch * m.sequence * 4 * (1 + max(1, m.patch))
    state_and_weights = found.total_bytes_a_device - found.bytes_of("gradients")
    assert state_and_weights == pytest.approx(report.argument_bytes - inputs, rel=1e-3)
    least, most = found.least_peak_bytes_a_device, found.peak_bytes_a_device
    print(
        f"{name}: {report.peak_bytes / 2**30:.4g} GiB, planned {least / 2**30:.4g} to"
        f" {most / 2**30:.4g}"
    )
    assert 0.95 * report.peak_bytes < most
    assert (least if name in HAVE_ENDS else most) < 1.15 * report.peak_bytes
    anything = plan()
    assert anything.least_peak_bytes_a_device < 1.15 * report.peak_bytes
    assert 0.95 * report.peak_bytes < anything.peak_bytes_a_device


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("GPT, in a scan", {"attention": "kernel"}),
        ("GPT, in a scan", {"checkpoint": True}),
        ("GPT, unrolled", {"scan": True}),
        pytest.param(
            "32k tokens, a kernel", {"logits": "parts"}, marks=pytest.mark.slow
        ),
    ],
)
def test_the_plan_of_another_program_is_too_low(h200, name, other):
    """A negative control: each choice counts."""
    del h200
    m, recipe, count = (CASES | SLOW)[name]
    plan, report = planned_and_compiled(m, recipe, count)
    assert plan(**written(m) | other).peak_bytes_a_device < 0.95 * report.peak_bytes


LLAMA_2_7B = {"hidden": 11_008, "vocabulary": 32_000, "key_heads": 32}
LLAMAS = {
    "1B on 1": ("1B", 1, {}),
    "7B on 1": ("8B", 1, LLAMA_2_7B),
    "7B on 8": ("8B", 8, LLAMA_2_7B),
    "70B on 8": ("70B", 8, {}),
    "70B on 64, kept in 8 bits": (
        "70B",
        64,
        {"kept": mpx.Blockwise8bit(), "grad_dtype": "bf16"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LLAMAS)
def test_a_plan_holds_for_the_llama_of_the_examples(h200, name):
    """It attends with one head of keys after the other, so that few scores are in
    memory at once.
    """
    del h200
    size, count, options = LLAMAS[name]
    recipe = "bf16-split24-8bit"
    gpus = target_devices("h200", count) if count > 1 else ()
    step, args, _ = llama.step_and_arguments(size, recipe, gpus, **options)
    report = mpx.step_report(step, *args, target="h200")
    tx = mpx.mixed_precision(optax.adamw(1e-3), recipe, key=jax.random.key(0))
    how: dict[str, Any] = {
        "attention": "kernel",
        "logits": "parts",
        "scan": True,
        "checkpoint": True,
    }
    how |= {
        "gradient_dtype": options.get("grad_dtype"),
        "kept": "8bit" if "kept" in options else None,
    }
    plan = plan_of(Model(batch=1, sequence=4096), recipe, args, tx, **how)
    least, most = plan.least_peak_bytes_a_device, plan.peak_bytes_a_device
    print(
        f"{name}: {report.peak_bytes / 2**30:.4g} GiB, planned {least / 2**30:.4g} to"
        f" {most / 2**30:.4g}"
    )
    assert 0.95 * report.peak_bytes < most
    assert least < 1.15 * report.peak_bytes
    state_and_weights = plan.total_bytes_a_device - plan.bytes_of("gradients")
    assert state_and_weights == pytest.approx(report.argument_bytes, rel=0.01)
