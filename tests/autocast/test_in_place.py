"""Check that Flax NNX modules remember what they did under autocast, and nothing else
does.
"""

import dataclasses

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
        return self.same(self.norm(self.layers[0](x))) + sum(
            jax.random.uniform(key) for key in keys
        )


CHANGING = {
    "nested": lambda: Noisy(nnx.Rngs(0)),
    "shared": lambda: Sharing(nnx.Rngs(0)),
}


def assert_same_changes(model, expected, fresh):
    """Check that two modules changed alike: counters exactly, statistics within the
    roundings of a layer before.
    """
    for changed, wanted in zip(
        jax.tree.leaves(model), jax.tree.leaves(expected), strict=True
    ):
        assert types_of(changed) == types_of(wanted)
        if jnp.issubdtype(wanted.dtype, jax.dtypes.prng_key):
            changed, wanted = jax.random.key_data(changed), jax.random.key_data(wanted)
        np.testing.assert_allclose(changed, wanted, rtol=2**-7, atol=2**-7)
    assert any(
        (a != b).any()
        for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(fresh), strict=True)
    )


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
def test_value_and_grad_changes_the_module_as_flax_does_and_keeps_the_dtypes_of_its_parameters(
    make,
):
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


EIGHT, NONE, INFINITE = (
    mpx.StaticLossScale(8.0),
    mpx.NoOpLossScale(),
    TOKENS.at[0, 0, 0].set(jnp.inf),
)
# In what it computes, its loss scale, the dtype and the size of gradients, the batch,
# and whether it is a good step.
STEPS = {
    "good": ("f16", EIGHT, F32, 1.0, TOKENS, True),
    "bad": ("f16", EIGHT, F32, 1.0, INFINITE, False),
    "good, not scaled": ("f16", NONE, F32, 1.0, TOKENS, True),
    "bad, not scaled": ("f16", NONE, F32, 1.0, INFINITE, False),
    "gradients that float32 has": ("bf16", EIGHT, F32, 2e6, TOKENS, True),
    "gradients that float16 has not": ("bf16", EIGHT, "f16", 2e6, TOKENS, False),
    "an optimizer that skips": (
        "bf16",
        scale_of(mpx.loss_scaling(optax.sgd(0.1), NONE)),
        F32,
        1.0,
        INFINITE,
        False,
    ),
    "an optimizer that does not": (
        "bf16",
        scale_of(optax.sgd(0.1)),
        F32,
        1.0,
        INFINITE,
        True,
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_that_is_skipped_keeps_the_bits_of_batch_statistics_and_counters(name):
    """`loss_scaling` sees the gradients that are returned."""
    how, scale, grad_dtype, factor, tokens, is_good = STEPS[name]
    model = Noisy(nnx.Rngs(0))
    before = jax.tree.leaves(nnx.clone(model))
    loss = mpx.autocast(lambda model, x: factor * (model(x) ** 2).mean(), how)
    step = mpx.value_and_grad(
        loss, scale, grad_dtype=grad_dtype, transform=nnx.value_and_grad
    )
    nnx.jit(step)(model, tokens)
    assert (
        all(
            bool((a == b).all())
            for a, b in zip(jax.tree.leaves(model), before, strict=True)
        )
        != is_good
    )


class Sowing(nnx.Module):
    def __init__(self):
        self.linear, self.seen = (
            nnx.Linear(16, 16, rngs=nnx.Rngs(0)),
            nnx.Intermediate(jnp.zeros(3, F32)),
        )

    def __call__(self, x):
        self.new = nnx.Intermediate(self.linear(x))
        return self.new[...]


@pytest.mark.parametrize(
    "differentiate", [lambda f: f, lambda f: mpx.grad(f, transform=nnx.value_and_grad)]
)
def test_what_is_popped_from_a_module_is_gone_whether_it_was_there_before_or_not(
    differentiate,
):
    popped = []
    loss = lambda model, x: (
        model(x).sum(),
        popped.append(set(nnx.pop(model, nnx.Intermediate))),
    )[0]
    model = Sowing()
    differentiate(mpx.autocast(loss, "bf16"))(model, TOKENS)
    assert popped == [{"seen", "new"}]
    assert (
        hasattr(model, "seen"),
        hasattr(model, "new"),
        hasattr(model, "linear"),
    ) == (False, False, True)


def test_a_changed_variable_keeps_the_dtype_in_which_it_is_stored():
    norm = nnx.BatchNorm(16, rngs=nnx.Rngs(0))
    nnx.update(norm, mpx.cast(nnx.state(norm), BF16))
    mpx.autocast(called, "bf16")(norm, TOKENS)
    mpx.full_precision(called)(norm, TOKENS)
    assert {leaf.dtype for leaf in jax.tree.leaves(norm)} == {BF16}
    wide = nnx.BatchNorm(16, rngs=nnx.Rngs(0))
    called(wide, TOKENS), called(wide, TOKENS)
    np.testing.assert_allclose(norm.mean[...].astype(F32), wide.mean[...], atol=2**-9)


class Counter(nnx.Module):
    """Counts its calls in a variable, and in an attribute, and sees its input."""

    def __init__(self):
        self.count, self.calls = nnx.Variable(jnp.zeros(())), 0

    def __call__(self, x):
        self.count[...] += 1
        self.calls += 1
        self.seen = nnx.Intermediate(x)
        return x


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Box:
    value: jax.Array


def test_modules_in_dictionaries_and_tuples_change_and_get_variables_and_nothing_else_changes():
    """One module in two arguments stays one; an attribute and an object of another
    library stay, as under `jax.jit`.
    """
    counter, box = Counter(), Box(jnp.zeros(3))

    def function(models, boxes, *, again):
        boxes["box"].value = again["deep"][0](models[1](TOKENS))
        return models[1] is again["deep"][0]

    assert mpx.autocast(function, "bf16")(
        (1, counter), {"box": box}, again={"deep": [counter]}
    )
    assert (counter.count[...], counter.calls) == (2, 0)
    assert_same_bits(counter.seen[...], TOKENS)
    assert_same_bits(box.value, jnp.zeros(3))


def test_value_and_grad_hands_back_the_changes_of_all_arguments_and_the_auxiliary_value():
    layer, counter = nnx.Linear(16, 4, rngs=nnx.Rngs(0)), Counter()
    loss = mpx.autocast(
        lambda layer, rest, x: ((layer(rest["counter"](x)) ** 2).sum(), x), "bf16"
    )
    step = mpx.value_and_grad(loss, EIGHT, has_aux=True, transform=nnx.value_and_grad)
    (_, aux), _ = nnx.jit(step)(layer, {"counter": counter}, TOKENS)
    assert_same_bits((aux, counter.count[...]), (TOKENS, jnp.float32(1)))
    nnx.jit(step)(layer, {"counter": counter}, INFINITE)
    assert_same_bits(counter.count[...], jnp.float32(1))


@pytest.mark.parametrize(
    "inside", [nnx.jit(called), nnx.remat(called)], ids=["jit", "remat"]
)
def test_a_flax_transformation_inside_is_no_change_of_the_module(inside):
    """NNX puts equal variables back: `jax.value_and_grad` loses nothing, and it is no
    error.
    """
    model, loss = (
        nnx.Linear(16, 16, rngs=nnx.Rngs(0)),
        lambda model, x: (inside(model, x) ** 2).sum(),
    )
    (value, grads), expected = (
        f(model, TOKENS) for f in (mpx.value_and_grad(mpx.autocast(loss, "bf16")), loss)
    )
    np.testing.assert_allclose(value, expected, rtol=2**-4)
    assert {g.dtype for g in jax.tree.leaves(grads)} == {F32}
