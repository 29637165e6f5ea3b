"""Check that stored leaves pass through what others do with states: export,
serialization, maps over parameters.
"""

import subprocess
import sys

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import export
from jax.sharding import NamedSharding, PartitionSpec

import mpx
from mpx._stored import state_format
from mpx._stored.roles import ROLES
from tests.helpers import assert_same_bits, eight_cpu_devices

pytestmark = pytest.mark.optax_promotion

KEY = jax.random.key(0)
PARAMS = {"w": jnp.ones((64, 128), jnp.bfloat16)}
CODED = mpx.low_precision_state(
    optax.adam(1e-3), {"mu": mpx.Blockwise4bit(), "nu": mpx.Blockwise8bit()}, key=KEY
)


def test_an_exported_step_with_every_kind_of_state_is_saved_and_read():
    """What Optax and a user define they register themselves, as `jax.export` asks."""
    for kind in (optax.ScaleByAdamState, optax.EmptyState, optax.MaskedNode):
        if kind not in _registered:
            export.register_namedtuple_serialization(
                kind, serialized_name=f"tests.{kind.__name__}"
            )
            _registered.add(kind)
    tx = mpx.loss_scaling(mpx.master_weights(CODED, storage="split24", key=KEY))
    state = tx.init(PARAMS)
    step = jax.jit(lambda grads, state, params: tx.update(grads, state, params))
    saved = export.export(step)(PARAMS, state, PARAMS).serialize()
    assert_same_bits(
        export.deserialize(saved).call(PARAMS, state, PARAMS),
        step(PARAMS, state, PARAMS),
    )


_registered = set()


def test_every_state_of_mpx_is_registered_for_export():
    """A second registration is refused, so it is the proof of the first."""
    ours = [kind for kind in ROLES if kind.__module__.startswith("mpx.")]
    assert len(ours) >= 5
    for kind in ours:
        with pytest.raises(
            ValueError, match="Duplicate serialization registration for type"
        ):
            export.register_namedtuple_serialization(
                kind, serialized_name="another name"
            )


@pytest.mark.parametrize(
    "format", [mpx.Blockwise4bit(64), mpx.Blockwise8bit(signed=False)]
)
def test_a_format_is_read_again_from_its_bytes(format):
    assert state_format._format_from_bytes(
        state_format._format_as_bytes((format,))
    ) == (format,)


def test_a_format_that_nobody_has_imported_is_named():
    with pytest.raises(
        ValueError, match=r"keeps its state in `a\.Format`: import the module"
    ):
        state_format._format_from_bytes(b'["a.Format", {}]')


def test_flax_that_is_imported_after_the_first_state_serializes_it():
    script = (
        "import sys, jax, jax.numpy as jnp, optax, mpx\ntx ="
        " mpx.low_precision_state(optax.adam(1e-3), {'mu|nu':"
        " mpx.Blockwise8bit()})\nstate = jax.jit(tx.init)({'w': jnp.ones((64, 64),"
        " jnp.float32)})\nfrom flax.serialization import from_bytes, to_bytes\nrestored"
        " = from_bytes(jax.tree.map(jnp.zeros_like, state), to_bytes(state))\nassert"
        " jax.tree.all(jax.tree.map(jnp.array_equal, restored, state))\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_map_over_parameters_places_stored_leaves():
    """A sharding stands in place of the leaf, which JAX reads as one for codes and
    scales.
    """
    tx = mpx.low_precision_state(optax.adam(1e-3), {"mu|nu": mpx.Blockwise8bit()})
    state, mesh = tx.init(PARAMS), eight_cpu_devices()
    rows, everywhere = (
        NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ())
    )
    is_leaf = lambda x: isinstance(x, mpx.states.StoredLeaf)
    shardings = optax.tree.map_params(
        tx,
        lambda _, sharding: sharding,
        state,
        {"w": rows},
        transform_non_params=lambda _: everywhere,
        is_leaf=is_leaf,
    )
    placed = jax.device_put(state, shardings)
    assert optax.tree.get(placed, "mu")["w"].codes.sharding == rows
    assert_same_bits(
        jax.tree.map(jax.device_get, placed), jax.tree.map(jax.device_get, state)
    )
