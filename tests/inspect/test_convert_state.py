"""Check that a training run goes on under another recipe: weights, moments, the rest of
the state, refusals.
"""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpx
from tests.helpers import assert_same_bits, eight_cpu_devices, types_of, unfused
from tests.rules import RULES

pytestmark = pytest.mark.optax_promotion

F32, F16 = "params=f32,compute=f32,output=f32", "params=f16,compute=f16,output=f32"
BF16 = "params=bf16,compute=bf16,output=f32"


def adamw():
    return optax.chain(
        optax.clip_by_global_norm(10.0),
        optax.adamw(optax.linear_schedule(1e-2, 1e-3, 100)),
    )


def in_8_bits(block_size=64, **options):
    blockwise = mpx.Blockwise8bit(block_size)
    return mpx.low_precision_state(
        adamw(), {"mu": blockwise, "nu": blockwise}, min_size=64, **options
    )


RECIPES = {
    "f32": (F32, adamw),
    "full": (BF16, lambda: mpx.master_weights(adamw())),
    "split": (BF16, lambda: mpx.master_weights(adamw(), storage="split")),
    "8 bits": (BF16, lambda: mpx.master_weights(in_8_bits(), storage="split")),
    "24 bits": (
        BF16,
        lambda: mpx.master_weights(adamw(), storage="split24", key=jax.random.key(3)),
    ),
    "16 bits": (
        BF16,
        lambda: mpx.master_weights(
            mpx.low_precision_state(adamw(), {"mu": "bf16", "nu": "bf16"}, min_size=64)
        ),
    ),
    "kahan": (BF16, lambda: optax.chain(mpx.upcast(adamw()), mpx.kahan_summation())),
    "stochastic": (
        BF16,
        lambda: optax.chain(
            mpx.upcast(adamw()), mpx.stochastic_rounding(jax.random.key(0))
        ),
    ),
    "f16": (
        F16,
        lambda: mpx.loss_scaling(
            mpx.master_weights(adamw()), mpx.StaticLossScale(2.0**3)
        ),
    ),
}


def initial():
    rng = np.random.default_rng(0)
    return {
        "kernel": jnp.asarray(rng.normal(size=(4, 64)), jnp.float32),
        "bias": jnp.asarray(rng.normal(size=5), jnp.float32),
        "none": None,
    }


def gradients(params, i):
    return jax.tree.map(
        lambda p: jnp.cos(jnp.arange(p.size, dtype=jnp.float32) * (i + 1)).reshape(
            p.shape
        ),
        params,
    )


@functools.partial(jax.jit, static_argnums=0, compiler_options=unfused())
def step(tx, params, state, i):
    scaled = mpx.get_loss_scale(state).scale(gradients(params, i))
    updates, state = tx.update(scaled, state, params)
    return optax.apply_updates(params, updates), state


def trained_with(tx, policy, steps=3):
    params = mpx.get_policy(policy).cast_to_param(initial())
    state = tx.init(params)
    for i in range(steps):
        params, state = step(tx, params, state, i)
    return params, state


@functools.cache
def recipe(name):
    return RECIPES[name][1]()


@functools.cache
def trained(name):
    return trained_with(recipe(name), RECIPES[name][0])


@functools.cache
def convert(old, new):
    return mpx.convert_state(
        *trained(old), recipe(old), recipe(new), policy=RECIPES[new][0]
    )


def noisy(state):
    """Return a state as it might be, without the time to train."""
    third = lambda x: 1 / 3 if jnp.issubdtype(x.dtype, jnp.floating) else 3
    return jax.tree.map(
        lambda x: x if x.dtype == bool else x + jnp.asarray(third(x), x.dtype), state
    )


def moments(state):
    """Return moments and all counts, without what mpx puts around them."""
    count = [count for _, count in optax.tree.get_all_with_path(state, "count")]
    return optax.tree.get(state, "mu"), optax.tree.get(state, "nu"), count


# A star, from float32 to every recipe and back, and a ring through all of them.
NAMES = list(RECIPES)
STAR_AND_RING = {("f32", name) for name in NAMES} | {(name, "f32") for name in NAMES}
STAR_AND_RING |= set(zip(NAMES, NAMES[1:] + NAMES[:1], strict=True))


def test_another_rule_begins_with_all_bits_of_the_weights_as_the_message_says():
    """`new_tx.init(params)` alone would begin with the rounded ones."""
    tx, rule = mpx.master_weights(optax.adam(1e-3), storage="split"), optax.lion(1e-4)
    new_tx, params = (
        mpx.mixed_precision(rule, "params=bf16,compute=bf16"),
        {"w": jnp.ones(64, jnp.bfloat16)},
    )
    updates, state = tx.update(
        {"w": jnp.linspace(-1.0, 1.0, 64)}, tx.init(params), params
    )
    params = optax.apply_updates(params, updates)
    with pytest.raises(
        ValueError,
        match=r"call `convert_state\(weights, rule\.init\(weights\), rule, new_tx\)`",
    ):
        mpx.convert_state(params, state, tx, new_tx)
    weights = mpx.master_params(params, state)
    new_params, new_state = mpx.convert_state(weights, rule.init(weights), rule, new_tx)
    assert_same_bits(mpx.master_params(new_params, new_state), weights)
    assert types_of(new_state) == types_of(new_tx.init(params))
    assert (mpx.master_params(params, new_tx.init(params))["w"] != weights["w"]).any()


@pytest.mark.filterwarnings("ignore:`convert_state`")
def test_weights_moments_and_counts_in_float32_and_masters_are_moved_to_the_bit():
    """A recipe into itself changes no bit at all, and each other one has the types of
    the new recipe.
    """
    for old, new in STAR_AND_RING | {("8 bits", "8 bits"), ("kahan", "kahan")}:
        params, state = convert(old, new)
        assert types_of(params) == types_of(
            mpx.get_policy(RECIPES[new][0]).cast_to_param(initial())
        )
        assert types_of(state) == types_of(jax.eval_shape(recipe(new).init, params))
        if old == new:
            assert_same_bits(convert(old, new), trained(old))
        if not {old, new} & {"kahan", "stochastic", "f16", "24 bits"}:
            assert_same_bits(
                mpx.master_params(*convert(old, new)), mpx.master_params(*trained(old))
            )
        if {old, new} <= {"f32", "full", "split", "kahan", "f16"}:
            assert_same_bits(moments(convert(old, new)[1]), moments(trained(old)[1]))


def test_masters_go_on_as_they_would_have_and_come_back_to_the_bit():
    for old, new in [
        ("full", "split"),
        ("split", "full"),
        ("f32", "split"),
        ("f32", "full"),
    ]:
        back = mpx.convert_state(
            *convert(old, new), recipe(new), recipe(old), policy=RECIPES[old][0]
        )
        assert_same_bits(mpx.master_params(*back), mpx.master_params(*trained(old)))
        assert_same_bits(back[1], trained(old)[1])
        here, there = trained(old), convert(old, new)
        for i in range(3, 6):
            here, there = step(recipe(old), *here, i), step(recipe(new), *there, i)
            assert_same_bits(mpx.master_params(*there), mpx.master_params(*here))


@pytest.mark.parametrize(
    ("storage", "rounded"), [("full", 1.0), ("split", 1 + 2.0**-7)]
)
def test_weights_are_rounded_as_the_new_masters_say_and_within_the_range_of_the_parameters(
    storage, rounded
):
    """Half-way between two neighbours full masters round to even, split ones away from
    zero.
    """
    weights = jnp.array([1 + 2.0**-8, 3.4e38, -3.4e38, jnp.inf, -jnp.inf], jnp.float32)
    tx, new_tx = optax.sgd(1.0), mpx.master_weights(optax.sgd(1.0), storage=storage)
    params, state = mpx.convert_state(
        weights, tx.init(weights), tx, new_tx, policy=BF16
    )
    largest = jnp.finfo(jnp.bfloat16).max
    np.testing.assert_array_equal(
        params, [rounded, largest, -largest, jnp.inf, -jnp.inf]
    )
    assert_same_bits(mpx.master_params(params, state)[0], weights[0])


def test_kahan_compensations_hold_the_masters_to_17_bits_and_infinite_weights_have_none():
    for old in ("f32", "full", "split"):
        params, state = convert(old, "kahan")
        before, after = (
            mpx.master_params(*trained(old)),
            mpx.master_params(params, state),
        )
        for best, p, now in zip(
            *map(jax.tree.leaves, (before, params, after)), strict=True
        ):
            assert (abs(now - best) <= 2.0**-16 * abs(best)).all()
            assert (
                abs(p.astype(np.float32) - best) > 2.0**-12 * abs(best)
            ).any()  # negative control
    tx, weights = optax.sgd(1.0), jnp.array([jnp.inf, -jnp.inf, 1.001], jnp.float32)
    new_tx = optax.chain(mpx.upcast(tx), mpx.kahan_summation())
    _, state = mpx.convert_state(weights, tx.init(weights), tx, new_tx, policy=BF16)
    assert_same_bits(state[1].compensation[:2], jnp.zeros(2, jnp.bfloat16))


@pytest.mark.parametrize(
    ("make", "policy", "dtype"),
    [
        (mpx.master_weights, None, "bfloat16"),
        (lambda tx: mpx.mixed_precision(tx, F16), None, "float16"),
        (lambda tx: mpx.mixed_precision(tx, F32), None, "float32"),
        (
            lambda tx: mpx.zero1(mpx.mixed_precision(tx, F16), eight_cpu_devices()),
            None,
            "float16",
        ),
        (lambda tx: mpx.mixed_precision(tx, F16), BF16, "bfloat16"),
    ],
    ids=[
        "none",
        "of the recipe",
        "of a recipe that adds nothing",
        "inside zero1",
        "given",
    ],
)
def test_parameters_get_the_dtype_of_the_new_policy_and_keep_theirs_without_one(
    make, policy, dtype
):
    new_tx = make(adamw())
    params, state = mpx.convert_state(
        *trained("full"), recipe("full"), new_tx, policy=policy
    )
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {dtype}
    assert types_of(state) == types_of(new_tx.init(params))


@pytest.mark.parametrize(
    "new_tx", [adamw(), recipe("stochastic")], ids=["naive", "stochastic"]
)
def test_weights_that_are_lost_are_told(new_tx):
    best = mpx.master_params(*trained("full"))
    lost = {
        name: abs(np.float64(best[name].astype(jnp.bfloat16)) / best[name] - 1).max()
        for name in ("kernel", "bias")
    }
    worst = max(lost, key=lost.__getitem__)
    told = (
        f"weights changed, by up to {100 * lost[worst]:.3g}% in '{worst}' (float32 to"
        " bfloat16)"
    )
    with pytest.warns(UserWarning, match=re.escape(told)):
        mpx.convert_state(*trained("full"), recipe("full"), new_tx)


def test_nothing_is_said_where_nothing_is_lost():
    """Kept masters lose nothing, nor do masters that are equal to their parameters when
    they are dropped.
    """
    tx = mpx.master_weights(optax.sgd(1.0))
    params = mpx.cast(initial(), jnp.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for old in ("stochastic", "f32", "kahan"):
            convert.__wrapped__(old, "split")
        new_params, _ = mpx.convert_state(params, tx.init(params), tx, optax.sgd(1.0))
    assert_same_bits(new_params, params)


DYNAMIC = mpx.DynamicLossScale(2.0**5)
SCALES = {
    "the same": (DYNAMIC, DYNAMIC),
    "none to dynamic": (mpx.NoOpLossScale(), DYNAMIC),
    "dynamic to static": (DYNAMIC, mpx.StaticLossScale(8.0)),
    "dynamic to none": (DYNAMIC, mpx.NoOpLossScale()),
    "other bounds": (DYNAMIC, mpx.DynamicLossScale(2.0**5, max_loss_scale=256)),
    "only the new one": (None, mpx.StaticLossScale(2.0**7)),
}


@pytest.mark.parametrize("name", SCALES)
def test_a_loss_scale_starts_fresh_but_counts_skips_on(name):
    """After a skipped step, which has halved a dynamic scale."""
    rule, params = mpx.master_weights(optax.sgd(1.0)), {"w": jnp.ones(8, jnp.bfloat16)}
    old, new = SCALES[name]
    tx, new_tx = (
        mpx.loss_scaling(rule, scale) if scale else rule for scale in (old, new)
    )
    _, state = tx.update(
        {"w": jnp.full(8, jnp.nan if old else 0.0, jnp.float32)},
        tx.init(params),
        params,
    )
    _, moved = mpx.convert_state(params, state, tx, new_tx)
    expected = new_tx.init(params)
    assert_same_bits(
        moved,
        expected._replace(
            skipped_steps=jnp.int32(old is not None), inner_state=moved.inner_state
        ),
    )


@pytest.mark.parametrize(
    "tx",
    [
        recipe("stochastic"),
        mpx.master_weights(in_8_bits(rounding="stochastic", key=jax.random.key(1))),
    ],
    ids=["parameters", "8 bits"],
)
def test_keys_are_carried_over_to_the_same_kind_and_else_fresh(tx):
    params = mpx.cast(initial(), jnp.bfloat16)
    fresh, other = tx.init(params), jnp.array([1, 2], jnp.uint32)
    drawn = lambda state: [
        key
        for _, key in optax.tree.get_all_with_path(state, "key")
        if isinstance(key, jax.Array)
    ]
    key = lambda old_tx, state: drawn(mpx.convert_state(params, state, old_tx, tx)[1])
    changed = jax.tree.map(
        lambda x: other if x.dtype == np.uint32 and x.shape == (2,) else x, fresh
    )
    assert_same_bits(key(tx, changed), [other])
    another_kind = optax.chain(
        mpx.upcast(adamw()), mpx.stochastic_rounding(jax.random.key(0, impl="rbg"))
    )
    for old_tx in (recipe("split"), another_kind):
        assert_same_bits(key(old_tx, old_tx.init(params)), drawn(fresh))


RULE = optax.adam(1e-3)


def test_moments_under_another_mask_do_not_become_those_of_other_parameters_in_a_tuple():
    """Both masks leave two arrays of one shape; paired in their order, the second would
    get the first one's moment.
    """
    params = (jnp.ones(3), jnp.ones(3), jnp.ones(3))
    tx, new_tx = (
        optax.masked(RULE, mask) for mask in [(True, True, False), (False, True, True)]
    )
    with pytest.raises(
        ValueError, match=r"rules in `tx` and `new_tx` differ(?s:.*)mu/0'(?s:.*)mu/1'"
    ):
        mpx.convert_state(params, tx.init(params), tx, new_tx)


NESTINGS = {
    "multi steps": lambda tx: optax.MultiSteps(tx, 2),
    "masked": lambda tx: optax.masked(
        tx, {"kernel": True, "bias": False, "none": None}
    ),
    "inject": lambda tx: optax.inject_hyperparams(
        lambda rate: optax.chain(optax.scale(rate), tx)
    )(rate=0.5),
    "partition": lambda tx: optax.partition(
        {"a": tx, "b": optax.sgd(1.0)}, {"kernel": "a", "bias": "b", "none": "b"}
    ),
    "apply if finite": lambda tx: optax.apply_if_finite(tx, 3),
    "chain": lambda tx: optax.chain(optax.chain(optax.identity(), tx)),
}


@pytest.mark.parametrize("nesting", NESTINGS)
def test_wrappers_of_optax_may_stand_around_them(nesting):
    old_tx, new_tx = (
        NESTINGS[nesting](tx)
        for tx in (adamw(), mpx.master_weights(adamw(), storage="split"))
    )
    params = initial()
    state = noisy(old_tx.init(params))
    policy = mpx.Policy(
        "bfloat16", "bfloat16", "float32", overrides=(("bias", "float32"),)
    )
    new_params, new_state = mpx.convert_state(
        params, state, old_tx, new_tx, policy=policy
    )
    assert_same_bits(mpx.master_params(new_params, new_state), params)
    assert_same_bits(moments(new_state), moments(state))
    assert new_params["kernel"].dtype == jnp.bfloat16
    # An override leaves it in float32.
    assert_same_bits(new_params["bias"], params["bias"])
    back = mpx.convert_state(new_params, new_state, new_tx, old_tx, policy=F32)
    assert_same_bits(back, (params, state))


@pytest.mark.parametrize("name", ["adafactor", "contrib.schedule_free"])
def test_the_state_of_any_rule_comes_back_to_the_bit(name):
    tx, new_tx = RULES[name].make(), mpx.master_weights(RULES[name].make())
    params = {
        "kernel": jnp.linspace(-1, 2, 128, dtype=jnp.float32).reshape(8, 16),
        "bias": jnp.linspace(1, 2, 16, dtype=jnp.float32),
    }
    state = noisy(tx.init(params))
    there = mpx.convert_state(params, state, tx, new_tx, policy=BF16)
    assert types_of(there[1]) == types_of(new_tx.init(there[0]))
    back, back_state = mpx.convert_state(*there, new_tx, tx, policy=F32)
    assert_same_bits((back, back_state), (params, state))


def test_the_state_of_an_nnx_optimizer_with_variables_is_taken():
    rule = optax.sgd(1e-2, momentum=0.9)
    new_tx = mpx.mixed_precision(rule, F16, loss_scale=mpx.StaticLossScale(8.0))
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, rule, wrt=nnx.Param)
    nnx.update(optimizer.opt_state, nnx.state(noisy(nnx.as_pure(optimizer.opt_state))))
    boxed = nnx.state(model, nnx.Param), optimizer.opt_state
    before = nnx.as_pure(boxed)
    params, state = mpx.convert_state(*boxed, rule, new_tx)
    nnx.update(model, params)
    optimizer = nnx.Optimizer(model, new_tx, wrt=nnx.Param)
    nnx.update(optimizer.opt_state, nnx.state(state))
    now = nnx.as_pure((nnx.state(model, nnx.Param), optimizer.opt_state))
    assert_same_bits(now, mpx.convert_state(*before, rule, new_tx))
    assert_same_bits(
        optax.tree.get(now[1], "trace"), optax.tree.get(before[1], "trace")
    )
