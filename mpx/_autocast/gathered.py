"""Weights that other devices sent: what they were made of, to gather them again where nothing whole was kept."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax


@functools.partial(jax.tree_util.register_dataclass, data_fields=["shard"], meta_fields=["again"])
@dataclasses.dataclass(frozen=True)
class Source:
    """What a gathered weight was made of."""

    shard: jax.Array  # in the dtype that it has in memory, or is sent in
    again: Callable[[jax.Array], jax.Array]  # from the shard to the float32 weight

    def then(self, function: Callable[[jax.Array], jax.Array]) -> "Source":
        """Return the source of what a function makes of the weight."""
        return Source(self.shard, lambda shard: function(self.again(shard)))

    def weight_after(self, x: jax.Array) -> jax.Array:
        """Return the weight, gathered when `x` is there: XLA would see that it was gathered before, and keep that."""
        return self.again(lax.optimization_barrier((self.shard, x))[0])


class Gathered(NamedTuple):
    """A gathered weight beside its source. Gradients of the weight are the weight's alone."""

    weight: jax.Array
    source: Source


def array_of(x: Any) -> Any:
    """Return a gathered weight without its source, and anything else unchanged."""
    return x.weight if isinstance(x, Gathered) else x
