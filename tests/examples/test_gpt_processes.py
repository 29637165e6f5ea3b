"""How a process finds the others of its run, and how it leaves."""

import sys

import pytest
import typer

from examples.gpt import processes


@pytest.fixture
def no_cluster(monkeypatch):
    """JAX finds none; what it was asked."""
    asked = []

    def initialize(*arguments):
        asked.append(arguments)
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.delenv("JAX_COORDINATOR_ADDRESS", raising=False)
    monkeypatch.setattr(processes.jax.distributed, "initialize", initialize)
    return asked


def test_without_options_and_cluster_a_process_is_alone(no_cluster):
    processes.join(None, None, None)
    assert no_cluster == [(None, None, None)]


@pytest.mark.parametrize("arguments", [("host:1", None, None), (None, 2, None), (None, None, 0)])
@pytest.mark.usefixtures("no_cluster")
def test_some_of_the_options_are_refused_where_there_is_no_cluster(arguments):
    with pytest.raises(ValueError, match="must all be given where JAX finds no cluster: coordinator_address should"):
        processes.join(*arguments)


@pytest.mark.usefixtures("no_cluster")
def test_an_address_in_the_environment_counts_as_an_option(monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "host:1")
    with pytest.raises(ValueError, match="must all be given"):
        processes.join(None, None, None)


def test_alone_an_error_is_told_by_no_process(capsys):
    with pytest.raises(typer.Exit) as caught, processes.together():
        processes.fail("the disk is full")
    assert caught.value.exit_code == 1
    assert capsys.readouterr().err == "Error: the disk is full\n"


def test_a_command_that_failed_ends_at_once(monkeypatch):
    ends = []
    monkeypatch.setattr(processes.os, "_exit", ends.append)
    with pytest.raises(SystemExit):
        processes.run(lambda: sys.exit(3))
    with pytest.raises(SystemExit):
        processes.run(lambda: sys.exit(0))
    assert ends == [3]
