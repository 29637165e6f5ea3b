"""The benchmark of the optimizer step: both of its sides compute the same. Nothing is timed here."""

import math

import jax
import jax.numpy as jnp
import pytest

from benchmarks import adamw_by_hand, optimizer_step
from benchmarks.overhead import gpt2_shapes
from mpx import _blockwise

pytestmark = pytest.mark.optax_promotion

# Two are large enough for 8 bits, one of them with a last block that is not full; the others are not.
SHAPES = {"kernel": (64, 96), "embedding": (33, 160), "bias": (96,), "gain": (96,), "head": (96,), "tail": (96,)}


def compared(name):
    """What differs after three steps, in programs in which no two operations become one that rounds once."""
    recipe = optimizer_step.RECIPES[name]
    params, grads = jax.tree.map(lambda x: x.astype(recipe.dtype), optimizer_step.make_data(SHAPES))
    states = optimizer_step.make_starts(recipe, params)
    steps = optimizer_step.compile_steps(recipe, states, grads, {"xla_disable_hlo_passes": "fusion"})
    return optimizer_step.compare_results(steps, jax.tree.map(jnp.copy, states), grads)


@pytest.mark.parametrize(
    ("name", "parts"),
    {
        "f32": {"parameters", "moments"},
        "full": {"parameters", "masters", "moments"},
        "split": {"parameters", "masters", "moments"},
        "split + 8-bit": {"parameters", "masters", "moments", "codes"},
        "Kahan + bf16 moments": {"parameters", "compensation", "moments"},
    }.items(),
)
def test_the_step_by_hand_and_that_of_mpx_give_the_same_bits(name, parts):
    found = compared(name)
    assert found.keys() == parts
    assert found["parameters"]["of"] == sum(map(math.prod, SHAPES.values()))
    assert {part: numbers["differ"] for part, numbers in found.items()} == dict.fromkeys(parts, 0)


def test_the_comparison_sees_a_step_with_another_epsilon(monkeypatch):
    """An epsilon of 1e-7 beside roots of 1e-3 changes updates of 1e-3 by a ten-thousandth of themselves, which masters
    of 0.02 can just hold, and few of their bfloat16 roundings.
    """
    monkeypatch.setattr(adamw_by_hand, "EPS", 1e-7)
    found = compared("split")
    assert found["masters"]["differ"] > found["masters"]["of"] / 2
    assert 0 < found["masters"]["largest relative difference"]
    assert found["parameters"]["differ"] < found["parameters"]["of"] / 10
    assert found["moments"]["differ"] == 0


def test_a_difference_is_counted_by_bits_and_measured_by_size():
    a = [jnp.array([1.0, 0.0, 2.0], jnp.float32), jnp.array([4.0], jnp.bfloat16)]
    b = [jnp.array([1.0, -0.0, 2.5], jnp.float32), jnp.array([4.0], jnp.bfloat16)]
    largest = {"largest relative difference": pytest.approx(0.2), "largest difference": pytest.approx(0.5)}
    assert optimizer_step.differences(a, b) == {"differ": 2, "of": 4} | largest


@pytest.mark.parametrize(
    ("name", "bytes_a_parameter"),
    {"f32": 28, "full": 30, "split": 26, "split + 8-bit": 14 + 16 / 256, "Kahan + bf16 moments": 18}.items(),
)
def test_the_bytes_of_a_step_are_those_of_its_parameters_state_and_gradients(name, bytes_a_parameter):
    """The scales of 8 bits are four numbers of 4 bytes a block of 256: two moments, read and written."""
    recipe, n = optimizer_step.RECIPES[name], 2**14
    data = optimizer_step.make_data({"one": (n,)})
    params, grads = jax.tree.map(lambda x: x.astype(recipe.dtype), data)
    _, state = optimizer_step.make_starts(recipe, params)
    counter = 2 * 4
    assert optimizer_step.bytes_moved(state, grads) == bytes_a_parameter * n + counter


def test_the_step_without_the_kernel_is_traced_anew_and_only_it(monkeypatch):
    """Programs that JAX has traced with the kernel must not be taken for those without, nor the other way round."""
    monkeypatch.setattr(_blockwise, "_has_kernel", lambda block_size, signed: True)  # on a CPU it is not run
    jax.clear_caches()  # of what other tests have traced
    recipe = optimizer_step.RECIPES["split + 8-bit"]
    params, grads = jax.tree.map(lambda x: x.astype(jnp.bfloat16), optimizer_step.make_data({"one": (2**12,)}))
    states = optimizer_step.make_starts(recipe, params)

    def has_kernel(kernel):
        with optimizer_step.codec(kernel):
            steps = zip(optimizer_step.make_steps(recipe), states, strict=True)
            return ["pallas_call" in str(jax.make_jaxpr(step)(state, grads)) for step, state in steps]

    assert [has_kernel(kernel) for kernel in (True, False, True)] == [[True, True], [False, False], [True, True]]


def test_speeds_are_judged_by_bytes_and_beside_the_float32_step():
    """28 bytes in 28 ns are 1 GB/s; a copy at 2 GB/s would take 14 ns."""
    row = {"bytes": 28, "by hand ms": 56e-6, "mpx ms": 28e-6}
    rows = [row | {"recipe": "f32"}, row | {"recipe": "split + 8-bit", "bytes": 14, "mpx ms": 7e-6}]
    optimizer_step.judge(rows, bandwidth=2.0)
    assert [row["mpx GB/s"] for row in rows] == [pytest.approx(1), pytest.approx(2)]
    assert [row["by hand / copy"] for row in rows] == [pytest.approx(4), pytest.approx(8)]
    assert [row["copy target met"] for row in rows] == [False, True]
    assert (rows[1]["times as fast as f32"], rows[1]["speed target met"]) == (pytest.approx(4), True)


def test_the_tensors_are_those_of_gpt2():
    """124,439,808 is what its authors' checkpoint has; `--scale` divides the rows of matrices, but not biases."""
    shapes = optimizer_step.make_shapes("gpt2", 1)
    assert shapes == gpt2_shapes()
    assert len(shapes) == 148
    assert sum(map(math.prod, shapes.values())) == 124_439_808
    smaller = optimizer_step.make_shapes("gpt2", 16)
    assert (smaller["wte"], smaller["h.0.mlp.c_proj.w"], smaller["ln_f.b"]) == ((3141, 768), (192, 768), (768,))
    assert optimizer_step.make_shapes("one", 16) == {"one": (2**23,)}
