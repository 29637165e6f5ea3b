"""`autocast` around models that nobody here wrote: Flax Linen and NNX, Equinox, `optax` losses, `jax.nn` attention."""

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.extend import core as jex_core

import mpx
from mpx._jaxprs import scan_counts
from tests.autocast.helpers import BF16, CONTRACTIONS, F16, F32, all_eqns, eqns_of
from tests.helpers import assert_same_bits, types_of

pytestmark = pytest.mark.slow  # models of Flax and Equinox take long to trace and to compile

# XLA drops a rounding from float32 to 16 bits whose result is widened at once, on a CPU too: that flatters both sides.
# The other two compile faster.
AS_WRITTEN = {
    "xla_allow_excess_precision": False,
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}


def uniform(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).uniform(-1, 1, shape), F32)


TOKENS = uniform(2, 6, 16)  # (batch, time, features)
IMAGES = uniform(2, 6, 6, 4)  # (batch, height, width, channels)
IDS = jnp.asarray([[0, 3, 3, 7, 10, 3], [9, 1, 3, 3, 0, 2]])


def cast(tree, dtype):
    """Cast the floating arrays of a tree."""
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
    """A model."""

    fun: Callable[..., Any]
    params: Any
    inputs: tuple[Any, ...]


def linen(module, *inputs, **options):
    params = filled(jax.eval_shape(module.init, jax.random.key(0), *inputs))
    return Model(functools.partial(module.apply, **options), params, inputs)


def flax_nnx(make, *inputs):
    """Return an NNX module, from its random streams. Other state goes in as one more input."""
    graphdef, params, rest = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))), nnx.Param, ...)
    is_key = lambda leaf: jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    rest = jax.tree.map(lambda leaf: jax.random.key(0) if is_key(leaf) else jnp.zeros(leaf.shape, leaf.dtype), rest)
    fun = lambda params, rest, *inputs: nnx.merge(graphdef, params, rest, copy=True)(*inputs)
    return Model(fun, filled(params), (rest, *inputs))


def equinox(make, *inputs):
    """Return an Equinox module, from its key, over a batch."""
    model = eqx.filter_eval_shape(make, key=jax.random.key(0))
    params, static = eqx.partition(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    return Model(lambda params, *inputs: jax.vmap(eqx.combine(params, static))(*inputs), filled(params), inputs)


def attention(kv_heads=4, bias=False, **options):
    """Return `jax.nn.dot_product_attention` of queries, keys and values that are the parameters."""
    shapes = {"query": (2, 6, 4, 8), "key": (2, 6, kv_heads, 8), "value": (2, 6, kv_heads, 8), "bias": (2, 4, 6, 6)}
    params = {name: 3 * uniform(*shape, seed=len(name)) for name, shape in shapes.items() if bias or name != "bias"}
    return Model(lambda params: jax.nn.dot_product_attention(**params, **options), params, ())


class EmbedAndAttend(nn.Module):
    """A tied embedding, both ways."""

    @nn.compact
    def __call__(self, ids):
        embed = nn.Embed(11, 16)
        return embed.attend(nn.Dense(16)(embed(ids)))


class Block(nn.Module):
    """A transformer block."""

    @nn.compact
    def __call__(self, x, _):
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x))
        return x + nn.Dense(16)(nn.gelu(nn.Dense(32)(nn.RMSNorm()(x)))), None


class Stack(nn.Module):
    """Three blocks, scanned and rematerialised."""

    @nn.compact
    def __call__(self, x):
        block = nn.remat(Block, prevent_cse=False)
        return nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)()(x, None)[0]


CAUSAL_OR_SELF = jnp.asarray(np.random.default_rng(0).random((2, 1, 6, 6)) < 0.6) | jnp.eye(6, dtype=bool)[None, None]

MODELS: dict[str, Callable[[], Model]] = {
    "linen.Dense": lambda: linen(nn.Dense(12), TOKENS),
    "linen.Conv": lambda: linen(nn.Conv(8, (3, 3), strides=2, feature_group_count=2), IMAGES),
    "linen.ConvTranspose": lambda: linen(nn.ConvTranspose(8, (3, 3), strides=(2, 2)), IMAGES),
    "linen.Embed": lambda: linen(EmbedAndAttend(), IDS),
    "linen.MultiHeadDotProductAttention": lambda: linen(nn.MultiHeadDotProductAttention(4), TOKENS),
    "linen.LayerNorm": lambda: linen(nn.Sequential([nn.Dense(16), nn.LayerNorm()]), TOKENS),
    "linen.BatchNorm": lambda: linen(
        nn.Sequential([nn.Dense(16), nn.BatchNorm(False)]), TOKENS, mutable=["batch_stats"]
    ),
    "linen.LSTMCell": lambda: linen(nn.RNN(nn.LSTMCell(12)), TOKENS),
    "linen stack": lambda: linen(Stack(), TOKENS),
    "nnx.Linear": lambda: flax_nnx(lambda r: nnx.Linear(16, 12, rngs=r), TOKENS),
    "nnx.Conv": lambda: flax_nnx(lambda r: nnx.Conv(4, 8, (3, 3), strides=2, rngs=r), IMAGES),
    "nnx.MultiHeadAttention": lambda: flax_nnx(lambda r: nnx.MultiHeadAttention(4, 16, decode=False, rngs=r), TOKENS),
    "nnx.RMSNorm": lambda: flax_nnx(
        lambda r: nnx.Sequential(nnx.Linear(16, 16, rngs=r), nnx.RMSNorm(16, rngs=r)), TOKENS
    ),
    "nnx.GRUCell": lambda: flax_nnx(lambda r: nnx.RNN(nnx.GRUCell(16, 12, rngs=r)), TOKENS),
    "equinox.MLP": lambda: equinox(functools.partial(eqx.nn.MLP, 16, 8, 32, 2, jax.nn.gelu), TOKENS[0]),
    "equinox.MultiheadAttention": lambda: equinox(
        functools.partial(eqx.nn.MultiheadAttention, 4, 16), TOKENS, TOKENS, TOKENS
    ),
    "equinox.Conv2d": lambda: equinox(functools.partial(eqx.nn.Conv2d, 6, 8, 3, groups=2, padding=1), IMAGES),
    "attention": attention,
    "attention, xla, causal": lambda: attention(is_causal=True, implementation="xla"),
    "attention, grouped queries, bias": lambda: attention(kv_heads=2, bias=True),
    "attention, mask, scale": lambda: attention(mask=CAUSAL_OR_SELF, scale=0.7),
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
    """Return value and gradient, with every rounding done as written."""
    return jax.jit(jax.value_and_grad(loss), compiler_options=AS_WRITTEN)(*args)


def error(actual, expected):
    """Return the Euclidean distance of two trees in float64."""
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


def test_sharp_attention_loses_less_than_a_bit_against_one_cast_by_hand_and_none_as_a_full_precision_island():
    """Logits of up to 18, which jax keeps in float32 for 16-bit operands and autocast rounds: off by up to 2^-5.

    A documented limit of autocast: the factor is 1.5.
    """
    names, rng = ("query", "key", "value"), np.random.default_rng(0)
    params = {
        name: jnp.asarray(rng.normal(0, s, (1, 32, 2, 64)), F32) for name, s in zip(names, (2, 2, 1), strict=True)
    }
    attend = lambda params: jax.nn.dot_product_attention(**params)
    exact = run(loss_of(attend), params)
    with jax.numpy_dtype_promotion("standard"):
        by_hand = run(loss_of(attend), cast(params, BF16))
    actual = run(mpx.autocast(loss_of(attend), "bf16"), params)
    assert error(actual[1], exact[1]) < 2 * error(by_hand[1], exact[1])
    assert_same_bits(run(mpx.autocast(loss_of(mpx.full_precision(attend)), "bf16"), params), exact)


# --- nothing outside the table changes --------------------------------------------------------------------------------


def operations_of(fun, model):
    """Return all operations of a program, nested ones too, in order, without conversions and calls.

    Each comes with the dtypes and shapes of its operands and results; one that holds a program with its name only,
    since 16-bit values may travel through it in 16 bits.
    """
    types = lambda variables: [(getattr(v.aval, "dtype", None), getattr(v.aval, "shape", None)) for v in variables]
    found = []
    for eqn in all_eqns(jax.make_jaxpr(fun)(model.params, *model.inputs)):
        if any(True for _ in jex_core.jaxprs_in_params(eqn.params)):
            found.append((eqn.primitive.name, [], []))
        else:
            found.append((eqn.primitive.name, types(eqn.invars), types(eqn.outvars)))
    # Autocast wraps `product + bias` in an identity with a derivative of its own, and a loop's body in a checkpoint.
    return [op for op in found if op[0] not in ("jit", "convert_element_type", "custom_jvp_call", "remat2")]


def split_by_contraction(found):
    """Return the contractions of a list of operations, and the others with the places of the contractions."""
    contractions = [op for op in found if op[0] in CONTRACTIONS]
    return contractions, [op if op[0] not in CONTRACTIONS else (op[0], [shape for _, shape in op[1]]) for op in found]


def dtypes_of(found):
    return {dtype for _, operands, results in found for dtype, _ in operands + results}


def in_16_bits(found):
    """Return the primitives that have a 16-bit operand or result."""
    return {op[0] for op in found if dtypes_of([op]) & {BF16, F16}}


@all_models
def test_only_contractions_change_their_type_forward_and_backward(name):
    """The program of the gradient under autocast is the float32 one, but for its contractions: all are in bfloat16.

    With the gradient outside of autocast too: no sum, product or scatter is in 16 bits. Transposing an operand of a
    contraction moves values only. The barrier behind the cotangent of `product + bias` does nothing to them, nor does
    the rounding to 16 bits that a checkpoint puts on what it keeps in 16 bits.
    """
    model = MODELS[name]()
    gradient = jax.grad(loss_of(model.fun))
    plain_contractions, plain = split_by_contraction(operations_of(gradient, model))
    contractions, others = split_by_contraction(operations_of(mpx.autocast(gradient, "bf16"), model))
    assert others == plain
    assert dtypes_of(plain_contractions) == {F32}
    found = operations_of(jax.grad(mpx.autocast(loss_of(model.fun), "bf16")), model)
    contractions_inside, _ = split_by_contraction(found)
    assert len(contractions) == len(contractions_inside) == len(plain_contractions)
    assert dtypes_of(contractions) == dtypes_of(contractions_inside) == {BF16}
    assert in_16_bits(found) <= {*CONTRACTIONS, "transpose", "optimization_barrier", "reduce_precision"}


@pytest.mark.parametrize(("name", "primitive"), [("attention", "exp"), ("linen.LayerNorm", "rsqrt")])
def test_the_comparison_of_programs_notices_one_narrowed_operation(name, primitive):
    """Negative control: the exponential of a softmax, the root of a norm."""
    gradient = jax.grad(loss_of(MODELS[name]().fun))
    narrowed = mpx.autocast(gradient, "bf16", rules=mpx.DEFAULT_RULES | {primitive: "narrow"})
    _, expected = split_by_contraction(operations_of(gradient, MODELS[name]()))
    _, others = split_by_contraction(operations_of(narrowed, MODELS[name]()))
    changed = [new for new, old in zip(others, expected, strict=True) if new != old]
    assert {op for op, *_ in changed} == {primitive}


def test_the_search_for_sums_in_16_bits_finds_those_of_a_model_cast_by_hand():
    """Negative control."""
    model = MODELS["linen.Dense"]()
    found = in_16_bits(operations_of(jax.grad(loss_of(model.fun)), cast(model, BF16)))
    assert {"add", "reduce_sum"} <= found


# --- a scanned and rematerialised stack -------------------------------------------------------------------------------


@pytest.mark.parametrize("transform", [lambda f: f, jax.grad, mpx.grad], ids=["forward", "jax.grad", "mpx.grad"])
def test_stacked_kernels_travel_in_bfloat16_through_every_scan(transform):
    """Six kernels a block, two of them square: no copy of them in float32 is made and sliced."""
    model = MODELS["linen stack"]()
    kernels = {
        leaf.shape for path, leaf in jax.tree.leaves_with_path(model.params) if "kernel" in jax.tree_util.keystr(path)
    }
    gradient = transform(mpx.autocast(loss_of(model.fun), "bf16"))
    scans = eqns_of(gradient, cast(model.params, BF16), *model.inputs, primitive="scan")
    sliced = [scan.invars[sum(scan_counts(scan)) :] for scan in scans]
    found = [[v.aval.dtype for v in xs if v.aval.shape in kernels] for xs in sliced]
    assert found[0] == [BF16] * 6
    assert {dtype for of_scan in found for dtype in of_scan} == {BF16}


# --- a loss of Optax --------------------------------------------------------------------------------------------------

LOGITS = 8 * uniform(4, 5, seed=1)


def ctc(logits):
    """Two sequences of four frames; jax contracts with one-hot labels in it."""
    labels = jnp.asarray([[1, 2], [3, 4]])
    return optax.ctc_loss(jnp.stack([logits, logits[::-1]]), jnp.zeros((2, 4), F32), labels, jnp.zeros((2, 2), F32))


def test_a_loss_that_contracts_keeps_every_bit_as_a_full_precision_island():
    """Log-probabilities of -1e5 in `ctc_loss` are infinite in float16; times the zeros of one-hot labels, NaN."""
    run_ctc = lambda loss: run(lambda x: loss(x).sum(), LOGITS)
    with jax.enable_x64(False):  # with 64-bit types `optax.ctc_loss` makes labels in float64, whatever the logits are
        expected = run_ctc(ctc)
        for dtype in (BF16, F16):
            assert_same_bits(run_ctc(mpx.autocast(mpx.full_precision(ctc), dtype)), expected)
        assert run_ctc(mpx.autocast(ctc, "f16"))[0] != expected[0]  # negative control


# --- gradients by `mpx.value_and_grad` --------------------------------------------------------------------------------


class TwoLayers(nnx.Module):
    """Two layers, with one matrix if they are tied, a vector, and a variable that is no parameter."""

    def __init__(self, rngs, param_dtype=F32, tied=False):
        self.first, self.second = (nnx.Linear(16, 16, rngs=rngs, param_dtype=param_dtype) for _ in range(2))
        if tied:
            self.second.kernel = self.first.kernel
        self.scale = nnx.Param(jnp.ones((16,), param_dtype))
        self.shift = nnx.BatchStat(jnp.full((16,), 0.25, param_dtype))

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x))) * self.scale[None, None] + self.shift[None, None]


def squares(model, x):
    return (model(x) ** 2).sum()


class Differentiated(NamedTuple):
    """A loss, how to differentiate it, and its parameters with values of bfloat16: in float32 and in bfloat16."""

    loss: Callable[..., Any]
    wide: Any
    narrow: Any
    transform: Callable[..., Any] = jax.value_and_grad
    options: dict[str, Any] = {}


def with_linen():
    module = nn.Sequential([nn.Dense(16), nn.LayerNorm(), jnp.tanh, nn.Dense(16)])
    params = cast(filled(jax.eval_shape(module.init, jax.random.key(0), TOKENS)), BF16)
    return Differentiated(lambda params, x: (module.apply(params, x) ** 2).sum(), cast(params, F32), params)


def with_nnx(tied=False, **options):
    graphdef, state = nnx.split(TwoLayers(nnx.Rngs(0), BF16, tied))  # a cast of the model would untie its weights
    wide, narrow = nnx.merge(graphdef, cast(state, F32)), nnx.merge(graphdef, state)
    return Differentiated(squares, wide, narrow, nnx.value_and_grad, options)


def with_equinox():
    model = cast(eqx.nn.MLP(16, 16, 16, 1, jnp.tanh, key=jax.random.key(0)), BF16)
    loss = lambda model, x: (jax.vmap(jax.vmap(model))(x) ** 2).sum()
    return Differentiated(loss, cast(model, F32), model, eqx.filter_value_and_grad)


DIFFERENTIATED = {
    "linen": with_linen,
    "nnx": with_nnx,
    "nnx, tied": functools.partial(with_nnx, tied=True),
    "nnx, DiffState": lambda: with_nnx(argnums=nnx.DiffState(0, nnx.Param)),
    "equinox": with_equinox,
}


@pytest.mark.parametrize("make", DIFFERENTIATED.values(), ids=DIFFERENTIATED)
def test_gradients_of_bfloat16_parameters_are_those_of_float32_copies_to_the_bit(make):
    """In the structure that the transformation gives without mpx, or in the parameters' own dtypes if asked."""
    loss, wide, narrow, transform, options = make()
    _, plain = transform(loss, **options)(wide, TOKENS)
    for more in ({}, {"reduce_dtype": F32}):
        autocast = mpx.autocast(loss, "bf16", **more)
        expected = transform(autocast, **options)(wide, TOKENS)
        value, grads = mpx.value_and_grad(autocast, transform=transform, **options)(narrow, TOKENS)
        assert_same_bits(value, expected[0])
        assert_same_bits(grads, expected[1])
        assert types_of(grads) == types_of(plain)
        # Negative control: the gradients that jax gives for bfloat16 parameters are rounded.
        own = transform(autocast, **options)(narrow, TOKENS)
        assert any(np.any(a != b.astype(F32)) for a, b in zip(*map(jax.tree.leaves, (grads, own[1])), strict=True))
        in_own_dtypes = mpx.value_and_grad(autocast, transform=transform, grad_dtype=None, **options)
        assert_same_bits(in_own_dtypes(narrow, TOKENS), own)


@pytest.mark.optax_promotion
def test_an_nnx_optimizer_in_nnx_jit_trains_masters_on_unrounded_gradients():
    """As in a float32 loop that rounds a copy for the model. The learning rate is a power of two, so all is exact."""
    model = TwoLayers(nnx.Rngs(0), BF16, tied=True)
    optimizer = nnx.Optimizer(model, mpx.master_weights(optax.sgd(2.0**-7)), wrt=nnx.Param)
    loss = mpx.autocast(squares, "bf16")
    graphdef, masters, rest = nnx.split(model, nnx.Param, ...)
    masters = cast(masters, F32)

    @nnx.jit
    def step(model, optimizer, x):
        value, grads = mpx.value_and_grad(loss, transform=nnx.value_and_grad)(model, x)
        optimizer.update(model, grads)
        return value

    @jax.jit
    def expected_step(masters, x):
        by_params = lambda params: loss(nnx.merge(graphdef, params, rest, copy=True), x)
        value, grads = jax.value_and_grad(by_params)(cast(cast(masters, BF16), F32))
        return jax.tree.map(lambda p, g: p - np.float32(2.0**-7) * g, masters, grads), value

    for _ in range(3):
        value = step(model, optimizer, TOKENS)
        masters, expected_value = expected_step(masters, TOKENS)
        assert_same_bits(value, expected_value)
    kept = jax.tree.leaves(nnx.as_pure(optimizer.opt_state.master))
    assert_same_bits(kept, jax.tree.leaves(nnx.as_pure(masters)))
