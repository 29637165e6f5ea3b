"""Loss scales: values that scale a loss, unscale its gradients and adapt to what they see."""

import dataclasses
import functools
import math
import warnings
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike

from mpx import _trees

T = TypeVar("T")

_COUNTER_MAX = np.int32(np.iinfo(np.int32).max)


@functools.partial(jax.tree_util.register_dataclass, data_fields=(), meta_fields=())
@dataclasses.dataclass(frozen=True)
class NoOpLossScale:
    """No loss scaling: for bfloat16 and float32, whose range needs none.

    Example:
        >>> NoOpLossScale().scale(3.0)
        3.0
    """

    @property
    def loss_scale(self) -> int:
        """Always 1."""
        return 1

    def scale(self, tree: T) -> T:
        """Returns `tree`."""
        return tree

    def unscale(self, tree: T) -> T:
        """Returns `tree`."""
        return tree

    def adjust(self, grads_finite: ArrayLike) -> "NoOpLossScale":
        """Returns the value itself."""
        del grads_finite
        return self


@dataclasses.dataclass(frozen=True)
class StaticLossScale:
    """A fixed loss scale.

    A pytree: an array (or tracer) in it is a leaf, a Python number belongs to the structure.

    Attributes:
        loss_scale: scalar; a power of two where exactness matters.

    Example:
        >>> StaticLossScale(2.0**15).unscale({"w": jnp.float16(32768)})
        {'w': Array(1., dtype=float32)}
    """

    loss_scale: ArrayLike

    def scale(self, tree: T) -> T:
        """Multiplies the leaves, in float32 if they are narrower."""
        return _multiply(tree, self.loss_scale)

    def unscale(self, tree: T) -> T:
        """Divides the leaves, in float32 if they are narrower."""
        return _multiply(tree, self.loss_scale, inverse=True)

    def adjust(self, grads_finite: ArrayLike) -> "StaticLossScale":
        """Returns the value itself."""
        del grads_finite
        return self


def _flatten_static(value: StaticLossScale) -> tuple[tuple[Any, ...], Any]:
    if isinstance(value.loss_scale, (int, float)):
        return (), value.loss_scale
    return (value.loss_scale,), None


jax.tree_util.register_pytree_node(
    StaticLossScale,
    _flatten_static,
    lambda number, leaves: StaticLossScale(*leaves) if leaves else StaticLossScale(number),
)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("loss_scale", "counter", "bad_steps"),
    meta_fields=("period", "factor", "min_loss_scale", "max_loss_scale", "hysteresis"),
)
@dataclasses.dataclass(frozen=True)
class DynamicLossScale:
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

    With the default hysteresis this is the rule of `torch.amp.GradScaler`, between bounds; with a larger one,
    Megatron-LM's: the first `hysteresis - 1` bad steps since the last growth are forgiven.

    A pytree: `loss_scale`, `counter` and (with a hysteresis above 1) `bad_steps` are leaves, the settings belong
    to the structure, so that all of them survive `jax.jit`, `jax.lax.scan` and flattening.

    Attributes:
        loss_scale: float32 scalar.
        counter: int32 scalar, good steps since the scale last grew or a step was bad.
        period: after how many good steps in a row the scale grows.
        factor: by how much it grows and shrinks.
        min_loss_scale: it never shrinks below this.
        max_loss_scale: it never grows above this. Without a bound, a model whose gradients are zero for long
            (frozen, or finished) takes the scale to infinity, from where it does not come back.
        hysteresis: how many bad steps, since the last growth, it takes to shrink.
        bad_steps: int32 scalar, bad steps since the last growth; None if `hysteresis` is 1.

    Raises:
        TypeError: if a setting is a traced value.
        ValueError: if `period` or `hysteresis` is below 1, `factor` is not above 1, or the minimum is above the
            maximum.

    Example:
        >>> scale = DynamicLossScale(period=2)
        >>> for finite in (True, True, False, False):
        ...     scale = scale.adjust(jnp.bool_(finite))
        ...     print(scale.loss_scale, scale.counter)
        32768.0 1
        65536.0 0
        32768.0 0
        16384.0 0

    References:
        Micikevicius et al. 2018, Mixed Precision Training (arXiv 1710.03740). The interface is jmp's.
    """

    loss_scale: ArrayLike = 2.0**15
    counter: ArrayLike = 0
    period: int = 2000
    factor: float = 2
    min_loss_scale: float = 1.0
    max_loss_scale: float = 2.0**24
    hysteresis: int = 1
    bad_steps: ArrayLike | None = None

    def __post_init__(self) -> None:
        """Gives Python numbers a dtype, so that a jitted step does not compile again for the second call."""
        _warn_unless_floating(self.loss_scale, "loss_scale")
        _warn_unless_floating(self.min_loss_scale, "min_loss_scale")
        settings: dict[str, Any] = {name: _python_number(getattr(self, name), name) for name in _SETTINGS}
        if settings["period"] < 1 or settings["hysteresis"] < 1:
            raise ValueError(f"`period` and `hysteresis` must be at least 1, but got {settings}.")
        if not settings["factor"] > 1:
            raise ValueError(f"`factor` must be above 1, but got {self.factor}.")
        if settings["min_loss_scale"] > settings["max_loss_scale"]:
            raise ValueError(f"`min_loss_scale` must not be above `max_loss_scale`, but got {settings}.")
        if isinstance(self.loss_scale, (int, float)):
            settings["loss_scale"] = np.asarray(self.loss_scale, np.float32)
        if isinstance(self.counter, int):
            settings["counter"] = np.asarray(self.counter, np.int32)
        if settings["hysteresis"] > 1 and (self.bad_steps is None or isinstance(self.bad_steps, int)):
            settings["bad_steps"] = np.asarray(self.bad_steps or 0, np.int32)
        for name, value in settings.items():
            object.__setattr__(self, name, value)

    def scale(self, tree: T) -> T:
        """Multiplies the leaves, in float32 if they are narrower."""
        return _multiply(tree, self.loss_scale)

    def unscale(self, tree: T) -> T:
        """Divides the leaves, in float32 if they are narrower."""
        return _multiply(tree, self.loss_scale, inverse=True)

    def adjust(self, grads_finite: ArrayLike) -> "DynamicLossScale":
        """The value for the next step.

        Args:
            grads_finite: boolean scalar: were all gradients of this step finite?

        Raises:
            ValueError: if it is not a scalar.
        """
        finite = jnp.asarray(grads_finite, bool)
        if finite.ndim:
            raise ValueError(f"`adjust` needs a boolean scalar, but got shape {finite.shape}; see `all_finite`.")
        scale = jnp.asarray(self.loss_scale)
        counter = jnp.asarray(self.counter)
        grows = finite & (counter >= self.period - 1)
        grown = jnp.minimum(scale * self.factor, jnp.maximum(scale, self.max_loss_scale))
        grown = jnp.where(jnp.isfinite(grown), grown, scale)  # a float16 scale, or no maximum
        shrunk = jnp.maximum(scale / self.factor, self.min_loss_scale)
        bad_steps = None
        if self.bad_steps is not None:
            bad_steps = jnp.asarray(self.bad_steps)
            bad_steps = jnp.where(finite, bad_steps, saturating_increment(bad_steps))
            shrunk = jnp.where(bad_steps >= self.hysteresis, shrunk, scale)
            bad_steps = jnp.where(grows, 0, bad_steps)
        return dataclasses.replace(
            self,
            loss_scale=jnp.where(finite, jnp.where(grows, grown, scale), shrunk),
            counter=jnp.where(finite & ~grows, counter + 1, 0).astype(counter.dtype),
            bad_steps=bad_steps,
        )


LossScale = NoOpLossScale | StaticLossScale | DynamicLossScale

_SETTINGS = ("period", "factor", "min_loss_scale", "max_loss_scale", "hysteresis")


def all_finite(tree: Any) -> jax.Array:
    """Whether no floating or complex number in a tree is infinite or NaN.

    Args:
        tree: any pytree of arrays.

    Returns:
        Boolean scalar; True for a tree without arrays.

    Example:
        >>> print(all_finite({"a": jnp.ones(3), "b": jnp.array([1.0, jnp.inf])}))
        False
    """
    return functools.reduce(jnp.logical_and, map(is_finite, jax.tree.leaves(tree)), jnp.asarray(True))


def is_finite(leaf: Any) -> jax.Array:
    """Whether no number in an array is infinite or NaN, a boolean scalar; always True of integers and PRNG keys."""
    if _is_prng_key(leaf):
        return jnp.asarray(True)
    leaf = jnp.asarray(leaf)
    return jnp.isfinite(leaf).all() if jnp.issubdtype(leaf.dtype, jnp.inexact) else jnp.asarray(True)


def select_tree(pred: ArrayLike, a: T, b: T) -> T:
    """Takes all leaves from `a` if `pred` is true, else from `b`: bits, signs of zeros and NaN payloads included.

    (But for the payloads of bfloat16 on CPU, which copies bfloat16 through float32 and makes them quiet.)

    Args:
        pred: boolean scalar.
        a: any pytree of arrays; PRNG keys too.
        b: a tree of the same structure, shapes and dtypes.

    Raises:
        TypeError: if `pred` is not a boolean scalar. (Also an `AssertionError`, as in jmp.)
        ValueError: if the trees differ in structure.

    Example:
        >>> select_tree(jnp.bool_(False), {"w": jnp.float32(1)}, {"w": jnp.float32(2)})
        {'w': Array(2., dtype=float32)}
    """
    pred = jnp.asarray(pred)
    if pred.ndim != 0 or pred.dtype != np.bool_:
        raise _NotABooleanScalarError(
            f"`select_tree`: expected boolean scalar `pred`, but got {pred.dtype}{list(pred.shape)}."
        )
    return jax.tree.map(lambda x, y: lax.select(pred, x, y), a, b)


def is_power_of_two(x: float) -> bool:
    """True for positive finite powers of two, by which a multiplication is exact.

    Example:
        >>> is_power_of_two(0.25), is_power_of_two(3.0)
        (True, False)
    """
    return math.isfinite(x) and x > 0 and math.frexp(x)[0] == 0.5


def require_powers_of_two(loss_scale: LossScale, caller: str) -> None:
    """Raises unless this is a loss scale whose scale, factor and bounds are powers of two.

    A traced scale has no value yet; it is taken as it is.
    """
    if not isinstance(loss_scale, LossScale):
        raise TypeError(
            f"`{caller}`: `loss_scale` must be a NoOpLossScale, StaticLossScale or DynamicLossScale, but got "
            f"{_what_came(loss_scale)}; a number goes into `StaticLossScale(number)`, and of an optimizer state take "
            "`get_loss_scale(opt_state)`."
        )
    numbers = {"loss_scale": loss_scale.loss_scale}
    if isinstance(loss_scale, DynamicLossScale):
        numbers |= {name: getattr(loss_scale, name) for name in ("factor", "min_loss_scale", "max_loss_scale")}
    wrong = {
        name: number
        for name, number in numbers.items()
        if not isinstance(number, Tracer) and not _divides_exactly(np.asarray(number).item())
    }
    if wrong:
        listed = ", ".join(f"{name}={number}" for name, number in wrong.items())
        raise ValueError(
            f"`{caller}` unscales gradients exactly, so scale, factor and bounds must be powers of two, but got "
            f"{listed}. Use the nearest power of two, such as 2.0**15."
        )


def _what_came(value: Any) -> str:
    return f"the class {value.__name__}, which wants to be called" if isinstance(value, type) else type(value).__name__


def saturating_increment(count: jax.Array) -> jax.Array:
    """`count + 1`, which stays at the largest int32 instead of wrapping around."""
    return jnp.where(count < _COUNTER_MAX, count + 1, count)


def _divides_exactly(number: float) -> bool:
    """A power of two whose reciprocal is a normal float32 number."""
    return is_power_of_two(number) and 2.0**-126 <= number <= 2.0**126


class _NotABooleanScalarError(TypeError, AssertionError):
    """What `select_tree` raises: a TypeError, and what users of jmp catch."""


def _multiply(tree: T, factor: ArrayLike, *, inverse: bool = False) -> T:
    """Or by `1 / factor`, which has the accuracy of each leaf: 1/3 in float32 is too coarse for float64 leaves."""
    if inverse and isinstance(factor, (int, float)):
        factor, inverse = 1 / factor, False

    def multiply(x):
        x = jnp.asarray(x)
        wide = _trees.promoted(x.dtype, np.float32)
        by = jnp.asarray(factor, wide)
        return x.astype(wide) * (1 / by if inverse else by)

    return jax.tree.map(multiply, tree)


def _is_prng_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _python_number(value: Any, name: str) -> int | float:
    if isinstance(value, Tracer):
        raise TypeError(f"`DynamicLossScale`: `{name}` is a setting and cannot be a traced value; got {value}.")
    return value if isinstance(value, (int, float)) else np.asarray(value).item()


def _warn_unless_floating(value: Any, name: str) -> None:
    dtype = getattr(value, "dtype", None)
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        warnings.warn(f"Expected floating type for {name}, got {dtype}", stacklevel=4)
