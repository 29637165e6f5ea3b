"""Check `mixed_precision` and `any_precision_adamw` against the wrappers and the
published algorithm.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpx
from tests.helpers import assert_same_bits, cases, eight_cpu_devices, unfused

pytestmark = pytest.mark.optax_promotion

RULE = optax.adamw(1e-2)


def state_types(policy, params_dtype, **options):
    state = mpx.mixed_precision(RULE, policy, **options).init(
        {"w": jnp.ones(3, params_dtype)}
    )
    names = []
    while hasattr(state, "inner_state"):
        names.append(type(state).__name__)
        state = state.inner_state
    return names


@pytest.mark.parametrize(
    ("policy", "params_dtype", "expected"),
    [
        ("f32", jnp.float32, []),
        ("params=f32,compute=bf16,output=f32", jnp.float32, []),
        ("params=bf16,compute=bf16,output=f32", jnp.bfloat16, ["MasterWeightsState"]),
        ("params=f32,compute=f16,output=f32", jnp.float32, ["LossScalingState"]),
        ("f16", jnp.float16, ["LossScalingState", "MasterWeightsState"]),
        (
            "params=bf16,compute=f16",
            jnp.bfloat16,
            ["LossScalingState", "MasterWeightsState"],
        ),
        (
            "params=f16,compute=f32,output=f32",
            jnp.float16,
            ["LossScalingState", "MasterWeightsState"],
        ),
    ],
)
def test_masters_and_loss_scaling_are_added_where_they_are_needed_only(
    policy, params_dtype, expected
):
    assert state_types(policy, params_dtype) == expected


@pytest.mark.parametrize(
    ("dtype", "options", "stored"),
    [
        ("bf16", {}, np.uint16),
        ("bf16", {"storage": "full"}, np.float32),
        ("f16", {}, np.float32),  # the bits that float16 lacks do not fit into 16
    ],
)
def test_masters_of_bfloat16_parameters_are_split_unless_full_ones_are_asked_for(
    dtype, options, stored
):
    params = {"w": jnp.ones(3, mpx.get_policy(dtype).param_dtype)}
    state = mpx.mixed_precision(
        RULE, f"params={dtype},compute=bf16,output=f32", **options
    )
    master = optax.tree.get(state.init(params), "master")
    assert master["w"].dtype == stored


NARROW = [
    name
    for name, recipe in mpx.recipes().recipes.items()
    if mpx.get_policy(name).param_dtype != np.float32
]


def is_variable(node):
    return isinstance(node, nnx.Variable)


def partitioned(model, is_leaf):
    """Return an optimizer that trains the kernel by a recipe, and freezes the bias."""

    def labels(params):
        return jax.tree.map_with_path(
            lambda path, _: "a" if "kernel" in jax.tree_util.keystr(path) else "b",
            params,
            is_leaf=is_leaf,
        )

    groups = {
        "a": mpx.mixed_precision(optax.sgd(1e-2), "bf16-split"),
        "b": optax.set_to_zero(),
    }
    return nnx.Optimizer(model, optax.partition(groups, labels), wrt=nnx.Param)


@pytest.mark.parametrize("jit", [lambda f, **_: f, nnx.jit])
def test_a_partition_of_the_variables_of_nnx_casts_what_its_recipe_trains(jit):
    """Labels of arrays make copies of variables, which are refused at once."""
    model = nnx.Linear(128, 64, rngs=nnx.Rngs(0))
    optimizer = jit(partitioned, static_argnums=1)(model, is_variable)
    assert (model.kernel[...].dtype, model.bias[...].dtype) == (jnp.bfloat16, "float32")
    before = nnx.clone(model)
    grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
    optimizer.update(model, grads)
    assert (model.kernel[...] != before.kernel[...]).any()
    assert_same_bits(model.bias[...], before.bias[...])
    model = nnx.Linear(128, 64, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"are copies.*Label variables.*is_leaf"):
        partitioned(model, None)
    nnx.update(
        model, mpx.get_policy("bf16-split").cast_to_param(nnx.state(model, nnx.Param))
    )
    partitioned(model, None).update(model, grads)


@pytest.mark.parametrize(
    "recipe", cases(NARROW, ["bf16-split-8bit", "bf16-stochastic"])
)
def test_a_model_of_nnx_whose_copies_were_cast_by_a_jitted_init_is_refused_at_its_first_update(
    recipe,
):
    """`nnx.jit` hands casts back to the model."""
    tx = mpx.mixed_precision(RULE, recipe, key=jax.random.key(0))
    model = nnx.Linear(128, 64, rngs=nnx.Rngs(0))
    params = nnx.state(model, nnx.Param)
    state = jax.jit(tx.init)(params)
    with pytest.raises(
        ValueError,
        match=r"`mixed_precision`: .*`jax.jit\(tx.init\)` casts copies.*`nnx.jit`, or cast the model first",
    ):
        tx.update(params, state, params)
    nnx.jit(lambda model: tx.init(nnx.state(model, nnx.Param)))(model)
    assert model.kernel[...].dtype == mpx.get_policy(recipe).param_dtype


@pytest.mark.parametrize("sharded", [False, True], ids=["", "zero1"])
@pytest.mark.parametrize(
    "recipe",
    cases(mpx.recipes().recipes, ["bf16-split24-4bit"]),
)
def test_a_trainer_that_gives_update_the_whole_module_gets_the_bits_of_one_that_gives_its_arrays(
    recipe, sharded
):
    tx = mpx.mixed_precision(RULE, recipe)
    tx = mpx.zero1(tx, eight_cpu_devices()) if sharded else tx
    model = mpx.get_policy(recipe).cast_to_param(
        eqx.nn.MLP(64, 64, 64, 1, key=jax.random.key(1))
    )
    assert not eqx.is_array(model.activation)
    assert any(not eqx.is_array(leaf) for leaf in jax.tree.leaves(model))
    params = eqx.filter(model, eqx.is_array)
    state = tx.init(params)
    scaled_loss = lambda model, x: mpx.get_loss_scale(state).scale(
        jnp.mean(model(x).astype(jnp.float32) ** 2)
    )
    grads = eqx.filter_grad(scaled_loss)(
        model, jnp.ones(64, model.layers[0].weight.dtype)
    )
    assert_same_bits(
        *(eqx.filter_jit(tx.update)(grads, state, given) for given in (model, params))
    )


@pytest.mark.parametrize(
    "policy", ["bf16-masters", "params=f16,compute=f16,output=f32"]
)
def test_updates_in_param_dtype_have_the_dtypes_of_parameters_in_a_skipped_step_too(
    policy,
):
    options = {} if policy == "bf16-masters" else {"storage": "full"}
    tx = mpx.mixed_precision(RULE, policy, updates_in_param_dtype=True, **options)
    params = {"w": jnp.ones(3, mpx.get_policy(policy).param_dtype)}
    state = tx.init(params)
    for gradient in (1.0, jnp.inf):
        updates, state = tx.update(
            {"w": jnp.full(3, gradient, jnp.float32)}, state, params
        )
        assert updates["w"].dtype == params["w"].dtype
    wide, _ = mpx.mixed_precision(RULE, policy, **options).update(
        params, tx.init(params), params
    )
    assert wide["w"].dtype == jnp.float32


@pytest.mark.parametrize(
    "policy", ["bf16-split", "bf16-kahan", "bf16-autocast", "params=bf16,compute=bf16"]
)
def test_updates_in_param_dtype_need_full_masters(policy):
    with pytest.raises(
        ValueError,
        match=(
            r"`updates_in_param_dtype` needs full masters.*Take the recipe"
            r" 'bf16-masters'"
        ),
    ):
        mpx.mixed_precision(RULE, policy, updates_in_param_dtype=True)


def kahan_adamw_in_numpy(
    grads, p, steps, rate=1e-2, b1=0.9, b2=0.999, eps=1e-8, decay=0.1
):
    """Follow the published algorithm: bfloat16 parameters, moments and compensation,
    everything between in float64.

    The decay is subtracted with the update, where torchdistx multiplies the bfloat16
    parameter by `1 - rate * decay`.
    """
    narrow = lambda x: np.asarray(x, np.float32).astype(jnp.bfloat16)
    wide = lambda x: x.astype(np.float64)
    mu = nu = compensation = np.zeros_like(p)
    for step in range(1, steps + 1):
        g = np.asarray(grads[step - 1], np.float64)
        wide_mu, wide_nu = b1 * wide(mu) + (1 - b1) * g, b2 * wide(nu) + (1 - b2) * g**2
        centered = np.sqrt(wide_nu) / np.sqrt(1 - b2**step) + eps
        update = -rate * (wide_mu / (1 - b1**step) / centered + decay * wide(p))
        y = wide(compensation) + update
        new = narrow(wide(p) + y)
        compensation, p = narrow(y - (wide(new) - wide(p))), new
        mu, nu = narrow(wide_mu), narrow(wide_nu)
    return p, compensation, mu, nu


def trained(tx, p, grads):
    state, update = tx.init(p), jax.jit(tx.update, compiler_options=unfused())
    for g in grads:
        updates, state = update(g, state, p)
        p = optax.apply_updates(p, updates)
    return p, state


@pytest.mark.parametrize(
    ("rate", "dtype"),
    [(1e-2, jnp.float32), (optax.linear_schedule(1e-2, 0.0, 10), jnp.bfloat16)],
)
def test_any_precision_adamw_with_float32_everywhere_is_adamw_to_the_bit(rate, dtype):
    ours = mpx.any_precision_adamw(
        rate, 0.8, 0.99, 1e-6, 0.1, variance_dtype=jnp.float32
    )
    theirs = optax.adamw(rate, 0.8, 0.99, 1e-6, weight_decay=0.1)
    p = jnp.linspace(-1, 1, 100, dtype=jnp.float32).astype(dtype)
    grads = [jnp.sin(jnp.arange(100.0, dtype=jnp.float32) + i) for i in range(3)]
    (ours, state), (theirs, expected) = (
        trained(tx, p, grads) for tx in (ours, mpx.upcast(theirs))
    )
    assert_same_bits((ours, state.inner_state), (theirs, expected))


def test_any_precision_adamw_follows_the_published_algorithm_in_bfloat16_with_kahan_summation():
    """float32 and float64 round a few sums to two sides of a tie; the others have the
    same bits after 50 steps.
    """
    rng = np.random.default_rng(0)
    p = jnp.asarray(rng.normal(size=5000), jnp.bfloat16)
    grads = [jnp.asarray(rng.normal(size=5000) + 1, jnp.float32) for _ in range(50)]
    options = {"weight_decay": 0.1, "momentum_dtype": jnp.bfloat16}
    now, state = trained(
        mpx.any_precision_adamw(1e-2, use_kahan_summation=True, **options), p, grads
    )
    expected, compensation, mu, nu = kahan_adamw_in_numpy(grads, np.asarray(p), 50)
    moments = [optax.tree.get(state, name) for name in ("mu", "nu")]
    for ours, theirs in zip([now, *moments], [expected, mu, nu], strict=True):
        assert (np.asarray(ours) == theirs).mean() > 0.99
    best = np.asarray(mpx.master_params(now, state), np.float64)
    np.testing.assert_allclose(
        best, expected.astype(np.float64) + compensation.astype(np.float64), atol=1e-4
    )
    # Negative control: without the compensation most parameters end elsewhere.
    without, _ = trained(mpx.any_precision_adamw(1e-2, **options), p, grads)
    assert (np.asarray(without) != expected).mean() > 0.5


def test_any_precision_adamw_has_the_defaults_of_torchdistx():
    """lr 1e-3, betas 0.9 and 0.999, eps 1e-8, no decay, no Kahan summation, float32
    momentum, bfloat16 variance.
    """
    p = jnp.ones(3, jnp.bfloat16)
    state = mpx.any_precision_adamw().init(p)
    assert optax.tree.get(state, "mu").dtype == np.float32
    assert optax.tree.get(state, "nu").dtype == jnp.bfloat16
    assert optax.tree.get(state, "compensation") is None
    g, theirs = jnp.full(3, 0.3), optax.adamw(1e-3, 0.9, 0.999, 1e-8, weight_decay=0.0)
    expected, _ = theirs.update(g, theirs.init(jnp.ones(3)), jnp.ones(3))
    assert_same_bits(mpx.any_precision_adamw().update(g, state, p)[0], expected)
    kahan = mpx.any_precision_adamw(use_kahan_summation=True).init(p)
    assert optax.tree.get(kahan, "compensation").dtype == jnp.bfloat16
