"""Hold the peaks of plans against those of the programs of the steps that they stand for."""

import math
from typing import Any

import jax
import optax
import pytest
from jax.sharding import PartitionSpec as P

import mpx
from examples import llama
from mpx.tools.program import target_devices

pytestmark = [pytest.mark.slow, pytest.mark.many_devices, pytest.mark.optax_promotion]

LLAMA_2_7B = {"hidden": 11_008, "vocabulary": 32_000, "key_heads": 32}
CASES = {
    "1B on 1": ("1B", 1, {}),
    "7B on 1": ("8B", 1, LLAMA_2_7B),
    "7B on 8": ("8B", 8, LLAMA_2_7B),
    "70B on 8": ("70B", 8, {}),
    "70B on 64, kept in 8 bits": ("70B", 64, {"kept": mpx.Blockwise8bit(), "grad_dtype": "bf16"}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_plan_is_within_a_tenth_of_the_peak_of_the_program(h200, case):
    """Whether it knows the shapes of the model or the number of its parameters alone."""
    del h200  # skips where nothing compiles for GPUs
    size, count, options = CASES[case]
    recipe = "bf16-split24-8bit"
    gpus = target_devices("h200", count) if count > 1 else ()
    step, args, _ = llama.step_and_arguments(size, recipe, gpus, **options)
    report = mpx.step_report(step, *args, target="h200")

    tx = mpx.mixed_precision(optax.adamw(1e-3), recipe, key=jax.random.key(0))
    given: dict[str, Any] = {"gradient_dtype": options.get("grad_dtype"), "kept": "8bit" if "kept" in options else None}
    number = sum(math.prod(p.shape) for p in jax.tree.leaves(args[0]))
    by_shapes: dict[str, Any] = {}
    by_number: dict[str, Any] = {}
    if gpus:
        fsdp = {"mesh": args[2].sharding.mesh, "axis": None}
        by_shapes = fsdp | {"param_specs": jax.tree.map(lambda p: p.sharding.spec, args[0])}
        by_number = fsdp | {"param_specs": P("data")}
    for model, layout in ((args[0], by_shapes), (number, by_number)):
        plan = mpx.memory_plan(model, tx, recipe, **given, **layout)
        assert plan.peak_bytes_a_device == pytest.approx(report.peak_bytes, rel=0.1)
        state_and_weights = plan.total_bytes_a_device - plan.bytes_of("gradients")
        assert state_and_weights == pytest.approx(report.argument_bytes, rel=0.01)
