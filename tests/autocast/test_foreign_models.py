"""`autocast` around models that nobody here wrote: Flax Linen and NNX, `jax.nn` attention."""

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.extend import core as jex_core

import mpx
from tests.autocast.helpers import BF16, CONTRACTIONS, F16, F32, all_in, contractions, eqns_of, exact_jit
from tests.helpers import assert_same_bits, types_of

pytestmark = pytest.mark.slow  # models of Flax and Equinox take long to trace and to compile


def uniform(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).uniform(-1, 1, shape), F32)


TOKENS = uniform(2, 6, 16)  # (batch, time, features)
IMAGES = uniform(2, 6, 6, 4)  # (batch, height, width, channels)
IDS = jnp.asarray([[0, 3, 3, 7, 10, 3], [9, 1, 3, 3, 0, 2]])


def cast(tree, dtype):
    is_floating = lambda x: hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)
    return jax.tree.map(lambda x: x.astype(dtype) if is_floating(x) else x, tree)


def filled(shapes):
    """Return parameters for a tree of shapes: scales and variances around 1, the rest around 0, none special."""
    rng = np.random.default_rng(1)

    def value(path, leaf):
        if not (hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)):
            return leaf
        if leaf.ndim >= 2:
            return jnp.asarray(rng.normal(0, leaf.shape[-2] ** -0.5, leaf.shape), F32)
        around = 1 if re.search("scale|var|norm", jax.tree_util.keystr(path)) else 0
        return jnp.asarray(rng.normal(around, 0.2, leaf.shape), F32)

    return jax.tree.map_with_path(value, shapes)


# --- the models: a function, its parameters in float32, and other inputs ----------------------------------------------


class Model(NamedTuple):
    fun: Callable[..., Any]
    params: Any
    inputs: tuple[Any, ...]


def linen(module, *inputs, **options):
    params = filled(jax.eval_shape(module.init, jax.random.key(0), *inputs))
    return Model(functools.partial(module.apply, **options), params, inputs)


def attention(kv_heads=4, bias=False):
    shapes = {"query": (2, 6, 4, 8), "key": (2, 6, kv_heads, 8), "value": (2, 6, kv_heads, 8), "bias": (2, 4, 6, 6)}
    params = {name: 3 * uniform(*shape, seed=len(name)) for name, shape in shapes.items() if bias or name != "bias"}
    return Model(lambda params: jax.nn.dot_product_attention(**params), params, ())


class EmbedAndAttend(nn.Module):
    @nn.compact
    def __call__(self, ids):
        embed = nn.Embed(11, 16)
        return embed.attend(nn.Dense(16)(embed(ids)))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x))
        return x + nn.Dense(16)(nn.gelu(nn.Dense(32)(nn.RMSNorm()(x)))), None


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
        block = nn.remat(Block, prevent_cse=False)
        return nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)()(x, None)[0]


MODELS: dict[str, Callable[[], Model]] = {
    "linen.Embed": lambda: linen(EmbedAndAttend(), IDS),
    "linen.BatchNorm": lambda: linen(
        nn.Sequential([nn.Dense(16), nn.BatchNorm(False)]), TOKENS, mutable=["batch_stats"]
    ),
    "linen.LSTMCell": lambda: linen(nn.RNN(nn.LSTMCell(12)), TOKENS),
    "linen stack": lambda: linen(Stack(), TOKENS),
    "linen.Conv": lambda: linen(nn.Conv(8, (3, 3), strides=2, feature_group_count=2), IMAGES),
    "attention": attention,
    "attention, grouped queries, bias": lambda: attention(kv_heads=2, bias=True),
}
all_models = pytest.mark.parametrize("name", MODELS)


def loss_of(fun):
    """Return a scalar with a different, fixed weight for each output."""

    def loss(params, *inputs):
        outputs = jax.tree.leaves(fun(params, *inputs))
        return sum((out.astype(F32) * uniform(*out.shape, seed=7)).sum() for out in outputs)

    return loss


# --- closer to float32 than a model cast by hand ----------------------------------------------------------------------


def run(loss, *args):
    return exact_jit(jax.value_and_grad(loss))(*args)


def error(actual, expected):
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    return np.linalg.norm([np.linalg.norm(np.asarray(a, np.float64) - np.asarray(e, np.float64)) for a, e in pairs])


@all_models
def test_gradients_are_as_close_to_float32_as_those_of_a_model_in_bfloat16(name):
    """Parameters and inputs in bfloat16, as one casts by hand.

    Where both do the same roundings, up to 5% are luck of few numbers. Attention in 16 bits keeps logits in float32,
    which autocast rounds: four roundings on the way of an operand and not three, and sqrt(4/3) is 1.15.
    """
    fun, params, inputs = MODELS[name]()
    exact = run(loss_of(fun), params, *inputs)
    with jax.numpy_dtype_promotion("standard"):  # libraries mix dtypes on purpose
        by_hand = run(loss_of(fun), cast(params, BF16), *cast(inputs, BF16))
    actual = run(mpx.autocast(loss_of(fun), "bf16"), params, *inputs)
    assert types_of(actual) == types_of(exact)
    slack = 1.25 if "ttention" in name else 1.05
    assert error(actual[1], exact[1]) < slack * error(by_hand[1], exact[1])


# --- nothing outside the table changes --------------------------------------------------------------------------------


def in_16_bits(fun, model):
    """Return the primitives that compute with 16-bit operands or results in a function's program."""
    found = [eqn for eqn in eqns_of(fun, model.params, *model.inputs) if not [*jex_core.jaxprs_in_params(eqn.params)]]
    dtypes = lambda eqn: {getattr(v.aval, "dtype", None) for v in (*eqn.invars, *eqn.outvars)}
    return {eqn.primitive.name for eqn in found if dtypes(eqn) & {BF16, F16}} - {"convert_element_type"}


@all_models
def test_only_contractions_change_their_type_forward_and_backward(name):
    """With the gradient inside and outside of autocast all are in bfloat16, and no sum, product or scatter is.

    A transposition of an operand moves values only; the barrier behind the cotangent of `product + bias` does nothing
    to them, nor does the rounding to 16 bits that a checkpoint puts on what it keeps in 16 bits.
    """
    model = MODELS[name]()
    plain = contractions(jax.grad(loss_of(model.fun)), model.params, *model.inputs)
    assert set(plain) == {all_in(F32)}
    for fun in (
        mpx.autocast(jax.grad(loss_of(model.fun)), "bf16"),
        jax.grad(mpx.autocast(loss_of(model.fun), "bf16")),
    ):
        assert contractions(fun, model.params, *model.inputs) == [all_in(BF16)] * len(plain)
        assert in_16_bits(fun, model) <= {*CONTRACTIONS, "transpose", "optimization_barrier", "reduce_precision"}


def test_the_search_for_operations_in_16_bits_finds_a_narrowed_operation_and_the_sums_of_a_model_cast_by_hand():
    """Negative control: the exponential of a softmax."""
    model = MODELS["attention"]()
    rules = mpx.DEFAULT_RULES | {"exp": "narrow"}
    assert "exp" in in_16_bits(mpx.autocast(jax.grad(loss_of(model.fun)), "bf16", rules=rules), model)
    layer = linen(nn.Dense(12), TOKENS)
    assert {"add", "reduce_sum"} <= in_16_bits(jax.grad(loss_of(layer.fun)), cast(layer, BF16))


# --- gradients by `mpx.value_and_grad` --------------------------------------------------------------------------------


class TwoLayers(nnx.Module):
    """Two layers with one matrix, a vector, and a variable that is no parameter."""

    def __init__(self, rngs):
        self.first, self.second = (nnx.Linear(16, 16, rngs=rngs, param_dtype=BF16) for _ in range(2))
        self.second.kernel = self.first.kernel
        self.scale = nnx.Param(jnp.ones((16,), BF16))
        self.shift = nnx.BatchStat(jnp.full((16,), 0.25, BF16))

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x))) * self.scale[None, None] + self.shift[None, None]


@pytest.mark.parametrize("reduce_dtype", [None, F32], ids=str)
def test_gradients_of_a_bfloat16_model_with_tied_weights_are_those_of_its_float32_copy_to_the_bit(reduce_dtype):
    """Or in the parameters' own dtypes if asked, where jax rounds them: the negative control."""
    autocast = mpx.autocast(lambda model, x: (model(x) ** 2).sum(), "bf16", reduce_dtype=reduce_dtype)
    narrow = TwoLayers(nnx.Rngs(0))
    graphdef, state = nnx.split(narrow)
    expected = nnx.value_and_grad(autocast)(nnx.merge(graphdef, cast(state, F32)), TOKENS)
    actual = mpx.value_and_grad(autocast, transform=nnx.value_and_grad)(narrow, TOKENS)
    assert_same_bits(actual, expected)
    own = nnx.value_and_grad(autocast)(narrow, TOKENS)
    assert any(np.any(a != b.astype(F32)) for a, b in zip(*map(jax.tree.leaves, (actual[1], own[1])), strict=True))
    in_own_dtypes = mpx.value_and_grad(autocast, transform=nnx.value_and_grad, grad_dtype=None)
    assert_same_bits(in_own_dtypes(narrow, TOKENS), own)
