"""Kills a training again and again, and asks whether it ends as if nobody had.

Run it from the root of the repository; fifty kills take some minutes:

    python -m tests.examples.kills --kills 50

A small training saves every other step. It is killed by SIGKILL: half of the time while a checkpoint is being written,
which a folder of Orbax's with a name of its own shows, and half of the time at any moment since its start. Then it is
started again, with `--resume` if it has a whole checkpoint, until it ends; then a new one begins, until it has been
killed as often as wanted. What must hold:

- it goes on from the newest whole checkpoint, of which no kill takes any away;
- at its end, parameters and optimizer state have the bits of a training that nobody killed;
- so has every line of its log, but for times.
"""

import dataclasses
import json
import random
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import orbax.checkpoint as ocp
import typer
from jax.sharding import SingleDeviceSharding

from tests.examples import nano
from tests.helpers import assert_same_bits

PARTIAL = "*orbax-checkpoint-tmp*"
TIMES = ("seconds_per_step", "tokens_per_second", "mfu")
LONGEST_SAVING, LONGEST_LIFE = 0.3, 12.0  # seconds; a kill comes at a random moment of them
SECONDS_BETWEEN_LOOKS = 0.001
LONGEST_RUN = 300.0


@dataclasses.dataclass
class Training:
    """A training that may be killed.

    Attributes:
        out: its folder.
        data: its shards.
        cache: of compiled programs.
        steps: how many it has.
        output: what it printed last.
    """

    out: Path
    data: Path
    cache: Path
    steps: int
    output: str = ""

    @property
    def checkpoints(self) -> Path:
        """The folder of its checkpoints."""
        return self.out / "checkpoints"

    @property
    def newest(self) -> int | None:
        """The step of its newest whole checkpoint."""
        folder = self.checkpoints
        steps = [int(path.name) for path in folder.iterdir() if path.name.isdigit()] if folder.exists() else []
        return max(steps, default=None)

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is half written."""
        return self.checkpoints.exists() and any(self.checkpoints.glob(PARTIAL))

    def begin(self) -> "subprocess.Popen[str]":
        """Starts it, or goes on."""
        options = {
            "recipe": "bf16-split-8bit", "data": self.data, "out": self.out, "steps": self.steps, "batch-size": 2,
            "report-every": 1, "evaluate-every": self.steps, "validation-batches": 1, "save-every": 2,
            "sample-tokens": 0,
        }  # fmt: skip
        flags = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
        flags += ["--resume"] * (self.newest is not None)
        return subprocess.Popen(
            [*nano.COMMAND, *flags], env=nano.environment_of(self.cache), cwd=nano.ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def finish(self, process: "subprocess.Popen[str]") -> None:
        """Waits for its end, which must be a good one."""
        self.output, _ = process.communicate(timeout=LONGEST_RUN)
        assert process.returncode == 0, self.output

    def kill(self, process: "subprocess.Popen[str]", chance: random.Random) -> str | None:
        """Kills it at a random moment, and says what it did then; None if it was done before."""
        is_to_save, delay = chance.random() < 0.5, chance.uniform(0, LONGEST_LIFE)
        if is_to_save:
            for _ in range(chance.randrange(1, 4)):  # which of the checkpoints to come
                _wait_until(lambda: not self.is_saving or process.poll() is not None)
                _wait_until(lambda: self.is_saving or process.poll() is not None)
            delay = chance.uniform(0, LONGEST_SAVING)
        try:
            process.wait(delay)
        except subprocess.TimeoutExpired:
            process.kill()
        self.output, _ = process.communicate(timeout=LONGEST_RUN)
        if process.returncode != -signal.SIGKILL:
            assert process.returncode == 0, self.output
            return None
        if self.is_saving:
            return "saving"
        return "training" if "\nstep " in self.output else "starting"

    def lines(self) -> list[dict[str, float]]:
        """Its log without what no two trainings have in common."""
        lines = (self.out / "log.jsonl").read_text().splitlines()
        return [{name: value for name, value in json.loads(line).items() if name not in TIMES} for line in lines]

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays of its last checkpoint by their paths."""
        path = self.checkpoints / str(self.steps) / "state"
        with ocp.StandardCheckpointer() as checkpointer:
            device = SingleDeviceSharding(jax.devices()[0])  # whichever the training had
            place = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device)
            tree = checkpointer.restore(path, jax.tree.map(place, checkpointer.metadata(path).item_metadata.tree))
        return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def kill_again_and_again(folder: Path, kills: int, steps: int, seed: int) -> Counter[str]:
    """Does as the module says; how often which moment was hit, and how many restarts and whole trainings there were."""
    chance, counts = random.Random(seed), Counter()
    tokens, cache = nano.make_shards(folder / "text"), folder / "cache"
    undisturbed = Training(folder / "undisturbed", tokens, cache, steps)
    undisturbed.finish(undisturbed.begin())
    while counts["kills"] < kills:
        training = Training(folder / f"killed {counts['trainings']}", tokens, cache, steps)
        _kill_to_the_end(training, kills, chance, counts)
        counts["trainings"] += 1
        assert training.lines() == undisturbed.lines()
        assert_same_bits(training.arrays(), undisturbed.arrays())
    return counts


def _kill_to_the_end(training: Training, kills: int, chance: random.Random, counts: Counter[str]) -> None:
    newest = None
    while True:
        process = training.begin()
        try:
            if counts["kills"] == kills:
                training.finish(process)
                moment = None
            else:
                moment = training.kill(process, chance)
        finally:
            process.kill()
            process.wait()
        if newest is not None and "\nGoing on" in training.output:
            assert f"\nGoing on from step {newest} to" in training.output, training.output
            counts["resumed"] += 1
        if moment is None:
            return
        assert newest is None or training.newest >= newest
        newest = training.newest
        counts.update(["kills", f"in {moment}"])
        counts["before the first checkpoint"] += newest is None


def _wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LONGEST_RUN
    while not condition():
        assert time.monotonic() < end
        time.sleep(SECONDS_BETWEEN_LOOKS)


def main(
    kills: Annotated[int, typer.Option(min=1)] = 50,
    steps: Annotated[int, typer.Option(min=2, help="Of a training, an even number.")] = 60,
    seed: Annotated[int, typer.Option(help="Of the moments.")] = 0,
) -> None:
    """Kills a training again and again, and asks whether it ends as if nobody had."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        counts = kill_again_and_again(Path(folder), kills, steps, seed)
        print(f"{dict(counts)}: all ended with the same bits, in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
