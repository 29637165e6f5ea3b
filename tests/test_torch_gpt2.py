"""GPT-2 in PyTorch is the same model and the same training, and the comparison says what was measured."""

import dataclasses
import functools
import importlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import gpt2_in_jax, ladder, torch_gpt2
from benchmarks.rungs import COUNTERPARTS, FIXED, RUNGS, TORCH_F32, TORCH_FUSED, TORCH_RUNGS, choose_setting
from benchmarks.token_batches import token_batches
from benchmarks.workers import Clock
from examples.gpt.model import PRESETS
from examples.gpt.training import Hyperparameters
from tests.test_ladder import CPU, GPU, SMALLEST, STEP, shown

pytestmark = pytest.mark.optax_promotion

TRAINING = {"steps": 10, "learning_rate": 3e-3}
SETTING = dataclasses.replace(choose_setting("cpu"), preset="smallest", batch_size=2, steps=1, rounds=1)
PADDED_F32 = dataclasses.replace(TORCH_F32, vocabulary_multiple=128)
PARTS = token_batches(SMALLEST.vocabulary, (2, 3, 17), count=1)[0]  # two microbatches


@pytest.fixture(autouse=True)
def smallest(monkeypatch):
    monkeypatch.setitem(PRESETS, "smallest", SMALLEST)


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.fixture
def in_torch(torch):
    return importlib.import_module("benchmarks.gpt2_in_torch")


# ---- the model ------------------------------------------------------------------------------------------------------


def jax_job(**more):
    return {"kind": "curve", "preset": "smallest", "batch_size": 2, **FIXED.settings(), **more}


def torch_job(rung, kind="curve", **more):
    return torch_gpt2.torch_job(rung, SETTING, False, kind, **more)


@functools.cache
def in_jax(folder):
    """The weights of a model in a file, and its logits and gradients of two microbatches.

    Biases and norms begin at 0 and 1, where some mistakes would not be seen, so noise is added to all weights.
    """
    program = gpt2_in_jax.program_of(jax_job())

    @jax.jit
    def compute(parts):
        noise = lambda p: p + 0.1 * jax.random.normal(jax.random.key(p.size), p.shape)
        params = jax.tree.map(noise, program.init(3)[0])
        grads = [program.gradients(params, None, part)[1] for part in parts]
        return params, program.logits(params, parts[0, :, :-1]), jax.tree.map(lambda a, b: (a + b) / 2, *grads)

    params, logits, grads = compute(jnp.asarray(PARTS))
    np.savez(folder / "weights.npz", **gpt2_in_jax.weights_for_torch(params))
    return str(folder / "weights.npz"), np.asarray(logits), gpt2_in_jax.weights_for_torch(grads)


@functools.cache
def curve_in_jax(folder):
    """The losses of a training, and the file of the weights that it begins with."""
    weights = str(folder / "start.npz")
    return gpt2_in_jax.answer(jax_job(hyperparameters=TRAINING, weights=weights)), weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("weights")


@pytest.mark.parametrize("flash", [False, True])
def test_logits_and_gradients_of_both_are_equal(torch, in_torch, folder, flash):
    weights, logits, grads = in_jax(folder)
    trainer = in_torch.Trainer(torch_job(dataclasses.replace(PADDED_F32, flash=flash), weights=weights))
    parts = torch.from_numpy(PARTS).long()
    theirs = trainer.model(parts[0, :, :-1]).detach().numpy()
    assert np.isneginf(logits[..., SMALLEST.vocabulary :]).all()
    assert relative_error(theirs, logits[..., : SMALLEST.vocabulary]) < 1e-5
    trainer.gradients(parts)
    found = {name: p.grad.numpy() for name, p in trainer.model.named_parameters()}
    assert found.keys() == grads.keys()
    assert {name: relative_error(found[name], grads[name]) < 1e-5 for name in grads} == dict.fromkeys(grads, True)


def relative_error(found, expected):
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("options", [{}, {"flash": True, "fused": True}], ids=["plain", "fused"])
def test_ten_steps_of_both_have_the_same_losses(in_torch, folder, options):
    """Clipping, the schedule, AdamW and which weights decay: a loss that begins at 4.6 would show any of them."""
    ours, weights = curve_in_jax(folder)
    job = torch_job(dataclasses.replace(PADDED_F32, **options), hyperparameters=TRAINING, weights=weights)
    assert torch_gpt2.compare(ours, in_torch.answer(job))["largest difference"] < 1e-4
    assert ours["losses"][-1] < ours["losses"][0] - 0.1
    # Negative control: half the learning rate is seen.
    other = in_torch.answer(job | {"hyperparameters": TRAINING | {"learning_rate": 1.5e-3}})
    assert torch_gpt2.compare(ours, other)["largest difference"] > 1e-2


def test_the_schedule_is_that_of_the_example(in_torch):
    schedule = Hyperparameters(**TRAINING | {"steps": 40}).schedule()
    theirs = [in_torch.learning_rate(update, steps=40, learning_rate=3e-3) for update in range(45)]
    np.testing.assert_allclose(theirs, [schedule(update) for update in range(45)], rtol=1e-5)


def test_both_models_of_gpt2_have_as_many_weights(torch, in_torch):
    """124,439,808 without padding; nothing is allocated."""
    config = torch_gpt2.torch_job(TORCH_F32, choose_setting("gpu"), False, "step")["config"]
    with torch.device("meta"):
        model = in_torch.GPT(**config, rows=config["vocabulary"], flash=False)
    assert sum(p.numel() for p in model.parameters()) == 124_439_808
    job = {"preset": "gpt2-124m"} | FIXED.settings() | {"vocabulary_multiple": 1}
    ours = jax.tree.leaves(jax.eval_shape(gpt2_in_jax.program_of(job).init, 0)[0])
    assert sum(leaf.size for leaf in ours) == 124_439_808
    assert len(ours) == len(list(model.parameters())) == 148


def test_initial_weights_have_the_same_scales(in_torch, folder):
    ours = dict(np.load(curve_in_jax(folder)[1]).items())
    trainer = in_torch.Trainer(torch_job(PADDED_F32))
    theirs = {name: p.detach().numpy() for name, p in trainer.model.named_parameters()}
    assert {name: x.shape for name, x in ours.items()} == {name: x.shape for name, x in theirs.items()}
    for name in ours:
        np.testing.assert_allclose(ours[name].std(), theirs[name].std(), rtol=0.15)
        np.testing.assert_allclose(ours[name].mean(), theirs[name].mean(), atol=0.003)


def test_a_step_of_pytorch_is_measured(in_torch):
    """bfloat16 autocast, fused AdamW, two microbatches."""
    row = in_torch.answer(torch_job(TORCH_FUSED, "step", microbatches=2))
    assert json.loads(json.dumps(row)) == row
    assert row["tokens"] == 2 * 2 * 16
    assert 3 < row["loss"] < 6
    assert row["process bytes"] > 0


# ---- the comparison -------------------------------------------------------------------------------------------------


def speeds(module, job, **options):
    """Both sides on a GPU: JAX has 1.2 times the speed and 0.7 of the memory; PyTorch cannot compile TF32."""
    row = STEP | {"peak bytes": 7 * 10**9, "peak bytes before": 0}
    if module == torch_gpt2.WORKER:
        if job["compile"] and job["matmul_precision"] == "high" and not job["autocast"]:
            return {"failed": "no compiler"}
        return STEP | {"ms": 2.4, "peak bytes": 10**10}
    return row | ({"ms": 20.0} if job["recipe"] == "f32" else {})


def measured(*names, compiled=False, run=speeds):
    bench = ladder.Bench(choose_setting("gpu"), GPU, Clock(None), run)
    jax = [ladder.measure_rung(RUNGS[name], bench) for name in names]
    others = dict.fromkeys(COUNTERPARTS[name] for name in names)
    return jax, [row for name in others for row in torch_gpt2.measure_either(TORCH_RUNGS[name], bench, compiled)]


def test_every_rung_has_a_counterpart():
    assert COUNTERPARTS.keys() == RUNGS.keys()
    assert all(RUNGS[ours].accumulate == TORCH_RUNGS[theirs].accumulate for ours, theirs in COUNTERPARTS.items())


def test_ratios_are_those_of_counterparts():
    found = torch_gpt2.pairs(*measured("8bit", "accumulate", compiled=True))
    assert [(pair.jax["rung"], pair.torch["rung"]) for pair in found] == [
        ("8bit", "fused"),
        ("accumulate", "accumulate"),
    ]
    for pair in found:
        assert [pair.speed, pair.memory] == pytest.approx([1.2, 0.7])
        assert pair.torch["compiled"]


def test_where_pytorch_cannot_compile_it_is_run_without_and_the_row_says_so():
    jax, torch = measured("tf32", "bf16", compiled=True)
    found = torch_gpt2.pairs(jax, torch)
    assert [pair.torch["compiled"] for pair in found] == [False, True]
    assert "tf32 (not compiled)" in shown(torch_gpt2.pairs_table(found))
    assert "no compiler" in shown(torch_gpt2.torch_table(torch))


def test_a_failure_of_either_side_leaves_the_other_rungs():
    def run(module, job, **options):
        jax_fails = module == ladder.WORKER and job["recipe"] == "tf32"
        return {"failed": "out of memory"} if jax_fails else speeds(module, job)

    jax, torch = measured("tf32", "8bit", run=run)
    assert [pair.jax["rung"] for pair in torch_gpt2.pairs(jax, torch)] == ["8bit"]
    assert [row["rung"] for row in torch] == ["tf32", "fused"]


def test_without_a_count_of_memory_there_is_no_ratio_of_it():
    process = STEP | {"process bytes": 10**9}
    jax, torch = measured("8bit", run=lambda module, job, **options: STEP if module == ladder.WORKER else process)
    found = torch_gpt2.pairs(jax, [{key: value for key, value in row.items() if "peak" not in key} for row in torch])
    assert [pair.memory for pair in found] == [None]
    assert "of memory" not in shown(torch_gpt2.pairs_table(found))


def test_targets_are_judged_at_the_top_rung():
    """20 ms in float32 against 2 at the top: ten times; half a TFLOP/s of one: an MFU of 50%."""
    jax, torch = measured("f32", "accumulate")
    judged = torch_gpt2.targets(jax, torch)
    assert [round(row["value"], 3) for row in judged] == [1.2, 0.7, 0.5, 10.0]
    assert all(row["met"] for row in judged)
    jax[1]["MFU"] = 0.44
    assert [row["met"] for row in torch_gpt2.targets(jax, torch)] == [True, True, False, True]
    assert torch_gpt2.targets(*measured("8bit")) == []  # neither was measured


def test_curves_are_compared():
    curve = {"losses": [3.0, 2.0, 1.0]}
    run = lambda module, job, **options: curve if module == ladder.WORKER else {"losses": [3.0, 2.25, 1.0]}
    rows = torch_gpt2.measure_curves(ladder.Bench(SETTING, CPU, Clock(None), run), False, 3)
    assert [row["largest difference"] for row in rows] == [0.25, 0.25]
    assert rows[0]["last JAX"] == 2.0
    assert "2.0000" in shown(torch_gpt2.curves_table(rows))


def test_a_curve_that_fails_says_which_side():
    assert torch_gpt2.compare({"failed": "a"}, {"losses": []}) == {"failed": "JAX: a"}
    assert torch_gpt2.compare({"losses": []}, {"failed": "b"}) == {"failed": "PyTorch: b"}
