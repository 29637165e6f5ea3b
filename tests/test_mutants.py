"""The tool that changes mpx to judge its tests: which mutants it makes, and which it
says survive.
"""

from pathlib import Path

import pytest

from tests import mutants

PROGRAM = '''
def is_small(x: int, limit: int | None = 3) -> bool:
    """Return whether -1 < x + 1 < 3 and not any of it."""
    if limit is not None and x < 0:
        raise ValueError(f"{x + 1} is not > 0, True or False")
    return x <= limit
'''


def test_mutants_change_operators_and_constants_but_no_types_and_no_words():
    found = {
        (mutant.line, mutant.before, mutant.after)
        for mutant in mutants.mutants(PROGRAM)
    }
    both = "limit is not None and x < 0"
    assert found == {
        (2, "3", "4"),
        (4, both, "limit is not None or x < 0"),
        (4, both, "limit is not None"),
        (4, both, "x < 0"),
        (4, "limit is not None", "limit is None"),
        (4, "x < 0", "x <= 0"),
        (4, "0", "1"),
        (6, "x <= limit", "x < limit"),
    }


def test_arguments_by_keyword_elements_and_operands_are_left_out():
    found = {
        mutant.after
        for mutant in mutants.mutants(
            "f(x, y=None, strict=True) or not any(a in (b, c) for a in z)"
        )
    }
    assert {"f(x, strict=True)", "(c,)", "(b,)", "all", "a not in (b, c)"} <= found
    assert not any(
        "strict=False" in after or after == "f(x, y=None)" for after in found
    )


@pytest.mark.slow
def test_what_no_test_sees_survives(tmp_path):
    """Of a file whose test does not look at the border itself; another test of it would
    kill both.
    """
    for folder in ("mpx", "tests"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "mpx" / "small.py").write_text("def is_small(x):\n    return x < 3\n")
    test = (
        "from mpx.small import is_small\n\n\ndef test_it():\n    assert is_small(2) and"
        " not is_small(4)\n"
    )
    (tmp_path / "tests" / "test_small.py").write_text(test)
    file = tmp_path / "mpx" / "small.py"
    every = mutants.mutants(file.read_text())
    lived = mutants.survivors(
        tmp_path, Path("mpx/small.py"), every, ["tests/test_small.py"]
    )
    assert [(mutant.before, mutant.after) for mutant in lived] == [
        ("x < 3", "x <= 3"),
        ("3", "4"),
    ]
    assert mutants.mutants(file.read_text()) == every
