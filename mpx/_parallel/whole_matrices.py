"""`whole_matrices`: multiply whole matrices, each on one device, in a rule such as
Muon.

Only products need whole matrices. What a rule computes before them (momentum) and after
them (scaling, weight decay) treats each number by itself, where the parameters lie. So
the rule keeps its tree, its shapes and its state, and its update is traced, and cut
around the products: what goes into them is sent, and what comes out of them is sent
back. The update is traced a second time for one matrix of each stack: that program of
the products runs in a loop over matrices.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.core import Tracer
from jax.extend import core as jex_core
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from mpx import _errors, _trees
from mpx._autocast.transform import autocast
from mpx._chain import element
from mpx._fp8 import Fp8
from mpx._jaxprs import closed_jaxpr, is_literal, run_equations
from mpx._parallel.products import Alike, Part, Var, programs_of_one, traced
from mpx._policy import Policy
from mpx._shardings import explicit_sharding, in_auto


@element
def whole_matrices(
    inner: optax.GradientTransformation,
    *,
    products: Policy | Fp8 | DTypeLike | None = None,
    sent: DTypeLike | None = None,
    axis: str | Sequence[str] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Multiply whole matrices, each on one device, in a rule that multiplies matrices,
    such as Muon.

    XLA alone multiplies divided matrices, and gathers or adds up each product: for Muon
    25 bytes a parameter. With this each device gets whole matrices, a loop multiplies
    one after the other, and the results go back to where the parameters lie: 2 bytes
    there and back to each of 8 devices with `sent="bf16"`, or none for stacks of which
    each device has whole matrices. Momentum, weight decay and all other work stays
    where the parameters lie, and so does the state: it is `inner`'s own. A checkpoint
    can be restored on other devices, and without `whole_matrices`.

    What are matrices and stacks is seen in what the rule multiplies: a leaf of 126
    matrices, of experts in layers, or a matrix. The axes of a stack come first.
    Matrices of one shape are dealt out to the devices, whatever stacks they are in
    (those without a stack by themselves), so that no device has two of them more than
    another. Each is multiplied by itself: a rule may mix all of a leaf before or after
    its products, not between them.

    Axes may be explicit or automatic, and parameters divided in any way; if each device
    has all of them, put `zero1` around. Call it under `jax.jit` or eagerly, not inside
    `jax.shard_map`. On one device the loop saves memory.

    Args:
        inner: any Optax transformation or chain: `optax.contrib.muon`. Without it this
            is an element of `chain`. Leaves that it does not multiply (by Adam, say)
            are left alone.
        products: how to multiply, as in `autocast`: `"f16"`, `"bf16"`, `"bf16x3"`; None
            leaves it to the rule. Norms, sums and polynomials stay in float32.
        sent: bfloat16 rounds what goes there and what comes back, once each, on one
            device too; None sends it as it is.
        axis: the axes of the mesh over which matrices are dealt out; None: all. Along
            others a matrix stays divided.

    Returns:
        A transformation with the state of `inner`.

    Raises:
        TypeError: if `axis` is no name, or names.
        ValueError: at `update`, if the mesh has no such axis; if the rule multiplies
            matrices of several leaves with each other, or mixes those of a stack
            between its products; inside `jax.shard_map`.

    Example:
        >>> tx = whole_matrices(optax.contrib.muon(1e-3), products="bf16", sent="bf16")
        >>> params = {"w": jnp.ones((16, 32)), "b": jnp.ones(32)}
        >>> updates, state = tx.update(params, tx.init(params), params)
        >>> updates["w"].dtype
        dtype('float32')

    References:
        Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks";
            Liu et al. 2025, "Muon is
        Scalable for LLM Training" (arXiv 2502.16982), for its distribution.
    """
    inner = _errors.as_transformation(inner, "whole_matrices")
    if sent is not None:
        sent = _errors.require_one_of(
            (jnp.dtype(jnp.bfloat16), np.dtype(np.float32)),
            sent,
            "`whole_matrices`: `sent`",
        )
    multiply = (
        (lambda fun: fun) if products is None else (lambda fun: autocast(fun, products))
    )
    multiply(len)  # so that a wrong setting raises here
    names = (axis,) if isinstance(axis, str) else axis
    if not (
        names is None
        or (
            isinstance(names, Sequence) and all(isinstance(name, str) for name in names)
        )
    ):
        raise TypeError(
            "`whole_matrices`: `axis` must be a name of a mesh's axis, or several, but"
            f" got {axis!r}."
        )

    def update_fn(updates, state, params=None, **extra_args):
        params = None if params is None else _errors.trained(params, updates)
        given = (updates, state, params, extra_args)
        mesh = _mesh_of(given, names)
        arrays, put = _trees.partition_leaves(given, _trees.is_array)

        def update(arrays):
            return _update(inner, *put(arrays), multiply, (mesh, names, sent))

        if not (shardings := list(filter(None, map(explicit_sharding, arrays)))):
            return update(arrays)
        mesh = shardings[0].mesh
        everywhere = NamedSharding(mesh, PartitionSpec())

        def where(tree):
            return jax.tree.map(lambda x: explicit_sharding(x) or everywhere, tree)

        placed = (
            where(
                jax.tree.unflatten(
                    jax.tree.structure(updates), _weights(updates, params)
                )
            ),
            where(state),
        )
        return in_auto(update, mesh, placed)(arrays)

    return optax.GradientTransformationExtraArgs(inner.init, update_fn)


def _weights(updates: Any, params: Any) -> list[Any]:
    """Return the parameter of each gradient, or else the gradient itself."""
    of_path = _trees.leaves_by_path(updates) | _trees.leaves_by_path(params)
    return [of_path[path] for path in _trees.leaves_by_path(updates)]


def _mesh_of(given: Any, names: Sequence[str] | None) -> Any:
    """Return the mesh that is set, or else that of the arrays; raise unless its axes
    can divide them.
    """
    now = jax.sharding.get_abstract_mesh()
    if now.manual_axes:
        raise ValueError(
            "`whole_matrices`: this is inside `jax.shard_map` over"
            f" {', '.join(map(repr, now.manual_axes))}, where a device sees its own"
            " part only. Call `update` outside of it, under `jax.jit`."
        )
    of_types = [
        jax.typeof(x).sharding.mesh
        for x in jax.tree.leaves(given)
        if isinstance(x, jax.Array)
    ]
    mesh = next((mesh for mesh in (now, *of_types) if not mesh.empty), now)
    if not mesh.empty and not {*(names or ())} <= {*mesh.axis_names}:
        raise ValueError(
            f"`whole_matrices`: the mesh has the axes {mesh.axis_names}, but `axis` is"
            f" {names}."
        )
    return mesh


def _update(
    inner: Any,
    updates: Any,
    state: Any,
    params: Any,
    extra_args: Any,
    multiply: Any,
    how: tuple[Any, ...],
) -> Any:
    """Return what `inner.update` returns."""

    def rule(*given):
        return inner.update(*given, **extra_args)

    program, values, tree, parts = traced(rule, (updates, state, params))
    groups = programs_of_one(rule, inner.init, updates, params, parts) if parts else []
    own = [part for alike in groups for part in alike.parts]
    moved = {id(eqn) for part in own for eqn in part.eqns}
    late, before, after = {v for part in own for v in part.outputs}, [], []
    for eqn in program.eqns:
        is_late = not late.isdisjoint([v for v in eqn.invars if not is_literal(v)])
        late.update(eqn.outvars if is_late else ())
        if id(eqn) not in moved:
            (after if is_late else before).append(eqn)
    run_equations(program, before, values)
    sender = _Sender.of(*how, _weights(updates, params))
    for alike in groups:
        _run(alike, values, multiply, sender)
    run_equations(program, after, values)
    results: list[Var] = list(program.outvars)
    return jax.tree.unflatten(
        tree, [v.val if is_literal(v) else values[v] for v in results]
    )


def _run(
    alike: Alike, values: dict[Var, Any], multiply: Any, sender: "_Sender"
) -> None:
    """Run alike parts, and add their results to `values`."""
    first, of_one = alike.parts[0], alike.of_one
    program = jex_core.jaxpr_as_fun(closed_jaxpr(of_one))

    def as_traced(x, v):
        return x if x.dtype == v.aval.dtype else x.astype(v.aval.dtype)

    product = multiply(lambda *args: program(*map(as_traced, args, of_one.invars)))

    def stacks_of(inputs):
        return [x for x, stacked in zip(inputs, alike.is_stack, strict=True) if stacked]

    def of_matrices(matrices):
        given, pairs = iter(matrices), zip(first.inputs, alike.is_stack, strict=True)
        results = product(
            *[next(given) if stacked else values[v] for v, stacked in pairs]
        )
        is_leaf = [sender.is_of_leaf(v.aval, first) for v in first.outputs]
        return [
            sender.narrowed(y) if narrow else y
            for y, narrow in zip(results, is_leaf, strict=True)
        ]

    def stacks(part):
        given = [sender.there(values[v], part) for v in stacks_of(part.inputs)]
        return [
            x.reshape(-1, *v.aval.shape)
            for x, v in zip(given, stacks_of(of_one.invars), strict=True)
        ]

    for part, results in zip(
        alike.parts, sender.mapped(of_matrices, map(stacks, alike.parts)), strict=True
    ):
        for v, y in zip(part.outputs, results, strict=True):
            values[v] = sender.placed(y.reshape(v.aval.shape), part).astype(
                v.aval.dtype
            )


class _Sender(NamedTuple):
    """Sends matrices to the devices that multiply them, and back."""

    mesh: Any
    names: tuple[str, ...]  # the axes over which matrices are dealt out
    dtype: Any  # the dtype in which they are sent, or None
    leaves: list[Any]  # the parameters

    @classmethod
    def of(cls, mesh: Any, names: Sequence[str] | None, *others: Any) -> "_Sender":
        now = (
            jax.sharding.get_abstract_mesh()
        )  # axes that are explicit outside are automatic now
        mesh = mesh if now.empty else now
        return cls(
            mesh,
            () if mesh.empty else tuple(mesh.axis_names if names is None else names),
            *others,
        )

    @property
    def devices(self) -> int:
        return math.prod(self.mesh.shape[name] for name in self.names)

    def narrowed(self, x: jax.Array) -> jax.Array:
        """Round an array once, for the way."""
        is_wider = (
            self.dtype is not None
            and _trees.is_floating(x)
            and x.dtype.itemsize > self.dtype.itemsize
        )
        return x.astype(self.dtype) if is_wider else x

    def is_of_leaf(self, x: Any, part: Part) -> bool:
        """Return whether an array has the numbers of a leaf; what a rule measures of a
        matrix may need more bits.
        """
        return x.shape == self.leaves[part.leaves[0]].shape

    def there(self, x: jax.Array, part: Part) -> jax.Array:
        """Round an array where it lies."""
        return (
            self.placed(self.narrowed(self.placed(x, part)), part)
            if self.is_of_leaf(x, part)
            else x
        )

    def placed(self, x: jax.Array, part: Part) -> jax.Array:
        """Place an array where its leaf lies."""
        like = self.leaves[part.leaves[0]]
        if (
            not self.is_of_leaf(x, part)
            or self.devices == 1
            or not isinstance(like, jax.Array)
        ):
            return x
        return (
            _placed_like(like, x)
            if isinstance(like, Tracer)
            else jax.device_put(x, like.sharding)
        )

    def mapped(
        self, fun: Callable[..., Any], stacks: Iterable[list[jax.Array]]
    ) -> list[Any]:
        """Map a function over the matrices of stacks; stacks that the devices do not
        divide become one.
        """
        stacks = list(stacks)
        results = [
            [] if len(stack[0]) % self.devices else self._in_rounds(fun, stack)
            for stack in stacks
        ]
        if others := [i for i, result in enumerate(results) if not result]:
            joined = [
                jnp.concatenate(xs)
                for xs in zip(*[stacks[i] for i in others], strict=True)
            ]
            ends = np.cumsum([len(stacks[i][0]) for i in others])
            missing = (
                -ends[-1] % self.devices
            )  # copies of the last matrix fill the last round
            filled = [
                jnp.concatenate([x, jnp.broadcast_to(x[-1:], (missing, *x.shape[1:]))])
                for x in joined
            ]
            parts = [
                jnp.split(y[: ends[-1]], ends[:-1])
                for y in self._in_rounds(fun, filled)
            ]
            for i, result in zip(others, zip(*parts, strict=True), strict=True):
                results[i] = list(result)
        return results

    def _in_rounds(
        self, fun: Callable[..., Any], stack: list[jax.Array]
    ) -> list[jax.Array]:
        """Map a function: in each round a device gets one matrix of its part of a
        stack, and sends the result back.
        """

        def in_round(xs):
            ys = jax.vmap(fun)([self._dealt(x) for x in xs])
            return [
                self._dealt(y, next((x for x in xs if x.shape == y.shape), y))
                for y in ys
            ]

        split = [x.reshape(self.devices, -1, *x.shape[1:]) for x in stack]
        return [y.reshape(-1, *y.shape[2:]) for y in _one_by_one(in_round, split)]

    def _dealt(self, x: jax.Array, back_to: jax.Array | None = None) -> jax.Array:
        """Deal matrices out, or send them back to where others lie.

        It goes over one axis of the mesh after the other, since XLA knows no way over
        two.
        """
        if self.devices == 1:
            return x
        if back_to is None:
            x = _placed_like(
                x, x, is_free=True
            )  # or XLA sends all of a stack before the first round
        for count in sorted(range(1, len(self.names) + 1), reverse=back_to is not None):
            others = (
                []
                if count == len(self.mesh.axis_names)
                else [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)
            )
            spec = PartitionSpec(
                self.names[:count], *others
            )  # it is left to XLA how others divide a matrix
            x = lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))
        return x if back_to is None else _placed_like(back_to, x)


def _one_by_one(fun: Callable[..., Any], stacks: list[jax.Array]) -> list[jax.Array]:
    """Map a function over the second axes of arrays, in place if its results are as its
    arguments.
    """

    def of_type(xs):
        return [(x.shape, x.dtype) for x in xs]

    def entry(x, i):
        return lax.dynamic_index_in_dim(x, i, 1, keepdims=False)

    first = jax.eval_shape(lambda xs: [entry(x, 0) for x in xs], stacks)
    if of_type(jax.eval_shape(fun, first)) != of_type(first):
        results = lax.map(
            lambda i: fun([entry(x, i) for x in stacks]), jnp.arange(stacks[0].shape[1])
        )
        return [jnp.moveaxis(y, 0, 1) for y in results]

    def step(i, xs):
        ys = fun([entry(x, i) for x in xs])
        return [
            lax.dynamic_update_index_in_dim(x, y, i, 1)
            for x, y in zip(xs, ys, strict=True)
        ]

    return lax.fori_loop(0, stacks[0].shape[1], step, stacks)


def _placed_like(like: jax.Array, x: jax.Array, *, is_free: bool = False) -> jax.Array:
    """Return an array that lies where another one does: on automatic axes only XLA's
    partitioner knows where.

    If it is free, what reads the result says nothing about how the first axis of `like`
    is divided.
    """
    from jax.experimental.custom_partitioning import (
        ArrayMapping,
        SdyShardingRule,
        custom_partitioning,
    )

    def partition(mesh, operands, result):
        where = operands[0].sharding
        return mesh, lambda like, x: x, where, (where, where)

    def axes(first: str) -> Any:
        return ArrayMapping(first, *[f"axis_{i}" for i in range(1, x.ndim)])

    second = custom_partitioning(lambda like, x: x)
    of_x, of_result = (
        (axes("like"), axes("result")) if is_free else (axes("x"), axes("like"))
    )
    rule = SdyShardingRule((axes("like"), of_x), (of_result,))
    second.def_partition(
        partition, sharding_rule=rule, decode_shardings=False
    )  # XLA may have some that JAX has not
    return second(like, x)
