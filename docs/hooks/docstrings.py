"""An extension of Griffe: docstrings as the reference shows them.

The project's docstrings have the heading `Example:`, Griffe wants `Examples:`; a public name in backticks becomes a
link to its entry; and the comments behind the fields of a class become its section `Attributes:`.
"""

import ast
import pathlib
import re
from typing import Any

import griffe

_PACKAGE = pathlib.Path(__file__).parents[2] / "mpx"
_NAME = re.compile(r"(?<![`\[\w])`(?:mpx\.)?(?P<name>[A-Za-z_][\w.]*)`(?!`)")
_CODE = re.compile(r"\s*(>>>|\.\.\. )")
_EXAMPLE = re.compile(r"^(\s*)Example:$", re.MULTILINE)


def _public_names() -> dict[str, str]:
    """The path of each public name, by how docstrings write it: of the index, and of the public modules."""
    paths = {name: f"mpx.{name}" for name in _names_of(_PACKAGE / "__init__.py")}
    for module in ("formats", "monitor", "doctor", "plot"):
        folder = _PACKAGE / module
        file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
        paths |= {
            f"{module}.{name}": f"mpx.{module}.{name}" for name in _names_of(file)
        }
    return paths


def _names_of(file: pathlib.Path) -> list[str]:
    """What a module defines, and what it imports in the form `from x import y as y`, but for modules."""
    body = ast.parse(file.read_text()).body
    imports = [
        node
        for node in body
        if isinstance(node, ast.ImportFrom) and node.module != "mpx"
    ]
    aliases = [alias for node in imports for alias in node.names]
    imported = [alias.name for alias in aliases if alias.asname == alias.name]
    defined = [
        node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)
    ]
    return [name for name in imported + defined if not name.startswith("_")]


def _fields_of(obj: griffe.Object) -> str:
    """The fields of a class that have a comment, as a section of its docstring."""
    fields = (
        [field for field in obj.members.values() if field.is_attribute]
        if obj.is_class
        else []
    )
    comments = {
        field.name: field.source.partition("  # ")[2]
        for field in fields
        if field.lineno == field.endlineno
    }
    lines = [f"    {name}: {comment}" for name, comment in comments.items() if comment]
    return "\n".join(["\n\nAttributes:", *lines]) if lines else ""


class Docstrings(griffe.Extension):
    """Renames the section of examples, and links public names."""

    def __init__(self) -> None:
        self._paths = _public_names()

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for each module, class, function and attribute, once it is read."""
        if obj.docstring is not None:
            obj.docstring.value += _fields_of(obj)
            lines = _EXAMPLE.sub(r"\1Examples:", obj.docstring.value).split("\n")
            obj.docstring.value = "\n".join(
                self._linked(line, obj.name) for line in lines
            )

    def _linked(self, line: str, own_name: str) -> str:
        if _CODE.match(line):
            return line

        def link(match: re.Match[str]) -> str:
            path = self._paths.get(match["name"])
            return (
                match[0]
                if path is None or match["name"] == own_name
                else f"[{match[0]}][{path}]"
            )

        return _NAME.sub(link, line)
