"""Inject infinities and NaN wherever they can arise on the real path from loss to parameters (invariant 4)."""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx
from tests.helpers import QUICKLY, assert_same_bits, cases

pytestmark = pytest.mark.optax_promotion

KINDS = (np.inf, -np.inf, np.nan)
SCHEDULE = optax.warmup_cosine_decay_schedule(1e-3, 1e-2, 2, 10)
RULE = optax.chain(optax.clip_by_global_norm(1.0), optax.add_noise(1e-3, 0.5, key=0), optax.adamw(SCHEDULE))


def few_bits():
    """Return an optimizer with 8-bit moments, rounded stochastically, and an average of the masters."""
    formats = {"mu|nu": mpx.Blockwise8bit(16)}
    key = jax.random.key(1)
    stored = mpx.low_precision_state(optax.adamw(SCHEDULE), formats, min_size=1, rounding="stochastic", key=key)
    return mpx.master_weights(optax.chain(stored, mpx.params_ema(0.9)))


OPTIMIZERS = {
    "recipe": lambda: mpx.mixed_precision(RULE, "f16"),
    "few bits": lambda: mpx.loss_scaling(few_bits()),
    "multi steps": lambda: mpx.loss_scaling(optax.MultiSteps(mpx.master_weights(RULE), 2)),
}


# --- A training run of four steps of two microbatches each, one of which may be bad. ---


class Fault(NamedTuple):
    """A fault of a step. It is an input of the compiled program, so that one program serves all faults."""

    leaf: Any  # the number of a gradient, or one of the two below
    element: Any = 0
    poison: Any = 1.0
    microbatch: Any = 0


NOWHERE, IN_THE_LOSS = -1, -2
GOOD = Fault(NOWHERE)
STEPS, MICROBATCHES = 4, 2


def params():
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float16)
    return {
        "down": {"kernel": normal(4, 2)},
        "gain": jnp.ones((), jnp.float16),
        "up": {"bias": jnp.full(4, -0.0, jnp.float16), "kernel": normal(3, 4)},
    }


def batches():
    """Return eight examples for each microbatch of each step."""
    rng = np.random.default_rng(1)
    normal = lambda width: jnp.asarray(rng.normal(size=(STEPS, MICROBATCHES, 8, width)), jnp.float16)
    return normal(3), normal(2)


def loss_of(params, batch, factor):
    x, y = batch
    hidden = jnp.tanh(x @ params["up"]["kernel"] + params["up"]["bias"][None])
    return jnp.mean((hidden @ params["down"]["kernel"] * params["gain"] - y) ** 2) * factor


def poisoned(grads, fault):
    """Return the gradients with the fault in them, if it is one of a gradient."""
    leaves, treedef = jax.tree.flatten(grads)
    for i, g in enumerate(leaves):
        here = (fault.leaf == i) & (np.arange(g.size).reshape(g.shape) == fault.element)
        leaves[i] = jnp.where(here, fault.poison, g)
    return treedef.unflatten(leaves)


def training_step(tx, carry, batch, fault):
    """Take one step on the mean of two microbatches; the fault is in one of them."""
    params, state = carry
    loss_and_grads = mpx.value_and_grad(mpx.autocast(loss_of, "f16"), mpx.get_loss_scale(state))

    def microbatch_grads(batch, microbatch):
        here = fault._replace(leaf=jnp.where(microbatch == fault.microbatch, fault.leaf, NOWHERE))
        factor = jnp.where(here.leaf == IN_THE_LOSS, here.poison, 1.0)
        return poisoned(loss_and_grads(params, batch, factor)[1], here)

    grads = jax.vmap(microbatch_grads)(batch, jnp.arange(MICROBATCHES))
    updates, state = tx.update(jax.tree.map(lambda g: g.mean(0), grads), state, params)
    return optax.apply_updates(params, updates), state


@functools.cache
def trained(optimizer):
    """Return the faults of all training runs, and parameters and states before and after each step.

    Each run has one fault, at its first, third or last step, and three good steps on the same three batches. In the
    run at the end of the list the last step has no fault. They go side by side in one program.
    """
    tx, start = OPTIMIZERS[optimizer](), params()
    sizes = [leaf.size for leaf in jax.tree.leaves(start)]
    places = [(leaf, element) for leaf, size in enumerate(sizes) for element in range(size)] + [(IN_THE_LOSS, 0)]
    faults = [
        (position, Fault(leaf, element, poison, microbatch))
        for position in (0, 2, 3)
        for (leaf, element), poison, microbatch in itertools.product(places, KINDS, range(MICROBATCHES))
    ] + [(3, GOOD)]
    sequences = [[fault if step == at else GOOD for step in range(STEPS)] for at, fault in faults]
    numbers = [Fault(*(np.array(column) for column in zip(*sequence, strict=True))) for sequence in sequences]
    which_batch = np.stack([[step - (step > at) for step in range(STEPS)] for at, _ in faults])

    def train(which_batch, faults):
        def step(carry, inputs):
            index, fault = inputs
            carry = training_step(tx, carry, jax.tree.map(lambda x: x[index], batches()), fault)
            return carry, carry

        carry = start, tx.init(start)
        _, after = jax.lax.scan(step, carry, (which_batch, faults))
        return jax.tree.map(lambda first, rest: jnp.concatenate([first[None], rest]), carry, after)

    run = jax.jit(jax.vmap(train), compiler_options=QUICKLY)
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *numbers)
    return faults, jax.device_get(run(which_batch, stacked))


# In turn, for the program that the tests of one share.
every_optimizer = pytest.mark.parametrize("optimizer", cases(OPTIMIZERS, {"recipe", "few bits"}), scope="module")


def at_step(history, training, step):
    return jax.tree.map(lambda x: x[training, step], history)


def before_and_after_the_faults(optimizer):
    """Return parameters and states before and after each bad step, with a leading axis for the fault."""
    faults, history = trained(optimizer)
    number, at = np.arange(len(faults) - 1), np.array([at for at, _ in faults[:-1]])
    return tuple(jax.tree.map(lambda x, step=step: x[number, step], history) for step in (at, at + 1))


@every_optimizer
def test_a_step_with_a_fault_in_any_place_changes_nothing_but_the_scale_and_the_notes(optimizer):
    """Try each element of each gradient, and the loss, of each microbatch, infinite or NaN, at three of four steps."""
    (before, old), (after, new) = before_and_after_the_faults(optimizer)
    assert_same_bits(after, before)
    assert_same_bits(new.inner_state, old.inner_state)
    np.testing.assert_array_equal(new.skipped_steps, old.skipped_steps + 1)
    np.testing.assert_array_equal(new.loss_scale, old.loss_scale / 2)
    assert not new.scale_state.counter.any()
    assert not new.stuck_steps.any()


@every_optimizer
def test_the_good_steps_are_those_of_a_training_without_the_bad_one(optimizer):
    """Compare three good steps with a bad one before, among or after them: the same bits, under another scale."""
    faults, history = trained(optimizer)
    params, state = at_step(history, -1, STEPS - 1)
    skipped = slice(0, len(faults) - 1)
    expected = jax.tree.map(lambda x: jnp.broadcast_to(x, (len(faults) - 1, *x.shape)), (params, state.inner_state))
    final_params, final_state = at_step(history, skipped, STEPS)
    assert_same_bits((final_params, final_state.inner_state), expected)
    first_params, first_state = at_step(history, -1, 0)  # and these steps do train
    assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, (params, first_params)), strict=True))
    assert any(
        (a != b).any() for a, b in zip(*map(jax.tree.leaves, (state.inner_state, first_state.inner_state)), strict=True)
    )


@every_optimizer
def test_the_first_bad_gradient_of_the_last_bad_step_is_noted(optimizer):
    """The one with the fault, or the first of all if it is in the loss; later good steps keep the note."""
    faults, history = trained(optimizer)
    for (at, fault), over_steps in zip(faults, history[1].first_nonfinite, strict=True):
        assert (over_steps[: at + 1] == -1).all()
        assert (over_steps[at + 1 :] == (0 if fault.leaf == IN_THE_LOSS else fault.leaf)).all()
