"""Check in which dtype eight GPUs gather weights and add up gradients, in the programs
that XLA compiles for them.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mpx
from mpx._shardings import part_sharding
from mpx.tools.program import target_devices
from tests.helpers import stepper

pytestmark = [pytest.mark.many_devices, pytest.mark.optax_promotion]

SHAPES = {"a": (2048, 8192), "b": (8192, 2048)}
ROWS = {"a": P("data"), "b": P("data")}
KEEPING_PRODUCTS = functools.partial(
    jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable
)


def placed_on(mesh, shape, dtype, spec):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def layers(gathered):
    """Return a loss of two layers, whose weights `gathered` makes whole, and again for
    the backward pass.
    """
    layer = KEEPING_PRODUCTS(lambda x, w: jnp.tanh(x @ gathered(w)))
    return lambda params, x: jnp.mean(layer(layer(x, params["a"]), params["b"]))


def in_a_shard_map(loss, mesh):
    """Divide the batch by hand too: the gradient of a gathered weight is added up over
    devices.
    """

    def step(params, x):
        value_and_grad = jax.shard_map(
            mpx.value_and_grad(loss, mpx.NoOpLossScale()),
            mesh=mesh,
            in_specs=(ROWS, P("data")),
            out_specs=(P(), ROWS),
        )
        return value_and_grad(params, x)

    return step


everywhere = lambda w: jax.lax.with_sharding_constraint(w, P())
STYLES = {
    "on every device": (AxisType.Auto, None, lambda w: w),
    "sharded": (AxisType.Auto, ROWS, lambda w: w),
    "constrained": (AxisType.Auto, ROWS, everywhere),
    "explicit": (AxisType.Explicit, ROWS, lambda w: jax.sharding.reshard(w, P())),
    "shard map": (
        AxisType.Explicit,
        ROWS,
        lambda w: jax.lax.all_gather(w, "data", tiled=True),
    ),
}


def sent(devices, style, how, dtype, target="h200", **options):
    """Return which dtypes of large arrays gathers and sums have, and the findings."""
    kind, specs, gathered = STYLES[style]
    mesh = Mesh(np.array(devices), ("data",), axis_types=(kind,))
    params = {
        name: placed_on(mesh, shape, dtype, specs[name] if specs else P())
        for name, shape in SHAPES.items()
    }
    loss = mpx.autocast(
        layers(gathered), mpx.Fp8(min_extent=0) if how == "fp8" else how, **options
    )
    gradients = (
        in_a_shard_map(mean_over_devices(loss), mesh)
        if style == "shard map"
        else mpx.value_and_grad(loss, mpx.NoOpLossScale())
    )

    def step(params, x):
        _, grads = gradients(params, x)
        return jax.tree.map(lambda p, g: (p - 0.1 * g).astype(p.dtype), params, grads)

    x = placed_on(mesh, (4096, 2048), jnp.float32, P("data"))
    report = mpx.step_report(step, params, x, target=target, donate_argnums=0)
    large = [c for c in report.collectives if c.sent_bytes > 2**20]
    names = lambda *kinds: {c.dtype for c in large if c.operation in kinds}
    return (
        names("all-gather"),
        names("all-reduce", "reduce-scatter"),
        [finding.what for finding in report.findings],
    )


def mean_over_devices(loss):
    return lambda params, x: jax.lax.pmean(loss(params, x), "data")


# Each style, and each way with styles of each kind of axes.
SENT = [(style, "bf16", jnp.float32) for style in STYLES]
SENT += [
    ("explicit", "bf16", jnp.bfloat16),
    ("sharded", "f16", jnp.bfloat16),
    ("shard map", "f16", jnp.bfloat16),
]
SENT += [
    ("on every device", "fp8", jnp.float32),
    ("constrained", "fp8", jnp.float32),
    ("explicit", "fp8", jnp.float32),
]


@pytest.mark.parametrize(("style", "how", "dtype"), SENT)
def test_weights_are_gathered_in_few_bits_and_gradients_added_up_in_float32(
    h200, style, how, dtype
):
    """Sums of 8-bit products are scaled before each device takes its part: XLA makes no
    reduce-scatter of them.
    """
    gathers, sums, findings = sent(h200, style, how, dtype)
    assert sums == {"f32"}
    are_scaled = how == "fp8" and style in ("constrained", "explicit")
    whole = "Every device gets a whole sum and keeps a part of it"
    assert [finding.partition(" (")[0] for finding in findings] == [whole] * are_scaled
    # Weights in bfloat16 may be sent as they are where products are in float16.
    assert (
        gathers
        <= {
            "bf16": {"bf16"},
            "f16": {"f16", "bf16"},
            "fp8": {"bf16", "f8e4m3fn", "f8e5m2"},
        }[how]
    )
    assert bool(gathers) == (style != "on every device")


@pytest.mark.parametrize("style", ["explicit", "shard map"])
def test_tpus_gather_weights_in_bfloat16_and_add_up_gradients_in_float32(v5e, style):
    """Where XLA places weights by itself, eight TPUs pass parts of them on while they
    multiply.
    """
    del v5e  # skips where nothing compiles for TPUs
    gathers, sums, findings = sent(
        target_devices("v5e", 8), style, "bf16", jnp.float32, target="v5e"
    )
    assert gathers == {"bf16"}
    assert sums == {"f32"}
    assert findings == []


@pytest.mark.parametrize("style", ["on every device", "explicit"])
def test_gradients_are_added_up_in_bfloat16_if_the_user_says_so_and_a_finding_says_it(
    h200, style
):
    _, sums, (finding,) = sent(h200, style, "bf16", jnp.float32, reduce_dtype="bf16")
    assert sums == {"bf16"}
    assert finding.startswith("Devices add up arrays of the shapes of weights in bf16")


def bytes_a_parameter(report, count):
    """Return what comes out of all-gathers and what goes into sums. A collective's
    bytes are read and written ones.
    """
    # 8 devices: one side is an eighth.
    shares = {
        "all-gather": 8 / 9,
        "reduce-scatter": 8 / 9,
        "all-reduce": 1 / 2,
    }
    sums = {"all-gather": 0.0, "sum": 0.0}
    for c in report.collectives:
        if c.bytes > 2**20:
            kind = "all-gather" if c.operation == "all-gather" else "sum"
            sums[kind] += c.bytes * c.times * shares[c.operation] / count
    return tuple(sums.values())


def fsdp_step(mesh, tx, name):
    """Return the report of a step with everything sharded, whose weights are gathered
    where they are used, twice.
    """
    policy = mpx.get_policy(name)
    layer = jax.checkpoint(lambda x, w: jnp.tanh(x @ jax.sharding.reshard(w, P())))
    loss = mpx.autocast(
        lambda params, x: jnp.mean(layer(layer(x, params["a"]), params["b"])), policy
    )
    params = {
        name: placed_on(mesh, shape, policy.param_dtype, P("data"))
        for name, shape in SHAPES.items()
    }
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        # Its types know how it is sharded, but no devices.
        state = jax.eval_shape(tx.init, params)

    def step(params, state, x):
        loss_value, grads = mpx.value_and_grad(loss, mpx.get_loss_scale(state))(
            params, x
        )
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss_value

    x = placed_on(mesh, (8 * 4096, 2048), jnp.float32, P("data"))
    return mpx.step_report(step, params, state, x, target="h200", donate_argnums=(0, 1))


def zero1_step(mesh, tx, name):
    """Return the report of a step with a sharded state."""
    policy = mpx.get_policy(name)
    loss, tx = mpx.autocast(layers(lambda w: w), policy), mpx.zero1(tx, mesh)
    params = {
        name: placed_on(mesh, shape, policy.param_dtype, P())
        for name, shape in SHAPES.items()
    }
    state = jax.eval_shape(tx.init, params)
    shardings = mpx.zero1_shardings(params, state, mesh)

    def step(params, state, x):
        grad_fn = mpx.value_and_grad(loss, mpx.get_loss_scale(state))
        loss_value, grads = grad_fn(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss_value

    state = jax.tree.map(
        lambda x, sharding: x.update(sharding=sharding), state, shardings
    )
    x = placed_on(mesh, (8 * 4096, 2048), jnp.float32, P("data"))
    return mpx.step_report(step, params, state, x, target="h200", donate_argnums=(0, 1))


@pytest.mark.parametrize(
    ("name", "sharding", "sent"),
    [
        ("f32", "zero1", (4, 4)),
        ("bf16-split-8bit", "fsdp", (4, 4)),
        ("fp8", "fsdp", (4, 4)),
        ("bf16-split,reduce=bf16", "zero1", (2, 2)),
    ],
)
def test_a_step_sends_as_many_bytes_as_the_page_says(h200, name, sharding, sent):
    tx = mpx.mixed_precision(optax.adamw(1e-3), name)
    is_fsdp = sharding == "fsdp"
    kind = AxisType.Explicit if is_fsdp else AxisType.Auto
    mesh = Mesh(np.array(h200), ("data",), axis_types=(kind,))
    report = fsdp_step(mesh, tx, name) if is_fsdp else zero1_step(mesh, tx, name)
    count = sum(math.prod(shape) for shape in SHAPES.values())
    assert bytes_a_parameter(report, count) == pytest.approx(sent, rel=0.01)


@pytest.mark.parametrize(
    ("checkpoint", "times"),
    [(lambda body: body, 1), (jax.checkpoint, 2), (KEEPING_PRODUCTS, 2)],
    ids=["kept", "again", "again, with products kept"],
)
def test_a_layer_in_a_scan_keeps_its_gathered_weight_unless_a_checkpoint_gathers_it_again(
    h200, checkpoint, times
):
    weights, report = scanned(
        h200, P(None, "data"), lambda w: jax.sharding.reshard(w, P()), checkpoint
    )
    assert bytes_a_parameter(report, weights.size) == pytest.approx(
        (2 * times, 4), rel=0.01
    )
    assert report.temporary_bytes / weights.size == pytest.approx(
        6 - 2 * times, abs=0.2
    )


@pytest.mark.parametrize("style", ["constrained", "explicit"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_layers_that_keep_the_results_of_products_keep_no_gathered_weight(
    h200, style, dtype
):
    """Of 16 weights of 2 * 8192**2 bytes the peak has two thirds, in use, on their way,
    or as float32 gradients.
    """
    kind, _, gathered = STYLES[style]
    mesh = Mesh(np.array(h200), ("data",), axis_types=(kind,))
    params = {i: placed_on(mesh, (8192, 8192), dtype, P("data")) for i in range(16)}
    x = placed_on(mesh, (1024, 8192), jnp.float32, P("data"))

    def report(checkpoint):
        layer = checkpoint(lambda x, w: jnp.tanh(x @ gathered(w)))
        gradients = mpx.grad(
            mpx.autocast(
                lambda params, x: jnp.mean(functools.reduce(layer, params.values(), x)),
                "bf16",
            )
        )
        step = lambda params, x: jax.tree.map(
            lambda w, g: (w - 0.1 * g).astype(w.dtype), params, gradients(params, x)
        )
        return mpx.step_report(step, params, x, target="h200", donate_argnums=0)

    kept, again = report(lambda layer: layer), report(KEEPING_PRODUCTS)
    dtypes = lambda report: {
        (c.operation, c.dtype) for c in report.collectives if c.sent_bytes > 2**20
    }
    assert (
        dtypes(again)
        == dtypes(kept)
        == {("all-gather", "bf16"), ("reduce-scatter", "f32")}
    )
    assert again.flops == kept.flops
    assert kept.temporary_bytes > 15 * 2 * 8192**2
    assert again.temporary_bytes < 11 * 2 * 8192**2


@pytest.mark.parametrize(
    "checkpoint",
    [lambda body: body, jax.checkpoint],
    ids=["a scan", "with a checkpoint"],
)
def test_layers_in_a_scan_have_no_float32_copy_of_bfloat16_weights(h200, checkpoint):
    """What is held beside the arguments: float32 gradients, 4 bytes a parameter, and
    less than 2 of activations.
    """
    weights, report = scanned(h200, P(), lambda w: w, checkpoint)
    assert 4 < report.temporary_bytes / weights.size < 6


def scanned(devices, spec, gathered, checkpoint):
    """Return the weights of layers in a scan, and the report of their step."""
    mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Explicit,))
    weights, x = (
        placed_on(mesh, (8, 2048, 2048), jnp.bfloat16, spec),
        placed_on(mesh, (1024, 2048), jnp.float32, P("data")),
    )
    body = checkpoint(lambda x, w: (jnp.tanh(x @ gathered(w)), None))
    loss = mpx.autocast(lambda w, x: jnp.mean(jax.lax.scan(body, x, w)[0]), "bf16")
    step = lambda w, x: (w - 0.1 * mpx.grad(loss)(w, x)).astype(w.dtype)
    return weights, mpx.step_report(step, weights, x, target="h200", donate_argnums=0)


def step_of(devices, kind, shape, spec):
    """Return the report of a step of AdamW with 8-bit moments on a sharded weight."""
    mesh = Mesh(np.array(devices), ("data",), axis_types=(kind,))
    tx = mpx.mixed_precision(
        mpx.low_precision_state(
            optax.adamw(1e-3), dict.fromkeys(["mu", "nu"], mpx.Blockwise8bit())
        ),
        "bf16",
    )
    params = {
        "w": jax.ShapeDtypeStruct(
            shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec)
        )
    }
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        state = jax.eval_shape(tx.init, params)
    is_divided = lambda x: (
        x.ndim >= len(spec)
        and not any(n % 8 for n, name in zip(x.shape, spec, strict=False) if name)
    )
    placed = lambda x: x.update(
        sharding=NamedSharding(mesh, spec if is_divided(x) else P())
    )
    return mpx.step_report(
        stepper(tx),
        params,
        jax.tree.map(placed, state),
        params,
        target="h200",
        donate_argnums=(0, 1),
    )


def test_of_blocks_that_reach_over_devices_the_largest_of_each_32_numbers_is_sent_which_is_a_finding(
    h200,
):
    """On automatic axes blocks have 256 numbers, and a device has 288 columns. Of two
    moments 4 / 32 bytes are sent.
    """
    report = step_of(h200, AxisType.Auto, (768, 2304), P(None, "data"))
    (finding,) = [
        finding for finding in report.findings if "optimizer state" in finding.what
    ]
    assert (
        finding.bytes
        == sum(c.sent_bytes for c in report.collectives)
        == 768 * 2304 * (7 / 8) * 2 * 4 / 32
    )
    assert report.temporary_bytes < 3 * 768 * 2304 / 8
    assert not step_of(h200, AxisType.Explicit, (768, 2304), P(None, "data")).findings


# A language model as MaxText has it: FSDP on automatic axes, layers stacked along the
# second axis of each weight and computed again one by one, weights widened by name; the
# trainer differentiates. CPUs gather it in float32.
STACKED = {
    "embedding": ((8192, 1024), P(None, "data")),
    "up": ((1024, 2, 4096), P("data")),
    "down": ((4096, 2, 1024), P(None, None, "data")),
    "head": ((1024, 8192), P("data")),
}


def language_model(params, tokens):
    divided = lambda x: jax.lax.with_sharding_constraint(x, P("data"))
    dense = lambda x, w: jnp.einsum("bte,ef->btf", x, w.astype(jnp.float32))

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def layer(x, weights):
        return (
            divided(x + dense(jax.nn.silu(dense(x, weights["up"])), weights["down"])),
            None,
        )

    x = divided(params["embedding"].astype(jnp.float32)[tokens])
    x, _ = jax.lax.scan(
        layer, x, {name: jnp.moveaxis(params[name], 1, 0) for name in ("up", "down")}
    )
    logits = dense(x, params["head"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()


@pytest.mark.parametrize("recipe", ["bf16-split-8bit", "bf16-autocast"])
def test_a_trainer_gathers_weights_in_bfloat16_adds_gradients_in_float32_and_sends_no_state(
    h200, recipe
):
    mesh = Mesh(np.array(h200), ("data",), axis_types=(AxisType.Auto,))
    tx, dtype = (
        mpx.mixed_precision(optax.adamw(1e-3), recipe),
        mpx.get_policy(recipe).param_dtype,
    )
    params = {
        name: placed_on(mesh, shape, dtype, spec)
        for name, (shape, spec) in STACKED.items()
    }

    def as_its_weight(path, x):
        weight = next(
            (params[key.key] for key in path if getattr(key, "key", None) in params),
            None,
        )
        spec = (
            P()
            if weight is None
            else part_sharding(weight.sharding, weight.shape, x.shape).spec
        )
        return placed_on(mesh, x.shape, x.dtype, spec)

    state = jax.tree.map_with_path(as_its_weight, jax.eval_shape(tx.init, params))
    places = jax.tree.map(lambda x: x.sharding, (params, state))

    def step(params, state, tokens):
        loss, grads = jax.value_and_grad(mpx.autocast(language_model, recipe))(
            params, tokens
        )
        updates, state = tx.update(grads, state, params)
        return (
            *jax.lax.with_sharding_constraint(
                (optax.apply_updates(params, updates), state), places
            ),
            loss,
        )

    with jax.set_mesh(mesh):
        tokens = placed_on(mesh, (16, 256), jnp.int32, P("data"))
        report = mpx.step_report(
            step, params, state, tokens, target="h200", donate_argnums=(0, 1)
        )
    large = {(c.operation, c.dtype) for c in report.collectives if c.sent_bytes > 2**21}
    activations = {("all-to-all", "f32"), ("all-gather", "s32")}  # and tokens
    assert large - activations == {("all-gather", "bf16"), ("reduce-scatter", "f32")}
