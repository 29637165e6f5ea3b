"""How many devices a program may run on, as far as the trace of the program can know."""

import contextlib
import contextvars
from collections.abc import Iterator

import jax

_COUNT: contextvars.ContextVar[int | None] = contextvars.ContextVar("device_count", default=None)


def are_several_in_sight() -> bool:
    """Return whether a program that is traced here may run on more than one device.

    Under `jax.set_mesh` and inside `jax.shard_map` the mesh tells. Without one, arguments may be sharded over all
    devices of the process group: a trace does not see it.
    """
    if _COUNT.get() is not None:
        return _COUNT.get() != 1
    mesh = jax.sharding.get_abstract_mesh()
    return (jax.device_count() if mesh.empty else mesh.size) > 1


@contextlib.contextmanager
def in_sight(count: int) -> Iterator[None]:
    """Say how many devices the programs that are traced in here run on."""
    token = _COUNT.set(count)
    try:
        yield
    finally:
        _COUNT.reset(token)
