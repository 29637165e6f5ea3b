"""Check what a training step of GPT-2 multiplies, writes and converts, in the program
that XLA compiles for a GPU.

GPT-2 124M with two of its twelve layers, 16 sequences of 1,024 tokens. Figures are of
jax 0.10.2.
"""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import optax
import pytest

import mpx
from benchmarks.reading import flash_attention
from examples.gpt import loss, model
from examples.gpt.recipes import get_recipe
from mpx._autocast import control_flow
from tests.gpu_program import gpt2_step
from tests.gpu_program.gpt2_step import BATCH

pytestmark = pytest.mark.optax_promotion

GPT2 = dataclasses.replace(model.PRESETS["gpt2-124m"], depth=2)
LENGTH, WIDTH, ROWS = GPT2.context, GPT2.width, GPT2.padded_vocabulary
STREAM = (BATCH, LENGTH, WIDTH)  # the residual stream, float32 under every recipe
LOGITS = BATCH * LENGTH * ROWS


@pytest.fixture
def flash():
    """Let JAX compile cuDNN's attention for a GPU that is not here."""
    with flash_attention():
        yield


def report_of_step(recipe, **layout):
    """Return the parameters and the report of a whole step."""
    return gpt2_step.report_of_step(
        get_recipe(recipe), dataclasses.replace(GPT2, **layout)
    )


def report_of_loss(chunks=1):
    """Return the report of the mean loss and its gradient under autocast, from the
    features on.
    """
    loss_fn = functools.partial(
        loss.mean_loss, vocabulary=GPT2.vocabulary, chunks=chunks
    )
    gradients = jax.value_and_grad(mpx.autocast(loss_fn, "bf16"), (0, 1))
    shapes = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (STREAM, (ROWS, WIDTH))
    )
    return mpx.step_report(
        gradients, *shapes, jax.ShapeDtypeStruct(STREAM[:2], jnp.int32), target="h200"
    )


def written(report):
    """Return dtype, dimensions and kernel of every array that kernels write into
    memory.
    """
    return [
        (dtype, tuple(int(size) for size in dims.split(",") if size), kernel)
        for kernel in report.kernels
        for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", kernel.result)
    ]


def of_the_size_of_logits(report, chunks=1):
    return [
        dtype
        for dtype, dims, _ in written(report)
        if math.prod(dims) * chunks >= LOGITS
    ]


def softmaxes(report):
    return sum(
        kernel.times
        for kernel in report.kernels
        if kernel.operation == "__cudnn$fmhaSoftmax"
    )


def moved_outside_products(report):
    return report.moved_bytes - report.moved_by_kind["products"]


# --- Products. ---
@pytest.mark.parametrize(
    ("recipe", "dtype"), [("bf16-split", "bf16"), ("tf32", "tf32")]
)
def test_every_product_of_a_step_is_in_the_compute_dtype(recipe, dtype, h200):
    """Six FLOPs for each weight and token, and attention, of one layer."""
    params, report = report_of_step(recipe, depth=1)
    assert report.flops.keys() == {dtype}
    weights = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert (
        6 * weights * BATCH * LENGTH
        < report.flops[dtype]
        < 8 * weights * BATCH * LENGTH
    )
    assert report.donated_bytes > 0.99 * report.output_bytes


# --- The loss. ---
@pytest.mark.parametrize("chunks", [1, 4])
def test_logits_and_their_gradient_are_written_once_each_and_in_16_bits(chunks, h200):
    """Read for maximum and sum together, and to write the gradient over them: three
    times their size is moved.
    """
    report = report_of_loss(chunks)
    assert of_the_size_of_logits(report, chunks) == ["bf16", "bf16"] * chunks
    assert moved_outside_products(report) == pytest.approx(
        3 * 2 * LOGITS, rel=0.02 if chunks == 1 else 0.16
    )
    logits_at_a_time, gradients = 2 * LOGITS / chunks, 2 * chunks * ROWS * WIDTH
    assert report.temporary_bytes < 1.1 * (logits_at_a_time + gradients)


def test_a_loss_that_looks_its_targets_up_writes_float32_logits(h200, monkeypatch):
    """Negative control: Optax's cross-entropy, whose gradient is a scatter."""
    monkeypatch.setattr(
        loss, "cross_entropy", optax.softmax_cross_entropy_with_integer_labels
    )
    report = report_of_loss()
    assert of_the_size_of_logits(report).count("f32") == 2
    assert moved_outside_products(report) > 8 * 2 * LOGITS
    assert report.temporary_bytes > 4 * LOGITS


# --- A whole step. ---
def test_a_step_writes_few_large_float32_arrays_and_has_no_kernel_that_only_converts_activations(
    flash, h200
):
    """Float32 are the stream, and the embedding's gradient and moments.

    One kernel widens the head's gradient of the embedding, to which the rows of the
    look-up are added in place.
    """
    _, report = report_of_step("bf16-split", attention="cudnn")
    wide = {
        dims
        for dtype, dims, _ in written(report)
        if dtype == "f32" and math.prod(dims) >= math.prod(STREAM)
    }
    assert wide == {STREAM, (ROWS, WIDTH)}
    copies = [
        kernel
        for kernel in report.kernels
        if kernel.kind == "conversions and copies" and kernel.bytes > 1e6
    ]
    assert [(kernel.result, kernel.times) for kernel in copies] == [
        (f"f32[{ROWS},{WIDTH}]", 1)
    ]


def test_stacked_weights_take_one_kernel_of_the_optimizer_for_all_layers_and_no_copies(
    flash, h200
):
    """Unrolled (the negative control), each of two layers has a kernel for each of its
    four matrices.

    Stacked, two biases (2 x 2,304 and 2 x 3,072) are large enough for 8 bits, and have
    a kernel too.
    """
    of_optimizer = lambda report: sum(
        kernel.times
        for kernel in report.kernels
        if "training.py" in kernel.source and kernel.kind == "library calls"
    )
    reports = {
        layers: report_of_step(
            "bf16-split-8bit", attention="cudnn", layers=layers, checkpoint="dots"
        )[1]
        for layers in ("stacked", "unrolled")
    }
    assert of_optimizer(reports["unrolled"]) == of_optimizer(reports["stacked"]) + 4 - 2
    assert reports["stacked"].kernel_count < reports["unrolled"].kernel_count
    # A layer's weights, taken out of their stack.
    stacks = (
        "bf16[1,768,",
        "bf16[1,3072,",
    )
    assert not [
        kernel
        for kernel in reports["stacked"].kernels
        if kernel.result.startswith(stacks)
    ]


def test_a_thin_checkpoint_keeps_no_result_of_the_widest_layer(flash, h200):
    """For each layer 100 MB less; in exchange its product runs once more, 77 GFLOP a
    layer. Attention runs once.
    """
    layout = {"attention": "cudnn", "depth": 1}
    dots, thin = (
        report_of_step("bf16-split", checkpoint=kept, **layout)[1]
        for kept in ("dots", "thin")
    )
    assert (
        thin.flops["bf16"] - dots.flops["bf16"]
        == 2 * BATCH * LENGTH * WIDTH * 4 * WIDTH
    )
    assert softmaxes(dots) == 1


@pytest.mark.parametrize("checkpoint", ["none", "dots", "none, as JAX keeps them"])
def test_scanned_layers_stack_nothing_in_float32_but_the_stream(
    checkpoint, flash, h200, monkeypatch
):
    """Negative control: as JAX keeps them, activations are stacked in float32, as it
    traced them.
    """
    checkpoint, _, by_jax = checkpoint.partition(", ")
    if by_jax:
        monkeypatch.setattr(
            control_flow, "_leaves_open_what_is_kept", lambda jaxpr: False
        )
    _, report = report_of_step(
        "bf16-split", attention="cudnn", layers="scanned", checkpoint=checkpoint
    )
    stacked = {
        dims[1:]
        for dtype, dims, _ in written(report)
        if dtype == "f32" and dims[:2] == (GPT2.depth, BATCH)
    }
    large = {dims for dims in stacked if math.prod(dims) >= math.prod(STREAM)}
    assert large == ({STREAM, (*STREAM[:2], 4 * WIDTH)} if by_jax else {STREAM})


def test_a_checkpoint_that_does_not_keep_what_cudnn_knows_of_its_softmax_runs_it_twice(
    flash, h200, monkeypatch
):
    """The negative control. Its statistics are 1/32 of its result."""
    monkeypatch.setattr(model, "CUDNN_FORWARD", "no such kernel")
    _, report = report_of_step(
        "bf16-split", attention="cudnn", checkpoint="dots", depth=1
    )
    assert softmaxes(report) == 2
