"""The structure: a file imports only from lower layers; the core imports four packages."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]

# Which modules stand on which layer. A module may import from lower layers only.
LAYERS = [
    {
        "mpx._advice",
        "mpx._doctor",
        "mpx._elementwise",
        "mpx._monitoring",
        "mpx._plots",
        "mpx._plots.themes",
        "mpx._planning",
        "mpx._json",
        "mpx._tables",
        "mpx._trees",
    },
    {"mpx._exponents", "mpx._plots.canvas", "mpx.formats"},
    {
        "mpx._blockwise",
        "mpx._checks",
        "mpx._loss_scale",
        "mpx._placement",
        "mpx._policy",
        "mpx._state_fields",
        "mpx._writeback",
    },
    {
        "mpx._autocast",
        "mpx._autocast.compute",
        "mpx._autocast.jaxprs",
        "mpx._autocast.rules",
        "mpx._planning.capacity",
        "mpx._state_plan",
    },
    {"mpx._autocast.contraction", "mpx._transforms", "mpx._transforms.upcast"},
    {"mpx._autocast.plan"},
    {"mpx._autocast.control_flow"},
    {"mpx._autocast.in_place", "mpx._autocast.interpreter"},
    {"mpx._autocast.transform"},
    {
        "mpx._autocast.explain",
        "mpx._transforms.kahan_summation",
        "mpx._transforms.loss_scaling",
        "mpx._transforms.low_precision_state",
        "mpx._transforms.master_weights",
        "mpx._transforms.params_ema",
        "mpx._transforms.stochastic_rounding",
    },
    {
        "mpx._chains",
        "mpx._data_parallel",
        "mpx._gradients",
        "mpx._inspection",
        "mpx._recipes",
        "mpx._sharding",
    },
    {
        "mpx._advice.contractions",
        "mpx._monitoring.barrier",
        "mpx._monitoring.scale_history",
        "mpx._planning.compiled",
        "mpx._planning.rows",
        "mpx._underflow",
    },
    {
        "mpx._advice.study",
        "mpx._doctor.measuring",
        "mpx._doctor.surroundings",
        "mpx._monitoring.measures",
        "mpx._monitoring.monitored",
        "mpx._planning.plan",
        "mpx._state_parts",
    },
    {
        "mpx._advice.candidates",
        "mpx._conversion",
        "mpx._doctor.arithmetic",
        "mpx._planning.comparison",
        "mpx.monitor",
    },
    {"mpx._advice.advise", "mpx._doctor.recommendation"},
    {
        "mpx._plots.advice",
        "mpx._plots.curves",
        "mpx._plots.exponents",
        "mpx._plots.loss_scale",
        "mpx._plots.memory",
        "mpx.doctor",
    },
    {"mpx.plot"},
    {"mpx"},
    {"mpx._commands", "mpx._commands.errors", "mpx._commands.output"},
    {"mpx._commands.arrays", "mpx._commands.given", "mpx._commands.run_log"},
    {"mpx._commands.doctor", "mpx._commands.explain", "mpx._commands.plan", "mpx._commands.report"},
    {"mpx._commands.app"},
    {"mpx.cli"},
    {"mpx.__main__"},
]
CORE_PACKAGES = {"jax", "optax", "numpy", "ml_dtypes"}
# What is imported by its own name may ask for more: the extras of the distribution say so.
MORE_PACKAGES = {"mpx._commands": {"typer", "rich", "orbax"}, "mpx._plots": {"matplotlib"}}


def layer_of(module):
    return next((i for i, layer in enumerate(LAYERS) if module in layer), None)


def imported_modules(source):
    """The modules that a file imports: `from mpx import _trees` imports `mpx._trees`.

    Not those of a `__rich__` method, which only Rich calls, nor of what builds its tables.
    """
    found, tree = set(), ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in ("__rich__", "rich_table"):
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            deeper = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (deeper & set().union(*LAYERS)) or {node.module}
    return found


def violations(module, source):
    """What a module imports and should not."""
    ours = {name for name in imported_modules(source) if name.split(".")[0] == "mpx"}
    return {name for name in ours if layer_of(name) is None or layer_of(name) >= layer_of(module)}


def sources():
    for path in sorted((ROOT / "mpx").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path.read_text()


def test_every_file_has_a_layer():
    assert {module for module, _ in sources()} == set().union(*LAYERS)


@pytest.mark.parametrize(("module", "source"), [pytest.param(*item, id=item[0]) for item in sources()])
def test_a_file_imports_from_lower_layers_only(module, source):
    assert violations(module, source) == set()


@pytest.mark.parametrize("source", ["from mpx import _recipes", "from mpx._policy import cast", "import mpx"])
def test_an_import_from_the_same_or_a_higher_layer_is_found(source):
    assert violations("mpx._loss_scale", source)


@pytest.mark.parametrize(("module", "source"), [pytest.param(*item, id=item[0]) for item in sources()])
def test_the_core_imports_four_packages_and_no_private_module_of_jax(module, source):
    import sys

    packages = {name.split(".")[0] for name in imported_modules(source)} - {"mpx"} - sys.stdlib_module_names
    more = next((names for folder, names in MORE_PACKAGES.items() if module.startswith(folder)), set())
    assert packages <= CORE_PACKAGES | more
    assert not any("._src" in name for name in imported_modules(source))
