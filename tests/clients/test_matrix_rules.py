"""Optimizers of other people that multiply matrices, on eight devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import psgdax
import pytest
from aura_optax import muon_aura
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

RANDOM = np.random.default_rng(0)
SHAPES = {"one": (32, 16), "other": (32, 16), "square": (16, 16), "bias": (24,)}
PARAMS = {
    name: RANDOM.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()
}


def trained(tx, params, put=jnp.asarray):
    """Return parameters and state after five steps."""
    params = jax.tree.map(put, params)
    state = jax.jit(tx.init)(params)

    @jax.jit
    def step(i, params, state):
        updates, state = tx.update(
            jax.tree.map(lambda p: jnp.sin((3 + i) * p), params), state, params
        )
        return optax.apply_updates(params, updates), state

    for i in range(5):
        params, state = step(float(i), params, state)
    return params, state


@pytest.fixture(autouse=True)
def mesh():
    """Set a mesh of eight devices in place of that which NetKet sets when another file
    imports it.
    """
    with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))):
        yield


def by_rows(x):
    """Divide an array over eight devices."""
    return jax.device_put(x, NamedSharding(jax.sharding.get_mesh(), P("data")))


def numbers(tree):
    return np.concatenate(
        [np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(tree)]
    )


def test_aura_with_muon_trains_on_eight_devices_as_on_one():
    one, eight = (
        trained(muon_aura(1e-2), PARAMS),
        trained(muon_aura(1e-2), PARAMS, by_rows),
    )
    np.testing.assert_allclose(numbers(eight[0]), numbers(one[0]), rtol=0, atol=2e-6)
    # XLA adds parts of products up in another order.
    np.testing.assert_allclose(numbers(eight[1]), numbers(one[1]), rtol=1e-4, atol=5e-5)
    assert all(not x.sharding.is_fully_replicated for x in jax.tree.leaves(eight[0]))
    adam = trained(optax.adam(1e-2), PARAMS)[0]
    assert np.abs(numbers(one[0]) - numbers(adam)).max() > 1e-2  # so Muon did something


def test_psgd_of_one_leaf_trains_on_eight_devices_as_on_one():
    params = {"one": PARAMS["one"]}
    one = trained(psgdax.kron(1e-2), params)
    eight = trained(psgdax.kron(1e-2), params, by_rows)
    np.testing.assert_allclose(numbers(eight[0]), numbers(one[0]), rtol=0, atol=1e-4)
