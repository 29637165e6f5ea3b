"""What transformations refuse: the call, the error, and the text that says what to do."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx

pytestmark = pytest.mark.optax_promotion

ADAM, SGD, BF16 = optax.adam(1e-3), optax.sgd(0.1), jnp.bfloat16
W = {"w": jnp.ones(2, BF16)}
MATRIX = {"kernel": jnp.ones((64, 80), jnp.float32), "bias": jnp.zeros(80, jnp.float32)}
EIGHT_BITS, SIGNED = mpx.Blockwise8bit(), mpx.Blockwise8bit(signed=True)
FOUR_BITS = mpx.Blockwise4bit()
WRAPPERS = mpx.upcast, mpx.master_weights, mpx.loss_scaling
ROUNDING = mpx.stochastic_rounding(jax.random.key(0))
KEEPERS = (mpx.kahan_summation(),)
OF_ANY_STATE = mpx.master_weights(SGD), mpx.loss_scaling(SGD), ROUNDING, *KEEPERS


def with_64_bits(call, on=True):
    def run():
        with jax.enable_x64(on):
            call()

    return run


def low(formats, rule=ADAM, params=MATRIX, **options):
    return lambda: mpx.low_precision_state(rule, formats, **options).init(params)


def updated(tx, grads, params=W, state=None):
    return lambda: tx.update(
        grads, tx.init(params or W) if state is None else state, params
    )


def other_formats(before, after, **options):
    make = lambda formats, **options: mpx.low_precision_state(ADAM, formats, **options)
    return lambda: make(after, **options).update(
        MATRIX, make(before).init(MATRIX), MATRIX
    )


def rule_of(state, new):
    """Return a rule with this state, and another one after an update."""
    return optax.GradientTransformation(
        lambda params: state, lambda updates, _, params=None: (updates, new)
    )


VALUES = [
    *[
        (
            lambda given=given: mpx.master_weights(SGD, storage=given),
            "`storage` must be 'full', 'split' or 'split24'",
        )
        for given in ("halves", None)
    ],
    (
        with_64_bits(
            lambda: mpx.master_weights(SGD, dtype=jnp.float64, storage="split")
        ),
        "split masters are float32, but got `dtype` float64",
    ),
    (
        lambda: mpx.master_weights(SGD, storage="split", updates_in_param_dtype=True),
        "`updates_in_param_dtype` needs full masters, but `storage` is 'split'",
    ),
    (
        lambda: mpx.master_weights(SGD, storage="split", key=jax.random.key(0)),
        "a `key` was given, but under 'split' nothing is rounded at random",
    ),
    (
        with_64_bits(lambda: mpx.master_weights(SGD, dtype=jnp.float64), False),
        "float64 needs 64-bit mode; set the environment variable JAX_ENABLE_X64=1",
    ),
    (
        with_64_bits(lambda: mpx.master_weights(SGD, dtype=jnp.float64).init(W)),
        r"rounded twice\. .*\n  'w': bfloat16\[2\]",
    ),
    *[
        (
            lambda dtype=dtype: mpx.upcast(SGD, dtype),
            "`dtype` must be float32 or float64, but got",
        )
        for dtype in (np.int32, BF16)
    ],
    (
        lambda: mpx.stochastic_rounding(jax.random.split(jax.random.key(0), 3)),
        r"one key, but got \(3,\)",
    ),
    (
        lambda: mpx.kahan_summation(jnp.int8),
        "must be bfloat16, float16 or float32, but got int8",
    ),
    *[
        (
            updated(tx, jnp.ones(2), None, tx.init(W)),
            r"call `update\(grads, state, params\)`",
        )
        for tx in (mpx.master_weights(SGD), *KEEPERS)
    ],
    *[
        (
            updated(tx, {"w": jnp.ones((3, 1))}),
            r"'w': float..\[3, 1\], but the parameter is \w+\[2\]",
        )
        for tx in (mpx.master_weights(SGD), *KEEPERS)
    ],
    *[
        (
            updated(tx, {"w": None}),
            r"1 of 1 parameters have no gradient(.|\n)*'w': None",
        )
        for tx in (mpx.master_weights(SGD), mpx.upcast(optax.adam(1.0)))
    ],
    (
        updated(mpx.loss_scaling(optax.adam(1.0)), {"w": jnp.ones((5, 2))}),
        (
            r"`loss_scaling`: .*Is a mean over examples missing\?\n  'w': float..\[5,"
            r" 2\], but the parameter is bf"
        ),
    ),
    (
        updated(mpx.kahan_summation("f32"), W, W, mpx.kahan_summation().init(W)),
        r"use `convert_state`(.|\n)*but the state keeps bfloat16\[2\]",
    ),
    (low({}), "`formats` is empty"),
    (low({"(": "bf16"}), r"'\(' is not a regular expression"),
    (low({0: "bf16"}), "0 is not a regular expression"),
    *[
        (low({"mu": given}), "must be bfloat16, float16, float32 or a `StateF")
        for given in ("int8", "f64", None, "fp8")
    ],
    (low({"mu": mpx.Blockwise8bit}), r"Make one: `Blockwise8bit\(\)`"),
    (
        low({"mu": "bf16"}, rounding="up"),
        r"must be 'nearest' or 'stochastic', but got 'up'",
    ),
    (low({"mu": "bf16"}, key=0), "rounding to nearest has no use for it"),
    (
        low({"mu": "bf16"}, min_size=-1),
        "`min_size` must be a number of elements, but got -1",
    ),
    (
        low({"mu": "f32"}, rounding="stochastic", key=jax.random.key(0)),
        "every format is float32",
    ),
    (
        low({"mu": "f32", "nu": "bf16"}, optax.adam(1e-3, mu_dtype=BF16)),
        "stored in 16 bits by the rule itself.*`mu_dtype`",
    ),
    (
        low(
            {"mu": "bf16"},
            optax.chain(mpx.low_precision_state(ADAM, {"nu": EIGHT_BITS})),
        ),
        "stores its state in few bits already",
    ),
    (
        low({"mu": "f16", "nu": "f16"}),
        r"second moments, which float16 (.|\n)*'0/nu/kernel': float32\[64, 80\]",
    ),
    (
        updated(
            mpx.low_precision_state(ADAM, {"mu": EIGHT_BITS}),
            MATRIX,
            MATRIX,
            low({"mu": EIGHT_BITS}, rounding="nearest")(),
        ),
        "this state has no key, .* Convert it: `mpx.convert_state",
    ),
    (
        low({"mu": FOUR_BITS}, rounding="nearest"),
        "training fails if `Blockwise4bit` is rounded to nearest. Leave `rounding` out",
    ),
    (low({"nu": FOUR_BITS}), "many would be zero in 4 bits"),
    (
        low(
            {"hidden": FOUR_BITS},
            rule_of({"hidden": MATRIX}, None),
        ),
        "may be second moments",
    ),
    (
        lambda: mpx.Blockwise4bit(100),
        "`Blockwise4bit`: `block_size` must be a power of two from 16",
    ),
    (
        with_64_bits(lambda: low({"mu": "bf16"}, params={"w": jnp.ones(4096)})()),
        r"are float64(.|\n)*'0/mu/w': float64\[4096\]",
    ),
    *[
        (
            low({pattern: "bf16"}, rule),
            f"'{pattern}' matches no floating-point array .*: {listed}",
        )
        for rule, pattern, listed in [
            (ADAM, "momentum", "0/mu/bias, 0/mu/kernel, 0/nu/bias, 0/nu/kernel"),
            (ADAM, "0/count", "0/mu/bias"),  # integers and scalars are never touched
            (optax.sgd(1e-3), "mu", r"\(none\)"),
            (rule_of({"accumulator": MATRIX}, None), "mu", "accumulator/bias"),
        ]
    ],
    (
        low({"momentum": "bf16"}, params={f"w{i}": jnp.ones(2) for i in range(30)}),
        "and 40 more",
    ),
    (
        low({"mu": "bf16", "mu/kernel": "f32"}),
        "'mu/kernel' decides about no leaf, because others before it match",
    ),
    *[
        (other_formats(before, after), rf"Use those, or call `init`(.|\n)*'0/{text}")
        for before, after, text in [
            (
                {"mu": "bf16"},
                {"mu": EIGHT_BITS},
                "mu/kernel': stored as bfloat16, but the format is Blockwise8bit",
            ),
            (
                {"mu": EIGHT_BITS},
                {"mu": "bf16"},
                "mu/kernel': stored as .*signed=True.*, but the format is bfloat16",
            ),
            (
                {"nu": EIGHT_BITS},
                {"nu": SIGNED},
                "nu/kernel': stored as Blockwise8bit.*signed=False",
            ),
            (
                {"mu|nu": "bf16"},
                {"mu": "bf16"},
                "nu/kernel': stored as bfloat16, but the format is the rule's own",
            ),
        ]
    ],
    (
        other_formats({"mu": "bf16"}, {"mu": "bf16"}, min_size=10**6),
        "another `min_size`",
    ),
]
TYPES = [
    *[
        (lambda wrap=wrap: wrap(1e-3), r"transformation, but got float\.$")
        for wrap in WRAPPERS
    ],
    *[
        (lambda wrap=wrap: wrap(optax.adamw), r"Call it with its settings first")
        for wrap in WRAPPERS
    ],
    (
        lambda: mpx.stochastic_rounding(0),
        r"needs a PRNG key such as `jax.random.key\(0\)`, but got 0",
    ),
    (
        lambda: mpx.stochastic_rounding(jnp.ones(2, jnp.float32)),
        "but got an array of float32",
    ),
    (
        updated(mpx.loss_scaling(SGD), {"w": jnp.ones(2, jnp.int32)}),
        "needs floating-point gradients",
    ),
    (
        updated(mpx.upcast(SGD), {"w": np.zeros(2, bool)}),
        r"1 of 1 .*\n  'w': bool\[2\]",
    ),
    (
        updated(mpx.upcast(SGD), {"w": np.zeros(2, jax.dtypes.float0)}),
        r"Differentiate the floating .*\n  'w': .*float0",
    ),
    (
        updated(mpx.loss_scaling(optax.adam(1.0)), {"w": jnp.ones((5, 2))}, None),
        r"changed its state at 'inner_state/0/mu/w' from \w+\[2\] to \w+\[5, 2\]",
    ),
    *[
        (
            updated(tx, jnp.ones(2), W["w"], SGD.init(W)),
            r"`\w+State` that its `init` made, but got tuple",
        )
        for tx in OF_ANY_STATE
    ],
    (
        updated(
            mpx.loss_scaling(SGD),
            W,
            W,
            mpx.loss_scaling(SGD, mpx.StaticLossScale(1.0)).init(W),
        ),
        "`loss_scaling` needs the `DynamicLossScale` .* but got Static",
    ),
    (
        updated(
            mpx.upcast(rule_of({"count": jnp.int32(0)}, {"count": jnp.float32(0)})), W
        ),
        r"state at 'count' from int32\[\] to float32\[\]\.",
    ),
    (
        updated(mpx.upcast(rule_of({"m": jnp.ones(2)}, {"m": jnp.ones((4, 2))})), W),
        r"state at 'm' from float..\[2\] to float..\[4, 2\]\. Is a mean of gradients",
    ),
    (low(None), "`formats` must map patterns to formats"),
    (low({"mu": "bf16"}, rounding="stochastic", key=3), "needs a PRNG key such as"),
    (
        low({"mu": "bf16"}, optax.adam),
        "needs an Optax gradient transformation.*Call it with its settings",
    ),
]


REFUSED = [(ValueError, *row) for row in VALUES] + [(TypeError, *row) for row in TYPES]


@pytest.mark.parametrize(("error", "call", "text"), REFUSED)
def test_a_wrong_call_says_what_is_wrong(error, call, text):
    with jax.numpy_rank_promotion("allow"), pytest.raises(error, match=text):
        call()
