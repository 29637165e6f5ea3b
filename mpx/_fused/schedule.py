"""Run a step: the parts of its leaves by kernels, all else as it stands."""

import functools
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core as jex_core
from jax.extend.core import JaxprEqn

from mpx._fused.devices import divided
from mpx._fused.kernels import Arrays, in_a_kernel_together, in_one_kernel, most_together
from mpx._fused.partition import Part, Partition, Var, signature, size_of
from mpx._fused.tile import columns, run_part
from mpx._jaxprs import at_the_place_of, is_literal, run_equations

SMALL = 2**16  # elements: what is smaller takes a GPU less time than the start of a kernel

Group = Sequence[Part]  # what one kernel computes


def run(
    program: jex_core.Jaxpr,
    values: Mapping[Var, Any],
    partition: Partition,
    groups: list[Group],
    in_place: Mapping[Var, Var],
    interpret: bool,
) -> list[Any]:
    """Return the results of a program without calls.

    Args:
        program: the step.
        values: of its inputs and constants.
        partition: of the program.
        groups: the parts that run by themselves, those together that one kernel computes.
        in_place: outputs of the program that may be written over inputs.
        interpret: whether to run kernels without a GPU.
    """
    values, every = dict(values), groups
    waiting = _needed(program, partition, groups)
    compiled: dict[Hashable, Any] = {}
    while waiting or groups:
        ready, waiting = _split_ready(waiting, values)
        run_equations(program, ready, values)
        later = []
        for group in groups:
            if all(v in values for part in group for v in (*part.arrays, *part.scalars)):
                over = {v: in_place.get(partition.unplaced(v)) for part in group for v in part.arrays}
                values |= _run_group(group, values, over, interpret, compiled)
            else:
                later.append(group)
        if len(later) == len(groups) and waiting and not ready:
            # Parts that wait for each other, by way of other devices: XLA computes them.
            later, done = [], [group for group in every if group[0].outputs[0] in values]
            waiting = [eqn for eqn in _needed(program, partition, done) if any(v not in values for v in eqn.outvars)]
        groups = later
    results: list[Any] = [v if is_literal(v) or v in values else partition.resolved(v) for v in program.outvars]
    return [v.val if is_literal(v) else values[v] for v in results]


def is_small(part: Part) -> bool:
    """Return whether a part may share a kernel: its own would take longer to start than to run."""
    return part.size < SMALL and part.block == 1


def groups_of(parts: Sequence[Part]) -> list[Group]:
    """Return the parts that do not run as they stand: each large one, and small ones together that are alike."""
    alike: dict[Hashable, list[Part]] = defaultdict(list)
    for part in parts:
        if is_small(part):
            alike[signature(part._replace(width=0)), tuple(part.scalars)].append(part)
    groups: list[Group] = [[part] for part in parts if not is_small(part)]
    for small in alike.values():
        most = most_together(small[0])
        small.sort(key=lambda part: part.size)  # groups of equal sizes share a kernel
        groups += [small[i : i + most] for i in range(0, len(small), most)]
    return groups


def _needed(program: jex_core.Jaxpr, partition: Partition, groups: Sequence[Group]) -> list[JaxprEqn]:
    """Return the equations that run as they stand, in order: what leads to parts or results, or prints."""
    given = {v for group in groups for part in group for v in part.outputs}
    wanted = {v for group in groups for part in group for v in (*part.arrays, *part.scalars)}
    wanted |= {v for v in program.outvars if not is_literal(v) and partition.resolved(v) not in given}
    found = []
    for eqn in reversed(program.eqns):
        if eqn.effects or any(v in wanted for v in eqn.outvars):
            found.append(eqn)
            sent = given if partition.sends(eqn) else ()
            wanted.update(v for v in eqn.invars if not is_literal(v) and partition.resolved(v) not in sent)
    return found[::-1]


def _split_ready(eqns: Sequence[JaxprEqn], values: Mapping[Var, Any]) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """Return the equations whose operands are known, or are results of others before them; and all others."""
    ready, later, known = [], [], set(values)
    for eqn in eqns:
        if all(is_literal(v) or v in known for v in eqn.invars):
            ready.append(eqn)
            known.update(eqn.outvars)
        else:
            later.append(eqn)
    return ready, later


def _run_group(
    group: Group, values: Mapping[Var, Any], in_place: Mapping[Var, Any], interpret: bool, compiled: dict[Hashable, Any]
) -> dict[Var, Any]:
    """Return the outputs of parts. Equal groups are traced once, and compiled once."""
    first = group[0]
    over: dict[int, int] = {}  # an output takes one place, though it may stand in a state twice
    for i, v in enumerate(first.arrays):
        if in_place[v] in first.outputs:
            over.setdefault(first.outputs.index(in_place[v]), i)
    pairs = {i: output for output, i in over.items()}
    key = signature(first), tuple((part.size, part.width) for part in group), tuple(pairs.items())
    if key not in compiled:
        compiled[key] = jax.jit(functools.partial(_by_kernel, group, pairs, interpret))
    compute = functools.partial(_on_rows, group, compiled[key])
    outputs = [v for part in group for v in part.outputs]
    with at_the_place_of(first.equations[0]):  # `zero1` makes axes of a mesh automatic
        operands = [values[v] for part in group for v in part.arrays] + [values[v].reshape(()) for v in first.scalars]
        if jax.sharding.get_abstract_mesh().manual_axes:  # arrays are what a device has
            results = compute([v.aval.shape for v in outputs], *operands)
        else:
            results = divided(group, compute, *operands)
    return dict(zip(outputs, results, strict=True))


def _on_rows(group: Group, run: Any, shapes: Sequence[tuple[int, ...]], *operands: jax.Array) -> list[jax.Array]:
    """Return the outputs of parts, in these shapes, from their arrays and then their scalars."""
    rest = iter(operands)
    arrays = [[next(rest) for _ in part.arrays] for part in group]
    scalars = list(rest)
    in_rows = lambda part, of_part: [x.reshape(-1, columns(v, part)) for v, x in zip(part.arrays, of_part, strict=True)]
    if all(map(_has_rows, group, arrays)) and (len(group) == 1 or all(map(_is_whole, group, arrays))):
        results = run(list(map(in_rows, group, arrays)), scalars)
    else:  # XLA fuses by itself what has no blocks
        parts = [part._replace(width=part.block) for part in group]
        results = [run_part(part, in_rows(part, x), scalars) for part, x in zip(parts, arrays, strict=True)]
    flat = [x for of_part in results for x in of_part]
    return [x.reshape(shape) for x, shape in zip(flat, shapes, strict=True)]


def _is_whole(part: Part, arrays: Arrays) -> bool:
    """Return whether this device has all of the arrays of a part."""
    return all(x.size == size_of(v) for v, x in zip(part.arrays, arrays, strict=True))


def _has_rows(part: Part, arrays: Arrays) -> bool:
    """Return whether what this device has of the arrays are whole rows."""
    return all(x.size % columns(v, part) == 0 for v, x in zip(part.arrays, arrays, strict=True))


def _by_kernel(
    group: Group, in_place: dict[int, int], interpret: bool, arrays: Sequence[Arrays], scalars: Arrays
) -> list[list[jax.Array]]:
    if len(group) == 1:
        return [in_one_kernel(group[0], in_place, interpret, arrays[0], scalars)]
    return in_a_kernel_together(group, in_place, interpret, arrays, scalars)
