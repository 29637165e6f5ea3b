"""Check the tables of peers: a row for each, and one that says what is not installed."""

import sys

import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

from benchmarks import autocast_programs, peers

pytestmark = pytest.mark.optax_promotion


def test_the_command_reads_what_is_there_and_names_what_is_not_installed(monkeypatch):
    figures = {"kept": 12.0, "peak": 16.0, "temporary": 0.0, "moved": 28.0, "kernels": 150, "compile s": 1.9}
    missing = {"failed": "ModuleNotFoundError: No module named 'flashoptim_jax'"}
    answer = lambda function, arguments, timeout: [missing if "flash" in arguments["peer"] else figures]
    monkeypatch.setattr(peers, "run_worker", answer)
    printed = CliRunner().invoke(peers.app, ["--peers", "optax-f32,flashoptim-24"], catch_exceptions=False).output
    assert "| Optax, float32 | 12.00 | 16.00 | 0.00 | 28.00 | 150 | 1.9 |" in printed
    assert missing["failed"] in printed


def test_every_optimizer_steps_parameters_of_its_dtype():
    """All but flashoptim-jax, which need not be here."""
    for name in set(peers.NAMES) - set(peers.FLASH_BITS):
        optimizer = peers.make_optimizer(name)
        params = {"w": jnp.ones((64, 128), optimizer.dtype)}
        state = optimizer.init(params)
        new, _ = jax.eval_shape(optimizer.step, params, state, params)
        assert new["w"].dtype == optimizer.dtype


def test_programs_are_counted_that_run_keep_the_error_and_narrow(monkeypatch):
    """Negative control: a way that narrows nothing. A peer that is not installed fails in its own words."""
    monkeypatch.setitem(sys.modules, "jaxamp", None)
    plain = "jax", lambda loss: jax.value_and_grad(autocast_programs.judge.scaled_loss(loss))
    monkeypatch.setitem(autocast_programs.WAYS, "float32", plain)
    counts = {"run": 1, "within": 1, "narrow": 1}
    for way, expected in {"mpx": counts, "float32": counts | {"narrow": 0}, "jaxamp": dict.fromkeys(counts, 0)}.items():
        with jax.numpy_rank_promotion("allow"):  # as in a process of its own
            row = autocast_programs.measure(way, ["autoencoder_of_one_weight"])
        assert {key: row[key] for key in counts} == expected
    assert row["why"].startswith("ModuleNotFoundError")
