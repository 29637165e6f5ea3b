"""Each term of a peak, by hand. The sum is held against programs in `tests/gpu_program/test_plans.py`."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from mpx.tools.plan import memory_plan
from mpx.tools.plan.peak import shapes_of

MESH = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
FSDP = {"mesh": MESH, "axis": None, "param_specs": [P("data")] * 2 + [P(None, "data")] * 8}
# 3 layers of width 256, with 2 groups of queries of 128, a perceptron of 1,024, and 512 words.
LAYER = [(256, 256), (256, 256), (256, 128), (256, 128), (256, 1024), (256, 1024), (1024, 256)]
STACKED = [(512, 256), (256, 512), *((3, *shape) for shape in LAYER), (3, 256)]
UNROLLED = [(256, 512), (256, 512), *LAYER, *LAYER, *LAYER, (256,)]
IN_A_LAYER = 256 * (256 + 256 + 128 + 128 + 3 * 1024)


def plan_of(shapes=STACKED, policy="bf16", **options: Any):
    tree = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return memory_plan(tree, optax.sgd(0.1), policy, **(options | {"batch": options.get("batch", 2), "sequence": 64}))


def activations(size, kept=4):
    """Return those of 2 x 64 tokens in a layer: of the perceptron, of the width, of scores; and between layers."""
    return 128 * (4 * size * 1024 + 40 * 256 + 2 * 64 * (4 + 3 * size)) + 3 * 128 * 256 * kept


@pytest.mark.parametrize(("policy", "size"), [("bf16", 2), ("f32", 4)])
@pytest.mark.parametrize("shapes", [STACKED, UNROLLED])
def test_one_device_needs_the_activations_of_a_layer_the_inputs_of_all_and_a_margin(shapes, policy, size):
    plan = plan_of(shapes, policy)
    assert plan.peak == {
        "activations": activations(size),
        "margin": int(0.03 * (plan.total_bytes_a_device + activations(size))),
    }
    assert plan.peak_bytes_a_device == plan.total_bytes_a_device + sum(plan.peak.values())
    assert plan.step == "2 x 64 tokens a device, 3 layers of width 256 in a scan, each in jax.checkpoint"


@pytest.mark.parametrize(("kept", "size"), [("bf16", 2), ("8bit", 1)])
def test_what_is_kept_between_layers_has_the_bytes_of_its_format(kept, size):
    assert plan_of(kept=kept).peak["activations"] == activations(2, size)


def test_fsdp_gathers_two_layers_in_the_compute_dtype():
    peak = plan_of(**FSDP).peak
    assert peak["gathered weights"] == 2 * 2 * IN_A_LAYER
    assert peak["activations"] == activations(2)


def test_where_the_head_is_larger_it_is_whole_once_and_so_is_its_gradient_in_float32():
    """Beside them stand the gradients of half of the logits, and four float32 arrays."""
    shapes = [(2**16, 256), (256, 2**16), *STACKED[2:]]
    peak = plan_of(shapes, **FSDP).peak
    assert peak["gathered weights"] == 2 * 2**16 * 256
    assert peak["whole gradients"] == 4 * 2**16 * 256
    assert peak["activations"] == 128 * (2**16 + 16 * 256) + 3 * 128 * 256 * 4


def test_weights_that_are_on_every_device_are_not_gathered():
    assert set(plan_of(mesh=MESH, axis="data").peak) == {"activations", "margin"}


def test_a_model_without_matrices_has_a_margin_alone():
    plan = plan_of([(1000,)])
    assert plan.peak == {"margin": int(0.03 * plan.total_bytes_a_device)}


def test_without_a_batch_a_plan_counts_what_is_held_alone():
    plan = plan_of(batch=0)
    assert plan.peak == {}
    assert str(plan).splitlines()[-1].startswith("held")


@pytest.mark.parametrize(
    ("parameters", "layers", "width"),
    [(1_498e6, 16, 2048), (6_738e6, 32, 4096), (8_030e6, 32, 4096), (70_550e6, 80, 8192), (405_900e6, 126, 16_384)],
)
def test_a_number_stands_for_the_llama_of_that_size(parameters, layers, width):
    shapes = shapes_of(int(parameters))
    assert (layers, width, width) in shapes
    assert sum(map(math.prod, shapes)) == pytest.approx(parameters, rel=1e-3)


def test_a_number_between_two_llamas_stands_for_sizes_between_theirs():
    """And so does one below GPT-2; above the largest Llama it stands for that one."""
    stacks = [shapes_of(n)[2] for n in (10**3, 10**8, 10**9, 10**10, 10**11, 10**13)]
    assert stacks == sorted(stacks)
    assert (32, 4096) < shapes_of(2 * 10**10)[2][:2] < (80, 8192)
