"""Check that what works on automatic axes works on explicit ones, which `jax.make_mesh`
makes, with the same bits.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpx
from tests.helpers import all_eqns, assert_same_bits, cases, stepper, unfused

pytestmark = pytest.mark.optax_promotion

WEIGHTS = np.random.default_rng(0).normal(size=(2, 32, 2304)).astype(np.float32)


def mesh_of(kind):
    return jax.make_mesh(
        (8,), ("data",), axis_types=(kind,), devices=jax.devices("cpu")
    )


MOMENTUM = optax.sgd(1e-2, momentum=0.9)


def kept_in(format):
    """Return momentum whose average is kept in a format, with split masters."""
    return mpx.mixed_precision(
        mpx.low_precision_state(MOMENTUM, {"trace": format}), "params=bf16"
    )


RECIPES = {
    "split": ("bf16", mpx.mixed_precision(MOMENTUM, "params=bf16,compute=bf16")),
    "kahan": ("bf16", optax.chain(mpx.upcast(MOMENTUM), mpx.kahan_summation())),
    "8-bit": ("bf16", kept_in(mpx.Blockwise8bit())),
    "bf16 moment": ("bf16", kept_in("bf16")),
    "24 and 4 bits": (
        "bf16",
        mpx.mixed_precision(
            mpx.low_precision_state(MOMENTUM, {"trace": mpx.Blockwise4bit()}, key=jax.random.key(0)),
            "params=bf16", storage="split24", key=jax.random.key(1),
        ),
    ),
    "scaled": ("f16", mpx.mixed_precision(MOMENTUM, "params=f16,compute=f16")),
}  # fmt: skip
PARTS = {
    "rows": (P("data"), 4),
    "columns": (P(None, "data"), 4),
    "both": (P("data", "model"), 8),
}
KINDS = {"automatic": AxisType.Auto, "explicit": AxisType.Explicit}
CASES = [
    ("kahan", "both", "explicit", "plain"),
    ("8-bit", "columns", "explicit", "fused"),
    ("scaled", "rows", "explicit", "fused"),
    ("split", "rows", "automatic", "fused"),
]
SLOW = [
    ("8-bit", "both", "automatic", "plain"),
    ("bf16 moment", "columns", "explicit", "plain"),
    ("24 and 4 bits", "columns", "explicit", "fused"),
]


def steps_of_recipe(name, put, is_fused):
    """Return parameters and state after two steps of a recipe; `put` places an array."""
    dtype, tx = RECIPES[name]
    grads = {"w": put(WEIGHTS[1, :, :2048])}
    params = mpx.cast({"w": put(WEIGHTS[0, :, :2048])}, dtype)

    fused = lambda params, state, grads: mpx.fused_update(tx, interpret=True)(
        grads, state, params
    )
    state = tx.init(params)
    compiled = jax.jit(fused if is_fused else stepper(tx), compiler_options=unfused())
    for _ in range(2):
        params, state = compiled(params, state, grads)
    return params, state


@functools.cache
def recipe_on_one_device(name):
    return jax.tree.map(np.asarray, steps_of_recipe(name, jnp.asarray, False))


@pytest.mark.parametrize("case", cases(CASES + SLOW, CASES), ids=" ".join)
def test_every_recipe_has_the_bits_of_one_device_and_each_device_its_part(case):
    name, parts, kind, how = case
    spec, count = PARTS[parts]
    mesh = jax.make_mesh(
        (4, 2),
        ("data", "model"),
        axis_types=(KINDS[kind],) * 2,
        devices=jax.devices("cpu"),
    )
    with jax.set_mesh(mesh):
        sharded = steps_of_recipe(
            name, lambda x: jax.device_put(x, NamedSharding(mesh, spec)), how == "fused"
        )
    assert_same_bits(jax.tree.map(np.asarray, sharded), recipe_on_one_device(name))
    for leaf in jax.tree.leaves(sharded):
        is_key = leaf.dtype == np.uint32
        assert (
            is_key
            or leaf.ndim == 0
            or leaf.addressable_shards[0].data.size * count == leaf.size
        )


def test_blocks_lie_within_shards():
    """A device has 288 of 2,304 columns: nine blocks of 32."""
    columns = P(None, "data")
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        state = RECIPES["8-bit"][1].init(
            {"w": jax.device_put(WEIGHTS[0].astype(jnp.bfloat16), columns)}
        )
    kept = optax.tree.get(state, "trace")["w"]
    assert (kept.format.block_size, kept.scales.shape) == (32, (32, 72))
    assert kept.scales.sharding.spec == kept.codes.sharding.spec == columns


def test_a_converted_state_has_the_blocks_that_init_gives_it_and_keeps_the_codes_it_had():
    """Shards are 64 columns wide: blocks of 256 would reach over devices, and be coded
    anew.
    """
    rule = optax.sgd(1e-2, momentum=0.9)
    tx = mpx.low_precision_state(rule, {"trace": mpx.Blockwise8bit()}, min_size=0)
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        w = jax.device_put(
            jnp.sin(jnp.arange(8 * 512, dtype=jnp.float32)).reshape(8, 512),
            P(None, "data"),
        )
        _, state = jax.jit(tx.update)(w, tx.init(w), w)
        _, same = mpx.convert_state(w, state, tx, tx)
        assert_same_bits(same, state)
        _, coded = mpx.convert_state(w, rule.init(w), rule, tx)
        assert jax.tree.structure(coded) == jax.tree.structure(tx.init(w))


# ---- products


def gradients(kind, style, how):
    """Return a loss and its gradients for a batch and a weight on a mesh of four by two
    devices.
    """
    mesh = jax.make_mesh(
        (4, 2), ("data", "model"), axis_types=(kind,) * 2, devices=jax.devices("cpu")
    )
    is_explicit = kind == AxisType.Explicit
    everywhere = (
        (lambda w: jax.sharding.reshard(w, P())) if is_explicit else lambda w: w
    )
    of_result = {"out_sharding": P("data")} if is_explicit else {}
    loss, of_w, of_x = {
        "gathered": (lambda w, x: jnp.sum(x @ everywhere(w)), P("data"), P("data")),
        "columns": (lambda w, x: jnp.sum(x @ w), P(None, "model"), P("data")),
        "rows": (
            lambda w, x: jnp.einsum("ij,jk->ik", x, w, **of_result).sum(),
            P("model"),
            P("data", "model"),
        ),
    }[style]
    # Exact in every order.
    integers = np.random.default_rng(0).integers(-2, 3, (2, 64, 64)).astype(np.float32)
    w, x = (
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(integers, (of_w, of_x), strict=True)
    )
    with jax.set_mesh(mesh):
        return jax.jit(mpx.value_and_grad(mpx.autocast(loss, how), argnums=(0, 1)))(
            w, x
        )


@pytest.mark.parametrize(
    ("style", "how"),
    [
        ("gathered", "bf16"),
        ("columns", "bf16"),
        ("rows", "bf16"),
        ("gathered", mpx.Fp8(min_extent=0)),
    ],
)
def test_autocast_on_explicit_axes_has_the_bits_of_automatic_ones(style, how):
    automatic, explicit = (
        gradients(kind, style, how) for kind in (AxisType.Auto, AxisType.Explicit)
    )
    assert_same_bits(
        jax.tree.map(np.asarray, explicit), jax.tree.map(np.asarray, automatic)
    )


# ---- what travels


def moves(fun, *args):
    """Return the dtypes in which arrays are sent to other devices, in the order of the
    program.
    """
    return [
        str(eqn.invars[0].aval.dtype)
        for eqn in all_eqns(jax.make_jaxpr(fun)(*args))
        if eqn.primitive.name
        in (
            "reshard",
            "sharding_constraint",
            "all_gather",
            "all_to_all",
            "ppermute",
            "reduce_scatter",
        )
        and eqn.invars[0].aval.ndim
    ]


@pytest.fixture
def explicit_mesh():
    with jax.set_mesh(mesh_of(AxisType.Explicit)) as mesh:
        yield mesh


def on_rows(x):
    return jax.device_put(x, P("data"))


@pytest.mark.many_devices
@pytest.mark.parametrize(
    ("reduce_dtype", "back_in"),
    [({}, "float32"), ({"reduce_dtype": "bf16"}, "bfloat16")],
)
def test_a_weight_is_sent_in_the_compute_dtype_and_its_gradient_in_the_dtype_of_sums(
    explicit_mesh, reduce_dtype, back_in
):
    w, x = on_rows(np.ones((16, 8), np.float32)), on_rows(np.ones((8, 16), np.float32))
    loss = mpx.autocast(
        lambda w, x: (x @ jax.sharding.reshard(w, P())).sum(), "bf16", **reduce_dtype
    )
    assert moves(loss, w, x) == ["bfloat16"]
    first, *back = moves(jax.grad(loss), w, x)
    assert (first, {*back}) == ("bfloat16", {back_in})


@pytest.mark.parametrize(
    ("used", "sent_in"),
    [
        (lambda w, x: (x @ w.T.reshape(16, 16)).sum(), "bfloat16"),
        (lambda w, x: jax.jit(lambda w: x @ w)(w).sum(), "bfloat16"),
        (
            lambda w, x: jax.lax.cond(jnp.sum(x) > 0, lambda: x @ w, lambda: x),
            "bfloat16",
        ),
        (
            lambda w, x: jax.lax.scan(lambda x, _: (x @ w, None), x, length=3)[0],
            "bfloat16",
        ),
        (lambda w, x: (x @ w).sum() + (w**2).sum(), "float32"),
        (lambda w, x: (x @ (w * 2)).sum(), "float32"),
        (lambda w, x: (w, x @ w), "float32"),
        (lambda w, x: jnp.ones(16) @ w, "float32"),
    ],
    ids=[
        "moved",
        "in a call",
        "in a branch",
        "in a loop",
        "also in a sum",
        "after a product of numbers",
        "also a result",
        "in a product with a vector",
    ],
)
def test_only_what_is_used_in_products_alone_is_sent_in_fewer_bits(
    explicit_mesh, used, sent_in
):
    w, x = on_rows(np.ones((16, 16), np.float32)), on_rows(np.ones((8, 16), np.float32))
    fun = mpx.autocast(lambda w, x: used(jax.sharding.reshard(w, P()), x), "bf16")
    assert moves(fun, w, x)[0] == sent_in


def exchanged_experts(w, x):
    """Return what experts, one on each device, make of rows of all devices."""

    def on_device(w, x):
        exchange = lambda x: jax.lax.all_to_all(x, "data", 0, 0, tiled=True)
        # Two products read what came, so their cotangents are added up before the way
        # back.
        rows = exchange(jnp.tanh(x))
        return exchange((jnp.tanh(rows @ w[0]) * (rows @ w[0].T)) @ w[0]) ** 2

    return jax.shard_map(on_device, in_specs=P("data"), out_specs=P("data"))(w, x)


def exchanged_weights(w, x):
    """Return products with a weight that comes from other devices."""

    def on_device(w, x):
        return x @ jax.lax.all_to_all(w[0], "data", 0, 0, tiled=True)

    return jax.shard_map(on_device, in_specs=P("data"), out_specs=P("data"))(w, x)


def passed_around(w, x):
    """Return a sum of what a device and the two before it have: cotangents are added up
    on their way.
    """

    def on_device(w, x):
        mine = result = x @ w[0]
        for _ in range(2):
            mine = jax.lax.ppermute(mine, "data", [(i, (i + 1) % 8) for i in range(8)])
            result += jnp.tanh(mine)
        return result

    return jax.shard_map(on_device, in_specs=P("data"), out_specs=P("data"))(w, x)


@pytest.mark.many_devices
@pytest.mark.parametrize(
    ("fun", "reduce_dtype", "sent_in"),
    [
        # There and back, and the same for cotangents.
        (exchanged_experts, {}, ["bfloat16"] * 4),
        (exchanged_weights, {}, ["bfloat16", "float32"]),
        (exchanged_weights, {"reduce_dtype": "bf16"}, ["bfloat16", "bfloat16"]),
        (passed_around, {}, ["bfloat16"] * 2 + ["float32"] * 2),
    ],
)
def test_what_devices_exchange_for_products_is_sent_in_16_bits_both_ways(
    explicit_mesh, fun, reduce_dtype, sent_in
):
    random = np.random.default_rng(0)
    w, x = (
        on_rows(random.normal(size=shape).astype(np.float32) / 4)
        for shape in ((8, 16, 16), (128, 16))
    )
    loss = mpx.autocast(lambda w, x: fun(w, x).sum(), "bf16", **reduce_dtype)
    grads = jax.grad(loss, (0, 1))
    assert moves(grads, w, x) == sent_in
    exact = jax.grad(lambda w, x: fun(w, x).sum(), (0, 1))(w, x)
    for grad, expected in zip(grads(w, x), exact, strict=True):
        error = jnp.linalg.norm(grad - expected) / jnp.linalg.norm(expected)
        assert error < 0.02


def whole_weights_kept(loss, ws, x):
    """Return how many whole weights the backward pass gets from the forward pass."""
    kept = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(loss, *args)[1], ws, x))
    return sum(
        leaf.shape == ws[0].shape and not any(leaf.sharding.spec) for leaf in kept
    )


@pytest.mark.many_devices
@pytest.mark.parametrize(
    "policy", [None, jax.checkpoint_policies.dots_saveable], ids=["nothing", "products"]
)
@pytest.mark.parametrize(
    "how",
    [
        pytest.param("bf16", id="bf16"),
        pytest.param(mpx.Fp8(min_extent=0), id="fp8", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_around_a_layer_keeps_no_gathered_weight_and_changes_no_bit(
    explicit_mesh, policy, how
):
    def loss(checkpoint):
        layer = checkpoint(lambda x, w: jnp.tanh(x @ jax.sharding.reshard(w, P())))
        return mpx.autocast(lambda ws, x: jnp.mean(functools.reduce(layer, ws, x)), how)

    args = [on_rows(w) for w in WEIGHTS[:, :, :32]], on_rows(WEIGHTS[0, :16, 32:64])
    kept, again = (
        loss(lambda layer: layer),
        loss(functools.partial(jax.checkpoint, policy=policy)),
    )
    assert whole_weights_kept(kept, *args) == 2
    assert whole_weights_kept(again, *args) == 0
    assert_same_bits(jax.grad(again)(*args), jax.grad(kept)(*args))


# ---- the dtype of sums


def gradient_dtypes(how="bf16", **options):
    """Return the dtypes of products in a gradient: of the result, then of the weight's
    gradient.
    """
    loss = mpx.autocast(lambda w, x: (x @ w).sum(), how, **options)
    program = jax.make_jaxpr(jax.grad(loss))(
        np.ones((8, 2), np.float32), np.ones((8, 8), np.float32)
    )
    return [
        str(eqn.outvars[0].aval.dtype)
        for eqn in all_eqns(program)
        if eqn.primitive.name == "dot_general"
    ]


@pytest.mark.many_devices
def test_gradients_of_weights_are_summed_in_float32_where_several_devices_are_in_sight():
    assert gradient_dtypes() == ["bfloat16", "float32"]
    with jax.set_mesh(jax.make_mesh((1,), ("data",), devices=jax.devices("cpu")[:1])):
        assert gradient_dtypes() == ["bfloat16", "bfloat16"]


@pytest.mark.many_devices
def test_a_policy_or_an_option_says_in_which_dtype_gradients_are_summed():
    policy = "params=f32,compute=bf16,output=f32,reduce="
    assert (
        gradient_dtypes(policy + "f32")
        == gradient_dtypes(reduce_dtype="f32")
        == ["bfloat16", "float32"]
    )
    assert (
        gradient_dtypes(policy + "bf16")
        == gradient_dtypes(reduce_dtype="bf16")
        == ["bfloat16", "bfloat16"]
    )
    assert gradient_dtypes(policy + "bf16", reduce_dtype="f32") == [
        "bfloat16",
        "float32",
    ]
