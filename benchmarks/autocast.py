"""Measure what `mpx.autocast` costs beside the same transformer cast by hand, in the
forms of `autocast_forms`.

    PYTHONPATH=. python -m benchmarks.on_gpu --parts autocast --out found

The loss and its gradient by `mpx.value_and_grad`; parameters have the same dtype on
both sides. Each form of autocast runs in turn, A B B A, with the form by hand that the
table names: with the same policy of `jax.checkpoint` around the whole loss, or with
none on both sides. Target: with `checkpoint="dots"` at most 1.03 of the time by hand. A
form that the backend cannot run is left out. A GPU multiplies float32 matrices in TF32;
a CPU has few products of bfloat16 numbers or none, so that times there say little about
a GPU.
"""

from typing import Any

import jax
import jax.numpy as jnp

import mpx
from benchmarks.autocast_forms import (
    DTYPES,
    FORMS,
    HAND,
    SIZES,
    make_form,
    make_params,
    make_tokens,
)
from benchmarks.optimizer_step import compile_steps
from benchmarks.report import Row, Sheet
from benchmarks.timing import COLUMNS, compare, own

GPU_CALLS = 8  # steps in a turn on a GPU
STEP_TARGETS = ("autocast, dots",)  # the forms that are judged


def measure_steps(form: str, size: str, params: str, starts: int, turns: int) -> Row:
    """Return the time of a form beside the form by hand; all three are names."""
    beside = FORMS[form].beside or HAND
    weights, tokens = make_params(SIZES[size], DTYPES[params]), make_tokens(SIZES[size])
    zeros = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), weights)
    # The parameters, and the last loss and gradients.
    state = (
        weights,
        (
            jnp.float32(0),
            zeros,
        ),
    )
    row: Row = {"form": form, "beside": beside, "size": size, "params": params}

    def step_of(name: str) -> Any:
        gradient = mpx.value_and_grad(make_form(name, SIZES[size]))
        return lambda state, tokens: (state[0], gradient(state[0], tokens))

    try:
        steps = compile_steps(
            [step_of(name) for name in (beside, form)], (state, state), (tokens, tokens)
        )
        make_states = lambda: (own(state), own(state))
        options = {
            "starts": starts,
            "turns": turns,
            "gpu_calls": GPU_CALLS,
            "judge": form in STEP_TARGETS,
        }
        return row | compare(steps, make_states, (tokens, tokens), **options)
    except jax.errors.JaxRuntimeError as error:
        # What a backend cannot do is a result too.
        return row | {"left out": str(error).splitlines()[0]}


def steps_sheets(rows: list[Row]) -> list[Sheet]:
    """Return the table of each dtype of parameters."""
    columns = {"form": "{form}", "beside": "{beside}"} | COLUMNS
    kinds = dict.fromkeys((row["size"], row["params"]) for row in rows)
    title = "autocast, loss and gradient: {}, parameters {}"
    of_kind = lambda kind: [row for row in rows if (row["size"], row["params"]) == kind]
    return [Sheet(title.format(*kind), of_kind(kind), columns) for kind in kinds]
