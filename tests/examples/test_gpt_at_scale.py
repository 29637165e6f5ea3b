"""The plan on paper in AT_SCALE.md: its table is what the shapes of the example's model
and optimizers count.
"""

import dataclasses
import functools
import re
from pathlib import Path

import jax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import mpx
from examples import gpt
from examples.gpt.model import GPT, Config
from examples.gpt.recipes import get_recipe
from examples.gpt.training import Hyperparameters, make_optimizer

pytestmark = pytest.mark.optax_promotion

CONFIG = Config(
    8192,
    87,
    64,
    context=4096,
    vocabulary=50257,
    vocabulary_multiple=1024,
    layers="scanned",
)
DATA, MODEL = 128, 8  # 128 groups of 8 GPUs that share one model
# The layers as Megatron-LM divides them: heads and hidden units, then the sums of what
# they give; and the vocabulary.
LAYERS = (
    (r"(query_key_value|expand)/kernel$", PartitionSpec(None, None, "model")),
    (r"(query_key_value|expand)/bias$", PartitionSpec(None, "model")),
    (r"(out|contract)/kernel$", PartitionSpec(None, "model")),
    (r"^token_embedding$", PartitionSpec("model")),
)
STATE_BYTES = {"f32": 8, "bf16-masters": 12, "bf16-split": 10, "bf16-kahan": 6}
STATE_BYTES |= {
    "bf16-split-8bit": 4.03125,
    "bf16-split24-8bit": 3.03125,
    "bf16-split24-4bit": 2.546875,
}


@functools.cache
def float32_params():
    """Return the shapes of the model: one block, whose weights are stacked `depth`
    times.
    """
    of_one = nnx.state(
        nnx.eval_shape(lambda: GPT(dataclasses.replace(CONFIG, depth=1), nnx.Rngs(0))),
        nnx.Param,
    )
    stacked = lambda path, leaf: (
        leaf.update(shape=(CONFIG.depth, *leaf.shape[1:]))
        if path[0].key == "blocks"
        else leaf
    )
    return jax.tree.map_with_path(stacked, of_one)


def layer_spec(path, leaf):
    name = jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")
    return next(
        (spec for pattern, spec in LAYERS if re.search(pattern, name)), PartitionSpec()
    )


@pytest.mark.parametrize("name", STATE_BYTES)
def test_the_plan_shows_the_bytes_that_are_counted_a_gpu(name):
    """Masters, low bits, moments, codes and compensations take 2.5 to 12 bytes, and
    ZeRO-1 divides them by 128.

    In a ring each GPU sends 127/128 of the float32 gradients and of the new parameters.
    """
    mesh = AbstractMesh(
        (DATA, MODEL), ("data", "model"), axis_types=(AxisType.Auto,) * 2
    )
    recipe, params = get_recipe(name), float32_params()
    specs = jax.tree.map_with_path(layer_spec, params)
    tx = make_optimizer(recipe, CONFIG, Hyperparameters(1, 1e-3))
    # Devices add float32 gradients up.
    options = {
        "gradient_dtype": "float32",
        "mesh": mesh,
        "param_specs": specs,
    }
    plan_of = functools.partial(mpx.memory_plan, params, tx, recipe.policy, **options)
    plan = plan_of(axis="data")
    parameters, gradients = plan.bytes_of("parameters"), plan.bytes_of("gradients")
    optimizer, undivided = (
        plan.state_bytes_a_device,
        plan_of(axis=None).state_bytes_a_device,
    )

    assert undivided / (gradients / 4) == pytest.approx(STATE_BYTES[name], rel=2e-3)
    # Moments of biases are blocks, too, and a device has whole ones.
    assert optimizer == pytest.approx(undivided / DATA, rel=3e-3)
    sent = [(DATA - 1) / DATA * count for count in (gradients, parameters)]
    held = parameters + optimizer + gradients
    numbers = [parameters, optimizer, undivided, gradients, *sent, held]
    row = " | ".join([name, *(f"{number / 1e9:.2f}" for number in numbers)])
    assert (
        f"| {row} |"
        in Path(gpt.__file__).with_name("AT_SCALE.md").read_text().splitlines()
    )
