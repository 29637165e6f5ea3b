"""Check that AdamW trains mixtures of experts on many GPUs, in the programs that XLA
compiles for them.

4,096 tokens a GPU. Figures are of jax 0.10.2.
"""

import re

import jax
import pytest

import mpx
from benchmarks.reading import flash_attention
from examples import experts
from mpx.tools.program import target_devices

pytestmark = [pytest.mark.optax_promotion, pytest.mark.many_devices, pytest.mark.slow]

GIB = 2**30
SMALL = {"attention": "cudnn", "kept": mpx.Blockwise8bit()}


def step_of(size, target, count, **options):
    """Return a step, and its arguments on so many GPUs."""
    jax.clear_caches()
    gpus = target_devices(target, count)
    return experts.step_and_arguments(
        size, "bf16-split24-4bit", gpus, **SMALL, **options
    )[:2]


def count_of(params):
    return sum(leaf.size for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize(
    ("size", "target", "count", "billions", "peak"),
    [("1T", "h200", 64, 1027.77, 74.2), ("30B", "h100", 2, 30.53, 66.5)],
)
def test_adamw_trains_a_mixture_of_experts(h200, size, target, count, billions, peak):
    with flash_attention():
        train, arguments = step_of(size, target, count)
        step = mpx.step_report(train, *arguments, target=target)
    config = experts.CONFIGS[size]
    assert count_of(arguments[0]) / 1e9 == pytest.approx(billions, abs=0.01)
    assert step.peak_bytes / GIB == pytest.approx(peak, abs=1)
    assert step.peak_bytes < 0.95 * step.target.memory_bytes
    # There and back in the forward pass, there once more, and there and back for
    # cotangents; only weights of tokens and the embedding's columns in float32.
    places = config.experts * -(-5 * 4096 * config.chosen // (4 * config.experts))
    sent = 2 * config.width * places * (count - 1) / count * config.depth
    assert step.sent_by_kind["all-to-all bf16"] / sent == pytest.approx(5, abs=0.1)
    assert step.sent_by_kind["all-to-all f32"] < sent / 50
    # Each weight but of experts and the embedding: gathered twice, added up once.
    of_experts = 3 * config.experts * config.width * config.hidden * config.depth
    gathered = count_of(arguments[0]) - config.vocabulary * config.width - of_experts
    for kind in ("all-gather bf16", "reduce-scatter f32"):
        assert step.sent_by_kind[kind] / gathered == pytest.approx(
            4 * (count - 1) / count, rel=0.01
        )


def test_nothing_is_sorted_or_scattered_in_the_backward_pass_of_a_layer(h200):
    """Experts are chosen and places found once, in the forward pass."""
    with flash_attention():
        step, arguments = step_of("30B", "h200", 8, depth=3)
        mesh = jax.typeof(arguments[2]).sharding.mesh
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            lowered = step.trace(*arguments).lower(lowering_platforms=("cuda",))
        text = lowered.compile({"xla_gpu_autotune_level": "0"}).as_text()
    lines = re.findall(r" (sort|scatter)\(.*op_name=\"([^\"]*)\"", text)
    forward = {(op, "while" in name) for op, name in lines if "transpose" not in name}
    backward = {(op, "while" in name) for op, name in lines if "transpose" in name}
    assert forward == {("sort", True), ("scatter", True)}
    # The embedding's gradient, behind the loop over layers.
    assert backward == {("scatter", False)}
