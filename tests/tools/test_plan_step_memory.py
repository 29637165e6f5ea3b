"""Memory of a compiled step by XLA, against what can be counted."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mpx
from mpx.tools.plan import StepMemory, largest_that_fits, memory_plan, step_memory
from tests.helpers import eight_cpu_devices

pytestmark = pytest.mark.optax_promotion

SHAPE = jax.ShapeDtypeStruct
TX = mpx.master_weights(optax.sgd(0.1, momentum=0.9))
PARAMS = {"a": SHAPE((256, 256), jnp.bfloat16), "b": SHAPE((256, 256), jnp.bfloat16)}
STATE = jax.eval_shape(TX.init, PARAMS)


def step(params, state, x):
    loss = lambda p, x: jnp.mean((jnp.tanh(x @ p["a"].astype(x.dtype)) @ p["b"].astype(x.dtype)) ** 2)
    updates, state = TX.update(jax.grad(loss)(params, x), state, params)
    return optax.apply_updates(params, updates), state


def batch(n):
    return SHAPE((n, 256), np.float32)


def test_the_arguments_are_what_was_planned_and_the_batch_and_donated_ones_are_held_once():
    before = len(jax.live_arrays())
    kept = step_memory(step, PARAMS, STATE, batch(64))
    donating = step_memory(jax.jit(step, donate_argnums=(0, 1)), PARAMS, STATE, batch(64))
    plan = memory_plan(PARAMS, TX)
    held = plan.bytes_of("parameters") + plan.state_bytes
    assert kept.arguments == held + 64 * 256 * 4
    assert kept.outputs >= held  # and the table of the tuple
    assert (kept.aliased, donating.aliased) == (0, held)
    assert donating.peak < kept.peak
    assert len(jax.live_arrays()) == before


def test_the_peak_counts_everything_once():
    memory = StepMemory(arguments=1000, outputs=500, aliased=400, temporaries=70, code=9)
    assert memory.peak == 1000 + 100 + 70 + 9
    assert memory.as_dict() == vars(memory) | {"peak": 1179}
    assert str(memory).splitlines()[-1].split() == ["peak", "1,179"]


def test_temporaries_grow_with_the_batch_and_the_largest_batch_fits():
    donating = jax.jit(step, donate_argnums=(0, 1))
    peak = lambda n: step_memory(donating, PARAMS, STATE, batch(64 * n)).peak
    largest = largest_that_fits(peak, 3e6)
    assert largest >= 2
    assert peak(largest) <= 3e6 < peak(largest + 1)


def test_shapes_with_shardings_give_the_bytes_of_one_device():
    mesh = eight_cpu_devices()
    placed = lambda s, spec: SHAPE(s.shape, s.dtype, sharding=NamedSharding(mesh, spec))
    double = lambda w, x: x @ w
    one = step_memory(double, batch(256), x=batch(64))  # a keyword argument is one
    eight = step_memory(double, placed(batch(256), P()), placed(batch(64), P("data")))
    assert one.arguments == 4 * (256 * 256 + 64 * 256)
    assert eight.arguments == 4 * (256 * 256 + 8 * 256)
    assert eight.outputs == one.outputs // 8


def test_anything_but_a_function_and_a_backend_without_an_analysis_are_refused():
    compiled = types.SimpleNamespace(memory_analysis=lambda: None)
    without = lambda x: x
    without.lower = lambda x: types.SimpleNamespace(compile=lambda: compiled)
    with pytest.raises(TypeError, match=r"`step_memory` needs a function, but got dict"):
        step_memory({})
    with pytest.raises(RuntimeError, match=r"`step_memory`: the backend '\w+' gives no memory analysis"):
        step_memory(without, batch(8))
