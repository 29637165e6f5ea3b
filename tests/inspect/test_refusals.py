"""What is refused of states and parameters: the call, the error, and the text that says
what to do.
"""

import functools

import flax.serialization
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import mpx

pytestmark = pytest.mark.optax_promotion

PARAMS = {"kernel": jnp.ones(8, jnp.bfloat16), "bias": jnp.ones(2, jnp.bfloat16)}
ADAM, SPLIT = optax.adam(1e-3), mpx.master_weights(optax.adam(1e-3), storage="split")
FULL, SCALED = mpx.master_weights(optax.adam(1e-3)), mpx.loss_scaling(optax.sgd(1.0))
STATE = FULL.init(PARAMS)
UNTYPED, MODEL = (
    flax.serialization.to_state_dict(SPLIT.init(PARAMS)),
    nnx.Linear(2, 1, rngs=nnx.Rngs(0)),
)
OF_A_MODEL = nnx.state(nnx.Optimizer(MODEL, FULL, wrt=nnx.Param).opt_state)
OF_A_SCALE = mpx.get_loss_scale, mpx.skipped_steps, mpx.check_health
OF_WEIGHTS = mpx.master_params, mpx.is_synced, mpx.resync


def given(function, *arguments, **options):
    return functools.partial(function, *arguments, **options)


def converted(params=PARAMS, state=STATE, tx=FULL, new_tx=SPLIT, **options):
    return functools.partial(mpx.convert_state, params, state, tx, new_tx, **options)


def checked(*chain, **options):
    return functools.partial(mpx.check_chain, optax.chain(*chain), **options)


def other_rule(new_tx, becomes):
    return (
        converted(new_tx=new_tx),
        r"(?s)'ScaleByAdamState.count': int32\[\]\nthe state of `new_tx` has\n "
        rf" {becomes}",
    )


KAHAN, ROUNDING = mpx.kahan_summation(), mpx.stochastic_rounding(jax.random.key(0))
FEW_BITS = mpx.low_precision_state(
    ADAM, {"mu": "bf16", "nu": mpx.Blockwise8bit()}, min_size=0
)
FLAT = optax.flatten(mpx.master_weights(optax.identity()))
NO_FIT = (
    r"does not fit the parameters. Pass the parameters that this state belongs to.\n "
    r" 'bias': nothing, but the opt"
)
POLYAK = mpx.master_weights(optax.polyak_sgd())
SOUND = {
    "extra arguments": checked(POLYAK, value=jax.ShapeDtypeStruct((), jnp.float32)),
    "few bits inside of masters": checked(mpx.master_weights(FEW_BITS)),
    "few bits with Kahan summation": checked(FEW_BITS, KAHAN),
}
VALUES = [
    *[
        (checked(FULL, last), "had rounded it, but `add` changes it after that")
        for last in (KAHAN, ROUNDING)
    ],
    (
        checked(optax.scale_by_adam(), FULL),
        (
            r"outside of `master_weights` keeps its state in 16"
            r" bits(?s:.*)'0/mu/bias': bfl"
        ),
    ),
    *[
        (
            given(f, mpx.loss_scaling(SCALED).init(PARAMS)),
            rf"`{f.__name__}`: .* holds 2 loss scales",
        )
        for f in OF_A_SCALE
    ],
    (
        given(mpx.check_health, ADAM.init(PARAMS)),
        r"nothing in this .* `loss_scaling\(inner, NoOpLossScale\(\)\)` does it",
    ),
    *[
        (
            given(mpx.check_health, SCALED.init(PARAMS), max_stuck_steps=number),
            "must be an integer above 0, but got",
        )
        for number in (0, 1.5, True)
    ],
    *[
        (given(f, {"kernel": jnp.ones(9, jnp.bfloat16)}, SPLIT.init(PARAMS)), NO_FIT)
        for f in OF_WEIGHTS
    ],
    other_rule(mpx.master_weights(optax.lion(1e-3)), "'ScaleByLion"),
    other_rule(optax.sgd(1e-3), "nothing more"),
    (
        converted(tx=SPLIT),
        (
            r"'master/bias': float32\[2\], but `tx.init` makes uint16\[2\]\n "
            r" 'master/kernel': fl"
        ),
    ),
    (
        converted(PARAMS | {"bias": jnp.ones(6, jnp.bfloat16)}),
        r"'master/bias': float32\[2\], but .* float32\[6\]",
    ),
    (
        converted({"kernel": PARAMS["kernel"]}),
        r"'master/bias': float32\[2\], but `tx.init` makes nothing",
    ),
    (
        converted(nnx.state(MODEL), OF_A_MODEL),
        r"for Flax NNX `nnx.state\(model, nnx.Param\)` and `optimizer.opt_s",
    ),
    (
        converted(PARAMS, (*ADAM.init(PARAMS), optax.EmptyState()), ADAM),
        "restored from a checkpoint without its types",
    ),
    (
        converted(
            jnp.ones((2, 2), jnp.float32),
            optax.EmptyState(),
            optax.identity(),
            FLAT,
            policy="bf16",
        ),
        (
            r"(?s)\(`optax.flatten`\).*: float32\[2, 2\], but the optimizer state keeps"
            r" float32\[4\]"
        ),
    ),
    (converted(policy="params=f8"), "f8"),
    # The check of `mixed_precision`: the new recipe would have no use for its masters.
    (
        converted(new_tx=mpx.mixed_precision(ADAM, "bf16"), policy="f32"),
        "all of those given are float32",
    ),
]
TYPES = [
    (
        given(mpx.check_chain, None),
        "`check_chain` needs an Optax gradient transformation",
    ),
    (checked(POLYAK, params=PARAMS), "value"),
    *[
        (given(f, SCALED), "needs an optimizer state, but got a transformation")
        for f in OF_A_SCALE
    ],
    *[
        (
            given(f, what),
            f"`{f.__name__}` needs .* got .* there is no optimizer state in it",
        )
        for f in OF_A_SCALE
        for what in (None, {"w": jnp.ones(2)}, MODEL)
    ],
    (
        given(mpx.check_health, jax.vmap(SCALED.init)(jnp.ones((3, 2)))),
        r"one training run, but .* is \[0 0 0\]: call",
    ),
    (
        lambda: jax.jit(mpx.check_health)(SCALED.init(PARAMS)),
        r"call it outside of `jax.jit`, for each run",
    ),
    *[
        (
            given(f, PARAMS, UNTYPED),
            "restored without its types: what was a NamedTuple is a d",
        )
        for f in OF_WEIGHTS
    ],
    (given(mpx.get_loss_scale, UNTYPED), "was restored without its types"),
    (
        converted(tx=optax.adam),
        r"`convert_state` needs an Optax gradient transformation, .*Call it with",
    ),
    (
        converted(new_tx=None),
        "`convert_state` needs an Optax gradient transformation, but got NoneType",
    ),
    (
        converted(policy=16),
        "`policy` must be a Policy or the string of one, but got int",
    ),
    (converted(state=ADAM), "needs an optimizer state, but got a transformation"),
    (
        lambda: jax.jit(lambda params: converted(params)())(PARAMS),
        r"needs arrays, but got \w*Tracer\. Call it outside of",
    ),
]
REFUSED = [(ValueError, *row) for row in VALUES] + [(TypeError, *row) for row in TYPES]


@pytest.mark.parametrize(("error", "call", "text"), REFUSED)
def test_a_wrong_call_says_what_is_wrong(error, call, text):
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_chain_passes(name):
    SOUND[name]()
