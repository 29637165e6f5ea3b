"""Check `mpx.chain` against the nested form, and the orders that it refuses."""

import jax
import jax.numpy as jnp
import optax
import pytest

import mpx
from tests.helpers import QUICKLY, assert_same_bits, cases, stepper

pytestmark = pytest.mark.optax_promotion

KEY = jax.random.key(0)
PARAMS = {
    "w": (
        jnp.linspace(-1, 1, 64 * 64, dtype=jnp.float32)
        .reshape(64, 64)
        .astype(jnp.bfloat16)
    )
}
GRADS = [{"w": jnp.full((64, 64), g, jnp.float32)} for g in (2.0**15, jnp.inf, 2.0**14)]
CLIP, ADAMW, EIGHT_BITS = (
    optax.clip_by_global_norm(1.0),
    optax.adamw(1e-2),
    {"mu|nu": mpx.Blockwise8bit()},
)
MESH = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
SCALE = mpx.DynamicLossScale(2.0**10)

PAIRS = {
    "scale_and_masters": (
        lambda: mpx.chain(
            mpx.loss_scaling(SCALE), mpx.master_weights(storage="split"), CLIP, ADAMW
        ),
        lambda: mpx.loss_scaling(
            mpx.master_weights(optax.chain(CLIP, ADAMW), storage="split"), SCALE
        ),
    ),
    "kahan": (
        lambda: mpx.chain(
            mpx.low_precision_state({"mu|nu": "bf16"}),
            CLIP,
            ADAMW,
            mpx.kahan_summation(),
        ),
        lambda: optax.chain(
            mpx.low_precision_state(optax.chain(CLIP, ADAMW), {"mu|nu": "bf16"}),
            mpx.kahan_summation(),
        ),
    ),
    "scale_around_kahan": (
        lambda: mpx.chain(
            mpx.loss_scaling(), CLIP, mpx.upcast(), ADAMW, mpx.kahan_summation()
        ),
        lambda: mpx.loss_scaling(
            optax.chain(CLIP, mpx.upcast(ADAMW), mpx.kahan_summation())
        ),
    ),
    "noise": (
        lambda: mpx.chain(mpx.upcast(), ADAMW, mpx.stochastic_rounding(KEY)),
        lambda: optax.chain(mpx.upcast(ADAMW), mpx.stochastic_rounding(KEY)),
    ),
    "recipe": (
        lambda: mpx.chain(
            mpx.mixed_precision("bf16-split24-8bit", key=KEY), CLIP, ADAMW
        ),
        lambda: mpx.mixed_precision(
            optax.chain(CLIP, ADAMW), "bf16-split24-8bit", key=KEY
        ),
    ),
    "zero1": (
        lambda: mpx.chain(
            mpx.zero1(MESH),
            mpx.master_weights("split"),
            mpx.low_precision_state(EIGHT_BITS),
            ADAMW,
        ),
        lambda: mpx.zero1(
            mpx.master_weights(mpx.low_precision_state(ADAMW, EIGHT_BITS), "split"),
            MESH,
        ),
    ),
    "no_element": (lambda: mpx.chain(CLIP, ADAMW), lambda: optax.chain(CLIP, ADAMW)),
    "one_rule": (lambda: mpx.chain(ADAMW), lambda: ADAMW),
}


@pytest.mark.parametrize(
    "name", cases(PAIRS, {"scale_and_masters", "scale_around_kahan", "recipe", "zero1"})
)
def test_a_chain_has_the_states_and_the_bits_of_the_nested_form(name):
    runs = []
    for make in PAIRS[name]:
        tx = make()
        params, state = PARAMS, tx.init(PARAMS)
        step = jax.jit(stepper(tx), compiler_options=QUICKLY)
        for grads in GRADS:
            params, state = step(params, state, grads)
        runs.append((params, state))
    assert_same_bits(*runs)


def test_a_chain_passes_extra_arguments():
    tx = mpx.chain(
        mpx.upcast(),
        optax.scale_by_learning_rate(1.0),
        optax.contrib.reduce_on_plateau(patience=1),
    )
    updates, _ = tx.update(GRADS[0], tx.init(PARAMS), PARAMS, value=jnp.float32(1))
    assert updates["w"].dtype == jnp.float32


REFUSED = [
    (
        lambda: mpx.chain(CLIP, mpx.loss_scaling(), ADAMW),
        "element 1 of 3 must stand behind `loss_scaling`",
    ),
    (
        lambda: mpx.chain(CLIP, mpx.master_weights(), ADAMW),
        "element 1 of 3 must stand behind `master_weights`",
    ),
    (
        lambda: mpx.chain(mpx.master_weights(), mpx.loss_scaling(), ADAMW),
        "`master_weights` must stand behind `loss_s",
    ),
    (
        lambda: mpx.chain(mpx.upcast(), mpx.master_weights(), ADAMW),
        "`upcast` must stand behind `master_weights`",
    ),
    (
        lambda: mpx.chain(mpx.loss_scaling(), mpx.zero1(MESH), ADAMW),
        "`loss_scaling` must stand behind `zero1`",
    ),
    (
        lambda: mpx.chain(mpx.loss_scaling(), mpx.loss_scaling(), ADAMW),
        "exclude each other; keep one",
    ),
    (
        lambda: mpx.chain(mpx.loss_scaling(), mpx.mixed_precision("f16-scaled"), ADAMW),
        "exclude each other",
    ),
    (
        lambda: mpx.chain(ADAMW, mpx.loss_scaling()),
        "`loss_scaling` wraps the rules behind it, but none stands there",
    ),
    (
        lambda: mpx.chain(mpx.loss_scaling()),
        "`loss_scaling` wraps the rules behind it, but none stands there",
    ),
    (
        lambda: mpx.chain(mpx.upcast(), mpx.kahan_summation()),
        "`upcast` wraps the rules behind it, but none",
    ),
    (
        lambda: mpx.chain(mpx.upcast(), mpx.kahan_summation(), ADAMW),
        "`kahan_summation` must stand last",
    ),
    (
        lambda: mpx.chain(mpx.upcast(), ADAMW, mpx.stochastic_rounding(KEY), CLIP),
        "`stochastic_rounding` must stand",
    ),
    (
        lambda: mpx.chain(mpx.master_weights(), ADAMW, mpx.kahan_summation()),
        "`master_weights` and `kahan_summation` exclude",
    ),
    (
        lambda: mpx.chain(
            mpx.mixed_precision("bf16-split"), mpx.master_weights(), ADAMW
        ),
        "exclude each other",
    ),
    (
        lambda: mpx.chain(mpx.master_weights(ADAMW, "split"), CLIP),
        "`master_weights` must stand last",
    ),
    (
        lambda: mpx.chain(mpx.mixed_precision(ADAMW, "bf16-split"), CLIP),
        "`mixed_precision` must stand last",
    ),
    (lambda: mpx.chain(), "needs an element"),
]


@pytest.mark.parametrize(("make", "text"), REFUSED)
def test_an_order_that_cannot_work_is_refused_when_the_chain_is_made(make, text):
    with pytest.raises(ValueError, match=text):
        make()


NOT_YET_RULES = [
    lambda: optax.chain(mpx.loss_scaling(), ADAMW),
    lambda: mpx.loss_scaling().init(PARAMS),
    lambda: mpx.loss_scaling().update(GRADS[0], (), PARAMS),
    lambda: optax.MultiSteps(mpx.loss_scaling(), 2),
    lambda: mpx.upcast(mpx.loss_scaling()),
]


@pytest.mark.parametrize("use", NOT_YET_RULES)
def test_an_element_outside_of_a_chain_says_where_it_belongs(use):
    with pytest.raises(
        TypeError,
        match=r"`loss_scaling` has no rule to wrap\. Put it into `mpx\.chain`",
    ):
        use()


@pytest.mark.parametrize(
    "wrapper", [mpx.mixed_precision, mpx.master_weights, mpx.low_precision_state]
)
def test_a_rule_in_the_second_place_is_told_to_stand_first(wrapper):
    with pytest.raises(
        TypeError,
        match=(
            rf"`{wrapper.__name__}` takes the rule first:"
            rf" `mpx.{wrapper.__name__}\(rule, "
        ),
    ):
        wrapper("bf16-split", ADAMW)


def test_what_is_no_transformation_is_named_with_its_place():
    with pytest.raises(
        TypeError,
        match=r"got function as element 2 of 2\. Call it with its settings first",
    ):
        mpx.chain(mpx.upcast(), optax.adamw)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: mpx.master_weights("spilt"),
            "'full', 'split' or 'split24', but got 'spilt'",
        ),
        (lambda: mpx.loss_scaling(mpx.StaticLossScale(3.0)), "must be powers of two"),
        (lambda: mpx.zero1(MESH, "model"), "model"),
    ],
)
def test_wrong_settings_of_an_element_raise_when_it_is_made(make, text):
    with pytest.raises(ValueError, match=text):
        make()
