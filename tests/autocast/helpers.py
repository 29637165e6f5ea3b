"""Helpers of the tests of `autocast`: programs read as data, and autocast done by hand."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

import mpx
from mpx._autocast.differentiation import View, differentiating
from mpx._autocast.transform import autocast_of
from mpx._stored.state_format import FLOAT32
from tests.helpers import BF16, F16, F32, all_eqns, eight_cpu_devices

SPLIT, WHOLE = PartitionSpec("data"), PartitionSpec()
CONTRACTIONS = ("conv_general_dilated", "dot_general", "ragged_dot_general")

half_dtypes = pytest.mark.parametrize("dtype", [BF16, F16], ids=str)


# ---- autocast by hand


def narrow_dot(dtype):
    """Return a matrix product as autocast runs it: every cast is written out."""
    return lambda a, b: (a.astype(dtype) @ b.astype(dtype)).astype(F32)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def rounding_cotangent(x, dtype):
    """Return a sum of a product and a bias, whose tangent and cotangent are rounded, as
    autocast does it.
    """
    return x


@rounding_cotangent.defjvp
def _(dtype, primals, tangents):
    return primals[0], tangents[0].astype(dtype).astype(F32)


def exact_jit(fun):
    """Compile without the liberty to leave out roundings to 16 bits, which CPUs use
    around products too.

    Optimizations that only take time here are off.
    """
    return jax.jit(
        fun,
        compiler_options={
            "xla_allow_excess_precision": False,
            "xla_backend_optimization_level": 0,
        },
    )


def rounded(x, dtype):
    with np.errstate(all="ignore"):
        return np.asarray(x, F32).astype(dtype).astype(F32)


def is_representable(x, dtype):
    """Return whether a 16-bit dtype has all values of a float32 array; it has NaN."""
    x = np.asarray(x)
    assert x.dtype == F32
    return bool(((rounded(x, dtype) == x) | np.isnan(x)).all())


def normal(seed, *shape, dtype=F32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def integers(seed, *shape, dtype=F32, low=-4, high=5):
    """Return seeded small integers, whose sums and products are exact."""
    return jnp.asarray(np.random.default_rng(seed).integers(low, high, shape), dtype)


# ---- the table of programs: each around a function of a weight and of rows, which returns rows


def stacked(w):
    return jnp.stack([w, w[::-1]])


def on_devices(fun, *, out=SPLIT):
    """Return a function of weights, which all devices hold, and of rows, which are
    divided over eight devices.
    """
    varying = lambda w, x: fun(lax.pcast(w, "data", to="varying"), x)
    return jax.shard_map(
        varying, mesh=eight_cpu_devices(), in_specs=(WHOLE, SPLIT), out_specs=out
    )


def scan(f):
    return lambda w, x: lax.scan(lambda c, _: (f(w, c), None), x, length=2)[0]


def loop(f):
    """Return a loop whose condition computes the function too."""
    goes_on = lambda w: lambda c: (c[0] < 2) & (jnp.abs(f(w, c[1])).sum() < 1e9)
    return lambda w, x: lax.while_loop(
        goes_on(w), lambda c: (c[0] + 1, f(w, c[1])), (0, x)
    )[1]


def branch(f):
    return lambda w, x: lax.cond(
        x.sum() > -1e9, lambda w, x: f(w, x), lambda w, x: f(w[::-1], -x), w, x
    )


def branch_in_scan(f):
    body = lambda c, w: lax.cond(
        c.sum() > -1e9, lambda c: (f(w, c), c), lambda c: (c, f(w, c)), c
    )
    # A result that nobody reads would be left out.
    joined = lambda carry, ys: jnp.concatenate([carry, *ys])
    return lambda w, x: joined(*lax.scan(body, x, stacked(w)))


def checkpoint_of_names(f):
    policy = jax.checkpoint_policies.save_only_these_names("hidden")
    return jax.checkpoint(
        lambda w, x: f(w, checkpoint_name(f(w, x), "hidden")),
        policy=policy,
        prevent_cse=False,
    )


def vmap(f):
    return lambda w, x: jax.vmap(lambda row: f(w, row[None])[0])(x)


PROGRAMS = {
    "a call": lambda f: f,
    "jit": lambda f: jax.jit(lambda w, x: f(w, x)),
    "scan": scan,
    "reversed scan": lambda f: (
        lambda w, x: lax.scan(
            lambda c, w: ((y := f(w, c)), y), x, stacked(w), reverse=True, unroll=2
        )[1][0]
    ),
    "scan of rows": lambda f: (
        lambda w, x: lax.map(lambda x: f(w, x), jnp.stack([-x, x]))[1]
    ),
    "scan of calls": lambda f: (
        lambda w, x: lax.scan(lambda c, w: (jax.jit(f)(w, c), None), x, stacked(w))[0]
    ),
    "scan of a checkpoint": lambda f: jax.jit(
        lambda w, x: lax.scan(
            lambda c, w: (jax.checkpoint(f, prevent_cse=False)(w, c), None),
            x,
            stacked(w),
        )[0]
    ),
    "weight that a loop carries": lambda f: (
        lambda w, x: lax.fori_loop(
            0, 2, lambda i, c: (c[0][::-1], f(c[0], c[1])), (w, x)
        )[1]
    ),
    "while": loop,
    "branch": branch,
    "switch": lambda f: (
        lambda w, x: lax.switch(
            jnp.int32(7), [lambda w, x: x, lambda w, x: f(w[::-1], x), f], w, x
        )
    ),
    "platforms": lambda f: (
        lambda w, x: lax.platform_dependent(
            w, x, cpu=f, default=lambda w, x: f(w[::-1], x)
        )
    ),
    "branch in a scan": branch_in_scan,
    "checkpoint": lambda f: jax.checkpoint(lambda w, x: f(w, f(w, x))),
    "checkpoint of names": checkpoint_of_names,
    "checkpoint of mpx": lambda f: mpx.checkpoint(
        lambda w, x: f(w, f(w, x)), kept=FLOAT32, argnums=1
    ),
    "vmap": vmap,
    "vmap of a scan": lambda f: vmap(scan(f)),
    "shard_map": on_devices,
}
# The exceptions: no gradient; a result that was carried, so that nothing is known of
# it.
FORWARD_ONLY = {"while"}


def with_gradients(fun):
    return lambda *args: (fun(*args), jax.grad(total(fun), argnums=(0, 1))(*args))


# ---- programs as data


def eqns_of(fun, *args, primitive=None):
    """Return all equations of a function's program, of one primitive if it is given."""
    found = all_eqns(jax.make_jaxpr(fun)(*args))
    return [
        eqn for eqn in found if primitive is None or eqn.primitive.name == primitive
    ]


class Contraction(NamedTuple):
    lhs: np.dtype
    rhs: np.dtype
    result: np.dtype


def contractions(fun, *args):
    """Return the dtypes of all contractions of a function's program, nested ones too,
    in order.
    """
    eqns = [eqn for eqn in eqns_of(fun, *args) if eqn.primitive.name in CONTRACTIONS]
    return [
        Contraction(*[v.aval.dtype for v in (*eqn.invars[:2], eqn.outvars[0])])
        for eqn in eqns
    ]


def all_in(dtype):
    return Contraction(*[np.dtype(dtype)] * 3)


def plan_of(fun, *args, dtypes=None):
    """Return the plan of an autocast function; float32 arguments are views of arrays of
    these dtypes, if given.
    """
    leaves, treedef = jax.tree.flatten(args)
    pairs = zip(leaves, dtypes or [None] * len(leaves), strict=True)
    views = [View(x if dtype is None else x.astype(dtype), x) for x, dtype in pairs]
    with differentiating(lambda: None) as current:
        current.views.update(
            {id(view.narrow): view for view in views if view.narrow is not view.wide}
        )
        return (
            autocast_of(fun)
            .trace(treedef.unflatten([view.narrow for view in views]), {})
            .plan
        )


# ---- convolutions


def conv(x, kernel, *, stride=1, groups=1, padding="SAME", **options):
    return lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
        **options,
    )


def total(fun):
    return lambda *args: sum(leaf.sum() for leaf in jax.tree.leaves(fun(*args)))


def autocast_loss(fun, dtype, **options):
    """Return the sum of an autocast function's result: cotangents are 1."""
    return lambda *args: mpx.autocast(fun, dtype, **options)(*args).sum()
