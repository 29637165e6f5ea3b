"""Check `master_params`, `is_synced`, and `resync` in any nesting of wrappers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx
from tests.helpers import assert_same_bits

pytestmark = pytest.mark.optax_promotion

KEEPERS = {
    "full": lambda: mpx.master_weights(optax.adam(1e-3)),
    "split": lambda: mpx.master_weights(optax.adam(1e-3), storage="split"),
    "kahan": lambda: optax.chain(mpx.upcast(optax.adam(1e-3)), mpx.kahan_summation(jnp.float32)),
}
NESTINGS = {
    "alone": lambda tx: tx,
    "chain": lambda tx: optax.chain(optax.clip(1.0), tx),
    "named chain": lambda tx: optax.named_chain(("clip", optax.clip(1.0)), ("rule", tx)),
    "multi steps": lambda tx: optax.MultiSteps(tx, 1),
    "loss scaling": mpx.loss_scaling,
    "apply if finite": lambda tx: optax.apply_if_finite(tx, 3),
    "partition": lambda tx: optax.partition({"a": tx, "b": optax.sgd(1.0)}, {"bias": "b", "kernel": "a"}),
    "masked": lambda tx: optax.masked(tx, {"bias": False, "kernel": True}),
    "inject": lambda tx: optax.inject_hyperparams(lambda rate: optax.chain(optax.scale(rate), tx))(rate=1.0),
}


def trained(tx, steps=5):
    params = {
        "kernel": jnp.linspace(0.5, 2, 8, dtype=jnp.float32).astype(jnp.bfloat16),
        "bias": jnp.ones(2, jnp.float32),
    }
    state = tx.init(params)
    for _ in range(steps):
        updates, state = tx.update(jax.tree.map(lambda p: jnp.full(p.shape, 0.1, jnp.float32), params), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@functools.cache
def trained_in(nesting, keeper):
    return trained(NESTINGS[nesting](KEEPERS[keeper]()))


# Each kind of masters, and each nesting of one kind. Case by case, for what tests share.
PAIRS = [(keeper, nesting) for nesting in NESTINGS for keeper in KEEPERS if keeper == "split" or nesting == "alone"]
every_pair = pytest.mark.parametrize(("keeper", "nesting"), PAIRS, scope="module")


@every_pair
def test_master_params_finds_the_float32_weights_in_any_nesting(keeper, nesting):
    params, state = trained_in(nesting, keeper)
    masters = mpx.master_params(params, state)
    start = jnp.linspace(0.5, 2, 8, dtype=jnp.float32).astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_allclose(masters["kernel"], start - 5e-3, rtol=1e-4)
    assert (masters["kernel"] != params["kernel"].astype(jnp.float32)).any()
    assert_same_bits(masters["bias"], params["bias"])  # float32 leaves are their own masters


def test_master_params_without_masters_are_the_parameters_in_float32_and_leave_others_alone():
    params = {"w": jnp.ones(2, jnp.bfloat16), "ids": jnp.arange(3), "none": None, "name": "layer"}
    masters = mpx.master_params(params, optax.EmptyState())
    assert masters["ids"] is params["ids"]
    assert masters["name"] == "layer"
    assert_same_bits(masters["w"], jnp.ones(2, jnp.float32))


def test_a_parameter_may_be_called_as_a_field_of_a_state_is():
    """A dictionary of this one name is what a checkpoint without types makes of a `KahanSummationState`."""
    params = {"compensation": jnp.ones(2, jnp.bfloat16)}
    state = KEEPERS["full"]().init(params)
    assert_same_bits(mpx.master_params(params, state), {"compensation": jnp.ones(2, jnp.float32)})


CANNOT_TELL = (
    r"(?s)`is_synced` cannot tell: split masters.*one checkpoint.*`resync`.*: uint\d+\[.*\] fits any bfloat16\["
)


def test_masters_of_24_bits_cannot_tell_either_and_float32_parameters_are_their_own():
    tx, params = mpx.master_weights(optax.sgd(0.1), storage="split24"), {"w": jnp.ones(2, jnp.bfloat16)}
    with pytest.raises(ValueError, match=CANNOT_TELL):
        jax.jit(mpx.is_synced)(params, tx.init(params))
    wide = {"w": jnp.ones(2)}
    assert mpx.is_synced(wide, tx.init(wide))


@every_pair
def test_after_resync_parameters_changed_from_outside_are_the_masters(keeper, nesting):
    """NaN is in sync with NaN. Low bits fit any parameter, and say so."""
    params, state = trained_in(nesting, keeper)
    edited = params | {"kernel": params["kernel"].at[3].set(0).at[5].set(1.296875).at[6].set(jnp.nan)}
    synced = mpx.resync(edited, state)
    if keeper == "split":
        with pytest.raises(ValueError, match=CANNOT_TELL):
            mpx.is_synced(params, state)
    else:
        assert (mpx.is_synced(params, state), mpx.is_synced(edited, state)) == (True, False)
        assert mpx.is_synced(edited, synced)
    assert_same_bits(mpx.master_params(edited, synced), jax.tree.map(lambda p: p.astype(jnp.float32), edited))
    moments = lambda x: [leaf for path, leaf in jax.tree.leaves_with_path(x) if ".mu" in jax.tree_util.keystr(path)]
    assert_same_bits(moments(synced), moments(state))


def test_without_resync_low_bits_of_another_weight_stay_and_masters_bring_the_old_weights_back():
    """Leave it out, as a negative control: a pruned 0 would be 4e-41, and 1.296875 another number near it."""
    params, state = trained_in("alone", "split")
    edited = params | {"kernel": params["kernel"].at[3].set(0).at[5].set(1.296875)}
    stale = np.asarray(mpx.master_params(edited, state)["kernel"])
    assert stale[3].view(np.uint32) != 0
    assert stale[5] != np.float32(1.296875)
    tx, (params, state) = KEEPERS["full"](), trained_in("alone", "full")
    pruned = params | {"kernel": jnp.zeros_like(params["kernel"])}
    no_grads = jax.tree.map(lambda p: jnp.zeros(p.shape), params)
    resurrected = optax.apply_updates(pruned, tx.update(no_grads, state, pruned)[0])
    kept = optax.apply_updates(pruned, tx.update(no_grads, jax.jit(mpx.resync)(pruned, state), pruned)[0])
    assert (resurrected["kernel"] > 0.4).all()
    assert (abs(kept["kernel"]) < 1e-2).all()
