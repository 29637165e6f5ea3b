"""Policies: the dtypes of stored parameters, of computation and of results."""

import ast
import dataclasses
import difflib
import re
from collections.abc import Iterable
from typing import Any, TypeVar

import jax
import numpy as np
import optax
from jax.typing import DTypeLike

from mpx import _errors, _flax, _tables, _trees
from mpx._chain import FinalUpdates
from mpx._dtypes import DTYPE_NAMES, bytes_of, dtype_or_none, half_dtype
from mpx._fp8 import RESULTS, Fp8
from mpx._recipes import RECIPES, nearest

T = TypeVar("T")

_FP8 = "fp8"
_QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
# A comma between parts, or a group that may hold commas.
_AT_THE_TOP = re.compile(rf"({_QUOTED}|\([^()]*\))|,")
_OVERRIDE = re.compile(rf"({_QUOTED})\s*=(.*)", re.DOTALL)
_FIELDS = {
    "params": "param_dtype",
    "compute": "compute_dtype",
    "output": "output_dtype",
    "reduce": "reduce_dtype",
}
_FIELD_OF = {key: field for name, field in _FIELDS.items() for key in (name, name[0])}


@dataclasses.dataclass(frozen=True)
class Policy:
    """The dtypes of a mixed-precision program.

    It is hashable, so that it can be a static argument of `jax.jit`. The casts change
    real floating arrays (and shapes) of 16 bits and more, and nothing else. A leaf of
    the right dtype is returned as the same object, tied weights stay tied, shardings
    are kept, and all concrete arrays are cast in one compiled call.

    Attributes:
        param_dtype: the dtype of parameters as stored between steps.
        compute_dtype: the dtype that the model computes in.
        output_dtype: the dtype of the model's results.
        overrides: pairs `(pattern, dtype)`. A pattern is a regular expression, searched
            in the "/"-joined path of each parameter. A parameter that matches is stored
            and computed in that dtype instead; the first match wins. Paths begin at the
            root of the tree that is cast, so cast parameters and inputs one by one, not
            as a pair.
        fp8: how `autocast` multiplies matrices in 8-bit floats, with results in
            `compute_dtype`. None: it multiplies in `compute_dtype`. Products of a
            parameter with an override never run in 8 bits.
        reduce_dtype: the dtype of gradients of weights while they are added up, over
            devices too, as under `autocast`. None: float32 if the program may run on
            more than one device.
        recipe: the name of the recipe that this is the policy of (see `recipes`), or
            None. `mixed_precision` puts it around the optimizer.

    Example:
        >>> policy = Policy(
        ...     jnp.bfloat16,
        ...     jnp.bfloat16,
        ...     jnp.float32,
        ...     overrides=(("norm", jnp.float32),),
        ... )
        >>> params = policy.cast_to_param(
        ...     {"dense": jnp.ones(2), "norm": jnp.ones(2), "step": jnp.zeros((), int)}
        ... )
        >>> params["dense"].dtype, params["norm"].dtype, params["step"].dtype
        (dtype(bfloat16), dtype('float32'), dtype('int32'))

    References:
        Names and string form follow jmp (https://github.com/google-deepmind/jmp).
    """

    param_dtype: DTypeLike
    compute_dtype: DTypeLike
    output_dtype: DTypeLike
    overrides: tuple[tuple[str, DTypeLike], ...] = ()
    fp8: Fp8 | None = None
    reduce_dtype: DTypeLike | None = None
    recipe: str | None = None

    def __post_init__(self) -> None:
        for field in _FIELDS.values():
            given: Any = getattr(self, field)
            if given is not None or field != "reduce_dtype":
                object.__setattr__(self, field, _floating_dtype(given, field))
        if not isinstance(self.overrides, Iterable):
            raise TypeError(
                "`overrides` must be a tuple of pairs (pattern, dtype), but got"
                f" {self.overrides!r}."
            )
        overrides = tuple(map(_checked_override, self.overrides))
        object.__setattr__(self, "overrides", overrides)
        if self.recipe is not None:
            self._require_policy_of(self.recipe)
        if self.fp8 is not None and not isinstance(self.fp8, Fp8):
            raise TypeError(
                f"`fp8` must be an `mpx.Fp8` or None, but got {self.fp8!r}."
            )
        if self.fp8 is not None and self.compute_dtype != RESULTS:
            raise ValueError(
                f"`compute_dtype` must be {RESULTS} if `fp8` is given, since products"
                f" of 8-bit floats have results in it, but got {self.compute_dtype}."
            )

    def cast_to_param(self, tree: T) -> T:
        """Cast a tree of parameters to their storage dtypes.

        Batch statistics of Flax, and scales and histories of its FP8 layers, keep their
        dtype, if their type (`nnx.BatchStat`) or the key `batch_stats` or
        `_overwrite_with_gradient` beside `params` marks them. A warning names overrides
        that match no floating leaf, if there is one: they do nothing here.
        """
        has_numbers = any(map(_trees.is_floating, jax.tree.leaves(tree)))
        if has_numbers and (text := self._overrides_without_a_leaf(tree)):
            _errors.warn(
                f"`Policy.cast_to_param`: {text} Cast all parts of a model in one tree,"
                " for whole paths."
            )
        return self.cast_to(self.param_dtype, tree)

    def cast_to_compute(self, tree: T) -> T:
        """Cast a tree of parameters or inputs to the dtypes that the model computes in;
        see `cast_to_param`.
        """
        return self.cast_to(self.compute_dtype, tree)

    def cast_to_output(self, tree: T) -> T:
        """Cast a tree of results to the output dtype. Overrides apply to parameters
        only.
        """
        return _trees.cast_tree(tree, self.output_dtype)

    def with_output_dtype(self, output_dtype: DTypeLike) -> "Policy":
        """Return the same policy with another output dtype."""
        return dataclasses.replace(self, output_dtype=output_dtype)

    def describe(self, tree: Any) -> str:
        """Return a table of what the policy does to a tree of parameters.

        The leaves may be arrays or shapes. Each has a line, and the last line is the
        total; a tied array counts once. Raises a ValueError if an override matches no
        floating leaf.

        Example:
            >>> print(
            ...     get_policy("params=bf16").describe(
            ...         {"w": jnp.ones((2, 3)), "step": jnp.zeros((), jnp.int32)}
            ...     )
            ... )
            leaf  shape   stored    compute   bytes
            step  ()      int32     int32         4
            w     (2, 3)  bfloat16  bfloat16     12
            total                                16
        """
        if text := self._overrides_without_a_leaf(tree):
            raise ValueError(f"`Policy.describe`: {text}")
        names, statistics = _trees.path_names(tree), _flax.statistics(tree)
        lines: list[Any] = [("leaf", "shape", "stored", "compute", "bytes")]
        counted, total = set(), 0
        for path, leaf in jax.tree.leaves_with_path(tree):
            array = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
            if array.dtype == object:  # a function, say
                continue
            stored = compute = array.dtype
            if path not in statistics and _trees.is_floating(array):
                override = self.override_at(names[path])
                stored = override or self.param_dtype
                # What can be a matrix of a product.
                in_fp8 = self.fp8 is not None and array.ndim > 1
                compute = override or (_FP8 if in_fp8 else self.compute_dtype)
            size = 0 if id(leaf) in counted else bytes_of(stored, array.size)
            counted.add(id(leaf))
            total += size
            cells = (tuple(array.shape), stored, compute)
            lines.append((names[path], *map(str, cells), f"{size:,}"))
        lines.append(("total", "", "", "", f"{total:,}"))
        title = ""
        if self.reduce_dtype is not None:
            title = f"Gradients are added up over devices in {self.reduce_dtype}"
        return str(_tables.Table(title, lines))

    def __str__(self) -> str:
        """Return a string such as `p=bf16,c=bf16,o=full`, as jmp writes it;
        `get_policy` reads it back.
        """
        return policy_text(self, is_of_jmp=True)

    def _require_policy_of(self, recipe: str) -> None:
        """Raise unless a recipe of this name stores parameters as this policy does."""
        if recipe not in RECIPES:
            raise ValueError(
                f"`Policy`: there is no recipe {recipe!r}. {nearest(recipe)}"
            )
        stored = get_policy(RECIPES[recipe].policy).param_dtype
        if self.param_dtype != stored:
            raise ValueError(
                f"`Policy`: the recipe {recipe!r} stores parameters in {stored}, but"
                f" got `param_dtype` {self.param_dtype}. Leave `recipe` out, and give"
                " `mixed_precision` its options one by one."
            )

    def cast_to(self, default: Any, tree: T) -> T:
        """Cast a tree of parameters to a dtype, or to that of the override that
        matches.
        """
        statistics = _flax.statistics(tree)
        if not (self.overrides or statistics):
            return _trees.cast_tree(tree, default)
        return _trees.cast_by_path(
            tree, lambda path: self.override_at(path) or default, but=statistics
        )

    def override_at(self, path: str) -> np.dtype | None:
        """Return the dtype of the first override whose pattern is found in a "/"-joined
        path, or None.
        """
        return next(
            (
                np.dtype(dtype)
                for pattern, dtype in self.overrides
                if re.search(pattern, path)
            ),
            None,
        )

    def _overrides_without_a_leaf(self, tree: Any) -> str:
        """Say which overrides match no floating leaf of a tree, and which paths come
        near; empty if there are none.
        """
        names, statistics = _trees.path_names(tree), _flax.statistics(tree)
        paths = [
            names[path]
            for path, leaf in jax.tree.leaves_with_path(tree)
            if path not in statistics and _trees.is_floating(leaf)
        ]
        useless = [
            pattern
            for pattern, _ in self.overrides
            if not any(re.search(pattern, path) for path in paths)
        ]
        if not useless:
            return ""

        def near(path):
            return -difflib.SequenceMatcher(None, "|".join(useless), path).ratio()

        return (
            f"no floating leaf's path matches {', '.join(map(repr, useless))}. An"
            " override is a regular expression searched in one of these:"
            f" {_errors.listed(sorted(paths, key=near), 8) or '(none)'}."
        )


def get_policy(
    text: str, *, overrides: tuple[tuple[str, DTypeLike], ...] = ()
) -> Policy:
    """Read a policy from the name of a recipe, or from a string in jmp's grammar.

    A string is the name of a recipe (`"bf16-split"`, see `recipes`), one dtype for
    everything (`"bf16"`), or any of `params` (`p`), `compute` (`c`), `output` (`o`) and
    `reduce` (`r`): `"params=bf16,compute=bf16,output=f32"`. Parameters that are left
    out are float32, compute follows parameters, output follows compute, and gradients
    are added up over devices in float32. Dtypes are `bf16`, `f16`, `f32` (`full`),
    `f64`, their long names, and `half`, which is `half_dtype()`. `compute=fp8` is
    bfloat16 with matrix products of 8-bit floats under `autocast`;
    `compute=fp8(min_extent=0)` means `Fp8(min_extent=0)`. A pattern in quotes is an
    override: `'norm|scale'=f32`. The name of a recipe may stand in front of any of
    these: `"bf16-split,reduce=bf16,'norm'=f32"`.

    Args:
        text: the string. `get_policy(str(policy))` is the same policy again.
        overrides: more overrides, as in `Policy`.

    Raises:
        ValueError: if `text` is no name of a recipe and breaks the grammar.

    Example:
        >>> (
        ...     get_policy("bf16-split-8bit").param_dtype,
        ...     get_policy("bf16-split-8bit").output_dtype,
        ... )
        (dtype(bfloat16), dtype('float32'))
        >>> get_policy("c=f16").param_dtype, get_policy("c=f16").output_dtype
        (dtype('float32'), dtype('float16'))
        >>> get_policy("params=bf16,compute=bf16,output=f32,'norm'=f32").overrides
        (('norm', dtype('float32')),)
    """
    if not isinstance(text, str):
        raise TypeError(f"`get_policy` needs a string, but got {type(text).__name__}.")
    first, *others = (
        part.strip()
        for part in _AT_THE_TOP.sub(lambda found: found[1] or "\0", text).split("\0")
    )
    if "=" not in text and first not in RECIPES:
        dtype = _parse_dtype(text.strip(), text)
        return Policy(dtype, dtype, dtype, overrides)
    fields, own = _read_parts(others if first in RECIPES else [first, *others], text)
    overrides = (*own, *overrides)
    if first in RECIPES:
        if "compute_dtype" in fields:
            fields.setdefault("fp8", None)
        of_recipe = get_policy(RECIPES[first].policy)
        return dataclasses.replace(
            of_recipe, recipe=first, overrides=overrides, **fields
        )
    fields.setdefault("param_dtype", np.dtype(np.float32))
    fields.setdefault("compute_dtype", fields["param_dtype"])
    fields.setdefault("output_dtype", fields["compute_dtype"])
    return Policy(overrides=overrides, **fields)


def _read_parts(
    parts: Iterable[str], text: str
) -> tuple[dict[str, Any], list[tuple[str, np.dtype]]]:
    """Return the fields of a policy that the parts of its string give, and the
    overrides.
    """
    fields: dict[str, Any] = {}
    overrides: list[tuple[str, np.dtype]] = []
    for part in parts:
        if quoted := _OVERRIDE.fullmatch(part):
            overrides.append(
                (ast.literal_eval(quoted[1]), _parse_dtype(quoted[2].strip(), text))
            )
            continue
        key, _, value = (piece.strip() for piece in part.partition("="))
        if key not in _FIELD_OF:
            raise ValueError(
                f"Unknown key {key!r} in policy {text!r}; use params (p), compute (c),"
                " output (o) or reduce (r), each followed by '=' and a dtype."
            )
        field = _FIELD_OF[key]
        if field in fields:
            raise ValueError(f"Policy {text!r} gives {key!r} twice.")
        if field == "compute_dtype" and (
            settings := re.fullmatch(rf"{_FP8}(?:\((.*)\))?", value)
        ):
            fields["fp8"], value = _parse_fp8(settings[1] or "", text), "bf16"
        fields[field] = _parse_dtype(value, text)
    return fields, overrides


def policy_text(policy: Policy, *, is_of_jmp: bool = False) -> str:
    """Return the string of a policy as users write it: `bf16-split`, or
    `params=bf16,compute=bf16,output=f32`; or as jmp does.
    """
    names: dict[Any, str] = {
        dtype: name for name, dtype in reversed(DTYPE_NAMES.items())
    }
    names[np.dtype(np.float32)] = "full" if is_of_jmp else "f32"
    parts = {
        name: names[dtype]
        for name, field in _FIELDS.items()
        if (dtype := getattr(policy, field)) is not None
    }
    if policy.fp8 is not None:
        changed = ",".join(
            f"{name}={value}"
            for name, value in vars(policy.fp8).items()
            if value != getattr(Fp8, name)
        )
        parts["compute"] = f"{_FP8}({changed})" if changed else _FP8
    texts = [
        f"{name[0] if is_of_jmp else name}={value}" for name, value in parts.items()
    ]
    if policy.recipe is not None:  # its name says all but what differs
        of_recipe = get_policy(RECIPES[policy.recipe].policy)
        said = policy_text(of_recipe, is_of_jmp=is_of_jmp).split(",")
        texts = [policy.recipe, *(text for text in texts if text not in said)]
    texts += [f"{pattern!r}={names[dtype]}" for pattern, dtype in policy.overrides]
    return ",".join(texts)


def cast(tree: T, dtype: DTypeLike) -> T:
    """Cast the floating leaves of a tree to a dtype, all in one compiled call.

    As under a `Policy`, only floating leaves change; ties and shardings are kept.
    Raises a ValueError if `dtype` is not a floating-point dtype of 16 bits or more.

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
    """Return a policy, or read it from its string; raise for anything else."""
    policy = get_policy(given) if isinstance(given, str) else given
    if not isinstance(policy, Policy):
        raise TypeError(
            f"`{caller}`: `policy` must be a Policy or the string of one, but got"
            f" {type(given).__name__}."
        )
    return policy


def with_policy(
    tx: optax.GradientTransformation, policy: Policy | None, name: str
) -> Any:
    """Return a transformation that knows its policy, which `policy_of` reads back, and
    stands last in a chain.
    """
    known = _OfPolicy.of(tx, name)
    known.policy = policy
    return known


def policy_of(tx: optax.GradientTransformation) -> Policy | None:
    """Return the policy that `with_policy` gave to `tx`, or None."""
    return tx.policy if isinstance(tx, _OfPolicy) else None


class _OfPolicy(FinalUpdates):
    policy: Policy | None = None


def _parse_dtype(name: str, text: str) -> np.dtype:
    if name == _FP8:
        raise ValueError(
            f"Policy {text!r}: fp8 is a way to multiply matrices, and nothing is stored"
            " in it. It goes with compute, such as in"
            " 'params=bf16,compute=fp8,output=f32'."
        )
    names = ["half", *DTYPE_NAMES]
    if name not in names:
        is_all = name == text.strip()
        hint = f" Or is it to be a recipe? {nearest(name)}" if is_all else ""
        raise ValueError(
            f"Unknown dtype {name!r} in policy {text!r}; use one of"
            f" {', '.join(names)}.{hint}"
        )
    return np.dtype(dtype_or_none(name))


def _parse_fp8(settings: str, text: str) -> Fp8:
    """Return the `Fp8` of settings such as `forward=e5m2,min_extent=0`."""
    given: dict[str, Any] = {}
    names = [field.name for field in dataclasses.fields(Fp8)]
    for setting in filter(None, settings.split(",")):
        name, _, value = (piece.strip() for piece in setting.partition("="))
        if name not in names:
            raise ValueError(
                f"Policy {text!r}: fp8 has no setting {name!r}; it has"
                f" {', '.join(names)}."
            )
        given[name] = int(value) if value.isdecimal() else value
    return Fp8(**given)


def _floating_dtype(dtype: DTypeLike | None, argument: str) -> np.dtype:
    allowed = (
        "a floating-point dtype of 16 to 64 bits (bfloat16, float16, float32, float64)"
    )
    found = dtype_or_none(dtype)
    if found is None and dtype is not None:
        raise TypeError(
            f"`{argument}`: data type {dtype!r} not understood; it must be {allowed}."
        )
    if found is None or found not in DTYPE_NAMES.values():
        raise ValueError(f"`{argument}` must be {allowed}, but got {found}.")
    return found


def _checked_override(entry: Any) -> tuple[str, np.dtype]:
    if (
        not isinstance(entry, (tuple, list))
        or len(entry) != 2
        or not isinstance(entry[0], str)
    ):
        raise TypeError(
            f"An override must be a pair (pattern, dtype), but got {entry!r}."
        )
    pattern, dtype = entry
    _errors.require_pattern(pattern, f"The override pattern {pattern!r}")
    return pattern, _floating_dtype(dtype, f"overrides[{pattern!r}]")
