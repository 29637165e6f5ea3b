"""Write what commands found: text for people, or JSON."""

import json
import os
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console

from mpx._tables import json_values


def write(content: Any, parts: Iterable[Any], as_json: bool) -> None:
    """Write the parts, for people; or the content as JSON, with null for a number that is not finite."""
    if as_json:
        sys.stdout.write(json.dumps(json_values(content), indent=2, allow_nan=False) + "\n")
        return
    is_piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    # Into a pipe Rich would write 80 columns, and fold the lines of an explanation.
    console = Console(width=160 if is_piped else None, highlight=False, markup=False)
    for index, part in enumerate(parts):
        console.print(*[""] * min(index, 1), part, sep="\n")
