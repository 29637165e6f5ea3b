"""Check that the benchmarks compute what they say, the same on both sides. No time is judged here."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import adamw_by_hand, autocast, autocast_accuracy, autocast_forms, optimizer_step, overhead
from benchmarks.autocast_forms import FORMS, HAND, HAND_DOTS, HAND_STREAM, Dtypes, Size, make_form
from tests.autocast.helpers import contractions
from tests.helpers import cases, unfused

pytestmark = pytest.mark.optax_promotion

# ---- the optimizer step ---------------------------------------------------------------------------------------------

# Two are large enough for 8 bits, one of them with a last block that is not full; the others are not.
SHAPES = {"kernel": (64, 96), "embedding": (33, 160), "bias": (96,), "gain": (96,), "head": (96,), "tail": (96,)}


def compared(name):
    """Return what differs after three steps, in programs where no two operations become one that rounds once."""
    recipe = optimizer_step.RECIPES[name]
    params, grads = jax.tree.map(lambda x: x.astype(recipe.dtype), optimizer_step.make_data(SHAPES))
    states = optimizer_step.make_starts(recipe, params)
    steps = optimizer_step.compile_steps(optimizer_step.make_steps(recipe), states, grads, unfused())
    found = optimizer_step.compare_results(steps, jax.tree.map(jnp.copy, states), grads)
    return {row["numbers"]: row for row in found}


@pytest.mark.parametrize("name", cases(optimizer_step.RECIPES, {"split"}))
def test_the_step_by_hand_and_the_step_of_mpx_give_the_same_bits(name):
    found = compared(name)
    assert found["parameters"]["of"] == found["masters"]["of"] == sum(map(math.prod, SHAPES.values()))
    assert found["moments"]["of"] >= 2 * found["parameters"]["of"]
    assert {kind: row["differ"] for kind, row in found.items()} == {"parameters": 0, "masters": 0, "moments": 0}


@pytest.mark.slow
def test_the_comparison_sees_a_step_with_another_epsilon(monkeypatch):
    """Change updates of 1e-3 by a ten-thousandth: an epsilon of 1e-7 beside roots of 1e-3.

    Masters of 0.02 can just hold that; few of their bfloat16 roundings do.
    """
    monkeypatch.setattr(adamw_by_hand, "EPS", 1e-7)
    found = compared("split")
    assert found["masters"]["differ"] > found["masters"]["of"] / 2
    assert 0 < found["masters"]["relative"]
    assert found["parameters"]["differ"] < found["parameters"]["of"] / 10
    assert found["moments"]["differ"] == 0


def test_a_difference_is_counted_by_bits_and_measured_by_size():
    a = [jnp.array([1.0, 0.0, 2.0], jnp.float32), jnp.array([4.0], jnp.bfloat16)]
    b = [jnp.array([1.0, -0.0, 2.5], jnp.float32), jnp.array([4.0], jnp.bfloat16)]
    expected = {"differ": 2, "of": 4, "relative": pytest.approx(0.2), "absolute": pytest.approx(0.5)}
    assert optimizer_step.differences(a, b) == expected


def test_the_tensors_are_those_of_gpt2():
    """124,439,808 is what its authors' checkpoint has; `scale` divides the rows of matrices, but not biases."""
    shapes = optimizer_step.make_shapes("gpt2", 1)
    assert len(shapes) == 148
    assert optimizer_step.title_of("gpt2", shapes) == "gpt2: 148 tensors, 124,439,808 parameters"
    smaller = optimizer_step.make_shapes("gpt2", 16)
    assert (smaller["wte"], smaller["h.0.mlp.c_proj.w"], smaller["ln_f.b"]) == ((3141, 768), (192, 768), (768,))
    assert optimizer_step.make_shapes("one", 16) == {"one": (2**23,)}


@pytest.mark.slow
def test_a_training_step_by_hand_has_the_masters_and_moments_of_mpx():
    with jax.numpy_rank_promotion("allow"):  # as in a process of its own
        rows = overhead.measure_steps("float16", (32, 2, 8), starts=1, turns=1)
    differ = [{found["numbers"]: found["differ"] for found in row["results"]} for row in rows]
    assert [(found["masters"], found["moments"]) for found in differ] == [(0, 0), (0, 0)]
    printed = overhead.steps_sheets(rows)[0].markdown()
    assert "| optimizer step, " in printed
    assert "| moved by hand, mpx, GB | kernels | temporaries, GB |" in printed


# ---- autocast -------------------------------------------------------------------------------------------------------

SIZE = Size(width=16, layers=1, heads=2, context=8, vocabulary=32, batch=2)


@pytest.mark.parametrize("name", FORMS)
def test_every_form_but_those_in_float32_multiplies_16_bit_matrices(name):
    """Seven products, six of them in the block, and two for each in the backward pass.

    By hand, attention's logits are float32, and so are their cotangents, which two products are made of.
    """
    params, tokens = autocast_forms.make_params(SIZE, jnp.float32), autocast_forms.make_tokens(SIZE)
    found = contractions(jax.grad(make_form(name, SIZE)), params, tokens)
    wide = [c for c in found if jnp.float32 in (c.lhs, c.rhs)]
    assert len(found) == 21
    assert len(wide) == (21 if name in ("f32", "f32, dots") else 2 if "by hand" in name else 0)


@pytest.mark.parametrize("form", [HAND, HAND_STREAM, "autocast"])
def test_all_forms_are_the_same_function(form):
    """A relative error of 2**-8 in each of some operations; other weights give another loss."""
    params, tokens = autocast_forms.make_params(SIZE, jnp.float32), autocast_forms.make_tokens(SIZE)
    plain, loss = (jax.jit(make_form(name, SIZE)) for name in ("f32", form))
    np.testing.assert_allclose(loss(params, tokens), plain(params, tokens), rtol=0.02)
    other = jax.tree.map(lambda p: p + 0.5 * jax.random.normal(jax.random.key(1), p.shape), params)
    assert abs(plain(other, tokens) / plain(params, tokens) - 1) > 0.02


@pytest.mark.parametrize(
    ("dtypes", "stream"), [((jnp.bfloat16, jnp.float32), "float32"), ((jnp.bfloat16,) * 2, "bfloat16"), ((), "float32")]
)
def test_the_residual_stream_has_its_dtype(dtypes, stream):
    model = SIZE.model(Dtypes(*dtypes))
    params = autocast_forms.make_params(SIZE, jnp.float32)
    apply = lambda params: model.apply({"params": params}, jnp.zeros((2, 8), jnp.int32), capture_intermediates=True)
    (normed,) = jax.eval_shape(apply, params)[1]["intermediates"]["norm"]["__call__"]
    assert normed.dtype == stream


def test_residuals_are_the_distinct_arrays_that_are_made_on_the_way():
    """A sine's square keeps the sine, once for both factors, and the cosine. A parameter's square keeps nothing."""
    params, tokens = jax.ShapeDtypeStruct((5,), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.int32)
    squared = lambda x: (x * x).sum()
    assert autocast.residual_bytes(lambda p, t: squared(jnp.sin(p)), params, tokens) == (40, 0)
    assert autocast.residual_bytes(lambda p, t: squared(p.astype(jnp.bfloat16)), params, tokens) == (10, 0)
    assert autocast.residual_bytes(lambda p, t: squared(p), params, tokens) == (0, 20)


def test_each_form_is_held_against_the_one_by_hand_with_the_same_checkpoint(monkeypatch):
    monkeypatch.setitem(autocast_forms.SIZES, "tiny", SIZE)
    monkeypatch.setattr(autocast, "RESIDUAL_LAYERS", 1)
    rows = {row["form"]: row for row in autocast.measure_residuals("tiny", "f32")}
    assert rows.keys() == FORMS.keys()
    assert all(("dots" in name) == ("dots" in row["beside"]) for name, row in rows.items() if "beside" in row)
    assert [name for name, row in rows.items() if "target" in row] == ["autocast, dots"]
    assert rows[HAND_DOTS]["MB"] < rows[HAND]["MB"] < rows["f32"]["MB"]
    assert rows["autocast, dots"]["ratio"] == pytest.approx(rows["autocast, dots"]["MB"] / rows[HAND_DOTS]["MB"])


def test_an_error_is_one_of_the_whole_gradient():
    """(3, 4, 12) beside (3, 4, 11): 1 of 13, by hand."""
    exact = np.float64(2), [np.array([3.0, 4.0]), np.array(12.0)]
    found = np.float64(2.5), [np.array([3.0, 4.0]), np.array(11.0)]
    assert autocast_accuracy.relative_errors(found, exact) == (0.25, pytest.approx(1 / 13))


@pytest.mark.slow
def test_accuracy_is_measured_against_float64():
    """Half an ulp is 2**-24 in float32 and 2**-8 in bfloat16: there is room between the errors."""
    rows = autocast_accuracy.measure_accuracy("f32", "bf16", SIZE, seeds=2, trained_steps=0)
    assert {row["form"] for row in rows} == set(autocast_accuracy.ACCURACY_FORMS)
    for row in rows:
        low, high = (0, 1e-5) if row["form"] == "f32" else (1e-3, 3e-2)
        assert low < row["gradient mean"] <= row["gradient max"] < high


@pytest.mark.slow
def test_a_form_is_timed_beside_the_one_by_hand_but_for_one_that_a_backend_cannot_run(monkeypatch):
    monkeypatch.setitem(autocast_forms.SIZES, "tiny", SIZE)
    measure = lambda: autocast.measure_steps("autocast, dots", "tiny", "bf16", starts=1, turns=1)
    rows = [measure()]

    def fail(*args, **options):
        raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: no such product\nmore")

    monkeypatch.setattr(autocast, "compare", fail)
    rows.append(measure())
    assert {row["beside"] for row in rows} == {HAND_DOTS}
    assert rows[0]["ratio"] == rows[0]["mpx"]["ms"] / rows[0]["by hand"]["ms"]
    assert rows[0]["target"].startswith("at most 1.03: ")
    assert "| autocast, dots | by hand, dots |" in autocast.steps_sheets(rows)[0].markdown()
    assert rows[1]["left out"] == "UNIMPLEMENTED: no such product"
