"""Check that the benchmarks read the ladder's programs for a GPU that is not here."""

import dataclasses

import pytest

from benchmarks import gpt2_in_jax
from benchmarks.rungs import RUNGS
from examples.gpt.model import PRESETS, Config

pytestmark = pytest.mark.optax_promotion


def test_a_rung_is_compiled_with_flash_attention_and_read(monkeypatch, h200):
    """cuDNN's kernel is taken although no GPU can be asked: the six products of XLA's attention are gone.

    Each has two FLOPs for 2 sequences, 32 x 32 pairs of tokens and a width of 32.
    """
    monkeypatch.setitem(PRESETS, "smallest", Config(width=32, depth=1, heads=2, context=32, vocabulary=128))
    job = {"kind": "program", "preset": "smallest", "batch_size": 2, "microbatches": 1, "target": "h200"}
    by_attention = {
        attention: gpt2_in_jax.answer(job | dataclasses.replace(RUNGS["flash"], attention=attention).settings())
        for attention in ("cudnn", "xla")
    }
    row = by_attention["cudnn"]
    assert (row["compiled for"], row["tokens"]) == ("NVIDIA H200", 64)
    assert 0 < row["program"]["bound ms"] < row["program"]["reached ms"]
    flops = {attention: row["program"]["flops"] for attention, row in by_attention.items()}
    assert flops["xla"].keys() == flops["cudnn"].keys() == {"bf16"}
    assert flops["xla"]["bf16"] - flops["cudnn"]["bf16"] == 6 * 2 * 2 * 32 * 32 * 32
