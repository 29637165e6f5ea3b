"""Check that AdamW trains 70 billion parameters of a Llama on eight GPUs, in the
programs that XLA compiles for them.

4,096 tokens a GPU. Figures are of jax 0.10.2.
"""

import jax
import pytest

import mpx
from benchmarks.reading import flash_attention
from examples import llama
from mpx.tools.program import target_devices

pytestmark = [pytest.mark.optax_promotion, pytest.mark.many_devices, pytest.mark.slow]

GIB = 2**30


@pytest.mark.parametrize(
    ("target", "recipe", "options", "peak"),
    [
        # While gradients of all layers were kept, 83.6 and 61.7; with the head whole on
        # each device 52.2 and 48.2.
        ("h200", "bf16-split24-8bit", {"grad_dtype": "float32"}, 48.7),
        ("h100", "bf16-split24-4bit", {"attention": "cudnn"}, 44.7),
    ],
)
def test_adamw_trains_seventy_billion_parameters_on_eight_gpus(
    h200, target, recipe, options, peak
):
    gpus, kept = target_devices(target, 8), mpx.Blockwise8bit()
    with flash_attention():
        step, arguments, _ = llama.step_and_arguments(
            "70B", recipe, gpus, kept=kept, **options
        )
        report = mpx.step_report(step, *arguments, target=target)
    count = sum(leaf.size for leaf in jax.tree.leaves(arguments[0]))
    assert count == 70_553_706_496
    assert report.peak_bytes / GIB == pytest.approx(peak, abs=1)
    assert report.peak_bytes < report.target.memory_bytes
    # 7/8 of each weight but the embedding is gathered in each pass, and of its gradient
    # added up once.
    bytes_of_each = 4 * 7 / 8 * (count - 128_256 * 8192) / count
    sent = {
        name: n / count for name, n in report.sent_by_kind.items() if n > count // 10
    }
    assert sent == {
        "all-gather bf16": pytest.approx(bytes_of_each, abs=0.01),
        "reduce-scatter f32": pytest.approx(bytes_of_each, abs=0.01),
    }
    assert bool(report.findings) == (report.peak_bytes > report.target.usable_bytes)
    # 75%: an H100 must give more of it.
    assert all("that JAX takes" in finding.what for finding in report.findings)
