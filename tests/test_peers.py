"""Check the tables of peers: a row for each, and one that says what is not installed."""

import sys

import jax
import jax.numpy as jnp
import pytest

from benchmarks import autocast_programs, peers

pytestmark = pytest.mark.optax_promotion


def test_every_optimizer_steps_parameters_of_its_dtype():
    """All but flashoptim-jax, which need not be here."""
    for name in set(peers.NAMES) - set(peers.FLASH_BITS):
        optimizer = peers.make_optimizer(name)
        params = {"w": jnp.ones((64, 128), optimizer.dtype)}
        state = optimizer.init(params)
        new, _ = jax.eval_shape(optimizer.step, params, state, params)
        assert new["w"].dtype == optimizer.dtype


def test_programs_are_counted_that_run_keep_the_error_and_narrow(monkeypatch):
    """Negative control: a way that narrows nothing. A peer that is not installed fails
    in its own words.
    """
    monkeypatch.setitem(sys.modules, "jaxamp", None)
    plain = (
        "jax",
        lambda loss: jax.value_and_grad(autocast_programs.judge.scaled_loss(loss)),
    )
    monkeypatch.setitem(autocast_programs.WAYS, "float32", plain)
    counts = {"run": 1, "within": 1, "narrow": 1}
    for way, expected in {
        "mpx": counts,
        "float32": counts | {"narrow": 0},
        "jaxamp": dict.fromkeys(counts, 0),
    }.items():
        with jax.numpy_rank_promotion("allow"):  # as in a process of its own
            row = autocast_programs.measure(way, ["autoencoder_of_one_weight"])
        assert {key: row[key] for key in counts} == expected
    assert row["why"].startswith("ModuleNotFoundError")
