"""What policies, loss scales, gradients, recipes and roundings refuse: the error, the
call, and what the error says.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx
from mpx import formats
from tests.helpers import BF16, F16, F32, assert_same_bits

pytestmark = pytest.mark.optax_promotion

ONE, ONES, SGD, ADAM = jnp.float32(1), jnp.ones(2, F32), optax.sgd(0.1), optax.adam(1.0)
IN_BF16 = "params=bf16,compute=bf16,output=f32"
PARAMS = {"a": {"w": jnp.ones((3, 2), F32)}, "b": ONES}
W, W_IN_BF16 = {"w": jnp.ones(3, F32)}, {"w": jnp.ones(3, BF16)}
given = functools.partial
policy, dynamic, static, recipe = (
    mpx.get_policy,
    mpx.DynamicLossScale,
    mpx.StaticLossScale,
    given(mpx.mixed_precision, SGD),
)
adamw, round_to = mpx.any_precision_adamw, formats.round_to


def made(function, *arguments):
    return lambda: function()(*arguments)


def loss(fun, **options):
    return made(given(mpx.value_and_grad, fun, **options), ONE)


def updated(wrap, grads, params=PARAMS):
    return lambda: wrap(ADAM).update(grads, wrap(ADAM).init(params), params)


def fused(tx):
    step = mpx.fused_update(tx, interpret=True)
    return optax.GradientTransformation(
        tx.init, lambda grads, state, params: step(grads, state, params)
    )


WRAPPERS = {
    "upcast": mpx.upcast,
    "master_weights": mpx.master_weights,
    "loss_scaling": mpx.loss_scaling,
    "low_precision_state": lambda rule: mpx.low_precision_state(
        rule, {"mu": "bf16"}, min_size=0
    ),
    "mixed_precision": lambda rule: mpx.mixed_precision(
        rule, "params=f32,compute=bf16"
    ),
    "fused_update": fused,
}
STRINGS = {
    "bf15": (
        "Unknown dtype 'bf15' in policy 'bf15'; use one of half, bf16, bfloat16, f16,"
        " fp16, float16, full, f32,"
    ),
    "": "Unknown dtype '' in policy ''",
    "bf16,f16": "Unknown dtype 'bf16,f16' in policy 'bf16,f16'",
    "p=int8": "Unknown dtype 'int8' in policy 'p=int8'",
    "p=f32=bf16": "Unknown dtype 'f32=bf16' in policy 'p=f32=bf16'",
    "p=f32,c": "Unknown dtype '' in policy 'p=f32,c'",
    "x=bf16": (
        "Unknown key 'x' in policy 'x=bf16'; use params (p), compute (c), output (o) or"
        " reduce (r), each"
    ),
    "p=f32,": "Unknown key '' in policy 'p=f32,'",
    "p=f32,params=f32": "Policy 'p=f32,params=f32' gives 'params' twice.",
    "c=fp8(size=3)": (
        "Policy 'c=fp8(size=3)': fp8 has no setting 'size'; it has forward, backward,"
        " min_extent"
    ),
    "c=fp8(forward=e3m4)": "`Fp8`: `forward` must be 'e4m3' or 'e5m2', but got 'e3m4'.",
    "c=fp8(forward=e5m2": "Unknown dtype 'fp8(forward=e5m2' in policy",
    "'['=f32": "The override pattern '[' is not a regular expression",
    "'norm=f32": 'Unknown key "\'norm" in policy',
    "params=fp8": (
        "Policy 'params=fp8': fp8 is a way to multiply matrices, and nothing is stored"
        " in it. It goes with"
    ),
}
FIELDS = dict.fromkeys(("param_dtype", "compute_dtype", "output_dtype"), "float32")
# None, which NumPy reads as float64.
NO_DTYPES = [
    "int8",
    jnp.complex64,
    jnp.float8_e4m3fn,
    None,
]
FLOATING = (
    " must be a floating-point dtype of 16 to 64 bits (bfloat16, float16, float32,"
    " float64), but got "
)
OVERRIDES = policy("bf16", overrides=(("norm", F32), ("Norm", F32), ("step", F32)))
SETTINGS = {
    "`period` must be an integer above 0, but got 0.": dict(period=0),
    "`period` must be an integer above 0, but got 1.5.": dict(period=1.5),
    "`hysteresis` must be an integer above 0, but got 0.": dict(
        hysteresis=jnp.int32(0)
    ),
    "`factor` must be above 1, but got 1.": dict(factor=1),
    "`factor` must be above 1, but got nan.": dict(factor=math.nan),
    "the minimum 33554432.0 must not be above the maximum 16777216.0.": dict(
        min_loss_scale=2.0**25
    ),
}
NOT_POWERS = {
    "loss_scale=3.0": static(3.0),
    "loss_scale=0": static(0),
    "loss_scale=nan": static(math.nan),
    # A device that flushes its subnormal reciprocal unscales to zero.
    "loss_scale=1.7": static(2.0**127),
    "loss_scale=5.8": static(2.0**-127),
    "factor=3": dynamic(factor=3),
    "max_loss_scale=65504.0": dynamic(max_loss_scale=jnp.float32(65504.0)),
    "factor=1.5, min_loss_scale=0.0": dynamic(factor=1.5, min_loss_scale=0.0),
}
TAKE_A_SCALE = {
    "loss_scaling": given(mpx.loss_scaling, SGD),
    "value_and_grad": given(mpx.grad, jnp.sum),
}
NO_LOSSES = {
    "float32[1]": lambda w: w[None],
    "int32[]": lambda w: jnp.int32(3),
    "bool[]": lambda w: w > 0,
    "complex64[]": lambda w: jax.lax.complex(w, w),
    "tuple": lambda w: (w, w),
    "NoneType": lambda w: None,
}
HIDDEN = (
    WRAPPERS["low_precision_state"],
    lambda tx: mpx.upcast(optax.chain(optax.clip(1.0), tx)),
    lambda tx: mpx.master_weights(optax.MultiSteps(tx, 2)),
)
ROUND = {
    "round_to": round_to,
    "stochastic_round": lambda x, dtype=BF16: formats.stochastic_round(
        jax.random.key(0), x, dtype
    ),
    "split_f32": lambda x, dtype=BF16: formats.split_f32(x),
}

VALUES = [
    *[(given(policy, text), message) for text, message in STRINGS.items()],
    *[
        (given(mpx.Policy, **FIELDS | {field: d}), f"`{field}`{FLOATING}")
        for field in FIELDS
        for d in NO_DTYPES
    ],
    *[(given(mpx.cast, ONES, dtype), f"`dtype`{FLOATING}") for dtype in NO_DTYPES],
    (
        given(mpx.Policy, "f32", "f32", "f32", fp8=mpx.Fp8()),
        "`compute_dtype` must be bfloat16 if `fp8` is gi",
    ),
    # Python's reader raises an OverflowError for the second, and a RecursionError for
    # the third.
    *[
        (
            given(policy, "bf16", overrides=((pattern, F32),)),
            f"pattern {pattern!r} is not a regular expr",
        )
        for pattern in ("(", "a{99999999999999999999}", "(" * 5000)
    ],
    (
        given(policy, "bf16", overrides=(("norm", "int8"),)),
        f"`overrides['norm']`{FLOATING}",
    ),
    (
        given(
            OVERRIDES.describe,
            {"norm": {"scale": ONES}, "step": jnp.zeros((), jnp.int32)},
        ),
        (
            "`Policy.describe`: no floating leaf's path matches 'Norm', 'step'. An"
            " override is a regular expression searched in one of these: norm/scale."
        ),
    ),
    *[(given(dynamic, **options), message) for message, options in SETTINGS.items()],
    *[
        (
            given(take, scale),
            (
                f"`{name}` unscales gradients exactly, so scale, factor and bounds must"
                f" be powers of two, but got {wrong}"
            ),
        )
        for name, take in TAKE_A_SCALE.items()
        for wrong, scale in NOT_POWERS.items()
    ],
    (
        given(mpx.loss_scaling, SGD, dynamic(0.5)),
        "the scale 0.5 must lie between its bounds 1.0 and 16777216.0.",
    ),
    (
        given(dynamic().adjust, jnp.ones(2, bool)),
        "`adjust` needs a boolean scalar, but got shape (2,); see",
    ),
    (given(mpx.select_tree, True, {"a": ONES}, {"b": ONES}), "key"),
    (
        given(mpx.grad, jnp.sum, grad_dtype="int32"),
        "`grad_dtype` must be a floating-point dtype, 'as_computed' or None,",
    ),
    # Its old name.
    (
        given(mpx.grad, jnp.sum, grad_dtype="lossless"),
        "'as_computed' or None, but got 'lossless'.",
    ),
    (
        made(lambda: recipe(IN_BF16).init, W),
        "all of those given are float32 or wider. Cast them first: `par",
    ),
    *[
        (
            made(lambda f=f: f(recipe(IN_BF16)).init, W_IN_BF16),
            "a wrapper around this hides it",
        )
        for f in HIDDEN
    ],
    (
        given(recipe, "params=f32", storage="full"),
        "'params=f32,compute=f32,output=f32' stores no parameters",
    ),
    (given(recipe, "bf16", loss_scale=static(2.0)), "`loss_scale` was given"),
    (
        given(recipe, "bf16", axis_name="data"),
        "`axis_name` was given, but the policy 'params=bf16,compute=bf16,output=b",
    ),
    (given(adamw, momentum_dtype=jnp.int8), "`formats['^0/mu']` must be"),
    (
        given(adamw, compensation_buffer_dtype=jnp.int8),
        "`kahan_summation`: `dtype` must be",
    ),
    (
        made(lambda: adamw(variance_dtype=F16).init, ONES),
        "second moments, which float16 cannot hold",
    ),
    *[
        (
            given(ROUND[name], ONES, dtype),
            f"`{name}`: `dtype` must be bfloat16, float16 or float32, but got {dtype}.",
        )
        for name in ("round_to", "stochastic_round")
        for dtype in ("float64", "int16", "float8_e4m3fn")
    ],
    *[
        (
            given(call, overflow="saturate"),
            "must be 'infinite' or 'largest', but got 'saturate'.",
        )
        for call in (given(round_to, ONES, BF16), given(formats.split_f32, ONES))
    ],
    # Gradients that do not fit; JAX would broadcast them.
    *[
        (
            updated(wrap, PARAMS | {"a": {"w": jnp.ones(shape, F32)}}),
            (
                f"`{name}`: gradients or updates do not match the parameters in"
                " structure or shape. Give trees of one structure. Is a mean over"
                f" examples missing?\n  'a/w': float32{list(shape)}, but the parameter"
                " is float32[3, 2]"
            ),
        )
        for name, wrap in WRAPPERS.items()
        for shape in ((1, 2), (2,), ())
    ],
    *[
        (
            updated(wrap, PARAMS | {"a": {"v": ONES}}),
            "'a/w': nothing, but the parameter is",
        )
        for wrap in WRAPPERS.values()
    ],
]
TYPES = [
    *[
        (given(mpx.cast, ONES, code), f"data type '{code}' not understood")
        for code in ("brain", "f2", "f8", "<f4")
    ],
    (
        given(mpx.Policy, "f32", "bf16", "f32", fp8="fp8"),
        "`fp8` must be an `mpx.Fp8` or None, but got",
    ),
    (given(policy, "bf16", overrides=3), "`overrides` must be a tuple of p"),
    *[
        (
            given(policy, "bf16", overrides=(override,)),
            f"An override must be a pair (pattern, dtype), but got {override!r}.",
        )
        for override in ("norm", (F32, "norm"))
    ],
    (
        given(recipe, 16),
        (
            "`mixed_precision`: `policy` must be a Policy or the string of one, but"
            " got int"
        ),
    ),
    *[
        (
            given(take, wrong),
            (
                f"`{name}`: `loss_scale` must be a loss scale such as"
                f" `DynamicLossScale()`, but got {wrong!r}"
            ),
        )
        for name, take in TAKE_A_SCALE.items()
        for wrong in (2.0**15, "dynamic", mpx.DynamicLossScale)
    ],
    *[
        (
            given(mpx.select_tree, wrong, ONES, ONES),
            f"`select_tree`: expected boolean scalar `pred`, but got {shown}.",
        )
        for wrong, shown in [(jnp.ones(1, bool), "bool[1]"), (jnp.int32(1), "int32[]")]
    ],
    *[
        (loss(fun), f"a real floating scalar, but its loss is {shown}. For a pair")
        for shown, fun in NO_LOSSES.items()
    ],
    (
        loss(lambda w: w, has_aux=True),
        "a function that returns a pair (loss, aux), but it returned float32[]",
    ),
    (
        loss(lambda w: (None, w), has_aux=True),
        "a pair (loss, aux), but its loss is NoneType",
    ),
    *[
        (
            given(call, x, BF16),
            f"`{name}` needs a float32 `x`, but got {x.dtype}{list(x.shape)}.",
        )
        for name, call in ROUND.items()
        for x in (jnp.ones((2, 1), F16), jnp.arange(2, dtype=jnp.int32))
    ],
    (
        given(formats.join_f32, jnp.ones(1, F16), jnp.zeros(1, np.uint16)),
        "but got float16 and uint16.",
    ),
    (
        given(formats.join_f32, jnp.ones(1, BF16), jnp.zeros(1, np.int16)),
        "but got bfloat16 and int16.",
    ),
]
REFUSED = [(ValueError, *row) for row in VALUES] + [(TypeError, *row) for row in TYPES]


@pytest.mark.parametrize(("error", "call", "text"), REFUSED)
def test_a_wrong_call_says_what_is_wrong(error, call, text):
    with pytest.raises(error) as raised:
        call()
    assert text in str(raised.value)


def test_users_of_jmp_catch_an_assertion_error():
    with pytest.raises(AssertionError, match="expected boolean scalar"):
        mpx.select_tree(jnp.int32(1), ONES, ONES)


# ---- gradients that fit, though they look otherwise -----------------------------------------------------------------


@pytest.mark.parametrize("name", WRAPPERS)
def test_gradients_that_fit_are_taken_and_none_may_stand_for_some(name):
    updated(WRAPPERS[name], PARAMS)()
    tx = mpx.upcast(SGD)
    updates, _ = tx.update({"a": None, "b": ONES}, tx.init(PARAMS), PARAMS)
    assert updates["a"] is None


def test_gradients_of_examples_reach_a_rule_that_adds_them_up():
    rule = optax.contrib.differentially_private_aggregate(1e6, 0.0, 0)
    tx = mpx.loss_scaling(rule, mpx.NoOpLossScale())
    grads = jax.tree.map(lambda p: jnp.stack([p, 3 * p]), PARAMS)
    updates, _ = tx.update(grads, tx.init(PARAMS), PARAMS)
    assert_same_bits(updates, jax.tree.map(lambda p: 2 * p, PARAMS))


def test_the_gradients_of_lookahead_are_those_of_its_fast_parameters():
    rule, params = (
        optax.lookahead(optax.sgd(1.0), 2, 0.5),
        optax.LookaheadParams.init_synced(PARAMS),
    )
    stepped, _ = mpx.fused_update(rule, interpret=True)(
        PARAMS, rule.init(params), params
    )
    assert_same_bits(stepped.fast, jax.tree.map(jnp.zeros_like, PARAMS))
