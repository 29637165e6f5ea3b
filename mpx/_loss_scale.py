"""Loss scales: values that scale a loss, unscale its gradients and adapt to what they
see.
"""

import copy
import dataclasses
import functools
import json
import math
import warnings
from collections.abc import Hashable
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import export
from jax.core import Tracer
from jax.typing import ArrayLike

from mpx import _trees

T = TypeVar("T")
GRADIENTS = "mpx.gradients"  # the name of scaled gradients, for `step_report`


class LossScale:
    """Base class of loss scales: a number to multiply a loss by, and a rule for the
    next one.

    A loss scale is a frozen dataclass with a field `loss_scale`, and a pytree: fields
    that are given Python numbers are settings, which belong to its structure, and all
    others are leaves. A class of your own defines `adjust` and `can_shrink` if it
    adapts. What `adjust` changes must be an array, such as `np.int32(0)`; only
    `loss_scale` may be a number.

    Attributes:
        loss_scale: scalar.
        powers_of_two: names of the fields that must be powers of two where gradients
            are to be unscaled exactly.
        is_always_one: whether the loss is never multiplied.
        skips_bad_steps: whether the optimizer that holds this scale skips steps with
            infinite or NaN gradients. False only for what `get_loss_scale` returns for
            an optimizer without a loss scale.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class Halving(LossScale):  # halves at a bad step, and never grows
        ...     loss_scale: ArrayLike
        ...     can_shrink = True
        ...
        ...     def adjust(self, grads_finite):
        ...         return Halving(
        ...             jnp.where(grads_finite, self.loss_scale, self.loss_scale / 2)
        ...         )
        >>> tx = loss_scaling(optax.sgd(1.0), Halving(8.0))
        >>> _, state = tx.update(jnp.array([jnp.nan]), tx.init(jnp.ones(1)))
        >>> get_loss_scale(state)
        Halving(loss_scale=Array(4., dtype=float32))
    """

    loss_scale: ArrayLike
    powers_of_two: ClassVar[tuple[str, ...]] = ("loss_scale",)
    is_always_one: ClassVar[bool] = False
    skips_bad_steps: bool = True

    def __init_subclass__(cls) -> None:
        """Register the class as a pytree, and one of mpx for `jax.export`, once."""
        # Before `dataclass` has given it fields: they are read when a value is
        # flattened.
        jax.tree_util.register_pytree_with_keys(
            cls, _flatten_with_keys, functools.partial(_unflatten, cls)
        )
        if cls.__module__.startswith("mpx."):
            export.register_pytree_node_serialization(
                cls,
                serialized_name=f"mpx.{cls.__name__}",
                serialize_auxdata=lambda structure: json.dumps(structure).encode(),
                deserialize_auxdata=_structure_from_bytes,
            )

    def scale(self, tree: T) -> T:
        """Multiply the leaves, in float32 if they are narrower."""
        return tree if self.is_always_one else _multiply(tree, self.loss_scale)

    def unscale(self, tree: T) -> T:
        """Divide the leaves, in float32 if they are narrower."""
        if self.is_always_one:
            return tree
        return _multiply(tree, self.loss_scale, inverse=True)

    def adjust(self, grads_finite: ArrayLike) -> "LossScale":
        """Return the value for the next step; `grads_finite` says whether all gradients
        of this one were finite.
        """
        return self

    @property
    def can_shrink(self) -> ArrayLike:
        """Return whether a bad step may make the scale smaller, now or after more bad
        steps: a boolean scalar.
        """
        return False


# the names of the leaves, in a value that was unflattened: they are leaves whatever
# they hold now
_LEAVES = "_leaves"


def _flatten_with_keys(value: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, Any]]:
    contents = {
        field.name: getattr(value, field.name) for field in dataclasses.fields(value)
    }
    given = [name for name, x in contents.items() if not isinstance(x, (int, float))]
    leaves = vars(value).get(_LEAVES, given)
    names = tuple(name for name in contents if name in leaves)
    numbers = tuple((name, x) for name, x in contents.items() if name not in names)
    children = [(jax.tree_util.GetAttrKey(name), contents[name]) for name in names]
    return children, (names, numbers)


def _unflatten(kind: type, structure: Any, leaves: Any) -> Any:
    # Without the constructor and its checks: JAX puts tracers, shapes and placeholders
    # into trees.
    names, numbers = structure
    value = object.__new__(kind)
    vars(value).update(numbers, **{_LEAVES: names})
    vars(value).update(zip(names, leaves, strict=True))
    return value


def _structure_from_bytes(data: bytes) -> Hashable:
    names, numbers = json.loads(data)
    return tuple(names), tuple(map(tuple, numbers))


def with_number(value: Any, loss_scale: Any) -> Any:
    """Return a loss scale with another number, or None, as its `loss_scale`.

    It is made without the constructor, which reads numbers: that would wait for the
    device at every step.
    """
    if value.is_always_one:
        return value
    new = copy.copy(value)
    fields = vars(new)
    fields["loss_scale"] = loss_scale
    if _LEAVES in fields:
        fields[_LEAVES] = (*fields[_LEAVES], "loss_scale")
    return new


def with_leaves_of(value: T, other: Any) -> T:
    """Return a loss scale with the settings of `value`, and with the leaves that
    `other` has in these fields.
    """
    children, structure = _flatten_with_keys(value)
    leaves = [
        jax.tree.map(
            lambda x, y: jnp.asarray(y, x.dtype), leaf, getattr(other, key.name)
        )
        for key, leaf in children
    ]
    return _unflatten(type(value), structure, leaves)


@dataclasses.dataclass(frozen=True)
class NoOpLossScale(LossScale):
    """No loss scaling: for bfloat16 and float32, whose range needs none. Its
    `loss_scale` is 1.

    Attributes:
        skips_bad_steps: as in `LossScale`.
    """

    skips_bad_steps: bool = dataclasses.field(default=True, repr=False, compare=False)
    loss_scale = 1
    is_always_one = True


@dataclasses.dataclass(frozen=True)
class StaticLossScale(LossScale):
    """A fixed loss scale.

    Attributes:
        loss_scale: scalar; a power of two where exactness matters.

    Example:
        >>> StaticLossScale(2.0**15).unscale({"w": jnp.float16(32768)})
        {'w': Array(1., dtype=float32)}
    """

    loss_scale: ArrayLike

    def __post_init__(self) -> None:
        _number_of(self, "loss_scale")


@dataclasses.dataclass(frozen=True)
class DynamicLossScale(LossScale):
    """A loss scale that looks for the largest value at which gradients stay finite.

        if grads_finite:
            counter += 1
            if counter == period:
                counter, bad_steps = 0, 0
                loss_scale = min(loss_scale * factor, max_loss_scale)
        else:
            counter = 0
            bad_steps += 1
            if bad_steps >= hysteresis:
                loss_scale = max(loss_scale / factor, min_loss_scale)

    With the default hysteresis it adapts like `torch.amp.GradScaler`, within bounds. A
    larger one follows Megatron-LM: the first `hysteresis - 1` bad steps since the last
    growth do not shrink the scale.

    Attributes:
        loss_scale: scalar; a Python number becomes a float32 array.
        counter: scalar, good steps since the scale last grew or a step was bad; a
            Python number becomes an int32 array.
        period: after how many good steps in a row the scale grows.
        factor: by how much it grows and shrinks.
        min_loss_scale: it never shrinks below this.
        max_loss_scale: it never grows above this. Without a bound, a model whose
            gradients are zero for long (frozen, or finished) takes the scale to
            infinity, where it stays.
        hysteresis: how many bad steps, since the last growth, it takes to shrink.
        bad_steps: scalar, bad steps since the last growth; an int32 array if
            `hysteresis` is above 1, else not counted.

    Example:
        >>> scale = DynamicLossScale(period=1)
        >>> [
        ...     float(scale.adjust(jnp.bool_(finite)).loss_scale)
        ...     for finite in (True, False)
        ... ]
        [65536.0, 16384.0]

    References:
        Micikevicius et al. 2018, Mixed Precision Training (arXiv 1710.03740). The
        interface is jmp's.
    """

    loss_scale: ArrayLike = 2.0**15
    counter: ArrayLike = 0
    period: ArrayLike = 2000
    factor: ArrayLike = 2
    min_loss_scale: ArrayLike = 1.0
    max_loss_scale: ArrayLike = 2.0**24
    hysteresis: ArrayLike = 1
    bad_steps: ArrayLike = 0
    powers_of_two = ("loss_scale", "factor", "min_loss_scale", "max_loss_scale")

    def __post_init__(self) -> None:
        self._check()
        for name in ("loss_scale", "min_loss_scale"):
            dtype = getattr(getattr(self, name), "dtype", np.dtype(np.float32))
            if not jnp.issubdtype(dtype, jnp.floating):  # as jmp does
                warnings.warn(
                    f"Expected floating type for {name}, got {dtype}", stacklevel=3
                )
        # Arrays of the numbers that `adjust` changes, or a jitted step would compile
        # again for its second call.
        dtypes = {"loss_scale": np.float32, "counter": np.int32}
        if not isinstance(self.hysteresis, (int, float)) or self.hysteresis > 1:
            dtypes["bad_steps"] = np.int32
        for name, dtype in dtypes.items():
            if isinstance(getattr(self, name), (int, float)):
                object.__setattr__(self, name, np.asarray(getattr(self, name), dtype))

    def _check(self) -> None:
        for name in ("period", "hysteresis"):
            number = _number_of(self, name)
            if number is not None and not (float(number).is_integer() and number >= 1):
                raise ValueError(
                    f"`DynamicLossScale`: `{name}` must be an integer above 0, but got"
                    f" {number}."
                )
        names = ("factor", "min_loss_scale", "max_loss_scale", "loss_scale", "counter")
        factor, low, high, *_ = (_number_of(self, name) for name in names)
        if factor is not None and not factor > 1:
            raise ValueError(
                f"`DynamicLossScale`: `factor` must be above 1, but got {factor}."
            )
        if low is not None and high is not None and not low <= high:
            raise ValueError(
                f"`DynamicLossScale`: the minimum {low} must not be above the maximum"
                f" {high}."
            )

    def adjust(self, grads_finite: ArrayLike) -> "DynamicLossScale":
        """Return the value for the next step; raise a ValueError if `grads_finite` is
        not a scalar.
        """
        finite = jnp.asarray(grads_finite, bool)
        if finite.ndim:
            raise ValueError(
                f"`adjust` needs a boolean scalar, but got shape {finite.shape}; see"
                " `all_finite`."
            )
        scale, counter = jnp.asarray(self.loss_scale), jnp.asarray(self.counter)
        factor, low, high = (
            jnp.asarray(number, scale.dtype)
            for number in (self.factor, self.min_loss_scale, self.max_loss_scale)
        )
        # `>=`: the counter of a checkpoint may be beyond this period, if its run had a
        # longer one.
        grows = finite & (counter >= jnp.asarray(self.period, counter.dtype) - 1)
        # A scale that begins above its maximum stays there: a good step never shrinks
        # it.
        grown = jnp.minimum(scale * factor, jnp.maximum(scale, high))
        # A float16 scale, or no maximum.
        grown = jnp.where(jnp.isfinite(grown), grown, scale)
        shrunk = jnp.maximum(scale / factor, low)
        bad_steps = self.bad_steps
        if not isinstance(bad_steps, (int, float)):  # else the hysteresis is 1
            bad_steps = jnp.asarray(bad_steps)
            bad_steps = jnp.where(finite, bad_steps, optax.safe_increment(bad_steps))
            shrunk = jnp.where(
                bad_steps >= jnp.asarray(self.hysteresis, bad_steps.dtype),
                shrunk,
                scale,
            )
            bad_steps = jnp.where(grows, 0, bad_steps)
        return dataclasses.replace(
            self,
            loss_scale=jnp.where(finite, jnp.where(grows, grown, scale), shrunk),
            counter=jnp.where(finite & ~grows, counter + 1, 0),
            bad_steps=bad_steps,
        )

    @property
    def can_shrink(self) -> jax.Array:
        return jnp.asarray(self.loss_scale) > self.min_loss_scale


def is_power_of_two(x: float) -> bool:
    """Return whether `x` is a positive finite power of two, so that multiplying by it
    is exact.
    """
    return math.isfinite(x) and x > 0 and math.frexp(x)[0] == 0.5


def require_powers_of_two(loss_scale: Any, caller: str) -> None:
    """Raise unless this is a loss scale whose `powers_of_two` fields are powers of two;
    traced numbers pass.
    """
    if not isinstance(loss_scale, LossScale):
        raise TypeError(
            f"`{caller}`: `loss_scale` must be a loss scale such as"
            f" `DynamicLossScale()`, but got {loss_scale!r}; a number goes into"
            " `StaticLossScale(number)`, and of an optimizer state take"
            " `get_loss_scale(opt_state)`."
        )
    numbers = {name: _number_of(loss_scale, name) for name in loss_scale.powers_of_two}

    # The reciprocal too must be a normal float32 number.
    def divides_exactly(x):
        return is_power_of_two(x) and 2.0**-126 <= x <= 2.0**126

    wrong = [
        f"{name}={x}"
        for name, x in numbers.items()
        if x is not None and not divides_exactly(x)
    ]
    if wrong:
        raise ValueError(
            f"`{caller}` unscales gradients exactly, so scale, factor and bounds must"
            f" be powers of two, but got {', '.join(wrong)}. Use the nearest power of"
            " two, such as 2.0**15."
        )


def require_within_bounds(scale: LossScale) -> None:
    """Raise if no training run can start with this value."""
    if isinstance(scale, DynamicLossScale):
        names = ("min_loss_scale", "loss_scale", "max_loss_scale")
        low, start, high = (_number_of(scale, name) for name in names)
        if None not in (low, start, high) and not low <= start <= high:  # type: ignore[operator]
            raise ValueError(
                f"`loss_scaling`: the scale {start} must lie between its bounds"
                f" {low} and {high}."
            )


def _multiply(tree: T, factor: ArrayLike, *, inverse: bool = False) -> T:
    """Multiply the leaves by a number, or by its inverse."""

    def multiply(x):
        wide = _trees.at_least_float32(jnp.asarray(x))
        # Its inverse too: 1/3 in float32 is too coarse for float64 leaves.
        by = jnp.asarray(factor, wide.dtype)
        return wide * (1 / by if inverse else by)

    return jax.tree.map(multiply, tree)


def _number_of(value: Any, name: str) -> float | None:
    """Return a field as a Python number, or None if it is not known: traced, a shape,
    or one of several values.
    """
    number = getattr(value, name)
    if not (isinstance(number, (int, float)) or _trees.is_array(number)):
        raise TypeError(
            f"`{type(value).__name__}`: `{name}` must be a number, but got {number!r}."
        )
    is_known = not isinstance(number, (Tracer, jax.ShapeDtypeStruct)) and not np.ndim(
        number
    )
    return np.asarray(number).item() if is_known else None
