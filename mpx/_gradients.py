"""Losses and gradients under a loss scale."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from mpx import _trees
from mpx._autocast import in_place
from mpx._autocast.transform import Autocast, autocast_of
from mpx._dtypes import dtype_or_none
from mpx._finite import all_finite, select_tree
from mpx._loss_scale import LossScale, NoOpLossScale, at_least_float32, require_powers_of_two

# A cotangent above 65504 has no float16 value: a float16 loss is differentiated with at most this seed.
_LARGEST_F16_SEED = np.float32(2.0**15)
_TRANSFORM = "For a Flax NNX model: `mpx.value_and_grad(..., transform=nnx.value_and_grad)`, under `nnx.jit`."


def value_and_grad(
    fun: Callable[..., Any],
    loss_scale: LossScale | None = None,
    *,
    argnums: Any = 0,
    has_aux: bool = False,
    grad_dtype: DTypeLike | None = jnp.float32,
    transform: Callable[..., Callable[..., Any]] = jax.value_and_grad,
) -> Callable[..., tuple[Any, Any]]:
    """Differentiate as `jax.value_and_grad` does, with the loss scaled before differentiation.

    The value that comes back is the loss as `fun` returned it. The gradients are those of the *scaled* loss:
    `loss_scaling`, which knows the same scale, looks for infinities in them and unscales them.

    The loss is scaled in float32 whatever its dtype. Where `fun` returns float16, differentiation starts from at most
    2**15, and the rest of the scale is multiplied in afterwards. A function that `autocast` returned is differentiated
    with respect to a float32 view of its parameters: no gradient is rounded to their dtype, and no parameter is copied.
    What it changes in a Flax NNX model (batch statistics, counters of dropout) stays as it was in a step with an
    infinite or NaN gradient, if there is a loss scale: `loss_scaling` skips that step.

    Args:
        fun: a function of arrays that returns a scalar loss, or `(loss, aux)` if `has_aux`.
        loss_scale: `NoOpLossScale()` if None. In a training loop: `get_loss_scale(opt_state)`.
        argnums: which arguments to differentiate; one number, several, or what `transform` takes there.
        has_aux: whether `fun` returns a pair.
        grad_dtype: of the gradients, or None for the dtypes of the arguments; float64 gradients stay float64. The
            gradient of a bfloat16 parameter has been rounded once, at the parameter, but for autocast functions.
        transform: `jax.value_and_grad`, or a function like it, such as `flax.nnx.value_and_grad` (for models that
            change themselves, too) or `equinox.filter_value_and_grad`. It gets `argnums` only if that is not 0.

    Returns:
        A function of the arguments of `fun` that returns `(loss, grads)`, or `((loss, aux), grads)`.

    Raises:
        ValueError: if the scale, or a dynamic scale's factor or bounds, are not powers of two, by which gradients
            would be rounded; at the call, if an autocast function changes an argument and `jax.value_and_grad` would
            lose that.
        TypeError: if `fun` is no function or `loss_scale` no loss scale; at the call, if `fun` does not return a real
            floating scalar.

    Example:
        >>> loss, grads = value_and_grad(lambda w: (w**2).sum(), StaticLossScale(2.0**10))(jnp.float16([1, 2]))
        >>> loss, grads
        (Array(5., dtype=float16), Array([2048., 4096.], dtype=float32))

    References:
        Micikevicius et al. 2018, Mixed Precision Training (arXiv 1710.03740).
    """
    if not callable(fun):
        raise TypeError(f"`value_and_grad` needs a function that returns a loss, but got {type(fun).__name__}.")
    loss_scale = NoOpLossScale() if loss_scale is None else loss_scale
    require_powers_of_two(loss_scale, "value_and_grad")
    given, grad_dtype = grad_dtype, dtype_or_none(grad_dtype)
    if given is not None and (grad_dtype is None or not jnp.issubdtype(grad_dtype, jnp.floating)):
        raise ValueError(f"`value_and_grad`: `grad_dtype` must be a floating-point dtype or None, but got {given!r}.")

    def scaled_loss(call, *args, **kwargs):
        loss, aux = _loss_and_aux(call(*args, **kwargs), has_aux)
        seed, _ = _seed_and_rest(loss_scale, loss.dtype)
        return at_least_float32(loss) * seed, (loss, aux)

    # Not all transforms take `argnums` (Equinox's do not), and none needs to be told the default.
    options = {"has_aux": True} if argnums == 0 and isinstance(argnums, int) else {"argnums": argnums, "has_aux": True}
    record = autocast_of(fun) if grad_dtype is not None else None

    @functools.wraps(fun)
    def wrapped(*args, **kwargs):
        call, viewed = (fun, args) if record is None else _on_f32_view(record, args, kwargs, argnums, transform)
        objects = [] if record is None else in_place.objects_of((viewed, kwargs))
        differentiated = transform(lambda *args, **kwargs: scaled_loss(call, *args, **kwargs), **options)
        (_, (loss, aux)), grads = differentiated(*viewed, **kwargs)
        _, rest = _seed_and_rest(loss_scale, loss.dtype)
        if rest is not None:
            grads = jax.tree.map(lambda g: _multiplied(g, rest, keep_dtype=grad_dtype is None), grads)
        grads = _in_dtype(grads, grad_dtype)
        changes = in_place.changes_of(objects)
        if changes and not isinstance(loss_scale, NoOpLossScale):
            # A step that `loss_scaling` skips changes nothing, batch statistics included. It sees these gradients.
            finite = all_finite(grads)
            changes = [c._replace(after=select_tree(finite, c.after, c.before)) for c in changes]
        in_place.hand_back((args, kwargs), changes)
        return ((loss, aux) if has_aux else loss), grads

    return wrapped


def grad(
    fun: Callable[..., Any],
    loss_scale: LossScale | None = None,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    grad_dtype: DTypeLike | None = jnp.float32,
    transform: Callable[..., Callable[..., Any]] = jax.value_and_grad,
) -> Callable[..., Any]:
    """Differentiate as `jax.grad` does, with the loss scaled before differentiation; see `value_and_grad`.

    Returns:
        A function of the arguments of `fun` that returns `grads`, or `(grads, aux)` if `has_aux`.

    Example:
        >>> grad(lambda w: w**2)(jnp.bfloat16(3))
        Array(6., dtype=float32)
    """
    with_value = value_and_grad(
        fun, loss_scale, argnums=argnums, has_aux=has_aux, grad_dtype=grad_dtype, transform=transform
    )

    @functools.wraps(fun)
    def wrapped(*args, **kwargs):
        value, grads = with_value(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return wrapped


def _loss_and_aux(result: Any, has_aux: bool) -> tuple[jax.Array, Any]:
    """Return the loss, and what came with it (None if nothing was to come); raise for a result of another form."""
    wanted = "`value_and_grad` needs a function that returns a real floating scalar, but "
    if has_aux:
        wanted = "`value_and_grad` with `has_aux=True` needs a function that returns a pair (loss, aux), but "
        if not (isinstance(result, tuple) and len(result) == 2):
            raise TypeError(f"{wanted}it returned {_trees.dtype_and_shape(result)}.")
    loss, aux = result if has_aux else (result, None)
    is_tree = not jax.tree_util.all_leaves([loss])
    array: Any = loss if is_tree else jnp.asarray(loss)
    if is_tree or array.shape != () or not jnp.issubdtype(array.dtype, jnp.floating):
        hint = "Is it (aux, loss)?" if has_aux else "For a pair (loss, aux) give `has_aux=True`."
        shown = f"{_trees.dtype_and_shape(array)}, no real floating scalar."
        raise TypeError(f"{wanted}its loss is {shown} {hint}" if is_tree else f"{wanted}its loss is {shown}")
    return array, aux


def _seed_and_rest(loss_scale: LossScale, loss_dtype: np.dtype) -> tuple[jax.Array, jax.Array | None]:
    """Return the factor inside differentiation, and the one to multiply gradients with afterwards (None for 1)."""
    number = loss_scale.loss_scale
    scale = jnp.asarray(number, _trees.promoted(loss_dtype, np.float32))
    if loss_dtype != np.float16 or (isinstance(number, (int, float)) and number <= _LARGEST_F16_SEED):
        return scale, None
    seed = jnp.minimum(scale, _LARGEST_F16_SEED)
    return seed, scale / seed


def _multiplied(g: Any, factor: jax.Array, keep_dtype: bool) -> Any:
    if not (hasattr(g, "dtype") and jnp.issubdtype(g.dtype, jnp.inexact)):
        return g
    wide = at_least_float32(g)
    product = wide * factor.astype(wide.dtype)
    return product.astype(g.dtype) if keep_dtype else product


def _in_dtype(grads: Any, dtype: np.dtype | None) -> Any:
    """Cast real gradients of at most 32 bits, 8-bit floats included; a cast of a tree leaves those alone."""
    if dtype is None:
        return grads
    is_float8 = lambda g: hasattr(g, "dtype") and jnp.issubdtype(g.dtype, jnp.floating) and g.dtype.itemsize == 1
    grads = jax.tree.map(lambda g: at_least_float32(g) if is_float8(g) else g, grads)
    return _trees.cast_tree(grads, dtype, which=lambda g: g.dtype.itemsize <= 4)


def _on_f32_view(
    record: Autocast, args: tuple[Any, ...], kwargs: dict[str, Any], argnums: Any, transform: Any
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return an autocast function of arguments whose differentiated ones are float32, and those arguments.

    It also passes the 16-bit dtype of each value: it can round them to that one without a loss.
    """
    viewed = list(args)
    for position in argnums if isinstance(argnums, Sequence) else (argnums,):
        index = getattr(position, "argnum", position)  # of `flax.nnx.DiffState`
        if -len(args) <= index < len(args):  # if not, the transform says so
            leaves = jax.tree.leaves(args[index])
            wide = _trees.cast_tree(leaves, jnp.float32, which=lambda leaf: leaf.dtype.itemsize == 2)
            viewed[index] = in_place.copy_with(args[index], wide)
    before, after = jax.tree.leaves((args, kwargs)), jax.tree.leaves((tuple(viewed), kwargs))
    grids = [old.dtype if old is not new else None for old, new in zip(before, after, strict=True)]

    def call(*args, **kwargs):
        objects = in_place.objects_of((args, kwargs))
        result = record.call(args, kwargs, grids)
        if transform is jax.value_and_grad:  # it hands no change of an argument back
            in_place.require_unchanged(objects, result, _TRANSFORM)
        return result

    return call, tuple(viewed)
