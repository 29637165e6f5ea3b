"""Find what a rule multiplies: the part of its program that needs whole matrices, and a
program for one of them.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core
from jax.extend.core import JaxprEqn

from mpx import _errors, _trees
from mpx._jaxprs import is_literal, open_jaxpr, part_of, traced_flat
from mpx._primitives import facts_of
from mpx._stored.blocks import returns_its_operand

# a variable of a program: `jax.extend.core.Var`, whose types know less than it does
Var = Any


class Part(NamedTuple):
    """The products of a leaf, and what runs with them."""

    eqns: list[JaxprEqn]
    inputs: list[Var]
    outputs: list[Var]
    products: list[
        tuple[int, Any]
    ]  # of each the number of matrices, and the shapes of one of them
    leaves: list[
        int
    ]  # the numbers of the gradients that it multiplies; without any XLA divides the products

    @property
    def count(self) -> int:
        """Return the number of matrices."""
        return self.products[0][0]


class Alike(NamedTuple):
    """Parts that one program can run, matrix by matrix."""

    of_one: jex_core.Jaxpr
    is_stack: tuple[bool, ...]  # which of its inputs are one matrix of a stack
    parts: list[Part]


class _Program:
    """The equations of a program by their numbers, and what reads what."""

    def __init__(self, program: jex_core.Jaxpr) -> None:
        self.eqns = program.eqns
        self.made = {v: i for i, eqn in enumerate(self.eqns) for v in eqn.outvars}
        self.uses: dict[Var, set[int]] = defaultdict(set)
        for i, vs in enumerate(
            [
                *map(_operands, self.eqns),
                [v for v in program.outvars if not is_literal(v)],
            ]
        ):
            for v in vs:
                self.uses[v].add(i)
        self.below = {
            i for i, eqn in enumerate(self.eqns) if _products([eqn])
        }  # products, and what reads them
        self.above = set(self.below)  # products, and what they read
        for i in range(len(self.eqns)):
            self.below |= {i} if self.below & self.sources(i) else set()
        for i in reversed(range(len(self.eqns))):
            self.above |= self.sources(i) if i in self.above else set()

    def parts(self, gradients: dict[Var, int], counts: Sequence[int]) -> list[Part]:
        """Return what lies between the first and the last product of each leaf, and
        what can run with it.
        """
        between, found = self.below & self.above, {}
        for i in sorted(between):
            joined = {i}.union(*[found[j] for j in self.sources(i) & between])
            found.update(dict.fromkeys(joined, joined))
        groups = {min(group): group for group in found.values()}
        ordered = [group for _, group in sorted(groups.items())]
        return [
            self._part(group, gradients, *counts[i : i + 1])
            for i, group in enumerate(ordered)
        ]

    def _part(self, group: set[int], gradients: dict[Var, int], count: int = 0) -> Part:
        products = _products([self.eqns[i] for i in sorted(group)])
        least, count = (
            min(n * math.prod(shape) for n, shapes in products for shape in shapes),
            count or products[0][0],
        )

        def large(vs):
            return [v for v in vs if v.aval.size >= least]

        before, after = (
            lambda group: self._before(group, count),
            lambda group: self._after(group, count, least),
        )
        group = _grown(group, before, lambda group: len(large(self.inputs(group))))
        group = _grown(group, after, lambda group: len(large(self.outputs(group))))
        waiting, seen = large(self.inputs(group)), set()
        while (
            waiting
        ):  # back to the gradients, through large arrays: a scalar may be of all leaves
            v = waiting.pop()
            waiting += (
                large(_operands(self.eqns[self.made[v]]))
                if v in self.made and v not in seen
                else []
            )
            seen.add(v)
        leaves = sorted(gradients[v] for v in seen & gradients.keys()) if count else []
        eqns = [self.eqns[i] for i in sorted(group)]
        return Part(eqns, self.inputs(group), self.outputs(group), products, leaves)

    def sources(self, i: int) -> set[int]:
        """Return the equations that make the operands of one."""
        return {self.made[v] for v in _operands(self.eqns[i]) if v in self.made}

    def inputs(self, group: set[int]) -> list[Var]:
        """Return what a group of equations reads from outside."""
        operands = dict.fromkeys(
            v for i in sorted(group) for v in _operands(self.eqns[i])
        )
        return [v for v in operands if self.made.get(v) not in group]

    def outputs(self, group: set[int]) -> list[Var]:
        """Return what others read of a group."""
        return [
            v
            for i in sorted(group)
            for v in self.eqns[i].outvars
            if self.uses[v] - group
        ]

    def _before(self, group: set[int], count: int) -> list[set[int]]:
        """Return equations whose results only the group reads, the last one first."""
        found = sorted(
            {self.made[v] for v in self.inputs(group) if v in self.made}, reverse=True
        )
        return [
            {i}
            for i in found
            if _may_join(self.eqns[i], count) and self._is_read_in(group, i)
        ]

    def _after(self, group: set[int], count: int, least: int) -> list[set[int]]:
        """Return equations that read results of the group, and beside these nothing
        large or computed of products.
        """
        known = {*self.inputs(group), *self.outputs(group)}
        found = sorted(
            {
                i
                for v in self.outputs(group)
                for i in self.uses[v] - group
                if i < len(self.eqns)
            }
        )
        return [
            more
            for i in found
            if (more := self._with_sources(i, group, known, count, least))
        ]

    def _with_sources(
        self, i: int, group: set[int], known: set[Var], count: int, least: int
    ) -> set[int]:
        """Return an equation and those that compute for it and the group alone; empty
        if it may not join.
        """
        whole = {i}
        for v in [v for v in _operands(self.eqns[i]) if v not in known]:
            source = self.made.get(v, -1)
            if v.aval.size >= least or source in self.below:
                return set()
            if source >= 0 and self._is_read_in(group | whole, source):
                whole |= self._with_sources(source, group, known, count, least)
        return whole if _may_join(self.eqns[i], count) else set()

    def _is_read_in(self, group: set[int], i: int) -> bool:
        return all(self.uses[v] <= group for v in self.eqns[i].outvars)


def _may_join(eqn: JaxprEqn, count: int) -> bool:
    """Return whether an equation can do to one matrix what it does to the stack: random
    numbers would be others.
    """
    return not (eqn.effects or facts_of(eqn).positional or _adds_up(eqn, count))


def _adds_up(eqn: JaxprEqn, count: int) -> bool:
    """Return whether an equation makes one number of several matrices."""

    def is_number(v):
        return v.aval.shape == () and jnp.issubdtype(v.aval.dtype, jnp.inexact)

    is_sum = (
        count > 1
        and facts_of(eqn).moves not in ("same", "moved")
        and any(map(is_number, eqn.outvars))
    )
    return is_sum and any(v.aval.shape != () for v in _operands(eqn))


def _axes_of(shape: tuple[int, ...], count: int) -> int:
    """Return how many of the first axes count matrices; 0 if none do."""
    return next((k for k in range(len(shape) + 1) if math.prod(shape[:k]) == count), 0)


def _grown(
    group: set[int],
    neighbours: Callable[..., list[set[int]]],
    border: Callable[..., int],
) -> set[int]:
    """Take in neighbours one by one; return the largest group with the fewest large
    arrays at its border.
    """
    best, least = group, border(group)
    while found := neighbours(group):
        group = group | found[0]
        if (now := border(group)) <= least:
            best, least = group, now
    return best


def _operands(eqn: JaxprEqn) -> list[Var]:
    return [v for v in eqn.invars if not is_literal(v)]


_FACTORIZATIONS = (
    "cholesky",
    "eig",
    "eigh",
    "geqrf",
    "lu",
    "schur",
    "svd",
    "triangular_solve",
)


def _products(eqns: Sequence[JaxprEqn]) -> list[tuple[int, Any]]:
    """Return how many matrices each product or factorization in equations has, and the
    shapes of one of them.
    """
    found: list[tuple[int, Any]] = []
    for eqn in eqns:
        shapes: list[Any] = [getattr(v.aval, "shape", ()) for v in eqn.invars]
        if eqn.primitive.name == "dot_general":
            (contracted, _), batch = eqn.params["dimension_numbers"]
            one = [
                tuple(n for i, n in enumerate(s) if i not in b)
                for s, b in zip(shapes, batch, strict=True)
            ]
            if all(
                math.prod(shape) > math.prod(shapes[0][i] for i in contracted)
                for shape in one
            ):  # no vectors
                found.append((math.prod(shapes[0][i] for i in batch[0]), tuple(one)))
        elif eqn.primitive.name in _FACTORIZATIONS:
            found.append((math.prod(shapes[0][:-2]), (shapes[0][-2:],)))
        else:
            found += [
                x
                for inner in jex_core.jaxprs_in_params(eqn.params)
                for x in _products(open_jaxpr(inner).eqns)
            ]
    return found


def traced(
    rule: Any, given: Any, counts: Sequence[int] = ()
) -> tuple[jex_core.Jaxpr, dict[Var, Any], Any, list[Part]]:
    """Return the program of a rule, the values of its inputs and constants, the tree of
    its results, and its parts.

    For one matrix `counts` are the numbers of matrices in the stacks.
    """
    program, values, tree = traced_flat(rule, given, returns_its_operand)
    gradients = dict(
        zip(program.invars, range(len(jax.tree.leaves(given[0]))), strict=False)
    )
    return program, values, tree, _Program(program).parts(gradients, counts)


def programs_of_one(
    rule: Any, init: Any, updates: Any, params: Any, parts: Sequence[Part]
) -> list[Alike]:
    """Trace a rule for one matrix of each stack, and return the programs that then
    multiply one matrix.

    `rule` takes gradients, state and parameters, and `init` makes the state.
    """
    names, leaves, axes = (
        list(_trees.path_names(updates).values()),
        _trees.leaves_by_path(updates),
        {},
    )
    paths, shapes = list(leaves), list(map(np.shape, leaves.values()))
    own = [
        part for part in parts if part.leaves
    ]  # XLA divides products of the state alone
    for part in own:
        if part.leaves[1:]:
            raise ValueError(
                "`whole_matrices`: the rule computes the products of several leaves in"
                " one operation, or multiplies them with each other:"
                f" {_errors.listed([names[i] for i in part.leaves], 4)}. What runs a"
                " rule on condition, such as `optax.MultiSteps`, goes around"
                " `whole_matrices`. Give other leaves to another rule, by"
                " `optax.partition`."
            )
        shape = shapes[part.leaves[0]]
        axes[paths[part.leaves[0]]] = _axes_of(shape, part.count)

    def shape(path, x):
        return (1,) * axes[path] + np.shape(x)[axes[path] :]

    def one(path, x):
        return jax.ShapeDtypeStruct(shape(path, x), x.dtype) if path in axes else x

    updates, params = (
        jax.tree.map_with_path(one, updates),
        jax.tree.map_with_path(one, params),
    )
    state = jax.eval_shape(init, updates if params is None else params)
    program, _, _, of_one = traced(
        rule, (updates, state, params), [part.count for part in parts]
    )
    readers, alike = Counter(v for part in own for v in part.inputs), {}
    for part, single in zip(parts, of_one, strict=True):
        if not part.leaves:
            continue
        is_stack = _stacks_among(part, single, readers)
        if is_stack is None:
            raise ValueError(
                f"`whole_matrices`: {names[part.leaves[0]]!r} is"
                f" {list(shapes[part.leaves[0]])}. The rule multiplies"
                f" {part.count} matrices of it, but not each by itself, or they are not"
                " stacked along its first axes. Move these to the front, put what"
                " mixes them around `whole_matrices`, or give the leaf to another"
                " rule, by `optax.partition`."
            )
        jaxpr = part_of(program, single.eqns, single.outputs)
        shared = tuple(
            v for v, stacked in zip(part.inputs, is_stack, strict=True) if not stacked
        )
        alike.setdefault(
            (str(jaxpr), is_stack, shared), Alike(jaxpr, is_stack, [])
        ).parts.append(part)
    return list(alike.values())


def _stacks_among(
    part: Part, single: Part, readers: Counter[Var]
) -> tuple[bool, ...] | None:
    """Return which inputs are stacks; None if a program for one matrix does not do what
    the one for a stack does.
    """
    pairs = [
        *zip(part.inputs, single.inputs, strict=False),
        *zip(part.outputs, single.outputs, strict=False),
    ]
    is_stack = [_is_stack(v.aval, w.aval, part.count) for v, w in pairs]
    inputs, outputs = is_stack[: len(part.inputs)], is_stack[len(part.inputs) :]
    if (
        part.count == 1
        # all is of one matrix, but what others read as well, and scalars, by which a rule
        # may decide
    ):
        inputs = [readers[v] == 1 and v.aval.shape != () for v in part.inputs]
    is_shared = [v.aval.shape == w.aval.shape for v, w in pairs[: len(inputs)]]
    fits = (
        len(pairs) == len(part.inputs) + len(part.outputs)
        and all(outputs)
        and all(map(max, inputs, is_shared))
    )
    fits = fits and not any(_adds_up(eqn, part.count) for eqn in part.eqns)
    fits = fits and part.products == [
        (part.count * n, shapes) for n, shapes in single.products
    ]
    return tuple(inputs) if fits else None


def _is_stack(stack: Any, one: Any, count: int) -> bool:
    """Return whether an array has one entry for each matrix, along its first axes."""
    k = _axes_of(stack.shape, count)
    return (
        (k > 0 or count == 1)
        and math.prod(one.shape[:k]) == 1
        and stack.shape[k:] == one.shape[k:]
    )
