"""Run a training loop in float32, bfloat16 and float16, and hold its weights against
those of the float32 optimizer.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import io_callback

import mpx
from tests.autocast.helpers import contractions
from tests.helpers import assert_same_bits

STEPS = 20


class Memory:
    """The leaves of the gradients of each step, as they reach a rule."""

    def __init__(self):
        self.steps = []

    def keep(self, leaves):
        """Return the leaves, remembered."""
        self.steps.append([np.array(leaf) for leaf in leaves])
        return leaves


def remembering(rule, memory):
    """Return a rule whose gradients are remembered.

    They come back from the host, so that no compiler can make the sums that follow of
    anything but these numbers.
    """

    @jax.jit
    def step(grads, state, params):
        leaves, treedef = jax.tree.flatten(grads)
        leaves = io_callback(memory.keep, leaves, leaves, ordered=True)
        return rule.update(jax.tree.unflatten(treedef, leaves), state, params)

    update = lambda grads, state, params=None, **extra_args: step(grads, state, params)
    return optax.GradientTransformationExtraArgs(rule.init, update)


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to train: what a user of mpx gives to a library, and what a user without
    mpx gives.

    Attributes:
        tx: the optimizer.
        cast: makes parameters of float32 ones.
        autocast: makes functions of float32 ones.
        grad_of: `jax.value_and_grad`, or mpx's under the scale of an optimizer's state,
            for loops of one's own.
        memory: of the optimizer's rule.
    """

    tx: optax.GradientTransformation
    cast: Callable[[Any], Any]
    autocast: Callable[[Any], Any]
    grad_of: Callable[..., Any]
    memory: Memory


class Run(NamedTuple):
    """What a training loop returns.

    Attributes:
        start: parameters before the first step.
        params: after the last.
        opt_state: after the last.
        losses: of each step.
        loss: what is cast, as a function, with arguments to call it with.
    """

    start: Any
    params: Any
    opt_state: Any
    losses: Any
    loss: tuple[Any, ...]


def sgd(learning_rate):
    """Return SGD with momentum whose products are exact, as long as the learning rate
    is a power of two.

    So its weights have the same bits in every program, whatever a compiler makes of
    products and sums.
    """
    return optax.sgd(learning_rate, momentum=0.5)


def float32(learning_rate):
    """Return the way to train without mpx."""
    same, memory = lambda x: x, Memory()
    grad_of = lambda loss, opt_state, transform=jax.value_and_grad, **options: (
        transform(loss, **options)
    )
    return Way(remembering(sgd(learning_rate), memory), same, same, grad_of, memory)


def under(policy, learning_rate, *, scale_inside=None, **options):
    """Return the way to train under a policy.

    A static scale inside of the functions under `autocast` stands in place of that of
    `mpx.value_and_grad`, for loops that differentiate themselves. Other options are
    those of `mixed_precision`.
    """
    policy, memory = mpx.get_policy(policy), Memory()
    dynamic = (
        mpx.DynamicLossScale(2.0**10) if policy.compute_dtype == jnp.float16 else None
    )
    outside, inside = (
        (dynamic, None) if scale_inside is None else (mpx.NoOpLossScale(), scale_inside)
    )
    tx = mpx.mixed_precision(
        remembering(sgd(learning_rate), memory), policy, loss_scale=outside, **options
    )
    grad_of = lambda loss, opt_state, **options: mpx.value_and_grad(
        loss, mpx.get_loss_scale(opt_state), **options
    )
    return Way(
        tx,
        policy.cast_to_param,
        lambda fun: mpx.autocast(fun, policy, loss_scale=inside),
        grad_of,
        memory,
    )


def judge(train, policy, learning_rate, **options):
    """Raise unless a loop trains under a policy as in float32, with the weights that
    the float32 optimizer makes.

    The options are those of `under`.
    """
    way = under(policy, learning_rate, **options)
    ours, theirs = train(way), train(float32(learning_rate))
    fun, *args = ours.loss
    assert mpx.get_policy(policy).compute_dtype in [
        c.lhs for c in contractions(fun, *args)
    ]
    dtypes = lambda params: [leaf.dtype for leaf in jax.tree.leaves(params)]
    assert dtypes(ours.params) == dtypes(ours.start)
    require_losses_of_float32(ours, theirs)
    require_masters_of_float32(ours, way.memory, learning_rate)


def require_losses_of_float32(ours, theirs):
    """Raise unless losses differ by the roundings of products: at most by a tenth of
    what training gains.
    """
    gain = theirs.losses[0] - theirs.losses[-1]
    assert gain > 0.1 * abs(theirs.losses[0])
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol=0, atol=0.1 * gain)


def require_masters_of_float32(run, memory, learning_rate):
    """Raise unless masters have the bits of what SGD in float32 makes of the gradients
    that the rule got.
    """
    jax.effects_barrier()  # The last steps may still be on their way to the host.
    assert len(memory.steps) == STEPS
    rule, weights = sgd(learning_rate), mpx.cast(run.start, "f32")
    state, structure = rule.init(weights), jax.tree.structure(weights)
    for leaves in memory.steps:
        updates, state = rule.update(
            jax.tree.unflatten(structure, leaves), state, weights
        )
        weights = optax.apply_updates(weights, updates)
    assert_same_bits(mpx.master_params(run.params, run.opt_state), weights)
