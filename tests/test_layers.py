"""Check the source files: imports come from lower rooms and from four packages."""

import ast
import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]

# The rooms, from the ground floor up. A file may import from its own room and from
# those below.
ROOMS = [
    {
        "mpx._dtypes",
        "mpx._finite",
        "mpx._noise",
        "mpx._primitives",
        "mpx._shardings",
        "mpx._straight_through",
    },
    {"mpx._flax"},
    {"mpx._trees"},
    {"mpx._errors", "mpx._tables", "mpx._jaxprs"},
    {"mpx._fp8", "mpx.formats", "mpx._recipes", "mpx._chain"},
    {"mpx._policy", "mpx._loss_scale", "mpx._writeback"},
    {"mpx._stored"},
    {"mpx._autocast", "mpx._checkpoint", "mpx._transforms"},
    {
        "mpx._gradients",
        "mpx._mixed_precision",
        "mpx._any_precision_adamw",
        "mpx._parallel",
        "mpx._inspect",
        "mpx._fused",
    },
    {
        "mpx._train_step",
        "mpx.tools.plan",
        "mpx.tools.program",
        "mpx.monitor",
        "mpx.doctor",
    },
    {"mpx.plot"},
    {"mpx.tools.cli", "mpx.tools"},
    {"mpx"},
    {"mpx_cli"},
    {"mpx.__main__"},
]
FLOOR = {room: floor for floor, rooms in enumerate(ROOMS) for room in rooms}
CORE_PACKAGES = {"jax", "optax", "numpy", "ml_dtypes"}
# What is imported by its own name may ask for more: the extras of the distribution say
# so.
MORE_PACKAGES = {
    "mpx.tools.cli": {"safetensors"},
    "mpx.plot": {"matplotlib"},
    "mpx_cli": {"typer", "rich"},
}
OURS = {"mpx", "mpx_cli"}


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {
    module_of(path): path.read_text()
    for path in [ROOT / "mpx_cli.py", *sorted((ROOT / "mpx").rglob("*.py"))]
}


def room_of(module):
    return max((room for room in FLOOR if f"{module}.".startswith(f"{room}.")), key=len)


def imported_modules(nodes):
    """Return the modules that syntax nodes import: `from mpx import _trees` imports
    `mpx._trees`.
    """
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= (
                {f"{node.module}.{alias.name}" for alias in node.names} & SOURCES.keys()
            ) or {node.module}
    return found


def violations(module, source):
    imported, own = imported_modules(ast.walk(ast.parse(source))), room_of(module)
    ours = {name for name in imported if name.split(".")[0] in OURS}
    return {
        name
        for name in ours
        if room_of(name) != own and FLOOR[room_of(name)] >= FLOOR[own]
    }


def test_every_room_has_a_file():
    assert {room_of(module) for module in SOURCES} == FLOOR.keys()


def test_a_file_imports_from_its_room_and_from_lower_ones_only():
    found = {module: violations(module, source) for module, source in SOURCES.items()}
    assert {module: names for module, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "source",
    ["from mpx import _mixed_precision", "from mpx._policy import cast", "import mpx"],
)
def test_an_import_from_the_same_or_a_higher_floor_is_found(source):
    assert violations("mpx._loss_scale", source)


def foreign(module, source):
    """Return the packages that a module imports and must not, and what it imports of
    JAX's private modules.
    """
    more = next(
        (names for folder, names in MORE_PACKAGES.items() if module.startswith(folder)),
        set(),
    )
    imported = imported_modules(ast.walk(ast.parse(source)))
    packages = (
        {name.split(".")[0] for name in imported}
        - OURS
        - sys.stdlib_module_names
        - CORE_PACKAGES
        - more
    )
    return packages | {name for name in imported if "._src" in name}


def test_the_core_imports_four_packages_and_no_private_module_of_jax():
    found = {module: foreign(module, source) for module, source in SOURCES.items()}
    assert {module: names for module, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "source",
    ["import flax", "def f(): from rich import text", "from jax._src import core"],
)
def test_an_import_of_another_package_is_found(source):
    assert foreign("mpx._loss_scale", source)


def test_no_source_file_asks_numpy_to_run_code_that_it_reads():
    """Ruff refuses modules and functions that do so (`pyproject.toml` lists them), but
    sees no options.
    """
    files = [
        path
        for folder in ("mpx", "examples", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
    ]
    assert {ROOT / "mpx" / "_policy.py", ROOT / "examples" / "gpt" / "data.py"} <= set(
        files
    )
    assert [
        path
        for path in files
        if re.search(r"allow_pickle(?!=False)|__import__", path.read_text("utf-8"))
    ] == []
