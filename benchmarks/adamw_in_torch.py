"""Time AdamW in Torch, bitsandbytes and torchao on a GPU, on the tensors of `benchmarks.optimizer_step`.

It runs in a process of its own, which is over before JAX takes the GPU's memory.
"""

import functools
import importlib
import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.report import Row

OPTIONS = {"lr": 1e-3, "weight_decay": 1e-4}  # as in `benchmarks.adamw_by_hand`
CALLS = 16  # steps in a turn
OPTIMIZERS = {  # the dtype of the parameters, the module, the class and its own options
    "torch.optim.AdamW(fused=True), f32": ("float32", "torch.optim", "AdamW", {"fused": True}),
    "bitsandbytes.optim.AdamW8bit, bf16": ("bfloat16", "bitsandbytes.optim", "AdamW8bit", {}),
    "torchao.optim.AdamW8bit, bf16": ("bfloat16", "torchao.optim", "AdamW8bit", {}),
}


def measure(title: str, shapes: list[list[int]], turns: int) -> list[Row]:
    """Return the times of Torch's optimizers; a package that is missing, or not made for this GPU, is named."""
    import torch

    if not torch.cuda.is_available():
        return [{"failed": "PyTorch finds no GPU"}]
    rows = []
    for name, (dtype, module, kind, options) in OPTIMIZERS.items():
        row = {"title": title, "recipe": name, "torch": torch.__version__}
        try:
            make = functools.partial(getattr(importlib.import_module(module), kind), **OPTIONS, **options)
            rows.append(row | {"ms": milliseconds(shapes, turns, getattr(torch, dtype), make)})
        except Exception as error:
            rows.append(row | {"left out": f"{type(error).__name__}: {error}"})
    return rows


def milliseconds(shapes: list[list[int]], turns: int, dtype: Any, make: Callable[[Any], Any]) -> float:
    """Return the milliseconds of one optimizer's step, of many behind one another, by the GPU's clock."""
    import torch

    normal = lambda shape, size: (size * torch.randn(shape, device="cuda")).to(dtype)
    params = [torch.nn.Parameter(normal(shape, 0.02)) for shape in shapes]
    for p in params:
        p.grad = normal(p.shape, 1e-3)
    optimizer, times = make(params), []
    for turn in range(-2, turns):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(CALLS):
            optimizer.step()
        end.record()
        torch.cuda.synchronize()
        if turn >= 0:
            times.append(begin.elapsed_time(end) / CALLS)
    return statistics.median(times)
