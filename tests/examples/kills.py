"""Kill a training run again and again, and check that it ends as if nobody had.

Run it from the root of the repository; fifty kills take some minutes:

    python -m tests.examples.kills --kills 50

A small run saves every other step. It is killed by SIGKILL: half of the time while a checkpoint is being written, which
a temporary folder of Orbax's shows, and half of the time at any moment since its start. Then it is started again, with
`--resume` if it has a complete checkpoint, until it ends; then a new one begins. The test asserts:

- it goes on from the newest complete checkpoint, and no kill removes one;
- at its end, parameters and optimizer state have the bits of a run that nobody killed;
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

TIMES = ("seconds_per_step", "tokens_per_second", "mfu")
LONGEST_SAVING, LONGEST_LIFE, LONGEST_RUN = 0.3, 12.0, 300.0  # seconds


@dataclasses.dataclass
class Training:
    """A training run that may be killed: its folders, its length, and the output of its last process."""

    out: Path
    data: Path
    cache: Path
    steps: int
    output: str = ""

    @property
    def newest(self) -> int | None:
        """Return the step of the newest complete checkpoint."""
        folder = self.out / "checkpoints"
        steps = [int(path.name) for path in folder.iterdir() if path.name.isdigit()] if folder.exists() else []
        return max(steps, default=None)

    @property
    def is_saving(self) -> bool:
        """Return whether a checkpoint is half written."""
        return any(self.out.glob("checkpoints/*orbax-checkpoint-tmp*"))

    def begin(self) -> "subprocess.Popen[str]":
        """Start it, or resume it."""
        options = {
            "recipe": "bf16-split-8bit", "data": self.data, "out": self.out, "steps": self.steps, "batch-size": 2,
            "report-every": 1, "evaluate-every": self.steps, "validation-batches": 1, "save-every": 2,
            "sample-tokens": 0,
        }  # fmt: skip
        return nano.start(self.cache, options, *["--resume"] * (self.newest is not None))

    def kill(self, process: "subprocess.Popen[str]", chance: random.Random) -> str | None:
        """Kill it at a random moment, and return what it did then; None if it was done before."""
        is_to_save, delay = chance.random() < 0.5, chance.uniform(0, LONGEST_LIFE)
        if is_to_save:
            for _ in range(chance.randrange(1, 4)):  # which of the checkpoints to come
                wait_until(lambda: not self.is_saving or process.poll() is not None)
                wait_until(lambda: self.is_saving or process.poll() is not None)
            delay = chance.uniform(0, LONGEST_SAVING)
        try:
            process.wait(delay)
        except subprocess.TimeoutExpired:
            process.kill()
        self.output, _ = process.communicate(timeout=LONGEST_RUN)
        if process.returncode != -signal.SIGKILL:
            assert process.returncode == 0, self.output
            return None
        return "saving" if self.is_saving else "training" if "\nstep " in self.output else "starting"

    def lines(self) -> list[dict[str, float]]:
        """Return its log without what no two runs have in common."""
        lines = (self.out / "log.jsonl").read_text().splitlines()
        return [{name: value for name, value in json.loads(line).items() if name not in TIMES} for line in lines]

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays of its last checkpoint by their paths."""
        path = self.out / "checkpoints" / str(self.steps) / "state"
        with ocp.StandardCheckpointer() as checkpointer:
            device = SingleDeviceSharding(jax.devices()[0])  # whichever the run had
            place = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device)
            tree = checkpointer.restore(path, jax.tree.map(place, checkpointer.metadata(path).item_metadata.tree))
        return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def kill_again_and_again(folder: Path, kills: int, steps: int, seed: int) -> Counter[str]:
    """Do as the module says, and return how often which moment was hit, and how many runs were resumed and ended."""
    chance, counts = random.Random(seed), Counter()
    tokens, cache = nano.make_shards(folder / "text"), folder / "cache"
    undisturbed = Training(folder / "undisturbed", tokens, cache, steps)
    kill_to_the_end(undisturbed, 0, chance, counts)
    while counts["kills"] < kills:
        training = Training(folder / f"killed {counts['runs']}", tokens, cache, steps)
        kill_to_the_end(training, kills, chance, counts)
        counts["runs"] += 1
        assert training.lines() == undisturbed.lines()
        assert_same_bits(training.arrays(), undisturbed.arrays())
    return counts


def kill_to_the_end(training: Training, kills: int, chance: random.Random, counts: Counter[str]) -> None:
    """Kill a run and resume it until it ends, or there were enough kills and it is left alone."""
    newest = None
    while True:
        process = training.begin()
        try:
            if counts["kills"] >= kills:
                training.output, _ = process.communicate(timeout=LONGEST_RUN)
                assert process.returncode == 0, training.output
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


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, but not for ever."""
    end = time.monotonic() + LONGEST_RUN
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def main(
    kills: Annotated[int, typer.Option(min=1)] = 50,
    steps: Annotated[int, typer.Option(min=2, help="Steps of a run, an even number.")] = 60,
    seed: Annotated[int, typer.Option(help="Decides the moments.")] = 0,
) -> None:
    """Kill a training run again and again, and check that it ends as if nobody had."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        counts = kill_again_and_again(Path(folder), kills, steps, seed)
        print(f"{dict(counts)}: all ended with the same bits, in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
