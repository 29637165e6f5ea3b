"""What policies, loss scales, gradients, recipes and roundings refuse: the error, the call, and what the error says."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx
from mpx import formats
from tests.helpers import BF16, F16, F32

pytestmark = pytest.mark.optax_promotion

ONE, ONES, SGD = jnp.float32(1), jnp.ones(2, F32), optax.sgd(0.1)
IN_BF16 = "params=bf16,compute=bf16,output=f32"
given = functools.partial
policy, dynamic, recipe = mpx.get_policy, mpx.DynamicLossScale, given(mpx.mixed_precision, SGD)


def made(function, *arguments):
    return lambda: function()(*arguments)


def loss(fun, w=ONE, **options):
    return made(given(mpx.value_and_grad, fun, **options), w)


# ---- policies -------------------------------------------------------------------------------------------------------

ALLOWED = "half, bf16, bfloat16, f16, fp16, float16, full, f32, fp32, float32, f64, fp64, float64"
STRINGS = {
    "": f"Unknown dtype '' in policy ''; use one of {ALLOWED}.",
    "bf15": f"Unknown dtype 'bf15' in policy 'bf15'; use one of {ALLOWED}.",
    "params": "Unknown dtype 'params' in policy 'params'",
    "BF16": "Unknown dtype 'BF16' in policy 'BF16'",
    "p=int8": "Unknown dtype 'int8' in policy 'p=int8'",
    "p=": "Unknown dtype '' in policy 'p='",
    "p=f32=bf16": "Unknown dtype 'f32=bf16' in policy 'p=f32=bf16'",
    "p=f32,c": "Unknown dtype '' in policy 'p=f32,c'",
    "p=f32;c=f16": "Unknown dtype 'f32;c=f16' in policy",
    "x=bf16": "Unknown key 'x' in policy 'x=bf16'; use params (p), compute (c), output (o) or reduce (r), each",
    "=bf16": "Unknown key '' in policy '=bf16'",
    "p=f32,": "Unknown key '' in policy 'p=f32,'",
    "P=f32": "Unknown key 'P' in policy 'P=f32'",
    "p=f32,c=f16,p=bf16": "Policy 'p=f32,c=f16,p=bf16' gives 'p' twice.",
    "p=f32,params=f32": "Policy 'p=f32,params=f32' gives 'params' twice.",
    "c=fp8(size=3)": "Policy 'c=fp8(size=3)': fp8 has no setting 'size'; it has forward, backward, scaling,",
    "c=fp8(scaling=column)": "`Fp8`: `scaling` must be 'tensor' or 'row', but got 'column'.",
    "c=fp8(scaling=row": "Unknown dtype 'fp8(scaling=row' in policy",
    "'norm'=int8": "Unknown dtype 'int8' in policy",
    "'['=f32": "The override pattern '[' is not a regular expression",
    "'norm=f32": 'Unknown key "\'norm" in policy',
} | {
    text: f"Policy '{text}': fp8 is a way to multiply matrices, and nothing is stored in it. It goes with compute"
    for text in ("fp8", "params=fp8", "p=fp8,c=bf16", "c=fp8,output=fp8", "o=fp8")
}
FIELDS = dict.fromkeys(("param_dtype", "compute_dtype", "output_dtype"), "float32")
NO_DTYPES = ["int8", bool, jnp.complex64, jnp.float8_e4m3fn, "float128", None]  # None, which NumPy reads as float64
FLOATING = " must be a floating-point dtype of 16 to 64 bits (bfloat16, float16, float32, float64), but got "
# Python's reader raises an OverflowError for the second, and a RecursionError for the third.
NO_PATTERNS = ["(", "a{99999999999999999999}", "(" * 5000]
PAIR = "An override must be a pair (pattern, dtype), but got "
OVERRIDES = {"norm": F32, "Norm": F32, "step": F32}
WITH_OVERRIDES = policy("bf16", overrides=tuple(OVERRIDES.items()))
OF_POLICIES = [
    *[(given(policy, text), message) for text, message in STRINGS.items()],
    *[
        (given(mpx.Policy, **FIELDS | {field: dtype}), f"`{field}`{FLOATING}")
        for field in FIELDS
        for dtype in NO_DTYPES
    ],
    *[(given(mpx.cast, ONES, dtype), f"`dtype`{FLOATING}") for dtype in NO_DTYPES],
    (given(mpx.Policy, "f32", "f32", "f32", fp8=mpx.Fp8()), "`compute_dtype` must be bfloat16 if `fp8` is gi"),
    *[
        (given(policy, "bf16", overrides=((pattern, F32),)), f"pattern {pattern!r} is not a regular expr")
        for pattern in NO_PATTERNS
    ],
    *[
        (given(mpx.low_precision_state, SGD, {pattern: "bf16"}), "is not a regular expression")
        for pattern in NO_PATTERNS
    ],
    (given(policy, "bf16", overrides=(("norm", "int8"),)), f"`overrides['norm']`{FLOATING}"),
    (
        given(WITH_OVERRIDES.describe, {"norm": {"scale": ONES}, "step": jnp.zeros((), jnp.int32)}),
        "`Policy.describe`: no floating leaf's path matches 'Norm', 'step'. An override is a regular expression "
        "searched in one of these: norm/scale.",
    ),
    (given(WITH_OVERRIDES.describe, {}), "searched in one of these: (none)."),
]
TYPES_OF_POLICIES = [
    *[
        (given(policy, text), f"`get_policy` needs a string, but got {type(text).__name__}")
        for text in (None, BF16, policy("f32"))
    ],
    *[
        (given(mpx.cast, ONES, code), f"data type '{code}' not understood")
        for code in ("brain", "f2", "f4", "f8", "<f4")
    ],
    *[
        (given(mpx.Policy, "f32", "bf16", "f32", fp8=wrong), "`fp8` must be an `mpx.Fp8` or None, but got")
        for wrong in ("fp8", True, jnp.float8_e4m3fn)
    ],
    *[(given(policy, "bf16", overrides=wrong), "`overrides` must be a tuple of p") for wrong in (3, None, 1.5)],
    *[
        (given(policy, "bf16", overrides=(override,)), f"{PAIR}{override!r}.")
        for override in (("norm"), "norm", (F32, "norm"))
    ],
    (given(recipe, 16), "`mixed_precision`: `policy` must be a Policy or the string of one, but got int"),
]

# ---- loss scales ----------------------------------------------------------------------------------------------------

SETTINGS = {
    "`period` must be an integer from 1 to 2**31 - 1, not 0.": dict(period=0),
    "`period` must be an integer from 1 to 2**31 - 1, not 1.5.": dict(period=1.5),
    "`period` must be an integer from 1 to 2**31 - 1, not 2147483648.": dict(period=2**31),
    "`period` must be an integer from 1 to 2**31 - 1, not inf.": dict(period=math.inf),
    "`hysteresis` must be an integer from 1 to 2**31 - 1, not 0.": dict(hysteresis=jnp.int32(0)),
    "`factor` must be above 1, but got 1.": dict(factor=1),
    "`factor` must be above 1, but got 0.5.": dict(factor=jnp.float32(0.5)),
    "`factor` must be above 1, but got nan.": dict(factor=math.nan),
    "`min_loss_scale` must not be above `max_loss_scale`": dict(min_loss_scale=8.0, max_loss_scale=4.0),
    "but got 33554432.0 and 16777216.0.": dict(min_loss_scale=2.0**25),
}
NO_NUMBERS = ["a", None, True, 1j, jnp.ones(2, bool), [2.0], print]
NO_NUMBER = "must be a real number, or a scalar array, not "
NOT_POWERS = {
    "loss_scale=3.0": mpx.StaticLossScale(3.0),
    "loss_scale=0": mpx.StaticLossScale(0),
    "loss_scale=-2.0": mpx.StaticLossScale(-2.0),
    "loss_scale=inf": mpx.StaticLossScale(math.inf),
    "loss_scale=nan": mpx.StaticLossScale(math.nan),
    "loss_scale=1.7": mpx.StaticLossScale(2.0**127),  # a device that flushes its subnormal reciprocal unscales to zero
    "loss_scale=5.8": mpx.StaticLossScale(2.0**-127),
    "loss_scale=65504.0": dynamic(65504.0),
    "factor=3": dynamic(factor=3),
    "min_loss_scale=0.3": dynamic(min_loss_scale=0.3),
    "max_loss_scale=65504.0": dynamic(max_loss_scale=jnp.float32(65504.0)),
    "factor=1.5, min_loss_scale=0.0": dynamic(factor=1.5, min_loss_scale=0.0),
}
NO_SCALES = {
    "float; a number goes into `StaticLossScale(number)`": 2.0**15,
    "str;": "dynamic",
    "GradientTransformationExtraArgs;": SGD,
    "the class DynamicLossScale: call it;": mpx.DynamicLossScale,
}
TAKE_A_SCALE = {
    "loss_scaling": given(mpx.loss_scaling, SGD),
    "value_and_grad": given(mpx.value_and_grad, jnp.sum),
    "value_and_grad`": given(mpx.grad, jnp.sum),
}
OF_LOSS_SCALES = [
    *[(given(dynamic, **options), message) for message, options in SETTINGS.items()],
    *[
        (
            given(take, scale),
            (
                f"`{name.strip('`')}` unscales gradients exactly, so scale, factor and bounds must be powers of "
                f"two, but got {wrong}"
            ),
        )
        for name, take in TAKE_A_SCALE.items()
        for wrong, scale in NOT_POWERS.items()
    ],
    *[
        (
            given(mpx.loss_scaling, SGD, dynamic(start)),
            f"the scale must lie between `min_loss_scale` and `max_loss_scale`, but got {start} and [1.0, 16777216.0].",
        )
        for start in (0.5, 2.0**25)
    ],
    (given(dynamic().adjust, jnp.ones(2, bool)), "`adjust` needs a boolean scalar, but got shape (2,); see"),
    (given(mpx.select_tree, True, {"a": ONES}, {"b": ONES}), "key"),
]
TYPES_OF_LOSS_SCALES = [
    *[
        (given(mpx.StaticLossScale, wrong), f"`StaticLossScale`: `loss_scale` {NO_NUMBER}{wrong!r}.")
        for wrong in NO_NUMBERS
    ],
    *[
        (given(dynamic, **{field.name: wrong}), f"`{field.name}` {NO_NUMBER}{wrong!r}.")
        for field in dataclasses.fields(dynamic)
        for wrong in NO_NUMBERS
    ],
    *[
        (given(take, wrong), f"must be a loss scale such as `DynamicLossScale()`, but got {shown}")
        for take in TAKE_A_SCALE.values()
        for shown, wrong in NO_SCALES.items()
    ],
    *[
        (given(mpx.select_tree, wrong, ONES, ONES), f"`select_tree`: expected boolean scalar `pred`, but got {shown}.")
        for wrong, shown in [(jnp.ones(1, bool), "bool[1]"), (jnp.int32(1), "int32[]"), (np.float32(1), "float32[]")]
    ],
]

# ---- gradients, recipes ---------------------------------------------------------------------------------------------

NO_LOSSES = {
    "float32[1]": lambda w: w[None],
    "bfloat16[2, 3]": lambda w: jnp.ones((2, 3), BF16) * w.astype(BF16),
    "int32[]": lambda w: jnp.int32(3),
    "bool[]": lambda w: w > 0,
    "complex64[]": lambda w: jax.lax.complex(w, w),
    "int64[]" if jax.config.jax_enable_x64 else "int32[] ": lambda w: 3,
}
NO_LOSS = ", but its loss is {}, no real floating scalar."
BACKWARDS = "Is it (aux, loss)?"
HIDDEN = {
    "low_precision_state": lambda tx: mpx.low_precision_state(tx, {"mu": "bf16"}, min_size=0),
    "upcast": lambda tx: mpx.upcast(optax.chain(optax.clip(1.0), tx)),
    "master_weights": lambda tx: mpx.master_weights(optax.MultiSteps(tx, 2)),
    "master_weights`": lambda tx: mpx.master_weights(mpx.upcast(tx)),
}
W, W_IN_BF16 = {"w": jnp.ones(3, F32)}, {"w": jnp.ones(3, BF16)}
adamw = mpx.any_precision_adamw
OF_GRADIENTS = [
    *[
        (
            given(mpx.grad, jnp.sum, grad_dtype=dtype),
            f"`grad_dtype` must be a floating-point dtype, 'lossless' or None, but got {dtype!r}.",
        )
        for dtype in (jnp.int32, "bool", jnp.complex64)
    ],
    (made(lambda: recipe(IN_BF16).init, W), "all of those given are float32 or wider. Cast them first: `par"),
    *[
        (made(lambda f=f: f(recipe(IN_BF16)).init, W_IN_BF16), f"inside `{name.strip('`')}`, which hides the 16")
        for name, f in HIDDEN.items()
    ],
    *[(made(lambda f=f: f(recipe(IN_BF16)).init, W), "Cast them first") for f in HIDDEN.values()],
    (given(recipe, "f32", storage="full"), "'params=f32,compute=f32,output=f32' stores no parameters"),
    (given(recipe, "bf16", loss_scale=mpx.StaticLossScale(2.0)), "`loss_scale` was given"),
    (given(recipe, "bf16", axis_name="data"), "`axis_name` was given"),
    (given(recipe, "bf16", axis_name="data"), "has no float16 in it"),
    (given(adamw, momentum_dtype=jnp.int8), "`formats['^0/mu']` must be"),
    (given(adamw, compensation_buffer_dtype=jnp.int8), "`kahan_summation`: `dtype` must be"),
    (made(lambda: adamw(variance_dtype=F16).init, ONES), "second moments, which float16 cannot hold"),
]
TYPES_OF_GRADIENTS = [
    *[
        (given(take, wrong), f"needs a function that returns a loss, but got {type(wrong).__name__}")
        for take in (mpx.value_and_grad, mpx.grad)
        for wrong in ("f", None, ONES)
    ],
    *[(loss(fun), NO_LOSS.format(shown.strip())) for shown, fun in NO_LOSSES.items()],
    *[
        (loss(lambda w, f=f: (f(w), None), has_aux=True), "a pair (loss, aux)" + NO_LOSS.format(shown.strip()))
        for shown, f in NO_LOSSES.items()
    ],
    (loss(lambda w: (w, w)), "For a pair (loss, aux) give `has_aux=True`"),
    (loss(lambda w: None), "its loss is NoneType"),
    (loss(lambda w: w, has_aux=True), "a function that returns a pair (loss, aux), but it returned float32[]"),
    *[(loss(lambda w, x=x: (x, w), has_aux=True), BACKWARDS) for x in ({"a": 1.0}, None, (1.0, 2.0))],
]

# ---- roundings ------------------------------------------------------------------------------------------------------

ROUND = {
    "round_to": formats.round_to,
    "stochastic_round": lambda x, dtype=BF16: formats.stochastic_round(jax.random.key(0), x, dtype),
    "split_f32": lambda x, dtype=BF16: formats.split_f32(x),
}
NO_FLOAT32 = {
    "bfloat16[3]": jnp.ones(3, BF16),
    "float16[2, 1]": jnp.ones((2, 1), F16),
    "int32[2]": jnp.arange(2, dtype=jnp.int32),
    "float64[]": np.ones(()),  # float32 by the time that JAX has it, but not with 64-bit types
}
OF_ROUNDINGS = [
    *[
        (
            given(ROUND[name], ONES, dtype),
            f"`{name}` knows the dtypes bfloat16, float16 and float32, but got {np.dtype(dtype)}.",
        )
        for name in ("round_to", "stochastic_round")
        for dtype in ("float64", "int16", jnp.float8_e4m3fn, jnp.complex64)
    ],
    *[
        (given(call, overflow="saturate"), "must be one of ('infinite', 'largest'), but got 'saturate'.")
        for call in (given(formats.round_to, ONES, BF16), given(formats.split_f32, ONES))
    ],
]
TYPES_OF_ROUNDINGS = [
    *[
        (given(call, x, BF16), f"`{name}` needs a float32 `x`, but got {shown}.")
        for name, call in ROUND.items()
        for shown, x in NO_FLOAT32.items()
    ],
    (given(formats.join_f32, jnp.ones(1, F16), jnp.zeros(1, np.uint16)), "but got float16 and uint16."),
    (given(formats.join_f32, jnp.ones(1, BF16), jnp.zeros(1, np.int16)), "but got bfloat16 and int16."),
]


VALUES = [*OF_POLICIES, *OF_LOSS_SCALES, *OF_GRADIENTS, *OF_ROUNDINGS]
TYPES = [*TYPES_OF_POLICIES, *TYPES_OF_LOSS_SCALES, *TYPES_OF_GRADIENTS, *TYPES_OF_ROUNDINGS]
REFUSED = [(ValueError, *row) for row in VALUES] + [(TypeError, *row) for row in TYPES]


@pytest.mark.parametrize(("error", "call", "text"), REFUSED)
def test_a_wrong_call_says_what_is_wrong(error, call, text):
    with jax.enable_x64("float64[]" in text or jax.config.jax_enable_x64), pytest.raises(error) as raised:
        call()
    assert text in str(raised.value)


def test_users_of_jmp_catch_an_assertion_error():
    with pytest.raises(AssertionError, match="expected boolean scalar"):
        mpx.select_tree(jnp.int32(1), ONES, ONES)
