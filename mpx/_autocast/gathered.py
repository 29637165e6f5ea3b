"""Weights beside what they were made of, such as this device's part, to gather them again where nothing was kept."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn
from jax.sharding import NamedSharding, PartitionSpec

from mpx._shardings import names_at


def in_float32(x: jax.Array) -> jax.Array:
    """Return an array in float32."""
    return lax.convert_element_type(x, np.float32)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["part", "like"], meta_fields=["again", "is_sent"])
@dataclasses.dataclass(frozen=True)
class Source:
    """Holds what a weight was made of."""

    part: jax.Array  # in the dtype that it has in memory, or is sent in, without a derivative
    like: Any = None  # the same numbers, with their derivative: to JAX another value, which it may keep beside the part
    again: Callable[[jax.Array], jax.Array] = in_float32  # from the part to the float32 weight
    is_sent: bool = False  # whether other devices send the weight, or it is the part in float32

    def then(self, function: Callable[[jax.Array], jax.Array], *, sends: bool = False) -> "Source":
        """Return the source of what a function makes of the weight."""
        return dataclasses.replace(self, again=lambda x: function(self.again(x)), is_sent=self.is_sent or sends)

    def weight_after(self, x: jax.Array) -> jax.Array:
        """Return the weight, gathered when `x` is there: XLA would see that it was gathered before, and keep that."""
        return self.again(lax.optimization_barrier((self.part, x))[0])


class Unsent(NamedTuple):
    """A stack of weights before other devices send it. A loop sends each slice by itself."""

    stack: Any
    sent: Callable[[Any], "Weight"]  # from a slice


class Weight(NamedTuple):
    """A weight beside its source. The gradient of the weight is the array's; the source serves other gradients.

    Where it enters a program inside, the array is a carrier of its gradient: JAX gives a gradient its value's dtype.
    """

    array: Any
    source: Source
    unsent: Unsent | None = None


def array_of(x: Any) -> Any:
    """Return a weight without its source, and anything else unchanged."""
    return x.array if isinstance(x, Weight) else x


def of_a_slice(eqn: JaxprEqn) -> JaxprEqn | None:
    """Return the equation that sends a slice along the first axis; None if that axis is divided, or might be."""
    params = eqn.params
    if eqn.primitive.name == "all_gather" and params["all_gather_dimension"]:
        return eqn.replace(params=params | {"all_gather_dimension": params["all_gather_dimension"] - 1})
    if eqn.primitive.name != "reshard":
        return None
    before: Any = eqn.invars[0].aval
    after = params["dst_sharding"]
    if before.ndim < 2 or names_at(before.sharding.spec, 0) or names_at(after.spec, 0):
        return None
    of_slice = NamedSharding(after.mesh, PartitionSpec(*after.spec[1:]))
    return eqn.replace(params=params | {"dst_sharding": of_slice})


def is_sent(x: Any) -> bool:
    """Return whether a value is a weight that other devices sent."""
    return isinstance(x, Weight) and x.source.is_sent
