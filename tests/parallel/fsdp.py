"""A training run whose parameters are sharded over all devices, of one process or of
several.

It has split masters, moments in 8 bits, and a loss scale; its second step is skipped. A
second run is by Muon.

python -m tests.parallel.fsdp FOLDER ADDRESS COUNT INDEX
"""

import functools
import json
import pathlib
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp

import mpx
from tests.helpers import stepper, unfused

SHAPES = {"rows": (64, 1024), "columns": (64, 2304), "bias": (512,)}
SPECS = {"rows": P("data"), "columns": P(None, "data"), "bias": P("data")}
STEPS, SAVED = 4, 2  # in all, and when it is saved
POLICY = mpx.get_policy("params=bf16,compute=bf16,output=f32")
MOMENTS = {"mu|nu": mpx.Blockwise8bit()}


class Run(NamedTuple):
    """Parameters and the state of their optimizer."""

    params: Any
    opt_state: Any


@functools.cache
def optimizer():
    rule = mpx.low_precision_state(optax.adamw(1e-2), MOMENTS)
    return mpx.loss_scaling(
        mpx.mixed_precision(rule, POLICY), mpx.DynamicLossScale(16.0)
    )


def mesh_of(devices):
    return jax.make_mesh((len(devices),), ("data",), devices=devices)


def started():
    rng = np.random.default_rng(0)
    params = {
        key: jax.device_put(
            rng.normal(size=SHAPES[key]).astype(jnp.bfloat16), SPECS[key]
        )
        for key in SHAPES
    }
    return Run(params, optimizer().init(params))


def batch(number):
    """Return integers, whose sums are exact in every order. The second batch has an
    infinity at its end.
    """
    rng = np.random.default_rng(number)
    x = rng.integers(-2, 3, (64, 64)).astype(np.float32)
    x[-1, 0] = np.inf if number == 1 else 1
    factors = {
        key: rng.integers(-2, 3, (64, SHAPES[key][-1])).astype(np.float32)
        for key in SHAPES
    }
    return jax.tree.map(lambda x: jax.device_put(x, P("data")), (x, factors))


def loss_fn(params, batch):
    x, factors = batch
    whole = {key: jax.sharding.reshard(p, P()) for key, p in params.items()}
    products = [(x @ whole[key]) * factors[key] for key in ("rows", "columns")]
    return sum(
        map(
            jnp.sum,
            [*products, whole["bias"][None].astype(np.float32) * factors["bias"]],
        )
    )


@jax.jit
def gradients(run, batch):
    loss_scale = mpx.get_loss_scale(run.opt_state)
    return mpx.value_and_grad(mpx.autocast(loss_fn, POLICY), loss_scale)(
        run.params, batch
    )


@functools.cache
def update_of(fused):
    kernels = mpx.fused_update(optimizer(), interpret=True)
    step = (
        (lambda params, state, grads: kernels(grads, state, params))
        if fused
        else stepper(optimizer())
    )
    return jax.jit(
        lambda run, grads: Run(*step(*run, grads)), compiler_options=unfused()
    )


def trained(run, first, last, *, fused=True):
    for number in range(first, last):
        run = update_of(fused)(run, gradients(run, batch(number))[1])
    return run


def trained_by_muon():
    """Return the end of three steps on seven matrices: each device has a part of each,
    and multiplies one at most.
    """
    tx = mpx.chain(
        mpx.mixed_precision("bf16-split24-8bit", key=jax.random.key(0)),
        optax.trace(0.95, nesterov=True),
        mpx.each_matrix(mpx.newton_schulz, products="f16", sent="bf16"),
        optax.scale(-1e-2),
    )
    random = np.random.default_rng(0).normal(size=(4, 7, 64, 128)).astype(jnp.bfloat16)
    params, *gradients = ({"stack": jax.device_put(x, P(None, "data"))} for x in random)
    run, step = Run(params, tx.init(params)), jax.jit(stepper(tx))
    for grads in gradients:
        run = Run(*step(*run, grads))
    return run


def observed(run):
    """Return what the tools of mpx say of a run, as JSON can hold it."""
    mpx.check_health(run.opt_state, params=run.params)
    report = mpx.step_report(gradients, run, batch(0))
    nothing = jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), run.params)
    synced = mpx.resync(run.params, run.opt_state, before=nothing)
    masters = mpx.master_params(run.params, synced)
    return {
        "scale": float(mpx.get_loss_scale(run.opt_state).loss_scale),
        "skipped": int(mpx.skipped_steps(run.opt_state)),
        "finite": bool(mpx.all_finite(run)),
        "resynced": all(
            bool((masters[key] == p.astype(np.float32)).all())
            for key, p in run.params.items()
        ),
        "underflow": mpx.underflow_report(mpx.master_params(*run), "f16").as_dict(),
        "sent": sorted([c.operation, c.dtype] for c in report.collectives),
    }


def like(run):
    """Return the shapes of a run, sharded as its arrays are over the devices of the
    mesh that is set.
    """
    sharding_of = lambda x: NamedSharding(jax.sharding.get_mesh(), x.sharding.spec)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding_of(x)), run
    )


def main(folder, address, count, index):
    jax.distributed.initialize(address, int(count), int(index))
    folder = pathlib.Path(folder)
    with jax.set_mesh(mesh_of(jax.devices())):
        run = trained(started(), 0, SAVED)
        ocp.save(folder / "saved", run)
        run = trained(ocp.load(folder / "saved", like(run)), SAVED, STEPS)
        ocp.save(folder / "end", run)
        ocp.save(folder / "muon", trained_by_muon())
        (folder / f"observed {index}.json").write_text(json.dumps(observed(run)))


if __name__ == "__main__":
    main(*sys.argv[1:])
