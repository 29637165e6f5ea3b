"""Check in which dtype eight GPUs gather weights and add up gradients, in the programs that XLA compiles for them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mpx

pytestmark = pytest.mark.many_devices

SHAPES = {"a": (2048, 8192), "b": (8192, 2048)}
ROWS = {"a": P("data"), "b": P("data")}


def layers(gathered):
    """Return a loss of two layers, whose weights `gathered` makes whole."""

    def loss(params, x):
        for name in SHAPES:
            x = jnp.tanh(x @ gathered(params[name]))
        return jnp.mean(x)

    return loss


def in_a_shard_map(loss, mesh):
    """Divide the batch by hand too: the gradient of a gathered weight is added up over devices."""

    def step(params, x):
        value_and_grad = jax.shard_map(
            mpx.value_and_grad(loss), mesh=mesh, in_specs=(ROWS, P("data")), out_specs=(P(), ROWS)
        )
        return value_and_grad(params, x)

    return step


everywhere = lambda w: jax.lax.with_sharding_constraint(w, P())
STYLES = {
    "on every device": (AxisType.Auto, None, lambda w: w),
    "sharded": (AxisType.Auto, ROWS, lambda w: w),
    "constrained": (AxisType.Auto, ROWS, everywhere),
    "explicit": (AxisType.Explicit, ROWS, lambda w: jax.sharding.reshard(w, P())),
    "shard map": (AxisType.Explicit, ROWS, lambda w: jax.lax.all_gather(w, "data", tiled=True)),
}


def sent(devices, style, how, dtype, **options):
    """Return which dtypes of large arrays gathers and sums have."""
    kind, specs, gathered = STYLES[style]
    mesh = Mesh(np.array(devices), ("data",), axis_types=(kind,))
    placed = lambda shape, dtype, spec: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
    params = {name: placed(shape, dtype, specs[name] if specs else P()) for name, shape in SHAPES.items()}
    loss = mpx.autocast(layers(gathered), how, **options)
    gradients = in_a_shard_map(mean_over_devices(loss), mesh) if style == "shard map" else mpx.value_and_grad(loss)

    def step(params, x):
        _, grads = gradients(params, x)
        return jax.tree.map(lambda p, g: (p - 0.1 * g).astype(p.dtype), params, grads)

    report = mpx.step_report(step, params, placed((4096, 2048), jnp.float32, P("data")), target="h200")
    large = [c for c in report.collectives if c.bytes > 2**20]
    names = lambda *kinds: {c.dtype for c in large if c.operation in kinds}
    return names("all-gather"), names("all-reduce", "reduce-scatter")


def mean_over_devices(loss):
    return lambda params, x: jax.lax.pmean(loss(params, x), "data")
