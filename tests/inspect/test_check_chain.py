"""`check_chain`: what it refuses, and what it lets pass, by whole chains; it only
traces.
"""

import jax
import jax.numpy as jnp
import optax
import pytest

import mpx

FINAL = {
    "master_weights": lambda: mpx.master_weights(optax.adam(1e-3)),
    "kahan_summation": lambda: optax.chain(
        mpx.upcast(optax.adam(1e-3)), mpx.kahan_summation()
    ),
    "stochastic_rounding": lambda: optax.chain(
        mpx.upcast(optax.adam(1e-3)), mpx.stochastic_rounding(jax.random.key(0))
    ),
}
CHANGES = {
    "scale": optax.scale(0.5),
    "learning rate": optax.scale_by_learning_rate(1e-3),
    "schedule": optax.scale_by_schedule(optax.cosine_decay_schedule(1.0, 10)),
    "global norm": optax.clip_by_global_norm(1.0),
    "clip": optax.clip(1.0),
    "decay": optax.add_decayed_weights(1e-4),
    "nonnegative": optax.keep_params_nonnegative(),
    "zero nans and scale": optax.chain(optax.zero_nans(), optax.scale(2.0)),
    "ema": optax.ema(0.9),
    "bfloat16": optax.stateless(
        lambda updates, params: jax.tree.map(lambda u: u.astype(jnp.bfloat16), updates)
    ),
}


def with_gradients(tx, combine):
    """Return a transformation whose updates are combined with the gradients."""

    def update(grads, state, params=None):
        updates, state = tx.update(grads, state, params)
        return jax.tree.map(combine, updates, grads), state

    return optax.GradientTransformation(tx.init, update)


HARMLESS_AROUND = {
    "nothing": lambda tx: tx,
    "clipped gradients": lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
    "identity after": lambda tx: optax.chain(tx, optax.identity()),
    "a snapshot after": lambda tx: optax.chain(
        tx, optax.snapshot("norm", optax.tree.norm)
    ),
    "a snapshot of all updates": lambda tx: optax.chain(
        tx, optax.snapshot("updates", lambda updates: updates)
    ),
    "named chain": lambda tx: optax.named_chain(
        ("clip", optax.clip(1.0)), ("rule", tx)
    ),
    "conditionally mask": lambda tx: optax.conditionally_mask(
        tx, lambda step, **_: step < 3
    ),
    "loss scaling": mpx.loss_scaling,
    "multi steps": lambda tx: optax.MultiSteps(tx, 4),
    "multi steps inside loss scaling": lambda tx: mpx.loss_scaling(
        optax.MultiSteps(tx, 4)
    ),
    "apply if finite": lambda tx: optax.apply_if_finite(tx, 3),
    "masked": lambda tx: optax.masked(tx, {"bias": False, "kernel": True}),
    "partition": lambda tx: optax.partition(
        {"a": tx, "b": optax.set_to_zero()}, {"bias": "b", "kernel": "a"}
    ),
    "selective transform": lambda tx: optax.selective_transform(
        tx, freeze_mask={"bias": True, "kernel": False}
    ),
}
FROZEN = {"bias": True, "kernel": False}
EVERY_SECOND = lambda step, **_: step % 2 == 0
LOSES_UPDATES = {
    "masked": lambda tx: optax.chain(tx, optax.masked(optax.set_to_zero(), FROZEN)),
    "freeze": lambda tx: optax.chain(tx, optax.freeze(FROZEN)),
    "partition behind": lambda tx: optax.chain(
        tx,
        optax.partition(
            {"a": optax.set_to_zero(), "b": optax.identity()},
            {"bias": "a", "kernel": "b"},
        ),
    ),
    "conditionally mask behind": lambda tx: optax.chain(
        tx, optax.conditionally_mask(optax.identity(), EVERY_SECOND)
    ),
    "both": lambda tx: optax.conditionally_mask(
        LOSES_UPDATES["conditionally mask behind"](tx), lambda step, **_: step < 9
    ),
    "a mask made of gradients": lambda tx: with_gradients(
        tx, lambda u, g: u * (g > 3).astype(u.dtype)
    ),
    "within what skips steps": lambda tx: optax.apply_if_finite(
        LOSES_UPDATES["freeze"](tx), 3
    ),
}

pytestmark = pytest.mark.optax_promotion


@pytest.mark.parametrize("around", HARMLESS_AROUND)
@pytest.mark.parametrize("final", FINAL)
def test_what_changes_no_update_may_stand_around(final, around):
    mpx.check_chain(HARMLESS_AROUND[around](FINAL[final]()))


@pytest.mark.parametrize("around", LOSES_UPDATES)
@pytest.mark.parametrize(
    "keeper", ["master_weights", "split", "kahan_summation", "scaled split"]
)
def test_updates_that_become_zero_while_the_weight_trains_on_are_caught(keeper, around):
    split = mpx.master_weights(optax.adam(1e-2), storage="split")
    keepers = {
        "split": lambda: split,
        "scaled split": lambda: mpx.loss_scaling(split),
    } | FINAL
    tx = LOSES_UPDATES[around](keepers[keeper]())
    with pytest.raises(
        ValueError,
        match=r"becomes zero after `.* trains on|behind `loss_scaling` keeps a state",
    ):
        mpx.check_chain(tx)
    params = {
        "bias": jnp.ones(8, jnp.bfloat16),
        "kernel": jnp.ones((8, 8), jnp.bfloat16),
    }
    state = optax.with_extra_args_support(tx).init(params)
    # And it is so: the parameter stays, and what is kept of it moves.
    for size in (
        1,
        2,
    ):
        before, held = mpx.master_params(params, state), params["bias"]
        updates, state = tx.update(
            jax.tree.map(
                lambda p, size=size: jnp.full(p.shape, size, jnp.float32), params
            ),
            state,
            params,
        )
        params = optax.apply_updates(params, updates)
    assert jnp.all(params["bias"] == held)
    assert jnp.all(mpx.master_params(params, state)["bias"] != before["bias"])


def test_updates_of_stochastic_rounding_may_become_zero():
    """It keeps nothing of a weight, so nothing can train on."""
    mpx.check_chain(LOSES_UPDATES["freeze"](FINAL["stochastic_rounding"]()))


@pytest.mark.parametrize(
    "frozen",
    [
        lambda: mpx.master_weights(optax.chain(optax.adam(1e-3), optax.freeze(FROZEN))),
        lambda: optax.chain(
            mpx.upcast(optax.adam(1e-3)), optax.freeze(FROZEN), mpx.kahan_summation()
        ),
    ],
)
def test_weights_are_frozen_as_the_message_says(frozen):
    mpx.check_chain(frozen())


BEHIND = {
    "chain": optax.chain(
        mpx.loss_scaling(optax.identity()),
        optax.clip_by_global_norm(1.0),
        optax.adamw(1e-2),
    ),
    "named chain": optax.named_chain(
        ("b", mpx.loss_scaling(optax.identity())), ("a", optax.adamw(1e-2))
    ),
    "inside": optax.masked(
        optax.chain(mpx.loss_scaling(optax.identity()), optax.trace(0.9)),
        lambda params: True,
    ),
    "a count": optax.chain(
        mpx.loss_scaling(optax.sgd(1.0)), optax.scale_by_schedule(lambda count: 0.1)
    ),
    "masters": optax.chain(
        mpx.loss_scaling(optax.identity()), mpx.master_weights(optax.adam(1e-2))
    ),
}


@pytest.mark.parametrize("tx", BEHIND.values(), ids=BEHIND)
def test_a_state_behind_the_loss_scale_is_caught(tx):
    with pytest.raises(
        ValueError,
        match=r"behind `loss_scaling` keeps a state.* must stand inside: .*\n  '",
    ):
        mpx.check_chain(tx)


def test_a_skipped_step_does_change_a_state_behind_the_loss_scale():
    params = {"w": jnp.ones(2)}
    right = mpx.loss_scaling(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    )
    mpx.check_chain(right)
    for tx, count in ((right, 0), (BEHIND["chain"], 1)):
        state = tx.update({"w": jnp.full(2, jnp.inf)}, tx.init(params), params)[1]
        assert optax.tree.get(state, "count") == count


ADDED_BEHIND = {
    "decay": lambda tx: optax.chain(tx, optax.add_decayed_weights(1e-2)),
    "decay of a scaled update": lambda tx: optax.chain(
        tx, optax.scale(-1e-3), optax.add_decayed_weights(1e-2)
    ),
    "decay in a mask": lambda tx: optax.chain(
        tx,
        optax.masked(optax.add_decayed_weights(1e-2), {"bias": False, "kernel": True}),
    ),
    "a centre": lambda tx: optax.chain(tx, optax.keep_params_nonnegative()),
}


@pytest.mark.parametrize("name", ADDED_BEHIND)
def test_what_is_added_behind_the_loss_scale_is_caught_since_it_changes_weights_in_a_skipped_step(
    name,
):
    """Control: inside it passes."""
    tx = ADDED_BEHIND[name](mpx.mixed_precision(optax.sgd(1e-2), "f16-scaled"))
    with pytest.raises(
        ValueError,
        match=(
            r"adds to the update of .* behind `loss_scaling`, also in a step that it"
            r" skips"
        ),
    ):
        mpx.check_chain(tx)
    params = {"bias": -jnp.ones(8), "kernel": jnp.ones((8, 8))}
    infinite = jax.tree.map(lambda p: jnp.full_like(p, jnp.inf), params)
    updates, _ = tx.update(infinite, tx.init(params), params)
    assert any((u != 0).any() for u in jax.tree.leaves(updates))
    mpx.check_chain(
        mpx.mixed_precision(ADDED_BEHIND[name](optax.sgd(1e-2)), "f16-scaled")
    )


WITHOUT_STATE_BEHIND = {
    "a scale": optax.chain(
        mpx.loss_scaling(optax.adam(1e-3)), optax.scale(0.5), optax.clip(1.0)
    ),
    "Kahan": optax.chain(
        mpx.loss_scaling(mpx.upcast(optax.adam(1e-3))), mpx.kahan_summation()
    ),
    "stochastic": optax.chain(
        mpx.loss_scaling(mpx.upcast(optax.sgd(0.1))),
        mpx.stochastic_rounding(jax.random.key(0)),
    ),
    "a measure": optax.chain(
        mpx.loss_scaling(optax.adam(1e-3)), optax.snapshot("norm", optax.tree.norm)
    ),
    "hidden NaNs": optax.chain(mpx.loss_scaling(optax.adam(1e-3)), optax.zero_nans()),
    "injected": optax.inject_hyperparams(
        lambda rate: mpx.loss_scaling(optax.adam(rate))
    )(lambda count: 0.1),
    "in front": optax.chain(
        optax.scale_by_schedule(lambda count: 1.0), mpx.loss_scaling(optax.adam(1e-3))
    ),
}


@pytest.mark.parametrize("tx", WITHOUT_STATE_BEHIND.values(), ids=WITHOUT_STATE_BEHIND)
def test_what_may_stand_beside_the_loss_scale_passes(tx):
    mpx.check_chain(tx)


@pytest.mark.parametrize("final", FINAL)
def test_what_changes_updates_afterwards_is_caught(final):
    """Inside wrappers too; the same change inside of the masters is right."""
    match = f"was final when `{final}` had rounded it, but `.*` changes it after that"
    for change in CHANGES.values():
        with pytest.raises(ValueError, match=match):
            mpx.check_chain(optax.chain(FINAL[final](), change))
        mpx.check_chain(mpx.master_weights(optax.chain(optax.adam(1e-3), change)))
    for around in (
        "loss scaling",
        "apply if finite",
        "multi steps",
        "masked",
        "partition",
    ):
        with pytest.raises(ValueError, match=match):
            mpx.check_chain(
                HARMLESS_AROUND[around](optax.chain(FINAL[final](), optax.scale(0.5)))
            )


@pytest.mark.parametrize("wrapper", ["upcast", "master_weights", "low_precision_state"])
@pytest.mark.parametrize("final", FINAL)
def test_a_rounding_inside_a_wrapper_that_leaves_it_nothing_to_do_is_caught(
    final, wrapper
):
    """It sees float32 parameters: `upcast(chain(rule, kahan_summation()))` trains like
    `upcast(rule)`.
    """
    options = [{"mu": "bf16"}] if wrapper == "low_precision_state" else []
    with pytest.raises(ValueError, match=f"`{final}` stands inside `{wrapper}`"):
        mpx.check_chain(
            getattr(mpx, wrapper)(
                optax.chain(optax.clip(1.0), FINAL[final]()), *options
            )
        )


def test_a_harmful_order_does_put_weights_out_of_step():
    """Why it is refused: halving the updates leaves most parameters off their masters,
    without an error.
    """
    tx = optax.chain(mpx.master_weights(optax.sgd(0.1)), optax.scale(0.5))
    params = jnp.linspace(0.5, 2, 1000).astype(jnp.bfloat16)
    state = tx.init(params)
    updates, state = tx.update(jnp.linspace(-1, 1, 1000), state, params)
    params = optax.apply_updates(params, updates)
    assert not mpx.is_synced(params, state)
    assert (params != state[0].master.astype(jnp.bfloat16)).mean() > 0.9


def test_numbers_injected_around_masters_in_the_dtype_of_the_parameters_are_caught():
    """Optax rounds them to bfloat16, where a decay of 0.999 is 1; `hyperparam_dtype`
    keeps them in float32.
    """
    rule = lambda b2: mpx.master_weights(optax.adam(1e-3, b2=b2))
    tx, in_f32 = (
        optax.inject_hyperparams(rule, hyperparam_dtype=dtype)(b2=0.999)
        for dtype in (None, jnp.float32)
    )
    with pytest.raises(
        ValueError, match=r"0\.999 becomes 1\.\n  'hyperparams/b2': bfloat16\[\]"
    ):
        mpx.check_chain(tx)
    assert tx.init(jnp.ones(2, jnp.bfloat16)).hyperparams["b2"] == 1
    mpx.check_chain(in_f32)


ONE_IS_FROZEN = optax.masked(
    mpx.master_weights(optax.adam(1e-3)), {"w": True, "frozen": False}
)


@pytest.mark.parametrize(
    "tx",
    [
        ONE_IS_FROZEN,
        optax.lookahead(optax.adam(1e-3), 5, 0.5),
        optax.chain(
            mpx.master_weights(optax.adam(1e-3)), optax.contrib.reduce_on_plateau()
        ),
    ],
)
def test_what_takes_other_parameters_or_arguments_is_told_what_to_give(tx):
    text = (
        r"`check_chain` was not given `params`.* `optax\.LookaheadParams`\), and the"
        r" other arguments that `tx\.update` "
    )
    with pytest.raises(ValueError, match=text):
        mpx.check_chain(tx)
    mpx.check_chain(
        ONE_IS_FROZEN,
        {"w": jnp.ones(2, jnp.bfloat16), "frozen": jnp.ones(2, jnp.bfloat16)},
    )


# ---- in front of loss scaling ---------------------------------------------------------------------------------------

RULE = mpx.master_weights(optax.adam(1e-3))
LINEAR_IN_FRONT = {
    "a factor": optax.scale(0.5),
    "a schedule": optax.scale_by_schedule(optax.cosine_decay_schedule(1.0, 10)),
    "a factor in the state": optax.inject_hyperparams(
        optax.scale, hyperparam_dtype=jnp.float32
    )(step_size=0.5),
    "centred gradients": optax.centralize(),
    "a mask": optax.freeze({"bias": False, "kernel": True}),
    "a norm that is noted": optax.snapshot("norm", optax.tree.norm),
    "hidden NaNs": optax.zero_nans(),  # infinities still skip a step
}
NOT_LINEAR_IN_FRONT = {
    "clip": optax.clip(1.0),
    "global norm": optax.clip_by_global_norm(1.0),
    "a norm in the state": optax.inject_hyperparams(
        optax.clip_by_global_norm, hyperparam_dtype=jnp.float32
    )(1.0),
    "decay": optax.add_decayed_weights(1e-4),
    "norms of examples": optax.contrib.differentially_private_aggregate(
        1.0, 0.1, key=0
    ),
    "squares": optax.stateless(
        lambda updates, params: jax.tree.map(lambda g: g * g, updates)
    ),
    "a threshold": optax.stateless(
        lambda updates, params: jax.tree.map(lambda g: jnp.where(g > 1, g, 0), updates)
    ),
    "reciprocals": optax.stateless(
        lambda updates, params: jax.tree.map(lambda g: 1.0 / g, updates)
    ),
}


@pytest.mark.parametrize("change", LINEAR_IN_FRONT)
def test_what_is_linear_may_stand_in_front_of_a_scale(change):
    mpx.check_chain(optax.chain(LINEAR_IN_FRONT[change], mpx.loss_scaling(RULE)))


@pytest.mark.parametrize("change", NOT_LINEAR_IN_FRONT)
def test_what_is_not_linear_in_front_of_a_scale_is_caught(change):
    """Unless the scale is always 1; it may stand inside of any."""
    change = NOT_LINEAR_IN_FRONT[change]
    for loss_scale in (mpx.DynamicLossScale(), mpx.StaticLossScale(8.0)):
        match = (
            r"gradients reach `loss_scaling` scaled, but `\w+` in front of it is not"
            r" linear"
        )
        with pytest.raises(ValueError, match=match):
            mpx.check_chain(optax.chain(change, mpx.loss_scaling(RULE, loss_scale)))
    mpx.check_chain(optax.chain(change, mpx.loss_scaling(RULE, mpx.NoOpLossScale())))
    mpx.check_chain(
        mpx.loss_scaling(mpx.master_weights(optax.chain(change, optax.adam(1e-3))))
    )


@pytest.mark.parametrize("scale", [mpx.NoOpLossScale(), mpx.StaticLossScale(8.0)])
def test_a_mean_over_steps_or_decay_around_a_scale_is_caught_even_if_that_is_one(scale):
    """One NaN stays in the mean, and every later step is skipped; decay goes on."""
    scaled = mpx.loss_scaling(RULE, scale)
    for rule in (scaled, optax.chain(optax.scale(0.5), scaled)):
        with pytest.raises(ValueError, match="gradients reach `loss_scaling`"):
            mpx.check_chain(optax.MultiSteps(rule, 2))
    sgd = mpx.loss_scaling(optax.sgd(1e-3), scale)
    with pytest.raises(ValueError, match="behind `loss_scaling`"):
        mpx.check_chain(optax.chain(sgd, optax.add_decayed_weights(1e-4)))
    mpx.check_chain(mpx.loss_scaling(optax.MultiSteps(RULE, 2), scale))


def with_line_search(tx):
    """Give a line search its arguments: the gradients once more among them."""
    arguments = lambda grads: {
        "value": jnp.zeros(()),
        "grad": grads,
        "value_fn": optax.tree.norm,
    }
    update = lambda updates, state, params=None: tx.update(
        updates, state, params, **arguments(updates)
    )
    return optax.GradientTransformation(tx.init, update)


@pytest.mark.parametrize("rule", [optax.sgd(0.1), optax.adam(0.1)], ids=["sgd", "adam"])
def test_a_gradient_that_goes_past_the_loss_scale_is_caught(rule):
    """`value_and_grad` scales all gradients; `sgd` would take steps 32,768 times too
    large, and nothing be skipped.
    """
    labels, params = {"a": "scaled", "b": "other"}, {"a": jnp.ones(2), "b": jnp.ones(2)}
    with pytest.raises(
        ValueError,
        match=(
            r"gradient of 'b' reaches its update past `loss_scaling`.* \(1 of 2"
            r" leaves\)"
        ),
    ):
        mpx.check_chain(
            optax.partition({"scaled": mpx.loss_scaling(rule), "other": rule}, labels),
            params,
        )
    for sound in (
        optax.partition(
            {"scaled": mpx.loss_scaling(rule), "other": optax.set_to_zero()}, labels
        ),
        mpx.loss_scaling(optax.partition({"scaled": rule, "other": rule}, labels)),
        optax.apply_if_finite(mpx.loss_scaling(rule), 3),
        with_line_search(mpx.loss_scaling(optax.scale_by_backtracking_linesearch(2))),
    ):
        # Else the branches of `apply_if_finite` have two dtypes.
        with jax.enable_x64(False):
            mpx.check_chain(sound, jax.tree.map(jnp.float32, params))


@pytest.mark.parametrize("use_grad_mean", [True, False], ids=["mean", "sum"])
def test_multi_steps_around_loss_scaling_are_caught(use_grad_mean):
    """One NaN stays in their mean, unless they skip it: then the scale stays too large.
    Inside they do not see it.
    """
    scaled, skips = (
        mpx.loss_scaling(RULE),
        {"should_skip_update_fn": optax.skip_not_finite},
    )
    for options, why in (
        ({}, "a mean over steps never loses a NaN"),
        (skips, "never sees one, and never shrinks"),
    ):
        with pytest.raises(ValueError, match=why):
            mpx.check_chain(optax.MultiSteps(scaled, 4, use_grad_mean, **options))
    mpx.check_chain(mpx.loss_scaling(optax.MultiSteps(RULE, 4, use_grad_mean)))


FLATTENED = {
    "masters": optax.flatten(mpx.master_weights(optax.sgd(1.0), "split")),
    "Kahan": optax.flatten(
        optax.chain(mpx.upcast(optax.sgd(1.0)), mpx.kahan_summation())
    ),
}


@pytest.mark.parametrize("tx", FLATTENED.values(), ids=FLATTENED)
def test_masters_of_parameters_that_flatten_joined_are_missed(tx):
    with pytest.raises(ValueError, match=r"keeps nothing .*\(optax.flatten\(rule\)\)"):
        mpx.check_chain(tx)
    with pytest.raises(ValueError, match="sees one float32 array"):
        mpx.check_chain(tx, {"w": jnp.ones(3, jnp.bfloat16), "gain": jnp.ones(3)})
    mpx.check_chain(tx, {"w": jnp.ones(3, jnp.bfloat16)})  # nothing is widened
    mpx.check_chain(mpx.master_weights(optax.flatten(optax.sgd(1.0)), "split"))
