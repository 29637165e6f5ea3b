"""Check that a sharded run is saved in parts and restored in other parts, by both
interfaces of Orbax.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp

import mpx
from tests.helpers import QUICKLY, assert_same_bits, stepper

pytestmark = pytest.mark.optax_promotion

RULE = optax.adamw(1e-2)
TX = mpx.mixed_precision(RULE, "bf16-split24-8bit", key=jax.random.key(0))

ROWS = {
    "up": ((64, 1024), P("data")),
    "down": ((1024, 64), P("data")),
    "bias": ((512,), P("data")),
}
COLUMNS = {"w": ((64, 2304), P(None, "data"))}


def mesh_of(count, kind=AxisType.Explicit):
    return jax.make_mesh(
        (count,), ("data",), (kind,), devices=jax.devices("cpu")[:count]
    )


def started(model=ROWS):
    params = {
        key: jax.sharding.reshard(jnp.ones(shape, jnp.bfloat16), spec)
        for key, (shape, spec) in model.items()
    }
    return params, TX.init(params)


def on(mesh, shapes):
    def sharding_of(shape):
        spec = shape.sharding.spec if isinstance(shape.sharding, NamedSharding) else P()
        divided = [size for size, axis in zip(shape.shape, spec, strict=False) if axis]
        is_even = all(size % mesh.size == 0 for size in divided)
        return NamedSharding(mesh, spec if is_even else P())

    return jax.tree.map(lambda shape: shape.update(sharding=sharding_of(shape)), shapes)


def by_standard_checkpointer(folder, run, shapes):
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, run)
        checkpointer.wait_until_finished()
        saved = jax.tree.leaves(checkpointer.metadata(folder).item_metadata.tree)
        return checkpointer.restore(folder, shapes), [
            (x.shape, x.storage.chunk_shape) for x in saved
        ]


def by_v1(folder, run, shapes):
    ocp.save(folder, run)
    saved = jax.tree.leaves(ocp.metadata(folder).metadata)
    return ocp.load(folder, shapes), [
        (x.shape, x.storage_metadata.chunk_shape) for x in saved
    ]


@pytest.fixture(scope="module")
def run():
    with jax.set_mesh(mesh_of(8)), jax.numpy_dtype_promotion("standard"):
        params, state = started()
        return jax.jit(stepper(TX), compiler_options=QUICKLY)(params, state, params)


@pytest.mark.parametrize("parts", [4, 2, 1], ids=lambda parts: f"{parts} parts")
@pytest.mark.parametrize("through", [by_standard_checkpointer, by_v1])
def test_no_host_has_more_of_an_array_than_its_devices(
    through, parts, run, tmp_path, monkeypatch
):
    """Orbax puts each buffer that it read on a device. One part is the control: whole
    arrays are seen.
    """
    mesh, mesh_of_run = (
        mesh_of(parts),
        jax.sharding.AbstractMesh((8,), ("data",), (AxisType.Explicit,)),
    )
    with jax.sharding.use_abstract_mesh(mesh_of_run):
        shapes = jax.eval_shape(started)
    shapes = on(mesh, shapes)

    read, device_put = [], jax.device_put
    monkeypatch.setattr(
        jax,
        "device_put",
        lambda x, *args: read.append(x.nbytes) or device_put(x, *args),
    )
    restored, saved = through(tmp_path / "run", run, shapes)
    assert_same_bits(*(jax.tree.map(np.asarray, tree) for tree in (restored, run)))
    assert parts * max(read) == max(x.nbytes for x in jax.tree.leaves(run))
    is_cut = lambda shape: np.prod(shape) > 2  # all but the count of steps and the key
    assert all(
        np.prod(shape) == np.prod(chunk) * (8 if is_cut(shape) else 1)
        for shape, chunk in saved
    )
    for x in filter(lambda x: is_cut(x.shape), jax.tree.leaves(restored)):
        assert [shard.data.size for shard in x.addressable_shards] == parts * [
            x.size // parts
        ]


KINDS = {"automatic": AxisType.Auto, "explicit": AxisType.Explicit}
step = jax.jit(stepper(TX), compiler_options=QUICKLY)


def moved(folder, kind, model, counts, shapes=None):
    """Train on so many devices, one step on each; in between the run is saved, and
    loaded into shapes.
    """
    saved = None
    for number, count in enumerate(counts):
        with jax.set_mesh(mesh := mesh_of(count, KINDS[kind])):
            params = {
                key: jax.device_put(jnp.ones(shape, jnp.bfloat16), spec)
                for key, (shape, spec) in model.items()
            }
            run = params, TX.init(params)
            if number:
                own = jax.tree.map(
                    lambda x: jax.ShapeDtypeStruct(
                        x.shape, x.dtype, sharding=x.sharding
                    ),
                    run,
                )
                run = ocp.load(
                    folder / str(number - 1),
                    own if shapes is None else on(mesh, shapes),
                )
                assert_same_bits(jax.tree.map(np.asarray, run), saved)
            run = step(*run, run[0])
        ocp.save(folder / str(number), run)
        saved = jax.tree.map(np.asarray, run)


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        pytest.param("automatic", ROWS, marks=pytest.mark.slow),
        pytest.param("automatic", COLUMNS, marks=pytest.mark.slow),
        ("explicit", ROWS),
    ],
)
def test_a_run_goes_from_eight_devices_to_one_and_then_to_four(kind, model, tmp_path):
    """Blocks of 256 numbers may reach over rows of 64: each device has 128 of them."""
    moved(tmp_path, kind, model, (8, 1, 4))


def test_where_explicit_axes_divide_a_block_shapes_are_those_of_the_first_mesh(
    tmp_path,
):
    """A device has 288 of 2,304 columns, nine blocks of 32; one device would have
    blocks of 256: the control.
    """
    shapes = {}
    for count in (8, 1):
        with jax.sharding.use_abstract_mesh(mesh_of(count).abstract_mesh):
            shapes[count] = jax.eval_shape(lambda: started(COLUMNS))
    scales = {
        count: optax.tree.get(state, "mu")["w"].scales.shape
        for count, (_, state) in shapes.items()
    }
    assert scales == {8: (64, 72), 1: (64, 9)}
    moved(tmp_path, "explicit", COLUMNS, (8, 1, 4), shapes[8])


OTHERS = [
    mpx.mixed_precision(rule, recipe, key=jax.random.key(0))
    for rule, recipe in (
        (optax.lion(1e-2), "bf16-split24-8bit"),
        (RULE, "bf16-split24-4bit"),
    )
]


@pytest.mark.parametrize(
    ("before", "after", "blocks"),
    [
        (8, 4, 64),
        pytest.param(8, 1, 256, marks=pytest.mark.slow),
        pytest.param(4, 8, 32, marks=pytest.mark.slow),
    ],
)
def test_convert_state_takes_blocks_of_another_number_of_devices(
    before, after, blocks, tmp_path
):
    """Decoded as they are, and in blocks of the mesh of now; a state of another rule or
    format is none of `tx`: the control.
    """
    with jax.set_mesh(mesh_of(before)):
        params, state = started(COLUMNS)
        w = params["w"]
        grads = jnp.linspace(-1, 1, w.size).reshape(w.shape)
        grads = {"w": jax.sharding.reshard(grads, P(None, "data"))}
        ocp.save(tmp_path / "run", step(params, state, grads))
    with jax.sharding.use_abstract_mesh(mesh_of(before).abstract_mesh):
        shapes = jax.eval_shape(lambda: started(COLUMNS))
    moments = lambda state: [optax.tree.get(state, name)["w"] for name in ("mu", "nu")]
    with jax.set_mesh(mesh := mesh_of(after)):
        params, state = ocp.load(tmp_path / "run", on(mesh, shapes))
        new_tx = mpx.mixed_precision(RULE, "bf16-split")
        in_float32 = moments(mpx.convert_state(params, state, TX, new_tx)[1])
        _, here = mpx.convert_state(params, state, TX, TX)
        typed = jax.tree.map(jax.typeof, (params, here))
        assert typed == jax.tree.map(jax.typeof, started(COLUMNS))
        assert jax.tree.map(jax.typeof, step(params, here, params)) == typed
        for other in OTHERS:
            with pytest.raises(ValueError, match="is not a state of `tx`"):
                mpx.convert_state(params, state, other, TX)
    for wide, new, old in zip(in_float32, moments(here), moments(state), strict=True):
        assert new.format.block_size == blocks != old.format.block_size
        assert_same_bits(np.asarray(wide), np.asarray(old.decode()))
        np.testing.assert_allclose(new.decode(), wide, rtol=0.1, atol=1e-5)
