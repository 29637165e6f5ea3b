"""GPT-2 in PyTorch, trained for a few steps: what `benchmarks.on_gpu` compares GPT-2 in JAX with.

The model is the one in `examples.gpt`, module by module and name by name, so that it can take over its weights: learned
positions, a norm in front of each part of a block and at the end, biases, GELU by its tanh formula, one table for
embedding and head, the same initial scales. Rows that only pad the table are cut off the logits, which is a view.

It is trained as PyTorch's users do when they want speed: float32 parameters, `torch.autocast` around the loss,
`scaled_dot_product_attention`, `torch.compile` of the whole loss on a GPU, clipping, fused AdamW with two groups of
parameters, only matrices decay. The host waits for nothing in a step.
"""

import contextlib
import itertools
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.report import Row
from benchmarks.rungs import Setting
from benchmarks.workers import time_rounds, token_batches

INITIAL_SCALE = 0.02
DISTINCT_BATCHES = 8
CLIP_NORM = 1.0
ROWS_MULTIPLE = 128  # of the embedding
RATES = itertools.repeat(6e-4)  # a schedule takes no time of a GPU


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = _linear(width, 3 * width)
        self.out = _linear(width, width, 1 / (2 * depth) ** 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, T, C)
        """Mix each position with those before it."""
        batch, length, width = x.shape
        joined = self.query_key_value(x).view(batch, length, self.heads, -1)
        query, key, value = joined.transpose(1, 2).chunk(3, -1)  # (B, H, T, D)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and a two-layer perceptron, each after a norm and added to the residual stream."""

    def __init__(self, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, eps=1e-5)
        self.attention = Attention(width, depth, heads)
        self.mlp_norm = nn.LayerNorm(width, eps=1e-5)
        self.expand = _linear(width, 4 * width)
        self.contract = _linear(4 * width, width, 1 / (2 * depth) ** 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, T, C)
        """Return the residual stream after this block."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.contract(F.gelu(self.expand(self.mlp_norm(x)), approximate="tanh"))


class GPT(nn.Module):
    """Logits of the next token, for each token of each sequence."""

    def __init__(self, *, width: int, depth: int, heads: int, context: int, vocabulary: int, rows: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.token_embedding = nn.Parameter(INITIAL_SCALE * torch.randn(rows, width))
        self.position_embedding = nn.Parameter(INITIAL_SCALE * torch.randn(context, width))
        self.blocks = nn.ModuleList(Block(width, depth, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=1e-5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # (B, T) integers
        """Return the logits of each following token; (B, T, vocabulary)."""
        x = F.embedding(tokens, self.token_embedding) + self.position_embedding[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.token_embedding)[..., : self.vocabulary]


def _linear(inputs: int, outputs: int, gain: float = 1.0) -> nn.Linear:
    linear = nn.Linear(inputs, outputs)
    nn.init.normal_(linear.weight, std=gain * INITIAL_SCALE)
    nn.init.zeros_(linear.bias)
    return linear


def next_token_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of tokens (B, T + 1); autocast computes it in float32."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


# --- Training. ---
class Trainer:
    """A model and its optimizer, made ready for training steps."""

    def __init__(self, config: Row, *, autocast: bool = True, rates: Iterable[float] = RATES) -> None:
        """Make a model of random weights, whose products run in bfloat16 under autocast.

        `config` has its sizes: width, depth, heads, context and vocabulary. There is a learning rate for each step.
        """
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        on_gpu = self.device.type == "cuda"
        if not on_gpu:
            torch.set_num_threads(1)  # the model is tiny there, and threads would only wait for one another
        torch.manual_seed(0)
        rows = -(-config["vocabulary"] // ROWS_MULTIPLE) * ROWS_MULTIPLE
        self.model = GPT(**config, rows=rows).to(self.device)
        self.params = list(self.model.parameters())
        groups = [
            {"params": [p for p in self.params if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in self.params if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8, fused=True)
        self.loss = torch.compile(next_token_loss) if on_gpu else next_token_loss
        self.autocast, self.rates = autocast, iter(rates)

    def gradients(self, microbatches: torch.Tensor) -> torch.Tensor:
        """Add the mean gradient over microbatches (A, B, T + 1) to the parameters' gradients; return the mean loss."""
        mean = torch.zeros((), device=self.device)
        for tokens in microbatches:
            with torch.autocast(self.device.type, torch.bfloat16) if self.autocast else contextlib.nullcontext():
                loss = self.loss(self.model, tokens)
            (loss / len(microbatches)).backward()
            mean += loss.detach() / len(microbatches)
        return mean

    def step(self, microbatches: torch.Tensor) -> torch.Tensor:
        """Make one update; return the loss before it."""
        loss = self.gradients(microbatches)
        nn.utils.clip_grad_norm_(self.params, CLIP_NORM)
        rate = next(self.rates)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss


def measure_step(setting: Row, config: Row, accumulate: bool) -> Row:
    """Return time, memory and last loss of a training step, from random weights, on the tokens that JAX gets too."""
    shared, trainer = Setting(**setting), Trainer(config)
    microbatches = shared.microbatches(accumulate, config["context"])
    shape = (microbatches, shared.batch_size, config["context"] + 1)
    batches = token_batches(config["vocabulary"], shape, count=DISTINCT_BATCHES)
    in_turn = itertools.cycle([torch.from_numpy(batch).to(trainer.device, torch.int64) for batch in batches])
    on_gpu = trainer.device.type == "cuda"
    loss: Any = None

    def run(steps: int) -> None:
        nonlocal loss
        for _ in range(steps):
            loss = trainer.step(next(in_turn))
        if on_gpu:
            torch.cuda.synchronize()

    run(1)  # compiles
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()  # the compiler tries its kernels on arrays of its own
    row = time_rounds(run, steps=shared.steps_of(microbatches), rounds=shared.rounds)
    peak = {"peak GB": torch.cuda.max_memory_allocated() / 1e9, "peak is": ""} if on_gpu else {}
    row |= peak | {"tokens": microbatches * shared.batch_size * config["context"], "loss": float(loss)}
    return row | {"note": f"torch {torch.__version__}" + ("" if on_gpu else ", not compiled")}
