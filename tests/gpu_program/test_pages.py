"""What pages say of bytes, held against programs for an H200."""

import re

import jax
import pytest

import mpx
from tests.pages import ROOT, code_in_lines, run_blocks

MEMORY = ROOT / "docs" / "concepts" / "memory.md"
README = ROOT / "README.md"
IN_8_BITS = 'mpx.low_precision_state(optax.adamw(1e-3), {"mu|nu": mpx.Blockwise8bit()})'


def peak_of(page, pairs, device):
    """Return the peak of the page's training step, in bytes a parameter, for wide layers."""
    text = page.read_text()
    for old, new in [("(256, 8)", "(2, 4096)"), ("nn.Dense(64)", "nn.Dense(4096)"), *pairs]:
        assert old in text, old
        text = text.replace(old, new)
    names = run_blocks(text[: text.index("\n## ", text.index("```diff"))], page.name)
    arguments = jax.eval_shape(lambda: tuple(names[name] for name in ("params", "opt_state", "x", "y")))
    report = mpx.step_report(names["train_step"], *arguments, target=device)
    return report.peak_bytes / sum(leaf.size for leaf in jax.tree.leaves(arguments[0]))


@pytest.mark.optax_promotion
@pytest.mark.parametrize(
    ("pairs", "at_most"),
    [([], 14.1), ([("optax.adamw(1e-3), policy", f"{IN_8_BITS}, policy")], 8.1)],
    ids=["split masters", "8-bit moments"],
)
def test_the_training_step_of_the_readme_has_the_bytes_that_it_names(pairs, at_most, h200):
    assert at_most - 2.1 < peak_of(README, pairs, "h200") < at_most


@pytest.mark.optax_promotion
def test_the_same_step_without_donation_has_twice_the_state(h200):
    assert peak_of(README, [("@jax.jit(donate_argnums=(0, 1))", "@jax.jit")], "h200") > 23.9


@pytest.mark.slow
@pytest.mark.optax_promotion
def test_the_peaks_of_the_memory_page_are_what_its_program_has(h200):
    text = MEMORY.read_text()
    names = run_blocks(text, "memory.md")
    stated = {code: float(number) for code, number in re.findall(r"\| `(peak\(.*\))` \| ([\d.]+) \|", text)}
    assert set(stated) == {code for code in code_in_lines(text) if code.startswith("peak(")}
    assert len(stated) == 5
    for code, number in stated.items():
        assert eval(code, names) == pytest.approx(number, abs=0.03), code
