"""Plots show what they were given, nothing overlaps or is cut off, and they can be read on white and on dark pages."""

import importlib
import itertools
import math
import sys
from typing import get_args

import jax
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import optax
import pytest
from matplotlib.colors import to_rgb, to_rgba
from matplotlib.text import Text

import mpx
import mpx.plot
from mpx.tools.plan.rows import Kind
from mpx.tools.plot import sheet
from mpx.tools.plot.bars import LOOKS
from mpx.tools.program import compare_reports, kernels

WHITE, DARK = "#FFFFFF", "#121212"
TITLE = "A training run"
FORMATS = ["float8_e4m3fn", "float8_e5m2", "f16", "bf16", "f32"]


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def contrast(a, b):
    """Return WCAG 2.1's ratio of the relative luminances of two sRGB colors, each with 0.05 added."""

    def luminance(color):
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted([luminance(a), luminance(b)])
    return (high + 0.05) / (low + 0.05)


def gradients():
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=3000) * np.exp2(3 * rng.normal(size=3000) - 18)
    return {"w": jnp.asarray(np.append(np.float32(numbers), np.float32([0, 0, np.inf])))}


@pytest.fixture(scope="module")
def comparison():
    return mpx.compare_plans(2**20)


@pytest.fixture(scope="module")
def pictures(comparison):
    """Return, by name, functions that draw on given axes or new ones."""
    report = mpx.underflow_report(gradients())
    plan = mpx.memory_plan(2**20, mpx.mixed_precision(optax.adamw(1e-3), "bf16"), "bf16")
    falling = np.exp(-np.arange(20) / 5)
    curves = {"bf16, masters": falling, "bf16, Kahan": falling + 0.01, "f16": np.where(falling < 0.2, np.nan, falling)}
    seeds = falling + np.array([[-0.1], [0.0], [0.1]])
    layer, shape = lambda x: jnp.tanh(x @ x).sum(), jax.ShapeDtypeStruct((512, 512), jnp.float32)
    reports = {"f32": mpx.step_report(layer, shape), "bf16": mpx.step_report(mpx.autocast(layer, "bf16"), shape)}
    return {
        "losses": lambda **kwargs: mpx.plot.losses(curves, reference=seeds, **kwargs),
        "memory of recipes": lambda **kwargs: mpx.plot.memory(comparison, **kwargs),
        "memory of a plan": lambda **kwargs: mpx.plot.memory(plan, unit="GB", **kwargs),
        "exponents of a report": lambda **kwargs: mpx.plot.exponents(report, **kwargs),
        "exponents": lambda **kwargs: mpx.plot.exponents(report.histogram, formats=FORMATS, scale=2**4, **kwargs),
        "traffic": lambda **kwargs: mpx.plot.traffic(compare_reports(reports), **kwargs),
    }


NAMES = (
    "losses", "memory of recipes", "memory of a plan", "exponents of a report", "exponents", "traffic",
)  # fmt: skip


def drawn_texts(figure):
    """Return the visible texts: not those of ticks outside of the axis."""
    figure.canvas.draw()
    hidden = set()
    for axes in figure.findobj(matplotlib.axes.Axes):
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
                slack = 1e-9 * (high - low)
                if not low - slack <= tick.get_loc() <= high + slack or not axis.get_visible():
                    hidden |= {tick.label1, tick.label2}
                hidden |= {label for label in (tick.label1, tick.label2) if not label.get_visible()}
    return [text for text in figure.findobj(Text) if text.get_visible() and text.get_text() and text not in hidden]


def legend_of(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_is_transparent_and_all_its_text_can_be_read_on_both_pages_and_on_a_phone(name, pictures, tmp_path):
    """No text is cut off, none lies on another, and no setting of Matplotlib changes."""
    settings, open_before = dict(matplotlib.rcParams), {*plt.get_fignums()}
    figure = pictures[name]().figure
    assert dict(matplotlib.rcParams) == settings
    assert {*plt.get_fignums()} - open_before == {figure.number}
    figure.savefig(tmp_path / "picture.png")
    pixels = plt.imread(tmp_path / "picture.png")
    assert pixels[0, -1, 3] == 0
    assert 0.02 < np.mean(pixels[..., 3] > 0) < 0.9
    boxes = {text: text.get_window_extent() for text in drawn_texts(figure)}
    assert len(boxes) > 5
    for text, box in boxes.items():
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1, text  # noqa: PT018
        assert min(contrast(text.get_color(), page) for page in (WHITE, DARK)) >= 4.1, text
        assert text.get_fontsize() / 72 * 390 / figure.get_figwidth() > 9.5, text  # pixels, 390 of which are the width
    for (a, box_a), (b, box_b) in itertools.combinations(boxes.items(), 2):
        assert not box_a.overlaps(box_b), (a, b)


def test_colors_have_the_contrast_of_wcag_on_both_pages():
    assert contrast(sheet.GREY, WHITE) >= 4.5
    for color in (sheet.BLUE, sheet.VERMILLION, sheet.GREEN, sheet.PURPLE):
        assert min(contrast(color, WHITE), contrast(color, DARK)) >= 3
    assert contrast("#F0E442", WHITE) < 3  # the yellow of the same palette, which is left out


@pytest.mark.parametrize("name", NAMES)
def test_it_draws_on_given_axes_and_makes_no_figure(name, pictures):
    figure, (left, right) = plt.subplots(1, 2)
    before = plt.get_fignums()
    assert pictures[name](axes=right) is right
    assert plt.get_fignums() == before
    assert (left.has_data(), right.has_data()) == (False, True)
    assert to_rgba(figure.get_facecolor()) == (1, 1, 1, 1)  # its page stays
    with pytest.raises(TypeError, match="`axes` must be a Matplotlib Axes or None, but got Figure"):
        pictures[name](axes=figure)


def test_the_style_of_own_figures_ends_with_its_block_even_by_an_error():
    settings = dict(matplotlib.rcParams)
    with pytest.raises(KeyError), mpx.plot.style():  # noqa: PT012
        assert to_rgba(plt.figure().get_facecolor())[3] == 0
        raise KeyError
    assert dict(matplotlib.rcParams) == settings


def test_twenty_curves_differ_and_neighbors_in_color_and_in_line_style():
    axes = mpx.plot.losses({str(i): [i, 1.0] for i in range(20)}, axes=plt.figure().add_subplot())
    looks = [(look["color"], str(look["linestyle"])) for look in sheet.CURVES]
    assert [line.get_color() for line in axes.get_lines()] == [color for color, _ in looks]
    assert len(set(looks)) == 20
    assert all(a[0] != b[0] and a[1] != b[1] for a, b in itertools.pairwise(looks))


def test_losses_are_drawn_as_they_are_with_the_mean_and_the_deviation_of_the_seeds():
    curves = {"a": jnp.array([3.0, 2.0, 1.0], jnp.bfloat16), "b": [4, 3, 2]}
    seeds = np.array([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0], [2.0, 2.0, 5.0]])
    axes = mpx.plot.losses(curves, steps=[10, 20, 40], reference=seeds, reference_name="float32")
    for line, expected in zip(axes.get_lines(), ([2, 2, 3], [3, 2, 1], [4, 3, 2]), strict=True):
        np.testing.assert_array_equal(line.get_xydata().T, [[10, 20, 40], expected])
    (band,) = axes.collections
    corners = {tuple(corner) for corner in band.get_paths()[0].vertices.round(12)}
    deviations = [math.sqrt(((seeds[:, i] - seeds[:, i].mean()) ** 2).sum() / 2) for i in range(3)]
    columns = list(zip((10, 20, 40), (2, 2, 3), deviations, strict=True))
    assert corners == {(x, round(m + sign * d, 12)) for x, m, d in columns for sign in (1, -1)}
    assert legend_of(axes) == ["float32, ± standard deviation", "float32, mean of 3 seeds", "a", "b"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "loss")


def test_a_loss_that_is_not_finite_leaves_a_gap_and_a_cross_before_it():
    values = [3.0, 2.0, np.nan, 1.0, np.inf]
    axes = mpx.plot.losses({"a": values, "b": [1.0, np.nan], "c": [np.nan, np.nan]})
    a, crosses, b, crosses_of_b, c = axes.get_lines()
    np.testing.assert_array_equal(a.get_ydata(), [3, 2, np.nan, 1, np.nan])
    np.testing.assert_array_equal(b.get_xdata(), [0, 1])  # lengths may differ
    assert b.get_marker() == "o"  # a single point is no line
    assert np.isnan(c.get_ydata()).all()
    np.testing.assert_array_equal(crosses.get_xydata(), [[1, 2], [3, 1]])
    assert (crosses.get_color(), crosses_of_b.get_color()) == (a.get_color(), b.get_color())
    assert legend_of(axes) == ["a", "infinite or NaN from here", "b", "c"]
    axes = mpx.plot.losses({"a": [1.0, 1.0]}, reference=[[1.0, np.inf], [3.0, 1.0]])
    np.testing.assert_array_equal(axes.get_lines()[0].get_ydata(), [2, np.nan])
    assert not mpx.plot.losses({"a": [1.0]}, reference=[1.0]).collections  # a single run has no band


def test_names_are_shown_as_they_are():
    axes = mpx.plot.losses({"_hidden": [1.0, 2.0], "costs $1 or $2": [1.0, 2.0]})
    axes.figure.canvas.draw()
    assert legend_of(axes) == ["\u200b_hidden", r"costs \$1 or \$2"]


def test_the_bars_are_the_bytes_a_parameter_part_by_part(comparison):
    """Every kind is a bar, with the length that the plan says; parts too small to be seen are not in the legend."""
    axes = mpx.plot.memory(comparison)
    for row, plan in enumerate(comparison.plans.values()):
        widths = {bars.get_label(): bars[row].get_width() for bars in axes.containers if bars[row].get_width() > 0.05}
        kinds = {kind: plan.bytes_of(kind) / plan.parameters for kind in get_args(Kind)}
        assert widths == {kind: width for kind, width in kinds.items() if width > 0.05}
        ends = [bars[row].get_x() + bars[row].get_width() for bars in axes.containers]
        assert ends == sorted(ends)
        assert ends[-1] == pytest.approx(plan.total_bytes_a_device / plan.parameters)
        assert axes.texts[row].get_text() == f"{ends[-1]:.4g}"
    assert [label.get_text() for label in axes.get_yticklabels()] == list(comparison.plans)
    assert (axes.get_xlabel(), axes.get_title("right")) == ("bytes a parameter", f"{TITLE} of 1,048,576 parameters")
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # the first one on top
    assert "other state" not in legend_of(axes)


def test_gigabytes_are_those_of_a_device():
    mesh = jax.sharding.AbstractMesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    plan = mpx.memory_plan(10**9, mpx.mixed_precision(optax.sgd(0.1), "bf16"), "bf16", mesh=mesh)
    axes = mpx.plot.memory({"mine": plan}, unit="GB")
    widths = {bars.get_label(): bars[0].get_width() for bars in axes.containers}
    assert widths["low bits"] == pytest.approx(0.5)  # 2 bytes a parameter, on 4 devices
    assert [text.get_text() for text in axes.texts] == [f"{plan.total_bytes_a_device / 1e9:.4g} GB"]
    assert (axes.get_xlabel(), axes.get_title("right")[-12:]) == ("GB, on each device", "on 4 devices")


def test_every_kind_has_a_hatch_of_its_own_so_that_grey_tells_them_apart():
    for kinds in (get_args(Kind), get_args(kernels.Kind)):
        hatches = [LOOKS[kind][1] for kind in kinds]
        assert len(set(hatches)) == len(hatches)


def test_the_bars_of_a_histogram_are_the_counts_of_frexp():
    tree = gradients()
    axes = mpx.plot.exponents(mpx.underflow_report(tree))
    numbers = np.asarray(tree["w"], np.float64)
    exponents, counts = np.unique(np.frexp(numbers[np.isfinite(numbers) & (numbers != 0)])[1] - 1, return_counts=True)
    bars = axes.containers[0]
    assert [(bar.get_x(), bar.get_height()) for bar in bars] == list(zip(exponents, counts, strict=True))
    assert {bar.get_width() for bar in bars} == {1}
    assert axes.get_yscale() == "log"
    assert axes.get_title("left") == "3,000 numbers\nbesides 2 zero, 1 infinite or NaN"


def test_a_scale_moves_the_outline_to_the_right():
    """A report is drawn at the scale that it recommends, a histogram and a report without need of one at none."""
    report = mpx.underflow_report(jnp.array([2.0**-30, 2.0**-28, 2.0**-28]))
    axes = mpx.plot.exponents(report, scale=2**10)
    (outline,) = axes.patches[-1:]
    values, edges, _ = outline.get_data()
    assert list(zip(edges[:-1], values, strict=True)) == [(-21, 0), (-20, 1), (-19, 0), (-18, 2), (-17, 0)]
    assert legend_of(axes)[:2] == ["numbers", "numbers times $2^{10}$"]
    exponent = round(math.log2(report.recommended_scale))
    assert f"numbers times $2^{{{exponent}}}$" in legend_of(mpx.plot.exponents(report))
    bfloat16 = mpx.underflow_report(jnp.ones(3), "bf16")
    for axes in map(mpx.plot.exponents, (report.histogram, bfloat16)):
        assert legend_of(axes) == ["numbers", "normal", "subnormal: fewer bits"]


def test_the_ranges_are_those_of_the_formats():
    """float16: half of its smallest subnormal, 2**-25, to 2**16; normal from 2**-14 (all but half a subnormal)."""
    axes = mpx.plot.exponents(mpx.underflow_report(jnp.ones(3)), formats=["f16", "bf16"])
    (strip,) = axes.child_axes
    ends = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in strip.patches]
    np.testing.assert_allclose(ends, [(-25, -14), (-14, 16), (-134, -126), (-126, 128)], atol=0.01)
    assert [label.get_text() for label in strip.get_yticklabels()] == ["float16", "bfloat16"]
    limits = [line.get_xdata()[0] for line in axes.get_lines()]
    np.testing.assert_allclose(limits, [-25, 16], atol=0.01)
    low, high = axes.get_xlim()
    assert -126 < low <= -25 < 16 <= high  # float16 as a whole; bfloat16 runs off
    assert strip.get_xlim() == axes.get_xlim()


def test_without_matplotlib_the_import_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.startswith(("mpx.plot", "mpx.tools.plot"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"^`mpx.plot` needs Matplotlib: pip install matplotlib.$"):
        importlib.import_module("mpx.plot")
