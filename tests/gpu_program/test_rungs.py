"""Check that the benchmarks read the ladder's programs for a GPU that is not here."""

import dataclasses

import pytest

from benchmarks import gpt2_in_jax, ladder
from benchmarks.rungs import ON_GPU, RUNGS
from examples.gpt.model import PRESETS, Config

pytestmark = pytest.mark.optax_promotion


def test_a_rung_is_compiled_with_flash_attention_and_read(monkeypatch, h200):
    """cuDNN's kernel is taken although no GPU can be asked: the six products of XLA's attention are gone.

    Each has two FLOPs for 2 sequences, 32 x 32 pairs of tokens and a width of 32.
    """
    monkeypatch.setitem(PRESETS, "smallest", Config(width=32, depth=1, heads=2, context=32, vocabulary=128))
    setting = dataclasses.replace(ON_GPU, preset="smallest", batch_size=2)
    rungs = {attention: dataclasses.replace(RUNGS["flash"], attention=attention) for attention in ("cudnn", "xla")}
    rows = {name: gpt2_in_jax.read_step(**ladder.job_of(rung, setting, target="h200")) for name, rung in rungs.items()}
    row = rows["cudnn"]
    assert (row["compiled for"], row["tokens"]) == ("NVIDIA H200", 64)
    assert 0 < row["program"]["bound ms"] < row["program"]["reached ms"]
    flops = {attention: row["program"]["flops"] for attention, row in rows.items()}
    assert flops["xla"].keys() == flops["cudnn"].keys() == {"bf16"}
    assert flops["xla"]["bf16"] - flops["cudnn"]["bf16"] == 6 * 2 * 2 * 32 * 32 * 32
