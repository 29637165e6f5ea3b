"""Check what every wrapper is given, and list offending leaves in errors."""

import os
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from traceback import extract_tb
from types import TracebackType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from mpx import _trees
from mpx._dtypes import dtype_or_none

T = TypeVar("T")


def warn(text: str) -> None:
    """Warn at the line of the user's code, not at one of mpx or of a library that calls
    it.
    """
    libraries = {"mpx", "jax", "flax", "equinox", "optax", "contextlib"}
    level, frame = 2, sys._getframe(1)
    while (
        frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in libraries
    ):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, UserWarning, stacklevel=level)


def line_of_user(traceback: TracebackType | None) -> str:
    """Return the file and line of a traceback that is nearest to an error and stands
    neither in mpx nor in JAX; empty if there is none.
    """
    ours = tuple(os.path.dirname(module.__file__ or "") for module in (jax, _trees))
    frames = [
        frame
        for frame in extract_tb(traceback)
        if not frame.filename.startswith((*ours, "<"))
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def listed(names: Sequence[str], most: int) -> str:
    """Return the first names, and how many more there are."""
    return ", ".join(names[:most]) + (
        f" and {len(names) - most} more" if len(names) > most else ""
    )


def require_choice(choices: Collection[str], given: Any, argument: str) -> None:
    """Raise unless the string that a user gives as an argument is one of these."""
    if not isinstance(given, str) or given not in choices:
        raise ValueError(
            f"{argument} must be {_either(map(repr, choices))}, but got {given!r}."
        )


def require_one_of(dtypes: Sequence[DTypeLike], given: Any, argument: str) -> np.dtype:
    """Return the dtype that a user gives as an argument; raise unless it is one of
    these.
    """
    found = dtype_or_none(given)
    if found is None or found not in dtypes:
        names = _either(np.dtype(dtype).name for dtype in dtypes)
        raise ValueError(f"{argument} must be {names}, but got {found or repr(given)}.")
    return found


def _either(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} or {last}"


def refuse(
    leaves: Mapping[_trees.Path, str],
    what: str,
    remedy: str,
    tree: Any = None,
    kind: type[Exception] = ValueError,
) -> None:
    """Raise if there are such leaves: say what is wrong, then what to do, and list
    them, named by `path_string`.
    """
    if leaves:
        lines = [
            f"  {_trees.path_string(path, tree)!r}: {text}"
            for path, text in leaves.items()
        ]
        raise kind("\n".join([f"{what}. {remedy}", *lines]))


def is_integer(x: Any) -> bool:
    """Return whether `x` is an integer of Python or NumPy; a boolean is not."""
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool)


def as_transformation(inner: Any, caller: str) -> optax.GradientTransformationExtraArgs:
    """Return the rule that a wrapper wraps, accepting extra arguments; raise for
    anything else.
    """
    # Its own `gradient_transformation` takes no extra arguments.
    if isinstance(inner, optax.MultiSteps):
        update: Any = inner.update
        inner = optax.GradientTransformationExtraArgs(inner.init, update)
    if not is_transformation(inner):
        raise TypeError(
            f"`{caller}` needs an Optax gradient transformation, but got"
            f" {type(inner).__name__}.{hint_to_call(inner)}"
        )
    return optax.with_extra_args_support(inner)


def is_transformation(x: Any) -> bool:
    """Return whether this is a gradient transformation of Optax."""
    return callable(getattr(x, "init", None)) and callable(getattr(x, "update", None))


def hint_to_call(given: Any) -> str:
    """Return what to do with a function that stands where a transformation should."""
    if not callable(given):
        return ""
    return " Call it with its settings first, as in `optax.adamw(1e-3)`."


def with_checked_shapes(
    inner: optax.GradientTransformation, caller: str
) -> optax.GradientTransformationExtraArgs:
    """Return the rule with checks that name gradients and updates of other shapes; JAX
    would broadcast some.

    Gradients may have an axis of examples in front, for a rule that sums over it.
    """

    def update_fn(updates, state, params=None, **extra_args):
        if params is None:
            return inner.update(updates, state, params, **extra_args)
        params = trained(params, updates)
        # `optax.lookahead` takes the gradients of its fast parameters.
        of_updates = (
            params.fast if isinstance(params, optax.LookaheadParams) else params
        )
        require_same_shapes(updates, of_updates, caller, of_examples=True)
        updates, state = inner.update(updates, state, params, **extra_args)
        require_same_shapes(updates, params, caller)
        return updates, state

    return optax.GradientTransformationExtraArgs(inner.init, update_fn)


def wide_dtype(dtype: DTypeLike, caller: str) -> np.dtype:
    """Return float32 or float64 as a NumPy dtype; raise for anything else."""
    wide = require_one_of((np.float32, np.float64), dtype, f"`{caller}`: `dtype`")
    if jax.dtypes.canonicalize_dtype(wide) != wide:
        raise ValueError(
            f"`{caller}`: float64 needs 64-bit mode; set the environment variable"
            " JAX_ENABLE_X64=1."
        )
    return wide


def one_key(key: Any, caller: str) -> jax.Array:
    """Return a typed PRNG key, from a typed or a raw one; raise for anything else."""
    is_array = isinstance(key, (jax.Array, np.ndarray))
    is_typed = is_array and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not is_typed and not (is_array and key.dtype == np.uint32):
        got = f"an array of {key.dtype}" if is_array else repr(key)
        raise TypeError(
            f"`{caller}` needs a PRNG key such as `jax.random.key(0)`, but got {got}."
        )
    key = key if is_typed else jax.random.wrap_key_data(jnp.asarray(key))
    if key.shape != ():
        raise ValueError(
            f"`{caller}` needs one key, but got {key.shape}; take `keys[0]`."
        )
    return jnp.asarray(key)


def not_differentiable(tree: T, message: str) -> T:
    """Return `tree` unchanged, but raise a TypeError with `message` when somebody
    differentiates through it.
    """

    @jax.custom_jvp
    def as_it_is(arrays):
        return arrays

    @as_it_is.defjvp
    def refuse(primals, tangents):
        raise TypeError(message)

    arrays, put = _trees.partition_leaves(
        tree, lambda x: _trees.is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact)
    )
    return put(as_it_is(arrays))


def require_pattern(pattern: str, named: str) -> None:
    """Raise unless a string is a regular expression; `named` is how the message
    begins.
    """
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{named} is not a regular expression: {error}.") from error


def require_step(
    caller: str, kind: type, state: Any, params: Any, updates: Any = None
) -> None:
    """Raise unless `update` got parameters, the state of its transformation and, if
    given, updates of their shapes.
    """
    if params is None:
        raise ValueError(
            f"`{caller}` needs the parameters: call `update(grads, state, params)`. It"
            " keeps what their dtype cannot hold, so it must know what they hold. If a"
            " library makes the call (brax leaves the parameters out), store its"
            " parameters in float32, and use a rule that works without them."
        )
    require_state(state, kind, caller)
    if updates is not None:
        require_same_shapes(updates, params, caller)


def require_state(state: Any, kind: type, caller: str) -> None:
    """Raise if `update` was called with a state that is not this transformation's."""
    if not isinstance(state, kind):
        raise TypeError(
            f"`{caller}` needs the `{kind.__name__}` that its `init` made, but got"
            f" {type(state).__name__}. If it is the state of another recipe,"
            " `convert_state` makes one of this recipe. If a checkpoint was restored"
            " without its types, restore it into `jax.eval_shape(tx.init, params)`."
        )


def floating_dtype(
    given: Any, argument: str, others: str = "or None"
) -> np.dtype | None:
    """Return the dtype that a user gives as an option, or None for None; raise for
    anything but a floating dtype.
    """
    dtype = dtype_or_none(given)
    if given is not None and (dtype is None or not jnp.issubdtype(dtype, jnp.floating)):
        raise ValueError(
            f"{argument} must be a floating-point dtype, {others}, but got {given!r}."
        )
    return dtype


def mismatches(
    wanted: Mapping[_trees.Path, Any],
    got: Mapping[_trees.Path, Any],
    fit: Callable[[Any, Any], bool],
    but: str,
    show: Callable[[Any], str] = _trees.dtype_and_shape,
) -> dict[_trees.Path, str]:
    """Return where two trees differ, by path, in words such as `float32[3], but the
    parameter is float32[2]`.

    `fit(wanted leaf, got leaf)` says whether two leaves match. What only one of the
    trees has comes first.
    """

    def shown(tree, path):
        return show(tree[path]) if path in tree else "nothing"

    both = wanted.keys() & got.keys()
    wrong = [
        path
        for path in {**wanted, **got}
        if path not in both or not fit(wanted[path], got[path])
    ]
    return {
        path: f"{shown(got, path)}, but {but} {shown(wanted, path)}"
        for path in sorted(wrong, key=both.__contains__)
    }


def require_same_shapes(
    updates: Any, params: Any, caller: str, of_examples: bool = False
) -> None:
    """Raise unless each parameter has an update of exactly its shape; JAX would
    broadcast other shapes.

    An update may be None or `optax.MaskedNode`. With `of_examples` it may have one more
    axis in front.
    """

    def is_absent(x):
        return x is None or _trees.is_masked(x)

    absent, got = _places(updates, is_absent), _trees.leaves_by_path(updates)
    wanted = {
        path: p
        for path, p in _trees.leaves_by_path(params).items()
        if absent.isdisjoint(_leading(path))
    }

    def fit(p, x):
        return np.shape(x) == np.shape(p) or (
            of_examples and np.shape(x)[1:] == np.shape(p)
        )

    wrong = mismatches(wanted, got, fit, "the parameter is")
    what = (
        f"`{caller}`: gradients or updates do not match the parameters in structure or"
        " shape"
    )
    remedy = "Give trees of one structure. Is a mean over examples missing?"
    refuse(wrong, what, remedy, params)


def require_gradients(grads: Any, params: Any, caller: str) -> None:
    """Raise if a gradient is None although there is a parameter; most rules cannot tell
    what to do with that.
    """
    absent, leaves = _places(grads), _trees.leaves_by_path(params)
    wrong = {path: "None" for path in leaves if not absent.isdisjoint(_leading(path))}
    what = f"`{caller}`: {len(wrong)} of {len(leaves)} parameters have no gradient"
    remedy = (
        "Keep them out of the trained tree (`equinox.partition`), or freeze them by"
        " `optax.partition`."
    )
    refuse(wrong, what, remedy, params)


def _places(
    tree: Any, of: Callable[[Any], bool] = lambda x: x is None
) -> set[_trees.Path]:
    """Return the paths of the nodes that stand in the place of what is absent."""
    return {path for path, x in _trees.leaves_by_path(tree, of).items() if of(x)}


def _leading(path: _trees.Path) -> list[_trees.Path]:
    return [path[:i] for i in range(len(path) + 1)]


def trained(params: T, grads: Any) -> T:
    """Replace by None what has no floating numbers and no gradient: some trainers give
    modules, functions and all.
    """
    absent = _places(grads)

    def keep(path, p):
        return p if _trees.is_inexact(p) or path not in absent else None

    return jax.tree.map_with_path(keep, params) if absent else params


def require_differentiable(grads: Any, caller: str) -> None:
    """Raise if gradients are integers, booleans or float0."""

    def is_wrong(g):
        return hasattr(g, "dtype") and not jnp.issubdtype(g.dtype, jnp.inexact)

    leaves = _trees.leaves_by_path(grads)
    wrong = {
        path: _trees.dtype_and_shape(g) for path, g in leaves.items() if is_wrong(g)
    }
    what = (
        f"`{caller}` needs floating-point gradients, but {len(wrong)} of"
        f" {len(leaves)} leaves are not"
    )
    remedy = (
        "Differentiate the floating leaves only (as `equinox.filter_grad` does), or use"
        " `optax.masked`."
    )
    refuse(wrong, what, remedy, grads, kind=TypeError)
