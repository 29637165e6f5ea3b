"""How a process finds the others of its run, what the first signal does and what the second, and how it ends."""

import os
import signal
import sys

import pytest
from rich.console import Console

from examples.gpt import processes
from examples.gpt.processes import Interruption, interruptions


@pytest.fixture
def no_cluster(monkeypatch):
    """A JAX that finds no cluster; the fixture is the list of its arguments."""
    asked = []

    def initialize(*arguments):
        asked.append(arguments)
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.delenv("JAX_COORDINATOR_ADDRESS", raising=False)
    monkeypatch.setattr(processes.jax.distributed, "initialize", initialize)
    return asked


@pytest.fixture
def exits(monkeypatch):
    """Raise `SystemExit` where a program would end at once."""

    def leave(code):
        raise SystemExit(code)

    monkeypatch.setattr(processes.os, "_exit", leave)


def test_without_options_and_cluster_a_process_is_alone(no_cluster):
    processes.join(None, None, None)
    assert no_cluster == [(None, None, None)]
    assert processes.prefix() == ""


def test_one_of_several_processes_says_which_it_is(monkeypatch):
    monkeypatch.setattr(processes.jax.distributed, "is_initialized", lambda: True)
    assert processes.prefix() == "process 0: "


@pytest.mark.parametrize("arguments", [("host:1", None, None), (None, 2, None), (None, None, 0), (None, None, None)])
@pytest.mark.usefixtures("no_cluster")
def test_some_of_the_options_are_refused_where_there_is_no_cluster(arguments, monkeypatch):
    """An address in the environment counts as an option."""
    if arguments == (None, None, None):
        monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "host:1")
    with pytest.raises(ValueError, match="must all be given where JAX finds no cluster: coordinator_address should"):
        processes.join(*arguments)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_makes_the_next_step_the_last_and_afterwards_does_what_it_did_before(number):
    before = signal.getsignal(number)
    with interruptions(Console(quiet=True)) as interruption:
        assert not interruption.is_due(1)
        signal.raise_signal(number)
        assert interruption.is_due(2)
        assert interruption.exit_code == 128 + number
    assert signal.getsignal(number) == before


@pytest.mark.usefixtures("exits")
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_stops_at_once(second):
    with interruptions(Console(quiet=True)):
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(SystemExit) as caught:
            signal.raise_signal(second)
    assert caught.value.code == 128 + second


def test_of_several_processes_the_one_with_ctrl_c_sends_itself_what_jax_tells_all(monkeypatch):
    """The step is that of JAX, whatever this process has received."""
    sent, asked = [], []
    monkeypatch.setattr(processes.jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes.os, "kill", lambda *arguments: sent.append(arguments))
    reached = lambda step: asked.append(step) or step == 5
    monkeypatch.setattr(processes.multihost_utils, "reached_preemption_sync_point", reached)
    interruption = Interruption(Console(quiet=True))
    interruption.receive(signal.SIGINT)
    assert sent == [(os.getpid(), signal.SIGTERM)]
    assert [interruption.is_due(step) for step in (4, 5)] == [False, True]
    assert asked == [4, 5]
    assert interruption.exit_code == 130


@pytest.mark.usefixtures("exits")
def test_a_command_that_failed_ends_at_once(monkeypatch, capsys):
    ended = []
    monkeypatch.setattr(processes.os, "_exit", ended.append)
    with pytest.raises(SystemExit):
        processes.run(lambda: sys.exit(0))
    processes.run(lambda: sys.exit(3))
    processes.run(lambda: 1 / 0)
    processes.run(lambda: None)
    assert ended == [3, 1]
    assert "ZeroDivisionError" in capsys.readouterr().err
