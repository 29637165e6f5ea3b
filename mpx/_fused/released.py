"""Run the step of a leaf in the turn of a loop that makes its gradient.

The transpose of a `scan` over layers is a scan whose results are the gradients of all
layers. Often nothing reads such a stack but the step of its own leaf, which works
element by element, or in blocks inside of a layer. Then the loop carries parameter and
state of the leaf, in place, and each turn computes the gradient of its layer, runs the
step on this slice, and writes it back. No gradient of all layers exists.

What all elements share (counts, schedules, keys) is computed before the loop, so it
must not depend on a gradient. With a norm of all gradients, or a step that may be
skipped, gradients are kept; or else a loop runs twice, first for the sums of its
gradients, and at the end for its steps.
"""

import functools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex_core
from jax.extend.core import JaxprEqn
from jax.sharding import AxisType

from mpx._fused.fused_update import run_by
from mpx._fused.partition import Part, Partition, Var, size_of
from mpx._fused.schedule import run_in_stacks, run_slice, with_layer
from mpx._fused.totals import is_total
from mpx._jaxprs import Graph, closed_jaxpr, is_literal, scan_counts, with_source_of
from mpx._primitives import facts_of, of_matrices
from mpx._shardings import are_several_in_sight, dividing_devices, parts_at

NO_LOOP = "no loop over layers makes its gradient"
READ_ELSEWHERE = "something else reads its gradient"
NEEDS_GRADIENTS = "its step needs other gradients first, for a norm or a skip"
PARTS_OF_MATRICES = "devices may have parts of the matrices that its step needs whole"
Values = dict[Var, Any]
# Returns a function that runs under automatic axes, and whose results are slices of
# such stacks.
Place = Callable[[Callable[..., Any], Sequence[Any]], Callable[..., Any]]


class Stack(NamedTuple):
    """The gradients of all layers, as a loop returns them."""

    loop: JaxprEqn
    result: Var  # of the loop
    tail: list[JaxprEqn]  # makes the gradient of it, element by element

    @property
    def factors(self) -> list[Var]:
        """Return the numbers that the tail needs beside the stack."""
        made = {self.result, *(v for eqn in self.tail for v in eqn.outvars)}
        read = [v for eqn in self.tail for v in eqn.invars if not is_literal(v)]
        return [v for v in read if v not in made]


class Total(NamedTuple):
    """A sum over all elements of a leaf, as for the norm of all gradients."""

    result: Var  # of the update
    part: Part  # computes what is added up


class Released(NamedTuple):
    """A leaf whose step runs in a loop."""

    stack: Stack
    source: Var  # the stack, in the program of the update
    part: Part  # of that program
    totals: list[Total]  # that are added up in the loop, too
    has_kernel: bool
    is_late: bool  # whether the step needs such sums over all gradients


def find_stack(graph: Graph, gradient: Any) -> Stack | str:
    """Return the stack behind a gradient, or why there is none."""
    v: Any = gradient
    tail: list[JaxprEqn] = []
    while (eqn := graph.maker(v)) is not None:
        if len(graph.readers(v)) > 1:
            return READ_ELSEWHERE
        if eqn.primitive.name == "scan":
            is_stacked = eqn.outvars.index(v) >= scan_counts(eqn)[1]
            return Stack(eqn, v, tail[::-1]) if is_stacked else NO_LOOP
        arrays = [x for x in eqn.invars if not is_literal(x) and size_of(x) > 1]
        if len(arrays) != 1 or not facts_of(eqn).elementwise:
            return NO_LOOP
        tail.append(eqn)
        (v,) = arrays
    return NO_LOOP


class Search:
    """Looks for the leaves that loops can release.

    `graph` has the gradients. `program` is the update; its first inputs are what
    the gradients are `made_of`. `twice` says whether loops may run twice.
    """

    def __init__(
        self,
        graph: Graph,
        program: jex_core.Jaxpr,
        partition: Partition,
        made_of: Sequence[Any],
        twice: bool,
    ):
        self._twice = twice
        self._graph, self._program, self._partition = graph, program, partition
        self._update = Graph(program)
        self._printed = [v for eqn in program.eqns if eqn.effects for v in eqn.invars]
        self._sources = dict(zip(program.invars, made_of, strict=False))

    def released(self, stack: Stack | str, source: Var) -> Released | str:
        """Return how a leaf is released, or why its gradient is kept."""
        if isinstance(stack, str):
            return stack
        leaves = self._partition.leaves
        leaf = next((x for x in leaves if source in x.inputs), None)
        if leaf is None or leaf.rows is None:
            reading = [leaf] if leaf else leaves
            why = [x.reason for x in reading if source in self._behind(x.outputs)]
            return next(filter(None, why), READ_ELSEWHERE)
        part, now = leaf.rows, self._graph.number(stack.result)
        late = {v for v, x in self._sources.items() if self._graph.number(x) >= now}
        others = [v for v in part.arrays if v is not source]
        is_late = bool(self._behind([*part.scalars, *others]) & late)
        if is_late and not (self._twice and self._needs_sums_alone(part, others)):
            return NEEDS_GRADIENTS
        totals = [x for x in self._totals if x.part.arrays == [source]]
        done = {*part.outputs, *(total.result for total in totals)}
        if source in self._behind([*self._program.outvars, *self._printed], done):
            return READ_ELSEWHERE
        length = stack.loop.params["length"]
        sizes = [size_of(v) for v in (*part.arrays, *part.outputs)]
        if any(n % length for n in sizes) or part.size // length % part.block:
            return "its blocks reach over layers"
        if any(map(of_matrices, part.equations)) and not _has_whole(stack.result):
            return PARTS_OF_MATRICES
        if any(self._graph.number(v) >= now for v in stack.factors):
            return "a number that is known later multiplies its gradient"
        has_kernel = leaf.part is not None
        return Released(stack, source, part, totals, has_kernel, is_late)

    def _needs_sums_alone(self, part: Part, others: Sequence[Var]) -> bool:
        """Return whether sums are all that a step needs of gradients of loops."""
        sums = {total.result for total in self._totals}
        stacks = {v for v, x in self._sources.items() if self._is_stacked(x)}
        return not self._behind([*part.scalars, *others], sums) & stacks

    def _is_stacked(self, v: Any) -> bool:
        eqn = self._graph.maker(v)
        return eqn is not None and eqn.primitive.name == "scan"

    def _behind(self, values: Iterable[Any], but: Iterable[Var] = ()) -> set[Var]:
        but, through = {*but}, self._partition.resolved
        return {*self._update.behind(values, lambda v: v not in but, through)}

    @functools.cached_property
    def _totals(self) -> list[Total]:
        """Return the sums of what is computed from each element of one array alone."""
        found = [
            Total(eqn.outvars[0], self._partition.part_of(eqn.invars))
            for eqn in filter(is_total, self._program.eqns)
        ]
        return [
            x
            for x in found
            if len(x.part.arrays) == x.part.block == 1 and not x.part.scalars
        ]


def _has_all_layers(stack: jax.Array) -> bool:
    """Return whether each device is known to have a part of every layer."""
    sharding = jax.typeof(stack).sharding
    if AxisType.Explicit in sharding.mesh.axis_types:
        return parts_at(sharding.mesh, sharding.spec, 0) == 1
    now = jax.sharding.get_abstract_mesh()
    return bool(now.manual_axes) or not are_several_in_sight()


def _has_whole(stack: Var) -> bool:
    """Return whether each device is known to have matrices of its own, whole."""
    sharding = stack.aval.sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return not are_several_in_sight()
    of_stack = range(1, stack.aval.ndim - 2)
    parts = [parts_at(sharding.mesh, sharding.spec, i) for i in of_stack]
    return math.prod(parts) == sharding.mesh.size


class Loop:
    """A loop over layers that releases some leaves.

    `in_place` has the new array that is written over an old one, in the program of the
    update. `of_params` has the parameter of that program for that of the gradients.
    """

    def __init__(
        self,
        graph: Graph,
        leaves: Sequence[Released],
        in_place: Mapping[Var, Var],
        of_params: Mapping[Var, Var],
    ):
        self._leaves = leaves
        eqn = self._eqn = leaves[0].stack.loop
        self._length: int = eqn.params["length"]
        self._body = jex_core.jaxpr_as_fun(closed_jaxpr(eqn.params["jaxpr"]))
        # Where the body returns the gradients of a layer.
        self._places = {x.source: eqn.outvars.index(x.stack.result) for x in leaves}
        self._reads = sum(scan_counts(eqn))  # the first operand that is cut into layers
        released = {leaf.stack.result for leaf in leaves}
        # What it still returns of each layer.
        self._kept = [
            i
            for i, v in enumerate(eqn.outvars)
            if i >= scan_counts(eqn)[1] and v not in released
        ]
        self._outputs = [v for leaf in leaves for v in leaf.part.outputs]
        self._compiled: dict[Hashable, Any] = {}  # kernels
        # By old arrays, one for each: a new array may be a result twice.
        pairs = [*in_place.items()][::-1]
        old = {v: x for x, v in pairs if v in self._outputs}
        self._new = {x: v for v, x in old.items()}
        self._weights = [
            _weight(graph, of_params, self._new, v) for v in eqn.invars[self._reads :]
        ]

    @property
    def is_late(self) -> bool:
        """Return whether steps need sums that only the loop can give."""
        return any(leaf.is_late for leaf in self._leaves)

    @property
    def needed(self) -> list[Var]:
        """Return what the update must have computed before."""
        sources = {leaf.source for leaf in self._leaves}
        read = [v for x in self._leaves for v in (*x.part.scalars, *x.part.arrays)]
        return [v for v in (*read, *self._new) if v not in sources]

    def run(
        self,
        of_grads: Values,
        of_update: Values,
        interpret: bool,
        place: Place,
        has_steps: bool = True,
    ) -> None:
        """Run the loop, with the steps of its leaves or for its sums alone, and add
        what no run has returned yet to the values of both programs.
        """
        eqn, (consts, carries) = self._eqn, scan_counts(self._eqn)
        reads: list[Any] = eqn.invars
        operands = [v.val if is_literal(v) else of_grads[v] for v in reads]
        leaves, outputs, new = self._leaves, self._outputs, self._new
        weights, needed = self._weights, self.needed
        if not has_steps:
            leaves, outputs, new, needed = [], [], {}, []
            weights = [None] * len(weights)
        old = {v: x for x, v in new.items()}
        carried = [of_update[old[v]] if v in old else _zeros(v) for v in outputs]
        read = [v for v in needed if size_of(v) > 1 and v not in new]
        totals = [
            total
            for leaf in self._leaves
            for total in leaf.totals
            if total.result not in of_update
        ]

        def turn(state, now):
            (inner, carried, sums), (index, given, others, before) = state, now
            layers = dict(zip(outputs, carried, strict=True))
            now_carried = [
                lax.dynamic_index_in_dim(layers[v], index, keepdims=False)
                for v in new.values()
            ]
            # XLA for CPUs copies a whole array that it reads and writes in one turn, so
            # it reads what the array was before the loop.
            slices = lax.platform_dependent(
                now_carried, before, cpu=lambda _, x: x, default=lambda x, _: x
            )
            known = dict(zip((*read, *new), (*others, *slices), strict=True))
            xs = [
                x if weight is None else weight.of(known)
                for weight, x in zip(weights, given, strict=True)
            ]
            made = self._body(*operands[:consts], *inner, *xs)
            known |= {source: made[i] for source, i in self._places.items()}
            # Their slices have no axes, so they are on all devices.
            more = place(functools.partial(_add_up, totals), sums)(
                [known[total.part.arrays[0]] for total in totals]
            )
            sums = [x + y for x, y in zip(sums, more, strict=True)]
            for leaf in leaves:
                layers |= self._step(
                    leaf, index, layers, known, of_update, interpret, place
                )
            kept = [made[i] for i in self._kept]
            return (made[:carries], list(layers.values()), sums), kept

        given = [
            x if weight is None else None
            for weight, x in zip(weights, operands[self._reads :], strict=True)
        ]
        stacks = [self._layers(x) for x in (*carried, *(of_update[v] for v in read))]
        with with_source_of(eqn):
            (inner, carried, sums), kept = lax.scan(
                turn,
                (
                    operands[consts : self._reads],
                    stacks[: len(carried)],
                    [_zeros(total.result) for total in totals],
                ),
                (
                    jnp.arange(self._length, dtype=np.int32),
                    given,
                    stacks[len(carried) :],
                    [self._layers(of_update[x]) for x in new],
                ),
                reverse=eqn.params["reverse"],
                unroll=eqn.params["unroll"],
            )
        made = [*eqn.outvars[:carries], *(eqn.outvars[i] for i in self._kept)]
        for v, x in zip(made, (*inner, *kept), strict=True):
            of_grads.setdefault(v, x)
        of_update |= zip((v for v, _ in totals), sums, strict=True)
        of_update |= {
            v: x.reshape(v.aval.shape) for v, x in zip(outputs, carried, strict=True)
        }

    def _layers(self, x: jax.Array) -> jax.Array:
        """View an array as one slice a layer."""
        return x if x.shape[:1] == (self._length,) else x.reshape(self._length, -1)

    def _step(
        self,
        leaf: Released,
        index: jax.Array,
        layers: Values,
        known: Values,
        of_update: Values,
        interpret: bool,
        place: Place,
    ) -> Values:
        """Return the stacks of a leaf after the step of a layer."""
        part = leaf.part
        stacks = [layers[v] for v in part.outputs]
        arrays = [known[v] for v in part.arrays]
        scalars = [of_update[v].reshape(()) for v in part.scalars]
        pairs = {
            k: part.outputs.index(self._new[v])
            for k, v in enumerate(part.arrays)
            if self._new.get(v) in part.outputs
        }
        alone = [i for i in range(len(stacks)) if i not in pairs.values()]
        pairs |= {len(arrays) + k: i for k, i in enumerate(alone)}

        def by_slices(compiled, stacks, arrays, index, scalars):
            shapes, operands = [x.shape[1:] for x in stacks], [*arrays, *scalars]
            slices = run_slice(part, shapes, operands, interpret, compiled)
            return with_layer(stacks, index, slices)

        def in_stacks(stacks, arrays, index, scalars):
            given = dict(enumerate(arrays)) | {k: stacks[i] for k, i in pairs.items()}
            operands = *[given[k] for k in sorted(given)], *scalars
            return run_in_stacks(
                part, pairs, interpret, self._compiled, index, *operands
            )

        by_xla = functools.partial(by_slices, None)
        by_kernel = functools.partial(by_slices, self._compiled)
        # Else a kernel would need whole stacks on each device, or end within a row.
        rows, rest = divmod(part.size, part.width)
        has_rows = not rest and rows % (self._length * dividing_devices()) == 0
        if has_rows and all(map(_has_all_layers, stacks)):
            by_kernel = in_stacks

        def compute(*given):
            if not leaf.has_kernel:
                return by_xla(*given)
            return run_by(by_kernel, by_xla, interpret, *given)

        results = place(compute, stacks)(stacks, arrays, index, scalars)
        return dict(zip(part.outputs, results, strict=True))


def bound(eqn: JaxprEqn, *operands: Any) -> Any:
    """Run what works element by element on slices, or under other axes: a sharding has
    the axes of the whole stack.
    """
    params = eqn.params | dict.fromkeys(eqn.params.keys() & {"sharding"})
    return eqn.primitive.bind(*operands, **params)


def _zeros(v: Var) -> jax.Array:
    """Return zeros of the type of a variable, which inside of `jax.shard_map` says
    among which devices they will differ.
    """
    axes = tuple(v.aval.manual_axis_type.varying)
    x = jnp.zeros(v.aval.shape, v.aval.dtype)
    return lax.pcast(x, axes, to="varying") if axes else x


def _add_up(totals: Sequence[Total], slices: Sequence[jax.Array]) -> list[jax.Array]:
    """Return the sums over the slices of gradients."""
    found = []
    for total, x in zip(totals, slices, strict=True):
        (terms,) = run_slice(total.part, [x.shape], [x])
        found.append(jnp.sum(terms))
    return found


class _Weight(NamedTuple):
    """Makes what a loop reads of each layer, from a parameter that is carried."""

    parameter: Var  # of the update
    shape: tuple[int, ...]  # of a layer
    eqns: list[JaxprEqn]  # convert it, element by element

    def of(self, slices: Values) -> jax.Array:
        """Return what the body reads."""
        x = slices[self.parameter].reshape(self.shape)
        for eqn in self.eqns:
            x = bound(eqn, x)
        return x


def _weight(
    graph: Graph, of_params: Mapping[Var, Var], carried: Mapping[Var, Var], v: Any
) -> _Weight | None:
    """Return how a loop's operand is made of a parameter that is carried; None if it is
    not.

    Then it must come from what is carried: else the old parameter would be kept too.
    """
    shape, eqns = v.aval.shape[1:], []
    while (eqn := graph.maker(v)) is not None:
        if len(eqn.invars) != 1 or not facts_of(eqn).elementwise:
            return None
        eqns.append(eqn)
        (v,) = eqn.invars
    parameter = None if is_literal(v) else of_params.get(v)
    return _Weight(parameter, shape, eqns[::-1]) if parameter in carried else None
