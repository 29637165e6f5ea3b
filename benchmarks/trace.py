"""What it costs to trace programs with mpx, beside the same in plain JAX and Optax: the
time before anything compiles.

    PYTHONPATH=. python -m benchmarks.trace

1. Twelve unrolled blocks of a small GPT: the loss, and its value and gradients, of the
   model left to `mpx.autocast`, beside the same lines cast by hand (and, for the loss,
   in float32).
2. `tx.update` of AdamW on the 100 parameters of that GPT, beside AdamW's on float32
  ones.
3. The whole step, beside float32's.
4. `import mpx`, in processes that have imported jax and optax.

Times are processor time, which other processes change little: medians of fresh traces,
with JAX's caches cleared. What is compared runs in turn.
"""

import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer

import mpx
from benchmarks.report import Row, Sheet

BLOCKS, WIDTH, HEADS, CONTEXT, VOCABULARY, BATCH = 12, 128, 4, 64, 512, 2
IN_EACH_BLOCK = {
    "gain 1": (WIDTH,),
    "qkv": (WIDTH, 3 * WIDTH),
    "qkv bias": (3 * WIDTH,),
    "out": (WIDTH, WIDTH),
    "gain 2": (WIDTH,),
    "up": (WIDTH, 4 * WIDTH),
    "up bias": (4 * WIDTH,),
    "down": (4 * WIDTH, WIDTH),
}
OUTSIDE = {
    "tokens": (VOCABULARY, WIDTH),
    "places": (CONTEXT, WIDTH),
    "gain": (WIDTH,),
    "head": (WIDTH, VOCABULARY),
}
TOKENS = jax.ShapeDtypeStruct((BATCH, CONTEXT + 1), np.int32)
# With the last two, `mpx.fused_update` takes the place of `tx.update` and
# `optax.apply_updates`: as on a CPU, and with its kernels.
RECIPES = (
    "bf16-split",
    "bf16-split-8bit",
    "bf16-split24-4bit",
    "fused 8-bit",
    "fused 8-bit, kernels",
)
IMPORT = (
    "import jax, optax, time; start = time.process_time(); import mpx;"
    " print(time.process_time() - start)"
)
COLUMNS = {
    "what": "{what}",
    "beside": "{beside}",
    "plain, ms": "{plain:.0f}",
    "mpx, ms": "{mpx:.0f}",
    "mpx / plain": "{ratio:.2f}",
}


def shapes_of_model(dtype: Any) -> dict[str, Any]:
    """Return the shapes of the 100 parameters."""
    as_shapes = lambda shapes: {
        name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()
    }
    return as_shapes(OUTSIDE) | {
        "blocks": [as_shapes(IN_EACH_BLOCK) for _ in range(BLOCKS)]
    }


def loss_fn(params: Any, tokens: jax.Array, dtype: Any = None) -> jax.Array:
    """Return the loss of a GPT whose operands of products are cast to `dtype`; None
    casts none of them.
    """
    cast = lambda x: x if dtype is None else x.astype(dtype)
    product = lambda form, *operands: jnp.einsum(form, *map(cast, operands)).astype(
        jnp.float32
    )

    def norm(x, gain):
        return (
            x
            * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
            * gain.astype(x.dtype)
        )

    def attention(x, block):
        qkv = product("btc,cd->btd", x, block["qkv"]) + block["qkv bias"].astype(
            jnp.float32
        )
        q, k, v = jnp.moveaxis(qkv.reshape(BATCH, CONTEXT, 3, HEADS, -1), 2, 0)
        scores = product("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(jnp.where(np.tri(CONTEXT, dtype=bool), scores, -1e9))
        return product(
            "btc,cd->btd",
            product("bhqk,bkhd->bqhd", weights, v).reshape(x.shape),
            block["out"],
        )

    x = (params["tokens"][tokens[:, :-1]] + params["places"]).astype(jnp.float32)
    for block in params["blocks"]:
        x = x + attention(norm(x, block["gain 1"]), block)
        up = product("btc,cd->btd", norm(x, block["gain 2"]), block["up"]) + block[
            "up bias"
        ].astype(jnp.float32)
        x = x + product("btc,cd->btd", jax.nn.gelu(up), block["down"])
    logits = product("btc,cv->btv", norm(x, params["gain"]), params["head"])
    return optax.losses.softmax_cross_entropy_with_integer_labels(
        logits, tokens[:, 1:]
    ).mean()


def by_hand(params: Any, tokens: jax.Array) -> jax.Array:
    """Return the loss of the model cast by hand."""
    return loss_fn(params, tokens, jnp.bfloat16)


def make_update(recipe: str) -> tuple[Callable, tuple[Any, ...]]:
    """Return the update of a recipe, and the shapes of its arguments; of AdamW alone
    for "float32".
    """
    is_fused = recipe.startswith("fused")
    name = "bf16-split-8bit" if is_fused else recipe
    params = shapes_of_model(jnp.float32 if name == "float32" else jnp.bfloat16)
    tx: Any = optax.adamw(1e-3)
    tx = tx if name == "float32" else mpx.mixed_precision(tx, name)
    update = (
        mpx.fused_update(tx, interpret="kernels" in recipe) if is_fused else tx.update
    )
    return update, (params, jax.eval_shape(tx.init, params), params)


def make_step(recipe: str) -> tuple[Callable, tuple[Any, ...]]:
    """Return a training step, and the shapes of its arguments."""
    update, (params, state, _) = make_update(recipe)
    loss = loss_fn if recipe == "float32" else mpx.autocast(loss_fn, recipe)
    value_and_grad = (
        jax.value_and_grad(loss) if recipe == "float32" else mpx.value_and_grad(loss)
    )

    def step(params, state, tokens):
        value, grads = value_and_grad(params, tokens)
        updates, state = update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step, (params, state, TOKENS)


def time_traces(
    pairs: list[tuple[Callable, tuple[Any, ...]]], rounds: int
) -> list[float]:
    """Return the median milliseconds of a trace of each function, traced in turn, after
    one of warm-up.
    """
    times: list[list[float]] = [[] for _ in pairs]
    for turn in range(-1, rounds):
        for (function, args), found in zip(pairs, times, strict=True):
            jax.clear_caches()
            gc.collect()
            start = time.process_time()
            jax.jit(lambda *args, function=function: function(*args)).trace(*args)
            if turn >= 0:
                found.append(1e3 * (time.process_time() - start))
    return list(map(statistics.median, times))


def time_imports(rounds: int) -> float:
    """Return the median milliseconds of `import mpx`, after jax and optax."""
    run = lambda: subprocess.run(
        [sys.executable, "-c", IMPORT],
        capture_output=True,
        text=True,
        check=True,
        env=env,
    )
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    return 1e3 * statistics.median(float(run().stdout) for _ in range(rounds))


def rows_of(rounds: int) -> list[Row]:
    """Return the rows of the table."""
    model = shapes_of_model(jnp.bfloat16), TOKENS
    casting = mpx.autocast(loss_fn, "bf16")
    of_model = time_traces(
        [
            (loss_fn, (shapes_of_model(jnp.float32), TOKENS)),
            (by_hand, model),
            (casting, model),
            (jax.value_and_grad(by_hand), model),
            (mpx.value_and_grad(casting), model),
        ],
        rounds,
    )
    plain, *of_recipes = time_traces(
        [make_update(name) for name in ("float32", *RECIPES)], rounds
    )
    steps = time_traces([make_step("float32"), make_step("bf16-split")], rounds)
    cases = [
        ("forward pass", "float32", of_model[0], of_model[2]),
        ("forward pass", "cast by hand", of_model[1], of_model[2]),
        ("value and gradients", "cast by hand", of_model[3], of_model[4]),
        *[
            (f"update, {name}", "AdamW", plain, found)
            for name, found in zip(RECIPES, of_recipes, strict=True)
        ],
        ("the whole step, bf16-split", "float32", *steps),
    ]
    rows = [
        dict(zip(("what", "beside", "plain", "mpx"), case, strict=True))
        for case in cases
    ]
    rows = [row | {"ratio": row["mpx"] / row["plain"]} for row in rows]
    return [*rows, {"what": "`import mpx`", "mpx": time_imports(rounds)}]


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Traces of each.")] = 5,
) -> None:
    """Measure and print the table."""
    title = f"CPU time to trace, jax {jax.__version__}, median of {rounds} traces"
    print(Sheet(title, rows_of(rounds), COLUMNS).markdown())


app = typer.Typer(
    add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)
app.command()(main)

if __name__ == "__main__":
    app()
