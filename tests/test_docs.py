"""Check the README and the documentation: code runs and prints what they say, names and links lead somewhere."""

import ast
import contextlib
import io
import pathlib
import pkgutil
import re
import subprocess
import textwrap
import traceback

import pytest
import yaml

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = sorted(DOCS.rglob("*.md"))
TEST_LINK = re.compile(r"\[`(test_\w+)`\]\((?:\.\./)+(tests/[\w/]+\.py)\)")
# A block of Python, perhaps in a tab, which is indented, and perhaps followed by what it prints; or a diff of Python.
BLOCK = re.compile(
    r"^(?P<indent> *)```(?P<language>python|diff)[^\n]*\n(?P<code>.*?)^(?P=indent)```$"
    r"(?:\s+^(?P=indent)```text title=\"Prints\"\n(?P<prints>.*?)^(?P=indent)```$)?",
    re.MULTILINE | re.DOTALL,
)


def run_blocks(text, filename):
    """Run the Python of a Markdown text from top to bottom in one namespace, and return that.

    The side of a diff that is taken away runs first, in a namespace of its own. Each block is compiled behind as many
    empty lines as there are lines before it, so that errors name those of the file.
    """
    names = {}
    for block in BLOCK.finditer(text):
        code = "\n" * text.count("\n", 0, block.start("code")) + textwrap.dedent(block["code"])
        if block["language"] == "diff":
            before, code = sides(code)
            exec(compile(before, filename, "exec"), dict(names))
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile(code, filename, "exec"), names)
        printed = output.getvalue()
        says = block["prints"] and textwrap.dedent(block["prints"])
        assert says in (None, printed), f"{filename} says {says!r}, but the code prints {printed!r}"
    return names


def sides(diff):
    """Return the code before and after a diff, with an empty line in place of each line that is not in it."""
    lines = diff.split("\n")
    assert {line[:1] for line in lines} <= {"", " ", "-", "+"}, "each line of a diff begins with ' ', '-' or '+'"
    before, after = (["" if line[:1] == other else line[1:] for line in lines] for other in "+-")
    assert before != after
    return "\n".join(before), "\n".join(after)


def name_of(page):
    return page.relative_to(DOCS).as_posix()


def in_navigation():
    """Return the paths in the navigation of `mkdocs.yml`, in their order."""

    def paths(entry):
        if isinstance(entry, str):
            return [entry]
        children = entry.values() if isinstance(entry, dict) else entry
        return [path for child in children for path in paths(child)]

    return paths(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])


def public_names(module):
    """Return what a module defines, and what it imports as `from x import y as y`, but for modules."""
    path = ROOT.joinpath(*module.split("."))
    body = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()).body
    aliases = [(node.module, alias) for node in body if isinstance(node, ast.ImportFrom) for alias in node.names]
    names = [alias.name for source, alias in aliases if alias.asname == alias.name and source != "mpx"]
    names += [node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return [f"{module}.{name}" for name in names if not name.startswith("_")]


def in_reference():
    """Return each name with an entry in the reference, as often as it has one."""
    texts = [page.read_text() for page in PAGES]
    return [name for text in texts for name in re.findall(r"^::: (\S+)$", text, re.MULTILINE)]


@pytest.mark.optax_promotion
@pytest.mark.slow
def test_the_code_of_the_readme_runs_from_top_to_bottom():
    text = README.read_text()
    names = run_blocks(text, "README.md")
    assert len(BLOCK.findall(text)) >= 2
    assert "bfloat16" in {str(leaf.dtype) for leaf in names["jax"].tree.leaves(names["params"])}
    assert names["mpx"].is_synced(names["params"], names["opt_state"])


@pytest.mark.optax_promotion
@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if BLOCK.search(page.read_text())], ids=name_of)
def test_the_code_of_a_page_runs_from_top_to_bottom_and_prints_what_the_page_says(page):
    run_blocks(page.read_text(), name_of(page))


def test_a_block_that_prints_something_else_is_seen():
    page = '```python\nprint(1 + 1)\n```\n\n```text title="Prints"\n{}\n```\n'
    run_blocks(page.format(2), "page.md")
    with pytest.raises(AssertionError, match=re.escape("page.md says '3\\n', but the code prints '2\\n'")):
        run_blocks(page.format(3), "page.md")


def test_a_block_in_a_tab_runs():
    page = '=== "Tab"\n\n    ```python\n    if True:\n        x = 1\n    print(x)\n    ```\n'
    says = '\n    ```text title="Prints"\n    {}\n    ```\n'
    assert run_blocks(page + says.format(1), "page.md")["x"] == 1
    with pytest.raises(AssertionError, match=r"page\.md says"):
        run_blocks(page + says.format(2), "page.md")


DIFF = "```python\nx = 0\n```\n\n```diff\n def f():\n-    return x\n+    return x + 1\n\n x = f()\n```\n"


def test_both_sides_of_a_diff_run_and_what_follows_has_the_names_of_its_later_side():
    page = DIFF + '\n```python\nprint(x)\n```\n\n```text title="Prints"\n1\n```\n'
    assert run_blocks(page, "page.md")["x"] == 1


@pytest.mark.parametrize("line", ["-    return x", "+    return x + 1"])
def test_an_error_in_either_side_of_a_diff_names_its_line(line):
    with pytest.raises(ZeroDivisionError) as raised:
        run_blocks(DIFF.replace(line, f"{line} / 0"), "page.md")
    frame = traceback.extract_tb(raised.tb)[-1]
    assert frame.lineno == DIFF.split("\n").index(line) + 1


def test_a_line_of_a_diff_without_a_sign_is_seen():
    with pytest.raises(AssertionError, match="each line of a diff"):
        run_blocks(DIFF.replace(" def f", "def f"), "page.md")


@pytest.mark.parametrize("page", ["```python\n1 / 0\n```\n", '=== "Tab"\n    ```python\n    1 / 0\n    ```\n'])
def test_an_error_in_a_page_names_its_line(page):
    text = f"# Title\n{page}"
    with pytest.raises(ZeroDivisionError) as raised:
        run_blocks(text, "page.md")
    frame = traceback.extract_tb(raised.tb)[-1]
    assert (frame.filename, frame.lineno) == ("page.md", text[: text.index("1 / 0")].count("\n") + 1)


def test_ci_runs_the_test_command_of_the_readme_first():
    command = re.search(r"^python3 -m venv .*pytest.*$", README.read_text(), re.MULTILINE)[0]
    commands = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if "-m pytest" in line]
    assert commands[0] == command


def test_ci_names_tests_that_exist():
    for name in re.findall(r"tests/[^\s\"()]+", (ROOT / ".ci" / "run").read_text()):
        files = subprocess.run(["bash", "-c", f"echo {name}"], capture_output=True, text=True, check=True).stdout
        assert [file for file in files.split() if not (ROOT / file).exists()] == []


def test_the_main_job_has_a_command_that_sets_itself_up():
    command = r"^python3 -m venv .* && .*pip install .* && .*-m examples\.gpt\.compare$"
    assert re.search(command, README.read_text(), re.MULTILINE)


def test_every_page_of_the_navigation_exists():
    for name in in_navigation():
        assert ((ROOT if name.startswith("notebooks/") else DOCS) / name).is_file(), name


def test_every_page_and_every_notebook_stands_in_the_navigation_once():
    notebooks = [f"notebooks/{path.name}" for path in (ROOT / "notebooks").glob("*.ipynb")]
    assert sorted(in_navigation()) == sorted([*map(name_of, PAGES), *notebooks])


@pytest.mark.parametrize("module", ["mpx", "mpx.formats", "mpx.monitor", "mpx.doctor", "mpx.plot", "mpx.states"])
def test_every_public_name_has_one_entry_in_the_reference(module):
    entries = in_reference()
    assert {name: entries.count(name) for name in public_names(module)} == dict.fromkeys(public_names(module), 1)


def test_every_entry_of_the_reference_is_the_name_of_something():
    for name in in_reference():
        pkgutil.resolve_name(name)


def test_every_invariant_names_tests_that_exist():
    text = (DOCS / "invariants.md").read_text()
    invariants = re.findall(r"^## (\d+)\. (.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert [int(number) for number, _ in invariants] == list(range(1, 11))
    for number, section in invariants:
        tests = TEST_LINK.findall(section)
        assert len(tests) == section.count("test_") - section.count("/test_") >= 3, number
        for test, file in tests:
            nodes = ast.walk(ast.parse((ROOT / file).read_text()))
            assert test in {node.name for node in nodes if isinstance(node, ast.FunctionDef)}, (file, test)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_of_a_page_leads_somewhere(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#\s]+)[^)\s]*\)", text):
        if "://" not in target:
            file = (page.parent / target).resolve()
            of_the_repository = ROOT / file.relative_to(DOCS if file.is_relative_to(DOCS) else ROOT)
            assert file.is_file() or of_the_repository.is_file(), target
    entries = in_reference()
    for name in re.findall(r"\]\[(mpx[\w.]*)\]", text):
        assert name in entries, name
