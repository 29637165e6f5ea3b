"""The package as a user meets it: what it exports, what importing it does and costs."""

import pathlib
import re
import subprocess
import sys
import tomllib

import mpx

ROOT = pathlib.Path(__file__).parents[1]

PUBLIC = {
    "Advice", "AdviceRow", "Blockwise8bit", "DEFAULT_RULES", "DivergedError", "DynamicLossScale", "Errors",
    "Explanation", "FAST_RULES", "KahanSummationState", "LeafUnderflow", "LossScale", "LossScalingState",
    "LowPrecisionState", "MasterWeightsState", "NoOpLossScale", "ParamsEmaState",
    "Policy", "ScaledShares", "StaticLossScale",
    "StochasticRoundingState", "UnderflowReport", "advise", "all_finite", "any_precision_adamw",
    "autocast", "cast", "cast_to_full", "cast_to_half", "check_chain", "check_health", "compare_plans",
    "convert_state", "data_parallel", "ema_params", "explain", "formats", "full_precision", "get_loss_scale",
    "get_policy", "grad", "half_dtype", "is_synced", "kahan_summation", "largest_that_fits", "loss_scaling",
    "low_precision_state", "master_params", "master_weights", "memory_plan", "mixed_precision", "monitor",
    "params_ema", "resync", "select_tree", "skipped_steps", "step_memory", "stochastic_rounding",
    "underflow_report", "upcast", "value_and_grad", "zero1", "zero1_shardings",
}  # fmt: skip

# Tables, modules, and what is returned: the function that returns it has the example.
WITHOUT_EXAMPLE = {
    "Advice", "AdviceRow", "DEFAULT_RULES", "Errors", "Explanation", "FAST_RULES", "LeafUnderflow", "LossScale",
    "ScaledShares", "UnderflowReport", "formats", "monitor",
}  # fmt: skip


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    return done.stdout.strip()


# Modules that are imported by themselves, since they need packages that mpx does not.
APART = {"cli", "doctor", "plot"}


def test_the_public_names_are_those_of_the_design():
    assert {name for name in vars(mpx) if not name.startswith("_")} - APART == PUBLIC


def test_every_public_name_has_a_docstring_with_an_example():
    without = {
        name
        for name in PUBLIC - WITHOUT_EXAMPLE
        if not name.endswith("State") and ">>>" not in (getattr(mpx, name).__doc__ or "")
    }
    assert without <= {"cast_to_full", "cast_to_half"}  # a line each, beside `cast`


def test_importing_starts_no_device_and_imports_nothing_but_the_core():
    code = (
        "import sys, jax, optax; before = set(sys.modules); import mpx\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "from jax.extend import backend\n"
        "print(sorted(new & {'flax', 'orbax', 'rich', 'typer', 'matplotlib', 'equinox', 'chex'}))"
    )
    assert run(code) == "[]"


def test_importing_creates_no_array():
    """A GPU is taken by the first array; a library must not take it at import."""
    code = "import jax\njax.config.update('jax_platforms', 'no_such_platform')\nimport mpx; print('imported')"
    assert run(code) == "imported"


def test_importing_costs_little_beyond_optax():
    """Under 0.3 s; measured as the time that `-X importtime` gives mpx's own modules, the best of three runs."""

    def seconds():
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-c", "import optax; import mpx"],
            capture_output=True, text=True, cwd=ROOT, check=True,
        )  # fmt: skip
        line = next(line for line in done.stderr.splitlines() if re.search(r"\| mpx$", line))
        return int(line.split("|")[1]) / 1e6

    assert min(seconds() for _ in range(3)) < 0.3


def test_the_version_is_written_once():
    written = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert mpx.__version__ in (written, "0+unknown")
    for path in (ROOT / "mpx").rglob("*.py"):
        assert written not in path.read_text(), path


def test_the_changelog_speaks_of_this_version():
    written = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"## {written}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_package_is_marked_as_typed():
    assert (ROOT / "mpx" / "py.typed").exists()
