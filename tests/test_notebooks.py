"""Check the notebooks: CI runs each from a clean kernel, and they are committed with
their outputs.
"""

import ast
import itertools
import pathlib
import pkgutil
import re

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((pathlib.Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def test_there_are_notebooks():
    assert NOTEBOOKS


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def pictures_of(cell):
    """Return the pictures below a cell and what is said about them, for viewers."""
    shown = [output for output in cell.outputs if "image/png" in output.get("data", {})]
    return [(output.data["image/png"], output.metadata) for output in shown]


# Trainings of a tenth of their steps run the same code.
SHORTER = {
    "STEPS, TOGETHER = 3000": "STEPS, TOGETHER = 300",
    "steps=1200": "steps=120",
    "600, 64)": "100, 64)",
}
SHORTER |= {"arange(20, 601, 20)": "arange(20, 101, 20)"}


@pytest.mark.slow
@every_notebook
@pytest.mark.filterwarnings("default")  # what Jupyter's own packages warn of
def test_a_notebook_runs_from_a_clean_kernel_and_shows_as_many_pictures_as_are_saved(
    path,
):
    notebook = nbformat.read(path, as_version=4)
    for cell, (long, short) in itertools.product(code_cells(notebook), SHORTER.items()):
        cell.source = cell.source.replace(long, short)
    saved = [len(pictures_of(cell)) for cell in code_cells(notebook)]
    where = {"metadata": {"path": path.parent}}
    NotebookClient(
        notebook, timeout=180, kernel_name="python3", resources=where
    ).execute()
    assert [len(pictures_of(cell)) for cell in code_cells(notebook)] == saved


@every_notebook
def test_a_notebook_is_saved_with_its_outputs_and_names_what_exists(path):
    cells = code_cells(nbformat.read(path, as_version=4))
    assert any(cell.outputs for cell in cells)
    assert all(cell.execution_count for cell in cells)
    code = "\n".join(cell.source for cell in cells)
    attributes = {
        ast.unparse(node)
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Attribute)
    }
    names = [name for name in attributes if re.fullmatch(r"mpx(\.\w+)+", name)]
    assert names
    for name in names:
        pkgutil.resolve_name(name)
