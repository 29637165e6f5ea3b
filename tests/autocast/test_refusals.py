"""What `autocast`, `full_precision`, `explain` and `Fp8` refuse: the call, and what the
error says.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpx
from tests.autocast.helpers import normal

X, W = normal(0, 16, 64), normal(1, 64, 32)
given = functools.partial
WAYS = [mpx.Fp8(min_extent=0), mpx.Fp8(min_extent=0, backward="e4m3")]


def product(x, w):
    return x @ w


def norm():
    return nnx.BatchNorm(64, rngs=nnx.Rngs(0))


def squared(model, x):
    return (model(x) ** 2).sum()


def second_derivative(fp8):
    of_x = jax.grad(mpx.autocast(lambda w, x: jnp.sin(x @ w).sum(), fp8), 1)
    return jax.grad(lambda w: (of_x(w, X) ** 2).sum())(W)


VALUES = [
    *[
        (given(mpx.autocast, product, wrong), "`autocast`")
        for wrong in ("int32", np.float64, None, 16, "bf15", jnp.float8_e4m3fn)
    ],
    *[
        (
            given(mpx.autocast, product, "bf16", reduce_dtype=wrong),
            "`reduce_dtype` must be float32, the compute",
        )
        for wrong in ("float16", int)
    ],
    *[
        (
            given(mpx.autocast, product, "bf16", checkpoint=wrong),
            "`checkpoint` must be one of 'dots'",
        )
        for wrong in ("dot", "dots_saveable", 3)
    ],
    *[
        (given(mpx.autocast, product, "bf16", rules=mpx.DEFAULT_RULES | rules), text)
        for rules, text in [
            ({"dot_genral": "keep"}, "no primitive of jax is called 'dot_genral'"),
            ({"dot_general": "lowered"}, "can be narrow or follow or keep"),
            ({"scan": "narrow"}, "can be enter or keep"),
            ({"dynamic_slice": "narrow"}, "can be follow or keep"),
            ({"custom_jvp_call": "narrow"}, "can be follow or keep"),
        ]
    ],
    *[
        (given(mpx.Fp8, **options), text)
        for options, text in [
            ({"forward": "bf16"}, "`forward` must be 'e4m3' or 'e5m2', but got 'bf16'"),
            ({"backward": 8}, "`backward` must be 'e4m3' or 'e5m2'"),
            ({"min_extent": -1}, "`min_extent` must be an integer of at least 0"),
        ]
    ],
    (
        given(mpx.explain, product),
        r"`mpx.explain\(fun, 'bf16'\)`, or `--policy bf16` on the command line",
    ),
    (
        given(mpx.explain, mpx.autocast(product, "bf16"), "bf16"),
        "takes no policy for a function that `auto",
    ),
    (
        lambda: mpx.value_and_grad(mpx.autocast(squared, "bf16"))(norm(), X),
        (
            r"lose the .*transform=nnx\.value_and.*: mean of the BatchNorm, var of the"
            r" BatchNorm\."
        ),
    ),
]
TYPES = [
    (given(mpx.autocast, X, "bf16"), "`autocast` needs a function, but got Array"),
    (given(mpx.full_precision, 3), "`full_precision` needs a function, but got int"),
    *[
        (given(second_derivative, way), "put autocast around the inner gradient")
        for way in WAYS
    ],
]
REFUSED = [(ValueError, *row) for row in VALUES] + [(TypeError, *row) for row in TYPES]


@pytest.mark.parametrize(("error", "call", "text"), REFUSED)
def test_a_wrong_call_says_what_is_wrong(error, call, text):
    with pytest.raises(error, match=text):
        call()
