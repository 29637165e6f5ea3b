"""Meta-learning: gradients through inner loops, learned rates and optimizers, weights
that networks make.
"""

import jax
import jax.numpy as jnp
from jax import lax

from tests.programs import program, rows

D = 16
NET = {"a": (D, D), "b": (D,), "c": (D, D)}
TASK = {"x": rows(D), "y": rows(D)}
mse = lambda p, x, y: jnp.square(jnp.tanh(x @ p["a"] + p["b"]) @ p["c"] - y).mean()


@program({"net": NET, "rate": ()}, **TASK)
def gradient_through_an_inner_loop(p, x, y):
    def step(fast, _):
        return (
            jax.tree.map(
                lambda w, g: w - (p["rate"] + 0.1) * g, fast, jax.grad(mse)(fast, x, y)
            ),
            None,
        )

    return mse(lax.scan(step, p["net"], length=3)[0], y, x)


@program({"net": NET, "rates": {"a": (), "b": (), "c": ()}}, x=rows(4, D), y=rows(4, D))
def one_inner_step_for_each_task(p, x, y):
    def adapted(x, y):
        grads = jax.grad(mse)(p["net"], x[:2], y[:2])
        return mse(
            jax.tree.map(
                lambda w, g, r: w - jnp.exp(r) * g, p["net"], grads, p["rates"]
            ),
            x[2:],
            y[2:],
        )

    return jax.vmap(adapted)(x, y).mean()


@program({"net": NET, "rule": {"a": (2, D), "b": (D,), "c": (D, 1)}}, **TASK)
def learned_optimizer(p, x, y):
    def rule(w, g):
        h = jnp.stack([w, g], -1) @ p["rule"]["a"] + p["rule"]["b"]
        return w - 0.1 * (jax.nn.relu(h) @ p["rule"]["c"])[..., 0]

    weights, losses = p["net"], []
    for _ in range(2):
        loss, grads = jax.value_and_grad(mse)(weights, x, y)
        weights, losses = jax.tree.map(rule, weights, grads), [*losses, loss]
    return sum(losses) + mse(weights, x, y)


@program({"a": (D, D), "b": (D,), "make": (D, D * 8), "out": (8, D)}, **TASK)
def weights_made_by_a_network(p, x, y):
    made = (jnp.tanh(y @ p["a"] + p["b"]) @ p["make"]).reshape(-1, D, 8)
    return jnp.square(jnp.einsum("bd,bdk->bk", x, made) @ p["out"] / 4 - y).mean()


@program({"net": NET, "ridge": ()}, **TASK)
def closed_form_head(p, x, y):
    h = jnp.tanh(x @ p["net"]["a"] + p["net"]["b"])
    head = jnp.linalg.solve(h.T @ h + jnp.exp(p["ridge"]) * jnp.eye(D), h.T @ y)
    return jnp.square(h[::-1] @ head @ p["net"]["c"] - y).mean()


@program({"net": NET, "weight": (D, 1)}, **TASK, clean=rows(D))
def weights_of_examples_by_their_gradients(p, x, y, clean):
    weights = jax.nn.softmax((x @ p["weight"])[:, 0])
    each = lambda w: jnp.sum(
        weights * jnp.square(jnp.tanh(x @ w["a"] + w["b"]) @ w["c"] - y).mean(-1)
    )
    noisy, good = jax.grad(each)(p["net"]), jax.grad(mse)(p["net"], clean, y)
    return 10 * sum(
        jnp.square(a - b).sum()
        for a, b in zip(noisy.values(), good.values(), strict=True)
    )


@program(NET, **TASK)
def flatness_by_a_product_with_the_hessian(p, x, y):
    slope, curvature = jax.jvp(
        lambda p: jax.grad(mse)(p, x, y), (p,), (jax.tree.map(jnp.sign, p),)
    )
    return (
        mse(p, x, y)
        + 0.01 * sum(jnp.sum(c**2) for c in curvature.values())
        + jnp.sum(slope["c"] ** 2)
    )
