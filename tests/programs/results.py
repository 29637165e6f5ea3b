"""Primitives of several results, before, beside and after activations and products;
effects.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import checkify

from tests.programs import integers, program, rows

D = 16
XY = {"x": rows(D), "y": rows(D)}
NET = {"a": (D, D), "b": (D,), "c": (D, D)}


@program({**NET, "d": (D // 2, D)}, **XY)
def top_k_beside_an_activation(p, x, y):
    h = x @ p["a"] + p["b"]
    values, places = lax.top_k(h, D // 2)
    return (
        jnp.square(jnp.tanh(h) @ p["c"] + jnp.tanh(values) @ p["d"] - y).mean()
        + values.mean() * places.mean() / D
    )


@program(NET, **XY, rank=integers(100, D))
def sorted_pairs_between_products(p, x, y, rank):
    _, h, first = lax.sort((rank, jax.nn.silu(x @ p["a"] + p["b"]), x), num_keys=1)
    return jnp.square(h @ p["c"] + first - y).mean()


@program({"a": (D, D), "b": (D,), "c": (8, D), "d": (8, D)}, **XY)
def both_pieces_go_on(p, x, y):
    left, right = jnp.split(jax.nn.gelu(x @ p["a"] + p["b"]), 2, -1)
    return (
        jnp.square(left @ p["c"] + right @ p["d"] - y).mean() + jnp.square(right).mean()
    )


@program({"a": (D, D), "b": (D,), "c": (5, D)}, **XY)
def the_middle_piece_goes_on(p, x, y):
    first, middle, last = lax.split(jnp.tanh(x @ p["a"] + p["b"]), (4, 5, 7), axis=1)
    return (
        jnp.square(jnp.tanh(middle) @ p["c"] - y).mean()
        + (first.sum() - last.sum()) / first.size
    )


@program(NET, **XY)
def largest_and_its_place_by_reduction(p, x, y):
    h = jax.nn.tanh(x @ p["a"] + p["b"])

    def larger(a, b):
        swap = b[0] > a[0]
        return jnp.where(swap, b[0], a[0]), jnp.where(swap, b[1], a[1])

    places = lax.broadcasted_iota(jnp.int32, h.shape, 1)
    top, place = lax.reduce((lax.stop_gradient(h), places), (-jnp.inf, 0), larger, (1,))
    return (
        jnp.square(h @ p["c"] - top[:, None] - y).mean()
        + jnp.take_along_axis(h, place[:, None], 1).mean()
    )


@program({**NET, "d": (D, D)}, **XY)
def jit_and_checkpoint_of_several_results(p, x, y):
    @jax.jit
    def pair(x):
        h = x @ p["a"] + p["b"]
        return jnp.tanh(h), h, jnp.cos(h).sum(-1, keepdims=True)

    @functools.partial(
        jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("kept")
    )
    def again(t, h):
        h = checkpoint_name(h @ p["c"], "kept")
        return jax.nn.gelu(h + t), t * h

    t, h, total = pair(x)
    first, second = again(t, h)
    return jnp.square(first @ p["d"] + second + total - y).mean()


@program({**NET, "d": (D, D)}, **XY, branch=integers(3))
def branches_of_several_results(p, x, y, branch):
    h = x @ p["a"] + p["b"]
    branches = [
        lambda h: (jnp.tanh(h), h.mean(-1)),
        lambda h: (jax.nn.relu(h) @ p["c"], h[:, 0]),
        lambda h: (h, jnp.zeros(h.shape[0])),
    ]
    one, mean = lax.switch(branch[0], branches, h)
    two, most = lax.cond(
        h.sum() > 0, lambda h: (jnp.sin(h), h.max(-1)), lambda h: (h, h.min(-1)), h
    )
    return jnp.square(one @ p["d"] + two @ p["c"] - y).mean() + (mean + most).mean()


@jax.custom_vjp
def sine_and_cosine(x):
    return jnp.sin(x), jnp.cos(x)


sine_and_cosine.defvjp(
    lambda x: ((out := sine_and_cosine(x)), out),
    lambda out, g: (g[0] * out[1] - g[1] * out[0],),
)


@program({**NET, "d": (D, D)}, **XY)
def custom_derivative_of_two_results(p, x, y):
    sine, cosine = sine_and_cosine(x @ p["a"] + p["b"])
    return jnp.square(jnp.tanh(sine) @ p["c"] + cosine @ p["d"] - y).mean()


@program({"a": (D, D), "b": (D,), "c": (4, D)}, **XY)
def unstacked_and_unzipped_pieces(p, x, y):
    pieces = jnp.unstack(jnp.tanh(x @ p["a"] + p["b"]).reshape(-1, 4, 4), axis=1)
    whole, rest = jnp.divmod(x, 0.5)
    fraction, exponent = jnp.frexp(rest + 1)
    ahead, behind = lax.optimization_barrier((pieces[0], pieces[1]))
    h = jnp.sin(ahead) @ p["c"] + behind @ p["c"] + pieces[2] @ p["c"]
    return (
        jnp.square(h + fraction * exponent + 0.1 * whole - y).mean()
        + jnp.modf(pieces[3])[0].mean()
    )


@program({"a": (D, D), "b": (D,), "c": (D, D)}, **XY)
def factors_of_a_product(p, x, y):
    h = (jnp.tanh(x @ p["a"] + p["b"]) @ p["c"]).reshape(-1, 4, 4) + 3 * jnp.eye(4)
    q, r = jnp.linalg.qr(h)
    sign, log_det = jnp.linalg.slogdet(h)
    u, s, vt = jnp.linalg.svd(h + 2 * jnp.diag(jnp.arange(4.0)), full_matrices=False)
    rebuilt = (u * jnp.sqrt(s)[:, None, :]) @ vt @ (jnp.abs(q) @ jnp.abs(r))
    return (
        jnp.square(rebuilt.reshape(y.shape) / 4 - y).mean()
        + 0.1 * (log_det * sign).mean()
    )


@program({"a": (D, D), "b": (D,), "c": (D, D)}, **XY)
def two_scans_at_once(p, x, y):
    h = jnp.tanh(x @ p["a"] + p["b"])
    decay, total = lax.associative_scan(
        lambda s, t: (s[0] * t[0], s[1] * t[0] + t[1]), (jax.nn.sigmoid(h), x), axis=1
    )
    (last, _), (states, largest) = lax.scan(
        lambda c, h: ((jnp.tanh(c[0] + h), c[1] * h), (c[0], lax.cummax(c[1]))),
        (h[:, 0], h[:, 1]),
        h.T,
    )
    return jnp.square((decay + total) @ p["c"] - y).mean() + (
        states.mean() + largest.mean() + last.mean()
    )


@program(NET, **XY)
def prints_and_callbacks(p, x, y):
    h = jnp.tanh(x @ p["a"] + p["b"])
    jax.debug.print("mean {m}", m=h.mean())
    jax.debug.callback(lambda h: None, h)
    with jax.named_scope("head"):
        return jnp.square(
            jax.named_call(jnp.matmul, name="product")(h, p["c"]) - y
        ).mean()


@program(NET, **XY)
def checked_by_checkify(p, x, y):
    def loss(p, x):
        h = jax.nn.softplus(x @ p["a"] + p["b"])
        checkify.check(jnp.all(h > 0), "not positive: {}", h.min())
        return jnp.square(jnp.log(h) @ p["c"] - y).mean()

    _, value = checkify.checkify(loss, errors=checkify.user_checks)(p, x)
    return value


@program(NET, **XY)
def references_that_are_written(p, x, y):
    kept = jax.new_ref(jnp.zeros_like(x))
    h = jnp.tanh(x @ p["a"] + p["b"])
    kept[...] = h
    kept[0] = h[0] * 2
    return jnp.square(kept[...] @ p["c"] - y).mean()


@jax.custom_jvp
def on_the_host(x):
    return jax.pure_callback(
        lambda x: 2 * x,
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        x,
        vmap_method="expand_dims",
    )


on_the_host.defjvp(lambda primals, tangents: (on_the_host(*primals), 2 * tangents[0]))


@program(NET, **XY)
def callback_to_the_host(p, x, y):
    return jnp.square(on_the_host(jax.nn.relu(x @ p["a"] + p["b"])) @ p["c"] - y).mean()
