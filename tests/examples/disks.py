"""A disk without room, for tests."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

# Where a save fails, TensorStore still calls an event loop of Orbax's that is closed, and coroutines are left over.
leaves_garbage = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore:coroutine .* was never awaited:RuntimeWarning"
)


@contextmanager
def full_disk(size: int = 1000) -> Iterator[None]:
    """No file can become longer than so many bytes; what is written fails as it does on a disk without room."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
