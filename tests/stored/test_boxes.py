"""Boxes of Flax around parameters: a run with them has the bits of one without, and
each part lies where it should.
"""

import dataclasses
import functools
import itertools
import math
import pathlib
import re
import tempfile
from typing import Any

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
from tests.helpers import assert_same_bits, cases, stepper, types_of, unfused

pytestmark = pytest.mark.optax_promotion

ALL_RECIPES = mpx.recipes().recipes
NAMES = {  # shapes and names of axes
    "rows": ((16, 512), ("wide", None)),
    "columns": ((5, 1004), ("other", "wide")),
    "both": ((8, 1024), ("other", "wide")),
    "gain": ((16,), ("wide",)),  # in float32, so that it needs no master
}
RULES = (("wide", "model"), ("other", None))
OF_MESH = {"wide": "model"}
# Where codes and scales lie that have another shape than their array. (An axis of 512
# can be divided like one of 1,024, one of 502 not like one of 1,004. Scales in one row
# have no axis of their array.)
OTHER_PARTS = {
    ("rows", (16, 256)): P("model"),
    ("rows", (16, 2)): P("model"),
    ("rows", (16, 4)): P("model"),
    ("columns", (5, 502)): P(),
    ("columns", (20,)): P(),
    ("columns", (40,)): P(),
    ("both", (8, 512)): P(None, "model"),
    ("both", (8, 4)): P(),
    ("both", (8, 8)): P(None, "model"),
}


def mesh_of(devices):
    shape = {1: (1, 1), 8: (2, 4)}[devices]
    kinds = (AxisType.Auto,) * 2
    return jax.make_mesh(
        shape, ("data", "model"), axis_types=kinds, devices=jax.devices("cpu")[:devices]
    )


def policy_of(recipe):
    return mpx.get_policy(recipe, overrides=(("gain|norm", jnp.float32),))


def optimizer(recipe):
    return mpx.mixed_precision(optax.adamw(1e-2), policy_of(recipe))


def arrays(recipe=None, begin=0.0):
    at = lambda shape: jnp.sin(
        jnp.arange(np.prod(shape), dtype=jnp.float32) + begin
    ).reshape(shape)
    tree = {name: at(shape) for name, (shape, _) in NAMES.items()}
    return tree if recipe is None else policy_of(recipe).cast_to_param(tree)


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
    return (
        nn.logical_to_mesh_sharding(specs, mesh, RULES)
        if box is logical
        else nn.get_sharding(tree, mesh)
    )


def should_lie(path, leaf):
    """Return the spec of a leaf of a state, from the parameter that it belongs to and
    its shape.
    """
    name = next((key.key for key in path if getattr(key, "key", None) in NAMES), None)
    if name is None:
        return P()
    shape, names = NAMES[name]
    return P(*of_mesh(names)) if leaf.shape == shape else OTHER_PARTS[name, leaf.shape]


class Run:
    """A training run of a recipe, with boxes around its parameters or without, on some
    devices.
    """

    def __init__(self, recipe, box, devices):
        self.box, self.mesh, self.tx = box, mesh_of(devices), optimizer(recipe)
        params = boxed(arrays(recipe), box)
        self.params = jax.device_put(params, self.places(params))
        places = self.places(jax.eval_shape(self.tx.init, self.params))
        self.state = jax.jit(self.tx.init, out_shardings=places)(self.params)
        self.grads = jax.device_put(boxed(arrays(begin=1.0), box), self.places(params))

    def places(self, tree):
        if self.box is not None:
            return shardings_by_flax(tree, self.box, self.mesh)
        return jax.tree.map_with_path(
            lambda path, leaf: NamedSharding(self.mesh, should_lie(path, leaf)), tree
        )

    def stepped(self, step, state, places):
        compiled = jax.jit(
            step,
            out_shardings=(self.places(self.params), places),
            compiler_options=unfused(),
        )
        params = self.params
        for _ in range(
            2
            # two programs at once would wait for each other's threads, where cores are few
        ):
            params, state = jax.block_until_ready(compiled(params, state, self.grads))
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
        specs = jax.tree.map(lambda x: x.spec, self.places(self.params))
        tx = mpx.zero1(self.tx, self.mesh, param_specs=specs)
        shapes = jax.eval_shape(tx.init, self.params)
        places = mpx.zero1_shardings(self.params, shapes, self.mesh, param_specs=specs)
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
        other, is_wide = (
            optimizer("f32"),
            all(x.dtype == jnp.float32 for x in jax.tree.leaves(params)),
        )
        there = mpx.convert_state(params, state, self.tx, other)
        return mpx.convert_state(
            *there, other, self.tx, policy="f32" if is_wide else None
        )


BOXES = {"Linen": of_linen, "logical": logical, "NNX": of_nnx}
WHAT = ("init", "step", "save", "convert", "fused_update", "zero1")
CELLS = [
    ", ".join(cell)
    for cell in itertools.product(ALL_RECIPES, BOXES, ("1", "8"), WHAT)
    # On one device everything lies where it must.
    if cell[2] == "8" or cell[3] in ("step", "save")
]
QUICK = [
    "bf16-split24-4bit, Linen, 8, init",
    "bf16-split24-4bit, NNX, 8, step",
    "bf16-split-8bit, NNX, 1, save",
    "bf16-split-8bit, Linen, 8, convert",
    "bf16-split-8bit, NNX, 8, zero1",
]


@functools.cache
def without_a_box(recipe, devices, what):
    with tempfile.TemporaryDirectory() as folder:
        return getattr(Run(recipe, None, devices), what)(pathlib.Path(folder))


@pytest.mark.filterwarnings("ignore:`convert_state`. weights changed")
@pytest.mark.parametrize("cell", cases(CELLS, QUICK))
def test_a_run_in_boxes_has_the_bits_and_the_places_of_one_without(cell, tmp_path):
    recipe, box, devices, what = cell.split(", ")
    run = Run(recipe, BOXES[box], int(devices))
    actual, expected = (
        getattr(run, what)(tmp_path),
        without_a_box(recipe, int(devices), what),
    )
    inside = nnx.as_pure(actual) if box == "NNX" else flax.core.meta.unbox(actual)
    assert_same_bits(inside, expected)
    for (path, a), e in zip(
        jax.tree.leaves_with_path(inside), jax.tree.leaves(expected), strict=True
    ):
        should = (
            e.sharding
            if what in ("convert", "zero1")
            else NamedSharding(run.mesh, should_lie(path, a))
        )
        assert a.sharding.is_equivalent_to(should, a.ndim), (
            path,
            a.shape,
            a.sharding,
            should,
        )


EIGHT_BITS = {"[mn]u": mpx.Blockwise8bit()}


def names_of(part):
    return (
        part.get_metadata("out_sharding")
        if isinstance(part, nnx.Variable)
        else part.names
    )


@pytest.mark.parametrize("box", [of_linen, of_nnx])
@pytest.mark.parametrize(
    ("shape", "names", "codes", "scales"),
    [
        ((16, 512), ("a", "b"), ("a", "b"), ("a", None)),  # 2 blocks in a row
        ((1, 2**14), ("a", "b"), ("a", "b"), ("a", "b")),  # 64 blocks in a row
        ((2, 8, 512), ("a", "b", "c"), ("a", "b", "c"), ("a", "b", None)),
        ((16, 512), ("a",), ("a",), ("a",)),  # a spec may leave out the last axes
        # 106 blocks, which cross the ends of rows.
        (
            (27, 1000),
            (("a", "b"), None),
            (("a", "b"), None),
            (None,),
        ),
        ((128, 1000), ("a", "b"), ("a", "b"), (None,)),  # 500
        ((128, 1004), ("a", None), ("a", None), (None,)),  # 502
        # 1,000, which eight devices divide.
        (
            (256, 1000),
            ("a", "b"),
            ("a", "b"),
            ("a",),
        ),
        # Blocks of 64, three in a row.
        (
            (72, 2, 192),
            ("a", "b", "c"),
            ("a", "b", "c"),
            ("a", "b", None),
        ),
        # 108 that cross rows, none of which is divided.
        (
            (72, 2, 192),
            ("a", "b"),
            ("a", "b"),
            (None,),
        ),
        ((8192,), ("a",), ("a",), ("a",)),
    ],
)
def test_codes_and_scales_have_the_names_of_the_axes_that_they_still_have(
    box, shape, names, codes, scales
):
    x = jnp.ones(shape, jnp.float32)
    w = (
        nn.Partitioned(x, names)
        if box is of_linen
        else nnx.Param(x, out_sharding=names, eager_sharding=False)
    )
    stored = (
        mpx.low_precision_state(optax.adam(1e-3), EIGHT_BITS)
        .init({"w": w})
        .inner_state[0]
        .mu["w"]
    )
    assert (names_of(stored.codes), names_of(stored.scales)) == (codes, scales)


def test_names_under_a_key_that_trainers_read_are_those_that_fit_too():
    """Each layer of MaxText has its names twice, and the second are taken where the
    first are empty.
    """
    w = nnx.Param(
        jnp.ones((27, 1000), jnp.float32),
        out_sharding=("a", None),
        eager_sharding=False,
    )
    # As MaxText does: `set_metadata` knows another name for it.
    w = w.replace(sharding_names=("a", None))
    kept = (
        mpx.low_precision_state(optax.adam(1e-3), EIGHT_BITS)
        .init({"w": w})
        .inner_state[0]
        .nu["w"]
    )
    assert [x.get_metadata()["sharding_names"] for x in (kept.codes, kept.scales)] == [
        ("a", None),
        (None,),
    ]


def largest_gather(box, shape, *names):
    """Return the size of the largest array that XLA gathers in a step of a state that
    was made without a mesh.
    """
    mesh, tx = mesh_of(8), mpx.low_precision_state(optax.adam(1e-3), EIGHT_BITS)
    by_shape = lambda tree: jax.tree.map(
        lambda x: NamedSharding(mesh, P(*names) if x.shape == shape else P()), tree
    )
    w = jax.ShapeDtypeStruct(shape, jnp.float32)
    boxed, place = {
        "none": (w, by_shape),
        "NNX": (
            nnx.Param(w, out_sharding=names, eager_sharding=False),
            lambda tree: nnx.get_named_sharding(tree, mesh),
        ),
        "Linen": (nn.Partitioned(w, names), lambda tree: nn.get_sharding(tree, mesh)),
    }[box]
    like = lambda s, box: jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), box
    )
    typed = lambda tree: jax.tree.map(like, place(tree), tree)
    state = jax.eval_shape(tx.init, {"w": boxed})
    step = jax.jit(
        lambda grads, state: tx.update(grads, state)[1], out_shardings=place(state)
    )
    text = step.lower(typed({"w": boxed}), typed(state)).compile().as_text()
    sizes = re.findall(r"\[([\d,]*)\]\S* all-gather\(", text)
    return max((math.prod(map(int, size.split(","))) for size in sizes), default=0)


@pytest.mark.parametrize("box", ["NNX", "Linen"])
@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ((128, 2, 64), (None, None, ("data", "model"))),  # a device has 8 of 64 columns
        ((128, 64), ("data", "model")),
        ((304, 512), (("data", "model"), None)),  # 38 rows, and tiles of a TPU have 8
        ((72, 512), ("model", "data")),
    ],
)
def test_a_state_that_was_made_without_a_mesh_is_coded_where_it_lies(box, shape, names):
    assert largest_gather(box, shape, *names) <= math.prod(shape) // 16


def test_without_names_blocks_cross_rows_and_a_step_gathers_the_largest_of_each_eight_numbers():
    """Negative control for the test above. Of 64 columns over eight devices each has
    eight.
    """
    assert (
        largest_gather("none", (128, 2, 64), None, None, ("data", "model"))
        == 128 * 2 * 64 / 8
    )


def test_the_names_of_an_optimizer_state_are_those_of_its_parts_too():
    """Flax takes `optimizer_sharding` for the state, where a parameter has it."""
    metadata = {
        "out_sharding": (None, None),
        "optimizer_sharding": ("a", "b"),
        "eager_sharding": False,
    }
    model = nnx.Linear(
        16, 512, use_bias=False, kernel_metadata=metadata, rngs=nnx.Rngs(0)
    )
    state = nnx.Optimizer(
        model, mpx.low_precision_state(optax.adam(1e-3), EIGHT_BITS), wrt=nnx.Param
    ).opt_state
    stored = state.inner_state[0].mu["kernel"]
    assert (names_of(stored.codes), names_of(stored.scales)) == (
        ("a", "b"),
        ("a", None),
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Named(flax.core.meta.AxisMetadata):
    """A user's own box, of which nothing is known but that it holds an array of two
    axes.
    """

    value: Any

    def unbox(self):
        return self.value

    def replace_boxed(self, value):
        return Named(value)

    def add_axis(self, index, params):
        return self

    remove_axis = add_axis


def test_a_box_of_a_users_own_is_put_around_what_has_the_shape_of_its_array():
    params = {"w": Named(jnp.ones((16, 512), jnp.float32))}
    tx = mpx.low_precision_state(
        optax.adam(1e-3),
        {"mu": mpx.Blockwise4bit()} | EIGHT_BITS,
        key=jax.random.key(0),
    )
    state = tx.init(params)
    (mu,), (nu,) = (
        moment.values() for moment in (state.inner_state[0].mu, state.inner_state[0].nu)
    )
    assert isinstance(nu.codes, Named)
    assert all(isinstance(part, jax.Array) for part in (nu.scales, mu.codes, mu.scales))
    new = jax.jit(tx.update)(params, state, params)[1]
    assert jax.tree.structure(new) == jax.tree.structure(state)


def test_a_state_in_boxes_is_updated_without_parameters_too():
    """Codes of 4 bits lack a name; the rule gets its moments in the boxes of the
    gradients nevertheless.
    """
    grads = boxed(arrays(), of_linen)
    tx = mpx.low_precision_state(
        optax.trace(0.9), {"trace": mpx.Blockwise4bit()}, key=jax.random.key(0)
    )
    state = tx.init(grads)
    assert names_of(state.inner_state.trace["columns"].codes) == (None, None)
    assert_same_bits(tx.update(grads, state), tx.update(grads, state, grads))


X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(4, 16)


def jitted(step, *modules):
    """Run a function that changes modules of NNX in a program without fusion, for which
    `nnx.jit` has no option.
    """
    graph, state = nnx.split(modules)

    def pure(state):
        modules = nnx.merge(graph, state)
        step(*modules)
        return nnx.state(modules)

    nnx.update(modules, jax.jit(pure, compiler_options=unfused())(state))


class Model(nnx.Module):
    def __init__(self, names, rngs):
        named = lambda init, *axes: (
            nnx.with_partitioning(init(), axes) if names else init()
        )
        kernel = lambda *axes: named(nnx.initializers.lecun_normal, *axes)
        zeros, ones = (
            named(init, "model")
            for init in (nnx.initializers.zeros_init, nnx.initializers.ones_init)
        )
        self.up = nnx.Linear(
            16, 512, kernel_init=kernel(None, "model"), bias_init=zeros, rngs=rngs
        )
        self.norm = nnx.LayerNorm(512, scale_init=ones, rngs=rngs)
        self.down = nnx.Linear(512, 16, kernel_init=kernel("model", None), rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.norm(self.up(x))))


IN_FEW_BITS = [
    name for name, recipe in ALL_RECIPES.items() if recipe.moments in ("8bit", "4bit")
]


def trained_by_nnx(recipe, names, kind=nnx.Optimizer, steps=2, cast_first=True):
    policy, model = policy_of(recipe), Model(names, nnx.Rngs(0))
    if cast_first:
        nnx.update(model, policy.cast_to_param(nnx.state(model, nnx.Param)))
    trainer = kind(model, optimizer(recipe), wrt=nnx.Param)
    loss_fn = mpx.autocast(lambda model, x: jnp.mean(model(x) ** 2), policy)

    def step(model, trainer):
        scale = mpx.get_loss_scale(trainer.opt_state)
        _, grads = mpx.value_and_grad(loss_fn, scale, transform=nnx.value_and_grad)(
            model, X
        )
        trainer.update(*([grads] if kind is nnx.ModelAndOptimizer else [model, grads]))

    for _ in range(steps):
        jitted(step, model, trainer)
    return nnx.as_pure(nnx.state(model, nnx.Param)), trainer.opt_state


def of_kinds(quick):
    """Return all recipes with one kind of optimizer, and a recipe with the other."""
    return [
        pytest.param(quick, nnx.ModelAndOptimizer),
        pytest.param(quick, nnx.Optimizer, marks=pytest.mark.slow),
        *(
            pytest.param(recipe, nnx.ModelAndOptimizer, marks=pytest.mark.slow)
            for recipe in ALL_RECIPES
            if recipe != quick
        ),
    ]


# Of this small model in 8 bits.
@pytest.mark.filterwarnings("ignore:`autocast`. no matrix product")
@pytest.mark.parametrize(("recipe", "kind"), of_kinds("bf16-split-8bit"))
def test_an_optimizer_of_nnx_trains_a_model_with_names_as_one_without(recipe, kind):
    plain, state = trained_by_nnx(recipe, False, kind)
    with jax.set_mesh(mesh_of(1)):
        boxed, named = trained_by_nnx(recipe, True, kind)
    assert_same_bits((boxed, nnx.as_pure(named)), (plain, nnx.as_pure(state)))


@pytest.mark.filterwarnings("ignore:`autocast`. no matrix product")
@pytest.mark.parametrize(("recipe", "kind"), of_kinds("bf16-split24-4bit"))
def test_an_optimizer_of_nnx_casts_a_model_that_a_trainer_made_in_float32(recipe, kind):
    cast, (params, state) = (
        trained_by_nnx(recipe, False, kind),
        trained_by_nnx(recipe, False, kind, cast_first=False),
    )
    assert_same_bits((params, nnx.as_pure(state)), (cast[0], nnx.as_pure(cast[1])))


def test_a_model_that_is_made_inside_of_jit_is_cast_there_where_it_is_placed():
    """As MaxText does: the state is made on the shardings that its names say, without a
    mesh.
    """
    mesh = mesh_of(8)

    def make():
        with nnx.use_eager_sharding(False):
            model = Model(True, nnx.Rngs(0))
            trainer = nnx.Optimizer(model, optimizer("bf16-split-8bit"), wrt=nnx.Param)
        return nnx.state(model, nnx.Param), trainer.opt_state

    model, trainer = jax.jit(
        make, out_shardings=nnx.get_named_sharding(jax.eval_shape(make), mesh)
    )()
    assert (model["up"]["kernel"].dtype, model["norm"]["scale"].dtype) == (
        jnp.bfloat16,
        jnp.float32,
    )
    codes = trainer.inner_state.inner_state[0].nu["down"]["kernel"].codes
    assert codes.sharding.shard_shape(codes.shape) == (128, 16)


@pytest.mark.parametrize("recipe", cases(IN_FEW_BITS, ["bf16-split24-4bit"]))
def test_an_optimizer_of_nnx_on_several_devices_begins_where_its_names_say_and_trains(
    recipe,
):
    mesh = mesh_of(8)
    with jax.set_mesh(mesh):
        _, state = trained_by_nnx(recipe, True, steps=0)
        # And some of empty boxes.
        wanted = dict(jax.tree.leaves_with_path(nnx.get_named_sharding(state, mesh)))
        _, trained = trained_by_nnx(recipe, True)
    named = [
        (x, wanted[path])
        for path, x in jax.tree.leaves_with_path(state)
        if any(wanted[path].spec)
    ]
    assert len(named) > 8
    assert all(x.sharding.is_equivalent_to(sharding, x.ndim) for x, sharding in named)
    for codes in (
        x.inner_state.inner_state[0].nu["down"]["kernel"].codes
        for x in (state, trained)
    ):
        assert names_of(codes) == ("model", None)
        assert codes.sharding.shard_shape(codes.shape) == (128, 16)


@pytest.mark.parametrize("recipe", cases(IN_FEW_BITS, ["bf16-split-8bit"]))
def test_on_explicit_axes_no_update_changes_the_types_of_an_optimizer_of_nnx(recipe):
    mesh = jax.make_mesh(
        (4,),
        ("model",),
        axis_types=(AxisType.Explicit,),
        devices=jax.devices("cpu")[:4],
    )
    with jax.set_mesh(mesh):
        model = Model(True, nnx.Rngs(0))
        nnx.update(model, policy_of(recipe).cast_to_param(nnx.state(model, nnx.Param)))
        trainer = nnx.Optimizer(model, optimizer(recipe), wrt=nnx.Param)
        before = types_of(nnx.as_pure(trainer.opt_state))
        jitted(
            lambda trainer, model: trainer.update(model, nnx.state(model)),
            trainer,
            model,
        )
        assert types_of(nnx.as_pure(trainer.opt_state)) == before
    assert any("@model" in text for text in before[1] if "int8" in text)


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        return nn.Dense(1000, use_bias=False, kernel_init=init)(x)


@pytest.mark.parametrize("recipe", cases(IN_FEW_BITS, ["bf16-split24-4bit"]))
def test_a_train_state_of_linen_is_made_and_trained_on_the_specs_of_its_names(recipe):
    model, x = Dense(), jnp.ones((4, 8))

    def make():
        params = mpx.get_policy(recipe).cast_to_param(
            model.init(jax.random.key(0), x)["params"]
        )
        return TrainState.create(
            apply_fn=model.apply, params=params, tx=optimizer(recipe)
        )

    with jax.set_mesh(mesh_of(8)):
        specs = nn.get_partition_spec(jax.eval_shape(make))
        state = jax.jit(make, out_shardings=specs)()
        step = jax.jit(
            lambda state: state.apply_gradients(grads=state.params), out_shardings=specs
        )
        new = step(state)
    assert jax.tree.structure(new) == jax.tree.structure(state)
    assert [x.sharding for x in jax.tree.leaves(new)] == [
        x.sharding for x in jax.tree.leaves(state)
    ]
    assert new.params["Dense_0"]["kernel"].value.sharding.spec == P(None, "model")


@pytest.mark.parametrize("box", [of_nnx, logical])
@pytest.mark.parametrize("way", ["fused_update", "zero1"])
@pytest.mark.parametrize("recipe", cases(IN_FEW_BITS, ["bf16-split24-4bit"]))
def test_on_explicit_axes_a_state_with_names_is_made_and_updated_in_one_structure(
    recipe, way, box
):
    """Inside of both ways axes are automatic, where names fit that do not outside, and
    other blocks.
    """
    mesh, tx = (
        jax.make_mesh(
            (8,), ("data",), (AxisType.Explicit,), devices=jax.devices("cpu")[:8]
        ),
        optimizer(recipe),
    )
    with jax.set_mesh(mesh):
        x = jax.device_put(
            jnp.ones((16, 512), jnp.bfloat16), P() if way == "zero1" else P("data")
        )
        params = {"rows": box("columns", x)}  # names of both axes
        tx = mpx.zero1(tx, mesh) if way == "zero1" else tx
        state = tx.init(params)
        fused = mpx.fused_update(tx, interpret=True)
        step = (
            stepper(tx)
            if way == "zero1"
            else lambda params, state, grads: fused(grads, state, params)
        )
        new = jax.jit(step)(params, state, params)
    assert types_of(new) == types_of((params, state))
