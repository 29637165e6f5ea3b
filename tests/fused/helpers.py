"""Run a step twice at once: as Optax does, and in kernels interpreted on the CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpx
from tests.helpers import assert_same_bits, unfused

# elements of what the tests take for large, so that kernels are interpreted on a few
# tiles
LARGE = 2048
STEPS = 3
SHAPES = {
    "large": (32, 64),  # two tiles, eight blocks
    "equal": [(128,), (2, 64)],
    "other size": (4, 128),
    "ragged": (3, 50),
    "scalar": (),
}


def tree(seed, dtype, lowest=-3, highest=1, shapes=SHAPES):
    """Return a tree of numbers of many magnitudes, among them zeros of both signs."""
    rng = np.random.default_rng(seed)

    def leaf(shape):
        x = rng.choice([-1, 1], shape) * 10 ** rng.uniform(lowest, highest, shape)
        if x.ndim:
            x.flat[:2] = 0.0, -0.0
        return jnp.asarray(x, dtype)

    return jax.tree.map(leaf, shapes, is_leaf=lambda x: isinstance(x, tuple))


def plain_step(tx):
    """Return the step that `fused_update` computes."""

    def step(grads, state, params, **extra_args):
        updates, state = tx.update(grads, state, params, **extra_args)
        return optax.apply_updates(params, updates), state

    return step


def no_extra_args(params, grads):
    return {}


def assert_same_steps(tx, params, gradients, extra_args=no_extra_args):
    """Raise unless kernels give the bits of a plain step, step after step; return
    parameters and state after each.

    Both are in one program, without fusion: products and sums are contracted into one
    operation or not, by what stands around them.
    """
    state = tx.init(params)
    ways = plain_step(tx), mpx.fused_update(tx, interpret=True)

    def steps(grads, state, params):
        extra = extra_args(mpx.master_params(params, state), grads)
        return [step(grads, state, params, **extra) for step in ways]

    steps, trained = jax.jit(steps, compiler_options=unfused()), []
    for grads in gradients:
        expected, actual = steps(grads, state, params)
        assert_same_bits(actual, expected)
        params, state = expected
        trained.append(expected)
    return trained
