"""What tools refuse: the call, the error, and the text that says what to do."""

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
from mpx import doctor, monitor
from mpx.tools.advise.advise import advise
from mpx.tools.monitor import exponents
from mpx.tools.plan import PrecisionRecipe
from mpx.tools.program import target_devices
from mpx.tools.program.text import parse

BF16 = mpx.get_policy("params=bf16,compute=bf16,output=f32")
ONES = jnp.ones((16, 16), jnp.float32)
W = {"w": np.full(2, 1.001, np.float32)}
GRADS = {"layers": [{"w": jnp.float32([1e-10, 1.0])}, {"w": jnp.float32([1e-10] * 2)}], "norm": jnp.ones(2)}
loss_fn = lambda w, x: jnp.sum(x @ w)
in_jit = lambda call: lambda: jax.jit(lambda x: call(x))(jnp.ones(2))
SMALL = mpx.Fp8(min_extent=0)


def mesh(**axes):
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def advised(**change):
    scalar = lambda params, x: jnp.sum(params["w"] * x)
    arguments = {"loss_fn": scalar, "params": W, "batch": jnp.ones(2, jnp.float32), "policy": BF16} | change
    return lambda: advise(**arguments)


def planned(**change):
    default = {"model": {"w": jnp.ones((6, 4), jnp.float32)}, "tx": optax.sgd(0.1)}
    return lambda: mpx.memory_plan(**default | change)


def compared(rule, recipes):
    return lambda: mpx.compare_plans(1000, rule, recipes)


def fitted(bytes_of=lambda n: n, memory=10, **options):
    return lambda: mpx.largest_that_fits(bytes_of, memory, **options)


def reported(**options):
    return lambda: mpx.underflow_report(jnp.ones(2), **options)


def curves(given, **options):
    return lambda: mpx.plot.losses(given, **options)


def histogram(given, **options):
    return lambda: mpx.plot.exponents(given, **options)


def step(*args, **options):
    return lambda: mpx.step_report(*args, **options)


def grouped(make, groups):
    return lambda: monitor.watch({"it": make(groups=groups)}).init(GRADS)


MEASURES = (
    lambda **groups: monitor.underflow("f16", **groups),
    lambda **groups: monitor.exponent_histogram(**groups),
    lambda **groups: monitor.lost_updates("bf16", **groups),
    lambda **groups: monitor.update_to_weight_ratio(**groups),
)
NO_LEAF = r"no leaf is in the group 'embed': 'embed\|layers'. .* has the leaf: layers/0/w, layers/1/w, norm"
NO_GROUPS = r"must be None, 'leaf' or a dictionary|is not a regular expression"
NO_FORMAT = r"`\w+`: `dtype` must be .*, but got"
NO_MODELS = [lambda: {"ids": jnp.arange(3)}, lambda: None, {}, "gpt2", {"w": jnp.ones((0, 3))}]
TWO, TWO_BY_FOUR = mesh(data=2), mesh(data=2, model=4)
REPORT = mpx.underflow_report(jnp.ones(3))
PLANS = lambda **options: mpx.plot.memory(mpx.compare_plans(2**10, recipes=None), **options)

MONITOR = [
    *[(grouped(make, {"rest": "", "embed": "embed|layers"}), ValueError, NO_LEAF) for make in MEASURES],
    *[
        (grouped(make, groups), ValueError, NO_GROUPS)
        for make in MEASURES
        for groups in ("layers", ["w"], {"a": 1}, {"a": "("})
    ],
    *[
        (lambda make=make: make("int8"), ValueError, NO_FORMAT)
        for make in (monitor.underflow, monitor.becomes_subnormal, monitor.overflow, monitor.lost_updates)
    ],
    *[
        (lambda make=make: make().update(GRADS, optax.EmptyState()), ValueError, "needs the parameters: call `update")
        for make in MEASURES[2:]
    ],
    *[
        (lambda given=given: monitor.watch(given), TypeError, "`watch` needs a dictionary from names to measures")
        for given in (None, {"a": 1}, [monitor.underflow("f16")], monitor.underflow("f16"))
    ],
    *[
        (
            lambda given=given: exponents.range_of(given, "caller"),
            ValueError,
            "`caller`: `dtype` must be one of f16, bf16,",
        )
        for given in ("int32", np.float64, None, "bf17")
    ],
    (lambda: monitor.fp8_report(loss_fn), ValueError, "`fp8_report` needs a policy or 'fp8'"),
    (lambda: monitor.fp8_report(mpx.autocast(loss_fn, "fp8"), "fp8"), ValueError, "this one has its own"),
    (lambda: monitor.fp8_report(loss_fn, "bf16"), ValueError, r"needs .fp8. or an `mpx\.Fp8`, but got .bf16."),
    (lambda: jax.jit(monitor.fp8_report(loss_fn, SMALL))(ONES, ONES), TypeError, r"call it outside of `jax\.jit`"),
    (in_jit(lambda x: mpx.underflow_report(x).largest), TypeError, "traced|[Tt]racer"),
    (lambda: mpx.underflow_report({"ids": jnp.arange(2)}), ValueError, "the tree has no floating array in it"),
    (reported(dtype="int8"), ValueError, "`underflow_report`: `dtype` must be one of f16"),
    *[
        (reported(headroom=given), ValueError, "`headroom` must be an integer of 0 or more, but got")
        for given in (-1, 1.5, True)
    ],
    *[
        (reported(loss_scale=given), ValueError, "must be a loss scale or a number, a power of two")
        for given in (3.0, 0.0, -2.0, math.inf, "2", None, np.ones(2))
    ],
]
ADVISE = [
    (advised(loss_fn=3), TypeError, "needs a function of parameters and a batch, but got int"),
    (advised(loss_fn=lambda p, x: (jnp.sum(p["w"]), x)), TypeError, "only defined for scalar-output functions"),
    (advised(policy=16), TypeError, "`policy` must be a Policy or the string of one, but got int"),
    (advised(policy=mpx.Policy("f32", "f64", "f32")), ValueError, "computes in bfloat16, float16 or float32"),
    (advised(bound=0.0), ValueError, "`bound` must be a relative error above 0, such as 1e-2, but got 0.0"),
    (advised(bound=float("nan")), ValueError, "but got nan"),
    (advised(bound=True), ValueError, "but got True"),
    (advised(groups="layers"), ValueError, "`groups` must be 'leaves', 'patterns', .* but got 'layers'"),
    (advised(loss_scale=1024.0), TypeError, "`advise`: `loss_scale` must be a loss scale such as .* but got float"),
    (advised(loss_scale=mpx.StaticLossScale(1000.0)), ValueError, "powers? of two"),
    (advised(batch=[]), ValueError, "got an empty list"),
    (advised(batch=[jnp.ones(2), jnp.ones(3)]), ValueError, "needs batches of the same structure, shapes and dtypes"),
    (advised(params={"w": jnp.arange(2)}), ValueError, "no floating leaves"),
    (advised(params=mpx.cast_to_half(W)), ValueError, r"needs float32 parameters.*master_params.* for w: float16\[2\]"),
    (in_jit(lambda x: advised(params={"w": x})().bound), TypeError, "concrete"),
    (advised(policy="f32"), ValueError, "the policy 'p=f.*,c=f.*,o=f.*' narrows nothing"),
    (advised(policy="c=bf16"), ValueError, "narrows nothing.* all 0 contractions"),
    (advised(params={"w": np.float32([1.0, np.inf])}), ValueError, "loss of batch 0 is inf"),
    (
        advised(loss_fn=lambda p, x: jnp.sum(jnp.sqrt(p["w"] * 0))),
        ValueError,
        "2 numbers of its gradient are infinite",
    ),
]
PLAN = [
    (planned(model=0), ValueError, "`memory_plan`: a number of parameters must be an integer above 0, but got 0"),
    (planned(model=7e9), TypeError, "a number of parameters must be an integer above 0, but got 7000000000.0"),
    (planned(model=True), TypeError, "must be an integer above 0, but got True"),
    *[(planned(model=given), ValueError, "there are no floating-point numbers in the model") for given in NO_MODELS],
    (planned(tx=optax.adamw), TypeError, "`memory_plan` needs an Optax gradient transformation"),
    (planned(policy=16), TypeError, "`policy` must be a Policy or the string of one, but got int"),
    (planned(policy="params=bf15"), ValueError, "Unknown dtype 'bf15'"),
    (planned(gradient_dtype="int32"), ValueError, "`gradient_dtype` must be a floating-point dtype or None"),
    (planned(gradient_dtype="half a byte"), ValueError, "but got 'half a byte'"),
    (planned(mesh="data"), TypeError, "`mesh` must be a jax.sharding.Mesh, but got str"),
    (planned(mesh="data", axis=None), TypeError, "`mesh` must be a jax.sharding.Mesh, but got str"),
    (planned(mesh=TWO, axis="batch"), ValueError, "none is called 'batch'"),
    (planned(param_specs=P("data")), ValueError, "`param_specs` was given without a `mesh`"),
    (planned(mesh=TWO, param_specs=P("data")), ValueError, "may name axes of the mesh"),
    (
        planned(mesh=TWO_BY_FOUR, param_specs=P("model")),
        ValueError,
        "partitioned 4 times, but the dimension size is 6",
    ),
    (
        lambda: planned()().largest_model("80GB"),
        ValueError,
        "`MemoryPlan.largest_model`: `memory_bytes` must be a number",
    ),
    (lambda: planned()().bytes_of("momenta"), ValueError, r"`kind` must be one of \('parameters', .*but got 'momenta'"),
    (compared(None, "f32"), TypeError, "`recipes` must map names to `PrecisionRecipe`s, but got 'f32'"),
    (compared(None, {"f32": optax.sgd(0.1)}), TypeError, "`recipes` must map names to `PrecisionRecipe`s"),
    (compared(None, [PrecisionRecipe("f32", lambda rule: rule)]), TypeError, "`recipes` must map names"),
    (compared(None, {}), ValueError, "`compare_plans`: `recipes` is empty"),
    (compared(optax.adam, None), TypeError, "`compare_plans` needs an Optax gradient transformation"),
    *[
        (fitted(resolution=given), ValueError, "`largest_that_fits`: `resolution` must be from 0 to below 1")
        for given in (-0.1, 1, None, "3%")
    ],
    *[
        (fitted(memory=given), ValueError, "`largest_that_fits`: `memory_bytes` must be a number above 0, such as 80e9")
        for given in (0, -1, math.nan, math.inf, None, "1e9", True)
    ],
    *[
        (fitted(start=given), ValueError, "`largest_that_fits`: `start` must be an integer above 0")
        for given in (0, -3, 1.5, True)
    ],
    (fitted(lambda n: 1), ValueError, "Does `bytes_of` depend on its argument"),
]
PLOT = [
    (curves([1.0]), TypeError, "`losses`: `curves` must map names to arrays, but got list"),
    (curves({}), ValueError, "`curves` must hold 1 to 20 curves, .* but got 0"),
    (curves({str(i): [1.0] for i in range(21)}), ValueError, "but got 21"),
    (curves({"a": []}), ValueError, r"needs a number for each step, but 'a' has the shape \(0,\)"),
    (curves({"b": [[1.0]]}), ValueError, r"'b' has the shape \(1, 1\)"),
    (curves({"a": [1.0]}, steps=[1, 2]), ValueError, r"`steps` has the shape \(2,\), but 'a' has \(1,\)"),
    (curves({"a": [1.0]}, reference=[[[1.0]]]), ValueError, r"'f32' has the shape \(1, 1, 1\)"),
    (curves({"a": [1.0]}, steps=[1], reference=np.ones((2, 3))), ValueError, r"but 'f32' has \(2, 3\)"),
    (lambda: mpx.plot.memory(5), TypeError, "needs what `mpx.memory_plan` or `mpx.compare_plans` returns, .* got 5"),
    (lambda: mpx.plot.memory({}), ValueError, "at least one plan"),
    (lambda: PLANS(unit="MB"), ValueError, r"`unit` must be one of .*, but got 'MB'"),
    (lambda: mpx.plot.traffic(5), TypeError, "needs what `mpx.step_report` or .* returns, .* got 5"),
    (lambda: mpx.plot.traffic({}), ValueError, "at least one report"),
    (histogram({}), TypeError, "but got dict. Of a histogram by groups"),
    (histogram(mpx.underflow_report(jnp.zeros(3))), ValueError, "no nonzero finite numbers"),
    (histogram(REPORT, formats=["int8"]), ValueError, "`exponents`: `dtype` must be one of f16"),
    (histogram(REPORT, scale=3), ValueError, "`scale` must be a number .* power of two, but got 3"),
    (histogram(REPORT, scale=[2, 4]), ValueError, r"but got \[2, 4\]"),
]
PROGRAM = [
    (step(1), TypeError, "needs a function, but got int"),
    (
        step(loss_fn, ONES, ONES, target="h300"),
        ValueError,
        "one of a100, h100, h200, b200, v5e, v6e or None, but got 'h300'",
    ),
    (
        step(jax.jit(loss_fn), ONES, ONES, donate_argnums=0),
        ValueError,
        r"comes from `jax.jit` .* Leave `donate_argnums`",
    ),
    (step(loss_fn, ONES, ONES, donate_argnums=(0, 2)), ValueError, r"2 arguments, so none at \[2\] can be donated"),
    (lambda: target_devices("h100", 0), ValueError, "`count` must be 1 or more"),
    (lambda: parse("HloModule empty\n"), ValueError, "not a compiled program"),
    *[
        (
            lambda given=given: doctor.examine(seconds=given),
            ValueError,
            "`seconds` must be a finite number above 0, but",
        )
        for given in (0, -1, math.nan, math.inf)
    ],
]


@pytest.mark.parametrize(("call", "error", "text"), [*MONITOR, *ADVISE, *PLAN, *PLOT, *PROGRAM])
def test_a_wrong_call_says_what_is_wrong(call, error, text):
    with pytest.raises(error, match=text):
        call()
    assert not plt.get_fignums()  # plots check before they make a figure
