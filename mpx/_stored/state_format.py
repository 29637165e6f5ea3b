"""Define how an array of an optimizer's state is kept between steps: the protocol, and the plain 16-bit casts."""

import abc
import ast
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from mpx import formats
from mpx._dtypes import dtype_or_none
from mpx._stored.roles import Role


class StateFormat(abc.ABC):
    """A way to keep a float32 array of an optimizer's state in fewer bytes between two steps.

    Subclass it as a frozen dataclass with `scales_of`, `encode` and `decode`, whose fields are Python numbers, strings,
    booleans or None. It then works in `low_precision_state`, `fused_update`, `zero1`, `convert_state`, `memory_plan`
    and Orbax as those of mpx do.
    A state names the format by its class and these fields, so that it can be read without the transformation that made
    it: give the class a name that no other format has.

    Example:
        >>> import dataclasses
        >>> @dataclasses.dataclass(frozen=True)
        ... class Sixteenths(StateFormat):
        ...     def scales_of(self, x):
        ...         return jnp.max(jnp.abs(x), keepdims=True) / 16
        ...     def encode(self, x, scales, key=None):
        ...         return jnp.round(x / scales).astype(jnp.int8)
        ...     def decode(self, codes, scales):
        ...         return codes * scales
        >>> tx = low_precision_state(optax.trace(0.9), {"trace": Sixteenths()}, min_size=0)
        >>> tx.init({"w": jnp.ones(4)}).inner_state.trace["w"].dtype
        dtype('int8')
    """

    _classes: ClassVar[dict[str, type["StateFormat"]]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        """Make the format known by its name, under which states refer to it."""
        super().__init_subclass__(**options)
        known = StateFormat._classes.setdefault(cls.__name__, cls)
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise TypeError(
                f"A `StateFormat` called {cls.__name__!r} is defined in {known.__module__}, and states name their "
                "formats: give this one another name."
            )
        StateFormat._classes[cls.__name__] = cls  # a notebook may run its cell again

    def scales_of(self, x: jax.Array) -> Any:
        """Return one array of scales of a float32 array; None if its codes are floating numbers that need none.

        Inside `jax.shard_map`, `zero1` shards codes and scales alike: the scales then have as many axes as the codes,
        and equal sizes along all but the last, along which they are those of whole blocks.
        """
        return None

    @abc.abstractmethod
    def encode(self, x: jax.Array, scales: Any, key: jax.Array | None = None) -> jax.Array:
        """Return the codes of a float32 array, in its shape.

        Args:
            x: float32, of any shape.
            scales: what `scales_of` returned for it.
            key: a PRNG key if the rounding is to be stochastic, else None.
        """

    @abc.abstractmethod
    def decode(self, codes: jax.Array, scales: Any) -> jax.Array:
        """Return the float32 array that was encoded."""

    def coded(self, x: jax.Array) -> tuple[jax.Array, Any]:
        """Return the codes of a float32 array, rounded to nearest, and its scales."""
        scales = self.scales_of(x)
        return self.encode(x, scales), scales

    def for_role(self, role: Role) -> "StateFormat":
        """Return the format for a leaf of this role: itself, or a copy whose unset options the role decides."""
        return self

    def refuses(self, role: Role) -> str | None:
        """Return why a leaf of this role cannot be kept so, as the end of the sentence "these leaves ...", or None."""
        return None


@dataclasses.dataclass(frozen=True)
class Cast(StateFormat):
    """Keeps an array in bfloat16, float16 or float32, rounded once; it needs no scales."""

    dtype: str

    def encode(self, x: jax.Array, scales: None = None, key: jax.Array | None = None) -> jax.Array:
        """Round to nearest, or with a key at random; float32 is kept as it is."""
        dtype = np.dtype(jnp.dtype(self.dtype))
        rounded = formats.round_to(x, dtype) if key is None else formats.stochastic_round(key, x, dtype)
        return rounded.astype(dtype)

    def decode(self, codes: jax.Array, scales: None) -> jax.Array:
        """Return the codes, which are floating numbers."""
        return codes

    def refuses(self, role: Role) -> str | None:
        """Refuse second moments in float16."""
        if self.dtype != "float16" or role != "second moment":
            return None
        return (
            "are second moments, which float16 cannot hold: squares of gradients below 2.4e-4 become less than 6e-8, "
            "its smallest number, and updates are divided by their root. Use 'bf16' or `Blockwise8bit()`."
        )

    def __str__(self) -> str:
        return self.dtype


FLOAT32 = Cast("float32")


def as_format(given: Any) -> StateFormat | None:
    """Return the format that a dtype, the name of one or a format stands for; None if it stands for none."""
    if isinstance(given, StateFormat):
        return given
    dtype = dtype_or_none(given)
    if dtype is None or dtype not in (jnp.bfloat16, np.float16, np.float32):
        return None
    return Cast(dtype.name)


def scales_name(index: int, chosen: StateFormat) -> str:
    """Return the name under which a state keeps the scales of a leaf: its position and its format."""
    fields = dataclasses.fields(chosen) if dataclasses.is_dataclass(chosen) else ()
    settings = ", ".join(f"{field.name}={getattr(chosen, field.name)!r}" for field in fields)
    return f"{index}.{type(chosen).__name__}({settings})"


def require_nameable(chosen: StateFormat, caller: str) -> None:
    """Raise unless a format can be read again from its name, and be compared."""
    try:
        same = format_of(scales_name(0, chosen)) == chosen and hash(chosen) is not None
    except (TypeError, ValueError, SyntaxError, AttributeError):
        same = False
    if not same:
        raise TypeError(
            f"`{caller}`: the format {chosen!r} must be a frozen dataclass whose fields are Python numbers, strings, "
            "booleans or None, so that a state can name it."
        )


def position_of(name: str) -> int:
    """Return the position of the leaf that the scales of this name belong to."""
    return int(name.partition(".")[0])


def format_of(name: str) -> StateFormat:
    """Return the format that `scales_name` wrote down."""
    call: Any = ast.parse(name.partition(".")[2], mode="eval").body
    kind = StateFormat._classes.get(call.func.id)
    if kind is None:
        raise ValueError(
            f"The optimizer state keeps a leaf in the format {call.func.id!r}, which is not defined here. Import the "
            "module that has its class."
        )
    return kind(**{argument.arg: ast.literal_eval(argument.value) for argument in call.keywords})
