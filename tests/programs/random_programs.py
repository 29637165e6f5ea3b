"""Random programs: lists of operations on rows of numbers, in loops, branches and
checkpoints, which share weights.

An operation is `(name, index)`, or `(name, index, operations)` if it runs others
inside. Hypothesis draws and shrinks lists of them; `loss` is the program that a list
means.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax

# rows and columns of all values, so that each operation fits behind each other one
SIZE = 16
WEIGHTS = 3  # of each kind; operations that draw the same index share one


@jax.custom_vjp
def sine(h):
    """Return the sine, with a derivative that its author wrote."""
    return jnp.sin(h)


sine.defvjp(lambda h: (jnp.sin(h), h), lambda h, cotangent: (jnp.cos(h) * cotangent,))


@jax.custom_jvp
def square(h):
    """Return half of the square of what tanh leaves, with a derivative that its author
    wrote.
    """
    return 0.5 * jnp.tanh(h) ** 2


@square.defjvp
def _(primals, tangents):
    t = jnp.tanh(primals[0])
    return 0.5 * t**2, t * (1 - t**2) * tangents[0]


def convolved(h, kernel):
    return lax.conv_general_dilated(
        h[None], kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )[0]


def normed(h, scale):
    return scale * h * lax.rsqrt((h * h).mean(-1, keepdims=True) + 0.1)


# Functions of parameters, of a value, and of the index of a weight.
OPERATIONS = {
    "product": lambda p, h, i: h @ p["w"][i],
    "transposed weight": lambda p, h, i: h @ p["w"][i].T,
    "product and bias": lambda p, h, i: h @ p["w"][i] + p["b"][i],
    "layer": lambda p, h, i: jax.nn.gelu(h @ p["w"][i] + p["b"][i]),
    "convolution": lambda p, h, i: convolved(h, p["kernel"][i]),
    "attention": lambda p, h, i: jax.nn.softmax(h @ p["w"][i] @ h.T / 4) @ h,
    "table": lambda p, h, i: h + p["w"][i][jnp.arange(SIZE) % (i + 2)],
    "tanh": lambda p, h, i: jnp.tanh(h),
    "norm": lambda p, h, i: normed(h, 1 + p["b"][i]),
    "transposition": lambda p, h, i: h.T,
    "halves": lambda p, h, i: jnp.concatenate(jnp.split(h, 2, i % 2)[::-1], i % 2),
    "copies of a row": lambda p, h, i: jnp.broadcast_to(h[i], h.shape),
    "rows by index": lambda p, h, i: h[jnp.arange(SIZE) // (i + 1)],
    "larger": lambda p, h, i: jnp.maximum(h, h[i]),
    "chosen": lambda p, h, i: jnp.where(p["x"] > 0, h, p["b"][i]),
    "derivative by its author": lambda p, h, i: (sine, square)[i % 2](h),
}


def stacked(f, p, h, i):
    """Run over a stack of weights, which stand for the first one inside."""
    body = lambda h, w: (f(p | {"w": [w, *p["w"][1:]]}, h), None)
    return lax.scan(body, h, p["stack"], reverse=i == 1)[0]


def branched(f, p, h, i):
    return lax.cond(p["x"][i, 0] > 0, f, lambda p, h: h @ p["w"][i], p, h)


# Functions of a function of parameters and a value, and of the same three.
AROUND = {
    "residual": lambda f, p, h, i: h + f(p, h),
    "scan of a stack": stacked,
    "scan": lambda f, p, h, i: lax.scan(lambda h, _: (f(p, h), None), h, length=2)[0],
    "map": lambda f, p, h, i: lax.map(functools.partial(f, p), jnp.stack([h, h.T]))[
        i % 2
    ],
    "vmap": (
        lambda f, p, h, i: jax.vmap(f, in_axes=(None, 0))(
            p, jnp.stack([h, h[::-1]])
        ).mean(0)
    ),
    "branch": branched,
    "checkpoint": lambda f, p, h, i: jax.checkpoint(f)(p, h),
    "jit": lambda f, p, h, i: jax.jit(f)(p, h),
}

_index = st.integers(0, WEIGHTS - 1)
_operation = st.recursive(
    st.tuples(st.sampled_from(list(OPERATIONS)), _index),
    lambda inner: st.tuples(
        st.sampled_from(list(AROUND)), _index, st.lists(inner, min_size=1, max_size=3)
    ),
    max_leaves=6,
)
programs = st.lists(_operation, min_size=1, max_size=5)


def run(operations, p, h):
    """Return what a list of operations makes of a value."""
    for name, i, *inside in operations:
        if inside:
            h = AROUND[name](functools.partial(run, inside[0]), p, h, i)
        else:
            h = OPERATIONS[name](p, h, i)
    return h


def loss(operations):
    """Return the program that a list means: a function of parameters and of a batch of
    inputs and targets.
    """
    of = lambda p, x, y: jnp.square(
        run(operations, p | {"x": x}, x @ p["w"][0]) - y
    ).mean()
    return lambda p, batch: of(p, *batch)


def make(seed):
    """Return parameters, which bfloat16 has, and a batch."""
    rng = np.random.default_rng(seed)
    drawn = lambda inputs, *shape: jnp.asarray(
        rng.normal(size=shape) / np.sqrt(inputs), jnp.bfloat16
    )
    several = lambda *args: [drawn(*args) for _ in range(WEIGHTS)]
    params = {
        "w": several(SIZE, SIZE, SIZE),
        "b": several(4, SIZE),
        "kernel": several(3 * SIZE, 3, SIZE, SIZE),
        "stack": drawn(SIZE, 3, SIZE, SIZE),
    }
    return params, (drawn(1, SIZE, SIZE), drawn(1, SIZE, SIZE))
