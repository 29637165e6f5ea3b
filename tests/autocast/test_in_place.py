"""Check that autocast hands back what a function changes in its arguments: Flax NNX modules remember what they did."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpx
from tests.autocast.helpers import BF16, F32, normal
from tests.helpers import assert_same_bits, types_of

TOKENS = normal(0, 2, 6, 16)  # (batch, time, features)


class Noisy(nnx.Module):
    """Changes three variables in a call: two statistics and a counter of random keys."""

    def __init__(self, rngs, **options):
        self.linear = nnx.Linear(16, 16, rngs=rngs, **options)
        self.norm = nnx.BatchNorm(16, rngs=rngs, **options)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)))


def called(model, x):
    return model(x)


class Sharing(nnx.Module):
    """Calls one norm by three names, and draws from one stream of random keys."""

    def __init__(self, rngs):
        self.norm = self.same = nnx.BatchNorm(16, rngs=rngs)
        self.layers, self.stream = nnx.List([self.norm]), rngs.dropout

    def __call__(self, x):
        keys = self.stream(), self.stream()
        return self.same(self.norm(self.layers[0](x))) + sum(jax.random.uniform(key) for key in keys)


CHANGING = {
    "nested": lambda: Noisy(nnx.Rngs(0)),
    "shared": lambda: Sharing(nnx.Rngs(0)),
}


def assert_same_changes(model, expected, fresh):
    """Check that two modules changed alike: counters exactly, statistics within the roundings of a layer before."""
    for changed, wanted in zip(jax.tree.leaves(model), jax.tree.leaves(expected), strict=True):
        assert types_of(changed) == types_of(wanted)
        if jnp.issubdtype(wanted.dtype, jax.dtypes.prng_key):
            changed, wanted = jax.random.key_data(changed), jax.random.key_data(wanted)
        np.testing.assert_allclose(changed, wanted, rtol=2**-7, atol=2**-7)
    assert any((a != b).any() for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(fresh), strict=True))


WAYS = {
    "eager": (lambda fun: fun, lambda fun: fun),
    "jit": (nnx.jit, nnx.jit),
    "remat inside": (nnx.remat, nnx.jit),
}


@pytest.mark.parametrize("name", CHANGING)
@pytest.mark.parametrize("way", WAYS)
def test_a_module_that_changes_itself_is_changed_as_without_autocast(name, way):
    make, (inside, outside) = CHANGING[name], WAYS[way]
    model, expected = make(), make()
    result = outside(mpx.autocast(inside(called), "bf16"))(model, TOKENS)
    np.testing.assert_allclose(result, called(expected, TOKENS), atol=2**-5)
    assert_same_changes(model, expected, make())


@pytest.mark.parametrize("make", CHANGING.values(), ids=CHANGING)
def test_value_and_grad_changes_the_module_as_flax_does_and_keeps_the_dtypes_of_its_parameters(make):
    loss = lambda model, x: (model(x) ** 2).mean()
    model, expected = make(), make()
    nnx.update(model, mpx.cast(nnx.state(model, nnx.Param), BF16))
    nnx.update(expected, mpx.cast(mpx.cast(nnx.state(expected, nnx.Param), BF16), F32))
    fresh = nnx.clone(expected)
    mixed = mpx.value_and_grad(mpx.autocast(loss, "bf16"), transform=nnx.value_and_grad)
    _, grads = nnx.jit(mixed)(model, TOKENS)
    nnx.jit(nnx.value_and_grad(loss))(expected, TOKENS)
    assert {g.dtype for g in jax.tree.leaves(grads)} <= {F32}
    assert {p.dtype for p in jax.tree.leaves(nnx.state(model, nnx.Param))} <= {BF16}
    nnx.update(model, mpx.cast(nnx.state(model, nnx.Param), F32))
    assert_same_changes(model, expected, fresh)


def scale_of(tx):
    optimizer = nnx.Optimizer(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), tx, wrt=nnx.Param)
    return mpx.get_loss_scale(optimizer.opt_state)


EIGHT, NONE, INFINITE = mpx.StaticLossScale(8.0), mpx.NoOpLossScale(), TOKENS.at[0, 0, 0].set(jnp.inf)
# In what it computes, its loss scale, the dtype and the size of gradients, the batch, and whether it is a good step.
STEPS = {
    "good": ("f16", EIGHT, F32, 1.0, TOKENS, True),
    "bad": ("f16", EIGHT, F32, 1.0, INFINITE, False),
    "good, not scaled": ("f16", NONE, F32, 1.0, TOKENS, True),
    "bad, not scaled": ("f16", NONE, F32, 1.0, INFINITE, False),
    "gradients that float32 has": ("bf16", EIGHT, F32, 2e6, TOKENS, True),
    "gradients that float16 has not": ("bf16", EIGHT, "f16", 2e6, TOKENS, False),
    "an optimizer that skips": ("bf16", scale_of(mpx.loss_scaling(optax.sgd(0.1), NONE)), F32, 1.0, INFINITE, False),
    "an optimizer that does not": ("bf16", scale_of(optax.sgd(0.1)), F32, 1.0, INFINITE, True),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_that_is_skipped_keeps_the_bits_of_batch_statistics_and_counters(name):
    """`loss_scaling` sees the gradients that are returned."""
    how, scale, grad_dtype, factor, tokens, is_good = STEPS[name]
    model = Noisy(nnx.Rngs(0))
    before = jax.tree.leaves(nnx.clone(model))
    loss = mpx.autocast(lambda model, x: factor * (model(x) ** 2).mean(), how)
    step = mpx.value_and_grad(loss, scale, grad_dtype=grad_dtype, transform=nnx.value_and_grad)
    nnx.jit(step)(model, tokens)
    assert all(bool((a == b).all()) for a, b in zip(jax.tree.leaves(model), before, strict=True)) != is_good


def test_a_changed_variable_keeps_the_dtype_in_which_it_is_stored():
    norm = nnx.BatchNorm(16, rngs=nnx.Rngs(0))
    nnx.update(norm, mpx.cast(nnx.state(norm), BF16))
    mpx.autocast(called, "bf16")(norm, TOKENS)
    mpx.full_precision(called)(norm, TOKENS)
    assert {leaf.dtype for leaf in jax.tree.leaves(norm)} == {BF16}
    wide = nnx.BatchNorm(16, rngs=nnx.Rngs(0))
    called(wide, TOKENS), called(wide, TOKENS)
    np.testing.assert_allclose(norm.mean[...].astype(F32), wide.mean[...], atol=2**-9)


def test_changes_reach_a_module_deep_in_a_keyword_argument_and_a_state_that_is_merged_inside():
    models = {"left": (), "right": [nnx.BatchNorm(16, rngs=nnx.Rngs(0))]}
    graphdef, state = nnx.split(nnx.BatchNorm(16, rngs=nnx.Rngs(0)))
    expected = nnx.BatchNorm(16, rngs=nnx.Rngs(0))
    mpx.autocast(lambda *, models, x: models["right"][0](x), "bf16")(models=models, x=TOKENS)
    mpx.autocast(lambda state, x: nnx.merge(graphdef, state)(x), "bf16")(state, TOKENS)
    called(expected, TOKENS)
    assert_same_bits(jax.tree.leaves((models["right"][0], state)), jax.tree.leaves((expected, nnx.state(expected))))


class Carried(nnx.Module):
    """Becomes the argument, on the way through a loop that exchanges its carries twice."""

    def __init__(self):
        self.value = nnx.Variable(jnp.zeros(3))

    def __call__(self, x):
        exchange = lambda c, _: ((c[1], c[0]), None)
        (self.value[...], _), _ = jax.lax.scan(exchange, (x, self.value[...]), length=2)


def test_a_value_that_changes_its_place_in_a_loop_is_a_change():
    model = Carried()
    mpx.autocast(called, "bf16")(model, jnp.ones(3))
    assert_same_bits(model.value[...], jnp.ones(3))


def scanned(blocks, x):
    """Runs a stack of layers, each in a checkpoint."""
    block = nnx.remat(called)
    return nnx.scan(lambda x, model: block(model, x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, blocks)


@pytest.mark.parametrize("inside", [nnx.jit(called), nnx.remat(called), scanned], ids=["jit", "remat", "scan"])
def test_a_flax_transformation_inside_is_no_change_of_the_module(inside):
    """NNX puts the variables back as it found them: `jax.value_and_grad` loses nothing, and it is no error."""
    make = lambda rngs: nnx.Linear(16, 16, rngs=rngs)
    model = nnx.split_rngs(splits=3)(nnx.vmap(make))(nnx.Rngs(0)) if inside is scanned else make(nnx.Rngs(0))
    loss = lambda model, x: (inside(model, x) ** 2).sum()
    (value, grads), expected = (f(model, TOKENS) for f in (mpx.value_and_grad(mpx.autocast(loss, "bf16")), loss))
    np.testing.assert_allclose(value, expected, rtol=2**-4)
    assert {g.dtype for g in jax.tree.leaves(grads)} == {F32}
