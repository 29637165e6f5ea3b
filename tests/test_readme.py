"""The README's code runs, and its commands are those that CI runs."""

import pathlib
import re

import pytest

from tests import markdown

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()

pytestmark = pytest.mark.optax_promotion


def test_the_code_of_the_readme_runs_from_top_to_bottom():
    names = markdown.run_blocks(README, "README.md")
    assert len(markdown.python_blocks(README)) >= 3
    assert names["params"]["params"]["layers_0"]["kernel"].dtype == "bfloat16"
    assert names["mpx"].is_synced(names["params"], names["opt_state"])


def test_ci_runs_the_test_command_of_the_readme():
    command = re.search(r"^python3 -m venv .*pytest.*$", README, re.MULTILINE)[0]
    assert command in (ROOT / ".ci" / "run").read_text()


def test_the_main_job_has_a_command_that_sets_itself_up():
    assert re.search(r"^python3 -m venv .* && .*pip install .* && .*-m examples\.gpt\.compare$", README, re.MULTILINE)
