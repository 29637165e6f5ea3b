"""The package as a user meets it: what it exports, what importing it does and costs."""

import pathlib
import subprocess
import sys
import tomllib

import mpx

ROOT = pathlib.Path(__file__).parents[1]

# Modules that are imported by themselves, since they need packages that mpx does not.
APART = {"doctor", "plot", "tools"}
PUBLIC = {name for name in vars(mpx) if not name.startswith("_")} - APART

# Tables, modules, and what is returned: the function that returns it has the example.
WITHOUT_EXAMPLE = {
    "Advice", "AdviceRow", "DEFAULT_RULES", "Errors", "Explanation", "FAST_RULES", "LeafUnderflow", "LossScale",
    "ScaledShares", "UnderflowReport", "formats", "monitor",
}  # fmt: skip


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    return done.stdout.strip()


def test_the_index_is_short_enough_to_be_read():
    assert len(PUBLIC) <= 66


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
