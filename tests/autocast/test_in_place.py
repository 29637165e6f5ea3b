"""Arguments that a function changes in place under autocast: Flax NNX modules, which remember what they did."""

import functools
import re

import jax
import numpy as np
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


REMEDY = re.escape(
    "would be lost, as under `jax.jit`: {}. Return the new values. With Flax NNX: `graphdef, params, rest = "
    "nnx.split(model, nnx.Param, ...)` outside, and inside `model = nnx.merge(graphdef, params, rest)`, with "
    "`nnx.state(model, nnx.Not(nnx.Param))` among the results."
)
CHANGING = {
    "dropout": (lambda: nnx.Dropout(0.5, rngs=nnx.Rngs(0)), "rngs/count of the Dropout at 0"),
    "batch norm": (lambda: nnx.BatchNorm(16, rngs=nnx.Rngs(0)), "mean, var of the BatchNorm at 0"),
    "recurrent": (lambda: nnx.RNN(nnx.SimpleCell(16, 4, rngs=nnx.Rngs(0))), "rngs/count of the RNN at 0"),
    "nested": (lambda: Noisy(nnx.Rngs(0)), "dropout/rngs/count, norm/mean, norm/var of the Noisy at 0"),
}


@pytest.mark.parametrize(("make", "where"), CHANGING.values(), ids=CHANGING)
def test_a_module_that_changes_itself_is_an_error_that_names_the_variables_and_the_remedy(make, where):
    """Those that are another value after the call; under a transformation, not all that it puts back."""
    for transform in (lambda fun: fun, nnx.jit, nnx.remat):
        with pytest.raises(ValueError, match=REMEDY.replace(re.escape("{}"), re.escape(where))):
            mpx.autocast(transform(called), "bf16")(make(), TOKENS)


def test_a_module_that_is_merged_without_a_copy_is_an_error_that_tells_to_copy():
    """It is split and merged already, but its variables are those of the argument."""
    graphdef, state = nnx.split(Noisy(nnx.Rngs(0)))
    merged = lambda state, x, **options: nnx.merge(graphdef, state, **options)(x)
    with pytest.raises(
        ValueError, match=r"norm/var of the State at 0. .* `model = nnx.merge\(graphdef, state, copy=True\)`"
    ):
        mpx.autocast(merged, "bf16")(state, TOKENS)
    mpx.autocast(functools.partial(merged, copy=True), "bf16")(state, TOKENS)


def test_the_error_says_in_which_argument_the_module_is():
    with pytest.raises(ValueError, match="mean, var of the BatchNorm at models/right/0"):
        mpx.autocast(lambda *, models, x: models["right"][0](x), "bf16")(
            models={"left": (), "right": [nnx.BatchNorm(16, rngs=nnx.Rngs(0))]}, x=TOKENS
        )


def test_a_module_that_changes_itself_is_an_error_in_value_and_grad_too():
    loss = mpx.autocast(lambda model, x: model(x).sum(), "bf16")
    with pytest.raises(ValueError, match="dropout/rngs/count, norm/mean, norm/var of the Noisy at 0"):
        mpx.value_and_grad(loss, transform=nnx.value_and_grad)(Noisy(nnx.Rngs(0)), TOKENS)


@pytest.mark.parametrize("copy", [False, True])
def test_a_module_split_and_merged_inside_returns_its_new_state(copy):
    """The counter is 1; the statistics are those of float32, but for the roundings of the layer before the norm."""
    graphdef, params, rest = nnx.split(Noisy(nnx.Rngs(0), param_dtype=BF16), nnx.Param, ...)

    def run(params, rest, x):
        model = nnx.merge(graphdef, params, rest, copy=copy)
        return (model(x) ** 2).mean(), nnx.state(model, nnx.Not(nnx.Param))

    value_and_grad = mpx.value_and_grad(mpx.autocast(run, "bf16"), has_aux=True)
    (_, new), grads = jax.jit(value_and_grad)(params, rest, TOKENS)
    _, expected = jax.jit(run)(jax.tree.map(lambda x: x.astype(F32), params), rest, TOKENS)
    assert int(new["dropout"]["rngs"]["count"][...]) == 1
    assert {g.dtype for g in jax.tree.leaves(grads)} == {F32}
    assert [x.shape for x in jax.tree.leaves(new)] == [x.shape for x in jax.tree.leaves(expected)]
    np.testing.assert_allclose(new["norm"]["var"][...], expected["norm"]["var"][...], rtol=2**-7)


def test_a_module_whose_new_state_is_returned_may_change():
    def with_statistics(model, x):
        return model(x), nnx.state(model, nnx.BatchStat)

    _, state = mpx.autocast(with_statistics, "bf16")(nnx.BatchNorm(16, rngs=nnx.Rngs(0)), TOKENS)
    _, expected = with_statistics(nnx.BatchNorm(16, rngs=nnx.Rngs(0)), TOKENS)
    assert types_of(state) == types_of(expected)
    np.testing.assert_allclose(state["mean"][...], expected["mean"][...], rtol=1e-5, atol=1e-6)


def test_a_variable_that_is_only_rounded_is_changed_too():
    def rounding(model, x):
        model.kernel[...] = model.kernel[...].astype(BF16).astype(F32)
        return model(x)

    with pytest.raises(ValueError, match="kernel of the Linear at 0"):
        mpx.autocast(rounding, "bf16")(nnx.Linear(16, 4, rngs=nnx.Rngs(0)), TOKENS)


def test_a_module_in_evaluation_mode_is_an_argument_like_any_other():
    model = Noisy(nnx.Rngs(0))
    model.eval()
    graphdef, state = nnx.split(model)
    expected = mpx.autocast(lambda state, x: nnx.merge(graphdef, state, copy=True)(x), "bf16")(state, TOKENS)
    assert_same_bits(mpx.autocast(called, "bf16")(model, TOKENS), expected)


def summed(model, x):
    return model(x).sum()


@pytest.mark.parametrize(
    ("inside", "without"),
    [
        pytest.param(nnx.jit(called), called, id="jit"),
        pytest.param(nnx.remat(called), called, id="remat"),
        pytest.param(nnx.vmap(called, in_axes=(None, 0)), called, id="vmap"),
        pytest.param(nnx.grad(nnx.jit(summed)), nnx.grad(summed), id="grad of jit"),
    ],
)
def test_a_flax_transformation_inside_is_no_change_of_the_module(inside, without):
    """NNX puts the variables back as it found them."""
    model = nnx.Linear(16, 4, rngs=nnx.Rngs(0))
    assert_same_bits(mpx.autocast(inside, "bf16")(model, TOKENS), mpx.autocast(without, "bf16")(model, TOKENS))


def test_a_scan_of_rematerialised_blocks_is_no_change_of_the_module():
    """One layer's roundings are within 2^-8; a few of them in a row."""
    blocks = nnx.split_rngs(splits=3)(nnx.vmap(lambda rngs: nnx.Linear(16, 16, rngs=rngs)))(nnx.Rngs(0))
    block = nnx.remat(called)
    scan = nnx.scan(lambda x, model: block(model, x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    out = mpx.autocast(lambda blocks, x: scan(x, blocks), "bf16")(blocks, TOKENS)
    np.testing.assert_allclose(out, scan(TOKENS, blocks), atol=2**-4)


@pytest.mark.parametrize(
    "outside", [nnx.jit, jax.jit, lambda f: nnx.vmap(f, in_axes=(None, 0))], ids=["nnx.jit", "jax.jit", "nnx.vmap"]
)
def test_a_flax_transformation_outside_takes_an_autocast_function(outside):
    """The rounding of the result of a contraction is dropped by XLA if it can: in one program, not between two."""
    model = nnx.Linear(16, 4, use_bias=False, rngs=nnx.Rngs(0))
    expected = mpx.autocast(called, "bf16")(model, TOKENS)
    actual = outside(mpx.autocast(called, "bf16"))(model, TOKENS)
    assert_same_bits(actual.astype(BF16), expected.astype(BF16))
