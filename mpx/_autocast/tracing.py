"""Trace a function on float32 views of its arguments in 16 bits, except where it relies
on their dtype.

`lax.dynamic_update_slice(cache, k.astype(jnp.bfloat16), ...)` says that the cache is in
bfloat16, and JAX refuses to write that to a float32 view. So the function gets this
cache unchanged, and views of the other arguments.
"""

import contextlib
import itertools
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from mpx import _errors
from mpx._autocast.rules import DEFAULT_RULES
from mpx._jaxprs import (
    dtype_of,
    is_half,
    open_jaxpr,
    propagate,
    propagate_inside,
    scan_counts,
)
from mpx._primitives import facts_of

Halves = Mapping[int, np.dtype]  # the 16-bit dtypes of arrays, by positions


def program_of(
    function: Callable[..., Any],
    arrays: Sequence[Any],
    halves: Halves,
    kept: Collection[int],
) -> Any:
    """Return the program of a function of arrays. It gets float32 views of 16-bit
    arrays, but for `kept`.
    """
    dtypes = {
        i: dtype if i in kept else np.dtype(np.float32) for i, dtype in halves.items()
    }

    def given(i, x):
        return x.astype(dtypes[i]) if i in dtypes else x

    # A new function each time, so that jax never reuses an earlier trace, with the
    # values that the function closed over then.
    return jax.make_jaxpr(
        lambda *arrays: function(*map(given, itertools.count(), arrays))
    )(*arrays)


def viewed(
    function: Callable[..., Any], arrays: Sequence[Any], halves: Halves, name: str
) -> Any:
    """Return the program of a function that gets as many float32 views as JAX
    allows.
    """
    try:
        return program_of(function, arrays, halves, ())
    except TypeError as error:  # as JAX raises where dtypes differ
        plain, refusal = _plain(function, arrays, halves), str(error).partition("\n")[0]
        if plain is None:
            raise
    # In plain JAX a cast of bfloat16 to bfloat16 leaves no trace, so that an array that
    # is written to may meet one.
    for kept in _that_meet_casts_or_others(plain):
        with contextlib.suppress(Exception):
            return program_of(function, arrays, halves, kept)
    _errors.warn(
        f"`autocast`: `{name}` runs as cast by hand, in the dtypes that plain JAX gives"
        " its values, since JAX refuses float32 views of arguments in it:"
        f" {refusal} Cast a value to the dtype of the array that it is written to,"
        " `k.astype(cache.dtype)`."
    )
    return program_of(function, arrays, halves, halves)


def dtypes_of_results(
    function: Callable[..., Any],
    arrays: Sequence[Any],
    halves: Halves,
    results: Sequence[Any],
) -> Iterable[Any]:
    """Return the dtypes that plain JAX gives these results of a function; Nones if it
    refuses it, or gets others.
    """
    plain = _plain(function, arrays, halves)
    own = [] if plain is None else open_jaxpr(plain).outvars

    def shapes(values):
        return [v.aval.shape for v in values]

    return (
        map(dtype_of, own) if shapes(own) == shapes(results) else itertools.repeat(None)
    )


def _plain(function: Callable[..., Any], arrays: Sequence[Any], halves: Halves) -> Any:
    """Return the program of plain JAX, to look at; None if there are no arrays in 16
    bits, or JAX refuses it.
    """

    # Parameters that are differentiated come in float32, and a cast of theirs is not
    # the program's.
    def narrow(*arrays):
        return [x.astype(halves.get(i, x.dtype)) for i, x in enumerate(arrays)]

    with warnings.catch_warnings(action="ignore"), contextlib.suppress(Exception):
        return (
            program_of(function, jax.eval_shape(narrow, *arrays), halves, halves)
            if halves
            else None
        )
    return None


class _Origin(NamedTuple):
    """Says where the elements of a value come from."""

    inputs: frozenset[int] = frozenset()
    is_cast: bool = False  # whether the program casts some of them to 16 bits


_ELSEWHERE = _Origin()


def _that_meet_casts_or_others(program: Any) -> tuple[set[int], set[int]]:
    """Return the inputs whose elements meet what a program casts to 16 bits, in one
    array, or others.
    """
    casts: set[int] = set()
    others: set[int] = set()

    def met(*origins: _Origin) -> _Origin:
        together = _Origin(
            frozenset().union(*[o.inputs for o in origins]),
            any(o.is_cast for o in origins),
        )
        casts.update(together.inputs if together.is_cast else ())
        others.update(together.inputs if len({*origins}) > 1 else ())
        return together

    def follow(jaxpr: Any, origins: Sequence[_Origin]) -> list[_Origin]:
        return propagate(jaxpr, origins, rule, lambda _: _ELSEWHERE)

    def rule(eqn: JaxprEqn, origins: list[_Origin]) -> Sequence[_Origin]:
        facts = facts_of(eqn)
        if facts.runs == "loop":
            return loop(eqn, origins)
        if facts.runs:
            return [
                met(*column)
                for column in propagate_inside(eqn, origins, rule, lambda _: _ELSEWHERE)
            ]
        if eqn.primitive.name == "convert_element_type" and is_half(eqn.outvars[0]):
            return [_Origin(is_cast=True)]
        is_move = DEFAULT_RULES.get(eqn.primitive.name) == "follow"
        moved = [
            origin
            for v, origin in zip(eqn.invars, origins, strict=True)
            if is_move and is_half(v)
        ]
        return [met(*moved)] * len(eqn.outvars)

    def loop(eqn: JaxprEqn, origins: list[_Origin]) -> Sequence[_Origin]:
        """Follow a loop: what it carries meets what an iteration leaves."""
        if eqn.primitive.name == "while":
            body, first, count = (
                eqn.params["body_jaxpr"],
                eqn.params["body_nconsts"],
                len(eqn.outvars),
            )
            origins = origins[eqn.params["cond_nconsts"] :]
        else:
            body, (first, count) = eqn.params["jaxpr"], scan_counts(eqn)
        results = follow(body, origins)
        return [
            *map(met, origins[first : first + count], results[:count]),
            *results[count:],
        ]

    follow(
        program,
        [_Origin(frozenset([i])) for i in range(len(open_jaxpr(program).invars))],
    )
    return casts, others
