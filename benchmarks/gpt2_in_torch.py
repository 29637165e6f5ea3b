"""GPT-2 in PyTorch, and a worker that answers the jobs of `benchmarks.torch_gpt2` with it, one job in a process.

The model is that of the example, module by module and name by name, so that its weights can be taken over: learned
positions, a norm in front of each part of a block and at the end, biases, GELU by its tanh formula, one table for
embedding and head, the same initial scales. Rows that only pad the table are cut off the logits, which is a view.

It is trained as PyTorch's users do: float32 parameters, `torch.autocast` around the loss, `torch.compile` of the whole
loss, clipping, AdamW with two groups of parameters, of which matrices decay. The host waits for nothing in a step.
"""

import contextlib
import itertools
import math
import resource
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.token_batches import token_batches
from benchmarks.workers import Result, serve, time_rounds

INITIAL_SCALE = 0.02
DISTINCT_BATCHES = 8
CLIP_NORM = 1.0
TRAINING = {"steps": 1_000, "learning_rate": 6e-4}


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, depth: int, heads: int, flash: bool) -> None:
        super().__init__()
        self.heads, self.flash = heads, flash
        self.query_key_value = _linear(width, 3 * width)
        self.out = _linear(width, width, 1 / (2 * depth) ** 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, T, C)
        """Mixes each position with those before it."""
        batch, length, width = x.shape
        joined = self.query_key_value(x).view(batch, length, 3, self.heads, -1)
        query, key, value = joined.permute(2, 0, 3, 1, 4)  # (B, H, T, D)
        if self.flash:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            logits = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
            later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            mixed = logits.masked_fill(later, -torch.inf).softmax(-1) @ value
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and a two-layer perceptron, each after a norm and added to the residual stream."""

    def __init__(self, width: int, depth: int, heads: int, flash: bool) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, eps=1e-5)
        self.attention = Attention(width, depth, heads, flash)
        self.mlp_norm = nn.LayerNorm(width, eps=1e-5)
        self.expand = _linear(width, 4 * width)
        self.contract = _linear(4 * width, width, 1 / (2 * depth) ** 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, T, C)
        """The residual stream after this block."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.contract(F.gelu(self.expand(self.mlp_norm(x)), approximate="tanh"))


class GPT(nn.Module):
    """Logits of the next token, for each token of each sequence."""

    def __init__(
        self, *, width: int, depth: int, heads: int, context: int, vocabulary: int, rows: int, flash: bool
    ) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.token_embedding = nn.Parameter(INITIAL_SCALE * torch.randn(rows, width))
        self.position_embedding = nn.Parameter(INITIAL_SCALE * torch.randn(context, width))
        self.blocks = nn.ModuleList(Block(width, depth, heads, flash) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=1e-5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # (B, T) integers
        """The logits of each following token; (B, T, vocabulary)."""
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
    """The mean cross-entropy of tokens (B, T + 1); autocast computes it in float32."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


# --- Training. ---
def learning_rate(
    update: int, *, steps: int, learning_rate: float, warmup: float = 0.1, final_learning_rate: float = 0.1
) -> float:
    """That of the example after so many updates: a line up to its peak, then a cosine down to a part of it."""
    rising = int(warmup * steps)
    if update < rising:
        return learning_rate * update / rising
    done = min(1.0, (update - rising) / (steps - rising))
    part = (1 - final_learning_rate) * (1 + math.cos(math.pi * done)) / 2 + final_learning_rate
    return learning_rate * part


class Trainer:
    """A model and its optimizer, made ready for the steps of a job."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self.device.type == "cpu":
            torch.set_num_threads(1)  # the model is tiny there, and threads would only wait for one another
        torch.set_float32_matmul_precision(job["matmul_precision"])
        torch.manual_seed(0)
        config = job["config"]
        rows = -(-config["vocabulary"] // job["vocabulary_multiple"]) * job["vocabulary_multiple"]
        self.model = GPT(**config, rows=rows, flash=job["flash"]).to(self.device)
        if job.get("weights"):
            self.model.load_state_dict({name: torch.from_numpy(x) for name, x in np.load(job["weights"]).items()})
        self.schedule = job.get("hyperparameters", TRAINING)
        self.params = list(self.model.parameters())
        groups = [
            {"params": [p for p in self.params if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in self.params if p.dim() < 2], "weight_decay": 0.0},
        ]
        fused = {"fused": True} if job["fused"] else {}
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8, **fused)
        self.loss = torch.compile(next_token_loss) if job["compile"] else next_token_loss
        self.autocast = job["autocast"]
        self.updates = 0

    def gradients(self, microbatches: torch.Tensor) -> torch.Tensor:
        """Adds the mean gradient over microbatches (A, B, T + 1) to that of the parameters; returns the mean loss."""
        mean = torch.zeros((), device=self.device)
        for tokens in microbatches:
            with torch.autocast(self.device.type, torch.bfloat16) if self.autocast else contextlib.nullcontext():
                loss = self.loss(self.model, tokens)
            (loss / len(microbatches)).backward()
            mean += loss.detach() / len(microbatches)
        return mean

    def step(self, microbatches: torch.Tensor) -> torch.Tensor:
        """One update; returns the loss before it."""
        loss = self.gradients(microbatches)
        nn.utils.clip_grad_norm_(self.params, CLIP_NORM)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.updates, **self.schedule)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.updates += 1
        return loss

    def batches(self, job: dict[str, Any], count: int, microbatches: int) -> list[torch.Tensor]:
        """The same batches of text as for JAX, on the device."""
        config = job["config"]
        shape = (microbatches, job["batch_size"], config["context"] + 1)
        batches = token_batches(config["vocabulary"], shape, count=count)
        return [torch.from_numpy(batch).to(self.device, torch.int64) for batch in batches]

    def wait(self) -> None:
        """Until all is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


# --- Jobs. ---
def answer(job: dict[str, Any]) -> Result:
    """Does one job."""
    return JOBS[job["kind"]](job)


def measure_step(job: dict[str, Any]) -> Result:
    """Time, memory and last loss of a training step, from random weights, on text."""
    trainer = Trainer(job)
    batches = trainer.batches(job, DISTINCT_BATCHES, job["microbatches"])
    in_turn, loss = itertools.cycle(batches), None

    def run(steps: int) -> None:
        nonlocal loss
        for _ in range(steps):
            loss = trainer.step(next(in_turn))
        trainer.wait()

    run(1)  # compiles
    if on_gpu := trainer.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()  # the compiler tries its kernels on arrays of its own
    row = time_rounds(run, steps=job["steps"], rounds=job["rounds"])
    # A CPU has no counter but that of the whole process, whose libraries are a part of it.
    peak = torch.cuda.max_memory_allocated() if on_gpu else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    row |= {"tokens": job["microbatches"] * job["batch_size"] * job["config"]["context"], "loss": float(loss)}
    row |= {"peak bytes" if on_gpu else "process bytes": peak, "parameters": sum(p.numel() for p in trainer.params)}
    return row | {"torch": torch.__version__}


def measure_curve(job: dict[str, Any]) -> Result:
    """The losses of a whole short training, from the weights in a file."""
    trainer = Trainer(job)
    losses = [trainer.step(batch) for batch in trainer.batches(job, job["hyperparameters"]["steps"], 1)]
    return {"losses": [float(loss) for loss in losses], "torch": torch.__version__}


JOBS: dict[str, Callable[[dict[str, Any]], Result]] = {"step": measure_step, "curve": measure_curve}

if __name__ == "__main__":
    serve(answer)
