"""Ctrl-C and SIGTERM: what the first does, and what the second."""

import os
import signal
import subprocess
import time

import pytest
from rich.console import Console

from examples.gpt import interruptions
from examples.gpt.interruptions import Interruption
from tests.examples import nano

LONGEST_RUN = 120.0


@pytest.fixture
def exits(monkeypatch):
    """The code with which a program would end at once, which it then does not."""

    def leave(code):
        raise SystemExit(code)

    monkeypatch.setattr(interruptions.os, "_exit", leave)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_makes_the_next_step_the_last(number, code):
    with interruptions.interruptions(Console(quiet=True)) as interruption:
        assert not interruption.is_due(1)
        signal.raise_signal(number)
        assert interruption.is_due(2)
        assert interruption.exit_code == code


@pytest.mark.usefixtures("exits")
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_stops_at_once(second):
    with interruptions.interruptions(Console(quiet=True)):
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(SystemExit) as caught:
            signal.raise_signal(second)
    assert caught.value.code == 128 + second


def test_afterwards_signals_do_what_they_did_before():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with interruptions.interruptions(Console(quiet=True)):
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] != before
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_of_several_processes_the_one_with_ctrl_c_sends_itself_what_jax_tells_all(monkeypatch):
    """The step is that of JAX, whatever this process has received."""
    sent, asked = [], []
    monkeypatch.setattr(interruptions.jax, "process_count", lambda: 2)
    monkeypatch.setattr(interruptions.os, "kill", lambda *arguments: sent.append(arguments))
    reached = lambda step: asked.append(step) or step == 5
    monkeypatch.setattr(interruptions.multihost_utils, "reached_preemption_sync_point", reached)
    interruption = Interruption(Console(quiet=True))
    interruption.receive(signal.SIGINT)
    assert sent == [(os.getpid(), signal.SIGTERM)]
    assert [interruption.is_due(step) for step in (4, 5)] == [False, True]
    assert asked == [4, 5]
    assert interruption.exit_code == 130


def test_two_quick_ctrl_c_end_a_training_without_a_crash(tmp_path):
    """An exception in place of the second one has ended the interpreter in a segmentation fault, now and then."""
    tokens = nano.make_shards(tmp_path / "text")
    options = {"data": tokens, "out": tmp_path / "run", "steps": 100_000, "batch-size": 2, "report-every": 1}
    options |= {"save-every": 1, "validation-batches": 1, "evaluate-every": 100_000, "recipe": "bf16-any-precision"}
    flags = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    log, end = tmp_path / "run" / "log.jsonl", time.monotonic() + LONGEST_RUN
    with subprocess.Popen(
        [*nano.COMMAND, *flags], env=nano.environment_of(tmp_path / "cache"), cwd=nano.ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        try:
            while not log.exists() or not log.read_text():
                assert process.poll() is None, process.communicate()[0]
                assert time.monotonic() < end
                time.sleep(0.01)
            for line in process.stdout:
                if line.startswith("step 3:"):
                    process.send_signal(signal.SIGINT)
                if line.startswith("Finishing"):
                    process.send_signal(signal.SIGINT)
                    break
            output = process.stdout.read()
            assert process.wait(LONGEST_RUN) == 130, output
        finally:
            process.kill()
    assert "Traceback" not in output
