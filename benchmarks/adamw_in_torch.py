"""The time of AdamW in Torch, bitsandbytes and torchao, for `benchmarks.optimizer_step`, in a process of its own.

The process is over before JAX takes the GPU's memory.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

OPTIONS = {"lr": 1e-3, "weight_decay": 1e-4}  # as in `benchmarks.adamw_by_hand`


def torch_optimizers() -> dict[str, tuple[str, Callable[[Any], Any]]]:
    """By name, the dtype of the parameters, and what makes the optimizer from them."""

    def fused(params):
        import torch

        return torch.optim.AdamW(params, fused=True, **OPTIONS)

    def bitsandbytes(params):
        import bitsandbytes

        return bitsandbytes.optim.AdamW8bit(params, **OPTIONS)

    def torchao(params):
        import torchao.optim

        return torchao.optim.AdamW8bit(params, **OPTIONS)

    return {
        "torch.optim.AdamW(fused=True), f32": ("float32", fused),
        "bitsandbytes.optim.AdamW8bit, bf16": ("bfloat16", bitsandbytes),
        "torchao.optim.AdamW8bit, bf16": ("bfloat16", torchao),
    }


def torch_times(work: dict[str, Any]) -> list[dict[str, Any]]:
    """Times of Torch's optimizers on the GPU; none where Torch or its GPU is missing."""
    try:
        import torch
    except ImportError:
        return []
    if not torch.cuda.is_available():
        return []
    rows = []
    for name, (dtype, make) in torch_optimizers().items():
        try:
            rows.append({"what": name, "torch": torch.__version__, **torch_time(work, getattr(torch, dtype), make)})
        except Exception as error:  # of any type: a package that is missing, or not made for this GPU
            rows.append({"what": name, "left out": f"{type(error).__name__}: {error}"})
    return rows


def torch_time(work: dict[str, Any], dtype: Any, make: Callable[[Any], Any]) -> dict[str, float]:
    """Milliseconds of one optimizer's step: of many behind one another, by the GPU's clock, and of a single one."""
    import torch

    normal = lambda shape, size: (size * torch.randn(shape, device="cuda")).to(dtype)
    params = [torch.nn.Parameter(normal(shape, 0.02)) for shape in work["shapes"]]
    for p in params:
        p.grad = normal(p.shape, 1e-3)
    optimizer = make(params)
    for _ in range(5):
        optimizer.step()
    many, single = [], []
    for _ in range(work["turns"]):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(work["calls"]):
            optimizer.step()
        end.record()
        torch.cuda.synchronize()
        many.append(begin.elapsed_time(end) / work["calls"])
        start = time.perf_counter()
        optimizer.step()
        torch.cuda.synchronize()
        single.append(1e3 * (time.perf_counter() - start))
    return {"ms": statistics.median(many), "single ms": statistics.median(single)}
