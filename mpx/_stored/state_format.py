"""Define how an array of an optimizer's state is kept between steps: the stored leaf
and its format.
"""

import abc
import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from mpx import _flax, _trees, formats
from mpx._errors import not_differentiable
from mpx._shardings import explicit_sharding, in_auto, part_sharding
from mpx._stored.roles import Role


class StateFormat(abc.ABC):
    """A way to keep a float32 array of an optimizer's state in fewer bytes between two
    steps.

    Subclass it as a frozen dataclass with `encode` and `decode`. It then works in
    `low_precision_state`, `fused_update`, `zero1`, `convert_state`, `memory_plan` and
    Orbax as the formats of mpx do ("Writing your own", in the docs, has an example).
    Its fields are settings: they are hashed and compared, because `jax.jit` compiles a
    step for each format.

    Attributes:
        rounds_at_random: whether `encode` gets a PRNG key at each step, unless
            `low_precision_state` is told to round to nearest.
    """

    rounds_at_random: ClassVar[bool] = False

    @abc.abstractmethod
    def encode(
        self, x: jax.Array, key: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Return the codes of a float32 array, and their scales.

        Codes may have another shape than the array: two codes of 4 bits fit into a
        byte. `zero1` shards codes and scales like the parameter if they have the axes
        of the array; only the last may be shorter. There is a `key`, of
        `jax.random.split`, if rounding is stochastic. Scales may be None.
        """

    @abc.abstractmethod
    def decode(self, codes: jax.Array, scales: Any) -> jax.Array:
        """Return the array that was encoded."""

    def for_role(self, role: Role) -> "StateFormat":
        """Return the format for a leaf of this role: itself, or a copy whose unset
        options the role decides.
        """
        return self

    def for_shards(self, columns: int) -> "StateFormat":
        """Return the format for a leaf whose shards have this many columns, so that
        each device encodes its own.

        A shard of whole rows lies in memory in one piece: it counts as one row.
        """
        return self

    def why_unsuitable(self, role: Role, shape: tuple[int, ...]) -> str | None:
        """Return a reason such as "are second moments, which float16 cannot hold"; None
        if the format holds the leaf.

        It is asked about each leaf that would be kept so: its role, such as `"second
        moment"`, and its shape. The error that follows says "These leaves" and the
        reason.
        """
        return None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class StoredLeaf:
    """A float32 array of an optimizer's state, encoded for the time between two steps.

    - It stands in the rule's state where the float32 array stood, and `decode` gives
      back an array of its `shape`.
    - It is a pytree node: `codes` and `scales` are its children, and `format` is
      static.
    - So the format travels with the array, through `jax.jit`, Orbax and shardings.
    - A function of the numbers (`optax.global_norm`, an edit) must be given what
      `decode` returns: `jax.tree.leaves` of a state yields codes. An edited array goes
      back by `encode`.
    - Where a second tree has one leaf for it, such as a sharding, maps must stop here:
      `is_leaf=lambda x: isinstance(x, StoredLeaf)`, in `optax.tree.map_params` too.

    Attributes:
        codes: what `format.encode` returned for the array. If the array is in a box (an
            `nnx.Param`, a `NamedArray` of Haliax), codes and scales are in such boxes,
            with the names of the axes that they still have.
        scales: the scales of the codes; None if the format has none.
        format: how to decode them.

    Example:
        >>> tx = low_precision_state(optax.trace(0.9), {"trace": Blockwise8bit()})
        >>> stored = tx.init({"w": jnp.ones((64, 64))}).inner_state.trace["w"]
        >>> stored.shape, stored.codes.dtype, stored.decode().dtype
        ((64, 64), dtype('int8'), dtype('float32'))
        >>> stored
        StoredLeaf(Blockwise8bit(block_size=256, signed=True), int8[64, 64] to decode)
        >>> stored.encode(0.1 * stored.decode()).codes.dtype
        dtype('int8')
    """

    codes: Any
    scales: Any
    format: StateFormat = dataclasses.field(metadata={"static": True})

    # Traced once for all equal leaves, each of which is one call in the program: with
    # 100 of them in 8 bits a step is traced in 0.13 s, and in 0.8 s without this here
    # and at `store`.
    @jax.jit
    def decode(self) -> jax.Array:
        """Return the array in float32."""
        # A format of a user may return 16 bits; the rule computes in float32 all the
        # same.
        return placed_by_xla(self.format.decode, *self._arrays()).astype(np.float32)

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> "StoredLeaf":
        """Return a leaf that keeps another array of this shape in the same format,
        rounded to nearest, or at random with a key.
        """
        if x.shape != self.shape:
            raise ValueError(
                f"`StoredLeaf.encode` needs an array of {list(self.shape)}, but got"
                f" {_trees.dtype_and_shape(x)}."
            )
        if key is not None:
            (key,) = jax.random.split(key, 1)  # its data are random: see `noise_for`
        parts = placed_by_xla(self.format.encode, x.astype(np.float32), key)
        return jax.tree.structure(self).unflatten(jax.tree.leaves(parts))

    def __repr__(self) -> str:
        codes = ", ".join(map(_trees.dtype_and_shape, jax.tree.leaves(self.codes)))
        return f"StoredLeaf({self.format}, {codes or self.codes} to decode)"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the decoded array."""
        return _shape(self.format, *_types(self._arrays()))

    def _arrays(self) -> tuple[Any, Any]:
        (codes,), scales = jax.tree.leaves(self.codes), jax.tree.leaves(self.scales)
        return codes, scales[0] if scales else None


# A state has many leaves of one shape, and is looked through at every update.
@functools.lru_cache(maxsize=4096)
def _shape(format: StateFormat, codes: Any, scales: Any) -> tuple[int, ...]:
    return jax.eval_shape(StoredLeaf.decode, StoredLeaf(codes, scales, format)).shape


def is_stored(node: Any) -> bool:
    """Return whether a node of a state is a stored leaf."""
    return isinstance(node, StoredLeaf)


def shown(leaf: Any) -> str:
    """Return how messages show a leaf of a state."""
    return (
        f"{leaf.format} of {list(leaf.shape)}"
        if is_stored(leaf)
        else _trees.dtype_and_shape(leaf)
    )


@functools.partial(jax.jit, static_argnums=1)  # as `decode`
def store(x: Any, format: StateFormat, key: jax.Array | None = None) -> Any:
    """Encode an array, or a box with one.

    Return a stored leaf; of a cast the codes alone, which are the array in fewer bits.
    What is kept is in boxes like the array's.
    """
    _flax.let_serialize(StoredLeaf)
    (array,) = jax.tree.leaves(x)
    array = array.astype(np.float32)
    if not isinstance(format, Cast):
        # A cast has a derivative. That of codes would be zero, and a learned rate would
        # stand still.
        array = not_differentiable(array, _NO_DERIVATIVE.format(format))
    codes, scales = placed_by_xla(format.encode, array, key)
    codes, scales = _flax.in_box_of(x, codes), _flax.in_box_of(x, scales)
    return codes if isinstance(format, Cast) else StoredLeaf(codes, scales, format)


_NO_DERIVATIVE = (
    "`low_precision_state`: a step of the optimizer is differentiated (a learned rate,"
    " meta-learning), but codes of `{}` have no derivative. Keep this state in float32"
    " or 16 bits there, or apply `jax.lax.stop_gradient` to the gradients."
)


def placed_by_xla(function: Callable[..., Any], x: jax.Array, other: Any) -> Any:
    """Encode or decode an array; on explicit axes under automatic ones: no type can say
    how blocks are sharded.
    """
    sharding = explicit_sharding(x)
    if sharding is None:
        return function(x, other)
    results = jax.eval_shape(function, *_types((x, other)))
    shardings = jax.tree.map(
        lambda part: part_sharding(sharding, x.shape, part.shape), results
    )
    return in_auto(function, sharding.mesh, shardings)(x, other)


def _types(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)


def _format_as_bytes(static: tuple[StateFormat]) -> bytes:
    """Return a format as `jax.export` keeps it, with the types of a step's
    arguments.
    """
    format: Any = static[0]  # a dataclass, as every format is
    return json.dumps([_name_of(type(format)), dataclasses.asdict(format)]).encode()


def _format_from_bytes(data: bytes) -> tuple[StateFormat]:
    name, settings = json.loads(data)
    kinds: list[Any] = [StateFormat]
    for kind in kinds:  # grows
        kinds += kind.__subclasses__()
    found = {_name_of(kind): kind for kind in kinds}
    if name not in found:
        raise ValueError(
            f"The exported step keeps its state in `{name}`: import the module that"
            " defines this format."
        )
    hashable = {
        field: tuple(value) if isinstance(value, list) else value
        for field, value in settings.items()
    }
    return (found[name](**hashable),)


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


export.register_pytree_node_serialization(
    StoredLeaf,
    serialized_name="mpx.StoredLeaf",
    serialize_auxdata=_format_as_bytes,
    deserialize_auxdata=_format_from_bytes,
    from_children=lambda aux_data, children: StoredLeaf(*children, *aux_data),
)


@dataclasses.dataclass(frozen=True)
class Cast(StateFormat):
    """Keep an array in bfloat16, float16 or float32, rounded once; it needs no
    scales.
    """

    dtype: str

    def encode(
        self, x: jax.Array, key: jax.Array | None = None
    ) -> tuple[jax.Array, None]:
        """Round to nearest, or at random with a key; float32 does not change."""
        dtype = np.dtype(jnp.dtype(self.dtype))
        rounded = (
            formats.round_to(x, dtype)
            if key is None
            else formats.stochastic_round(key, x, dtype)
        )
        return rounded.astype(dtype), None

    def decode(self, codes: jax.Array, scales: None) -> jax.Array:
        return codes

    def why_unsuitable(self, role: Role, shape: tuple[int, ...]) -> str | None:
        if self.dtype != "float16" or role != "second moment":
            return None
        return (
            "are second moments, which float16 cannot hold: squares of gradients below"
            " 2.4e-4 become less than 6e-8, its smallest number, and updates are"
            " divided by their root. Use 'bf16' or `Blockwise8bit()`."
        )

    def __str__(self) -> str:
        return self.dtype


FLOAT32 = Cast("float32")
