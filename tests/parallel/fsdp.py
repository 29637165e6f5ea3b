"""A training run whose parameters are sharded over all devices, of one process or of several.

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
import orbax.checkpoint as older
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp

import mpx
from tests.helpers import unfused

NAMES = ["bf16", "bf16 fused", "f16 fused"]
SHAPES = {"rows": (64, 1024), "columns": (64, 2304), "bias": (512,)}
SPECS = {"rows": P("data"), "columns": P(None, "data"), "bias": P("data")}
STEPS, SAVED = 4, 2  # in all, and when it is saved


class Run(NamedTuple):
    """Parameters and the state of their optimizer."""

    params: Any
    opt_state: Any


def policy_of(name):
    dtype = name.split()[0]
    return mpx.get_policy(f"params={dtype},compute={dtype},output=f32")


@functools.cache
def optimizer(name):
    rule = mpx.low_precision_state(optax.adamw(1e-2), {"mu": mpx.Blockwise8bit(), "nu": mpx.Blockwise8bit()})
    loss_scale = mpx.DynamicLossScale(16.0) if is_scaled(name) else None
    return mpx.mixed_precision(rule, policy_of(name), loss_scale=loss_scale)


def is_scaled(name):
    return name.startswith("f16")


def mesh_of(devices):
    return jax.make_mesh((len(devices),), ("data",), devices=devices)


def started(name):
    rng = np.random.default_rng(0)
    dtype = policy_of(name).param_dtype
    params = {key: jax.device_put(rng.normal(size=SHAPES[key]).astype(dtype), SPECS[key]) for key in SHAPES}
    return Run(params, optimizer(name).init(params))


def batch(name, number):
    """Return integers, whose sums are exact in every order. The second batch in float16 has an infinity at its end."""
    rng = np.random.default_rng(number)
    x = rng.integers(-2, 3, (64, 64)).astype(np.float32)
    x[-1, 0] = np.inf if number == 1 and is_scaled(name) else 1
    factors = {key: rng.integers(-2, 3, (64, SHAPES[key][-1])).astype(np.float32) for key in SHAPES}
    return jax.tree.map(lambda x: jax.device_put(x, P("data")), (x, factors))


@functools.cache
def gradients_of(name):
    def loss_fn(params, batch):
        x, factors = batch
        whole = {key: jax.sharding.reshard(p, P()) for key, p in params.items()}
        products = [(x @ whole[key]) * factors[key] for key in ("rows", "columns")]
        return sum(map(jnp.sum, [*products, whole["bias"][None].astype(np.float32) * factors["bias"]]))

    loss_fn = mpx.autocast(loss_fn, policy_of(name))
    return jax.jit(lambda run, batch: mpx.value_and_grad(loss_fn, mpx.get_loss_scale(run.opt_state))(run.params, batch))


@functools.cache
def update_of(name):
    tx = optimizer(name)

    def update(run, grads):
        if "fused" in name:
            return Run(*mpx.fused_update(tx, interpret=True)(grads, run.opt_state, run.params))
        updates, opt_state = tx.update(grads, run.opt_state, run.params)
        return Run(optax.apply_updates(run.params, updates), opt_state)

    return jax.jit(update, compiler_options=unfused())


def trained(name, run, first, last):
    for number in range(first, last):
        _, grads = gradients_of(name)(run, batch(name, number))
        run = update_of(name)(run, grads)
    return run


def observed(name, run):
    """Return what the tools of mpx say of a run, as JSON can hold it."""
    if is_scaled(name):
        mpx.check_health(run.opt_state, params=run.params)
    report = mpx.step_report(gradients_of(name), run, batch(name, 0))
    synced = mpx.resync(run.params, run.opt_state)
    masters = mpx.master_params(run.params, synced)
    return {
        "scale": float(mpx.get_loss_scale(run.opt_state).loss_scale),
        "skipped": int(mpx.skipped_steps(run.opt_state)),
        "synced": bool(mpx.is_synced(run.params, run.opt_state)),
        "finite": bool(mpx.all_finite(run)),
        "resynced": all(bool((masters[key] == p.astype(np.float32)).all()) for key, p in run.params.items()),
        "underflow": mpx.underflow_report(mpx.master_params(*run), "f16").as_dict(),
        "sent": sorted([c.operation, c.axes, c.dtype] for c in report.collectives),
    }


def like(run):
    """Return the shapes of a run, sharded as its arrays are over the devices of the mesh that is set."""
    sharding_of = lambda x: NamedSharding(jax.sharding.get_mesh(), x.sharding.spec)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding_of(x)), run)


def save(folder, run):
    ocp.save(folder / "new", run)
    with older.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "older", run)


def restored(folder, interface, shapes):
    if interface == "new":
        return ocp.load(folder / "new", shapes)
    with older.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder / "older", shapes)


def main(folder, address, count, index):
    jax.distributed.initialize(address, int(count), int(index))
    for name in NAMES:
        here = pathlib.Path(folder) / name
        with jax.set_mesh(mesh_of(jax.devices())):
            run = trained(name, started(name), 0, SAVED)
            save(here, run)
            for interface in ("new", "older"):
                again = trained(name, restored(here, interface, like(run)), SAVED, STEPS)
                ocp.save(here / f"end of {interface}", again)
            (here / f"observed {index}.json").write_text(json.dumps(observed(name, again)))


if __name__ == "__main__":
    main(*sys.argv[1:])
