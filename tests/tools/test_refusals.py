"""What tools refuse: the call, the error, and the text that says what to do."""

import functools
import math

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import mpx
import mpx.plot
from mpx import monitor
from mpx.monitor import fates
from mpx.tools.program import target_devices
from mpx.tools.program.text import parse

ONES = jnp.ones((16, 16), jnp.float32)
GRADS = {
    "layers": [{"w": jnp.float32([1e-10, 1.0])}, {"w": jnp.float32([1e-10] * 2)}],
    "norm": jnp.ones(2),
}
loss_fn = lambda w, x: jnp.sum(x @ w)
in_jit = lambda call: lambda: jax.jit(lambda x: call(x))(jnp.ones(2))


def mesh(**axes):
    return AbstractMesh(
        tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes)
    )


def planned(**change):
    default = {"model": {"w": jnp.ones((6, 4), jnp.float32)}, "tx": optax.sgd(0.1)}
    return lambda: mpx.memory_plan(**default | change)


def call(function, *args, **options):
    return lambda: function(*args, **options)


reported = functools.partial(call, mpx.underflow_report, ONES)
compared = functools.partial(call, mpx.compare_plans, 1000)
step = functools.partial(call, mpx.step_report)


NO_FORMAT = r"`\w+`: `dtype` must be .*, but got"
NO_MODELS = [
    lambda: {"ids": jnp.arange(3)},
    lambda: None,
    {},
    "gpt2",
    {"w": jnp.ones((0, 3))},
]
NO_SCALES = (3.0, 0.0, -2.0, math.inf)
TWO, TWO_BY_FOUR = mesh(data=2), mesh(data=2, model=4)
REPORT = mpx.underflow_report(jnp.ones(3))

SHARES = (monitor.underflow, monitor.overflow, monitor.lost_updates)


def each(make, given, error, text):
    """Return a row for each wrong argument of a function that makes calls."""
    return [(make(x), error, text) for x in given]


MONITOR = [
    *each(
        lambda x: call(monitor.exponent_histogram, groups=x),
        ("layers", {"a": "b"}),
        ValueError,
        "must be None or 'leaf'",
    ),
    *each(lambda make: call(make, "int8"), SHARES, ValueError, NO_FORMAT),
    (
        call(monitor.lost_updates().update, GRADS, optax.EmptyState()),
        ValueError,
        "needs the parameters",
    ),
    *each(
        lambda x: call(fates.format_of, x, "caller"),
        ("int32", np.float64, None, "bf17"),
        ValueError,
        NO_FORMAT,
    ),
    *each(
        lambda x: reported(loss_scale=x),
        NO_SCALES,
        ValueError,
        "must be a loss scale or a number, a power of two",
    ),
    (in_jit(lambda x: mpx.underflow_report(x).largest), TypeError, "traced|[Tt]racer"),
    (
        lambda: mpx.underflow_report({"ids": jnp.arange(2)}),
        ValueError,
        "the tree has no floating array in it",
    ),
]
PLAN = [
    *each(
        lambda x: planned(model=x),
        (0, 7e9, True),
        ValueError,
        "a number of parameters must be an integer above 0",
    ),
    *each(
        lambda x: planned(model=x),
        NO_MODELS,
        ValueError,
        "there are no floating-point numbers in the model",
    ),
    (
        planned(tx=optax.adamw),
        TypeError,
        "`memory_plan` needs an Optax gradient transformation",
    ),
    (
        planned(gradient_dtype="int32"),
        ValueError,
        "`gradient_dtype` must be a floating-point dtype, or None",
    ),
    (
        planned(mesh="data"),
        TypeError,
        "`mesh` must be a jax.sharding.Mesh, but got str",
    ),
    (planned(mesh=TWO, axis="batch"), ValueError, "none is called 'batch'"),
    (
        planned(param_specs=P("data")),
        ValueError,
        "`param_specs` was given without a `mesh`",
    ),
    (
        planned(mesh=TWO, param_specs=P("data")),
        ValueError,
        "but parameters are equal along",
    ),
    (
        planned(mesh=TWO_BY_FOUR, param_specs=P("model")),
        ValueError,
        "which does not divide",
    ),
    (
        lambda: planned()().bytes_of("momenta"),
        ValueError,
        "`kind` must be 'parameters', .*but got 'momenta'",
    ),
    (compared(optax.adam, None), TypeError, "`compare_plans` needs an Optax"),
]
PLOT = [
    (
        call(mpx.plot.exponents, mpx.underflow_report(jnp.zeros(3))),
        ValueError,
        "no nonzero finite numbers",
    ),
    (
        call(mpx.plot.exponents, REPORT, dtype="int8"),
        ValueError,
        "`exponents`: `dtype` must be float16, bfloat16",
    ),
]
PROGRAM = [
    (
        step(loss_fn, ONES, ONES, target="h300"),
        ValueError,
        "one of .*h100, .* or None, but got 'h300'",
    ),
    (
        step(jax.jit(loss_fn), ONES, ONES, donate_argnums=0),
        ValueError,
        "Leave `donate_argnums`",
    ),
    (
        step(loss_fn, ONES, ONES, donate_argnums=(0, 2)),
        ValueError,
        "only accepts 2 positional arguments",
    ),
    (lambda: target_devices("h100", 0), ValueError, "`count` must be 1 or more"),
    (lambda: parse("HloModule empty\n"), ValueError, "not a compiled program"),
]


@pytest.mark.parametrize(("call", "error", "text"), [*MONITOR, *PLAN, *PLOT, *PROGRAM])
def test_a_wrong_call_says_what_is_wrong(call, error, text):
    with pytest.raises(error, match=text):
        call()
    assert not plt.get_fignums()  # plots check before they make a figure
