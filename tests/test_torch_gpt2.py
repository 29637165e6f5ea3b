"""Check the benchmark beside PyTorch: its model is the model of mpx, and turns are
folded into rows.

PyTorch is several GB from the default index, so CI leaves it out: `pip install torch`
brings the tests that need it.
"""

import copy
import dataclasses
import sys

import jax
import numpy as np
import pytest
import typer

from benchmarks import torch_gpt2, workers
from examples.gpt.model import Config
from examples.gpt.recipes import get_recipe
from examples.gpt.training import Hyperparameters, Program

pytestmark = pytest.mark.optax_promotion

# With padding rows.
CONFIG = Config(
    width=32, depth=1, heads=2, context=8, vocabulary=20, vocabulary_multiple=16
)
STEPS = 4
# The learning rate rises from zero to its peak in these.
HYPERPARAMETERS = Hyperparameters(steps=10 * STEPS, learning_rate=3e-2)


@pytest.fixture
def gpt2_in_torch():
    pytest.importorskip(
        "torch", reason="PyTorch is not installed: `pip install torch` runs this"
    )
    from benchmarks import gpt2_in_torch

    # So small a model is slower by several threads.
    gpt2_in_torch.torch.set_num_threads(1)
    return gpt2_in_torch


def far_from_initial(params):
    """Return random weights, so large that no part of the model is lost in the loss."""
    leaves, treedef = jax.tree.flatten(params)
    rng = np.random.default_rng(0)
    return treedef.unflatten(
        [np.float32(rng.normal(scale=0.3, size=x.shape)) for x in leaves]
    )


def copied(gpt2_in_torch, params):
    """Return PyTorch's model with these weights; each goes by its name."""
    torch = gpt2_in_torch.torch
    model, weights = gpt2_in_torch.GPT(CONFIG), {}
    for path, leaf in jax.tree.leaves_with_path(params):
        *module, name = (str(key.key) for key in path[:-1] if key.key != "attention")
        array = np.array(leaf.T if name == "kernel" else leaf)
        name = "weight" if name in ("kernel", "scale") else name
        weights[".".join([*module, name])] = torch.from_numpy(array)
    model.load_state_dict(weights)
    return model


def test_the_model_and_the_step_of_pytorch_are_those_of_mpx(gpt2_in_torch, monkeypatch):
    """Losses before each of four updates in float32, to 1e-5. Negative controls: a
    model whose parts stand before the heads, as in most programs, and steps without
    weight decay and without clipping.
    """
    program = Program(get_recipe("f32"), CONFIG, HYPERPARAMETERS)
    params = far_from_initial(jax.jit(program.init)(0)[0])
    batches = np.random.default_rng(1).integers(0, 20, (STEPS, 4, 9)).astype(np.int32)
    model, other = copied(gpt2_in_torch, params), copied(gpt2_in_torch, params)
    for block in other.blocks:
        weight = block.query_key_value.weight
        weight.data = weight.data.unflatten(0, (2, 3, -1)).transpose(0, 1).flatten(0, 2)

    def in_torch(model, **change):
        hyperparameters = dataclasses.replace(HYPERPARAMETERS, **change)
        monkeypatch.setattr(gpt2_in_torch, "TRAINING", hyperparameters)
        step = gpt2_in_torch.make_step(copy.deepcopy(model), autocast=False)
        return [float(step(gpt2_in_torch.torch.from_numpy(x).long())) for x in batches]

    train_step, expected = jax.jit(program.train_step), []
    state = (params, program.tx.init(params))
    for tokens in batches:
        *state, metrics = train_step(*state, tokens[None])
        expected.append(float(metrics.loss))

    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == sum(leaf.size for leaf in jax.tree.leaves(params))
    assert in_torch(model) == pytest.approx(expected, rel=1e-5)
    wrong = (
        in_torch(other),
        in_torch(model, weight_decay=0),
        in_torch(model, clip_norm=9),
    )
    for losses in wrong:
        assert losses != pytest.approx(expected, rel=1e-5)


def turn(side, ms, peak=2e9, before=0):
    row = {"side": side, "name": side, "ms": ms, "low": ms - 1, "high": ms + 1}
    row |= {"tokens": 1000, "loss": 2.0, "compile s": 3.0}
    return row | {"peak bytes": peak, "peak bytes before": before}


def test_turns_of_a_side_are_one_row_beside_pytorch():
    """A B B A; where compiling took the most memory, a step's own is not known."""
    rows = [turn("torch", 40), turn("padded", 20, 3e9, 3e9)]
    rows += [turn("padded", 30, 3e9, 3e9), turn("torch", 60)]
    (sheet,) = torch_gpt2.sheets(rows)
    printed = sheet.markdown()
    assert "| torch | 50.00 | 39.00 to 61.00 | 20,000 | 1.00 | 2 |" in printed
    assert "| padded | 25.00 | 19.00 to 31.00 | 40,000 | 2.00 | 3 at most |" in printed


def test_the_command_takes_sides_in_turn_and_goes_on_after_a_failure(
    monkeypatch, capsys
):
    asked = []

    def run_worker(function, arguments, *, timeout):
        assert function == "benchmarks.torch_gpt2:measure"
        asked.append(arguments["side"])
        if arguments["side"] == "torch":
            return [{"failed": "no PyTorch"}]
        return [turn(arguments["side"], 20)]

    monkeypatch.setattr(torch_gpt2, "run_worker", run_worker)
    torch_gpt2.main()
    printed = capsys.readouterr().out
    sides = ["torch", "torch-cudnn", "padded"]
    assert asked == sides + sides[::-1]
    assert "torch: no PyTorch" in printed
    assert "| padded | 20.00 |" in printed
    with pytest.raises(typer.BadParameter, match="no rung is called keras; there are"):
        torch_gpt2.measure("smallest", "keras")


def test_without_pytorch_an_error_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "benchmarks.gpt2_in_torch", raising=False)
    monkeypatch.delattr("benchmarks.gpt2_in_torch", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match="needs PyTorch: `pip install torch`"):
        torch_gpt2.measure("smallest", "torch")


@pytest.mark.slow
@pytest.mark.parametrize("side", torch_gpt2.TURNS[:3])
def test_each_side_is_measured_at_the_smallest_size(side, gpt2_in_torch):
    job = {"size": "smallest", "side": side}
    (row,) = workers.run_worker("benchmarks.torch_gpt2:measure", job)
    assert "failed" not in row
    assert row["tokens"] == 256
    assert ("note" in row) == (jax.default_backend() != "gpu")
    assert 5 < row["loss"] < 6
