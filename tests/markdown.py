"""Code in Markdown files, as the tests of the README and of the documentation run it."""

import contextlib
import io
import re
from typing import Any, NamedTuple

_BLOCK = re.compile(
    r"^```python[^\n]*\n(?P<code>.*?)^```$(?:\s+^```text title=\"Prints\"\n(?P<prints>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """A block of Python.

    Attributes:
        code: the block, behind as many empty lines as there are lines before it, so that errors name those of the file.
        prints: what a block of text with the title "Prints" right behind it says that it prints; None without one.
    """

    code: str
    prints: str | None


def python_blocks(text: str) -> list[Block]:
    """The blocks of Python in a Markdown text, in its order."""
    return [Block("\n" * text.count("\n", 0, m.start("code")) + m["code"], m["prints"]) for m in _BLOCK.finditer(text)]


def run_blocks(text: str, filename: str) -> dict[str, Any]:
    """Runs the Python of a Markdown text from top to bottom in one namespace, which it returns.

    Raises:
        AssertionError: if a block does not print what the text says.
    """
    names: dict[str, Any] = {}
    for block in python_blocks(text):
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(block.code, filename, "exec"), names)
        printed = output.getvalue()
        assert block.prints in (None, printed), f"{filename} says {block.prints!r}, but the code prints {printed!r}"
    return names
