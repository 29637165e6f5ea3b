r"""How far a sampler is from a trainer, by size of the model and by sequences that are
sampled at once.

    PYTHONPATH=. python -m benchmarks.one_value
    PYTHONPATH=. python -m benchmarks.one_value --sizes 2048x16 \
        --sequences 16,64,256 --length 256

Llamas with random weights (heads share keys; rotary embeddings; gated layers) get the
same tokens one at a time with a cache, and as whole sequences, in two programs. A
distance is the mean |difference of log p| of the tokens. All is cast by hand, or stands
under one autocast, with the head in float32.
"""

import functools
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer
from jax import lax

import mpx
from benchmarks.report import Row, Sheet

HEADS, KEYS, WORDS = 8, 2, 64
CASES = {"float32": ("f32", False)} | {
    f"{dtype}{', by hand' * by_hand}": (dtype, by_hand)
    for dtype in ("bf16", "f16")
    for by_hand in (True, False)
}


def init_params(key: jax.Array, width: int, layers: int) -> Any:
    """Return float32 parameters."""
    keys = iter(jax.random.split(key, 7 * layers + 2))
    matrix = lambda rows, columns: (
        jax.random.normal(next(keys), (rows, columns)) / rows**0.5
    )
    small = width * KEYS // HEADS
    shapes = {
        **{
            "query": (width, width),
            "key": (width, small),
            "value": (width, small),
            "out": (width, width),
        },
        **{
            "gate": (width, 4 * width),
            "up": (width, 4 * width),
            "down": (4 * width, width),
        },
    }
    stack = [
        {name: matrix(*shape) for name, shape in shapes.items()} for _ in range(layers)
    ]
    return {
        "embedding": matrix(WORDS, width) * WORDS**0.5,
        "layers": stack,
        "head": 3 * matrix(width, WORDS),
    }


def logits_and_cache(
    params: Any, tokens: jax.Array, cache: Any, at: Any, head: Any
) -> tuple[jax.Array, Any]:
    """Return logits of tokens (B, T) that start at a place, and the cache with their
    keys and values.
    """
    norm = lambda x: x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
    x, places, new_cache = (
        params["embedding"][tokens],
        at + jnp.arange(tokens.shape[1]),
        [],
    )
    size = x.shape[-1] // HEADS
    angles = (places[:, None] / 10_000 ** (jnp.arange(size // 2) * 2 / size))[
        None, :, None
    ]
    is_seen = jnp.arange(cache[0][0].shape[1])[None] <= places[:, None]

    def turned(x):
        (a, b), cos, sin = jnp.split(x, 2, axis=-1), jnp.cos(angles), jnp.sin(angles)
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(
            x.dtype
        )

    for w, kept in zip(params["layers"], cache, strict=True):
        query, key, value = (
            (norm(x) @ w[name]).reshape(*tokens.shape, -1, size)
            for name in ("query", "key", "value")
        )
        write = lambda old, new: lax.dynamic_update_slice_in_dim(
            old, new.astype(old.dtype), at, 1
        )
        new_cache.append((write(kept[0], turned(key)), write(kept[1], value)))
        keys, values = (c.astype(x.dtype) for c in new_cache[-1])
        query = turned(query).reshape(*tokens.shape, KEYS, HEADS // KEYS, size)
        scores = jnp.einsum("btghd,bsgd->bghts", query, keys) / size**0.5
        weights = jax.nn.softmax(jnp.where(is_seen, scores, -3e4))
        x = (
            x
            + jnp.einsum("bghts,bsgd->btghd", weights, values).reshape(x.shape)
            @ w["out"]
        )
        x = x + (jax.nn.silu(norm(x) @ w["gate"]) * (norm(x) @ w["up"])) @ w["down"]
    return head(norm(x), params["head"]), new_cache


def distance(case: str, width: int, layers: int, sequences: int, length: int) -> float:
    """Return how far log probabilities of tokens, one at a time, are from those of
    whole sequences.
    """
    name, by_hand = CASES[case]
    dtype = mpx.get_policy(name).compute_dtype
    multiply = lambda x, head: x @ head
    head = multiply if by_hand else mpx.full_precision(multiply)
    model = functools.partial(logits_and_cache, head=head)
    run = jax.jit(model if by_hand else mpx.autocast(model, name, as_they_are=2))
    params = jax.tree.map(
        lambda x: x.astype(dtype), init_params(jax.random.key(0), width, layers)
    )
    tokens = jax.random.randint(jax.random.key(1), (sequences, length), 0, WORDS)
    empty = [
        (jnp.zeros((sequences, length, KEYS, width // HEADS), dtype),) * 2
    ] * layers
    whole, _ = run(params, tokens, empty, 0)
    cache, parts = empty, []
    for at in range(length):
        part, cache = run(params, tokens[:, at : at + 1], cache, at)
        parts.append(part)
    log_p = lambda logits: jnp.take_along_axis(
        jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32)), tokens[:, 1:, None], -1
    )
    return float(jnp.abs(log_p(jnp.concatenate(parts, axis=1)) - log_p(whole)).mean())


def measure(size: str, sequences: int, length: int) -> Row:
    """Return the distances of all cases; `size` is the width and the layers."""
    width, layers = map(int, size.split("x"))
    return {"width x layers": size, "sequences": sequences} | {
        case: distance(case, width, layers, sequences, length) for case in CASES
    }


def main(
    sizes: Annotated[
        str, typer.Option(help="Widths and layers.")
    ] = "64x2,128x4,256x4,512x8",
    sequences: Annotated[
        str, typer.Option(help="How many are sampled at once.")
    ] = "16,64",
    length: Annotated[int, typer.Option(min=2, help="Of a sequence.")] = 24,
) -> None:
    """Compute and print the table."""
    rows = [
        measure(size, count, length)
        for size in sizes.split(",")
        for count in map(int, sequences.split(","))
    ]
    columns = {"width x layers": "{width x layers}", "sequences": "{sequences}"} | {
        c: f"{{{c}:.0e}}" for c in CASES
    }
    print(
        Sheet(f"One value, on {jax.devices()[0].device_kind}", rows, columns).markdown()
    )


if __name__ == "__main__":
    typer.run(main)
