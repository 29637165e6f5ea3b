"""Every rule under every way to keep parameters and every way to keep its state: what
the table of state formats runs.

The problem: a network of 16 inputs, 64 hidden units and 4 outputs learns another
network from 256 noisy examples, 32 a step, for 120 steps. It computes in float32 from
the parameters as they are stored.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpx
from tests.rules import MIN_SIZE, RULES, WRITE_BACKS, moment_fields

STEPS = 120
BATCH = 32


class FourBits(mpx.Blockwise4bit):
    """4 bits, and 8 for second moments."""

    def for_role(self, role):
        """Return the format of a leaf."""
        return mpx.Blockwise8bit().for_role(role) if role == "second moment" else self

    def why_unsuitable(self, role, shape):
        """Refuse nothing."""
        return None


STATES = {
    "f32": None,
    "bf16 nearest": {"format": "bf16"},
    "bf16 stochastic": {
        "format": "bf16",
        "rounding": "stochastic",
        "key": jax.random.PRNGKey(2),
    },
    "8-bit": {"format": mpx.Blockwise8bit()},
    "4-bit": {
        "format": FourBits(),
        "key": jax.random.PRNGKey(2),
    },
}


def initial_params(seed):
    """float32 numbers that bfloat16 holds."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: (
        (rng.normal(size=shape) / np.sqrt(shape[0]))
        .astype(jnp.bfloat16)
        .astype(np.float32)
    )
    return {
        "w1": normal(16, 64),
        "b1": np.zeros(64, np.float32),
        "w2": normal(64, 4),
        "b2": np.zeros(4, np.float32),
    }


@functools.cache
def examples():
    """Inputs and noisy targets, `[steps, batch, features]`."""
    rng = np.random.default_rng(100)
    x = rng.normal(size=(256, 16)).astype(np.float32)
    y = (
        np.tanh(x @ rng.normal(size=(16, 8)) / 4) @ rng.normal(size=(8, 4))
        + 0.1 * rng.normal(size=(256, 4))
    ).astype(np.float32)
    order = np.concatenate(
        [rng.permutation(256) for _ in range(-(-STEPS * BATCH // 256))]
    )[: STEPS * BATCH]
    return x[order].reshape(STEPS, BATCH, 16), y[order].reshape(STEPS, BATCH, 4)


def loss_fn(params, batch):
    """Return the mean squared error of a batch, in float32."""
    x, y = batch
    p = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    b1, b2 = (jnp.broadcast_to(b, (len(x), len(b))) for b in (p["b1"], p["b2"]))
    return jnp.mean((jnp.tanh(x @ p["w1"] + b1) @ p["w2"] + b2 - y) ** 2)


def transformation(rule, write_back, state):
    """Return a rule, by names, whose state is kept in a way under a way to keep
    parameters; None if it has none.
    """
    tx, options = RULES[rule].make(), STATES[state]
    if options is not None:
        fields = moment_fields(rule)
        if fields is None:
            return None
        options = dict(options)
        tx = mpx.low_precision_state(
            tx, {fields: options.pop("format")}, min_size=MIN_SIZE, **options
        )
    return WRITE_BACKS[write_back](tx)


def gradients(rule, params, batch):
    """Of the parameters as they are stored, in float32; for each of four parts of the
    batch if the rule wants so.
    """
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    if not rule.per_example:
        return jax.grad(loss_fn)(wide, batch)
    parts = jax.tree.map(lambda a: a.reshape(4, -1, *a.shape[1:]), batch)
    return jax.vmap(jax.grad(loss_fn), in_axes=(None, 0))(wide, parts)


def make_step(rule, tx):
    """One training step, for a scan: `(params, state), batch -> (params, state),
    None`.
    """

    def step(carry, batch):
        params, state = carry
        grads = gradients(rule, params, batch)
        best = mpx.master_params(params, state)
        extra = rule.extra_args(best, grads, lambda p: loss_fn(p, batch))
        updates, state = tx.update(grads, state, params, **extra)
        return (optax.apply_updates(params, updates), state), None

    return step


def final_loss(params: Any, state: Any) -> jax.Array:
    """Over all examples, of the best float32 values of the parameters."""
    x, y = examples()
    return loss_fn(
        mpx.master_params(params, state), (x.reshape(-1, 16), y.reshape(-1, 4))
    )


def train(rule_name, tx, dtype, seed=0, compiler_options=None):
    """The loss before and after a training, and the state after it."""
    rule = RULES[rule_name]
    params = jax.tree.map(lambda p: jnp.asarray(p, dtype), initial_params(seed))
    # Operation by operation: other rules have the same ones.
    state = jax.tree.map(jnp.asarray, tx.init(params))
    strong = jax.tree.map(lambda x: jax.lax.convert_element_type(x, x.dtype), state)
    carry = (params, strong)
    run = lambda carry, batches: jax.lax.scan(make_step(rule, tx), carry, batches)[0]
    run = jax.jit(run, compiler_options=compiler_options)
    new_params, new_state = run(carry, examples())
    return (
        float(final_loss(params, state)),
        float(final_loss(new_params, new_state)),
        new_state,
    )
