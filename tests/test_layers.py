"""The structure: a file imports only from lower layers; the core imports four packages."""

import ast
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]

# The rooms, from the ground floor up. A file may import from its own room and from those below.
ROOMS = [
    {"mpx._trees", "mpx._dtypes"},
    {"mpx._errors", "mpx._tables", "mpx._jaxprs", "mpx.formats"},
    {"mpx._policy", "mpx._loss_scale", "mpx._transforms.writeback"},
    {"mpx._stored"},
    {"mpx._autocast", "mpx._transforms"},
    {"mpx._gradients", "mpx._recipes", "mpx._parallel", "mpx._inspect"},
    {"mpx.tools.plan", "mpx.tools.monitor", "mpx.tools.json_values"},
    {"mpx.monitor"},
    {"mpx.tools.advise", "mpx.tools.doctor"},
    {"mpx.tools.plot"},
    {"mpx.plot", "mpx.doctor"},
    {"mpx"},
    {"mpx.tools.cli", "mpx.tools"},
    {"mpx.__main__"},
]
CORE_PACKAGES = {"jax", "optax", "numpy", "ml_dtypes"}
# What is imported by its own name may ask for more: the extras of the distribution say so.
MORE_PACKAGES = {"mpx.tools.cli": {"typer", "rich", "orbax"}, "mpx.tools.plot": {"matplotlib"}}


def floor_of(module):
    """The floor of the room that a module is in; rooms inside of others are named in full."""
    parts = module.split(".")
    names = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    named = (floor for name in names for floor, rooms in enumerate(ROOMS) if name in rooms)
    return next(named) if module != "mpx" else next(f for f, rooms in enumerate(ROOMS) if "mpx" in rooms)


def room_of(module):
    """The innermost room that a module is in."""
    rooms = set().union(*ROOMS)
    parts = module.split(".")
    return next(name for n in range(len(parts), 0, -1) if (name := ".".join(parts[:n])) in rooms)


def imported_modules(source):
    """The modules that a file imports: `from mpx import _trees` imports `mpx._trees`.

    Not those of a `__rich__` method, which only Rich calls, nor of what builds its tables.
    """
    found, tree = set(), ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in ("__rich__", "rich_table"):
            node.body = []
    known = {module for module, _ in sources()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            deeper = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (deeper & known) or {node.module}
    return found


def violations(module, source):
    """What a module imports from a higher room, or from another one on its own floor."""
    ours = {name for name in imported_modules(source) if name.split(".")[0] == "mpx"}
    own_room, floor = room_of(module), floor_of(module)
    return {name for name in ours if room_of(name) != own_room and floor_of(name) >= floor}


def sources():
    for path in sorted((ROOT / "mpx").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path.read_text()


def test_every_room_has_a_file():
    assert {room_of(module) for module, _ in sources()} == set().union(*ROOMS)


@pytest.mark.parametrize(("module", "source"), [pytest.param(*item, id=item[0]) for item in sources()])
def test_a_file_imports_from_its_room_and_from_lower_ones_only(module, source):
    assert violations(module, source) == set()


@pytest.mark.parametrize("source", ["from mpx import _recipes", "from mpx._policy import cast", "import mpx"])
def test_an_import_from_the_same_or_a_higher_floor_is_found(source):
    assert violations("mpx._loss_scale", source)


@pytest.mark.parametrize(("module", "source"), [pytest.param(*item, id=item[0]) for item in sources()])
def test_the_core_imports_four_packages_and_no_private_module_of_jax(module, source):
    packages = {name.split(".")[0] for name in imported_modules(source)} - {"mpx"} - sys.stdlib_module_names
    more = next((names for folder, names in MORE_PACKAGES.items() if module.startswith(folder)), set())
    assert packages <= CORE_PACKAGES | more
    assert not any("._src" in name for name in imported_modules(source))
