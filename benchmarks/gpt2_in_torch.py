"""Train GPT-2 with PyTorch for a few steps: the model and the step of
`benchmarks.gpt2_in_jax`, as PyTorch's users write them.

Parameters are float32, and the model runs under bfloat16 autocast. On a GPU
`torch.compile` compiles it, with its defaults. AdamW is the fused one.
"""

import itertools
import time
from collections.abc import Callable
from typing import Literal

try:
    import torch
except ImportError as error:
    raise ImportError(
        "`benchmarks.gpt2_in_torch` needs PyTorch: `pip install torch`."
    ) from error
import torch.nn.functional as F
from torch import nn

from benchmarks.gpt2_in_jax import (
    DISTINCT_BATCHES,
    TRAINING,
    time_rounds,
    token_batches,
)
from benchmarks.report import Row
from benchmarks.rungs import Setting
from examples.gpt.model import INITIAL_SCALE, PRESETS, Config


class Block(nn.Module):
    """Causal self-attention and a two-layer perceptron."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, self.heads = config.width, config.heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, T, C)
        """Return the residual stream after this block."""
        # Heads stand before the three parts, as in `examples.gpt.model`.
        joined = self.query_key_value(self.attention_norm(x))
        joined = joined.unflatten(-1, (self.heads, 3, -1))  # (B, T, H, 3, D)
        query, key, value = joined.transpose(1, 2).unbind(3)  # (B, H, T, D)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        hidden = F.gelu(self.expand(self.mlp_norm(x)), approximate="tanh")
        return x + self.contract(hidden)


class GPT(nn.Module):
    """A GPT-2: from tokens to their mean loss."""

    is_padding: torch.Tensor  # bool, for each row of the embedding

    def __init__(self, config: Config) -> None:
        super().__init__()
        rows, width = config.padded_vocabulary, config.width
        self.token_embedding = nn.Parameter(torch.empty(rows, width))
        self.position_embedding = nn.Parameter(torch.empty(config.context, width))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(width)
        is_padding = torch.arange(rows) >= config.vocabulary
        self.register_buffer("is_padding", is_padding, persistent=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=INITIAL_SCALE)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # (B, T + 1) int64
        """Return the mean cross-entropy of each next token, a float32 scalar."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = F.embedding(inputs, self.token_embedding)
        x = x + self.position_embedding[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.token_embedding)
        logits = logits.masked_fill(self.is_padding, -torch.inf)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_step(
    model: nn.Module, *, autocast: bool = True
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a training step of tokens (B, T + 1), which returns the loss before it."""
    device = next(model.parameters()).device.type
    groups = [
        {
            "params": [p for p in model.parameters() if (p.ndim == 2) == decays],
            "weight_decay": TRAINING.weight_decay * decays,
        }
        for decays in (True, False)
    ]
    optimizer = torch.optim.AdamW(
        groups, TRAINING.learning_rate, (TRAINING.b1, TRAINING.b2), fused=True
    )
    # What is measured ends within the warm-up.
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: done / (TRAINING.warmup * TRAINING.steps)
    )

    def step(tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            loss = model(tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), TRAINING.clip_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def measure_step(setting: Row, attention: Literal["default", "cudnn"]) -> Row:
    """Return time, memory and last loss of a training step, from random weights, on the
    tokens of `benchmarks.gpt2_in_jax`.

    Attention is by the kernel that PyTorch chooses, or by cuDNN's, which mpx uses.
    """
    chosen, config = Setting(**setting), PRESETS[setting["preset"]]
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    model = GPT(config).to(device)
    if on_gpu:
        model.compile()
    for other in ("flash", "mem_efficient", "math"):
        enable = getattr(torch.backends.cuda, f"enable_{other}_sdp")
        enable(attention == "default" or not on_gpu)
    shape = (chosen.batch_size, config.context + 1)
    batches = token_batches(config.vocabulary, shape, count=DISTINCT_BATCHES)
    in_turn = itertools.cycle(torch.from_numpy(batches).long().to(device))
    step, loss = make_step(model), 0.0

    def run(steps: int) -> None:
        nonlocal loss
        losses = [step(next(in_turn)) for _ in range(steps)]
        loss = float(losses[-1])  # waits for all that stands before it on the device

    start = time.perf_counter()
    run(1)
    seconds = time.perf_counter() - start
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    row = time_rounds(run, steps=chosen.steps_of(1), rounds=chosen.rounds)
    note = {} if on_gpu else {"note": "no GPU: not compiled, default attention"}
    return (
        row
        | note
        | {
            "tokens": chosen.batch_size * config.context,
            "loss": loss,
            "compile s": seconds,
            "peak bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
            "peak bytes before": 0,
        }
    )
