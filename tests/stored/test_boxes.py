"""Boxes of Flax around parameters: a run with them has the bits of one without, and each part lies where it should."""

import itertools

import flax.core.meta
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpx
from tests.helpers import assert_same_bits, cases, stepper, unfused

pytestmark = pytest.mark.optax_promotion

ALL_RECIPES = mpx.recipes().recipes
NAMES = {  # shapes and names of axes
    "rows": ((16, 512), ("wide", None)),
    "columns": ((5, 1004), ("other", "wide")),
    "both": ((8, 1024), ("other", "wide")),
    "bias": ((16,), ("wide",)),
}
RULES = (("wide", "model"), ("other", None))
OF_MESH = {"wide": "model"}
# Where codes and scales lie that have another shape than their array. (An axis of 512 can be divided like one of 1,024,
# one of 502 not like one of 1,004. Scales in one row have no axis of their array.)
OTHER_PARTS = {
    ("rows", (16, 256)): P("model"),
    ("rows", (16, 2)): P("model"),
    ("rows", (16, 4)): P("model"),
    ("columns", (5, 502)): P(),
    ("columns", (20,)): P(),
    ("columns", (40,)): P(),
    ("both", (8, 512)): P(None, "model"),
    ("both", (8, 4)): P(),
    ("both", (8, 8)): P(),
}


def mesh_of(devices):
    shape = {1: (1, 1), 8: (2, 4)}[devices]
    kinds = (AxisType.Auto,) * 2
    return jax.make_mesh(shape, ("data", "model"), axis_types=kinds, devices=jax.devices("cpu")[:devices])


def optimizer(recipe):
    key = jax.random.key(0) if ALL_RECIPES[recipe].rounds_at_random else None
    return mpx.mixed_precision(optax.adamw(1e-2), recipe, key=key)


def arrays(recipe=None, begin=0.0):
    at = lambda shape: jnp.sin(jnp.arange(np.prod(shape), dtype=jnp.float32) + begin).reshape(shape)
    tree = {name: at(shape) for name, (shape, _) in NAMES.items()}
    return tree if recipe is None else mpx.get_policy(recipe).cast_to_param(tree)


def of_mesh(names):
    return tuple(OF_MESH.get(name) for name in names)


def of_linen(name, x):
    return nn.Partitioned(x, of_mesh(NAMES[name][1]))


def logical(name, x):
    return nn.LogicallyPartitioned(x, NAMES[name][1])


def of_nnx(name, x):
    return nnx.Param(x, out_sharding=of_mesh(NAMES[name][1]), eager_sharding=False)


def boxed(tree, box):
    return tree if box is None else {name: box(name, x) for name, x in tree.items()}


def shardings_by_flax(tree, box, mesh):
    if box is of_nnx:
        return nnx.get_named_sharding(tree, mesh)
    specs = nn.get_partition_spec(tree)
    return nn.logical_to_mesh_sharding(specs, mesh, RULES) if box is logical else nn.get_sharding(tree, mesh)


def without_boxes(tree, box):
    return nnx.as_pure(tree) if box is of_nnx else flax.core.meta.unbox(tree)


def should_lie(path, leaf):
    """Return the spec of a leaf of a state, from the parameter that it belongs to and its shape."""
    name = next((key.key for key in path if getattr(key, "key", None) in NAMES), None)
    if name is None:
        return P()
    shape, names = NAMES[name]
    return P(*of_mesh(names)) if leaf.shape == shape else OTHER_PARTS[name, leaf.shape]


def shardings(tree, mesh):
    return jax.tree.map_with_path(lambda path, leaf: NamedSharding(mesh, should_lie(path, leaf)), tree)


class Run:
    """A training run of a recipe, with boxes around its parameters or without, on some devices."""

    def __init__(self, recipe, box, devices):
        self.box, self.mesh, self.tx = box, mesh_of(devices), optimizer(recipe)
        params = boxed(arrays(recipe), box)
        self.params = jax.device_put(params, self.places(params))
        self.state = self.begun(self.tx)
        # The scale of float16 needs a gradient that is divided by it.
        self.grads = jax.device_put(boxed(arrays(begin=1.0), box), self.places(params))

    def places(self, tree):
        return shardings(tree, self.mesh) if self.box is None else shardings_by_flax(tree, self.box, self.mesh)

    def begun(self, tx):
        places = self.places(jax.eval_shape(tx.init, self.params))
        return jax.jit(tx.init, out_shardings=places)(self.params)

    def stepped(self, step, state, places):
        compiled = jax.jit(step, out_shardings=(self.places(self.params), places), compiler_options=unfused())
        params = self.params
        for _ in range(2):
            params, state = compiled(params, state, self.grads)
        return params, state

    # What is done with it.

    def init(self, folder):
        return self.state

    def step(self, folder):
        return self.stepped(stepper(self.tx), self.state, self.places(self.state))

    def fused_update(self, folder):
        update = mpx.fused_update(self.tx, interpret=True)
        step = lambda params, state, grads: update(grads, state, params)
        return self.stepped(step, self.state, self.places(self.state))

    def zero1(self, folder):
        tx = mpx.zero1(self.tx, self.mesh, param_specs=jax.tree.map(lambda x: x.spec, self.places(self.params)))
        places = mpx.zero1_shardings(
            self.params,
            jax.eval_shape(tx.init, self.params),
            self.mesh,
            param_specs=jax.tree.map(lambda x: x.spec, self.places(self.params)),
        )
        return self.stepped(stepper(tx), tx.init(self.params), places)

    def save(self, folder):
        run = self.step(folder)
        path = folder / ("plain" if self.box is None else "boxed")
        like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        with orbax.checkpoint.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, run)
            checkpointer.wait_until_finished()
            restored = checkpointer.restore(path, jax.tree.map(like, run))
        assert_same_bits(restored, run)
        return restored

    def convert(self, folder):
        """Go on in float32, and come back."""
        params, state = self.step(folder)
        other = optimizer("f32")
        there = mpx.convert_state(params, state, self.tx, other)
        return mpx.convert_state(*there, other, self.tx, policy="f32" if self.is_wide else None)

    @property
    def is_wide(self):
        return all(x.dtype == jnp.float32 for x in jax.tree.leaves(self.params))


BOXES = {"Linen": of_linen, "logical": logical, "NNX": of_nnx}
WHAT = ("init", "step", "save", "convert", "fused_update", "zero1")
CELLS = [", ".join(cell) for cell in itertools.product(ALL_RECIPES, BOXES, ("1", "8"), WHAT)]
QUICK = [
    "bf16-split24-4bit, Linen, 8, init",
    "bf16-split24-4bit, logical, 8, step",
    "bf16-split24-4bit, NNX, 8, step",
    "bf16-split-8bit, NNX, 1, save",
    "bf16-split-8bit, Linen, 8, convert",
    "bf16-split-8bit, logical, 1, fused_update",
    "bf16-split-8bit, NNX, 8, zero1",
    "bf16-kahan, logical, 8, save",
    "f16-scaled, NNX, 8, convert",
]


@pytest.mark.filterwarnings("ignore:`convert_state`. weights changed")
@pytest.mark.parametrize("cell", cases(CELLS, QUICK))
def test_a_run_in_boxes_has_the_bits_and_the_places_of_one_without(cell, tmp_path):
    recipe, box, devices, what = cell.split(", ")
    runs = [Run(recipe, found, int(devices)) for found in (BOXES[box], None)]
    actual, expected = (getattr(run, what)(tmp_path) for run in runs)
    inside = without_boxes(actual, BOXES[box])
    assert_same_bits(inside, expected)
    for (path, a), e in zip(jax.tree.leaves_with_path(inside), jax.tree.leaves(expected), strict=True):
        should = e.sharding if what in ("convert", "zero1") else NamedSharding(runs[0].mesh, should_lie(path, a))
        assert a.sharding.is_equivalent_to(should, a.ndim), (path, a.shape, a.sharding, should)
