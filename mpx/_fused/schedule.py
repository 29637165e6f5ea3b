"""Run a step: the parts of its leaves by kernels, everything else by XLA."""

import functools
import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core as jex_core
from jax.extend.core import JaxprEqn

from mpx._fused.devices import sharded
from mpx._fused.kernels import Layer, in_a_kernel
from mpx._fused.partition import Part, Partition, Var, signature
from mpx._fused.tile import columns, run_part
from mpx._fused.totals import find_totals, run_totals
from mpx._jaxprs import is_literal, run_equations, with_source_of
from mpx._primitives import facts_of
from mpx._shardings import are_several_in_sight


def run_partition(
    program: jex_core.Jaxpr,
    values: Mapping[Var, Any],
    partition: Partition,
    in_place: Mapping[Var, Var],
    interpret: bool,
    has_kernels: bool = True,
) -> list[Any]:
    """Return the results of a program without calls, from the values of its inputs and
    constants.

    `in_place` has the output that may be written over an input.
    """
    values = dict(values)
    # What is known already belongs to a leaf whose step has run.
    parts = [
        leaf.part
        for leaf in partition.leaves
        if has_kernels and leaf.part and leaf.part.outputs[0] not in values
    ]
    every = parts
    # XLA and kernels take turns, each time with all that can run: under `zero1` a
    # kernel computes what devices send, and another one reads what they got.
    waiting = _needed(program, partition, parts, values)
    # All norms of a step run together, out of their order: each is needed by what waits
    # for all of them anyway. Not on several devices: XLA would send whole arrays to add
    # them up together.
    totals = [] if are_several_in_sight() else find_totals(program, waiting)
    in_totals = {*map(id, totals)}
    waiting = [eqn for eqn in waiting if id(eqn) not in in_totals]
    compiled: dict[Hashable, Any] = {}
    while waiting or parts:
        ready, waiting = _split_ready(waiting, values)
        run_equations(program, ready, values)
        together, totals = _split_ready(totals, values)
        values |= run_totals(together, values)
        later = []
        for part in parts:
            if all(v in values for v in (*part.arrays, *part.scalars)):
                over = {v: in_place.get(partition.unplaced(v)) for v in part.arrays}
                values |= _run_part(part, values, over, interpret, compiled)
            else:
                later.append(part)
        if len(later) == len(parts) and waiting and not ready and not together:
            # Nothing could run: parts wait for each other, by way of other devices. XLA
            # computes all of these.
            later, done = [], [part for part in every if part.outputs[0] in values]
            waiting = [
                eqn
                for eqn in _needed(program, partition, done, values)
                if any(v not in values for v in eqn.outvars)
            ]
        parts = later
    results: list[Any] = [
        v if is_literal(v) or v in values else partition.resolved(v)
        for v in program.outvars
    ]
    return [v.val if is_literal(v) else values[v] for v in results]


def _needed(
    program: jex_core.Jaxpr,
    partition: Partition,
    parts: Sequence[Part],
    values: Mapping[Var, Any],
) -> list[JaxprEqn]:
    """Return the equations that XLA runs, in order: all that parts or results need, and
    all that print.
    """
    given = {v for part in parts for v in part.outputs} | {*values}
    wanted = {v for part in parts for v in (*part.arrays, *part.scalars)} - {*values}
    wanted |= {
        v
        for v in program.outvars
        if not is_literal(v) and partition.resolved(v) not in given
    }
    found = []
    for eqn in reversed(program.eqns):
        if eqn.effects or any(v in wanted for v in eqn.outvars):
            found.append(eqn)
            # A kernel hands over what is sent. All else that XLA reads of a leaf, for a
            # norm, it computes again: the kernel may be waiting for that norm.
            sent = given if partition.sends(eqn) else ()
            wanted.update(
                v
                for v in eqn.invars
                if not is_literal(v)
                and v not in values
                and partition.resolved(v) not in sent
            )
    return found[::-1]


def needed_equations(
    program: jex_core.Jaxpr,
    wanted: Sequence[Any],
    values: Mapping[Var, Any],
    with_prints: bool = False,
) -> list[JaxprEqn]:
    """Return the equations that compute some values from others; with all that
    print, if they are asked for.
    """
    missing = {v for v in wanted if not is_literal(v) and v not in values}
    found = []
    for eqn in reversed(program.eqns):
        if missing.intersection(eqn.outvars) or (with_prints and eqn.effects):
            found.append(eqn)
            missing.update(
                v for v in eqn.invars if not is_literal(v) and v not in values
            )
    return found[::-1]


def with_loops_late(eqns: Sequence[JaxprEqn]) -> list[JaxprEqn]:
    """Put each equation before all loops that it need not wait for: JAX converts a
    gradient at the very end.
    """
    if any(eqn.effects for eqn in eqns):
        return [*eqns]
    loops: dict[Var, int] = {}  # one after another, that are behind a value
    for eqn in eqns:
        behind = [loops.get(v, 0) for v in eqn.invars if not is_literal(v)]
        count = max(behind, default=0) + (facts_of(eqn).runs == "loop")
        loops |= dict.fromkeys(eqn.outvars, count)
    return sorted(eqns, key=lambda eqn: loops[eqn.outvars[0]])


def _split_ready(
    eqns: Sequence[JaxprEqn], values: Mapping[Var, Any]
) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """Return the equations that can run now, one after another, and all others."""
    ready, later, known = [], [], set(values)
    for eqn in eqns:
        if all(is_literal(v) or v in known for v in eqn.invars):
            ready.append(eqn)
            known.update(eqn.outvars)
        else:
            later.append(eqn)
    return ready, later


def _run_part(
    part: Part,
    values: Mapping[Var, Any],
    in_place: Mapping[Var, Any],
    interpret: bool,
    compiled: dict[Hashable, Any],
) -> dict[Var, Any]:
    """Return the outputs of a part."""
    # an output takes one place, though it may stand in a state twice
    over: dict[int, int] = {}
    for i, v in enumerate(part.arrays):
        if in_place[v] in part.outputs:
            over.setdefault(part.outputs.index(in_place[v]), i)
    pairs = {i: output for output, i in over.items()}
    kernel = _kernel(part, pairs, interpret, compiled)
    compute = functools.partial(_on_rows, part, kernel)
    # And in its context: `zero1` makes axes of a mesh automatic.
    with with_source_of(part.equations[0]):
        operands = [values[v] for v in part.arrays] + [
            values[v].reshape(()) for v in part.scalars
        ]
        results = _on_devices(part, compute, operands)
    return dict(zip(part.outputs, results, strict=True))


def run_slice(
    part: Part,
    shapes: Sequence[tuple[int, ...]],
    operands: Sequence[jax.Array],
    interpret: bool = False,
    compiled: dict[Hashable, Any] | None = None,
) -> list[jax.Array]:
    """Return the outputs of a part on a slice of the leaf, from such a slice of its
    arrays and then its scalars.

    With blocks a `compiled` kernel runs; without `compiled`, XLA's.
    """
    if part.block == 1:  # in the shape that it has, which XLA can divide
        in_rows = part._replace(width=math.prod(shapes[0][-1:]))
        run = functools.partial(run_part, in_rows)
        return _on_rows(in_rows, run, shapes, *operands)
    run = functools.partial(run_part, part)
    if compiled is not None:
        run = _kernel(part, {}, interpret, compiled)
    compute = functools.partial(_on_rows, part, run)
    arrays = operands[: len(part.arrays)]
    outputs = [
        jax.ShapeDtypeStruct(shape, v.aval.dtype)
        for shape, v in zip(shapes, part.outputs, strict=True)
    ]
    local = part._replace(arrays=_named(arrays), outputs=_named(outputs))
    return _on_devices(local, compute, operands)


def run_in_stacks(
    part: Part,
    in_place: dict[int, int],
    interpret: bool,
    compiled: dict[Hashable, Any],
    index: jax.Array,
    *operands: jax.Array,
) -> list[jax.Array]:
    """Return stacks of layers with the outputs of a part on one layer, by a kernel.

    `in_place` has the output that is written over an array: a stack. Other arrays are
    of the layer. Arrays come first, then such that are only written over, and scalars.
    """
    count = len(operands) - len(part.scalars)
    arrays = operands[:count]
    over = [part.outputs[i] for k, i in in_place.items() if k >= len(part.arrays)]
    stacks = {i: arrays[k] for k, i in in_place.items()}
    depth = len(stacks[0])

    def compute(shapes, *operands):
        rows = [
            x.reshape(-1, columns(v, part))
            for x, v in zip(operands, [*part.arrays, *over], strict=False)
        ]
        kernel = _kernel(part, in_place, interpret, compiled, depth)
        results = kernel(rows, operands[count:-1], operands[-1])
        return [x.reshape(shape) for x, shape in zip(results, shapes, strict=True)]

    local = part._replace(
        arrays=_named(arrays),
        outputs=_named([stacks[i] for i in range(len(stacks))]),
        scalars=[*part.scalars, *_named([index])],
    )
    of_layers = {*local.outputs, *(local.arrays[k] for k in in_place)}
    return _on_devices(local, compute, [*operands, index], of_layers)


def with_layer(
    stacks: Sequence[jax.Array], index: jax.Array, slices: Sequence[jax.Array]
) -> list[jax.Array]:
    """Return stacks with slices written over one layer, by XLA."""
    update = lax.dynamic_update_index_in_dim
    return [update(x, y, index, 0) for x, y in zip(stacks, slices, strict=True)]


def _named(arrays: Sequence[Any]) -> list[Any]:
    return [jex_core.Var(jax.typeof(x)) for x in arrays]


def _kernel(
    part: Part,
    pairs: dict[int, int],
    interpret: bool,
    compiled: dict[Hashable, Any],
    depth: int = 0,
) -> Any:
    """Return the kernel of a part, or of one of so many layers. Equal parts are traced
    once, and compiled once.
    """
    key = signature(part), part.size, tuple(pairs.items()), depth
    if key not in compiled:

        def run(arrays, scalars, index=None):
            layer = None if index is None else Layer(index, depth)
            return in_a_kernel(part, pairs, interpret, arrays, scalars, layer)

        compiled[key] = jax.jit(run)
    return compiled[key]


def _on_devices(
    part: Part, compute: Any, operands: Sequence[Any], stacks: Collection[Var] = ()
) -> list[jax.Array]:
    """Compute the outputs of a part on each device from its own shards."""
    if jax.sharding.get_abstract_mesh().manual_axes:  # arrays are what a device has
        return compute([v.aval.shape for v in part.outputs], *operands)
    return sharded(part, compute, *operands, stacks=stacks)


def _on_rows(
    part: Part, run: Any, shapes: Sequence[tuple[int, ...]], *operands: jax.Array
) -> list[jax.Array]:
    """Return the outputs of a part, in these shapes, from its arrays and then its
    scalars.
    """
    arrays, scalars = operands[: len(part.arrays)], operands[len(part.arrays) :]
    # A shard may end within a row, though never within a block: then rows are blocks,
    # too narrow for a kernel.
    has_rows = all(
        x.size % columns(v, part) == 0 for v, x in zip(part.arrays, arrays, strict=True)
    )
    of_blocks = part if has_rows else part._replace(width=part.block)
    rows = [
        x.reshape(-1, columns(v, of_blocks))
        for v, x in zip(part.arrays, arrays, strict=True)
    ]
    results = (
        run(rows, list(scalars)) if has_rows else run_part(of_blocks, rows, scalars)
    )
    return [x.reshape(shape) for x, shape in zip(results, shapes, strict=True)]
