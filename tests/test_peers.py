"""Check the table of peers: a row for each, one that says what is not installed, and distances that mean something."""

import sys

import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

from benchmarks import autocast_programs, peers

pytestmark = pytest.mark.optax_promotion


def test_the_command_measures_what_is_there_and_names_what_is_not_installed(monkeypatch):
    """Published figures stand in a table of their own."""
    monkeypatch.setitem(sys.modules, "flashoptim_jax", None)
    asked = ["--peers", "optax-bf16,flashoptim-24", "--target", "", "--steps", "2", "--gpt-steps", "0"]
    printed = CliRunner().invoke(peers.app, asked).output
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in printed.splitlines()}
    _, *distances, reason = [cell.strip() for cell in lines[peers.NAMES["optax-bf16"]].strip("|").split("|")]
    assert all(0 < float(distance) < 1 for distance in distances)
    assert len(distances) == len(peers.PROBLEMS)
    assert not reason
    assert "flashoptim-jax is not installed" in lines[peers.NAMES["flashoptim-24"]]
    assert "not measured here" in printed.split("torchao, 4-bit")[1]


def test_a_job_that_fails_is_named_and_the_others_stay(monkeypatch):
    answers = {"benchmarks.peers:good": {"loss": 1.0}, "benchmarks.peers:bad": {"failed": "no compiler"}}
    monkeypatch.setattr(peers, "run_worker", lambda function, arguments, timeout: [answers[function]])
    row = peers.measure("optax-f32", {("program", "bad"): {}, ("gpt", "good"): {}})
    assert row == {"name": "Optax, float32", "failed": "program: no compiler", "gpt": {"loss": 1.0}}


def test_masters_of_32_bits_end_closer_to_float32_than_bfloat16_parameters(monkeypatch):
    """The float32 row is the yardstick itself."""
    monkeypatch.setattr(peers, "PROBLEMS", {"logistic": peers.PROBLEMS["logistic regression"]})
    names = ("optax-f32", "bf16-split", "optax-bf16")
    exact, split, naive = (peers.measure_distances(name, 30)["logistic"] for name in names)
    assert exact == 0 < 10 * split < naive


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in peers.NAMES if name not in peers.FLASH_BITS])
def test_the_small_gpt_trains_with_every_optimizer(name):
    """A first step has the learning rate 0: two of three leave the 5.5 nats of 256 bytes behind, all of them alike."""
    assert 4.5 < peers.measure_gpt(name, 3)["loss"] < 5.5


def test_every_optimizer_starts_from_masters_that_are_the_parameters():
    """All but flashoptim-jax, which need not be here."""
    for name in set(peers.NAMES) - set(peers.FLASH_BITS):
        optimizer = peers.make_optimizer(name)
        params = {"w": jnp.ones((64, 128), optimizer.dtype)}
        master = optimizer.masters(params, optimizer.init(params))["w"]
        assert master.dtype == jnp.float32
        assert (master == 1).all()


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
