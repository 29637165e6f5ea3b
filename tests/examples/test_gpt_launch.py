"""Runs in processes of their own: several that train as one, and one that is killed or interrupted.

Each process compiles; so tests look at a few runs that they share.
"""

import json
import os
import signal
import sys
import time

import pytest

from examples.gpt import launch
from tests.examples import nano
from tests.examples.kills import Training, kill_again_and_again
from tests.helpers import assert_same_bits

STEPS = 12
LONGEST_RUN = 240.0
# The launcher, of a smaller model.
LAUNCHER = (
    "-c", "from examples.gpt import launch; launch.MODULE = 'tests.examples.nano'; launch.app()", "--processes", "2",
    "--devices", "4", "--",
)  # fmt: skip


class Launched:
    """A run in two processes with four devices each, or in one with eight; always killed at the end of a test."""

    def __init__(self, folder, name, *flags, steps=STEPS, processes=2):
        self.out, self.pids = folder / name, folder / f"{name} processes"
        self.pids.mkdir(exist_ok=True)
        for path in self.pids.iterdir():
            path.unlink()
        options = {
            "recipe": "bf16-split", "parallel": "zero", "data": folder / "text" / "tokens", "out": self.out,
            "steps": steps, "batch-size": 8, "report-every": 1, "evaluate-every": STEPS // 2,
            "validation-batches": 1, "save-every": 3, "sample-tokens": 0,
        }  # fmt: skip
        command = LAUNCHER if processes == 2 else nano.COMMAND
        variables = {"devices": 8, "NANO_PROCESSES": str(self.pids)}
        self.process = nano.start(folder / "cache", options, *flags, command=command, **variables)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.wait()

    def reach(self, step):
        """Wait for a line of the log."""
        end, log = time.monotonic() + LONGEST_RUN, self.out / "log.jsonl"
        while not log.exists() or len(log.read_text().splitlines()) < step:
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < end
            time.sleep(0.01)

    def end(self):
        """Return the exit code, and what all processes printed."""
        output, _ = self.process.communicate(timeout=LONGEST_RUN)
        return self.process.returncode, output

    def alive(self):
        """Return the processes that have not ended."""
        return [path.name for path in self.pids.iterdir() if os.path.exists(f"/proc/{path.name}")]


def done(folder, name):
    return Training(folder / name, folder, folder, STEPS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("launched")
    nano.make_shards(folder / "text")
    return folder


@pytest.fixture(scope="module")
def whole(folder):
    """The output of two processes that nobody disturbed."""
    with Launched(folder, "whole") as launched:
        code, output = launched.end()
    assert code == 0, output
    return output


@pytest.mark.slow
def test_two_processes_train_as_one_with_all_devices_and_only_the_first_prints_and_writes(folder, whole):
    """What they send each other is added up in another order, if at all."""
    once = ["From step 0 to", "Written: ", *(f"step {step}: " for step in range(1, STEPS + 1))]
    assert [whole.count(f"\n{beginning}") for beginning in once] == [1] * len(once)
    assert sorted(path.name for path in (folder / "whole").iterdir()) == ["checkpoints", "log.jsonl", "loss.png"]
    with Launched(folder, "alone", processes=1) as launched:
        code, output = launched.end()
    assert code == 0, output
    assert "on 8 x cpu" in whole
    for lines in zip(done(folder, "whole").lines(), done(folder, "alone").lines(), strict=True):
        numbers = [[value for value in line.values() if value is not None] for line in lines]
        assert numbers[0] == pytest.approx(numbers[1], rel=1e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("whole")
def test_when_one_process_is_killed_the_others_are_stopped_and_the_run_goes_on_to_the_same_bits(folder):
    with Launched(folder, "killed") as launched:
        launched.reach(5)
        os.kill(max(int(path.name) for path in launched.pids.iterdir()), signal.SIGKILL)
        code, _ = launched.end()
        assert (code, launched.alive()) == (128 + signal.SIGKILL, [])
    with Launched(folder, "killed", "--resume") as launched:
        code, output = launched.end()
    assert code == 0, output
    assert "Going on from step 3" in output
    assert_same_bits(done(folder, "killed").arrays(), done(folder, "whole").arrays())
    assert done(folder, "killed").lines() == done(folder, "whole").lines()


@pytest.mark.slow
def test_after_ctrl_c_all_processes_save_the_same_step(folder):
    """The launcher passes it on, and each process exits as a program that it stopped."""
    with Launched(folder, "interrupted", steps=100_000) as launched:
        launched.reach(2)
        launched.process.send_signal(signal.SIGINT)
        code, output = launched.end()
        assert (code, launched.alive()) == (128 + signal.SIGINT, []), output
    assert "Stopped; the checkpoint is saved. Go on with --resume." in output
    last = json.loads((folder / "interrupted" / "log.jsonl").read_text().splitlines()[-1])["step"]
    assert done(folder, "interrupted").newest == last


# --- One process. ---
@pytest.mark.slow
def test_three_kills_change_no_bit(tmp_path):
    """`python -m tests.examples.kills` kills more often."""
    assert kill_again_and_again(tmp_path, kills=3, steps=12, seed=1)["kills"] == 3


@pytest.mark.slow
def test_two_quick_ctrl_c_end_a_training_without_a_crash(folder, tmp_path):
    """An exception in place of the second one has ended the interpreter in a segmentation fault, now and then."""
    options = {"data": folder / "text" / "tokens", "out": tmp_path / "run", "steps": 100_000, "batch-size": 2}
    options |= {"report-every": 1, "save-every": 1, "validation-batches": 1, "evaluate-every": 100_000}
    with nano.start(folder / "cache", options) as process:
        try:
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


# --- The launcher by itself. ---
def test_the_exit_code_is_that_of_the_process_that_failed(monkeypatch):
    monkeypatch.setattr(launch, "SECONDS_TO_FAIL_TOO", 0.1)
    script = "import sys, time; sys.exit(7) if sys.argv[-1] == '1' else time.sleep(1000)"
    assert launch.run([sys.executable, "-c", script], 3, os.environ) == 7


def test_each_process_gets_the_same_address_and_a_number_of_its_own(tmp_path):
    script = "import pathlib, sys; pathlib.Path(sys.argv[1], sys.argv[-1]).write_text(' '.join(sys.argv[2:-1]))"
    assert launch.run([sys.executable, "-c", script, str(tmp_path)], 3, os.environ) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]
    (flags,) = {path.read_text() for path in tmp_path.iterdir()}
    assert flags.startswith("--coordinator-address 127.0.0.1:")
    assert flags.endswith(" --num-processes 3 --process-id")


def test_the_number_of_devices_replaces_another_one(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_force_host_platform_device_count=8")
    environment = launch.environment_of(4)
    assert environment["XLA_FLAGS"] == "--xla_a=1 --xla_force_host_platform_device_count=4"
    assert environment["JAX_PLATFORMS"] == "cpu"
