"""Plots show what they were given, nothing overlaps or is cut off, and they can be read
on white and on dark pages.
"""

import itertools
import math
from typing import get_args

import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_rgb, to_rgba
from matplotlib.text import Text

import mpx
import mpx.plot
from mpx.tools.plan.rows import Kind

WHITE, DARK = "#FFFFFF", "#121212"


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def contrast(a, b):
    """Return WCAG 2.1's ratio of the relative luminances of two sRGB colors, each with
    0.05 added.
    """

    def luminance(color):
        linear = [
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
            for c in to_rgb(color)
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted([luminance(a), luminance(b)])
    return (high + 0.05) / (low + 0.05)


def gradients():
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=3000) * np.exp2(3 * rng.normal(size=3000) - 18)
    return {
        "w": jnp.asarray(np.append(np.float32(numbers), np.float32([0, 0, np.inf])))
    }


PICTURES = {
    "memory": lambda **axes: mpx.plot.memory(mpx.compare_plans(2**20), **axes),
    "a report": lambda **axes: mpx.plot.exponents(
        mpx.underflow_report(gradients()), **axes
    ),
    "a histogram": lambda **axes: mpx.plot.exponents(
        mpx.underflow_report(gradients()).histogram, "f32", **axes
    ),
}


def drawn_texts(figure):
    """Return the visible texts: not those of ticks outside of the axis."""
    figure.canvas.draw()
    hidden = set()
    for axes in figure.findobj(matplotlib.axes.Axes):
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
                if not low - 1e-9 <= tick.get_loc() <= high + 1e-9:
                    hidden |= {tick.label1, tick.label2}
                hidden |= {
                    label
                    for label in (tick.label1, tick.label2)
                    if not label.get_visible()
                }
    return [
        text
        for text in figure.findobj(Text)
        if text.get_visible() and text.get_text() and text not in hidden
    ]


def legend_of(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


@pytest.mark.parametrize("draw", PICTURES.values(), ids=PICTURES)
def test_a_picture_is_transparent_and_all_its_text_can_be_read_on_both_pages_and_on_a_phone(
    draw, tmp_path
):
    """No text is cut off, none lies on another, and no setting of Matplotlib changes."""
    settings = dict(matplotlib.rcParams)
    figure = draw().figure
    assert dict(matplotlib.rcParams) == settings
    figure.savefig(tmp_path / "picture.png")
    assert plt.imread(tmp_path / "picture.png")[0, -1, 3] == 0
    boxes = {text: text.get_window_extent() for text in drawn_texts(figure)}
    assert len(boxes) > 5
    for text, box in boxes.items():
        assert min(box.x0, box.y0) >= 0, text
        assert box.x1 <= figure.bbox.x1, text
        assert box.y1 <= figure.bbox.y1, text
        assert min(contrast(text.get_color(), page) for page in (WHITE, DARK)) >= 4.1, (
            text
        )
        # Pixels, 390 of which are the width.
        assert text.get_fontsize() / 72 * 390 / figure.get_figwidth() > 9.5, text
    for (a, box_a), (b, box_b) in itertools.combinations(boxes.items(), 2):
        assert not box_a.overlaps(box_b), (a, b)


@pytest.mark.parametrize("draw", PICTURES.values(), ids=PICTURES)
def test_it_draws_on_given_axes_and_makes_no_figure(draw):
    figure, (left, right) = plt.subplots(1, 2)
    before = plt.get_fignums()
    assert draw(axes=right) is right
    assert plt.get_fignums() == before
    assert (left.has_data(), right.has_data()) == (False, True)
    assert to_rgba(figure.get_facecolor()) == (1, 1, 1, 1)  # its page stays


def test_the_bars_of_recipes_are_their_parts_one_behind_the_other_with_the_sum_at_the_end():
    comparison = mpx.compare_plans(2**20)
    axes = mpx.plot.memory(comparison)
    for row, plan in enumerate(comparison.plans.values()):
        widths = {
            bars.get_label(): bars[row].get_width()
            for bars in axes.containers
            if bars[row].get_width() > 0.05
        }
        kinds = {kind: plan.bytes_of(kind) / plan.parameters for kind in get_args(Kind)}
        assert widths == {kind: width for kind, width in kinds.items() if width > 0.05}
        ends = [bars[row].get_x() + bars[row].get_width() for bars in axes.containers]
        assert ends == sorted(ends)
        assert ends[-1] == pytest.approx(plan.total_bytes_a_device / plan.parameters)
        assert axes.texts[row].get_text() == f"{ends[-1]:.4g}"
    assert [label.get_text() for label in axes.get_yticklabels()] == list(
        comparison.plans
    )
    hatches = [bars[0].get_hatch() for bars in axes.containers]
    assert len(set(hatches)) == len(hatches)  # grey tells them apart
    assert "other state" not in legend_of(axes)


def test_the_bars_of_a_histogram_are_the_counts_of_frexp():
    tree = gradients()
    axes = mpx.plot.exponents(mpx.underflow_report(tree))
    numbers = np.asarray(tree["w"], np.float64)
    exponents, counts = np.unique(
        np.frexp(numbers[np.isfinite(numbers) & (numbers != 0)])[1] - 1,
        return_counts=True,
    )
    bars = axes.containers[0]
    assert [(bar.get_x(), bar.get_height()) for bar in bars] == list(
        zip(exponents, counts, strict=True)
    )
    assert {bar.get_width() for bar in bars} == {1}
    assert axes.get_yscale() == "log"
    assert (
        axes.get_title("left") == "3,000 numbers, besides 2 zeros and 1 infinite or NaN"
    )


def test_a_report_is_also_drawn_at_the_scale_that_it_recommends():
    """There is one number of 2**-30, and two of 2**-28."""
    report = mpx.underflow_report(jnp.array([2.0**-30, 2.0**-28, 2.0**-28]))
    shift = round(math.log2(report.recommended_scale))
    axes = mpx.plot.exponents(report)
    moved = [(bar.get_x(), bar.get_height()) for bar in axes.containers[1]]
    assert moved == [(-30 + shift, 1), (-28 + shift, 2)]
    behind = ["normal in float16", "subnormal: fewer bits", "numbers"]
    assert legend_of(axes) == [*behind, f"numbers times $2^{{{shift}}}$"]
    for unmoved in (report.histogram, mpx.underflow_report(jnp.ones(3), "bf16")):
        assert legend_of(mpx.plot.exponents(unmoved))[1:] == behind[1:]


def test_behind_a_histogram_lie_the_numbers_of_the_format():
    """float16 rounds what is above 2^-25 up to a number, and 65,520 to infinity."""
    axes = mpx.plot.exponents(mpx.underflow_report(jnp.ones(3)).histogram)
    normal, subnormal = (
        patch.get_extents().transformed(axes.transData.inverted())
        for patch in axes.patches[:2]
    )
    np.testing.assert_allclose(
        [subnormal.x0, subnormal.x1, normal.x0], [-25, -14, -14], atol=1e-3
    )
    assert 2**normal.x1 == pytest.approx(65520)
