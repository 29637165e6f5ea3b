"""Check `master_params`, `is_synced`, and `resync` in any nesting of wrappers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx
from mpx._recipes import RECIPES
from tests.helpers import assert_same_bits, cases, stepper
from tests.pages import BLOCK, ROOT

pytestmark = pytest.mark.optax_promotion

KEEPERS = {
    "full": lambda: mpx.master_weights(optax.adam(1e-3)),
    "split": lambda: mpx.master_weights(optax.adam(1e-3), storage="split"),
    "kahan": lambda: optax.chain(
        mpx.upcast(optax.adam(1e-3)), mpx.kahan_summation(jnp.float32)
    ),
}
NESTINGS = {
    "alone": lambda tx: tx,
    "chain": lambda tx: optax.chain(optax.clip(1.0), tx),
    "named chain": lambda tx: optax.named_chain(
        ("clip", optax.clip(1.0)), ("rule", tx)
    ),
    "multi steps": lambda tx: optax.MultiSteps(tx, 1),
    "loss scaling": mpx.loss_scaling,
    "apply if finite": lambda tx: optax.apply_if_finite(tx, 3),
    "partition": lambda tx: optax.partition(
        {"a": tx, "b": optax.sgd(1.0)}, {"bias": "b", "kernel": "a"}
    ),
    "masked": lambda tx: optax.masked(tx, {"bias": False, "kernel": True}),
    "inject": lambda tx: optax.inject_hyperparams(
        lambda rate: optax.chain(optax.scale(rate), tx)
    )(rate=1.0),
}


def trained(tx, steps=5):
    params = {
        "kernel": jnp.linspace(0.5, 2, 8, dtype=jnp.float32).astype(jnp.bfloat16),
        "bias": jnp.ones(2, jnp.float32),
    }
    state = tx.init(params)
    for _ in range(steps):
        updates, state = tx.update(
            jax.tree.map(lambda p: jnp.full(p.shape, 0.1, jnp.float32), params),
            state,
            params,
        )
        params = optax.apply_updates(params, updates)
    return params, state


@functools.cache
def trained_in(nesting, keeper):
    return trained(NESTINGS[nesting](KEEPERS[keeper]()))


# Each kind of masters, and each nesting of one kind. Case by case, for what tests
# share.
PAIRS = [
    (keeper, nesting)
    for nesting in NESTINGS
    for keeper in KEEPERS
    if keeper == "split" or nesting == "alone"
]
every_pair = pytest.mark.parametrize(("keeper", "nesting"), PAIRS, scope="module")


@every_pair
def test_master_params_finds_the_float32_weights_in_any_nesting(keeper, nesting):
    params, state = trained_in(nesting, keeper)
    masters = mpx.master_params(params, state)
    start = (
        jnp.linspace(0.5, 2, 8, dtype=jnp.float32)
        .astype(jnp.bfloat16)
        .astype(jnp.float32)
    )
    np.testing.assert_allclose(masters["kernel"], start - 5e-3, rtol=1e-4)
    assert (masters["kernel"] != params["kernel"].astype(jnp.float32)).any()
    # Float32 leaves are their own masters.
    assert_same_bits(masters["bias"], params["bias"])


def test_master_params_without_masters_are_the_parameters_in_float32_and_leave_others_alone():
    params = {
        "w": jnp.ones(2, jnp.bfloat16),
        "ids": jnp.arange(3),
        "none": None,
        "name": "layer",
    }
    masters = mpx.master_params(params, optax.EmptyState())
    assert_same_bits(masters["ids"], params["ids"])
    assert masters["name"] == "layer"
    assert_same_bits(masters["w"], jnp.ones(2, jnp.float32))


def test_a_parameter_may_be_called_as_a_field_of_a_state_is():
    """A dictionary of this one name is what a checkpoint without types makes of a
    `KahanSummationState`.
    """
    params = {"compensation": jnp.ones(2, jnp.bfloat16)}
    state = KEEPERS["full"]().init(params)
    assert_same_bits(
        mpx.master_params(params, state), {"compensation": jnp.ones(2, jnp.float32)}
    )


CANNOT_TELL = (
    r"(?s)`is_synced` cannot tell: low bits.*one checkpoint.*`resync`.*:"
    r" \w+\[.*\] fits other parameters of bfloat16\["
)


def test_masters_of_24_bits_cannot_tell_either_and_float32_parameters_are_their_own():
    tx, params = (
        mpx.master_weights(optax.sgd(0.1), storage="split24"),
        {"w": jnp.ones(2, jnp.bfloat16)},
    )
    with pytest.raises(ValueError, match=CANNOT_TELL):
        jax.jit(mpx.is_synced)(params, tx.init(params))
    wide = {"w": jnp.ones(2)}
    assert mpx.is_synced(wide, tx.init(wide))


@every_pair
def test_after_resync_parameters_changed_from_outside_are_the_masters(keeper, nesting):
    """NaN is in sync with NaN. What fits other parameters too says so."""
    params, state = trained_in(nesting, keeper)
    edited = params | {
        "kernel": params["kernel"].at[3].set(0).at[5].set(1.296875).at[6].set(jnp.nan)
    }
    synced = mpx.resync(edited, state, before=params)
    if keeper != "full":
        for given in (params, jax.tree.map(lambda p: -2 * p, params)):
            with pytest.raises(ValueError, match=CANNOT_TELL):
                mpx.is_synced(given, state)
    else:
        assert (mpx.is_synced(params, state), mpx.is_synced(edited, state)) == (
            True,
            False,
        )
        assert mpx.is_synced(edited, synced)
    if keeper == "full":
        assert_same_bits(mpx.resync(edited, state), synced)
    else:
        with pytest.raises(
            ValueError,
            match=r"(?s)cannot tell which weights.*before=old.*'kernel': \w+\[",
        ):
            mpx.resync(edited, state)
    masters, best = (
        mpx.master_params(params, state)["kernel"],
        mpx.master_params(edited, synced)["kernel"],
    )
    was_edited = np.isin(np.arange(8), [3, 5, 6])
    assert_same_bits(
        best, jnp.where(was_edited, edited["kernel"].astype(jnp.float32), masters)
    )
    anew = mpx.resync(edited, state, before=jax.tree.map(lambda p: p * jnp.nan, params))
    assert_same_bits(
        mpx.master_params(edited, anew)["kernel"], edited["kernel"].astype(jnp.float32)
    )
    moments = lambda x: [
        leaf
        for path, leaf in jax.tree.leaves_with_path(x)
        if ".mu" in jax.tree_util.keystr(path)
    ]
    assert_same_bits(moments(synced), moments(state))


@pytest.mark.parametrize("before", ["given", "all NaN"])
@pytest.mark.parametrize(
    ("recipe", "lost"),
    [
        ("bf16-masters", 0),
        ("bf16-split", 0),
        ("bf16-split24-8bit", 2.0**-15),
        ("bf16-kahan", 2.0**-17),
        ("f16-scaled", 0),
    ],
)
def test_a_float32_average_keeps_all_bits_that_a_recipe_holds(recipe, lost, before):
    """Of ties, which a cast rounds to even, split masters keep the number beside."""
    tx = mpx.mixed_precision(optax.adam(1e-3), recipe, key=jax.random.key(0))
    policy = mpx.get_policy(recipe)
    params = policy.cast_to_param(
        {"w": jax.random.normal(jax.random.key(1), (4096,), np.float32)}
    )
    state = tx.init(params)
    average = np.asarray(jax.random.normal(jax.random.key(2), (4096,), np.float32))
    ties = (average.view(np.uint32) & np.uint32(0xFFFF_0000)) | np.uint32(0x8000)
    average = {
        "w": jnp.asarray(np.where(np.arange(4096) < 99, ties.view("f"), average))
    }
    average["w"] = (
        average["w"]
        .at[99:]
        .set(jnp.where(jnp.arange(99, 4096) < 199, params["w"][99:], average["w"][99:]))
    )
    if before == "all NaN":
        before = jax.tree.map(lambda p: p * jnp.nan, params)
    else:
        before = params
    state = jax.jit(mpx.resync)(average, state, before)
    best = mpx.master_params(policy.cast_to_param(average), state)["w"]
    off = jnp.abs(best - average["w"]) / jnp.abs(average["w"])
    assert off[99:].max() <= lost
    assert off[:99].max() <= max(lost * 2, 2.0**-23 if "split" in recipe else 0)


def test_without_resync_low_bits_of_another_weight_stay_and_masters_bring_the_old_weights_back():
    """Leave it out, as a negative control: a pruned 0 would be 4e-41, and 1.296875
    another number near it.
    """
    params, state = trained_in("alone", "split")
    edited = params | {"kernel": params["kernel"].at[3].set(0).at[5].set(1.296875)}
    stale = np.asarray(mpx.master_params(edited, state)["kernel"])
    assert stale[3].view(np.uint32) != 0
    assert stale[5] != np.float32(1.296875)
    tx, (params, state) = KEEPERS["full"](), trained_in("alone", "full")
    pruned = params | {"kernel": jnp.zeros_like(params["kernel"])}
    no_grads = jax.tree.map(lambda p: jnp.zeros(p.shape), params)
    resurrected = optax.apply_updates(pruned, tx.update(no_grads, state, pruned)[0])
    kept = optax.apply_updates(
        pruned,
        tx.update(no_grads, jax.jit(mpx.resync)(pruned, state, params), pruned)[0],
    )
    assert (resurrected["kernel"] > 0.4).all()
    assert (abs(kept["kernel"]) < 1e-2).all()


# What programs do to weights after each step: `clip` is of a critic's kernel, `free` is
# trained and never touched.
EDITS = {
    "CLIP's scale": lambda p: p | {"clip": jnp.minimum(p["clip"], 0.5)},
    "WGAN's clipping": lambda p: p | {"clip": jnp.clip(p["clip"], -0.01, 0.01)},
    "a codebook by EMA": (
        lambda p: p | {"clip": (0.9 * p["clip"] + 0.1).astype(p["clip"].dtype)}
    ),
    "a pruning mask": (
        lambda p: (
            p | {"clip": p["clip"] * (jnp.arange(4096) % 2).astype(p["clip"].dtype)}
        )
    ),
}


def edited_after_each_step(recipe, edit, before):
    """Train 20 steps of about 1e-3, edit the parameters after each, and return them
    with their float32 values.
    """
    tx = mpx.mixed_precision(optax.adam(1e-3), recipe)
    params = mpx.get_policy(recipe).cast_to_param(
        {"free": jnp.ones(4096), "clip": jnp.ones(4096)}
    )

    @jax.jit
    def step(params, state, grads):
        stepped, state = stepper(tx)(
            params, state, jax.tree.map(mpx.get_loss_scale(state).scale, grads)
        )
        edited = edit(stepped)
        return edited, mpx.resync(edited, state, before=before(stepped))

    state = tx.init(params)
    for _ in range(20):
        params, state = step(
            params, state, {"free": jnp.ones(4096), "clip": jnp.ones(4096)}
        )
    return params, mpx.master_params(params, state)


@pytest.mark.parametrize("edit", cases(EDITS, ["CLIP's scale"]))
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_weight_that_nobody_edits_trains_on_while_others_are_edited_after_each_step(
    recipe, edit
):
    params, masters = edited_after_each_step(
        recipe, EDITS[edit], lambda stepped: stepped
    )
    np.testing.assert_allclose(masters["free"].mean(), 0.98, atol=3e-4)
    np.testing.assert_allclose(
        masters["clip"], params["clip"].astype(jnp.float32), atol=2**-8
    )
    if edit == "WGAN's clipping":
        assert (jnp.abs(masters["clip"]) <= 0.0101).all()


def clamped_of_the_page():
    """Return the function of `next_steps.md` that lets biases end between -0.01 and
    0.01.
    """
    page, names = (
        (ROOT / "docs" / "guides" / "next_steps.md").read_text(),
        {
            "jax": jax,
            "jnp": jnp,
        },
    )
    code = next(
        block["code"]
        for block in BLOCK.finditer(page)
        if "def clamped" in block["code"]
    )
    exec(code.partition("\ntx = ")[0], names)
    return names["clamped"]


# By how much a weight that is held at a bound may be beyond it: masters not at all,
# unless they are rounded.
BEYOND = {"split24": 2.0**-15, "kahan": 2.0**-7, "stochastic": 2.0**-7}


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_that_are_clamped_inside_of_the_optimizer_stay_within_their_bounds(
    recipe,
):
    tx = mpx.mixed_precision(
        optax.chain(optax.adam(1e-3), optax.stateless(clamped_of_the_page())),
        recipe,
    )
    mpx.check_chain(tx)
    params = mpx.get_policy(recipe).cast_to_param(
        {"free": jnp.ones(4096), "bias": jnp.zeros(4096)}
    )
    state, step = tx.init(params), jax.jit(stepper(tx))
    for _ in range(20):
        grads = {"free": jnp.ones(4096), "bias": -jnp.ones(4096)}
        params, state = step(params, state, mpx.get_loss_scale(state).scale(grads))
    masters = mpx.master_params(params, state)
    np.testing.assert_allclose(masters["free"].mean(), 0.98, atol=3e-4)
    np.testing.assert_allclose(masters["bias"], 0.01, rtol=2**-7)
    assert masters["bias"].max() <= np.float32(0.01) * np.float32(
        1 + BEYOND.get(RECIPES[recipe].weights, 2.0**-23)
    )


@pytest.mark.parametrize("recipe", ["bf16-split", "bf16-masters", "bf16-kahan"])
def test_a_weight_whose_master_is_made_anew_after_each_step_stands_still(recipe):
    gone = lambda stepped: jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), stepped)
    masters = edited_after_each_step(recipe, EDITS["CLIP's scale"], gone)[1]
    assert (masters["free"] == 1).all()


@pytest.mark.parametrize(
    "tx",
    [optax.adam(1e-3), KEEPERS["full"]()],
    ids=["float32 parameters", "whole masters"],
)
def test_masters_survive_the_donation_of_what_they_were_read_from(tx):
    params = {
        "w": jnp.ones(4, jnp.bfloat16),
        "b": jnp.ones(3, jnp.float32),
        "ids": jnp.arange(3),
        "flag": True,
    }
    state = tx.init(params)
    masters = mpx.master_params(params, state)
    jax.tree.map(
        lambda x: x.delete() if isinstance(x, jax.Array) else None, (params, state)
    )
    right = {
        "w": jnp.ones(4, jnp.float32),
        "b": jnp.ones(3, jnp.float32),
        "ids": jnp.arange(3),
        "flag": True,
    }
    assert_same_bits(masters, right)


def test_masters_of_shapes_are_shapes():
    tx, params = (
        mpx.master_weights(optax.sgd(1.0)),
        {"w": jax.ShapeDtypeStruct((8, 8), jnp.bfloat16)},
    )
    masters = mpx.master_params(params, jax.eval_shape(tx.init, params))
    assert masters == {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
