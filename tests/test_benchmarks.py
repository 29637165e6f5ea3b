"""Check that the benchmarks compute what they say, the same on both sides. No time is judged here."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import adamw_by_hand, autocast, autocast_accuracy, autocast_forms, models_by_hand, optimizer_step
from tests.autocast.helpers import contractions
from tests.helpers import cases, unfused

pytestmark = [pytest.mark.optax_promotion, pytest.mark.slow]

# ---- the optimizer step ---------------------------------------------------------------------------------------------

# Two are large enough for 8 bits, one of them with a last block that is not full; the others are not.
SHAPES = {"kernel": (64, 96), "embedding": (33, 160), "bias": (96,), "gain": (96,), "head": (96,), "tail": (96,)}


def compared(name):
    """Return what differs after three steps, in programs in which no two operations become one that rounds once."""
    recipe = optimizer_step.RECIPES[name]
    params, grads = jax.tree.map(lambda x: x.astype(recipe.dtype), optimizer_step.make_data(SHAPES))
    states = optimizer_step.make_starts(recipe, params)
    steps = optimizer_step.compile_steps(recipe, states, grads, unfused())
    return optimizer_step.compare_results(steps, jax.tree.map(jnp.copy, states), grads)


PARTS = {
    "f32": {"parameters", "moments"},
    "full": {"parameters", "masters", "moments"},
    "split": {"parameters", "masters", "moments"},
    "split + 8-bit": {"parameters", "masters", "moments", "codes"},
    "Kahan + bf16 moments": {"parameters", "compensation", "moments"},
    "fused split + 8-bit": {"parameters", "masters", "moments", "codes"},
}


@pytest.mark.parametrize("name", cases(PARTS, {"split"}))
def test_the_step_by_hand_and_that_of_mpx_give_the_same_bits(name):
    found = compared(name)
    assert found.keys() == PARTS[name]
    assert found["parameters"]["of"] == sum(map(math.prod, SHAPES.values()))
    assert {part: numbers["differ"] for part, numbers in found.items()} == dict.fromkeys(PARTS[name], 0)


def test_the_comparison_sees_a_step_with_another_epsilon(monkeypatch):
    """Change updates of 1e-3 by a ten-thousandth: an epsilon of 1e-7 beside roots of 1e-3.

    Masters of 0.02 can just hold that; few of their bfloat16 roundings do.
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


def test_speeds_are_judged_by_bytes_and_beside_the_float32_step():
    """28 bytes in 28 ns are 1 GB/s; a copy at 2 GB/s would take 14 ns."""
    row = {"bytes": 28, "by hand ms": 56e-6, "mpx ms": 28e-6}
    rows = [row | {"recipe": "f32"}, row | {"recipe": "split + 8-bit", "bytes": 14, "mpx ms": 7e-6}]
    rows = [row | optimizer_step.speeds(row, bandwidth=2.0) for row in rows]
    optimizer_step.add_gains(rows)
    assert [row["mpx GB/s"] for row in rows] == [pytest.approx(1), pytest.approx(2)]
    assert [row["by hand / copy"] for row in rows] == [pytest.approx(4), pytest.approx(8)]
    assert [row["copy target met"] for row in rows] == [False, True]
    assert (rows[1]["times as fast as f32"], rows[1]["speed target met"]) == (pytest.approx(4), True)


def test_the_tensors_are_those_of_gpt2():
    """124,439,808 is what its authors' checkpoint has; `--scale` divides the rows of matrices, but not biases."""
    shapes = optimizer_step.make_shapes("gpt2", 1)
    assert shapes == optimizer_step.gpt2_shapes()
    assert len(shapes) == 148
    assert sum(map(math.prod, shapes.values())) == 124_439_808
    smaller = optimizer_step.make_shapes("gpt2", 16)
    assert (smaller["wte"], smaller["h.0.mlp.c_proj.w"], smaller["ln_f.b"]) == ((3141, 768), (192, 768), (768,))
    assert optimizer_step.make_shapes("one", 16) == {"one": (2**23,)}


# ---- autocast -------------------------------------------------------------------------------------------------------

SIZE = models_by_hand.Size(width=16, layers=1, heads=2, context=8, vocabulary=32, batch=2)


@pytest.mark.parametrize("name", autocast_forms.FORMS)
def test_every_form_but_those_in_float32_multiplies_16_bit_matrices(name):
    """Seven products, six of them in the block, and two for each in the backward pass.

    By hand, attention's logits are float32, and so are their cotangents, of which two products are made.
    """
    params, tokens = autocast_forms.make_params(SIZE, jnp.float32), autocast_forms.make_tokens(SIZE)
    found = contractions(jax.grad(autocast_forms.make_form(name, SIZE)), params, tokens)
    wide = [c for c in found if jnp.float32 in (c.lhs, c.rhs)]
    assert len(found) == 21
    if name in ("f32", "f32, dots"):
        assert wide == found
    else:
        assert len(wide) <= (2 if "by hand" in name else 0)


def test_residuals_are_the_distinct_arrays_that_are_made_on_the_way():
    """The square of a sine keeps the sine, once for both factors, and the cosine; that of a parameter keeps nothing."""
    params, tokens = jax.ShapeDtypeStruct((5,), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.int32)
    squared = lambda x: (x * x).sum()
    assert autocast.residual_bytes(lambda p, t: squared(jnp.sin(p)), params, tokens) == (40, 0)
    assert autocast.residual_bytes(lambda p, t: squared(p.astype(jnp.bfloat16)), params, tokens) == (10, 0)
    assert autocast.residual_bytes(lambda p, t: squared(p), params, tokens) == (0, 20)


def test_each_form_is_held_against_the_one_by_hand_with_the_same_checkpoint(monkeypatch):
    monkeypatch.setitem(autocast_forms.SIZES, "tiny", SIZE)
    monkeypatch.setattr(autocast, "RESIDUAL_LAYERS", 1)
    for params in ("f32", "bf16"):
        found = autocast.measure_residuals("tiny", params)
        rows = {row["form"]: row for row in found}
        assert rows.keys() == autocast_forms.FORMS.keys()
        assert all(("dots" in name) == ("dots" in row["beside"]) for name, row in rows.items() if "beside" in row)
        assert [name for name, row in rows.items() if "target" in row] == ["autocast, dots"]
        assert rows["by hand, dots"]["bytes"] < rows["by hand"]["bytes"] < rows["f32"]["bytes"]
        assert rows["autocast, dots"]["ratio"] == rows["autocast, dots"]["bytes"] / rows["by hand, dots"]["bytes"]
        assert "by hand, dots" in autocast.residuals_table("", found).markdown()


def test_tracing_is_timed_from_nothing(monkeypatch):
    """The model is called in each trace: the warm-up and a second one, of each form and what is beside it."""
    make_loss, calls = autocast_forms.make_loss, []

    def counted(*args):
        loss = make_loss(*args)
        return lambda *operands: calls.append(args) or loss(*operands)

    monkeypatch.setattr(autocast_forms, "make_loss", counted)
    rows = autocast.measure_tracing(turns=1, size=autocast.TRACED_SIZE._replace(layers=1))
    assert [(row["form"], row["beside"]) for row in rows] == list(autocast.TRACED_FORMS.items())
    assert all(row[what][side] > 0 for row in rows for what in ("trace", "lower") for side in ("s", "beside s"))
    assert len(calls) == 2 * 2 * len(rows)


def test_the_target_of_tracing_is_of_tracing_and_lowering_together():
    """1.5 and 0.5 seconds beside 0.5 and 0.5: thrice as long, as long, and twice as long in all."""
    row = autocast.compare_tracing([(1.5, 0.5)] * 3, [(0.5, 0.5)] * 3)
    assert [row[what]["ratio"] for what in ("trace", "lower", "both")] == [3, 1, 2]
    assert row["met"]
    assert not autocast.compare_tracing([(1.6, 0.5)] * 3, [(0.5, 0.5)] * 3)["met"]


def test_an_error_is_that_of_the_whole_gradient():
    """(3, 4, 12) beside (3, 4, 11): 1 of 13, by hand."""
    exact = np.float64(2), [np.array([3.0, 4.0]), np.array(12.0)]
    found = np.float64(2.5), [np.array([3.0, 4.0]), np.array(11.0)]
    assert autocast_accuracy.relative_errors(found, exact) == (0.25, pytest.approx(1 / 13))


def test_accuracy_is_measured_against_float64():
    """Half an ulp is 2**-24 in float32 and 2**-8 in bfloat16: there is room between the errors."""
    rows = autocast_accuracy.measure_accuracy(SIZE, seeds=2, trained_steps=0, dtypes=[("f32", "bf16")])
    assert {row["form"] for row in rows} == set(autocast_accuracy.ACCURACY_FORMS)
    for row in rows:
        low, high = (0, 1e-5) if row["form"] == "f32" else (1e-3, 3e-2)
        assert low < row["gradient mean"] <= row["gradient max"] < high


def test_steps_are_timed_beside_those_by_hand_but_for_one_that_a_backend_cannot_run(monkeypatch):
    timed_ratio, failed = autocast.timed_ratio, []

    def first_fails(*args):
        if not failed:
            failed.append(True)
            raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: no such product\nmore")
        return timed_ratio(*args)

    monkeypatch.setattr(autocast, "timed_ratio", first_fails)
    names = ["f32, dots", "autocast, dots"]
    monkeypatch.setitem(autocast_forms.SIZES, "tiny", SIZE)
    rows = autocast.measure_steps("tiny", "bf16", update=True, starts=1, turns=1, names=names)
    assert [(row["form"], row["beside"]) for row in rows] == [(name, "by hand, dots") for name in names]
    assert [row.get("left out") for row in rows] == ["UNIMPLEMENTED: no such product", None]
    assert rows[1]["ratio"] == rows[1]["mpx ms"] / rows[1]["by hand ms"]
    assert rows[1]["met"] == (rows[1]["ratio"] <= 1.03)
