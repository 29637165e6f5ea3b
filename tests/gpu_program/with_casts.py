"""Recipes as one would write them by hand, with casts there and back in place of mpx's
roundings: they are controls.
"""

import functools

import jax
import jax.numpy as jnp
import optax


def to_float32(x):
    return x.astype(jnp.float32)


def kahan_with_casts(p, compensation, update):
    y = update + to_float32(compensation)
    new = (p + y).astype(jnp.bfloat16)
    return new, (y - (to_float32(new) - p)).astype(jnp.bfloat16)


def split_with_casts(p, low, update):
    master = p + to_float32(low) + update
    new = master.astype(jnp.bfloat16)
    return new, (master - to_float32(new)).astype(jnp.bfloat16)


def full_with_casts(p, master, update):
    del p
    return (master + update).astype(jnp.bfloat16), master + update


def with_casts(rounded, start):
    """Return a recipe: `start` is kept of a parameter; `rounded` makes new ones of a
    parameter, that, and an update.
    """

    def init(rule, params):
        return rule.init(jax.tree.map(to_float32, params)), jax.tree.map(start, params)

    def update(rule, updates, state, params):
        updates, wide = jax.tree.map(to_float32, (updates, params))
        updates, inner = rule.update(updates, state[0], wide)
        new, kept = jax.tree.transpose(
            jax.tree.structure(params),
            jax.tree.structure((0, 0)),
            jax.tree.map(rounded, wide, state[1], updates),
        )
        return jax.tree.map(lambda n, p: to_float32(n) - p, new, wide), (inner, kept)

    return lambda rule: optax.GradientTransformation(
        functools.partial(init, rule), functools.partial(update, rule)
    )


WITH_CASTS = {
    "Kahan": with_casts(kahan_with_casts, jnp.zeros_like),
    "split": with_casts(split_with_casts, jnp.zeros_like),
    "full": with_casts(full_with_casts, to_float32),
}
