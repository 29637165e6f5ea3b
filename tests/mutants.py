"""Change one token of a file of mpx at a time, and list the changes that its tests do
not see.

    python -m tests.mutants mpx/_autocast/plan.py --count 20 --seed 1

Only a copy of the repository is changed. A mutant that survives shows a test that is
missing, code that can go, or a change without a meaning.
"""

import ast
import copy
import random
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from typer import Option

ROOT = Path(__file__).parent.parent
COPIED = (
    "mpx",
    "tests",
    "examples",
    "benchmarks",
    "docs",
    "README.md",
    "CHANGELOG.md",
    "conftest.py",
    "pyproject.toml",
)
# The tests of the files of a folder: those at the same place under `tests` come first,
# then these.
TESTS = {
    "mpx/_autocast": [
        "tests/autocast",
        "tests/parallel/test_explicit_axes.py",
        "tests/programs",
    ],
    "mpx/_stored": [
        "tests/stored",
        "tests/transforms",
        "tests/test_contract.py",
        "tests/walks",
    ],
    "mpx/_transforms": [
        "tests/transforms",
        "tests/test_contract.py",
        "tests/test_mixed_precision.py",
    ],
    "mpx/_inspect": ["tests/inspect", "tests/test_contract.py"],
    "mpx/_parallel": ["tests/parallel"],
    "mpx/_fused": ["tests/fused"],
    "mpx/tools": ["tests/tools"],
    "mpx/monitor": ["tests/tools"],
    "mpx": ["tests/autocast", "tests/transforms", "tests/test_contract.py"],
}
OTHER = {
    ast.Eq: ast.NotEq,
    ast.Lt: ast.LtE,
    ast.Gt: ast.GtE,
    ast.Is: ast.IsNot,
    ast.In: ast.NotIn,
    ast.And: ast.Or,
}
OTHER |= {ast.Add: ast.Sub}
OTHER |= {new: old for old, new in OTHER.items()}
NAMES = {"any": "all", "all": "any", "min": "max", "max": "min"}
# What no test needs to see: types, words, and arguments that only check what is given.
UNSEEN = (ast.Raise, ast.Assert, ast.JoinedStr)
ONLY_CHECKS = {"strict", "frozen", "eq", "stacklevel", "returns", "annotation"}


class Mutant(NamedTuple):
    """A change of a program."""

    line: int
    before: str
    after: str
    text: str  # the whole changed program


def with_(node: ast.AST, **fields: object) -> ast.AST:
    """Return a copy of a part of a program with other fields."""
    new = copy.copy(node)
    new.__dict__.update(fields)
    return new


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what may stand in place of a part of a program."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in OTHER:
            yield with_(node, ops=[OTHER[type(op)]()])
        case ast.BoolOp(op=op) | ast.BinOp(op=op) if type(op) in OTHER:
            yield with_(node, op=OTHER[type(op)]())
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
        case ast.Name(id=name) if name in NAMES:
            yield with_(node, id=NAMES[name])
        case ast.Constant(value=bool(value)):
            yield with_(node, value=not value)
        case ast.Constant(value=int(value)) if value < 10:
            yield with_(node, value=value + 1)
    yield from without_a_part(node)


def without_a_part(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a part of a program without one of its operands, of its arguments by
    keyword, of its elements.
    """
    without = lambda items, i: [*items[:i], *items[i + 1 :]]
    match node:
        case ast.BoolOp(values=values):
            for i in range(len(values)):
                yield (
                    values[1 - i]
                    if len(values) == 2
                    else with_(node, values=without(values, i))
                )
        case ast.Call(keywords=keywords):
            for i, keyword in enumerate(keywords):
                if keyword.arg is not None and keyword.arg not in ONLY_CHECKS:
                    yield with_(node, keywords=without(keywords, i))
        case ast.Tuple(elts=items, ctx=ast.Load()) | ast.Set(elts=items) if (
            len(items) > 1
        ):
            for i in range(len(items)):
                yield with_(node, elts=without(items, i))


def mutants(text: str) -> list[Mutant]:
    """Return all changes of a program, in the order of its lines."""
    tree = ast.parse(text)
    found: list[Mutant] = []

    def visit(parent: ast.AST) -> None:
        for field, value in ast.iter_fields(parent):
            for i, node in enumerate(value if isinstance(value, list) else [value]):
                names = {field, getattr(node, "arg", None)}
                is_type = isinstance(node, ast.Tuple) and isinstance(
                    parent, ast.Subscript
                )
                if (
                    not isinstance(node, ast.AST)
                    or isinstance(node, UNSEEN)
                    or names & ONLY_CHECKS
                    or is_type
                ):
                    continue
                for new in changes(node):
                    setattr(
                        parent,
                        field,
                        (
                            [*value[:i], new, *value[i + 1 :]]
                            if isinstance(value, list)
                            else new
                        ),
                    )
                    found.append(
                        Mutant(
                            node.lineno,
                            ast.unparse(node),
                            ast.unparse(new),
                            ast.unparse(tree),
                        )
                    )
                    setattr(parent, field, value)
                visit(node)

    visit(tree)
    return sorted(found, key=lambda mutant: mutant.line)


def tests_of(file: Path) -> list[str]:
    """Return the tests that judge a file, by paths from the root: a test of its name
    first.
    """
    folder = next(folder for folder in TESTS if file.is_relative_to(folder))
    name = f"test_{file.stem.lstrip('_')}.py"
    places = [ROOT / place for place in TESTS[folder]]
    files = [
        found
        for place in places
        for found in (sorted(place.rglob("test_*.py")) if place.is_dir() else [place])
    ]
    files += [
        found
        for found in [ROOT / "tests" / name]
        if found.exists() and found not in files
    ]
    return [
        str(found.relative_to(ROOT))
        for found in sorted(files, key=lambda found: found.name != name)
    ]


def run(
    folder: Path, tests: list[str], *options: str, limit: float | None = None
) -> bool | None:
    """Return whether tests pass in a folder, of which the first that fails ends the
    run; None if it ran too long.
    """
    command = [
        sys.executable,
        "-B",
        "-m",
        "pytest",
        "-qx",
        "-p",
        "no:cacheprovider",
        *options,
        *tests,
    ]
    try:
        return (
            subprocess.run(
                command, cwd=folder, timeout=limit, capture_output=True
            ).returncode
            == 0
        )
    except subprocess.TimeoutExpired:
        return None


def from_fast_to_slow(report: Path, tests: list[str]) -> list[str]:
    """Return files of tests by the seconds that a report says they took; the first, of
    the mutant's name, stays so.
    """
    seconds = dict.fromkeys(tests, 0.0)
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        file = case.attrib["classname"].replace(".", "/") + ".py"
        seconds[file] = seconds.get(file, 0.0) + float(case.attrib["time"])
    return [tests[0], *sorted(tests[1:], key=seconds.__getitem__)]


def survivors(
    root: Path, file: Path, chosen: list[Mutant], tests: list[str]
) -> Iterator[Mutant]:
    """Yield those of the mutants of a file that pass its tests.

    Raises:
        ValueError: if the file as it is does not pass them.
    """
    with tempfile.TemporaryDirectory() as temporary:
        copied, report = Path(temporary, "copy"), Path(temporary, "report.xml")
        not_copied = lambda folder, names: [
            x for x in names if x[0] == "." or (folder == str(root) and x not in COPIED)
        ]
        shutil.copytree(root, copied, ignore=not_copied)
        start = time.monotonic()
        if not run(copied, tests, f"--junitxml={report}"):
            raise ValueError(
                f"{file} does not pass its tests as it is: {' '.join(tests)}"
            )
        limit, tests = (
            60 + 3 * (time.monotonic() - start),
            from_fast_to_slow(report, tests),
        )
        for mutant in chosen:
            (copied / file).write_text(mutant.text)
            if run(copied, tests, limit=limit):
                yield mutant


def main(
    file: Annotated[Path, typer.Argument(help="A file of mpx.")],
    count: Annotated[int, Option(help="How many mutants are drawn.")] = 20,
    seed: Annotated[int, Option(help="Of the draw.")] = 0,
) -> None:
    """List mutants of a file that no test kills."""
    file = file.resolve().relative_to(ROOT)
    found = mutants((ROOT / file).read_text())
    chosen = random.Random(seed).sample(found, min(count, len(found)))
    lived = 0
    for mutant in survivors(ROOT, file, chosen, tests_of(file)):
        lived += 1
        typer.echo(f"{file}:{mutant.line}: {mutant.before}  ->  {mutant.after}")
    typer.echo(f"{lived} of {len(chosen)} mutants survive.")


if __name__ == "__main__":
    typer.run(main)
