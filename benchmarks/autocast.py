"""Measure what `mpx.autocast` costs beside the same model cast by hand, or read it off programs for another device.

    PYTHONPATH=. python -m benchmarks.autocast --target h200
    PYTHONPATH=. python -m benchmarks.on_gpu --parts autocast --out found

With a target nothing runs, and the device need not be there: see `benchmarks.autocast_programs`, for transformers, a
ConvNet, an LSTM and a mixture of experts. What is measured is one transformer in the way of GPT-2, in the forms of
`benchmarks.autocast_forms`. Parameters have the same dtype on both sides.

1. Steps: the loss and its gradient by `mpx.value_and_grad`, with `update` also AdamW. Each form of autocast is run in
   turn, A B B A, with the form by hand that the table names: with the same policy of `jax.checkpoint` around the whole
   loss, or with none on both sides. Target: with `checkpoint="dots"` or `FAST_RULES` at most 1.03 of the time by hand.
2. Residuals: the bytes that the backward pass gets from the forward pass, 6 layers: the distinct arrays in the function
   that `jax.vjp` returns, traced and not run. Counted are the casts that are made of weights; parameters and tokens
   that are handed on as they are stand in a column of their own. XLA may keep less: it fuses a widening into what uses
   it. By hand the logits of attention are float32, under autocast bfloat16. Target: with `checkpoint="dots"` no more
   than by hand with the same policy.
3. Tracing: `jax.jit(gradient).trace(...)` and `.lower()` for 24 layers, unrolled, of a small model, without and with
   autocast, in turn; new functions and empty caches each time. Target: at most 2 times as long, both together.

What is lost in accuracy is measured by `benchmarks.autocast_accuracy`. A form that the backend cannot run is left out
of part 1. A GPU multiplies float32 matrices in TF32; a CPU has few products of bfloat16 numbers or none, so that times
there say little about a GPU.
"""

import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import typer

import mpx
from benchmarks import autocast_programs
from benchmarks.autocast_forms import DTYPES, FORMS, SIZES, Loss, make_form, make_params, make_tokens, shapes
from benchmarks.ladder import JsonOption
from benchmarks.models_by_hand import MODELS, Size
from benchmarks.reading import compiled_figures
from benchmarks.report import Sheet, make_console, ratio_cells, spread_cell, target_cell, write_json
from benchmarks.timing import own, ratio_with_spread, timed_ratio

CALLS = {"cpu": 1, "gpu": 8}  # steps in a turn
RESIDUAL_LAYERS = 6
TRACED_TURNS = 4
TRACED_SIZE = Size(width=64, layers=24, heads=2, context=32, vocabulary=128, batch=2)
TRACED_FORMS = {  # what is traced, and the model without autocast beside it
    "autocast": "f32",
    "autocast, FAST_RULES": "f32",
    "autocast, gradients f32": "f32",
    "autocast, dots": "f32, dots",
}
LEARNING_RATE = 1e-3
STEP_TARGET, RESIDUAL_TARGET, TRACING_TARGET = 1.03, 1.0, 2.0


# ---- 1. Steps -------------------------------------------------------------------------------------------------------


class State(NamedTuple):
    """What goes from step to step.

    Attributes:
        params: the parameters.
        rest: the state of the optimizer, or the gradients of the last step.
        loss: the last loss.
    """

    params: Any
    rest: Any
    loss: jax.Array


def make_optimizer(dtype: Any) -> optax.GradientTransformation:
    """Return AdamW, with float32 masters of bfloat16 parameters."""
    rule = optax.adamw(LEARNING_RATE)
    return rule if dtype == jnp.float32 else mpx.master_weights(rule)


def make_step(loss: Loss, tx: optax.GradientTransformation | None) -> Callable[[State, jax.Array], State]:
    """Return the loss and its gradient as a step, and without a transformation no more than these."""

    def step(state: State, tokens: jax.Array) -> State:
        value, grads = mpx.value_and_grad(loss)(state.params, tokens)
        if tx is None:
            return State(state.params, grads, value)
        updates, opt_state = tx.update(grads, state.rest, state.params)
        return State(optax.apply_updates(state.params, updates), opt_state, value)

    return step


def make_start(size: Size, dtype: Any, tx: optax.GradientTransformation | None) -> State:
    """Return the state before the first step."""
    params = make_params(size, dtype)
    rest = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params) if tx is None else tx.init(params)
    return State(params, rest, jnp.float32(0))


def measure_steps(
    size: str, params: str, update: bool, starts: int, turns: int, names: Iterable[str] = FORMS
) -> list[dict[str, Any]]:
    """Return times of forms beside those by hand.

    Args:
        size: the name of the size of the model.
        params: the name of the dtype of its parameters.
        update: whether a step has an AdamW update too.
        starts: fresh states of each step.
        turns: timed turns from each.
        names: of the forms.
    """
    chosen, dtype = SIZES[size], DTYPES[params]
    tx = make_optimizer(dtype) if update else None
    start, tokens = make_start(chosen, dtype, tx), make_tokens(chosen)
    calls = CALLS.get(jax.default_backend(), CALLS["gpu"])

    @functools.cache
    def compiled(name: str) -> Callable:
        step = make_step(make_form(name, chosen), tx)
        return jax.jit(step, donate_argnums=0).lower(start, tokens).compile()

    rows = []
    for name in names:
        form = FORMS[name]
        if form.beside is None:
            continue
        row: dict[str, Any] = {"form": name, "beside": form.beside, "size": size, "params": params}
        try:
            steps = compiled(form.beside), compiled(name)
            row |= timed_ratio(steps, lambda: (own(start), own(start)), tokens, starts, turns, calls)
        except jax.errors.JaxRuntimeError as error:
            rows.append(row | {"left out": str(error).splitlines()[0]})  # what a backend cannot do is a result too
            continue
        row |= {"program mpx": compiled_figures(steps[1]), "program by hand": compiled_figures(steps[0])}
        row |= {"target": STEP_TARGET, "met": row["ratio"] <= STEP_TARGET} if form.has_step_target else {}
        rows.append(row)
    return rows


# ---- 2. Residuals ---------------------------------------------------------------------------------------------------


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


def measure_residuals(size_name: str, params_name: str) -> list[dict[str, Any]]:
    """Return what all forms keep for the backward pass; nothing is run."""
    size = SIZES[size_name]._replace(layers=RESIDUAL_LAYERS)
    params, tokens = shapes(size, DTYPES[params_name])
    found = {name: residual_bytes(make_form(name, size), params, tokens) for name in FORMS}
    rows = []
    for name, form in FORMS.items():
        row: dict[str, Any] = {"form": name, "params": params_name}
        row |= dict(zip(("bytes", "bytes handed on"), found[name], strict=True))
        if form.beside is not None:
            row |= {"beside": form.beside, "ratio": found[name][0] / found[form.beside][0]}
        if form.has_residual_target:
            row |= {"target": RESIDUAL_TARGET, "met": row["ratio"] <= RESIDUAL_TARGET}
        rows.append(row)
    return rows


# ---- 3. Tracing -----------------------------------------------------------------------------------------------------


def trace_seconds(name: str, size: Size, params: Any, tokens: Any) -> tuple[float, float]:
    """Return the seconds to trace a form's gradient, and to lower it, with nothing remembered from before."""
    gradient = jax.jit(mpx.value_and_grad(make_form(name, size)))
    jax.clear_caches()
    gc.collect()
    start = time.perf_counter()
    traced = gradient.trace(params, tokens)
    middle = time.perf_counter()
    traced.lower()
    return middle - start, time.perf_counter() - middle


def measure_tracing(
    params_name: str = "f32", turns: int = TRACED_TURNS, size: Size = TRACED_SIZE
) -> list[dict[str, Any]]:
    """Return times of tracing and lowering with autocast and without, in turn."""
    params, tokens = shapes(size, DTYPES[params_name])
    rows = []
    for name, beside in TRACED_FORMS.items():
        times: dict[str, list[tuple[float, float]]] = {beside: [], name: []}
        for turn in range(-1, turns):
            for side in (beside, name) if turn % 2 else (name, beside):
                seconds = trace_seconds(side, size, params, tokens)
                if turn >= 0:
                    times[side].append(seconds)
        rows.append({"form": name, "beside": beside, "layers": size.layers})
        rows[-1] |= compare_tracing(times[name], times[beside])
    return rows


def compare_tracing(ours: list[tuple[float, float]], plain: list[tuple[float, float]]) -> dict[str, Any]:
    """Return medians of tracing, of lowering and of both, and their ratios."""
    parts: dict[str, Callable] = {"trace": lambda pair: pair[0], "lower": lambda pair: pair[1], "both": sum}
    row: dict[str, Any] = {}
    for what, part in parts.items():
        a, b = list(map(part, ours)), list(map(part, plain))
        low, ratio, high = ratio_with_spread(a, b)
        row[what] = {
            "s": statistics.median(a),
            "beside s": statistics.median(b),
            "ratio": ratio,
            "ratio 95%": [low, high],
        }
    return row | {"target": TRACING_TARGET, "met": row["both"]["ratio"] <= TRACING_TARGET}


# ---- Printing -------------------------------------------------------------------------------------------------------


def steps_table(title: str, rows: list[dict[str, Any]]) -> Sheet:
    """Return the table of steps."""
    cells = lambda row: {"note": f"left out: {row['left out']}"} if "left out" in row else ratio_cells(row)
    return Sheet(title, [{"form": row["form"], "beside": row["beside"]} | cells(row) for row in rows])


def residuals_table(title: str, rows: list[dict[str, Any]]) -> Sheet:
    """Return the table of bytes that are kept for the backward pass."""
    mb = lambda row, key: f"{row[key] / 1e6:.2f}"
    cells = [
        {
            "form": row["form"],
            "parameters": row["params"],
            "MB": mb(row, "bytes"),
            "parameters handed on, MB": mb(row, "bytes handed on"),
            "beside": row.get("beside", ""),
            "ratio": f"{row['ratio']:.3f}" if "ratio" in row else "",
            "target": target_cell(row),
        }
        for row in rows
    ]
    return Sheet(title, cells)


def tracing_table(title: str, rows: list[dict[str, Any]]) -> Sheet:
    """Return the table of tracing and lowering."""
    cells = [
        {
            "form": row["form"],
            "beside": row["beside"],
            "what": what,
            "s": f"{row[what]['s']:.3f}",
            "beside, s": f"{row[what]['beside s']:.3f}",
            "ratio": f"{row[what]['ratio']:.2f}",
            "95%": spread_cell(row[what]["ratio 95%"]),
            "target": target_cell(row) if what == "both" else "",
        }
        for row in rows
        for what in ("trace", "lower", "both")
    ]
    return Sheet(title, cells)


# ---- The command ----------------------------------------------------------------------------------------------------

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    target: Annotated[str, typer.Option(help="The device to compile for: a100, h100, h200, b200.")] = "h200",
    models: Annotated[str, typer.Option(help="Separated by commas; or a part of a name.")] = "",
    json_path: JsonOption = None,
) -> None:
    """Read the programs, print the tables as Markdown and, if asked, write the numbers."""
    console = make_console()
    chosen = [name for name in MODELS if any(part in name for part in models.split(","))]

    def keep(rows: list[Any]) -> None:
        write_json(json_path, {"programs": rows})

    with console.status("Compiling ..."):
        rows = autocast_programs.read_models(chosen, target, keep)
    print("\n\n".join(sheet.markdown() for sheet in autocast_programs.sheets(rows)))


if __name__ == "__main__":
    app()
