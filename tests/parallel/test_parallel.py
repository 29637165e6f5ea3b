"""Check `zero1` and `data_parallel` on eight devices: what lies where, what is sent, and the bits of one device."""

import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpx
from tests.helpers import QUICKLY, assert_same_bits, cases, eight_cpu_devices, stepper, unfused

pytestmark = pytest.mark.optax_promotion

ADAMW = optax.adamw(optax.linear_schedule(1e-2, 0.0, 100), weight_decay=0.1)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), ADAMW)
BLOCKS = mpx.Blockwise8bit(16)


def in_8_bits(rule, names, **options):
    return mpx.low_precision_state(rule, {names: BLOCKS}, min_size=64, **options)


RULES = {
    "masters": lambda rule: mpx.master_weights(rule),
    "split": lambda rule: mpx.master_weights(rule, storage="split"),
    "8 bits": lambda rule: mpx.master_weights(in_8_bits(rule, "mu"), storage="split"),
    "8 bits stochastic": lambda rule: mpx.master_weights(
        in_8_bits(rule, "[mn]u", rounding="stochastic", key=jax.random.key(1)), storage="split"
    ),
    "24 and 4 bits": lambda rule: mpx.master_weights(
        mpx.low_precision_state(rule, {"mu": mpx.Blockwise4bit(16)}, min_size=64, key=jax.random.key(1)),
        storage="split24",
        key=jax.random.key(2),
    ),
    "kahan": lambda rule: optax.chain(mpx.upcast(rule), mpx.kahan_summation()),
    "stochastic": lambda rule: optax.chain(mpx.upcast(rule), mpx.stochastic_rounding(jax.random.key(0))),
    "scaled": lambda rule: mpx.loss_scaling(mpx.master_weights(rule)),
    "average": lambda rule: mpx.master_weights(optax.chain(rule, mpx.params_ema(0.9))),
}
every_rule = pytest.mark.parametrize("name", cases(RULES, ["8 bits stochastic", "scaled", "kahan"]))


def params():
    """Return leaves that are sharded along the first axis, along the second, and not at all."""
    return {
        "first": jnp.linspace(-1, 1, 16 * 48, dtype=jnp.bfloat16).reshape(16, 48),
        "second": jnp.linspace(1, 2, 5 * 128, dtype=jnp.float16).reshape(5, 128),
        "whole": jnp.ones((3, 5), jnp.bfloat16),
        "bias": jnp.linspace(-1, 1, 24, dtype=jnp.float32),
        "scalar": jnp.ones((), jnp.float32),
        "none": None,
    }


def gradients(step):
    """Return gradients that are the same on one device as on eight."""
    at = lambda p: np.sin(np.arange(p.size, dtype=np.float32) + np.float32(step)).reshape(p.shape)
    return jax.tree.map(at, jax.eval_shape(params))


def stepped(tx, options):
    return jax.jit(stepper(tx), compiler_options=options)


def trained(tx, steps, start, options, place=lambda tree: tree):
    step = stepped(tx, options)
    now, state = start, tx.init(start)
    for i in range(steps):
        now, state = step(now, state, place(gradients(i)))
    return now, state


def replicated(mesh):
    return lambda tree: jax.device_put(tree, NamedSharding(mesh, P()))


in_float32 = pytest.mark.skipif(
    jax.config.jax_enable_x64, reason="Optax's adamw computes in float64 then; two programs differ in its last bits"
)


@in_float32
@pytest.mark.parametrize("name", cases(["kahan", "8 bits stochastic", "scaled"], ["kahan"]))
def test_twenty_steps_on_eight_devices_have_the_bits_of_one(name):
    mesh = eight_cpu_devices()
    tx = RULES[name](ADAMW)
    expected = trained(tx, 20, params(), unfused())
    actual = trained(mpx.zero1(tx, mesh), 20, replicated(mesh)(params()), unfused(), replicated(mesh))
    assert_same_bits(actual, expected)


@every_rule
def test_the_state_is_that_of_the_rule_without_it_and_each_device_holds_an_eighth(name):
    """Compare structure, shapes and dtypes: checkpoints fit with and without, on any number of devices."""
    mesh = eight_cpu_devices()
    start = {"w": jnp.ones((64, 256), jnp.bfloat16), "v": jnp.ones((3, 1024), jnp.bfloat16)}
    tx = RULES[name](ADAMW)
    types = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), tree)
    state = mpx.zero1(tx, mesh).init(replicated(mesh)(start))
    assert types(state) == types(jax.eval_shape(tx.init, start))
    arrays = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
    on_first = sum(leaf.addressable_shards[0].data.nbytes for leaf in arrays)
    # Scales of 3 x 64 blocks are sharded too; raw keys of 8 bytes are not: a state of 24 and 4 bits has two.
    assert 0 < on_first <= sum(leaf.nbytes for leaf in arrays) / 8 + 16


@pytest.mark.parametrize("name", cases(["8 bits", "scaled", "stochastic", "average"], ["8 bits", "scaled"]))
def test_a_step_compiles_once_and_keeps_every_sharding(name):
    mesh = eight_cpu_devices()
    tx = mpx.zero1(RULES[name](CLIPPED), mesh)
    now = replicated(mesh)(params())
    state = tx.init(now)
    step = stepped(tx, QUICKLY)
    before = jax.tree.map(lambda x: x.sharding.spec, (now, state))
    for i in range(3):
        now, state = step(now, state, replicated(mesh)(gradients(i)))
    assert jax.tree.map(lambda x: x.sharding.spec, (now, state)) == before
    assert step._cache_size() == 1


def test_an_abstract_state_gets_the_shardings_of_a_real_one():
    mesh = eight_cpu_devices()
    tx = RULES["8 bits"](CLIPPED)
    shapes = jax.eval_shape(params)
    shardings = mpx.zero1_shardings(shapes, jax.eval_shape(tx.init, shapes), mesh)
    state = mpx.zero1(tx, mesh).init(params())
    for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    specs = {name: leaf.sharding.spec for name, leaf in state.master.items() if isinstance(leaf, jax.Array)}
    assert specs == {"first": P("data"), "second": P(None, "data"), "whole": P()}  # no axis of `whole` can be divided


def test_no_device_ever_holds_a_whole_state():
    mesh = eight_cpu_devices()
    tx = mpx.zero1(mpx.master_weights(ADAMW), mesh)
    start = {"w": replicated(mesh)(jnp.ones((1024, 256), jnp.bfloat16))}
    memory = jax.jit(tx.init).lower(start).compile().memory_analysis()
    a_moment = 4 * 1024 * 256
    assert memory.output_size_in_bytes < 3 * a_moment / 8 + 1024
    assert memory.temp_size_in_bytes < a_moment / 8 + 1024


def two_axes():
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices("cpu"))


SPECS = {"first": P("model"), "second": P(None, "model"), "whole": P(), "bias": P(), "scalar": P(), "none": None}


@in_float32
def test_tensor_parallel_parameters_keep_their_sharding():
    mesh = two_axes()
    tx = mpx.master_weights(ADAMW)
    start = jax.tree.map(lambda p, spec: jax.device_put(p, NamedSharding(mesh, spec)), params(), SPECS)
    now, state = trained(mpx.zero1(tx, mesh, param_specs=SPECS), 3, start, unfused())
    assert {name: p.sharding.spec for name, p in now.items() if p is not None} == {
        name: spec for name, spec in SPECS.items() if spec is not None
    }
    assert state.master["first"].sharding.spec == P(("model", "data"))
    assert state.master["second"].sharding.spec == P(None, ("model", "data"))  # 5 rows cannot be divided by 4
    assert state.master["whole"].sharding.spec == P()
    assert_same_bits((now, state), trained(tx, 3, params(), unfused()))


def test_an_axis_is_divided_only_if_what_a_device_has_of_it_is_a_multiple():
    """Of 12 rows over 2 devices each has 6, which 4 others cannot share: they share the columns."""
    mesh, params = (
        jax.sharding.AbstractMesh((4, 2), ("data", "model")),
        {"w": jax.ShapeDtypeStruct((12, 8), np.float32)},
    )
    shardings = mpx.zero1_shardings(params, optax.TraceState(params), mesh, param_specs=P("model"))
    assert shardings.trace["w"].spec == P("model", "data")


def test_one_spec_serves_all_parameters_below_it_and_those_that_are_sharded_otherwise_are_refused():
    mesh = two_axes()
    start = {"w": jnp.ones((8, 8), jnp.float32), "v": jnp.ones((8, 4), jnp.float32)}
    start = jax.device_put({"layer": start}, NamedSharding(mesh, P(None, "model")))
    state = mpx.zero1(ADAMW, mesh, param_specs={"layer": P(None, "model")}).init(start)
    assert optax.tree.get(state, "mu")["layer"]["v"].sharding.spec == P("data", "model")
    with pytest.raises(ValueError, match=r"'layer/v' is sharded as .*'model'.*but `param_specs` says P.*Give its"):
        mpx.zero1(ADAMW, mesh).init(start)
    message = r"`zero1`: `param_specs` has .* for the parameter 'layer/v', but it may name axe"
    for spec in (P("data"), P(("model", "data")), P("expert")):
        with pytest.raises(ValueError, match=message):
            mpx.zero1(ADAMW, mesh, param_specs={"layer": spec}).init(start)


def model_loss(params, x):
    return jnp.mean((x @ params["w"]) @ params["v"])


def model_params():
    return {"w": jnp.full((64, 32), 0.5, jnp.bfloat16), "v": jnp.full((32, 16), 0.25, jnp.bfloat16)}


def transfers(text):
    """Return the collective operations of a compiled program, with the types of what they send."""
    found = re.findall(r"= \(?(.*?)\)? (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)\(", text)
    return sorted((name, kind) for types, name in found for kind in re.findall(r"(\w+)\[\d", types))  # no scalars


def program(scatter, wrap=mpx.zero1):
    mesh = eight_cpu_devices()
    tx = mpx.master_weights(ADAMW, storage="split")
    tx = wrap(tx, mesh) if wrap else tx
    loss = mpx.autocast(model_loss, "bf16")
    gradients = mpx.data_parallel(mpx.value_and_grad(loss, grad_dtype=None), mesh, scatter=scatter)

    def step(params, state, x):
        value, grads = gradients(params, x)
        return *stepper(tx)(params, state, grads), value

    start = replicated(mesh)(model_params())
    x = jax.device_put(jnp.ones((16, 64), jnp.float32), NamedSharding(mesh, P("data")))
    return jax.jit(step), (start, tx.init(start), x)


def test_gradients_arrive_by_reduce_scatter_in_f32_and_parameters_are_gathered_in_16_bits():
    step, inputs = program(scatter=True)
    sent = [("all-gather", "u16"), ("all-gather", "u16"), ("reduce-scatter", "f32"), ("reduce-scatter", "f32")]
    assert transfers(step.lower(*inputs).compile().as_text()) == sent


def test_without_scatter_gradients_are_added_up_everywhere_in_f32():
    step, inputs = program(scatter=False, wrap=None)
    assert set(transfers(step.lower(*inputs).compile().as_text())) == {("all-reduce", "f32")}


@pytest.mark.parametrize(
    ("dtype", "numbers", "mean"),
    [
        (jnp.bfloat16, [256, 1, 1, 1, 1, 1, 1, 1], 263 / 8),  # in bfloat16 the sum stays 256
        (jnp.float16, [60_000] * 8, 60_000),  # the sum is 480,000, which float16 cannot hold
    ],
    ids=["bfloat16", "float16"],
)
def test_devices_add_up_gradients_of_16_bits_in_float32(dtype, numbers, mean):
    fun = lambda w, x: (jnp.float32(0), w * 0 + x.astype(w.dtype))
    inputs = jnp.ones(1, dtype), jnp.asarray(numbers, jnp.float32)
    _, grads = jax.jit(mpx.data_parallel(fun, eight_cpu_devices()))(*inputs)
    assert_same_bits(grads, jnp.full(1, mean, jnp.float32))


@pytest.mark.parametrize("is_tensor_parallel", [False, True], ids=["data", "data and tensor"])
def test_the_mean_over_devices_is_that_over_the_batch_and_gradients_are_reduced_where_they_are(is_tensor_parallel):
    """Each device has the gradients of its shard of the layer, and gets an eighth of that; nothing else is sent."""
    mesh = two_axes() if is_tensor_parallel else eight_cpu_devices()
    specs = {"w": P(None, "model"), "v": P("model")} if is_tensor_parallel else {"w": P(), "v": P()}
    sharded = (
        {"w": P("data", "model"), "v": P(("model", "data"))} if is_tensor_parallel else {"w": P("data"), "v": P("data")}
    )
    loss = mpx.value_and_grad(lambda p, x: (model_loss(p, x), {"largest": jnp.max(x)}), has_aux=True)
    fun = jax.jit(mpx.data_parallel(loss, mesh, scatter=True, param_specs=specs))
    start = jax.tree.map(lambda p, spec: jax.device_put(p, NamedSharding(mesh, spec)), model_params(), specs)
    x = jnp.sin(jnp.arange(16 * 64, dtype=jnp.float32)).reshape(16, 64)
    inputs = start, jax.device_put(x, NamedSharding(mesh, P("data")))
    (value, aux), grads = fun(*inputs)
    (expected, _), expected_grads = jax.jit(loss)(model_params(), x)
    np.testing.assert_allclose(value, expected, rtol=1e-2)
    assert aux["largest"].dtype == np.float32
    assert {name: g.sharding.spec for name, g in grads.items()} == sharded
    assert ("all-gather", "f32") not in transfers(fun.lower(*inputs).compile().as_text())
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=1e-3)


def test_gradients_of_another_tree_and_values_without_a_mean_are_refused():
    counted = lambda w, x: ((jnp.float32(0), {"tokens": jnp.int32(3)}), w)
    for fun, error, message in [
        (
            lambda w, x: (x.sum(), {"w": jnp.ones(1)}),
            ValueError,
            r"`data_parallel`: gradients or updates do not match .*\n  'w': float.*, but the parameter is",
        ),
        (counted, TypeError, r"`data_parallel`: the value at '1/tokens' is int32\[\], which has no mean"),
    ]:
        with pytest.raises(error, match=message):
            jax.jit(mpx.data_parallel(fun, eight_cpu_devices()))({"w": jnp.ones(8, jnp.float32)}, jnp.ones(8))


def test_parameters_without_gradients_have_none_and_what_is_not_an_array_is_refused_by_name():
    """As Equinox differentiates a model with integers in it; its functions stay outside."""
    vg = mpx.value_and_grad(lambda p, x: jnp.mean(x * p["w"][None]), transform=eqx.filter_value_and_grad)
    fun = mpx.data_parallel(vg, eight_cpu_devices(), scatter=True)
    params, x = {"w": jnp.ones(8, jnp.float32), "ids": jnp.arange(3)}, jnp.ones((16, 8), jnp.float32)
    _, grads = jax.jit(fun)(params, x)
    assert grads["ids"] is None
    assert grads["w"].tolist() == [0.125] * 8
    with pytest.raises(TypeError, match=r"leaves that are not arrays(?s:.*)'act': function"):
        fun(params | {"act": lambda x: x}, x)


def test_nan_on_one_device_skips_the_step_on_all():
    mesh = eight_cpu_devices()
    tx = mpx.zero1(RULES["scaled"](CLIPPED), mesh)
    start = replicated(mesh)(model_params())
    state = tx.init(start)
    gradients = mpx.data_parallel(mpx.value_and_grad(model_loss), mesh, scatter=True)

    step = jax.jit(lambda params, state, x: stepper(tx)(params, state, gradients(params, x)[1]))
    x = jnp.ones((16, 64), jnp.float32).at[7, 3].set(jnp.nan)
    now, new_state = step(start, state, jax.device_put(x, NamedSharding(mesh, P("data"))))
    assert_same_bits(now, start)
    assert_same_bits(new_state.inner_state, state.inner_state)
    assert int(new_state.skipped_steps) == 1


def in_shard_map(tx, mesh, check_vma, options):
    """Return a step for gradients that differ from device to device, which have an axis of devices in front."""
    shapes = jax.eval_shape(params)
    shardings = mpx.zero1_shardings(shapes, jax.eval_shape(tx.init, shapes), mesh)
    specs = jax.tree.map(lambda sharding: sharding.spec, shardings)

    step = lambda params, state, grads: stepper(tx)(params, state, jax.tree.map(lambda g: g[0], grads))
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs), check_vma=check_vma
    )
    return jax.jit(mapped, compiler_options=options)


def per_device(step):
    """Return gradients of eight devices whose mean is exact in any order."""
    at = lambda p: (np.round(np.sin(np.arange(8 * p.size) + step) * 64) / 64).astype(np.float32)
    return jax.tree.map(lambda p: at(p).reshape(8, *p.shape), jax.eval_shape(params))


BY_NUMBER = {name: RULES[name] for name in ("split", "8 bits", "kahan", "average")}
BY_NUMBER["scaled"] = lambda rule: mpx.loss_scaling(mpx.master_weights(rule), axis_name="data")


@pytest.mark.parametrize("name", cases(BY_NUMBER, ["8 bits", "scaled"]))
def test_inside_shard_map_it_has_the_bits_of_jit(name):
    """With the types of JAX that say what varies over devices, and without."""
    check_vma = name in ("8 bits", "kahan")
    mesh = eight_cpu_devices()
    tx = mpx.zero1(BY_NUMBER[name](ADAMW), mesh)
    outside = mpx.zero1(RULES[name](ADAMW), mesh)
    start = replicated(mesh)(params())
    manual, plain = in_shard_map(tx, mesh, check_vma, unfused()), stepped(outside, unfused())
    now = expected = (start, outside.init(start))
    for i in range(3):
        grads = per_device(i)
        now = manual(*now, grads)
        expected = plain(*expected, replicated(mesh)(jax.tree.map(lambda g: g.mean(0), grads)))
    assert_same_bits(now, expected)


def gradient_step(differentiable):
    """Return an update by the gradients of each device's own loss, under `check_vma`."""
    mesh = eight_cpu_devices()
    tx = mpx.zero1(mpx.master_weights(optax.sgd(1.0)), mesh)
    specs = {"w": P()}

    def step(params, x):
        grads = jax.grad(lambda p: jnp.sum(p["w"] * x))(differentiable(params))
        return tx.update(grads, tx.init(params), params)[0]

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(specs, P("data")), out_specs=specs)
    return jax.jit(mapped)({"w": jnp.zeros(16, jnp.float32)}, jnp.arange(8, dtype=jnp.float32))


def test_inside_shard_map_each_device_gives_its_own_gradients_and_those_that_jax_has_added_up_are_refused():
    """Under `check_vma` JAX sums the gradients of parameters that are equal everywhere: eight times the mean."""
    updates = gradient_step(lambda params: jax.tree.map(lambda p: lax.pcast(p, "data", to="varying"), params))
    assert_same_bits(updates, {"w": jnp.full(16, -3.5, jnp.float32)})
    with pytest.raises(ValueError, match=r"the gradient of 'w' is the same on all devices: JAX has added it up"):
        gradient_step(lambda params: params)


# ---- what a shard alone cannot do, and why --------------------------------------------------------------------------


def with_a_value(tx):
    """Return a call of a step that takes an argument of its rule, under two axes."""
    mesh, start = two_axes(), {"w": jnp.ones(16, jnp.bfloat16)}
    tx = mpx.zero1(tx, mesh)
    step = lambda params, grads, value: tx.update(grads, tx.init(params), params, value=value)[0]
    mapped = jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return lambda: jax.eval_shape(mapped, start, {"w": jnp.ones(16, jnp.float32)}, jnp.float32(1))


def stepping(tx, steps=1):
    """Return a call of so many steps."""

    def run():
        mesh, now = eight_cpu_devices(), jax.eval_shape(params)
        divided = mpx.zero1(tx, mesh)
        step, now = in_shard_map(divided, mesh, False, QUICKLY), (now, jax.eval_shape(divided.init, now))
        for i in range(steps):
            now = jax.eval_shape(step, *now, per_device(i))

    return run


def with_a_whole_state():
    mesh, shapes = eight_cpu_devices(), jax.eval_shape(params)
    tx = mpx.zero1(mpx.master_weights(ADAMW), mesh)
    step = jax.shard_map(lambda p, s, g: tx.update(g, s, p)[0], mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    jax.eval_shape(step, shapes, jax.eval_shape(mpx.master_weights(ADAMW).init, shapes), gradients(0))


def in_blocks(name):
    return mpx.low_precision_state(ADAMW, {name: mpx.Blockwise8bit(32)}, min_size=1)


BY_POSITION = optax.stateless(lambda g, p: jax.tree.map(lambda x: x * jnp.arange(x.shape[0]), g))
SMALL_SHARDS = mpx.low_precision_state(ADAMW, {"mu": "bf16"}, min_size=600)  # a shard has 96 elements of 768
MORE, BEYOND = r"depends on more than that \(through .*", ", .*, would reach over several"
NOT_OF_A_SHARD = {
    "extra argument": (with_a_value(optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau())), f"{MORE}'value'"),
    "another axis": (with_a_value(mpx.loss_scaling(optax.sgd(1.0), axis_name="model")), f"{MORE}reduce_and"),
    "noise": (with_a_value(optax.add_noise(0.1, 0.5, 0)), f"{MORE}random_bits"),
    "positions": (with_a_value(BY_POSITION), f"{MORE}iota"),
    "small shards": (
        stepping(SMALL_SHARDS),
        r"Lower the `min_size`(.|\n)*'.*mu/first': float32\[2, 48\], but each device should have bfloat16\[2, 48\]",
    ),
    "clip": (stepping(mpx.master_weights(CLIPPED)), "a result that depends on more than that"),
    "adafactor": (stepping(mpx.master_weights(optax.adafactor(1e-2))), "`zero1`: inside `jax.shard_map` "),
    "no agreement on a skip": (stepping(mpx.loss_scaling(mpx.master_weights(ADAMW))), f"{MORE}has `axis_name`"),
    # Blocks of an axis, of rows, and of a flat array of which a shard could end within a block.
    "blocks beyond a shard": (stepping(in_blocks("mu/bias")), rf"blocks of the state at '.*/mu/bias'{BEYOND}"),
    "blocks beyond a row": (stepping(in_blocks("mu/second")), rf"blocks of the state at '.*/mu/second'{BEYOND}"),
    "blocks of a flat array": (stepping(in_blocks("mu/first")), rf"blocks of the state at '.*/mu/first'{BEYOND}"),
    "a whole state": (
        with_a_whole_state,
        r"'master/first': float32\[16, 48\], but each device should have float32\[2, 48\]",
    ),
    # Its gradients are float32 here, and Optax's Adam adds them to the bfloat16 moments that its `init` made.
    "a rule that has changed its dtypes": (
        stepping(optax.adam(1e-3), 2),
        r"put `upcast` around the rule(.|\n)*'0/mu/first': float32\[2, 48\], but each",
    ),
}


@pytest.mark.parametrize("name", NOT_OF_A_SHARD)
def test_inside_shard_map_what_a_shard_alone_cannot_do_is_refused_with_the_reason(name):
    call, message = NOT_OF_A_SHARD[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_what_is_no_mesh_an_axis_that_it_has_not_and_an_update_without_parameters_are_refused():
    for function in (functools.partial(mpx.zero1, ADAMW), functools.partial(mpx.data_parallel, lambda p: (p, p))):
        with pytest.raises(ValueError, match=r"the mesh has the axes \('data',\), and none is called 'batch'"):
            function(eight_cpu_devices(), "batch")
        with pytest.raises(TypeError, match=r"`mesh` must be a jax.sharding.Mesh, but got str"):
            function("data")
    tx = mpx.zero1(optax.sgd(1.0), eight_cpu_devices())
    with pytest.raises(ValueError, match="`zero1`"):
        tx.update({"w": jnp.ones(8, jnp.float32)}, tx.init({"w": jnp.ones(8, jnp.float32)}))


def test_check_chain_finds_what_changes_updates_after_or_inside_it_and_nothing_wrong_with_it():
    halve, divided = optax.scale(0.5), lambda tx: mpx.zero1(tx, eight_cpu_devices())
    masters = mpx.master_weights(ADAMW)
    for rule in ("split", "kahan", "scaled"):
        mpx.check_chain(divided(RULES[rule](CLIPPED)))
    for tx, author in [
        (optax.chain(divided(masters), halve), "zero1"),
        (divided(optax.chain(masters, halve)), "master"),
        (optax.chain(divided(mpx.upcast(ADAMW)), halve), "zero1"),
    ]:
        with pytest.raises(ValueError, match=rf"was final when `{author}.* had rounded it, but `mul` changes it"):
            mpx.check_chain(tx)
