"""The claims of a plan: a value is tagged if and only if a 16-bit dtype represents it.

Every primitive with the rule `follow` has cases here: with representable operands
(results of products), where the plan must say so, and with something else among them
(an argument, a literal, a fill value), where it must not. The values come from the
autocast function, and are held against NumPy's own casts.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import layout
from jax.sharding import NamedSharding

import mpx
from tests.autocast.helpers import (
    BF16,
    F16,
    F32,
    SPLIT,
    WHOLE,
    eqns_of,
    half_dtypes,
    is_representable,
    normal,
    plan_of,
)
from tests.helpers import eight_cpu_devices

ON, OFF = "on", "off"


def full(value):
    return jnp.full((8, 4), value, F32)


def clamped(low, x, high):
    return lax.clamp(F32.type(low), x, F32.type(high))


def rows(*indices):
    return jnp.array(indices, jnp.int32)


def on_devices(fun, *, out=SPLIT, inputs=1):
    """Return a function of the eight devices' rows."""
    return jax.shard_map(
        fun, mesh=eight_cpu_devices(), in_specs=(SPLIT,) * inputs, out_specs=out
    )


def exchanged(a, b):
    exchange = lambda x: lax.all_to_all(x, "data", 1, 0, tiled=True)
    return on_devices(exchange)(lax.concatenate([a, b], 1))


# Functions of one array: the results are representable if it is.
UNARY = {
    "broadcast_in_dim": lambda x: lax.broadcast_in_dim(x, (2, 8, 4), (1, 2)),
    "copy": jnp.copy,
    "dynamic_slice": lambda x: lax.dynamic_slice(
        x, (jnp.int32(1), jnp.int32(9)), (2, 2)
    ),
    "gather": lambda x: x[rows(3, 0, 3)],
    "reshape": lambda x: x.reshape(32),
    "rev": lambda x: lax.rev(x, (0,)),
    "slice": lambda x: x[1:7:2],
    "sort": lambda x: lax.sort(x, dimension=0),
    "split": lambda x: lax.split(x, (2, 6)),
    "squeeze": lambda x: lax.squeeze(x[:1], (0,)),
    "tile": lambda x: lax.tile(x, (2, 1)),
    "top_k": lambda x: lax.top_k(x, 2)[0],
    "transpose": lambda x: x.T,
    "unstack": lambda x: jnp.unstack(x, axis=1),
    "all_gather": on_devices(lambda x: lax.all_gather(x, "data")),
    "all_gather_invariant": on_devices(
        lambda x: lax.all_gather(x, "data", tiled=True, to="invarying"), out=WHOLE
    ),
    "ppermute": on_devices(lambda x: lax.ppermute(x, "data", [(0, 1)])),
    "pmax": on_devices(lambda x: lax.pmax(x, "data"), out=WHOLE),
    "pmin": on_devices(lambda x: lax.pmin(x, "data"), out=WHOLE),
    "sharding_constraint": lambda x: lax.with_sharding_constraint(
        x, NamedSharding(eight_cpu_devices(), SPLIT)
    ),
    "layout_constraint": lambda x: layout.with_layout_constraint(
        x, layout.Layout((1, 0))
    ),
    "name": lambda x: checkpoint_name(x, "x"),
    "stop_gradient": lax.stop_gradient,
    "cummax": lax.cummax,
    "cummin": lax.cummin,
    "reduce_max": lambda x: x.max(1),
    "reduce_min": lambda x: x.min(1),
    "reduce_window_max": lambda x: lax.reduce_window(
        x, -jnp.inf, lax.max, (2, 2), (1, 1), "SAME"
    ),
    "reduce_window_min": lambda x: lax.reduce_window(
        x, jnp.inf, lax.min, (2, 2), (1, 1), "SAME"
    ),
    "abs": jnp.abs,
    "neg": jnp.negative,
}
# Functions of two arrays: the result is representable if both are.
BINARY = {
    "stack": lambda a, b: jnp.stack([a, b]),
    "concatenate": lambda a, b: lax.concatenate([a, b], 0),
    "dynamic_update_slice": lambda a, b: lax.dynamic_update_slice(a, b[:2], (1, 0)),
    "scatter": lambda a, b: a.at[rows(0, 2)].set(b[:2]),
    "select_n": lambda a, b: lax.select_n(
        rows(0, 1, 1, 0, 0, 1, 0, 1)[:, None].astype(bool) & (a == a), a, b
    ),
    "pad": lambda a, b: lax.pad(a, b[0, 0], [(1, 2, 1), (-1, 0, 0)]),
    "all_to_all": exchanged,
    "max": lax.max,
    "min": lax.min,
}
# Functions of a product and a number: the result is representable if the number is.
WITH_A_NUMBER = {
    "broadcast_in_dim": lambda y, v: full(v),
    "clamp": lambda y, v: clamped(v, y, np.inf),
    "concatenate": lambda y, v: lax.concatenate([y, full(v)], 0),
    "gather": lambda y, v: y.at[rows(0, 99)].get(mode="fill", fill_value=v),
    "max": lambda y, v: lax.max(y, F32.type(v)),
    "pad": lambda y, v: lax.pad(y, jnp.float32(v), [(1, 0, 0), (0, 0, 0)]),
    "pvary": lambda y, v: on_devices(
        lambda y: lax.pcast(full(v)[:1], "data", to="varying")
    )(y),
    "scatter": lambda y, v: y.at[rows(0, 2)].set(v),
    "select_n": lambda y, v: lax.select_n(y > 0, y, full(v)),
}
NUMBERS = {"0.5": ON, "nan": ON, "0.1": OFF, str(jnp.finfo(F32).max): OFF}
# Others: of `y` and `z`, results of products, and `u`, an argument in float32, all (8,
# 4). A name, a function, and for each result whether it is representable. The values of
# a case that is not show it.
OTHERS = {
    "gather": [("clipped", lambda y, z, u: y.at[rows(0, 99)].get(mode="clip"), ON)],
    "scatter": [
        ("out of range", lambda y, z, u: y.at[rows(0, 99)].set(z[:2], mode="drop"), ON),
        ("a function", lambda y, z, u: y.at[rows(0, 2)].apply(lambda v: v * 0.1), OFF),
    ],
    "select_n": [
        (
            "three values",
            lambda y, z, u: lax.select_n(jnp.clip(u.astype(jnp.int32), 0, 2), y, z, y),
            ON,
        ),
        (
            "a number",
            lambda y, z, u: lax.select_n(u[0, 0] > 9, F32.type(0.1), y[0, 0]),
            OFF,
        ),
    ],
    "sort": [
        (
            "values by argument",
            lambda y, z, u: lax.sort((u, y), dimension=0, num_keys=1),
            (OFF, ON),
        ),
        (
            "argument by truth",
            lambda y, z, u: lax.sort((u > 0, u, z), dimension=0, num_keys=1)[1:],
            (OFF, ON),
        ),
    ],
    "device_put": [
        (
            "two",
            lambda y, z, u: jax.device_put((y, u), jax.devices("cpu")[0]),
            (ON, OFF),
        )
    ],
    "convert_element_type": [
        ("truth values", lambda y, z, u: (y > 0).astype(F32), ON),
        (
            "whole numbers",
            lambda y, z, u: (lax.iota(jnp.int32, 4) + 2047 * 257).astype(F32),
            OFF,
        ),
    ],
    "optimization_barrier": [
        ("three", lambda y, z, u: lax.optimization_barrier((y, u, z)), (ON, OFF, ON))
    ],
    "clamp": [
        (
            "values",
            lambda y, z, u: lax.clamp(jnp.minimum(y, z), y, jnp.maximum(y, z)),
            ON,
        ),
        ("an argument", lambda y, z, u: lax.clamp(u, y, full(jnp.inf)), OFF),
    ],
    # Numbers that no 16-bit format has: up to 2**17 and with a fraction.
    "ceil": [
        ("values", lambda y, z, u: lax.ceil(y), ON),
        ("argument", lambda y, z, u: lax.ceil(1e5 * u), OFF),
    ],
    "floor": [
        ("values", lambda y, z, u: lax.floor(y), ON),
        ("argument", lambda y, z, u: lax.floor(1e5 * u), OFF),
    ],
    "round": [
        (
            "values to even",
            lambda y, z, u: lax.round(y, lax.RoundingMethod.TO_NEAREST_EVEN),
            ON,
        ),
        ("argument", lambda y, z, u: lax.round(1e5 * u), OFF),
    ],
    "sign": [("values", lambda y, z, u: lax.sign(y), ON)],
}


def cases():
    """Yield the name of a primitive, what it is applied to, a function of `y`, `z` and
    `u`, and its results' places.
    """
    for name, f in UNARY.items():
        yield name, "values", lambda y, z, u, f=f: f(y), ON
        yield name, "argument", lambda y, z, u, f=f: f(u), OFF
    for name, f in BINARY.items():
        yield name, "values", lambda y, z, u, f=f: f(y, z), ON
        yield name, "argument second", lambda y, z, u, f=f: f(y, u), OFF
        yield name, "argument first", lambda y, z, u, f=f: f(u, y), OFF
    for name, f in WITH_A_NUMBER.items():
        for number, lies in NUMBERS.items():
            yield (
                name,
                number,
                lambda y, z, u, f=f, number=number: f(y, float(number)),
                lies,
            )
    for name, others in OTHERS.items():
        for what, fun, lies in others:
            yield name, what, fun, lies


# These have tests of their own, or stand in kernels only.
NOT_HERE = {
    "all_gather_reduced",
    "cotangent_watched",
    "kept_between_passes",
    "pbroadcast",
    "ragged_all_to_all",
    "reshard",
    "roll",
    "rounding_kept",
    "broadcast_to",
}

FLAT = [
    pytest.param(name, fun, lies, id=f"{name}: {what}")
    for name, what, fun, lies in cases()
]


def products(fun):
    """Return a function of weights, rows and an argument that gives `fun` two products
    and the argument.
    """
    return lambda w, x, u: fun(x @ w, (x * 2.0) @ w, u)


def operands():
    return normal(0, 8, 4), normal(1, 8, 8), normal(2, 8, 4)


def claims_and_values(fun, dtype, *args, dtypes=None):
    """Return the claim of the plan about each result, and the result."""
    autocast = mpx.autocast(fun, dtype)
    plan = plan_of(autocast, *args, dtypes=dtypes)
    return [tag.representable_in for tag in plan.out_tags], jax.tree.leaves(
        autocast(*args)
    )


def primitives_of(fun, *args):
    return {eqn.primitive.name for eqn in eqns_of(fun, *args)}


def test_every_primitive_that_follows_has_cases():
    follow = {name for name, rule in mpx.DEFAULT_RULES.items() if rule == "follow"}
    covered = {*UNARY, *BINARY, *WITH_A_NUMBER, *OTHERS}
    assert covered | NOT_HERE == follow
    assert not covered & NOT_HERE


@pytest.mark.parametrize(("primitive", "fun", "lies"), FLAT)
def test_a_value_is_tagged_if_and_only_if_it_is_representable(primitive, fun, lies):
    args = operands()
    assert primitive in primitives_of(products(fun), *args)
    for dtype in (BF16, F16):
        claims, values = claims_and_values(products(fun), dtype, *args)
        expected = lies if isinstance(lies, tuple) else (lies,) * len(values)
        for claim, value, where in zip(claims, values, expected, strict=True):
            assert claim == (dtype if where == ON else None)
            assert is_representable(value, dtype) == (where == ON)


# ---- where tags come from --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [BF16, F16], ids=str)
@half_dtypes
def test_a_view_of_16_bit_values_is_representable_in_their_own_dtype(dtype, own):
    """Arguments, and casts in the function; also through the other 16-bit dtype, which
    rounds.
    """
    fun = lambda a, x: (
        a[:7],
        x.astype(own).astype(F32),
        (x @ x.T).astype(own).astype(F32),
        a.T[1:],
        x,
    )
    a, x = normal(0, 8, 4, dtype=own), normal(1, 4, 8)
    claims, values = claims_and_values(fun, dtype, a, x)
    assert claims == [own, own, own, own, None]
    for value in values[:4]:
        assert is_representable(value, own)


def test_only_float32_results_are_tagged():
    """A tagged value is widened to float32 after it has travelled: a 16-bit result must
    stay what it was traced as.
    """
    asked = lambda w, x: lax.dot_general(
        x, w, (((1,), (0,)), ((), ())), preferred_element_type=BF16
    )
    for fun in (asked, lambda w, x: (x @ w).astype(BF16)):
        for dtype in (BF16, F16):
            plan = plan_of(mpx.autocast(fun, dtype), *operands()[:2])
            assert [tag.representable_in for tag in plan.out_tags] == [None]


def test_an_array_in_the_text_of_a_program_is_representable_if_all_its_numbers_are():
    last = lambda number: np.array([1.0, 0.5, 2.0, number], np.float32)
    fun = lambda x: [jnp.broadcast_to(last(number), x.shape) for number in (0.5, 0.1)]
    jax.config.update("jax_use_simplified_jaxpr_constants", True)
    try:
        tags = plan_of(mpx.autocast(fun, BF16), normal(0, 8, 4)).out_tags
    finally:
        jax.config.update("jax_use_simplified_jaxpr_constants", False)
    assert [tag.representable_in for tag in tags] == [BF16, None]
