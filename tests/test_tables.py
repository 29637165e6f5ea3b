"""Results of tools: their text, and JSON of their fields and properties."""

import dataclasses
import json
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mpx import _tables


@dataclasses.dataclass(frozen=True)
class Part:
    size: int

    @property
    def doubled(self):
        return 2 * self.size


@dataclasses.dataclass(frozen=True)
class Found(_tables.Result):
    value: Any
    _hidden: int = 3

    @property
    def kind(self):
        return type(self.value).__name__

    def _parts(self):
        yield _tables.Table("Sizes [bold]", [("name", "bytes"), ("a[red]", "1"), ("long name", "1,000")])
        yield _tables.Table("", [("x", "y"), ("1", "z")], right=(0,))
        yield "A paragraph [bold] at the end."


def test_the_parts_are_printed_in_order_with_columns_aligned():
    assert str(Found(1)).splitlines() == [
        "Sizes [bold]",
        "name       bytes",
        "a[red]         1",
        "long name  1,000",
        "",
        "x  y",
        "1  z",
        "",
        "A paragraph [bold] at the end.",
    ]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Part(3), {"size": 3, "doubled": 6}),
        (Found(2), {"value": 2, "kind": "int"}),
        ({1: (Part(1),)}, {"1": [{"size": 1, "doubled": 2}]}),
        ((math.nan, math.inf, 0.5, True, None, "text"), [None, None, 0.5, True, None, "text"]),
        ((np.float32(0.5), np.float32(np.nan), np.int64(3), np.bool_(True)), [0.5, None, 3, True]),
        (np.arange(3), [0, 1, 2]),
        (np.dtype(ml_dtypes.bfloat16), "bfloat16"),
    ],
)
def test_json_has_fields_properties_and_finite_numbers(value, expected):
    found = Found(value).as_dict()
    assert found == {"value": expected, "kind": type(value).__name__}
    assert json.loads(json.dumps(found, allow_nan=False)) == found
