"""Small programs of the kinds that public models are made of, without a word of mpx:
the judges of autocast.

A file holds a field. A program is a loss of parameters and of a batch, whose first axis
has `ROWS` rows.
"""

import importlib
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

ROWS = 16  # of a batch: eight devices divide it, and it may be contracted in 8 bits


class Program(NamedTuple):
    """A program, and how to make what it takes. Its name is that of its function, its
    field that of its file.
    """

    name: str
    field: str
    loss: Callable[[Any, dict[str, Any]], jax.Array]  # of parameters and a batch
    # Parameters and a batch, from a seed.
    make: Callable[[int], tuple[Any, dict[str, Any]]]


PROGRAMS: dict[str, Program] = {}


def program(params: Any, **batch: Any) -> Callable[..., Any]:
    """Add a function of parameters and of the named parts of a batch to the programs.

    `params` and each part of the batch are trees whose leaves are shapes of weights, or
    functions of NumPy's generator.
    """

    def add(function):
        def make(seed):
            rng = np.random.default_rng(seed)
            drawn = lambda leaf: leaf(rng) if callable(leaf) else weight(rng, leaf)
            is_shape = lambda leaf: (
                isinstance(leaf, tuple) and all(isinstance(size, int) for size in leaf)
            )
            return jax.tree.map(drawn, (params, batch), is_leaf=is_shape)

        name, field = function.__name__, function.__module__.rpartition(".")[2]
        assert name not in PROGRAMS, f"two programs are called {name}"
        PROGRAMS[name] = Program(
            name, field, lambda params, batch: function(params, **batch), make
        )
        return function

    return add


def weight(rng, shape):
    """Draw a weight whose product with normal numbers has a variance of about one;
    vectors are small.
    """
    inputs = {0: 100, 1: 100, 4: np.prod(shape[:-1])}.get(
        len(shape), shape[-2] if len(shape) > 1 else 1
    )
    return (rng.normal(size=shape) / np.sqrt(inputs)).astype(np.float32)


def rows(*shape):
    """Return a part of a batch: normal numbers."""
    return lambda rng: rng.normal(size=(ROWS, *shape)).astype(np.float32)


def positive(*shape):
    """Return a part of a batch: numbers between 0.1 and 1."""
    return lambda rng: rng.uniform(0.1, 1, size=(ROWS, *shape)).astype(np.float32)


def integers(high, *shape):
    """Return a part of a batch: integers below `high`."""
    return lambda rng: rng.integers(0, high, (ROWS, *shape), dtype=np.int32)


def booleans(*shape):
    """Return a part of a batch: truths, in a quarter of the places."""
    return lambda rng: rng.random((ROWS, *shape)) < 0.25


def complexes(*shape):
    """Return complex weights."""
    return lambda rng: (
        (rng.normal(size=shape) + 1j * rng.normal(size=shape)) / np.sqrt(shape[0])
    ).astype(np.complex64)


def key(rng):
    """Return a key of JAX's random numbers."""
    return np.array([0, rng.integers(1000)], np.uint32)


def all_programs() -> dict[str, Program]:
    """Return the programs of all files, by name."""
    for path in sorted(pathlib.Path(__file__).parent.glob("*.py")):
        if not path.stem.startswith(("test_", "_", "conftest")):
            importlib.import_module(f"{__name__}.{path.stem}")
    return PROGRAMS
