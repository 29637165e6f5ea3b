"""Check the README and the documentation: code runs and prints what they say, names and
links lead somewhere.
"""

import ast
import json
import pkgutil
import re
import subprocess

import pytest
import yaml

import mpx
from mpx._recipes import RECIPES
from tests.pages import (
    BLOCK,
    ROOT,
    check_training_steps,
    clients,
    jits_of_training_steps,
    python_of,
    run_blocks,
    run_in_lines,
)

DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = sorted(DOCS.rglob("*.md"))


def name_of(page):
    return page.relative_to(DOCS).as_posix()


def marked(page):
    """Return the parameter of a test of a page; what makes a mesh makes programs for
    many devices.
    """
    marks = [pytest.mark.many_devices] if "make_mesh" in page.read_text() else []
    return pytest.param(page, id=name_of(page), marks=marks)


def in_navigation():
    """Return the paths in the navigation of `mkdocs.yml`, in their order."""

    def paths(entry):
        if isinstance(entry, str):
            return [entry]
        children = entry.values() if isinstance(entry, dict) else entry
        return [path for child in children for path in paths(child)]

    return paths(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])


def public_names(module):
    """Return what a module defines, and what it imports as `from x import y as y`, but
    for modules.
    """
    path = ROOT.joinpath(*module.split("."))
    body = ast.parse(
        (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    ).body
    aliases = [
        (node.module, alias)
        for node in body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    names = [
        alias.name
        for source, alias in aliases
        if alias.asname == alias.name and source != "mpx"
    ]
    names += [
        node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)
    ]
    return [f"{module}.{name}" for name in names if not name.startswith("_")]


def in_reference():
    """Return each name with an entry in the reference, as often as it has one."""
    texts = [page.read_text() for page in PAGES]
    return [
        name
        for text in texts
        for name in re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    ]


@pytest.mark.optax_promotion
@pytest.mark.slow
def test_the_code_of_the_readme_runs_from_top_to_bottom():
    text = README.read_text()
    names = run_blocks(text, "README.md", check_training_steps)
    run_in_lines(text, names)
    assert len(BLOCK.findall(text)) >= 2
    assert "bfloat16" in {
        str(leaf.dtype) for leaf in names["jax"].tree.leaves(names["params"])
    }


@pytest.mark.optax_promotion
@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [marked(page) for page in PAGES if BLOCK.search(page.read_text())]
)
def test_the_code_of_a_page_runs_from_top_to_bottom_and_prints_what_the_page_says(page):
    run_in_lines(
        page.read_text(),
        run_blocks(page.read_text(), name_of(page), check_training_steps),
    )


PRINTS = '```python\nprint(1 + 1)\n```\n\n```text title="Prints"\n{}\n```\n'
DIFF = (
    "```python\nx = 0\n```\n\n```diff\n def f():\n-    return x\n+    return x + 1\n\n"
    " x = f()\n```\n"
)
STEP = """```python
import jax
import jax.numpy as jnp


@jax.jit(donate_argnums=0)
def train_step(x):
    return x + 1, x.sum()


x, y = train_step(jnp.ones(1000))
```
"""
INLINE = "Call `{}`."
SEEN = {  # a page that is right, one that is not, and what is said of it
    "another print": (
        PRINTS.format(2),
        PRINTS.format(3),
        "page.md says '3\\n', but the code prints '2\\n'",
    ),
    "a line of a diff without a sign": (
        DIFF,
        DIFF.replace(" def f", "def f"),
        "each line of a diff",
    ),
    "a step that does not donate": (
        STEP,
        STEP.replace("(donate_argnums=0)", ""),
        "has 4,0",
    ),
    "a signature": (
        INLINE.format("mpx.cast(tree, 'f32')"),
        INLINE.format("mpx.get_policy(1)"),
        "needs a string",
    ),
    "a method": (
        INLINE.format("policy.cast_to_param(1.0)"),
        INLINE.format("policy.cast(1)"),
        "no attribute 'cast'",
    ),
    "an option": (
        INLINE.format("mpx.autocast(...)"),
        INLINE.format("mpx.autocast(f, speed=1)"),
        "unexpected keyword",
    ),
}


@pytest.mark.parametrize(("right", "wrong", "said"), SEEN.values(), ids=SEEN)
def test_what_is_wrong_in_a_page_is_seen(right, wrong, said):
    def check(text):
        names = run_blocks(text, "page.md", check_training_steps)
        run_in_lines(text, names | {"policy": mpx.get_policy("bf16")})

    check(right)
    with pytest.raises(
        (AssertionError, TypeError, AttributeError), match=re.escape(said)
    ):
        check(wrong)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "@jax.jit\ndef train_step(x): pass",
            "@jax.jit(donate_argnums=0)\ndef train_step(x): pass",
        ),
        ("jax.jit(self.train_step)", "jax.jit(self.train_step, donate_argnums=0)"),
        (
            "jax.jit(mpx.train_step(f, tx))",
            "jax.jit(mpx.train_step(f, tx), donate_argnums=0)",
        ),
        (
            "@jax.jit\ndef f(x): optax.apply_updates(x)",
            "@jax.jit(donate_argnums=0)\ndef f(x): optax.apply_updates(x)",
        ),
    ],
)
def test_the_jit_of_a_training_step_is_found(before, after):
    assert [
        "donate" in text
        for code in (before, after)
        for text in jits_of_training_steps(code)
    ] == [False, True]


def test_every_training_step_that_is_shown_donates():
    notebooks = [
        json.loads(path.read_text())["cells"]
        for path in (ROOT / "notebooks").glob("*.ipynb")
    ]
    cells = [
        "".join(cell["source"])
        for cells in notebooks
        for cell in cells
        if cell["cell_type"] == "code"
    ]
    examples = [path.read_text() for path in (ROOT / "examples").rglob("*.py")]
    codes = [
        *cells,
        *examples,
        *(python_of(page.read_text()) for page in [README, *PAGES]),
    ]
    jits = [text for code in codes for text in jits_of_training_steps(code)]
    assert len(jits) > 15
    assert [text for text in jits if "donate" not in text] == []


def test_ci_runs_the_test_command_of_the_readme_first():
    command = re.search(
        r"^python3 -m venv .*pytest.*$", README.read_text(), re.MULTILINE
    )[0]
    commands = [
        line
        for line in (ROOT / ".ci" / "run").read_text().splitlines()
        if "-m pytest" in line
    ]
    assert commands[0] == command


def test_ci_names_tests_that_exist():
    for name in re.findall(r"tests/[^\s\"()]+", (ROOT / ".ci" / "run").read_text()):
        files = subprocess.run(
            ["bash", "-c", f"echo {name}"], capture_output=True, text=True, check=True
        ).stdout
        assert [file for file in files.split() if not (ROOT / file).exists()] == []


def test_every_page_of_the_navigation_exists():
    for name in in_navigation():
        assert ((ROOT if name.startswith("notebooks/") else DOCS) / name).is_file(), (
            name
        )


def test_every_page_and_every_notebook_stands_in_the_navigation_once():
    notebooks = [
        f"notebooks/{path.name}" for path in (ROOT / "notebooks").glob("*.ipynb")
    ]
    assert sorted(in_navigation()) == sorted([*map(name_of, PAGES), *notebooks])


def test_a_menu_names_a_page_as_its_first_line_does():
    """A menu leaves out its own name: *Coming from*, torch.amp."""
    entries = re.findall(
        r"^ +- (?:(.+): )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE
    )
    titles = {
        path: re.search(r"^# (.*)$", (DOCS / path).read_text(), re.MULTILINE)[1]
        for _, path in entries
    }
    shown = {
        path: re.sub("^(Coming from|Reference:) ", "", title)
        for path, title in titles.items()
    }
    wanted = {path: name for name, path in entries if name and path != "index.md"}
    assert len(wanted) > 25
    assert {
        path: name
        for path, name in wanted.items()
        if name.lower() != shown[path].lower()
    } == {}


def test_each_station_of_a_gradient_is_in_the_file_that_the_page_names():
    stations = re.findall(
        r"`(mpx/[\w/]+\.py)`, `(\w+)`", (DOCS / "concepts" / "index.md").read_text()
    )
    assert len(stations) > 10
    for file, name in stations:
        nodes = ast.walk(ast.parse((ROOT / file).read_text()))
        assert name in {
            node.name
            for node in nodes
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
        }, (file, name)


def test_the_recipes_of_the_readme_have_the_names_and_bytes_of_the_table_in_mpx():
    rows = re.findall(
        r"^\| `([\w-]+)` \| ([^|]+) \| ([\d.]+) \|", README.read_text(), re.MULTILINE
    )
    table = {
        name: (recipe.purpose, f"{recipe.bytes:g}") for name, recipe in RECIPES.items()
    }
    assert {
        name: (purpose.replace("**", ""), size) for name, purpose, size in rows
    } == table


def test_each_row_of_the_table_of_trainers_names_its_loop_in_the_tests_and_each_loop_has_a_row():
    """A loop is a function of a way to train. What it does is checked where its library
    is installed.
    """
    trees = [
        ast.parse(path.read_text())
        for path in (ROOT / "tests" / "clients").glob("test_*.py")
    ]
    functions = [
        node
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
    ]
    required = lambda f: [
        arg.arg for arg in f.args.args[: len(f.args.args) - len(f.args.defaults)]
    ]
    assert sorted(f.name for f in functions if required(f) == ["way"]) == sorted(
        clients()
    )
    assert (
        "<!-- include: tests/clients/README.md # Who does what -->"
        in (DOCS / "guides" / "trainers.md").read_text()
    )


@pytest.mark.parametrize(
    "module",
    ["mpx", "mpx.formats", "mpx.monitor", "mpx.doctor", "mpx.plot", "mpx.states"],
)
def test_every_public_name_has_one_entry_in_the_reference(module):
    entries = in_reference()
    assert {
        name: entries.count(name) for name in public_names(module)
    } == dict.fromkeys(public_names(module), 1)


def test_every_entry_of_the_reference_is_the_name_of_something():
    for name in in_reference():
        pkgutil.resolve_name(name)


def test_every_invariant_names_tests_that_exist():
    text = (DOCS / "invariants.md").read_text()
    invariants = re.findall(
        r"^## (\d+)\. (.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL
    )
    assert [int(number) for number, _ in invariants] == list(range(1, 11))
    for number, section in invariants:
        lines = re.findall(r"^- `(tests/[\w/]+\.py)`: (.*)$", section, re.MULTILINE)
        assert sum(len(re.findall(r"`test_\w+`", names)) for _, names in lines) >= 3, (
            number
        )
        for file, names in lines:
            nodes = ast.walk(ast.parse((ROOT / file).read_text()))
            there = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
            assert set(re.findall(r"`(test_\w+)`", names)) <= there, file


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_of_a_page_leads_somewhere(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#\s]+)[^)\s]*\)", text):
        if "://" not in target:
            file = (page.parent / target).resolve()
            of_the_repository = ROOT / file.relative_to(
                DOCS if file.is_relative_to(DOCS) else ROOT
            )
            assert file.is_file() or of_the_repository.is_file(), target
    entries = in_reference()
    for name in re.findall(r"\]\[(mpx[\w.]*)\]", text):
        assert name in entries, name
