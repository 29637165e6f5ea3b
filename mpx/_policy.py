"""Policies: in which dtypes parameters are stored, computation runs and results come out."""

import dataclasses
import functools
import re
from collections.abc import Iterable
from typing import Any, TypeVar

import jax
import numpy as np
import optax
from jax.typing import DTypeLike

from mpx import _errors, _tables, _trees
from mpx._dtypes import DTYPE_NAMES, dtype_or_none, half_dtype
from mpx._fp8 import RESULTS, Fp8

T = TypeVar("T")

_FP8 = "fp8"
_MARK = "_mpx_policy"  # an attribute of the `init` of a transformation
_FIELDS = {
    "p": "param_dtype",
    "params": "param_dtype",
    "c": "compute_dtype",
    "compute": "compute_dtype",
    "o": "output_dtype",
    "output": "output_dtype",
}


@dataclasses.dataclass(frozen=True)
class Policy:
    """The dtypes of a mixed-precision program.

    Frozen and hashable, so that it can be a static argument of `jax.jit`. The casts change real floating arrays (and
    shapes) of 16 bits and more. Integers, booleans, PRNG keys, complex numbers, 8-bit floats, None and Python scalars
    pass through. A leaf of the right dtype is returned as the same object, tied weights stay tied, shardings are kept,
    and all concrete arrays are cast in one compiled call.

    Attributes:
        param_dtype: in which parameters are stored between steps.
        compute_dtype: in which the model computes.
        output_dtype: in which the model's results leave it.
        overrides: pairs `(pattern, dtype)`. A pattern is a regular expression. A parameter in whose "/"-joined path it
            is found is stored and computed in that dtype instead. The first match wins. Paths are those in the tree
            that is cast, so cast parameters and inputs one by one, not as a pair.
        fp8: how matrix products of 8-bit floats run under `autocast`, whose results then are in `compute_dtype`; None
            for products in `compute_dtype`. An override keeps a parameter's products out of it.

    Raises:
        TypeError: if one of the dtypes is no dtype, or an override is not a pair.
        ValueError: if one of them is not a floating-point dtype of 16 bits or more, or a pattern is not a
            regular expression.

    Example:
        >>> policy = Policy(jnp.bfloat16, jnp.bfloat16, jnp.float32, overrides=(("norm", jnp.float32),))
        >>> params = policy.cast_to_param({"dense": jnp.ones(2), "norm": jnp.ones(2), "step": jnp.zeros((), int)})
        >>> params["dense"].dtype, params["norm"].dtype, params["step"].dtype
        (dtype(bfloat16), dtype('float32'), dtype('int32'))

    References:
        The names and the string form are those of jmp (https://github.com/google-deepmind/jmp).
    """

    param_dtype: DTypeLike
    compute_dtype: DTypeLike
    output_dtype: DTypeLike
    overrides: tuple[tuple[str, DTypeLike], ...] = ()
    fp8: Fp8 | None = None

    def __post_init__(self) -> None:
        for field in ("param_dtype", "compute_dtype", "output_dtype"):
            object.__setattr__(self, field, _floating_dtype(getattr(self, field), field))
        if not isinstance(self.overrides, Iterable):
            raise TypeError(f"`overrides` must be a tuple of pairs (pattern, dtype), but got {self.overrides!r}.")
        object.__setattr__(self, "overrides", tuple(_checked_override(entry) for entry in self.overrides))
        if self.fp8 is not None and not isinstance(self.fp8, Fp8):
            raise TypeError(f"`fp8` must be an `mpx.Fp8` or None, but got {self.fp8!r}.")
        if self.fp8 is not None and self.compute_dtype != RESULTS:
            raise ValueError(
                f"`compute_dtype` must be that of the results of products of 8-bit floats, {RESULTS}, but got "
                f"{self.compute_dtype}."
            )

    def cast_to_param(self, tree: T) -> T:
        """Cast a tree of parameters to the dtypes in which they are stored."""
        return self._cast(tree, np.dtype(self.param_dtype))

    def cast_to_compute(self, tree: T) -> T:
        """Cast a tree of parameters or inputs to the dtypes in which the model computes."""
        return self._cast(tree, np.dtype(self.compute_dtype))

    def cast_to_output(self, tree: T) -> T:
        """Cast a tree of results to the output dtype. Overrides are for parameters and do not count here."""
        return _trees.cast_tree(tree, self.output_dtype)

    def with_output_dtype(self, output_dtype: DTypeLike) -> "Policy":
        """Return the same policy with another output dtype."""
        return dataclasses.replace(self, output_dtype=output_dtype)

    def describe(self, tree: Any) -> str:
        """Describe in a table what the policy does to a tree of parameters.

        It has a line for each leaf of a tree of arrays or shapes, and one for the total. An array that stands in the
        tree twice counts once. Raises a ValueError if an override matches no floating leaf.

        Example:
            >>> print(get_policy("params=bf16").describe({"w": jnp.ones((2, 3)), "step": jnp.zeros((), jnp.int32)}))
            leaf  shape   stored    compute   bytes
            step  ()      int32     int32         4
            w     (2, 3)  bfloat16  bfloat16     12
            total                                16
        """
        names = _trees.path_names(tree)
        leaves = [(names[path], leaf) for path, leaf in jax.tree.leaves_with_path(tree)]
        self._require_overrides_match([path for path, leaf in leaves if _trees.is_floating(leaf)])
        rows, counted, total = [], set(), 0
        for path, leaf in leaves:
            array = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
            if array.dtype == object:  # a function, say
                continue
            stored = compute = array.dtype
            if _trees.is_floating(array):
                override = self.override_at(path)
                stored = override or np.dtype(self.param_dtype)
                in_fp8 = self.fp8 is not None and array.ndim > 1  # what can be a matrix of a product
                compute = override or (_FP8 if in_fp8 else np.dtype(self.compute_dtype))
            size = 0 if id(leaf) in counted else array.size * stored.itemsize
            counted.add(id(leaf))
            total += size
            rows.append((path, str(tuple(array.shape)), str(stored), str(compute), f"{size:,}"))
        header, footer = ("leaf", "shape", "stored", "compute", "bytes"), ("total", "", "", "", f"{total:,}")
        return str(_tables.Table("", [header, *rows, footer]))

    def __str__(self) -> str:
        """Return the form that `get_policy` reads: `p=bf16,c=bf16,o=full`."""
        dtypes = {"p": self.param_dtype, "c": self.compute_dtype, "o": self.output_dtype}
        by_dtype = {dtype: name for name, dtype in reversed(DTYPE_NAMES.items())}
        names = {key: by_dtype[np.dtype(dtype)] for key, dtype in dtypes.items()}
        if self.fp8 is not None:
            names["c"] = _FP8
        return ",".join(f"{key}={name}" for key, name in names.items())

    def _cast(self, tree: T, default: np.dtype) -> T:
        if not self.overrides:
            return _trees.cast_tree(tree, default)
        return _trees.cast_by_path(tree, lambda path: self.override_at(path) or default)

    def override_at(self, path: str) -> np.dtype | None:
        """Return the dtype of the first override whose pattern is found in a "/"-joined path, or None."""
        return next((np.dtype(dtype) for pattern, dtype in self.overrides if re.search(pattern, path)), None)

    def _require_overrides_match(self, paths: list[str]) -> None:
        useless = [pattern for pattern, _ in self.overrides if not any(re.search(pattern, path) for path in paths)]
        if useless:
            raise ValueError(
                f"`Policy.describe`: no floating leaf's path matches {', '.join(map(repr, useless))}. "
                f"An override is a regular expression searched in one of these: {', '.join(paths) or '(none)'}."
            )


def get_policy(text: str, *, overrides: tuple[tuple[str, DTypeLike], ...] = ()) -> Policy:
    """Read a policy from a string, in jmp's grammar.

    A string is either one dtype for everything (`"bf16"`), or any of `params` (`p`), `compute` (`c`) and `output`
    (`o`): `"params=bf16,compute=bf16,output=f32"`. Parameters that are left out are float32, compute follows
    parameters, output follows compute. Dtypes are `bf16`, `f16`, `f32` (`full`), `f64`, their long names, and `half`,
    which is `half_dtype()`. `compute=fp8` is bfloat16 with matrix products of 8-bit floats under `autocast` (`Fp8`).

    Args:
        text: the string.
        overrides: as in `Policy`.

    Raises:
        TypeError: if it is no string.
        ValueError: if it is not of that form.

    Example:
        >>> get_policy("c=f16").param_dtype, get_policy("c=f16").output_dtype
        (dtype('float32'), dtype('float16'))
        >>> get_policy("params=bf15")
        Traceback (most recent call last):
        ...
        ValueError: Unknown dtype 'bf15' in policy 'params=bf15'; use one of half, bf16, bfloat16, f16, float16, \
full, f32, float32, f64, float64.
    """
    if not isinstance(text, str):
        raise TypeError(f"`get_policy` needs a string, but got {type(text).__name__}.")
    if "=" not in text:
        dtype = _parse_dtype(text.strip(), text)
        return Policy(dtype, dtype, dtype, overrides)
    fields: dict[str, np.dtype] = {}
    fp8 = None
    for part in text.split(","):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if key not in _FIELDS:
            raise ValueError(
                f"Unknown key {key!r} in policy {text!r}; use params (p), compute (c) or output (o), each "
                "followed by '=' and a dtype."
            )
        if _FIELDS[key] in fields:
            raise ValueError(f"Policy {text!r} gives {key!r} twice.")
        if _FIELDS[key] == "compute_dtype" and value == _FP8:
            fp8, value = Fp8(), "bf16"
        fields[_FIELDS[key]] = _parse_dtype(value, text)
    param_dtype = fields.get("param_dtype", np.dtype(np.float32))
    compute_dtype = fields.get("compute_dtype", param_dtype)
    return Policy(param_dtype, compute_dtype, fields.get("output_dtype", compute_dtype), overrides, fp8)


def cast(tree: T, dtype: DTypeLike) -> T:
    """Cast the floating leaves of a tree to a dtype, all in one compiled call.

    The same leaves change, and the same is kept, as under a `Policy`. Raises a ValueError if `dtype` is not a
    floating-point dtype of 16 bits or more.

    Example:
        >>> cast({"w": jnp.ones(2), "ids": jnp.arange(2)}, "bfloat16")
        {'ids': Array([0, 1], dtype=int32), 'w': Array([1, 1], dtype=bfloat16)}
    """
    return _trees.cast_tree(tree, _floating_dtype(dtype, "dtype"))


def cast_to_full(tree: T) -> T:
    """Cast the floating leaves of a tree to float32."""
    return _trees.cast_tree(tree, np.float32)


def cast_to_half(tree: T) -> T:
    """Cast the floating leaves of a tree to `half_dtype()`."""
    return _trees.cast_tree(tree, half_dtype())


def as_policy(given: Any, caller: str) -> Policy:
    """Return the policy that is given, or that of the string; raise for anything else."""
    policy = get_policy(given) if isinstance(given, str) else given
    if not isinstance(policy, Policy):
        raise TypeError(f"`{caller}`: `policy` must be a Policy or the string of one, but got {type(given).__name__}.")
    return policy


def with_policy(
    tx: optax.GradientTransformationExtraArgs, policy: Policy | None
) -> optax.GradientTransformationExtraArgs:
    """Return a transformation of which `policy_of` tells the policy."""
    init_fn = functools.wraps(tx.init)(lambda params: tx.init(params))
    setattr(init_fn, _MARK, policy)
    return optax.GradientTransformationExtraArgs(init_fn, tx.update)


def policy_of(tx: optax.GradientTransformation) -> Policy | None:
    """Return the policy by which a transformation was made, or None if it was made without one."""
    return getattr(tx.init, _MARK, None)


def _parse_dtype(name: str, text: str) -> np.dtype:
    if name == _FP8:
        raise ValueError(
            f"Policy {text!r}: fp8 is a way to multiply matrices, and nothing is stored in it. It goes with compute, "
            "such as in 'params=bf16,compute=fp8,output=f32'."
        )
    names = ["half", *DTYPE_NAMES]
    if name not in names:
        raise ValueError(f"Unknown dtype {name!r} in policy {text!r}; use one of {', '.join(names)}.")
    return np.dtype(half_dtype()) if name == "half" else DTYPE_NAMES[name]


def _floating_dtype(dtype: DTypeLike, argument: str) -> np.dtype:
    allowed = "a floating-point dtype of 16 to 64 bits (bfloat16, float16, float32, float64)"
    found = dtype_or_none(dtype)
    if found is None and dtype is not None:
        raise TypeError(f"`{argument}`: data type {dtype!r} not understood; it must be {allowed}.")
    if found is None or found not in DTYPE_NAMES.values():
        raise ValueError(f"`{argument}` must be {allowed}, but got {found}.")
    return found


def _checked_override(entry: Any) -> tuple[str, np.dtype]:
    if not isinstance(entry, (tuple, list)) or len(entry) != 2 or not isinstance(entry[0], str):
        raise TypeError(f"An override must be a pair (pattern, dtype), but got {entry!r}.")
    pattern, dtype = entry
    _errors.require_pattern(pattern, f"The override pattern {pattern!r}")
    return pattern, _floating_dtype(dtype, f"overrides[{pattern!r}]")
