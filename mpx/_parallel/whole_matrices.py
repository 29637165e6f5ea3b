"""`whole_matrices`: multiply whole matrices, each on one device, in a rule such as Muon.

Only products need whole matrices. What a rule computes before them (momentum) and after them (scaling, weight decay)
treats each number by itself, where the parameters lie. So the rule keeps its tree, its shapes and its state, and its
update is traced, and cut around the products: what goes into them is sent, and what comes out of them is sent back. The
update is traced a second time for one matrix of each stack: that program of the products runs in a loop over matrices.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.core import Tracer
from jax.experimental.shard_alike import shard_alike
from jax.extend import core as jex_core
from jax.extend.core import JaxprEqn
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from mpx import _errors, _trees
from mpx._autocast.transform import autocast
from mpx._chain import element
from mpx._fp8 import Fp8
from mpx._jaxprs import closed_jaxpr, flatten, is_literal, open_jaxpr, part_of, run_equations
from mpx._policy import Policy
from mpx._primitives import facts_of
from mpx._shardings import explicit_sharding, in_auto
from mpx._stored.blocks import returns_its_operand

Var = jex_core.Var


@element
def whole_matrices(
    inner: optax.GradientTransformation,
    *,
    products: Policy | Fp8 | DTypeLike | None = None,
    sent: DTypeLike | None = None,
    axis: str | Sequence[str] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Multiply whole matrices, each on one device, in a rule that multiplies matrices, such as Muon.

    XLA alone multiplies divided matrices, and gathers or adds up each product: for Muon 25 bytes a parameter. With this
    each device gets whole matrices, a loop multiplies one after the other, and the results go back to where the
    parameters lie: 2 bytes there and back to each of 8 devices with `sent="bf16"`, or none for stacks of which each
    device has whole matrices. Momentum, weight decay and all other work stays where the parameters lie, and so does the
    state: it is `inner`'s own. A checkpoint can be restored on other devices, and without `whole_matrices`.

    What are matrices and stacks is seen in what the rule multiplies: a leaf of 126 matrices, of experts in layers, or a
    matrix. The axes of a stack come first. Matrices of one shape are dealt out to the devices, whatever leaves they
    are in, so that one device has at most one of them more than another. Each is multiplied by itself: a rule may
    mix all of a leaf before or after its products, not between them.

    The mesh is that of `jax.set_mesh`, or of arrays on explicit axes; call it under `jax.jit` or eagerly, not inside
    `jax.shard_map`. On one device the loop saves memory.

    Args:
        inner: any Optax transformation or chain: `optax.contrib.muon`. Without it this is an element of `chain`. Leaves
            that it does not multiply (by Adam, say) are left alone.
        products: how to multiply, as in `autocast`: `"f16"`, `"bf16"`, `"bf16x3"`; None leaves it to the rule. Norms,
            sums and polynomials stay in float32.
        sent: bfloat16 rounds what goes there and back, once each; None sends it as it is.
        axis: the axes of the mesh over which matrices are dealt out; None: all. Along others a matrix stays divided.

    Returns:
        A transformation with the state of `inner`.

    Raises:
        ValueError: if the mesh has no such axis, or none is set though parameters lie on several devices; if the rule
            multiplies matrices of several leaves with each other, or matrices across the first axes of a leaf.

    Example:
        >>> tx = whole_matrices(optax.contrib.muon(1e-3), products="bf16", sent="bf16")
        >>> params = {"w": jnp.ones((16, 32)), "b": jnp.ones(32)}
        >>> updates, state = tx.update(params, tx.init(params), params)
        >>> updates["w"].dtype
        dtype('float32')

    References:
        Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; Liu et al. 2025, "Muon is Scalable
        for LLM Training" (arXiv 2502.16982), for its distribution.
    """
    inner = _errors.as_transformation(inner, "whole_matrices")
    if sent is not None:
        sent = _errors.require_one_of((jnp.dtype(jnp.bfloat16), np.dtype(np.float32)), sent, "`whole_matrices`: `sent`")
    multiply = (lambda fun: fun) if products is None else (lambda fun: autocast(fun, products))
    multiply(len)  # so that a wrong setting raises here
    names = (axis,) if isinstance(axis, str) else axis if axis is None else tuple(axis)

    def init_fn(params):
        _require_mesh(params, names)
        return inner.init(params)

    def update_fn(updates, state, params=None, **extra_args):
        given = (updates, state, params, extra_args)
        _require_mesh(given, names)
        arrays, put = _trees.partition_leaves(given, _trees.is_array)
        update = lambda arrays: _update(inner, *put(arrays), multiply, sent, names)
        shardings = list(filter(None, map(explicit_sharding, arrays)))
        if not shardings:
            return update(arrays)
        everywhere = NamedSharding(shardings[0].mesh, PartitionSpec())
        placed = jax.tree.map(lambda x: explicit_sharding(x) or everywhere, (updates, state))
        return in_auto(update, shardings[0].mesh, placed)(arrays)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _require_mesh(tree: Any, names: Sequence[str] | None) -> None:
    """Raise unless the mesh is known, and has the axes."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.manual_axes:
        raise ValueError(
            f"`whole_matrices`: this is inside `jax.shard_map` over {', '.join(map(repr, mesh.manual_axes))}, where a "
            "device sees its own part only. Call `init` and `update` outside of it, under `jax.jit`."
        )
    for x in jax.tree.leaves(tree) if mesh.empty else ():
        is_divided = isinstance(x, jax.Array) and not isinstance(x, Tracer) and len(x.sharding.device_set) > 1
        if is_divided and explicit_sharding(x) is None:
            raise ValueError(
                "`whole_matrices`: arrays lie on several devices, but no mesh is set. Call `init` and `update` under "
                "`with jax.set_mesh(mesh):`."
            )
    if not mesh.empty and (missing := {*(names or ())} - {*mesh.axis_names}):
        raise ValueError(f"`whole_matrices`: the mesh has the axes {mesh.axis_names}, and no {sorted(missing)}.")


# ---- cutting the program of a rule -----------------------------------------------------------------------------------


class _Part(NamedTuple):
    """The products of a leaf, and what runs with them."""

    eqns: list[JaxprEqn]
    inputs: list[Var]
    outputs: list[Var]
    products: list[tuple[int, Any]]  # of each the number of matrices, and the shapes of one of them
    leaf: int  # the number of the leaf, in the tree of gradients


def _traced(rule: Any, given: Any, count: int) -> tuple[jex_core.Jaxpr, dict[Var, Any], Any, list[_Part]]:
    """Return the program of a rule, the values of its inputs and constants, what it returns, and its parts."""
    jaxpr, results = jax.make_jaxpr(rule, return_shape=True)(*given)
    program, constants = flatten(jaxpr, returns_its_operand)
    values = constants | dict(zip(program.invars, jax.tree.leaves(given), strict=True))
    return program, values, jax.tree.structure(results), _Program(program, count).parts()


class _Program:
    """The equations of a program by their numbers."""

    def __init__(self, program: jex_core.Jaxpr, count: int) -> None:
        self.eqns = program.eqns
        self.leaves = {v: i for i, v in enumerate(program.invars[:count])}
        self.made = {v: i for i, eqn in enumerate(self.eqns) for v in eqn.outvars}
        self.uses: dict[Var, set[int]] = defaultdict(set)
        for i, vs in enumerate([*map(_operands, self.eqns), [v for v in program.outvars if not is_literal(v)]]):
            for v in vs:
                self.uses[v].add(i)
        self.below = {i for i, eqn in enumerate(self.eqns) if _products([eqn])}  # products, and what is computed of them
        self.above = set(self.below)  # products, and what they are computed of
        for i in range(len(self.eqns)):
            self.below |= {i} if self.below & self._sources(i) else set()
        for i in reversed(range(len(self.eqns))):
            self.above |= self._sources(i) if i in self.above else set()

    def parts(self) -> list[_Part]:
        """Return what lies between the first and the last product of each leaf, and what can run with it."""
        between, found = self.below & self.above, {}
        for i in sorted(between):
            joined = {i}.union(*[found[j] for j in self._sources(i) & between])
            found.update(dict.fromkeys(joined, joined))
        distinct = {min(group): group for group in found.values()}
        return [part for _, group in sorted(distinct.items()) if (part := self._part(group)) is not None]

    def _part(self, group: set[int]) -> _Part | None:
        products = _products([self.eqns[i] for i in sorted(group)])
        least = min(count * math.prod(shape) for count, shapes in products for shape in shapes)
        large = lambda vs: [v for v in vs if v.aval.size >= least]
        group = _grown(group, lambda group: self._before(group), lambda group: len(large(self._inputs(group))))
        group = _grown(group, lambda group: self._after(group, large), lambda group: len(large(self._outputs(group))))
        inputs, waiting, seen = self._inputs(group), large(self._inputs(group)), set()
        while waiting:  # back to the gradients, through large arrays: a scalar may be of all leaves
            v = waiting.pop()
            if v not in seen and v in self.made:
                waiting += large(_operands(self.eqns[self.made[v]]))
            seen.add(v)
        leaves = sorted(self.leaves[v] for v in seen & self.leaves.keys())
        if not leaves:  # of the state alone
            return None
        eqns = [self.eqns[i] for i in sorted(group)]
        return _Part(eqns, inputs, self._outputs(group), products, leaves if leaves[1:] else leaves[0])

    def _sources(self, i: int) -> set[int]:
        return {self.made[v] for v in _operands(self.eqns[i]) if v in self.made}

    def _inputs(self, group: set[int]) -> list[Var]:
        operands = dict.fromkeys(v for i in sorted(group) for v in _operands(self.eqns[i]))
        return [v for v in operands if self.made.get(v) not in group]

    def _outputs(self, group: set[int]) -> list[Var]:
        return [v for i in sorted(group) for v in self.eqns[i].outvars if self.uses[v] - group]

    def _before(self, group: set[int]) -> list[int]:
        """Return equations whose results are read in the group only, the last one first."""
        found = sorted({self.made[v] for v in self._inputs(group) if v in self.made}, reverse=True)
        return [i for i in found if self._may_move(i) and all(self.uses[v] <= group for v in self.eqns[i].outvars)]

    def _after(self, group: set[int], large: Callable[..., list[Var]]) -> list[int]:
        """Return equations that read results of the group, and nothing that is large or waits for other products."""
        known = {*self._inputs(group), *self._outputs(group)}
        found = sorted({i for v in self._outputs(group) for i in self.uses[v] - group if i < len(self.eqns)})
        others = lambda i: [v for v in _operands(self.eqns[i]) if v not in known]
        waits = lambda i: large(others(i)) or any(self.made.get(v) in self.below for v in others(i))
        return [i for i in found if self._may_move(i) and not waits(i)]

    def _may_move(self, i: int) -> bool:
        """Return whether an equation computes the same for one matrix of a stack: random numbers are not."""
        return not self.eqns[i].effects and not facts_of(self.eqns[i]).positional


def _grown(group: set[int], neighbours: Callable[..., list[int]], width: Callable[..., int]) -> set[int]:
    """Take in neighbours one by one; return the largest group of those with the fewest large arrays at its border."""
    best, least = group, width(group)
    while found := neighbours(group):
        group = group | {found[0]}
        if (now := width(group)) <= least:
            best, least = group, now
    return best


def _operands(eqn: JaxprEqn) -> list[Var]:
    return [v for v in eqn.invars if not is_literal(v)]


def _products(eqns: Sequence[JaxprEqn]) -> list[tuple[int, Any]]:
    """Return how many matrices each product or factorization in equations has, and the shapes of one of them."""
    found: list[tuple[int, Any]] = []
    for eqn in eqns:
        shapes = [v.aval.shape for v in eqn.invars if hasattr(v.aval, "shape")]
        if eqn.primitive.name == "dot_general":
            contracted, batch = eqn.params["dimension_numbers"]
            one = [tuple(n for i, n in enumerate(s) if i not in b) for s, b in zip(shapes, batch, strict=True)]
            sums = math.prod(shapes[0][i] for i in contracted[0])
            if all(math.prod(shape) > sums for shape in one):  # both have an axis of their own
                found.append((math.prod(shapes[0][i] for i in batch[0]), tuple(one)))
        elif eqn.primitive.name in _FACTORIZATIONS:
            found.append((math.prod(shapes[0][:-2]), (shapes[0][-2:],)))
        else:
            found += [x for inner in jex_core.jaxprs_in_params(eqn.params) for x in _products(open_jaxpr(inner).eqns)]
    return found


_FACTORIZATIONS = ("cholesky", "eig", "eigh", "geqrf", "lu", "schur", "svd", "triangular_solve")


# ---- running it ------------------------------------------------------------------------------------------------------


def _update(inner: Any, updates: Any, state: Any, params: Any, extra_args: Any, *how: Any) -> Any:
    """Return what `inner.update` returns."""
    params = None if params is None else _errors.trained(params, updates)
    leaves, names = jax.tree.leaves(updates), list(_trees.path_names(updates).values())
    rule = lambda *given: inner.update(*given, **extra_args)
    program, values, tree, parts = _traced(rule, (updates, state, params), len(leaves))
    alike = _of_one_matrix(inner, rule, updates, params, parts, names) if parts else []
    moved = {id(eqn) for part in parts for eqn in part.eqns}
    late, before, after = {v for part in parts for v in part.outputs}, [], []
    for eqn in program.eqns:
        is_late = not late.isdisjoint(_operands(eqn))
        late.update(eqn.outvars if is_late else ())
        if id(eqn) not in moved:
            (after if is_late else before).append(eqn)
    run_equations(program, before, values)
    for jaxpr, is_mapped, members in alike:
        _multiply(jaxpr, is_mapped, members, values, leaves, *how)
    run_equations(program, after, values)
    return jax.tree.unflatten(tree, [v.val if is_literal(v) else values[v] for v in program.outvars])


def _of_one_matrix(inner: Any, rule: Any, updates: Any, params: Any, parts: list[_Part], names: list[str]) -> Any:
    """Return programs for one matrix, which of their inputs are matrices, and the parts that they can run."""
    shapes, axes = [np.shape(x) for x in jax.tree.leaves(updates)], {}
    for part in parts:
        if not isinstance(part.leaf, int):
            several = _errors.listed([names[i] for i in part.leaf])
            raise ValueError(
                f"`whole_matrices`: the rule multiplies matrices of several leaves with each other: {several}. Give "
                "these to another rule, by `optax.partition`."
            )
        count, shape = part.products[0][0], shapes[part.leaf]
        axes[part.leaf] = next((k for k in range(len(shape)) if math.prod(shape[:k]) == count), None)
        if axes[part.leaf] is None:
            raise ValueError(
                f"`whole_matrices`: {names[part.leaf]!r} is {list(shape)}, and the rule multiplies {count} matrices of it, "
                "which are not stacked along its first axes. Move the axes of the stack to the front."
            )
    one = lambda i, x: jax.ShapeDtypeStruct((1,) * axes[i] + np.shape(x)[axes[i] :], x.dtype) if i in axes else x
    one_of = lambda t: jax.tree.unflatten(jax.tree.structure(t), [one(i, x) for i, x in enumerate(jax.tree.leaves(t))])
    updates, params = one_of(updates), None if params is None else one_of(params)
    given = (updates, jax.eval_shape(inner.init, updates if params is None else params), params)
    program, _, _, of_one = _traced(rule, given, len(shapes))
    alike = defaultdict(list)
    for part, one in zip(parts, of_one, strict=True):
        jaxpr, count = part_of(program, one.eqns, one.outputs), part.products[0][0]
        is_mapped = tuple(_is_stack(v, w, count) for v, w in zip(part.inputs, jaxpr.invars, strict=True))
        shared = tuple(v for v, mapped in zip(part.inputs, is_mapped, strict=True) if not mapped)
        alike[str(jaxpr), is_mapped, shared].append((jaxpr, part))
    return [(members[0][0], is_mapped, [part for _, part in members]) for (_, is_mapped, _), members in alike.items()]


def _is_stack(v: Var, one: Var, count: int) -> bool:
    """Return whether an array has one entry for each of the matrices."""
    return v.aval.size == count * one.aval.size and (count > 1 or v.aval.size > 1)


def _multiply(
    jaxpr: jex_core.Jaxpr, is_mapped: Sequence[bool], parts: list[_Part], values: dict[Var, Any], leaves: list[Any],
    multiply: Any, sent: np.dtype | None, names: Sequence[str] | None,
) -> None:  # fmt: skip
    """Run the products of leaves with alike matrices, and add their results to `values`."""
    fun = multiply(lambda *args: jex_core.jaxpr_as_fun(closed_jaxpr(jaxpr))(*args))
    deal = _Dealer(names)
    narrow = lambda x: x.astype(sent) if sent is not None and _trees.is_floating(x) and x.dtype.itemsize > sent.itemsize else x
    stacks = []
    for part in parts:
        place = lambda x, like=leaves[part.leaf]: deal.placed_like(x, like)
        given = [place(narrow(place(values[v]))) for v, mapped in zip(part.inputs, is_mapped, strict=True) if mapped]
        units = [w.aval.shape for w, mapped in zip(jaxpr.invars, is_mapped, strict=True) if mapped]
        stacks.append([x.reshape(-1, *unit) for x, unit in zip(given, units, strict=True)])

    def one(matrices):
        matrices = iter(matrices)
        args = [
            next(matrices).astype(w.aval.dtype) if mapped else values[v]
            for v, w, mapped in zip(parts[0].inputs, jaxpr.invars, is_mapped, strict=True)
        ]
        return list(map(narrow, fun(*args)))

    for part, results in zip(parts, deal(one, stacks), strict=True):
        for v, result in zip(part.outputs, results, strict=True):
            result = deal.placed_like(result.reshape(v.aval.shape), leaves[part.leaf])
            values[v] = result.astype(v.aval.dtype)


class _Dealer:
    """Deals matrices out to the devices of a mesh."""

    def __init__(self, names: Sequence[str] | None) -> None:
        self.mesh = jax.sharding.get_abstract_mesh()
        self.names = tuple(self.mesh.axis_names if names is None else names)
        self.count = math.prod(self.mesh.shape[name] for name in self.names) if not self.mesh.empty else 1

    def placed_like(self, x: jax.Array, like: jax.Array) -> jax.Array:
        """Let `x` lie where `like` does, wherever that is."""
        return x if self.count == 1 or x.shape != like.shape else shard_alike(like, x)[1]

    def __call__(self, one: Callable[..., Any], stacks: list[list[jax.Array]]) -> list[list[jax.Array]]:
        """Map a function over the first axes of arrays, stack by stack."""
        whole = [len(stack[0]) // self.count * self.count for stack in stacks]
        # Each device takes neighbours: those that it may have already.
        apart = lambda x: jnp.moveaxis(x.reshape(self.count, -1, *x.shape[1:]), 0, 1)
        together = lambda x: jnp.moveaxis(x, 1, 0)
        results = [
            [together(y) for y in self._in_rounds(one, [apart(x[:n]) for x in stack])] if n else []
            for n, stack in zip(whole, stacks, strict=True)
        ]
        # What is left of all stacks is one more.
        left = [[x[n:] for x in stack] for n, stack in zip(whole, stacks, strict=True)]
        counts = [len(stack[0]) for stack in left]
        if any(counts):
            joined = [jnp.concatenate(xs) for xs in zip(*left, strict=True)]
            fill = lambda x: jnp.concatenate([x, *[x[-1:]] * (-len(x) % self.count)])
            ys = self._in_rounds(one, [fill(x).reshape(-1, self.count, *x.shape[1:]) for x in joined])
            ends = np.cumsum(counts)
            ys = [jnp.split(y.reshape(-1, *y.shape[2:])[: ends[-1]], ends[:-1]) for y in ys]
            for i, (result, *more) in enumerate(zip(results, *ys, strict=True)):
                flat = [y.reshape(-1, *y.shape[2:]) for y in result]
                results[i] = [jnp.concatenate(pair) for pair in zip(flat, more, strict=True)] if flat else more
        return results

    def _in_rounds(self, one: Callable[..., Any], stack: list[jax.Array]) -> list[jax.Array]:
        """Map a function over arrays `[rounds, devices, ...]`: each device has one entry at a time."""
        return [self._placed(y) for y in lax.map(jax.vmap(one), [self._placed(x) for x in stack])]

    def _placed(self, x: jax.Array) -> jax.Array:
        if self.count == 1:
            return x
        others = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 2) if {*self.names} != {*self.mesh.axis_names} else []
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(None, self.names, *others)))
