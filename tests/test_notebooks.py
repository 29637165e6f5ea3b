"""Check the notebooks: CI runs each from a clean kernel, and they are committed with their outputs."""

import ast
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


@pytest.mark.slow
@every_notebook
@pytest.mark.filterwarnings("default")  # what Jupyter's own packages warn of
def test_a_notebook_runs_from_a_clean_kernel(path):
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": path.parent}}
    NotebookClient(notebook, timeout=180, kernel_name="python3", resources=where).execute()


@every_notebook
def test_a_notebook_is_saved_with_its_outputs_and_names_what_exists(path):
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert any(cell.outputs for cell in cells)
    assert all(cell.execution_count for cell in cells)
    code = "\n".join(cell.source for cell in cells)
    attributes = {ast.unparse(node) for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Attribute)}
    names = [name for name in attributes if re.fullmatch(r"mpx(\.\w+)+", name)]
    assert names
    for name in names:
        pkgutil.resolve_name(name)
