"""The ladder as data: what each rung adds to the one before it, for JAX and for PyTorch, and what all of them share."""

import dataclasses
from typing import Any, Literal, Self


@dataclasses.dataclass(frozen=True)
class AnyRung:
    """One way to train GPT-2. All fields but the first three are settings, and a rung changes one of them.

    Attributes:
        name: on the command line.
        label: in the table: what it adds.
        after: the rung that it is compared with.
        vocabulary_multiple: the embedding has rows up to a multiple of it.
        accumulate: whether a step has as many microbatches as its budget of tokens allows, or one.
    """

    name: str
    label: str
    after: str | None = None
    vocabulary_multiple: int = 1
    accumulate: bool = False

    def then(self, name: str, label: str, **change: Any) -> Self:
        """The next rung."""
        return dataclasses.replace(self, name=name, label=label, after=self.name, **change)

    def settings(self) -> dict[str, Any]:
        """What a worker must know."""
        return {k: v for k, v in dataclasses.asdict(self).items() if k not in ("name", "label", "after")}


@dataclasses.dataclass(frozen=True)
class Rung(AnyRung):
    """A rung in JAX.

    Attributes:
        recipe: of the example.
        attention: `"cudnn"` for flash attention.
        loss_chunks: into how many parts the loss cuts the positions.
        rules: of `mpx.autocast`.
        layers: of the model.
        checkpoint: of the model.
    """

    recipe: str = "f32"
    attention: Literal["xla", "cudnn"] = "xla"
    loss_chunks: int = 1
    rules: Literal["default", "fast"] = "default"
    layers: Literal["unrolled", "stacked", "scanned"] = "unrolled"
    checkpoint: Literal["none", "dots", "thin", "full"] = "none"


F32 = Rung("f32", "float32")
TF32 = F32.then("tf32", "TF32", recipe="tf32")
BF16 = TF32.then("bf16", "bf16 autocast", recipe="bf16-autocast")
FLASH = BF16.then("flash", "flash attention", attention="cudnn")
PADDED = FLASH.then("padded", "padded vocabulary", vocabulary_multiple=128)
SPLIT = PADDED.then("split", "bf16 parameters, split masters", recipe="bf16-split")
EIGHT_BIT = SPLIT.then("8bit", "8-bit moments, one kernel a leaf", recipe="bf16-split-8bit")
STACKED = EIGHT_BIT.then("stacked", "weights of all layers stacked", layers="stacked")
# From here on each pays with time for memory.
CHUNKED = STACKED.then("chunked", "loss in 4 chunks", loss_chunks=4)
DOTS = CHUNKED.then("dots", "dots kept, the rest again", checkpoint="dots")
THIN = DOTS.then("thin", "the widest again, too", checkpoint="thin")
ACCUMULATE = STACKED.then("accumulate", "accumulation", accumulate=True)
LADDER = (F32, TF32, BF16, FLASH, PADDED, SPLIT, EIGHT_BIT, STACKED, CHUNKED, DOTS, THIN, ACCUMULATE)

# To try out, each of them one change to a rung.
EXTRAS = (
    SPLIT.then("fp8", "linear layers in FP8", recipe="fp8"),
    STACKED.then("fast-rules", "FAST_RULES", rules="fast"),
    STACKED.then("autocast-f32", "f32 parameters and moments", recipe="bf16-autocast"),
    STACKED.then("scanned", "scanned layers", layers="scanned"),
    DOTS.then("scanned-dots", "scanned layers", layers="scanned"),
    THIN.then("input-only", "only the input of a block kept", checkpoint="full"),
)
RUNGS = {rung.name: rung for rung in (*LADDER, *EXTRAS)}

# At a fixed batch, with one program in every precision: only the recipe differs.
FIXED = dataclasses.replace(F32, vocabulary_multiple=128)


@dataclasses.dataclass(frozen=True)
class TorchRung(AnyRung):
    """A rung in PyTorch. Parameters, moments and gradients are float32, as `torch.amp` has them.

    Attributes:
        matmul_precision: of `torch.set_float32_matmul_precision`.
        autocast: whether products run in bfloat16.
        flash: whether attention is `scaled_dot_product_attention`, or written as in GPT-2.
        fused: whether AdamW is one kernel.
    """

    matmul_precision: Literal["highest", "high"] = "highest"
    autocast: bool = False
    flash: bool = False
    fused: bool = False


TORCH_F32 = TorchRung("f32", "float32")
TORCH_TF32 = TORCH_F32.then("tf32", "TF32", matmul_precision="high")
TORCH_BF16 = TORCH_TF32.then("bf16", "bf16 autocast", autocast=True)
TORCH_FLASH = TORCH_BF16.then("flash", "scaled_dot_product_attention", flash=True)
TORCH_PADDED = TORCH_FLASH.then("padded", "padded vocabulary", vocabulary_multiple=128)
TORCH_FUSED = TORCH_PADDED.then("fused", "fused AdamW", fused=True)
TORCH_ACCUMULATE = TORCH_FUSED.then("accumulate", "accumulation", accumulate=True)
TORCH_LADDER = (TORCH_F32, TORCH_TF32, TORCH_BF16, TORCH_FLASH, TORCH_PADDED, TORCH_FUSED, TORCH_ACCUMULATE)
TORCH_RUNGS = {rung.name: rung for rung in TORCH_LADDER}

# What each rung of JAX is compared with. From `split` on PyTorch has nothing of the kind in itself, and is at its
# best: fused AdamW, and the same number of microbatches.
COUNTERPARTS = {name: name for name in ("f32", "tf32", "bf16", "flash", "padded", "accumulate")} | dict.fromkeys(
    ("split", "8bit", "stacked", "chunked", "dots", "thin", *(rung.name for rung in EXTRAS)), "fused"
)


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all rungs share.

    Attributes:
        preset: the size of the model.
        batch_size: sequences of a microbatch.
        steps: in a timed round.
        rounds: of them.
        token_budget: of a step with accumulation.
        timeout: seconds that a process may take.
        xla_flags: for the processes of JAX.
    """

    preset: str
    batch_size: int
    steps: int
    rounds: int
    token_budget: int
    timeout: float
    xla_flags: str = ""

    def microbatches(self, rung: AnyRung, context: int) -> int:
        """How many microbatches a step has."""
        return max(1, self.token_budget // (self.batch_size * context)) if rung.accumulate else 1

    def steps_of(self, microbatches: int) -> int:
        """Fewer steps of several microbatches take as long."""
        return max(2, self.steps // microbatches)


DEFAULTS = {
    "gpu": Setting("gpt2-124m", batch_size=16, steps=10, rounds=5, token_budget=524_288, timeout=300.0),
    "cpu": Setting("tiny", batch_size=4, steps=3, rounds=3, token_budget=1_024, timeout=300.0),
}


def choose_setting(backend: str, **given: Any) -> Setting:
    """The setting of a backend, with what was given on the command line."""
    default = DEFAULTS["gpu" if backend == "gpu" else "cpu"]
    return dataclasses.replace(default, **{name: value for name, value in given.items() if value is not None})


def choose_rungs(names: list[str] | None) -> list[Rung]:
    """The rungs of these names, in the order of the ladder; without names the whole ladder.

    Raises:
        ValueError: if there is no such rung; the message lists all.
    """
    if not names:
        return list(LADDER)
    wanted = [name for part in names for name in part.split(",") if name]
    unknown = [name for name in wanted if name not in RUNGS]
    if unknown:
        raise ValueError(f"no rung is called {', '.join(unknown)}; there are {', '.join(RUNGS)}.")
    return [rung for name, rung in RUNGS.items() if name in wanted]
