"""Check that activations wait for the backward pass in few bits, and that nothing else
does or changes.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import mpx
from tests.helpers import BF16, F16, F32, all_eqns, assert_same_bits, unfused

LAYERS, ROWS, WIDTH = 3, 8, 256
EIGHT = mpx.Blockwise8bit()


@dataclasses.dataclass(frozen=True)
class Halved(mpx.StateFormat):
    """A format of a user's own: it keeps every other number of a row, for its neighbour
    too.
    """

    def encode(self, x, key=None):
        return x[::2], None

    def decode(self, codes, scales):
        return jnp.repeat(codes, 2)


FORMATS = {
    "bf16": "bf16",
    "f16": F16,
    "8 bits": EIGHT,
    "4 bits": mpx.Blockwise4bit(),
    "a user's own": Halved(),
}
all_formats = pytest.mark.parametrize("kept", FORMATS.values(), ids=FORMATS)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), F32)


X, W, V, BIAS = (
    normal(0, ROWS, WIDTH),
    normal(1, WIDTH, WIDTH) / 16,
    normal(2, WIDTH, WIDTH) / 16,
    normal(3, WIDTH),
)
STACK = tuple(jnp.stack([x, -x, 2 * x]) for x in (W, V, BIAS))


def layer(x, w, v, bias):
    return x + jnp.tanh(x @ w + bias[None]) @ v


def scanned(layer):
    return lambda x, weights: lax.scan(
        lambda x, weights: (layer(x, *weights), None), x, weights
    )[0]


def total(fun):
    return lambda *args: jnp.sum(fun(*args) ** 2)


def decoded(x, kept):
    """Return what the backward pass begins with, row by row."""
    if not isinstance(kept, mpx.StateFormat):
        return x.astype(
            mpx.get_policy(kept).compute_dtype if isinstance(kept, str) else kept
        ).astype(F32)
    return jnp.stack(
        [kept.decode(*kept.encode(row)) for row in x.reshape(-1, WIDTH)]
    ).reshape(x.shape)


def bits_of(fun, *args):
    return jax.jit(fun, compiler_options=unfused())(*args)


def kept_by(fun, *args):
    """Return the dtypes and shapes of what the backward pass gets from the forward
    pass, in order of bytes.
    """
    pull = jax.eval_shape(lambda *args: jax.vjp(fun, *args)[1], *args)
    leaves = sorted(
        jax.tree.leaves(pull), key=lambda x: (x.size * x.dtype.itemsize, x.dtype.name)
    )
    return [(x.dtype.name, x.shape) for x in leaves]


def count(name, fun, *args):
    return sum(
        eqn.primitive.name == name for eqn in all_eqns(jax.make_jaxpr(fun)(*args))
    )


# ---- values


@all_formats
def test_the_forward_pass_is_exact_and_the_backward_pass_begins_with_what_is_decoded(
    kept,
):
    """Negative control: `jax.checkpoint` has other gradients."""
    pulled = lambda fun, *args: jax.vjp(fun, *args)[1](normal(4, ROWS, WIDTH))
    ours = bits_of(
        lambda *args: jax.vjp(mpx.checkpoint(layer, kept=kept, argnums=0), *args)[0],
        X,
        W,
        V,
        BIAS,
    )
    assert_same_bits(ours, bits_of(jax.checkpoint(layer), X, W, V, BIAS))
    gradients = bits_of(
        functools.partial(pulled, mpx.checkpoint(layer, kept=kept, argnums=0)),
        X,
        W,
        V,
        BIAS,
    )
    expected = bits_of(functools.partial(pulled, layer), decoded(X, kept), W, V, BIAS)
    assert_same_bits(gradients, expected)
    exact = bits_of(functools.partial(pulled, layer), X, W, V, BIAS)
    assert not np.array_equal(gradients[1], exact[1])


@pytest.mark.parametrize("kept", ["bf16", EIGHT], ids=str)
def test_scanned_layers_have_the_gradients_of_each_layer_at_its_decoded_input(kept):
    def by_hand(x, weights):
        inputs, pulls = [], jnp.ones_like(X)
        for i in range(LAYERS):
            inputs.append(x)
            x = layer(x, *[w[i] for w in weights])
        gradients = []
        for i in reversed(range(LAYERS)):
            pulls, *of_weights = jax.vjp(
                layer, decoded(inputs[i], kept), *[w[i] for w in weights]
            )[1](pulls)
            gradients.append(of_weights)
        return (
            x,
            pulls,
            [jnp.stack(column) for column in zip(*gradients[::-1], strict=True)],
        )

    def ours(x, weights):
        value, pull = jax.vjp(
            scanned(mpx.checkpoint(layer, kept=kept, argnums=0, prevent_cse=False)),
            x,
            weights,
        )
        of_x, of_weights = pull(jnp.ones_like(X))
        return value, of_x, [*of_weights]

    assert_same_bits(bits_of(ours, X, STACK), bits_of(by_hand, X, STACK))


def test_it_runs_without_jit():
    gradient = jax.grad(total(mpx.checkpoint(layer, kept=EIGHT, argnums=0)))
    expected = gradient(X, W, V, BIAS)
    with jax.disable_jit():
        np.testing.assert_allclose(
            gradient(X, W, V, BIAS), expected, rtol=1e-4, atol=1e-4
        )


# ---- what is kept


@pytest.mark.parametrize(
    ("kept", "activation"),
    [
        ("bf16", [("bfloat16", (ROWS, WIDTH))]),
        (EIGHT, [("float32", (ROWS, 1)), ("int8", (ROWS, WIDTH))]),
        (mpx.Blockwise4bit(), [("float32", (ROWS, 2)), ("uint8", (ROWS, WIDTH // 2))]),
    ],
    ids=str,
)
def test_the_activation_alone_is_kept_in_few_bits(kept, activation):
    weights = [
        ("float32", (WIDTH,)),
        ("float32", (WIDTH, WIDTH)),
        ("float32", (WIDTH, WIDTH)),
    ]
    found = kept_by(mpx.checkpoint(layer, kept=kept, argnums=0), X, W, V, BIAS)
    assert sorted(found) == sorted(activation + weights)
    closed_over = kept_by(
        lambda x: mpx.checkpoint(lambda x: layer(x, W, V, BIAS), kept=kept, argnums=0)(
            x
        ),
        X,
    )
    assert sorted(closed_over) == sorted(activation + weights)


def test_autocast_keeps_weights_in_16_bits_beside_activations_in_8():
    weights, of_x = jax.tree.map(lambda x: x.astype(BF16), STACK), (LAYERS, ROWS, WIDTH)
    found = kept_by(
        mpx.autocast(scanned(mpx.checkpoint(layer, kept=EIGHT, argnums=0)), "bf16"),
        X,
        weights,
    )
    plain = kept_by(mpx.autocast(scanned(jax.checkpoint(layer)), "bf16"), X, weights)
    assert [row for row in found if row not in plain] == [
        ("float32", (LAYERS, ROWS, 1)),
        ("int8", of_x),
    ]
    assert [row for row in plain if row not in found] == [("float32", of_x)]
    assert found.count(("bfloat16", (LAYERS, WIDTH, WIDTH))) == 2


def test_autocast_changes_no_forward_bit_and_narrows_the_same_products():
    of = lambda checkpoint: mpx.value_and_grad(
        mpx.autocast(total(scanned(checkpoint(layer))), "bf16"), argnums=(0, 1)
    )
    ours, plain = (
        of(functools.partial(mpx.checkpoint, kept=EIGHT, argnums=0)),
        of(jax.checkpoint),
    )
    (value, gradients), (expected, exact) = (
        bits_of(fun, X, STACK) for fun in (ours, plain)
    )
    assert_same_bits(value, expected)
    for g, e in zip(jax.tree.leaves(gradients), jax.tree.leaves(exact), strict=True):
        assert 0 < np.linalg.norm(g - e) < 0.05 * np.linalg.norm(e)
    assert count("dot_general", ours, X, STACK) == count("dot_general", plain, X, STACK)


def test_integers_keys_and_numbers_without_an_axis_are_not_encoded():
    args = {
        "x": X,
        "rows": jnp.arange(ROWS),
        "key": jax.random.key(0),
        "scale": jnp.float32(1 / 3),
    }

    def dropped(given, w):
        noise = jax.random.normal(given["key"], X.shape, F32)
        return given["scale"] * (given["x"][given["rows"]] + noise) @ w

    found = kept_by(
        lambda x, w: mpx.checkpoint(dropped, kept=EIGHT, argnums=0)(args | {"x": x}, w),
        X,
        W,
    )
    plain = kept_by(lambda x, w: jax.checkpoint(dropped)(args | {"x": x}, w), X, W)
    assert [row for row in found if row not in plain] == [
        ("float32", (ROWS, 1)),
        ("int8", (ROWS, WIDTH)),
    ]
    assert [row for row in plain if row not in found] == [("float32", (ROWS, WIDTH))]


def test_a_module_is_an_argument_like_others():
    model = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
    run = mpx.checkpoint(lambda model, x: jnp.tanh(model(x)), kept=EIGHT, argnums=-1)
    gradients = nnx.grad(total(run))(model, X)
    expected = nnx.grad(total(lambda model, x: jnp.tanh(model(x))))(model, X)
    error = jnp.linalg.norm(gradients["kernel"][...] - expected["kernel"][...])
    assert 0 < error < 0.02 * jnp.linalg.norm(expected["kernel"][...])


def test_what_is_changed_in_a_module_comes_back_if_it_is_returned():
    model = nnx.BatchNorm(WIDTH, rngs=nnx.Rngs(0))
    run = mpx.checkpoint(
        lambda model, x: (model(x), nnx.state(model, nnx.BatchStat)),
        kept=EIGHT,
        argnums=1,
    )
    _, changed = run(model, X)
    assert not model.mean[...].any()
    nnx.update(model, changed)
    assert model.mean[...].any()


# ---- policies, and checkpoints around


@pytest.mark.parametrize(
    "policy", ["dots_saveable", "nothing_saveable", "everything_saveable"]
)
def test_a_policy_keeps_what_it_keeps_in_jax_and_saves_the_same_products(policy):
    policy = getattr(jax.checkpoint_policies, policy)
    ours, plain = (
        mpx.checkpoint(layer, kept=EIGHT, argnums=0, policy=policy),
        jax.checkpoint(layer, policy=policy),
    )
    codes = [("float32", (ROWS, 1)), ("int8", (ROWS, WIDTH))]
    found, expected = (kept_by(fun, X, W, V, BIAS) for fun in (ours, plain))
    assert sorted([*found, ("float32", (ROWS, WIDTH))]) == sorted(expected + codes)
    ours, plain = (jax.grad(total(fun), argnums=(0, 1, 2)) for fun in (ours, plain))
    assert count("dot_general", ours, X, W, V, BIAS) == count(
        "dot_general", plain, X, W, V, BIAS
    )


def test_what_a_policy_keeps_is_exact():
    """A product that is kept by name is that of the forward pass; without the policy it
    is computed from codes.
    """
    fun = lambda x, w: jnp.sin(checkpoint_name(x @ w, "product"))
    policy = jax.checkpoint_policies.save_only_these_names("product")
    of = lambda fun: bits_of(jax.grad(lambda x, w: fun(x, w).sum()), X, W)
    assert_same_bits(
        of(mpx.checkpoint(fun, kept=EIGHT, argnums=0, policy=policy)), of(fun)
    )
    assert not np.array_equal(of(mpx.checkpoint(fun, kept=EIGHT, argnums=0)), of(fun))


def test_a_checkpoint_around_keeps_no_codes():
    ours, plain = scanned(mpx.checkpoint(layer, kept=EIGHT, argnums=0)), scanned(layer)
    assert kept_by(jax.checkpoint(ours), X, STACK) == kept_by(
        jax.checkpoint(plain), X, STACK
    )
    gradients = lambda fun: bits_of(jax.grad(total(fun)), X, STACK)
    assert_same_bits(gradients(jax.checkpoint(ours)), gradients(ours))


# ---- batches and devices


def test_an_example_of_a_vmap_sees_no_other():
    """Each has the codes that it has alone, beside one with a NaN too; also in blocks
    that are longer than its row.
    """
    loss = total(mpx.checkpoint(lambda x, w: jnp.sin(x * w), kept=EIGHT, argnums=0))
    x, w = X[:, :24].at[3, 5].set(jnp.nan), W[0, :24]
    expected = jnp.stack([jax.grad(loss)(row, w) for row in x])
    together = jax.grad(lambda x: jax.vmap(loss, in_axes=(1, None))(x, w).sum())(x.T).T
    assert_same_bits(jax.vmap(jax.grad(loss), in_axes=(0, None))(x, w), expected)
    assert_same_bits(together, expected)
    assert np.isnan(expected).any(axis=1).tolist() == [i == 3 for i in range(ROWS)]


def is_sent(fun, *args):
    text = jax.jit(fun).lower(*args).compile().as_text()
    return any(
        f" {name}(" in text
        for name in ("all-gather", "all-reduce", "all-to-all", "collective-permute")
    )


@pytest.mark.many_devices
@pytest.mark.parametrize("width", [64 * 8, 20 * 8])
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=str)
def test_no_device_sends_a_part_of_an_activation(kind, width):
    """Negative control: in blocks that cross rows it would. On explicit axes columns
    may be divided.
    """
    gradient = jax.grad(
        total(mpx.checkpoint(lambda x, w: jnp.sin(x * w[None]), kept=EIGHT, argnums=0))
    )
    x, w = normal(5, ROWS, width), normal(6, width)
    with jax.set_mesh(
        jax.make_mesh((8,), ("data",), axis_types=(kind,), devices=jax.devices("cpu"))
    ):
        rows, whole = jax.device_put(x, P("data")), jax.device_put(w, P())
        assert not is_sent(gradient, rows, whole)
        found = np.asarray(jax.jit(gradient)(rows, whole))
        if kind == AxisType.Explicit and width == 512:
            assert not is_sent(
                gradient,
                jax.device_put(x, P(None, "data")),
                jax.device_put(w, P("data")),
            )
        if kind == AxisType.Auto and width != 512:
            assert is_sent(EIGHT.encode, rows)
    assert_same_bits(found, np.asarray(jax.jit(gradient)(x, w)))


def test_it_exports_with_any_number_of_rows():
    (rows,) = jax.export.symbolic_shape("rows")
    fun = mpx.checkpoint(
        lambda x, w, weights: weights @ jnp.sin(x * w[None]), kept=EIGHT, argnums=(0, 2)
    )
    shapes = [
        jax.ShapeDtypeStruct(shape, F32) for shape in ((rows, WIDTH), (WIDTH,), (rows,))
    ]
    exported = jax.export.export(jax.jit(jax.grad(total(fun))))(*shapes)
    for count in (3, ROWS):
        args = X[:count], W[0], V[0, :count]
        np.testing.assert_allclose(
            exported.call(*args), jax.grad(total(fun))(*args), rtol=1e-5, atol=1e-5
        )


# ---- derivatives of other kinds, and refusals


def test_forward_derivatives_are_exact():
    along = lambda fun: lambda x: jax.jvp(fun, (x,), (jnp.ones_like(x),))[1]
    fun = lambda x: layer(x, W, V, BIAS)
    twice = lambda fun: bits_of(along(along(fun)), X)
    assert_same_bits(twice(mpx.checkpoint(fun, kept=EIGHT, argnums=0)), twice(fun))


IN = {
    "alone": lambda f: f,
    "in a scan": lambda f: (
        lambda x: lax.scan(lambda x, _: (f(x), None), x, length=LAYERS)[0]
    ),
    "in autocast": lambda f: mpx.autocast(lambda x: f(x @ W), "bf16"),
}


@pytest.mark.parametrize("name", IN)
@pytest.mark.parametrize("kept", ["bf16", EIGHT], ids=str)
def test_a_gradient_is_not_differentiated_in_silence(name, kept):
    """JAX drops custom derivatives in loops on the way to the second derivative; a
    primitive stays.
    """
    loss = total(IN[name](mpx.checkpoint(jnp.sin, kept=kept, argnums=0)))
    with pytest.raises(TypeError, match="codes have no derivative"):
        jax.jvp(jax.grad(loss), (X,), (X,))


REFUSED = [
    (
        "no function",
        lambda: mpx.checkpoint(3, kept="bf16", argnums=0),
        "needs a function, but got int",
    ),
    (
        "f32",
        lambda: mpx.checkpoint(layer, kept="f32", argnums=0),
        "must be bfloat16 or float16, but got float32",
    ),
    (
        "another name",
        lambda: mpx.checkpoint(layer, kept="8bit", argnums=0),
        "such as `Blockwise8bit()`, must be bfloat16 or float16, but got '8bit'",
    ),
    (
        "a class",
        lambda: mpx.checkpoint(layer, kept=mpx.Blockwise8bit, argnums=0),
        "Make one: `Blockwise8bit()`.",
    ),
    (
        "too many",
        lambda: mpx.checkpoint(jnp.sin, kept="bf16", argnums=(0, 1))(X),
        "among 1 positional arguments, argnums=(0, 1)",
    ),
    (
        "integers",
        lambda: mpx.checkpoint(jnp.abs, kept="bf16", argnums=0)(jnp.arange(3)),
        "are no floating-point arrays",
    ),
    (
        "nothing",
        lambda: mpx.checkpoint(jnp.sin, kept="bf16", argnums=())(X),
        "are no floating-point arrays",
    ),
]


@pytest.mark.parametrize(
    ("call", "text"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED]
)
def test_what_would_do_nothing_is_refused(call, text):
    with pytest.raises((TypeError, ValueError)) as error:
        call()
    assert text in str(error.value)
