"""Losses and gradients under a loss scale."""

import collections
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jax.typing import DTypeLike

from mpx import _errors, _trees
from mpx._autocast import in_place
from mpx._autocast.differentiation import View, differentiating, parameter, view_of
from mpx._autocast.transform import autocast_of
from mpx._finite import all_finite
from mpx._loss_scale import GRADIENTS, LossScale, NoOpLossScale, require_powers_of_two

# A cotangent above 65504 has no float16 value: a float16 loss is differentiated with at
# most this seed.
_LARGEST_F16_SEED = np.float32(2.0**15)
_TRANSFORMS = (
    "For a Flax NNX model pass `transform=nnx.value_and_grad`, for an Equinox model"
    " `transform=eqx.filter_value_and_grad`. Otherwise pass what is to be"
    " differentiated as one argument, and the rest as another."
)

# Of a function, beside its scaled loss.
_Outcome = collections.namedtuple("_Outcome", ("loss", "aux"))


def value_and_grad(
    fun: Callable[..., Any],
    loss_scale: LossScale | None = None,
    *,
    argnums: Any = 0,
    has_aux: bool = False,
    allow_int: bool = False,
    grad_dtype: DTypeLike | Literal["as_computed"] | None = jnp.float32,
    transform: Callable[..., Callable[..., Any]] = jax.value_and_grad,
) -> Callable[..., tuple[Any, Any]]:
    """Differentiate as `jax.value_and_grad` does, with the loss scaled before
    differentiation.

    The function returns the loss unscaled, and the gradients of the *scaled* loss,
    which `loss_scaling` unscales. The loss is scaled in float32 whatever its dtype.
    Where `fun` returns float16, differentiation starts from at most 2**15, and the rest
    of the scale is multiplied in afterwards.

    A function that `autocast` returned is differentiated with respect to a float32 view
    of its parameters: no gradient is rounded to their dtype, and under `jit` no
    parameter is copied. So is one behind a `jax.jit`, a `functools.partial` or a
    function of your own that hands it the parameters. Where it gets parts of them
    (`w[0]`), or all through another transformation, such as `jax.checkpoint`, a warning
    says that gradients are rounded.

    The function may change a Flax NNX model (batch statistics, counters of dropout). If
    a loss scale is given, these changes are taken back in a step with an infinite or
    NaN gradient, since `loss_scaling` skips that step.

    Args:
        fun: a function of arrays that returns a scalar loss, or `(loss, aux)` if
            `has_aux`.
        loss_scale: in a training loop, `get_loss_scale(opt_state)`. None for no loss
            scale: the optimizer then skips no step, and changes in a model are never
            taken back.
        argnums: which arguments to differentiate; one number, several, or what
            `transform` takes there.
        has_aux: whether `fun` returns a pair.
        allow_int: whether arguments may hold integers, whose gradients are zeros of
            dtype `float0`, as in JAX.
        grad_dtype: the dtype of the gradients, or None for the dtypes of the arguments;
            float64 gradients stay float64. The gradient of a bfloat16 parameter is
            rounded once, at the parameter; an autocast function does not round it. For
            autocast functions there is also `"as_computed"`: a gradient that one
            narrowed product computes stays in 16 bits, which loses nothing, and all
            others (embeddings, norms, biases, weights with several uses) are float32.
            These are the same numbers in fewer bytes, for `fused_update` and for
            gradients that leave the program. `"bf16"` rounds each float32 gradient
            once, where it is complete: by at most 2**-8 of it, 1.7e-3 in the root mean
            square. A `scan` over stacked bfloat16 layers then makes no float32 gradient
            of the stack.
        transform: `jax.value_and_grad`, or a function like it or like `jax.grad`, such
            as `flax.nnx.value_and_grad` or `equinox.filter_grad`. It gets `argnums`
            only if that is not 0, and `allow_int` only if that is true.

    Returns:
        A function of the arguments of `fun` that returns `(loss, grads)`, or `((loss,
        aux), grads)`.

    Raises:
        ValueError: if the function computes in float16 without a loss scale (pass
            `NoOpLossScale()` to go without); at the call, if the function changes a
            Flax NNX model and `jax.value_and_grad` would lose the change.

    Example:
        >>> loss, grads = value_and_grad(
        ...     lambda w: (w**2).sum(), StaticLossScale(2.0**10)
        ... )(jnp.float16([1, 2]))
        >>> loss, grads
        (Array(5., dtype=float16), Array([2048., 4096.], dtype=float32))
    """
    if loss_scale is None:
        loss_scale = NoOpLossScale(skips_bad_steps=False)
    require_powers_of_two(loss_scale, "value_and_grad")
    record = autocast_of(_without_jit(fun))
    if record is not None and record.needs_a_scale:
        _require_scale(loss_scale, "the function computes in float16")
    # None asks for what JAX gives: the function's own parameters, and no view of them.
    if grad_dtype is None:
        record = None
    is_as_computed = grad_dtype == "as_computed"
    # None: each gradient keeps its argument's.
    dtype = None if record is None else np.dtype(np.float32)
    if not is_as_computed:
        dtype = _errors.floating_dtype(
            grad_dtype, "`value_and_grad`: `grad_dtype`", "'as_computed' or None"
        )
    # Where one autocast function has all uses of a parameter, its gradient is rounded
    # where it is complete.
    early = dtype if record is not None and dtype == jnp.bfloat16 else None
    # Not all transforms take `argnums` (Equinox's do not), and none needs to be told
    # the default.
    options = {} if argnums == 0 else {"argnums": argnums}
    if allow_int:
        options["allow_int"] = True

    @functools.wraps(fun)
    def wrapped(*args, **kwargs):
        positions = _positions(args, argnums)
        # Of no other is it known what it differentiates.
        if transform is jax.value_and_grad and not allow_int:
            _require_differentiable(args, positions)
        leaves, dtypes = _in_float32(
            [] if grad_dtype is None else positions, args, kwargs
        )
        viewed = in_place.copy_with(args, kwargs, leaves)
        with differentiating(
            lambda: _require_scale(loss_scale, "a function inside computes in float16")
        ) as current:
            call, views = _on_parameters(
                fun, dtypes, transform, current.views, _has_tracers(leaves), early
            )
            scaled = _scaled(call, has_aux, loss_scale)
            first, second = transform(scaled, has_aux=True, **options)(
                *viewed.args, **viewed.kwargs
            )
            current.warn(lambda: _program_of(call, viewed.args, viewed.kwargs))
        # `jax.grad` and others like it return the gradients in front.
        grads, (loss, aux) = (
            (first, second) if isinstance(second, _Outcome) else (second, first[1])
        )
        # A view that no autocast function took: its gradient came through the
        # parameter, in the dtype of that.
        rounded = [view.narrow for view in views if view and not view.rounded_to]
        if any(
            _trees.is_floating(x) and x.dtype == np.float16
            for x in [*rounded, *jax.tree.leaves(grads)]
        ):
            _require_scale(
                loss_scale, "parameters are float16, and so are their gradients"
            )
        # Not a result of the function: a transformation may map it over examples.
        _, rest = _seed_and_rest(loss_scale, loss.dtype)
        grads = _named(_in_dtype(grads, dtype, rest), loss_scale)
        # Else a parameter may have uses that nobody sees.
        if is_as_computed and rest is None and record is not None:
            grads = _narrowed_without_loss(grads, args, argnums, views)
        # `loss_scaling` skips a step whose gradients are not finite: it keeps batch
        # statistics too.
        in_place.hand_back(
            (args, kwargs),
            viewed.changes(not loss_scale.skips_bad_steps or all_finite(grads)),
        )
        return ((loss, aux) if has_aux else loss), grads

    return wrapped


def grad(
    fun: Callable[..., Any],
    loss_scale: LossScale | None = None,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    allow_int: bool = False,
    grad_dtype: DTypeLike | Literal["as_computed"] | None = jnp.float32,
    transform: Callable[..., Callable[..., Any]] = jax.value_and_grad,
) -> Callable[..., Any]:
    """Differentiate as `jax.grad` does, with the loss scaled before differentiation;
    see `value_and_grad`.

    Returns:
        A function of the arguments of `fun` that returns `grads`, or `(grads, aux)` if
        `has_aux`.

    Example:
        >>> grad(lambda w: w**2)(jnp.bfloat16(3))
        Array(6., dtype=float32)
    """
    with_value = value_and_grad(
        fun,
        loss_scale,
        argnums=argnums,
        has_aux=has_aux,
        allow_int=allow_int,
        grad_dtype=grad_dtype,
        transform=transform,
    )

    @functools.wraps(fun)
    def wrapped(*args, **kwargs):
        value, grads = with_value(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return wrapped


def _require_scale(loss_scale: LossScale, reason: str) -> None:
    """Raise unless the user gave a loss scale; one that never scales counts."""
    if not loss_scale.skips_bad_steps:
        raise ValueError(
            f"`value_and_grad`: {reason}, but there is no loss scale. Gradients below"
            " 6e-8 would become zero without a word. Pass"
            " `mpx.get_loss_scale(opt_state)`, of an optimizer made by"
            " `mpx.mixed_precision` with a float16 policy, or by `mpx.loss_scaling`."
            " If you want no loss scale, pass `mpx.NoOpLossScale()`."
        )


def _positions(args: tuple[Any, ...], argnums: Any) -> list[int]:
    """Return the positions of the differentiated arguments, from the first; the
    transform refuses a missing one.
    """
    given = argnums if isinstance(argnums, Sequence) else (argnums,)
    # Of `flax.nnx.DiffState`.
    numbers = [getattr(number, "argnum", number) for number in given]
    return [i % len(args) for i in numbers if -len(args) <= i < len(args)]


def _is_inexact(x: Any) -> bool:
    """Return whether this is an array of real or complex numbers, of 8 bits too."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)


def _require_differentiable(args: tuple[Any, ...], positions: list[int]) -> None:
    """Raise if an argument has leaves without gradients, and name them;
    `jax.value_and_grad` would not.
    """
    for position in positions:
        wrong = {
            path: _trees.dtype_and_shape(leaf)
            for path, leaf in _trees.leaves_by_path(args[position]).items()
            if not (_is_inexact(leaf) or isinstance(leaf, (float, complex)))
        }
        what = (
            f"`value_and_grad`: argument {position} ({type(args[position]).__name__})"
            " has leaves without gradients"
        )
        _errors.refuse(wrong, what, _TRANSFORMS, args[position], kind=TypeError)


def _scaled(
    fun: Callable[..., Any], has_aux: bool, loss_scale: LossScale
) -> Callable[..., tuple[jax.Array, _Outcome]]:
    """Return a function of the scaled loss, beside the loss and the auxiliary
    result.
    """

    def scaled(*args, **kwargs):
        loss, aux = _loss_and_aux(fun(*args, **kwargs), has_aux)
        if loss.dtype == np.float16:
            _require_scale(loss_scale, "the loss is float16")
        seed, _ = _seed_and_rest(loss_scale, loss.dtype)
        return _trees.at_least_float32(loss) * seed, _Outcome(loss, aux)

    return scaled


def _loss_and_aux(result: Any, has_aux: bool) -> tuple[jax.Array, Any]:
    """Return the loss and the auxiliary result (None without `has_aux`); raise for a
    result of another form.
    """
    wanted = "`value_and_grad` needs a function that returns a real floating scalar"
    if has_aux:
        wanted = (
            "`value_and_grad` with `has_aux=True` needs a function that returns a pair"
            " (loss, aux)"
        )
        if not (isinstance(result, tuple) and len(result) == 2):
            raise TypeError(
                f"{wanted}, but it returned {_trees.dtype_and_shape(result)}."
            )
    loss, aux = result if has_aux else (result, None)
    array = jnp.asarray(loss) if jax.tree_util.all_leaves([loss]) else None
    if array is None or array.ndim or not jnp.issubdtype(array.dtype, jnp.floating):
        shown = _trees.dtype_and_shape(loss if array is None else array)
        raise TypeError(
            f"{wanted}, but its loss is {shown}. For a pair (loss, aux) give"
            " `has_aux=True`."
        )
    return array, aux


def _seed_and_rest(
    loss_scale: LossScale, loss_dtype: np.dtype
) -> tuple[jax.Array, jax.Array | None]:
    """Return the factor inside differentiation, and the one to multiply gradients with
    afterwards (None for 1).
    """
    number = loss_scale.loss_scale
    scale = jnp.asarray(number, _trees.promoted(loss_dtype, np.float32))
    if loss_dtype != np.float16 or (
        isinstance(number, (int, float)) and number <= _LARGEST_F16_SEED
    ):
        return scale, None
    # A traced scale may be above the seed at a later step, so its rest is multiplied in
    # even where it is 1.
    seed = jnp.minimum(scale, _LARGEST_F16_SEED)
    return seed, scale / seed


def _in_dtype(grads: Any, dtype: np.dtype | None, rest: jax.Array | None) -> Any:
    """Multiply gradients by the rest of the loss scale, and cast real ones of at most
    32 bits; None keeps their dtypes.
    """

    def multiplied(g):
        # 8-bit floats too, which `cast_tree` leaves alone.
        if not _is_inexact(g) or (rest is None and g.dtype.itemsize > 1):
            return g
        wide = _trees.at_least_float32(g)
        if rest is not None:
            wide *= rest.astype(wide.dtype)
        return wide.astype(g.dtype) if dtype is None else wide

    grads = jax.tree.map(multiplied, grads)
    if dtype is None:
        return grads
    return _trees.cast_tree(grads, dtype, which=lambda g: g.dtype.itemsize <= 4)


def _named(grads: Any, loss_scale: LossScale) -> Any:
    """Leave a name on scaled gradients in a program."""
    if loss_scale.is_always_one or not _has_tracers(grads):
        return grads
    return jax.tree.map(
        lambda g: checkpoint_name(g, GRADIENTS) if _trees.is_inexact(g) else g, grads
    )


def _narrowed_without_loss(
    grads: Any, args: tuple[Any, ...], argnums: Any, views: list[View | None]
) -> Any:
    """Cast to 16 bits the gradients that one narrowed contraction computes, since it
    has rounded them already.
    """
    # By names: the gradients of a Flax NNX model are a state, which has other key paths
    # than the model. Two leaves of one name, such as of {"a/b": x, "a": {"b": y}}, stay
    # wide.
    names = _trees.path_names(args).values()
    leaves = collections.Counter(names)
    dtypes = {
        name: view.rounded_to[0]
        for name, view in zip(names, views, strict=False)
        if view and len(view.rounded_to) == 1 and leaves[name] == 1
    }
    positions, are_several = _positions(args, argnums), isinstance(argnums, Sequence)
    given = dict(zip(positions, grads if are_several else [grads], strict=True))
    found = _trees.path_names(given)

    def narrowed(path, g):
        dtype = dtypes.get(found[path])
        return g if dtype is None else g.astype(dtype)

    new = jax.tree.map_with_path(narrowed, given)
    of_arguments = [new[position] for position in positions]
    return type(grads)(of_arguments) if are_several else of_arguments[0]


def _program_of(
    call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return the program of a call, whose results do not matter."""
    arrays, put = _trees.partition_leaves((args, kwargs), _trees.is_array)

    def program(arrays):
        args, kwargs = put(arrays)
        return list(filter(_trees.is_array, jax.tree.leaves(call(*args, **kwargs))))

    return jax.make_jaxpr(program)(arrays)


def _without_jit(fun: Any) -> Any:
    """Return the function inside of a `jax.jit`, which would hide what its arguments
    are.
    """
    if not callable(fun):
        raise TypeError(
            f"`value_and_grad` needs a function, but got {type(fun).__name__}."
        )
    return inspect.unwrap(fun, stop=lambda f: not isinstance(f, jax.stages.Wrapped))


def _has_tracers(tree: Any) -> bool:
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree))


def _in_float32(
    positions: list[int], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Any], list[np.dtype | None]]:
    """Return the leaves of the arguments, with 16-bit parameters that are
    differentiated viewed in float32, and the dtypes of these parameters.
    """
    leaves = [
        (leaf, i in positions and _trees.is_floating(leaf))
        for i, arg in enumerate((*args, kwargs))
        for leaf in jax.tree.leaves(arg)
    ]
    wide = _trees.cast_tree(
        [view_of(leaf) if is_parameter else None for leaf, is_parameter in leaves],
        jnp.float32,
        which=lambda leaf: leaf.dtype.itemsize == 2,
    )
    return (
        [leaf if x is None else x for x, (leaf, _) in zip(wide, leaves, strict=True)],
        [leaf.dtype if is_parameter else None for leaf, is_parameter in leaves],
    )


def _on_parameters(
    fun: Callable[..., Any],
    dtypes: list[np.dtype | None],
    transform: Any,
    taken: dict[int, View],
    is_traced: bool,
    gradient_in: np.dtype | None,
) -> tuple[Callable[..., Any], list[View | None]]:
    """Return a function of the float32 views that calls `fun` with the parameters, in
    the dtypes that they have.

    A call fills the second result with an entry for each leaf of the arguments.
    """
    inner, views = _without_jit(fun), []
    # Run what the user compiled: in line, operations would run one by one.
    if inner is not fun and not is_traced:
        if autocast_of(inner):
            dtypes = [None] * len(dtypes)
        inner = fun

    def call(*args, **kwargs):
        wide = jax.tree.leaves((args, kwargs))
        names = [
            name.partition("/")[2]
            for name in _trees.path_names((args, kwargs)).values()
        ]
        narrow = list(map(parameter, wide, dtypes, names))
        # In place: the caller has the list already.
        views[:] = [
            dtype and View(x, y, gradient_in)
            for dtype, x, y in zip(dtypes, narrow, wide, strict=True)
        ]
        given = in_place.copy_with(args, kwargs, narrow)
        taken.update({id(view.narrow): view for view in views if view})
        result = inner(*given.args, **given.kwargs)
        changes = given.changes()
        if transform is jax.value_and_grad:  # it hands no change of an argument back
            in_place.require_unchanged((args, kwargs), changes, result)
        in_place.hand_back((args, kwargs), changes)
        return result

    return call, views
