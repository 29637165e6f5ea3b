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
        update = lambda arrays: _update(inner, *put(arrays), multiply, _Sender.of(names, sent))
        shardings = list(filter(None, map(explicit_sharding, arrays)))
        if not shardings:
            return update(arrays)
        everywhere = NamedSharding(shardings[0].mesh, PartitionSpec())
        placed = jax.tree.map(lambda x: explicit_sharding(x) or everywhere, (updates, state))
        return in_auto(update, shardings[0].mesh, placed)(arrays)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _require_mesh(given: Any, names: Sequence[str] | None) -> None:
    """Raise unless the mesh is known, and has the axes."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.manual_axes:
        raise ValueError(
            f"`whole_matrices`: this is inside `jax.shard_map` over {', '.join(map(repr, mesh.manual_axes))}, where a "
            "device sees its own part only. Call `init` and `update` outside of it, under `jax.jit`."
        )
    arrays = [x for x in jax.tree.leaves(given) if isinstance(x, jax.Array) and not isinstance(x, Tracer)]
    if mesh.empty and any(len(x.sharding.device_set) > 1 and explicit_sharding(x) is None for x in arrays):
        raise ValueError(
            "`whole_matrices`: arrays lie on several devices, but no mesh is set. Call `init` and `update` under "
            "`with jax.set_mesh(mesh):`."
        )
    if not mesh.empty and not {*(names or ())} <= {*mesh.axis_names}:
        raise ValueError(f"`whole_matrices`: the mesh has the axes {mesh.axis_names}, but `axis` is {names}.")


# ---- cutting the program of a rule -----------------------------------------------------------------------------------


class _Part(NamedTuple):
    """The products of a leaf, and what runs with them."""

    eqns: list[JaxprEqn]
    inputs: list[Var]
    outputs: list[Var]
    products: list[tuple[int, Any]]  # of each the number of matrices, and the shapes of one of them
    least: int  # the size of the smallest operand of a product
    leaves: list[int]  # the numbers of the gradients that it multiplies


class _Program:
    """The equations of a program by their numbers, and what reads what."""

    def __init__(self, program: jex_core.Jaxpr) -> None:
        self.eqns = program.eqns
        self.made = {v: i for i, eqn in enumerate(self.eqns) for v in eqn.outvars}
        self.uses: dict[Var, set[int]] = defaultdict(set)
        for i, vs in enumerate([*map(_operands, self.eqns), [v for v in program.outvars if not is_literal(v)]]):
            for v in vs:
                self.uses[v].add(i)
        self.below = {i for i, eqn in enumerate(self.eqns) if _products([eqn])}  # products, and what reads them
        self.above = set(self.below)  # products, and what they read
        for i in range(len(self.eqns)):
            self.below |= {i} if self.below & self.sources(i) else set()
        for i in reversed(range(len(self.eqns))):
            self.above |= self.sources(i) if i in self.above else set()

    def parts(self, gradients: dict[Var, int]) -> list[_Part]:
        """Return what lies between the first and the last product of each leaf, and what can run with it."""
        between, found = self.below & self.above, {}
        for i in sorted(between):
            joined = {i}.union(*[found[j] for j in self.sources(i) & between])
            found.update(dict.fromkeys(joined, joined))
        groups = {min(group): group for group in found.values()}
        parts = [self._part(group, gradients) for _, group in sorted(groups.items())]
        return [part for part in parts if part.leaves]  # products of the state alone are left to XLA

    def _part(self, group: set[int], gradients: dict[Var, int]) -> _Part:
        products = _products([self.eqns[i] for i in sorted(group)])
        least = min(count * math.prod(shape) for count, shapes in products for shape in shapes)
        large = lambda vs: [v for v in vs if v.aval.size >= least]
        group = _grown(group, self._before, lambda group: len(large(self.inputs(group))))
        group = _grown(group, lambda group: self._after(group, large), lambda group: len(large(self.outputs(group))))
        waiting, seen = large(self.inputs(group)), set()
        while waiting:  # back to the gradients, through large arrays: a scalar may be of all leaves
            v = waiting.pop()
            waiting += large(_operands(self.eqns[self.made[v]])) if v in self.made and v not in seen else []
            seen.add(v)
        leaves = sorted(gradients[v] for v in seen & gradients.keys())
        eqns = [self.eqns[i] for i in sorted(group)]
        return _Part(eqns, self.inputs(group), self.outputs(group), products, least, leaves)

    def sources(self, i: int) -> set[int]:
        """Return the equations that make the operands of one."""
        return {self.made[v] for v in _operands(self.eqns[i]) if v in self.made}

    def inputs(self, group: set[int]) -> list[Var]:
        """Return what a group of equations reads from outside."""
        operands = dict.fromkeys(v for i in sorted(group) for v in _operands(self.eqns[i]))
        return [v for v in operands if self.made.get(v) not in group]

    def outputs(self, group: set[int]) -> list[Var]:
        """Return what others read of a group."""
        return [v for i in sorted(group) for v in self.eqns[i].outvars if self.uses[v] - group]

    def _before(self, group: set[int]) -> list[int]:
        """Return equations whose results only the group reads, the last one first."""
        found = sorted({self.made[v] for v in self.inputs(group) if v in self.made}, reverse=True)
        return [
            i for i in found if _may_join(self.eqns[i]) and all(self.uses[v] <= group for v in self.eqns[i].outvars)
        ]

    def _after(self, group: set[int], large: Callable[..., list[Var]]) -> list[int]:
        """Return equations that read results of the group, and beside these nothing large or computed of products."""
        known, results = {*self.inputs(group), *self.outputs(group)}, self.outputs(group)
        found = sorted({i for v in results for i in self.uses[v] - group if i < len(self.eqns)})
        others = lambda i: {*_operands(self.eqns[i])} - known
        is_free = lambda i: not large(others(i)) and self.below.isdisjoint(self.made.get(v, -1) for v in others(i))
        return [i for i in found if _may_join(self.eqns[i]) and is_free(i)]


def _may_join(eqn: JaxprEqn) -> bool:
    """Return whether an equation does the same to one matrix as to a stack; random numbers are others."""
    return not eqn.effects and not facts_of(eqn).positional


def _grown(group: set[int], neighbours: Callable[..., list[int]], border: Callable[..., int]) -> set[int]:
    """Take in neighbours one by one; return the largest group with the fewest large arrays at its border."""
    best, least = group, border(group)
    while found := neighbours(group):
        group = group | {found[0]}
        if (now := border(group)) <= least:
            best, least = group, now
    return best


def _operands(eqn: JaxprEqn) -> list[Var]:
    return [v for v in eqn.invars if not is_literal(v)]


_FACTORIZATIONS = ("cholesky", "eig", "eigh", "geqrf", "lu", "schur", "svd", "triangular_solve")


def _products(eqns: Sequence[JaxprEqn]) -> list[tuple[int, Any]]:
    """Return how many matrices each product or factorization in equations has, and the shapes of one of them."""
    found: list[tuple[int, Any]] = []
    for eqn in eqns:
        shapes = [getattr(v.aval, "shape", ()) for v in eqn.invars]
        if eqn.primitive.name == "dot_general":
            (contracted, _), batch = eqn.params["dimension_numbers"]
            one = [tuple(n for i, n in enumerate(s) if i not in b) for s, b in zip(shapes, batch, strict=True)]
            if all(math.prod(shape) > math.prod(shapes[0][i] for i in contracted) for shape in one):  # no vectors
                found.append((math.prod(shapes[0][i] for i in batch[0]), tuple(one)))
        elif eqn.primitive.name in _FACTORIZATIONS:
            found.append((math.prod(shapes[0][:-2]), (shapes[0][-2:],)))
        else:
            found += [x for inner in jex_core.jaxprs_in_params(eqn.params) for x in _products(open_jaxpr(inner).eqns)]
    return found


# ---- running it ------------------------------------------------------------------------------------------------------


def _traced(rule: Any, given: Any) -> tuple[jex_core.Jaxpr, dict[Var, Any], Any, list[_Part]]:
    """Return the program of a rule, the values of its inputs and constants, the tree of its results, and its parts."""
    jaxpr, results = jax.make_jaxpr(rule, return_shape=True)(*given)
    program, constants = flatten(jaxpr, returns_its_operand)
    values = constants | dict(zip(program.invars, jax.tree.leaves(given), strict=True))
    gradients = dict(zip(program.invars, range(len(jax.tree.leaves(given[0]))), strict=False))
    return program, values, jax.tree.structure(results), _Program(program).parts(gradients)


def _update(
    inner: Any, updates: Any, state: Any, params: Any, extra_args: Any, multiply: Any, sender: "_Sender"
) -> Any:
    """Return what `inner.update` returns."""
    params = None if params is None else _errors.trained(params, updates)
    rule = lambda *given: inner.update(*given, **extra_args)
    program, values, tree, parts = _traced(rule, (updates, state, params))
    alike = _of_one_matrix(inner, rule, updates, params, parts) if parts else {}
    moved = {id(eqn) for part in parts for eqn in part.eqns}
    late, before, after = {v for part in parts for v in part.outputs}, [], []
    for eqn in program.eqns:
        is_late = not late.isdisjoint(_operands(eqn))
        late.update(eqn.outvars if is_late else ())
        if id(eqn) not in moved:
            (after if is_late else before).append(eqn)
    run_equations(program, before, values)
    for (_, is_mapped, _), members in alike.items():
        _run_alike(members, is_mapped, values, jax.tree.leaves(updates), multiply, sender)
    run_equations(program, after, values)
    return jax.tree.unflatten(tree, [v.val if is_literal(v) else values[v] for v in program.outvars])


def _of_one_matrix(inner: Any, rule: Any, updates: Any, params: Any, parts: list[_Part]) -> dict[Any, Any]:
    """Return parts and their programs for one matrix; those that are alike together, with which inputs are stacks."""
    shapes, names, axes = [np.shape(x) for x in jax.tree.leaves(updates)], list(_trees.path_names(updates).values()), {}
    for part in parts:
        if part.leaves[1:]:
            raise ValueError(
                "`whole_matrices`: the rule multiplies matrices of several leaves with each other: "
                f"{_errors.listed([names[i] for i in part.leaves])}. Give these to a rule outside, by `optax.partition`."
            )
        shape, count = shapes[part.leaves[0]], part.products[0][0]
        axes[part.leaves[0]] = next((k for k in range(len(shape)) if math.prod(shape[:k]) == count), 0)
    one = lambda i, x: jax.ShapeDtypeStruct((1,) * axes[i] + np.shape(x)[axes[i] :], x.dtype) if i in axes else x
    one_of = lambda t: jax.tree.unflatten(jax.tree.structure(t), [one(i, x) for i, x in enumerate(jax.tree.leaves(t))])
    updates, params = one_of(updates), None if params is None else one_of(params)
    state = jax.eval_shape(inner.init, updates if params is None else params)
    program, _, _, of_one = _traced(rule, (updates, state, params))
    alike = defaultdict(list)
    for part, single in zip(parts, of_one, strict=True):
        name, shape, count = names[part.leaves[0]], shapes[part.leaves[0]], part.products[0][0]
        arrays, units = [*part.inputs, *part.outputs], [*single.inputs, *single.outputs]
        is_stack = [_is_stack(v, w, part) for v, w in zip(arrays, units, strict=len(arrays) == len(units))]
        is_same = [v.aval.shape == w.aval.shape for v, w in zip(part.inputs, single.inputs, strict=False)]
        inputs, outputs = is_stack[: len(part.inputs)], is_stack[len(part.inputs) :]
        if [(n // count, x) for n, x in part.products] != single.products or not (
            all(map(max, inputs, is_same)) and all(outputs)
        ):
            raise ValueError(
                f"`whole_matrices`: {name!r} is {list(shape)}, of which the rule multiplies {count} matrices, but not "
                "each by itself. Let the axes of the stack come first, or keep this leaf out, by `optax.partition`."
            )
        shared = tuple(v for v, is_mapped in zip(part.inputs, inputs, strict=True) if not is_mapped)
        jaxpr = part_of(program, single.eqns, single.outputs)
        alike[str(jaxpr), tuple(inputs), shared].append((part, jaxpr))
    return alike


def _is_stack(v: Var, one: Var, part: _Part) -> bool:
    """Return whether an array has one entry for each matrix."""
    count, shape = part.products[0][0], v.aval.shape
    if count == 1:
        return v.aval.size >= part.least
    k = next((k for k in range(len(shape) + 1) if math.prod(shape[:k]) == count), 0)
    return k > 0 and math.prod(one.aval.shape[:k]) == 1 and shape[k:] == one.aval.shape[k:]


def _run_alike(members: Any, is_mapped: Any, values: Any, leaves: Any, multiply: Any, sender: "_Sender") -> None:
    """Run alike parts, and add their results to `values`."""
    part, one = members[0]
    run = multiply(jex_core.jaxpr_as_fun(closed_jaxpr(one)))
    of_stacks = lambda xs: [x for x, mapped in zip(xs, is_mapped, strict=True) if mapped]
    like = [leaves[part.leaves[0]] for part, _ in members]

    def of_one(matrices):
        matrices = (x.astype(w.aval.dtype) for x, w in zip(matrices, of_stacks(one.invars), strict=True))
        results = run(
            *[next(matrices) if mapped else values[v] for v, mapped in zip(part.inputs, is_mapped, strict=True)]
        )
        return [sender.narrowed(y, v.aval.shape == like[0].shape) for y, v in zip(results, part.outputs, strict=True)]

    stacks = [
        [
            sender.there(values[v], x).reshape(-1, *w.aval.shape)
            for v, w in zip(of_stacks(p.inputs), of_stacks(one.invars), strict=True)
        ]
        for (p, _), x in zip(members, like, strict=True)
    ]
    for (p, _), x, results in zip(members, like, sender.mapped(of_one, stacks), strict=True):
        values.update(
            (v, sender.back(y.reshape(v.aval.shape), x).astype(v.aval.dtype))
            for v, y in zip(p.outputs, results, strict=True)
        )


class _Sender(NamedTuple):
    """Sends matrices to the devices that multiply them, and back."""

    mesh: Any
    names: tuple[str, ...]  # the axes over which matrices are dealt out
    dtype: Any  # the dtype in which they are sent, or None

    @classmethod
    def of(cls, names: Sequence[str] | None, dtype: Any) -> "_Sender":
        mesh = jax.sharding.get_abstract_mesh()
        return cls(mesh, () if mesh.empty else tuple(mesh.axis_names if names is None else names), dtype)

    @property
    def devices(self) -> int:
        return math.prod(self.mesh.shape[name] for name in self.names)

    def narrowed(self, x: jax.Array, is_leaf: bool) -> jax.Array:
        """Round an array once; only what has the shape of a leaf: the rule may keep more of what it measures."""
        return x.astype(self.dtype) if self.dtype is not None and is_leaf and _trees.is_floating(x) else x

    def back(self, x: jax.Array, like: jax.Array) -> jax.Array:
        """Place an array as a gradient of its shape, wherever that lies; nothing says where on automatic axes."""
        return shard_alike(like, x)[1] if x.shape == like.shape and self.devices > 1 else x

    def there(self, x: jax.Array, like: jax.Array) -> jax.Array:
        """Round an array where it lies, before it is sent."""
        return self.back(self.narrowed(self.back(x, like), x.shape == like.shape), like)

    def mapped(self, fun: Callable[..., Any], stacks: list[list[jax.Array]]) -> list[Any]:
        """Map a function over the first axes of stacks; those that the devices do not divide become one."""
        is_divided = [len(stack[0]) % self.devices == 0 for stack in stacks]
        groups = [[i] for i, divided in enumerate(is_divided) if divided]
        groups += [[i for i, divided in enumerate(is_divided) if not divided]]
        results: dict[int, Any] = {}
        for group in filter(None, groups):
            joined = [jnp.concatenate(xs) for xs in zip(*[stacks[i] for i in group], strict=True)]
            ends = np.cumsum([len(stacks[i][0]) for i in group])[:-1]
            parts = [jnp.split(y, ends) for y in self._on_devices(fun, joined)]
            results.update(zip(group, zip(*parts, strict=True), strict=True))
        return [results[i] for i in range(len(stacks))]

    def _on_devices(self, fun: Callable[..., Any], stack: list[jax.Array]) -> list[jax.Array]:
        """Map a function over `[rounds, devices, ...]`: one entry at a time on each device."""
        count = len(stack[0])
        if missing := -count % self.devices:
            stack = [jnp.concatenate([x, *[x[-1:]] * missing]) for x in stack]
            split = lambda x: x.reshape(-1, self.devices, *x.shape[1:])
            join = lambda x: x.reshape(-1, *x.shape[2:])[:count]
        else:  # neighbours on one device, which it may have already
            split = lambda x: jnp.moveaxis(x.reshape(self.devices, -1, *x.shape[1:]), 0, 1)
            join = lambda x: jnp.moveaxis(x, 1, 0).reshape(-1, *x.shape[2:])
        results = lax.map(jax.vmap(fun), [self._placed(split(x)) for x in stack])
        return [join(self._placed(y)) for y in results]

    def _placed(self, x: jax.Array) -> jax.Array:
        if self.devices == 1:
            return x
        others = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 2) if len(self.names) < len(self.mesh.axis_names) else []
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(None, self.names, *others)))
