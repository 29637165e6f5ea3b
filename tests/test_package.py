"""Check the package as a user meets it: what it exports, and what importing it does."""

import inspect
import pathlib
import subprocess
import sys
import tomllib
import types

import mpx

ROOT = pathlib.Path(__file__).parents[1]
PUBLIC = {
    name: value
    for name, value in ((name, getattr(mpx, name)) for name in dir(mpx))
    if not name.startswith("_") and not isinstance(value, types.ModuleType)
}
WRITTEN = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
# Both are a line each, beside `cast`, which has the example.
WITHOUT_EXAMPLE = {"cast_to_full", "cast_to_half"}


def test_the_index_is_seen_at_a_glance():
    # `checkpoint` came: what is kept between the passes, in few bits.
    assert len(PUBLIC) <= 54
    assert {"formats", "monitor", "states"} <= set(dir(mpx))


def test_every_public_function_and_class_is_documented_and_every_function_has_an_example():
    documented = {name for name, value in PUBLIC.items() if inspect.getdoc(value)}
    with_example = {name for name in documented if ">>>" in PUBLIC[name].__doc__}
    made = {
        name
        for name, value in PUBLIC.items()
        if inspect.isfunction(value) or inspect.isclass(value)
    }
    assert made <= documented
    assert {
        name for name in made if inspect.isfunction(PUBLIC[name])
    } - with_example <= WITHOUT_EXAMPLE


def test_importing_takes_no_device_and_imports_nothing_but_the_core_and_no_tools():
    """A GPU is taken by the first array; a library must not take it at import. Tools
    load when they are used.
    """
    code = (
        "import sys, jax, optax\njax.config.update('jax_platforms',"
        " 'no_such_platform')\nbefore = set(sys.modules); import mpx\nnew ="
        " {name.split('.')[0] for name in set(sys.modules) - before}\nassert not [name"
        " for name in sys.modules if name.startswith(('mpx.tools',"
        " 'mpx.monitor'))]\nassert mpx.step_report is not None and mpx.monitor.fates is"
        " not None\nprint(*sorted(new - sys.stdlib_module_names - {'jax', 'jaxlib',"
        " 'numpy', 'optax', 'ml_dtypes'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert done.stdout.split() == ["mpx"]


def test_the_version_is_written_once():
    assert mpx.__version__ in (WRITTEN, "0+unknown")
    assert [
        path for path in (ROOT / "mpx").rglob("*.py") if WRITTEN in path.read_text()
    ] == []


def test_the_changelog_speaks_of_this_version():
    assert f"## {WRITTEN}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_package_is_marked_as_typed():
    assert (ROOT / "mpx" / "py.typed").exists()


def test_a_folder_called_mpx_does_not_hide_the_package(tmp_path):
    """A clone may have that name, and Python may start beside it."""
    (tmp_path / "mpx").mkdir()
    code = "import mpx; print(mpx.get_policy('bf16'))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    assert done.stdout.strip() == str(mpx.get_policy("bf16"))
