"""Find the part of a step that belongs to each leaf and can run on one tile of the leaf
at a time.

A leaf is a parameter with everything that is computed element by element from it and
with it: gradient, moments, masters. The scales of blocks belong to it too: one number
for a run of elements. What all elements share (counts, schedules, norms, the loss
scale) is computed outside and given to the part, and so are random bits.

A sum over elements that ends in a scalar may read any array of a leaf: XLA computes its
terms outside of the kernel.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core
from jax.extend.core import JaxprEqn

from mpx._fused.known import Known
from mpx._jaxprs import Calls, Graph, dtype_of, is_literal
from mpx._loss_scale import is_power_of_two
from mpx._primitives import facts_of, matrix_size, of_matrices

# a variable of a program: `jax.extend.core.Var`, whose types know less than it does
Var = Any

# elements that one program of a kernel works on: 77 registers for AdamW with 8-bit
# moments, none spilled
TILE = 1024
# Elements: XLA's own kernel for a smaller leaf takes less time than the start of any
# kernel.
SMALL = 2**16
_LARGEST_BLOCK = 4096  # that a program of a kernel can hold
_NARROWEST = 128  # elements of a row: shorter ones take a GPU several reads
_DTYPES = {
    "bool",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "bfloat16",
    "float16",
    "float32",
}


class Part(NamedTuple):
    """The part of a step that belongs to one leaf, as a program on rows of it."""

    arrays: list[Var]  # what it reads of each element or block
    scalars: list[Var]
    equations: list[JaxprEqn]
    outputs: list[Var]
    size: int  # elements of the leaf
    # elements of a row: as many as the largest block has, or a number that divides the
    # leaf
    width: int
    # elements of the largest block; 1 if nothing is kept or found out by block
    block: int
    ordinary: frozenset[Var]  # results of roots and quotients: see `Known`


class Leaf(NamedTuple):
    """Holds what a step computes of one leaf: in a part, or else by XLA, for a
    reason.
    """

    outputs: list[Var]
    part: Part | None
    reason: str
    rows: Part | None  # the part, also where XLA runs it, if it can run on some rows
    inputs: list[Var]  # what it reads of each element or block


def _shape_of(v: Any) -> tuple[int, ...]:
    return getattr(v.aval, "shape", ())


def size_of(v: Any) -> int:
    """Return the number of elements of a value; 1 if it is not an array."""
    return math.prod(_shape_of(v))


class Partition:
    """The leaves of a program without calls."""

    def __init__(self, program: jex_core.Jaxpr, calls: Calls):
        self._graph = Graph(program)
        self._known = Known(self._graph, calls)
        # What a barrier returns, and what it was given; what a final update lands on.
        self._same = self._known.landed()
        # what was placed on devices, and what it was before
        self._placed: dict[Var, Any] = {}
        # Arrays of no leaf: their elements are equal, or places in short rows.
        self._uniform: set[Var] = set()
        # Arrays that are computed from others of their leaf.
        self._inside: set[Var] = set()
        # arrays of one leaf lead to one array: see `_leaf_of`
        self._parent: dict[Var, Var] = {}
        # Arrays, and what moves their elements: see `_why_not`.
        self._mixed: dict[Var, set[str]] = defaultdict(set)
        sent = [v for eqn in program.eqns for v in self._add(eqn)]
        # What other devices get must exist as an array too, so it is an output of its
        # leaf like a result of the step.
        wanted: dict[Var, dict[Var, None]] = defaultdict(dict)
        for v in map(self.resolved, (*program.outvars, *sent)):
            if not is_literal(v) and v in self._inside:
                wanted[self._leaf_of(v)][v] = None
        mixed = {self._leaf_of(v): names for v, names in self._mixed.items()}
        self.leaves = [
            self._as_leaf(list(outputs), mixed.get(leaf, set()))
            for leaf, outputs in wanted.items()
        ]

    def resolved(self, v: Any) -> Any:
        """Return the value behind the barriers that return it as this one."""
        while not is_literal(v) and v in self._same:
            v = self._same[v]
        return v

    def unplaced(self, v: Any) -> Any:
        """Return the value before it was placed on devices."""
        while not is_literal(v := self.resolved(v)) and v in self._placed:
            v = self._placed[v]
        return v

    def sends(self, eqn: JaxprEqn) -> bool:
        """Return whether an equation sends arrays to other devices: a kernel may have
        computed them.
        """
        return facts_of(eqn).communicates and any(size_of(v) > 1 for v in eqn.outvars)

    def sent_to(self, v: Any) -> list[Var]:
        """Return the arrays that devices send each other to compute a value."""

        def senders(v):
            eqn = self._graph.maker(v)
            return [eqn] if size_of(v) > 1 and eqn and self.sends(eqn) else []

        def is_computed_here(v):
            return size_of(v) > 1 and not senders(v)

        behind = self._graph.behind([v], is_computed_here, self.resolved)
        operands = [x for v in behind for eqn in senders(v) for x in eqn.invars]
        return list(dict.fromkeys(map(self.unplaced, operands)))

    def _add(self, eqn: JaxprEqn) -> list[Var]:
        """Take an equation into account; return the values in it that go to other
        devices.
        """
        name, results = eqn.primitive.name, [v for v in eqn.outvars if size_of(v) > 1]
        if name == "convert_element_type":
            # Widened and narrowed again.
            before = self._known.narrow(self.resolved(eqn.invars[0]))
            if dtype_of(before) == dtype_of(eqn.outvars[0]):
                self._same[eqn.outvars[0]] = before
                return []
        if name == "optimization_barrier":
            # A barrier may take and return arrays of several leaves. To look through it
            # keeps these leaves apart.
            self._same.update(zip(eqn.outvars, eqn.invars, strict=True))
            return []
        # Not looked through: a device may have another part of the array behind it, so
        # it counts as sent (below).
        if is_placed := _is_placed(eqn):
            self._placed.update(zip(eqn.outvars, eqn.invars, strict=True))
        operands = [self.resolved(v) for v in eqn.invars if not is_literal(v)]
        varied = [v for v in operands if size_of(v) > 1 and v not in self._uniform]
        # a norm, say: it belongs to no leaf, and XLA computes its terms, for the second
        # time
        if not results:
            return []
        # Jax 0.12 places `full_like`.
        is_fill = is_placed and operands and self._uniform.issuperset(operands)
        if is_fill or places_in_rows(eqn) or _keeps_places(eqn):
            # An array of equal elements belongs to no leaf: each kernel makes its own,
            # and leaves that share such a constant stay apart.
            (self._inside if varied else self._uniform).update(results)
            for v in (*varied, *results) if varied else ():
                self._parent[self._leaf_of(v)] = self._leaf_of(varied[0])
        elif self.sends(eqn):
            return varied
        else:
            # The operation reads an array that exists inside of a kernel only, so the
            # whole leaf is XLA's (`_why_not`).
            how = (
                "broadcasts along the last axis"
                if facts_of(eqn).elementwise
                else "mixes elements"
            )
            for v in self._inside.intersection(varied):
                self._mixed[v].add(f"`{name}` {how}")
        return []

    def _leaf_of(self, v: Var) -> Var:
        """Return the array that stands for all arrays of the same leaf."""
        path = [v]
        while (up := self._parent.get(path[-1], path[-1])) != path[-1]:
            path.append(up)
        self._parent.update(dict.fromkeys(path, path[-1]))
        return path[-1]

    def _as_leaf(self, outputs: list[Var], mixed: set[str]) -> Leaf:
        part = self.part_of(outputs)
        waits = self._waits_for_itself(part)
        reason = self._why_not(part, mixed, waits)
        is_whole = mixed or _has_longer_rows(part) or waits
        return Leaf(
            outputs,
            None if reason else part,
            reason,
            None if is_whole else part,
            part.arrays,
        )

    def part_of(self, outputs: list[Any]) -> Part:
        """Return what computes some values of a leaf."""
        # The same order for all leaves.
        outputs = sorted(outputs, key=self._graph.number)

        def is_in_part(v):
            return size_of(v) > 1 and (v in self._uniform or v in self._inside)

        # From the outputs back to what XLA hands in. Not forwards: what only a norm
        # needs stays out of the kernel.
        behind = self._graph.behind(outputs, is_in_part, self.resolved)
        scalars = [v for v in behind if size_of(v) <= 1]
        arrays = [v for v in behind if size_of(v) > 1 and not is_in_part(v)]
        # A value may be read both before and after it was placed. Its kernel then reads
        # one array, not two: the placed one, whose shards lie where the kernel runs.
        last = {self.unplaced(v): v for v in sorted(arrays, key=self._graph.number)}
        read = {v: last[self.unplaced(v)] for v in arrays}
        made = {self._graph.number(v): v for v in behind if is_in_part(v)}
        equations = [
            eqn.replace(
                invars=[
                    v if is_literal(v) else read.get(v, v)
                    for v in map(self.resolved, eqn.invars)
                ]
            )
            for _, v in sorted(made.items())
            if (eqn := self._graph.maker(v))
        ]
        sizes = {
            size_of(v)
            for v in (*read, *(v for eqn in equations for v in eqn.outvars))
            if v not in self._uniform
        }
        size, smallest = max(sizes), min(sizes - {1}, default=1)
        # The array with the fewest numbers has one for each of the largest blocks; a
        # row holds at least such a block, and a matrix that a function needs whole.
        block = math.lcm(size // smallest, *map(matrix_size, equations))
        width = max(block, math.gcd(size, TILE if block == 1 else _NARROWEST))
        return Part(
            list(dict.fromkeys(read.values())),
            scalars,
            equations,
            outputs,
            size,
            width,
            block,
            frozenset(x.outvars[0] for x in equations if self._known.is_ordinary(x)),
        )

    def _why_not(self, part: Part, mixed: Iterable[str], waits: bool) -> str:
        """Return why a part cannot run on tiles; empty if it can."""
        variables = {
            v
            for eqn in part.equations
            for v in (*eqn.invars, *eqn.outvars)
            if not is_literal(v)
        }
        variables |= {*part.arrays}
        blocks = {
            part.size / size_of(v)
            for v in variables
            if size_of(v) > 1 and v not in self._uniform
        }
        sources = filter(None, map(self._graph.maker, part.arrays))
        not_outside = {eqn.primitive.name for eqn in sources if not _is_outside(eqn)}
        dtypes = {str(dtype) for dtype in {dtype_of(v) for v in variables}}
        # The first reason is told: an operation that no kernel can run comes before
        # what the leaf's size says.
        if mixed:
            return ", ".join(sorted(mixed))
        if not_outside:
            return f"arrays come from {_names(not_outside)}"
        if part.block == 1 and part.size < SMALL:
            return "it is small and has no blocks"
        if dtypes - _DTYPES:
            return f"kernels do not compute in {_names(dtypes - _DTYPES)}"
        if missing := {
            text for eqn in part.equations if (text := _missing_in_triton(eqn))
        }:
            return f"Triton has no {', '.join(sorted(missing))}"
        if any(v.aval.dtype == bool for v in (*part.arrays, *part.outputs)):
            return "kernels do not read or write `bool`"
        if not all(map(is_power_of_two, blocks)):
            return "its blocks are not powers of two"
        if part.block > _LARGEST_BLOCK:
            return f"its blocks have more than {_LARGEST_BLOCK} elements"
        if part.width < _NARROWEST or _has_longer_rows(part):
            return (
                f"its {part.size} elements cannot be divided into rows of {_NARROWEST}"
            )
        if waits:
            return "other devices compute what it reads from what it returns"
        return ""

    def _waits_for_itself(self, part: Part) -> bool:
        own = {v for eqn in part.equations for v in eqn.outvars}
        return bool(own.intersection(self._graph.behind(part.arrays)))


def _is_placed(eqn: JaxprEqn) -> bool:
    """Return whether an equation places an array on devices, as `zero1` does outside of
    `jax.shard_map`.
    """
    facts = facts_of(eqn)
    return facts.communicates and facts.moves == "same"


def places_in_rows(eqn: JaxprEqn) -> int:
    """Return the size of rows in which an equation numbers the places; 0 if it does
    something else.

    Rows are short enough to lie within the rows of a kernel, so that it knows the
    places as well.
    """
    shape = _shape_of(eqn.outvars[0])
    if eqn.primitive.name != "iota" or eqn.params["dimension"] != len(shape) - 1:
        return 0
    return shape[-1] if shape[-1] <= _NARROWEST and is_power_of_two(shape[-1]) else 0


def _has_longer_rows(part: Part) -> bool:
    """Return whether places are numbered in rows that reach over rows of a kernel."""
    numbered = [
        (places_in_rows(eqn), size_of(eqn.outvars[0])) for eqn in part.equations
    ]
    return any(row and size * part.width % (part.size * row) for row, size in numbered)


def _is_outside(eqn: JaxprEqn) -> bool:
    """Return whether XLA may compute an operation for each element of a leaf, outside
    of the kernel.
    """
    facts = facts_of(eqn)
    return (
        facts.positional or facts.communicates or eqn.primitive.name == "dynamic_slice"
    )


def _keeps_places(eqn: JaxprEqn) -> bool:
    """Return whether elements stay in order: at their places, or one for each block of
    neighbours.
    """
    if of_matrices(eqn):
        return True
    name, facts, result = eqn.primitive.name, facts_of(eqn), _shape_of(eqn.outvars[0])
    shapes = [_shape_of(v) for v in eqn.invars if size_of(v) > 1]
    if facts.elementwise and not facts.communicates:
        same_rank = all(len(shape) == len(result) for shape in shapes)
        return (
            len(eqn.outvars) == 1
            and same_rank
            and all(_are_first(range(len(result)), x, result) for x in shapes)
        )
    if name == "broadcast_in_dim":
        return not shapes or _are_first(
            eqn.params["broadcast_dimensions"], shapes[0], result
        )
    if facts.blocks == "view":
        return eqn.params.get("dimensions") is None or name == "squeeze"
    if facts.blocks == "reduce" and shapes:
        if name == "reduce_sum" and not jnp.issubdtype(
            dtype_of(eqn.invars[0]), jnp.integer
        ):
            return False  # the sum depends on its order
        kept = [i for i in range(len(shapes[0])) if i not in eqn.params["axes"]]
        return math.prod(result) > 1 and _are_first(kept, result, shapes[0])
    return False


def _are_first(
    places: Iterable[int], small: tuple[int, ...], large: tuple[int, ...]
) -> bool:
    """Return whether the smaller array has the larger one's axes at these places, and
    they come before all others.
    """
    # Axes of 1 are repeated.
    kept = {place: size for place, size in zip(places, small, strict=True) if size > 1}
    others = [i for i, size in enumerate(large) if size > 1 and i not in kept]
    return all(large[i] == size for i, size in kept.items()) and (
        not kept or not others or max(kept) < min(others)
    )


def _missing_in_triton(eqn: JaxprEqn) -> str:
    """Return what Triton lacks to compute an equation; empty if it lacks nothing."""
    name, triton, dtype = (
        eqn.primitive.name,
        facts_of(eqn).triton,
        str(dtype_of((*eqn.invars, *eqn.outvars)[0])),
    )
    if triton == "none":
        return f"`{name}`"
    is_missing = triton == "32 bits" and dtype in ("bfloat16", "float16")
    is_missing |= name in ("reduce_and", "reduce_or") and dtype != "bool"
    return f"`{name}` of {dtype}" if is_missing else ""


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def signature(part: Part) -> Hashable:
    """Return a key that is equal for parts that one kernel can run, if their sizes are
    equal too.
    """
    names: dict[Var, int] = {}
    in_shard_map = bool(jax.sharding.get_abstract_mesh().manual_axes)

    def name(v):
        return (
            (str(v.val), v.aval.dtype)
            if is_literal(v)
            else names.setdefault(v, len(names))
        )

    def type_of(v):
        block = part.size // size_of(v) if size_of(v) > 1 else 0
        return (
            name(v),
            block,
            v.aval.dtype,
            str(v.aval.manual_axis_type) if in_shard_map else "",
        )

    inputs = [type_of(v) for v in (*part.arrays, *part.scalars)]
    equations = [
        (
            eqn.primitive.name,
            *map(name, eqn.invars),
            type_of(eqn.outvars[0]),
            eqn.outvars[0] in part.ordinary,
            _settings(eqn),
        )
        for eqn in part.equations
    ]
    return part.width, tuple(inputs), tuple(equations), tuple(map(name, part.outputs))


def _settings(eqn: JaxprEqn) -> str:
    """Return the parameters of an equation that do not follow from its types."""
    if facts_of(eqn).blocks or places_in_rows(eqn):
        return str(places_in_rows(eqn))
    return str(sorted((name, str(value)) for name, value in eqn.params.items()))
