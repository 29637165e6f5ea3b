"""Read text: files, or the source code of Python's standard library, which every
machine has.
"""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

# Parts of the standard library that are tests, tables of numbers, foreign packages, or
# differ between machines.
SKIPPED_FOLDERS = {
    "__pycache__",
    "encodings",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
}
SKIPPED_PREFIXES = ("_sysconfigdata", "config-")
PIECE_BYTES = 10_000  # no file needs to fit into memory


def pieces(path: Path | None) -> Iterator[tuple[bytes, bool]]:
    """Yield the text files of a path in sorted order, piece by piece, and whether a
    piece begins a file.

    None stands for the source code of Python's standard library. Pieces with a zero
    byte are not text and are left out.
    """
    for file in files(path):
        with file.open("rb") as opened:
            begins = True
            while piece := b"".join(opened.readlines(PIECE_BYTES)):
                if b"\0" not in piece:
                    yield piece, begins
                    begins = False


def files(path: Path | None) -> list[Path]:
    """Return the files of a path in the order of reading, without hidden ones."""
    if path is None:
        folder = Path(sysconfig.get_path("stdlib"))
        return sorted(
            file
            for file in folder.rglob("*.py")
            if not _is_skipped(file.relative_to(folder))
        )
    if path.is_dir():

        def is_hidden(file):
            return any(part.startswith(".") for part in file.relative_to(path).parts)

        found = (
            file for file in path.rglob("*") if file.is_file() and not is_hidden(file)
        )
        return sorted(found, key=lambda file: file.relative_to(path).as_posix())
    return [path]


def _is_skipped(path: Path) -> bool:
    return not SKIPPED_FOLDERS.isdisjoint(path.parts) or any(
        part.startswith(SKIPPED_PREFIXES) for part in path.parts
    )
