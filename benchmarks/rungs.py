"""The ladder as data: what each rung adds to the one before it, and what all of them
share.
"""

import dataclasses
from typing import Any, Literal

import typer


@dataclasses.dataclass(frozen=True)
class Rung:
    """One way to train GPT-2. All fields but the first three are settings; a rung
    changes one of them.
    """

    name: str  # on the command line
    label: str  # in the table: what it adds
    after: str | None = None  # the rung that it is compared with
    recipe: str = "f32"
    attention: Literal["xla", "cudnn"] = "xla"
    vocabulary_multiple: int = 1
    loss_chunks: int = 1
    layers: Literal["unrolled", "stacked", "scanned"] = "unrolled"
    checkpoint: Literal["none", "dots", "thin", "full"] = "none"
    # whether a step has as many microbatches as its budget of tokens allows, or one
    accumulate: bool = False

    def then(self, name: str, label: str, **change: Any) -> "Rung":
        """Return the next rung."""
        return dataclasses.replace(
            self, name=name, label=label, after=self.name, **change
        )


F32 = Rung("f32", "float32")
TF32 = F32.then("tf32", "TF32", recipe="tf32")
BF16 = TF32.then("bf16", "bf16 autocast", recipe="bf16-autocast")
FLASH = BF16.then("flash", "flash attention", attention="cudnn")
PADDED = FLASH.then("padded", "padded vocabulary", vocabulary_multiple=128)
SPLIT = PADDED.then("split", "bf16 parameters, split masters", recipe="bf16-split")
EIGHT_BIT = SPLIT.then(
    "8bit", "8-bit moments, one kernel a leaf", recipe="bf16-split-8bit"
)
STACKED = EIGHT_BIT.then("stacked", "weights of all layers stacked", layers="stacked")
# From here on each pays with time for memory.
CHUNKED = STACKED.then("chunked", "loss in 4 chunks", loss_chunks=4)
DOTS = CHUNKED.then("dots", "dots kept, the rest again", checkpoint="dots")
THIN = DOTS.then("thin", "the widest again, too", checkpoint="thin")
ACCUMULATE = STACKED.then("accumulate", "accumulation", accumulate=True)
LADDER = (
    F32,
    TF32,
    BF16,
    FLASH,
    PADDED,
    SPLIT,
    EIGHT_BIT,
    STACKED,
    CHUNKED,
    DOTS,
    THIN,
    ACCUMULATE,
)

# To try out, each of them one change to a rung.
EXTRAS = (
    SPLIT.then("fp8", "linear layers in FP8", recipe="fp8"),
    STACKED.then("scanned", "scanned layers", layers="scanned"),
    DOTS.then("scanned-dots", "scanned layers", layers="scanned"),
    THIN.then("input-only", "only the input of a block kept", checkpoint="full"),
)
RUNGS = {rung.name: rung for rung in (*LADDER, *EXTRAS)}


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all rungs share."""

    preset: str  # the size of the model
    batch_size: int  # sequences of a microbatch
    steps: int  # in a timed round
    rounds: int
    token_budget: int  # of a step with accumulation

    def microbatches(self, accumulate: bool, context: int) -> int:
        """Return how many microbatches a step has, with accumulation or without."""
        return (
            max(1, self.token_budget // (self.batch_size * context))
            if accumulate
            else 1
        )

    def steps_of(self, microbatches: int) -> int:
        """Return the steps of a round: fewer of several microbatches take as long."""
        return max(2, self.steps // microbatches)


ON_GPU = Setting("gpt2-124m", batch_size=16, steps=10, rounds=5, token_budget=524_288)
ON_CPU = Setting("tiny", batch_size=4, steps=3, rounds=3, token_budget=1_024)


def choose_rungs(names: str) -> list[Rung]:
    """Return the rungs of these names, separated by commas, in the order of the ladder;
    without names all of it.
    """
    wanted = [name for name in names.split(",") if name] or [
        rung.name for rung in LADDER
    ]
    if unknown := [name for name in wanted if name not in RUNGS]:
        raise typer.BadParameter(
            f"no rung is called {', '.join(unknown)}; there are {', '.join(RUNGS)}."
        )
    return [rung for name, rung in RUNGS.items() if name in wanted]
