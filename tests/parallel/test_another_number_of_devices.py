"""Check that a sharded run is saved in parts and restored in other parts, by both interfaces of Orbax."""

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

TX = mpx.mixed_precision(optax.adamw(1e-2), "bf16-split24-8bit", key=jax.random.key(0))


def mesh_of(count):
    return jax.make_mesh((count,), ("data",), devices=jax.devices("cpu")[:count])


def started():
    ones = {"up": (64, 1024), "down": (1024, 64), "bias": (512,)}
    params = {key: jax.sharding.reshard(jnp.ones(shape, jnp.bfloat16), P("data")) for key, shape in ones.items()}
    return params, TX.init(params)


def by_standard_checkpointer(folder, run, shapes):
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, run)
        checkpointer.wait_until_finished()
        saved = jax.tree.leaves(checkpointer.metadata(folder).item_metadata.tree)
        return checkpointer.restore(folder, shapes), [(x.shape, x.storage.chunk_shape) for x in saved]


def by_v1(folder, run, shapes):
    ocp.save(folder, run)
    saved = jax.tree.leaves(ocp.metadata(folder).metadata)
    return ocp.load(folder, shapes), [(x.shape, x.storage_metadata.chunk_shape) for x in saved]


@pytest.fixture(scope="module")
def run():
    with jax.set_mesh(mesh_of(8)), jax.numpy_dtype_promotion("standard"):
        params, state = started()
        return jax.jit(stepper(TX), compiler_options=QUICKLY)(params, state, params)


@pytest.mark.parametrize("parts", [4, 2, 1], ids=lambda parts: f"{parts} parts")
@pytest.mark.parametrize("through", [by_standard_checkpointer, by_v1])
def test_no_host_has_more_of_an_array_than_its_devices(through, parts, run, tmp_path, monkeypatch):
    """Orbax puts each buffer that it read on a device. One part is the control: whole arrays are seen."""
    mesh, mesh_of_run = mesh_of(parts), jax.sharding.AbstractMesh((8,), ("data",), (AxisType.Explicit,))
    with jax.sharding.use_abstract_mesh(mesh_of_run):
        shapes = jax.eval_shape(started)
    spec_of = lambda shape: shape.sharding.spec if shape.sharding else P()
    shapes = jax.tree.map(lambda shape: shape.update(sharding=NamedSharding(mesh, spec_of(shape))), shapes)

    read, device_put = [], jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda x, *args: read.append(x.nbytes) or device_put(x, *args))
    restored, saved = through(tmp_path / "run", run, shapes)
    assert_same_bits(*(jax.tree.map(np.asarray, tree) for tree in (restored, run)))
    assert parts * max(read) == max(x.nbytes for x in jax.tree.leaves(run))
    is_cut = lambda shape: np.prod(shape) > 2  # all but the count of steps and the key
    assert all(np.prod(shape) == np.prod(chunk) * (8 if is_cut(shape) else 1) for shape, chunk in saved)
    for x in filter(lambda x: is_cut(x.shape), jax.tree.leaves(restored)):
        assert [shard.data.size for shard in x.addressable_shards] == parts * [x.size // parts]
