"""Measure what `mpx.autocast` costs beside the same transformer cast by hand, in the forms of `autocast_forms`.

    PYTHONPATH=. python -m benchmarks.on_gpu --parts autocast --out found

Parameters have the same dtype on both sides.

1. Steps: the loss and its gradient by `mpx.value_and_grad`. Each form of autocast runs in turn, A B B A, with the form
   by hand that the table names: with the same policy of `jax.checkpoint` around the whole loss, or with none on both
   sides. Target: with `checkpoint="dots"` at most 1.03 of the time by hand.
2. Residuals: the bytes that the backward pass gets from the forward pass, 6 layers: the distinct arrays in the
   function that `jax.vjp` returns, traced and not run. Casts of weights count; parameters and tokens that are handed on
   unchanged stand in a column of their own. XLA may keep less: it fuses a widening into what uses it. By hand the
   logits of attention are float32, under autocast bfloat16. Target: with `checkpoint="dots"` no more than by hand with
   the same policy.
3. Tracing: `jax.jit(gradient).trace(...)` and `.lower()` for 24 layers, unrolled, of a small model, without and with
   autocast, in turn; new functions and empty caches each time. Target: at most 2 times as long, both together.

What is lost in accuracy is measured by `benchmarks.autocast_accuracy`. A form that the backend cannot run is left out
of part 1. A GPU multiplies float32 matrices in TF32; a CPU has few products of bfloat16 numbers or none, so that times
there say little about a GPU.
"""

import gc
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

import mpx
from benchmarks.autocast_forms import (
    DTYPES,
    FORMS,
    HAND,
    SIZES,
    Loss,
    Size,
    make_form,
    make_params,
    make_tokens,
    shapes,
)
from benchmarks.optimizer_step import compile_steps
from benchmarks.report import Row, Sheet, judged
from benchmarks.timing import COLUMNS, compare, own, ratio

GPU_CALLS = 8  # steps in a turn on a GPU
RESIDUAL_LAYERS = 6
TRACED_TURNS = 4
TRACED_SIZE = Size(width=64, layers=24, heads=2, context=32, vocabulary=128, batch=2)
TRACED_FORMS = {  # what is traced, and the model without autocast beside it
    "autocast": "f32",
    "autocast, gradients f32": "f32",
    "autocast, dots": "f32, dots",
}
STEP_TARGETS = ("autocast, dots",)  # the forms that are judged
RESIDUAL_TARGETS = ("autocast, dots",)
RESIDUAL_TARGET, TRACING_TARGET = 1.0, 2.0


# --- Steps. ---
def measure_steps(form: str, size: str, params: str, starts: int, turns: int) -> Row:
    """Return the time of a form beside the form by hand; all three are names."""
    beside = FORMS[form].beside or HAND
    weights, tokens = make_params(SIZES[size], DTYPES[params]), make_tokens(SIZES[size])
    zeros = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), weights)
    state = weights, (jnp.float32(0), zeros)  # the parameters, and the last loss and gradients
    row: Row = {"form": form, "beside": beside, "size": size, "params": params}

    def step_of(name: str) -> Any:
        gradient = mpx.value_and_grad(make_form(name, SIZES[size]))
        return lambda state, tokens: (state[0], gradient(state[0], tokens))

    try:
        steps = compile_steps([step_of(name) for name in (beside, form)], (state, state), tokens)
        make_states = lambda: (own(state), own(state))
        options = {"starts": starts, "turns": turns, "gpu_calls": GPU_CALLS, "judge": form in STEP_TARGETS}
        return row | compare(steps, make_states, tokens, **options)
    except jax.errors.JaxRuntimeError as error:
        return row | {"left out": str(error).splitlines()[0]}  # what a backend cannot do is a result too


# --- Residuals. ---
def residual_bytes(loss: Loss, params: Any, tokens: Any) -> tuple[int, int]:
    """Return the bytes that `jax.vjp` keeps for the backward pass: made on the way, and handed on as they came.

    An array is known by its tracer: one that is kept twice counts once.
    """
    found: list[int] = []

    def trace(params: Any, tokens: jax.Array) -> None:
        _, pullback = jax.vjp(lambda params: loss(params, tokens), params)
        given = {id(x) for x in jax.tree.leaves((params, tokens))}
        kept = {id(x): x.size * x.dtype.itemsize for x in jax.tree.leaves(pullback) if hasattr(x, "dtype")}
        found.append(sum(size for which, size in kept.items() if which not in given))
        found.append(sum(size for which, size in kept.items() if which in given))

    jax.eval_shape(trace, params, tokens)
    return found[0], found[1]


def measure_residuals(size: str, params: str) -> list[Row]:
    """Return what all forms keep for the backward pass; nothing is run."""
    chosen = SIZES[size]._replace(layers=RESIDUAL_LAYERS)
    found = {name: residual_bytes(make_form(name, chosen), *shapes(chosen, DTYPES[params])) for name in FORMS}
    rows = []
    for name, form in FORMS.items():
        made, handed_on = found[name]
        row: Row = {"form": name, "params": params, "MB": made / 1e6, "handed on, MB": handed_on / 1e6}
        if form.beside is not None:
            row |= {"beside": form.beside, "ratio": made / found[form.beside][0]}
        if name in RESIDUAL_TARGETS:
            row["target"] = judged(row["ratio"], most=RESIDUAL_TARGET)
        rows.append(row)
    return rows


# --- Tracing. ---
def trace_seconds(name: str, size: Size, params: Any, tokens: Any) -> float:
    """Return the seconds to trace and lower a form's gradient, with nothing remembered from before."""
    gradient = jax.jit(mpx.value_and_grad(make_form(name, size)))
    jax.clear_caches()
    gc.collect()
    start = time.perf_counter()
    gradient.trace(params, tokens).lower()
    return time.perf_counter() - start


def measure_tracing(turns: int = TRACED_TURNS, size: Size = TRACED_SIZE) -> list[Row]:
    """Return times of tracing and lowering with autocast and without, in turn."""
    given = shapes(size, jnp.float32)
    rows: list[Row] = []
    for name, beside in TRACED_FORMS.items():
        times: dict[str, list[float]] = {beside: [], name: []}
        for turn in range(-1, turns):
            for side in (beside, name) if turn % 2 else (name, beside):
                seconds = trace_seconds(side, size, *given)
                if turn >= 0:
                    times[side].append(seconds)
        medians = {"s": statistics.median(times[name]), "beside s": statistics.median(times[beside])}
        row = {"form": name, "beside": beside} | medians | ratio(times[name], times[beside])
        rows.append(row | {"target": judged(row["ratio"], most=TRACING_TARGET)})
    return rows


# --- Tables. ---
RESIDUALS = {
    "form": "{form}",
    "parameters": "{params}",
    "MB": "{MB:.2f}",
    "parameters handed on, MB": "{handed on, MB:.2f}",
    "beside": "{beside}",
    "ratio": "{ratio:.3f}",
    "target": "{target}",
}
TRACING = {
    "form": "{form}",
    "beside": "{beside}",
    "s": "{s:.3f}",
    "beside, s": "{beside s:.3f}",
    "ratio": "{ratio:.2f}",
    "95%": "{low:.3f} to {high:.3f}",
    "target": "{target}",
}


def steps_sheets(rows: list[Row]) -> list[Sheet]:
    """Return the table of each dtype of parameters."""
    columns = {"form": "{form}", "beside": "{beside}"} | COLUMNS
    kinds = dict.fromkeys((row["size"], row["params"]) for row in rows)
    title = "autocast, loss and gradient: {}, parameters {}"
    of_kind = lambda kind: [row for row in rows if (row["size"], row["params"]) == kind]
    return [Sheet(title.format(*kind), of_kind(kind), columns) for kind in kinds]
