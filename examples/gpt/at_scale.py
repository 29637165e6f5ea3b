"""A plan on paper: what each of 1,024 GPUs holds and sends in a training of 70 billion parameters.

    python -m examples.gpt.at_scale

Nothing is run: the numbers are counted from the shapes of the example's own parameters and optimizer states, cut as
`mpx.zero1` and a sharding of the layers cut them. `AT_SCALE.md` explains the table.
"""

import dataclasses
import functools
import re
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from rich.console import Console
from rich.table import Table

import mpx
from examples.gpt.model import GPT, Config
from examples.gpt.recipes import get_recipe
from examples.gpt.training import Hyperparameters, make_optimizer

CONFIG = Config(
    width=8192, depth=87, heads=64, context=4096, vocabulary=50257, vocabulary_multiple=1024, layers="scanned"
)
DATA, MODEL = 128, 8  # 128 groups of 8 GPUs that share one model
RECIPES = ("f32", "bf16-masters", "bf16-split", "bf16-split-8bit", "bf16-kahan")

# The layers as Megatron-LM divides them: heads and hidden units, then the sums of what they give; and the vocabulary.
LAYERS = (
    (r"(query_key_value|expand)/kernel$", PartitionSpec(None, None, "model")),
    (r"(query_key_value|expand)/bias$", PartitionSpec(None, "model")),
    (r"(out|contract)/kernel$", PartitionSpec(None, "model")),
    (r"^token_embedding$", PartitionSpec("model")),
)


class Costs(NamedTuple):
    """Of one recipe, in bytes a GPU.

    Attributes:
        parameters: held.
        optimizer: held, divided by ZeRO-1.
        undivided: what the optimizer's state would be without it.
        gradients: held, before they are added up: float32 sums over microbatches.
        reduced: sent in the reduce-scatter of the gradients.
        gathered: sent in the all-gather of the new parameters.
    """

    parameters: int
    optimizer: int
    undivided: int
    gradients: int
    reduced: int
    gathered: int

    @property
    def held(self) -> int:
        """Of a training step, activations not counted."""
        return self.parameters + self.optimizer + self.gradients


def costs(recipe: str) -> Costs:
    """Counts the bytes of a recipe."""
    mesh = AbstractMesh((DATA, MODEL), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    chosen, params = get_recipe(recipe), _float32_params()
    tx = make_optimizer(chosen, CONFIG, Hyperparameters(1, 1e-3))
    specs = jax.tree.map_with_path(_layer_spec, params)
    plan_of = functools.partial(mpx.memory_plan, params, tx, chosen.policy, mesh=mesh, param_specs=specs)
    plan = plan_of(axis="data")
    parameters, in_float32 = plan.bytes_of("parameters"), plan.bytes_of("gradients")
    passed_on = (DATA - 1) / DATA  # in a ring, of what there is
    return Costs(
        parameters=parameters,
        optimizer=plan.state_bytes_a_device,
        undivided=plan_of(axis=None).state_bytes_a_device,
        gradients=in_float32,
        reduced=round(in_float32 * passed_on),
        gathered=round(parameters * passed_on),
    )


@functools.cache
def _float32_params() -> Any:
    """The shapes of the model: those of one with a single block, whose weights are stacked `depth` times."""
    of_one = nnx.state(nnx.eval_shape(lambda: GPT(dataclasses.replace(CONFIG, depth=1), nnx.Rngs(0))), nnx.Param)

    def stacked(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return leaf.update(shape=(CONFIG.depth, *leaf.shape[1:])) if path[0].key == "blocks" else leaf

    return jax.tree.map_with_path(stacked, of_one)


def _layer_spec(path: Any, leaf: Any) -> PartitionSpec:
    name = jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")
    del leaf
    return next((spec for pattern, spec in LAYERS if re.search(pattern, name)), PartitionSpec())


def rows() -> list[list[str]]:
    """The table of all recipes, in gigabytes a GPU."""
    found = {recipe: costs(recipe) for recipe in RECIPES}
    return [[recipe, *(f"{bytes_ / 1e9:.2f}" for bytes_ in (*cost, cost.held))] for recipe, cost in found.items()]


HEADER = ("recipe", *Costs._fields, "held")


def main() -> None:
    """Prints the table."""
    table = Table(*HEADER, title=f"GB a GPU, {DATA} x {MODEL} of them")
    for row in rows():
        table.add_row(*row)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
