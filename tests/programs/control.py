"""Reinforcement learning: policies, critics, returns, models of the world."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.programs import booleans, integers, key, program, rows

T, D, A = 6, 16, 4
NET = {"a": (D, D), "b": (D,)}
STEPS = {"x": rows(T, D), "reward": rows(T), "done": booleans(T)}


def log_normal(x, mean, log_std):
    return -0.5 * jnp.square((x - mean) / jnp.exp(log_std)) - log_std


@program({**NET, "out": (D, 2 * A)}, x=rows(D), action=rows(A), advantage=rows())
def actor_with_a_state_dependent_deviation(p, x, action, advantage):
    mean, log_std = jnp.split(jnp.tanh(x @ p["a"] + p["b"]) @ p["out"], 2, axis=-1)
    log_std = jnp.clip(log_std, -5, 2)
    return (
        -(log_normal(action, mean, log_std).sum(-1) * advantage).mean()
        - 0.01 * log_std.sum(-1).mean()
    )


@program({**NET, "head": (D, A + 1)}, **STEPS, action=integers(A, T))
def actor_critic_with_generalized_advantages(p, x, reward, done, action):
    logits, value = jnp.split(
        jax.nn.relu(x @ p["a"] + p["b"]) @ p["head"], [A], axis=-1
    )
    value, keep = value[..., 0], 1.0 - done
    error = reward[:, :-1] + 0.99 * value[:, 1:] * keep[:, :-1] - value[:, :-1]
    step = lambda c, e: ((c := e[0] + 0.94 * e[1] * c), c)
    _, gain = lax.scan(
        step,
        jnp.zeros(x.shape[0]),
        (lax.stop_gradient(error).T, keep[:, :-1].T),
        reverse=True,
    )
    logs = jax.nn.log_softmax(logits)[:, :-1]
    chosen = jnp.take_along_axis(logs, action[:, :-1, None], -1)[..., 0]
    entropy = -(jnp.exp(logs) * logs).sum(-1)
    return (jnp.square(error) / 2 - chosen * gain.T - 0.01 * entropy).mean()


Q = {**NET, "out": (D, A)}


@program(
    {"online": Q, "target": Q},
    x=rows(D),
    y=rows(D),
    action=integers(A),
    reward=rows(),
    done=booleans(),
)
def double_q_learning(p, x, y, action, reward, done):
    q = lambda p, x: jax.nn.relu(x @ p["a"] + p["b"]) @ p["out"]
    best = jnp.argmax(q(p["online"], y), -1)
    wanted = reward + 0.99 * jnp.where(
        done, 0.0, jnp.take_along_axis(q(p["target"], y), best[:, None], 1)[:, 0]
    )
    error = jnp.take_along_axis(q(p["online"], x), action[:, None], 1)[
        :, 0
    ] - lax.stop_gradient(wanted)
    return jnp.where(jnp.abs(error) < 1, 0.5 * error**2, jnp.abs(error) - 0.5).mean()


@program(
    {
        "actor": {**NET, "out": (D, 2 * A)},
        "critic": {"a": (2, D + A, D), "b": (2, 1, D), "c": (2, D, 1)},
    },
    x=rows(D),
    key=key,
)
def soft_actor_with_two_critics(p, x, key):
    actor = p["actor"]
    mean, log_std = jnp.split(
        jax.nn.relu(x @ actor["a"] + actor["b"]) @ actor["out"], 2, axis=-1
    )
    raw = mean + jnp.exp(jnp.tanh(log_std)) * jax.random.normal(key, mean.shape)
    action = jnp.tanh(raw)
    log_prob = (
        log_normal(raw, mean, jnp.tanh(log_std))
        - 2 * (jnp.log(2) - raw - jax.nn.softplus(-2 * raw))
    ).sum(-1)
    both = jnp.concatenate([x, action], -1)
    critic = lambda a, b, c: (jax.nn.relu(both @ a + b) @ c)[..., 0]
    return (0.2 * log_prob - jax.vmap(critic)(*p["critic"].values()).min(0)).mean()


@program(
    {"online": {**NET, "out": (D, A * 8)}},
    x=rows(D),
    y=rows(D),
    action=integers(A),
    reward=rows(),
)
def distribution_over_returns(p, x, y, action, reward):
    net, atoms = p["online"], jnp.linspace(-2, 2, 8)
    logits = lambda x: (jax.nn.relu(x @ net["a"] + net["b"]) @ net["out"]).reshape(
        -1, A, 8
    )
    probs = jax.nn.softmax(logits(y)).mean(1)
    moved = jnp.clip(reward[:, None] + 0.9 * atoms, -2, 2)
    near = jnp.clip(
        1 - jnp.abs(moved[:, None, :] - atoms[None, :, None]) / (4 / 7), 0, 1
    )
    wanted = lax.stop_gradient(jnp.einsum("bij,bj->bi", near, probs))
    logs = jax.nn.log_softmax(
        jnp.take_along_axis(logits(x), action[:, None, None], 1)[:, 0]
    )
    return -(wanted * logs).sum(-1).mean()


@program(
    {
        "in": (D + A, 3 * D),
        "h": (D, 3 * D),
        "b": (3 * D,),
        "post": (2 * D, 2 * 8),
        "prior": (D, 2 * 8),
        "z": (8, D),
    },
    x=rows(T, D),
    action=rows(T, A),
    key=key,
)
def world_model_with_a_stochastic_state(p, x, action, key):
    def step(carry, inputs):
        (h, z), (x, a, key) = carry, inputs
        r, u, n = jnp.split(
            jnp.concatenate([z @ p["z"], a], -1) @ p["in"] + p["b"], 3, -1
        )
        hr, hu, hn = jnp.split(h @ p["h"], 3, -1)
        u = jax.nn.sigmoid(u + hu - 1)
        h = u * jnp.tanh(n + jax.nn.sigmoid(r + hr) * hn) + (1 - u) * h
        mean, raw = jnp.split(jnp.concatenate([h, x], -1) @ p["post"], 2, -1)
        prior, prior_raw = jnp.split(h @ p["prior"], 2, -1)
        std, prior_std = jax.nn.softplus(raw) + 0.1, jax.nn.softplus(prior_raw) + 0.1
        kl = (
            jnp.log(prior_std / std)
            + (std**2 + (mean - prior) ** 2) / (2 * prior_std**2)
            - 0.5
        )
        z = mean + std * jax.random.normal(key, mean.shape)
        return (h, z), jnp.maximum(kl.sum(-1), 0.1).mean() + jnp.square(
            z @ p["z"] - x
        ).mean()

    start = jnp.zeros((x.shape[0], D)), jnp.zeros((x.shape[0], 8))
    return lax.scan(
        step, start, (x.swapaxes(0, 1), action.swapaxes(0, 1), jax.random.split(key, T))
    )[1].mean()
