"""`each_matrix`: apply a function of one matrix to the matrices of divided leaves.

Where a leaf lies on automatic axes only XLA's partitioner knows. It calls back with the
places, and gets a program for one device: a loop in which devices exchange parts of
matrices, so that each has a whole one, compute, and send the parts of the result back.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from mpx import _errors, _trees
from mpx._autocast.transform import autocast
from mpx._fp8 import Fp8
from mpx._jaxprs import constants_of, open_jaxpr
from mpx._policy import Policy
from mpx._primitives import OfMatrices
from mpx._shardings import (
    are_several_in_sight,
    explicit_sharding,
    in_auto,
    names_at,
)

Function = Callable[[jax.Array], jax.Array]


def each_matrix(
    fun: Function,
    *,
    products: Policy | Fp8 | DTypeLike | None = None,
    sent: DTypeLike | None = None,
    axis: str | Sequence[str] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Apply a function of one matrix to each leaf, each matrix whole on one device.

    The last two axes of a leaf are a matrix, the axes before them count matrices. XLA
    alone multiplies divided matrices by parts, and gathers or adds up each product: for
    Muon 25 bytes a parameter. Here devices exchange parts, one round of matrices after
    the other: each gets a whole matrix, and sends the parts of the result back.
    Matrices that a device has whole (experts divided along experts, layers along
    layers) are not sent. Momentum and decay are other elements of the chain. They run
    where the parameters lie.

    It works on axes of any kind, eagerly and under `jax.jit`, not inside of
    `jax.shard_map`. If each device has all parameters, put `zero1` around.

    Args:
        fun: from `[m, n]` to `[m, n]`, such as `newton_schulz`. It sees one matrix.
        products: how `fun` multiplies, as in `autocast`: `"f16"`, `"bf16"`, `"bf16x3"`;
            None leaves it to `fun`. Norms, sums and polynomials stay in float32.
        sent: bfloat16 rounds what goes there and what comes back, once each, on one
            device too. None sends it as it is.
        axis: the axes of the mesh over which matrices are dealt out; None: all. Devices
            along other axes compute the same matrices.

    Returns:
        A transformation without a state, for `optax.chain`.

    Raises:
        TypeError: if `axis` is no name, or names; if `fun` is not a function.
        ValueError: if `sent` is another dtype. At `update`: if a leaf is no matrix, if
            `fun` returns another shape, if the mesh has no such axis, and inside of
            `jax.shard_map`.

    Example:
        >>> muon = optax.chain(
        ...     optax.trace(0.95, nesterov=True),
        ...     each_matrix(newton_schulz, products="bf16", sent="bf16"),
        ...     optax.scale(-0.02),
        ... )
        >>> params = {"layers": jnp.ones((3, 16, 32))}
        >>> updates, state = muon.update(params, muon.init(params), params)
        >>> updates["layers"].dtype
        dtype('float32')

    References:
        Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks";
        Liu et al. 2025, "Muon is Scalable for LLM Training" (arXiv 2502.16982), for its
        distribution.
    """
    if not callable(fun):
        raise TypeError(f"`each_matrix`: `fun` must be a function, but got {fun!r}.")
    if sent is not None:
        allowed = (jnp.dtype(jnp.bfloat16), np.dtype(np.float32))
        sent = _errors.require_one_of(allowed, sent, "`each_matrix`: `sent`")
    names = (axis,) if isinstance(axis, str) else axis
    if not (
        names is None
        or (isinstance(names, Sequence) and all(isinstance(x, str) for x in names))
    ):
        raise TypeError(
            "`each_matrix`: `axis` must be a name of a mesh's axis, or several, but got"
            f" {axis!r}."
        )
    multiply = fun if products is None else autocast(fun, products)

    def update_fn(updates, state, params=None, **extra_args):
        del extra_args
        leaves = _trees.leaves_by_path(updates)
        _require_matrices(leaves, updates)
        of_path = leaves | _trees.leaves_by_path(params)
        like = [of_path[path] for path in leaves]
        _require_axes(like, names)
        placed = [explicit_sharding(x) for x in like]
        run = _Matrices(multiply, names, sent).run
        meshes = [sharding.mesh for sharding in placed if sharding]
        if meshes:
            everywhere = NamedSharding(meshes[0], PartitionSpec())
            run = in_auto(run, meshes[0], [x or everywhere for x in placed])
        results = run(like, [jnp.asarray(x) for x in leaves.values()])
        return jax.tree.unflatten(jax.tree.structure(updates), results), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update_fn)


def _require_matrices(leaves: Mapping[Any, Any], updates: Any) -> None:
    """Raise unless all leaves have two axes or more."""
    wrong = {
        path: str(list(np.shape(x))) for path, x in leaves.items() if np.ndim(x) < 2
    }
    remedy = "Give them to another rule, by `optax.partition`."
    _errors.refuse(wrong, "`each_matrix`: leaves are no matrices", remedy, updates)


def _require_axes(arrays: Sequence[Any], names: Sequence[str] | None) -> None:
    """Raise inside of `jax.shard_map`, or if no mesh that is known has the axes."""
    now = jax.sharding.get_abstract_mesh()
    if now.manual_axes:
        raise ValueError(
            "`each_matrix`: this is inside `jax.shard_map` over"
            f" {', '.join(map(repr, now.manual_axes))}, where a device sees its own"
            " part only. Call `update` outside of it, under `jax.jit`."
        )
    of_types = [jax.typeof(x).sharding.mesh for x in arrays if _trees.is_array(x)]
    mesh = next((mesh for mesh in (now, *of_types) if not mesh.empty), now)
    if not mesh.empty and not {*(names or ())} <= {*mesh.axis_names}:
        raise ValueError(
            f"`each_matrix`: the mesh has the axes {mesh.axis_names}, but `axis` is"
            f" {names}."
        )


class _Way(NamedTuple):
    """Says how the devices of a mesh come to whole matrices of a leaf, and back."""

    parts: tuple[tuple[int, str, int, bool], ...] = ()
    # of each axis of the mesh that divides a matrix: which axis of a stack, its name,
    # its size, and whether matrices are dealt out along it
    copies: tuple[tuple[str, int], ...] = ()  # names and sizes, dealt out too

    @property
    def at_once(self) -> int:
        """Return how many matrices the devices compute in one round."""
        dealt = [size for _, _, size, is_dealt in self.parts if is_dealt]
        return math.prod(dealt) * math.prod(size for _, size in self.copies)

    def there(self, stack: jax.Array) -> jax.Array:
        """Return this device's matrix of a round: `[at_once, m', n'] -> [m, n]`."""
        for name, size in self.copies:
            count = len(stack) // size
            start = lax.axis_index(name) * count
            stack = lax.dynamic_slice_in_dim(stack, start, count)
        for i, name, _, is_dealt in self.parts:
            if is_dealt:
                stack = lax.all_to_all(stack, name, 0, i, tiled=True)
            else:
                stack = lax.all_gather(stack, name, axis=i, tiled=True)
        return stack[0]

    def back(self, matrix: jax.Array) -> jax.Array:
        """Return this device's part of a round: `[m, n] -> [at_once, m', n']`."""
        stack = matrix[None]
        for i, name, size, is_dealt in reversed(self.parts):
            if is_dealt:
                stack = lax.all_to_all(stack, name, i, 0, tiled=True)
            else:
                count = stack.shape[i] // size
                start = lax.axis_index(name) * count
                stack = lax.dynamic_slice_in_dim(stack, start, count, i)
        for name, _ in reversed(self.copies):
            stack = lax.all_gather(stack, name, tiled=True)
        return stack


class _Matrices(NamedTuple):
    """Computes a function of the matrices of leaves."""

    fun: Function
    names: Sequence[str] | None  # the axes along which matrices are dealt out
    sent: Any  # the dtype in which they are sent, or None

    def run(self, like: Sequence[Any], leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the results for leaves, where the arrays that they are like lie.

        Leaves that share no round are operations of their own, so that the step of each
        may run in a loop over its layers.
        """
        together = [i for i, x in enumerate(leaves) if _may_share_rounds(x)]
        alone = [[i] for i in range(len(leaves)) if i not in together]
        results: dict[int, jax.Array] = {}
        for some in filter(None, (together, *alone)):
            given = [like[i] for i in some], [leaves[i] for i in some]
            results |= zip(some, self._run_together(*given), strict=True)
        return [results[i] for i in range(len(leaves))]

    def _run_together(
        self, like: Sequence[Any], leaves: Sequence[jax.Array]
    ) -> list[jax.Array]:
        from jax.experimental.custom_partitioning import (
            ArrayMapping,
            SdyShardingRule,
            custom_partitioning,
        )

        # What `fun` closes over is an argument too: the partitioner takes no constants.
        programs = [self.program_of(x) for x in leaves]
        closed_over = [constants_of(program) for program in programs]

        def of_device(ways, leaves, closed_over):
            funs = [
                jaxpr_as_fun(ClosedJaxpr(open_jaxpr(program), values))
                for program, values in zip(programs, closed_over, strict=True)
            ]
            return self.of_device(leaves, funs, ways)

        def on_one_device(like, leaves, closed_over):
            return of_device([_Way()] * len(leaves), leaves, closed_over)

        def partition(mesh, operands, results):
            where = [_known(x.sharding, mesh, len(x.shape)) for x in operands[0]]
            ways = [self.way_of(x, mesh) for x in where]
            everywhere = NamedSharding(mesh, PartitionSpec())
            places = where, where, jax.tree.map(lambda _: everywhere, closed_over)
            given = [
                jax.ShapeDtypeStruct(at.shard_shape(x.shape), x.dtype)
                for x, at in zip(leaves, where, strict=True)
            ]
            # Where a compilation runs, the axes of a mesh may be explicit. Then this
            # traced program is one call, which does not look at types of axes.
            with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
                call = jax.make_jaxpr(
                    jax.jit(functools.partial(of_device, ways)),
                    axis_env=list(mesh.shape.items()),
                )(given, closed_over)

            def run(like, *given):
                return jaxpr_as_fun(call)(*jax.tree.leaves(given))

            return mesh, run, where, places

        # A result lies where its parameter does. Nothing else is said of places.
        count = itertools.count()

        def axes_of(x):
            return ArrayMapping(*[f"axis_{next(count)}" for _ in np.shape(x)])

        axes = tuple(map(axes_of, leaves))
        others = tuple(map(axes_of, jax.tree.leaves(closed_over)))
        run = custom_partitioning(on_one_device)
        run.def_partition(
            OfMatrices(partition, lambda x: of_device([_Way()], [x], [[]])[0]),
            sharding_rule=SdyShardingRule((*axes, *axes, *others), axes),
            # XLA may have places that JAX has no name for: `_known`.
            decode_shardings=False,
        )
        return run(list(like), list(leaves), closed_over)

    def program_of(self, leaf: jax.Array) -> Any:
        """Return the program of `fun` for a matrix of a leaf."""
        one = jax.ShapeDtypeStruct(leaf.shape[-2:], leaf.dtype)
        program = jax.make_jaxpr(self.fun)(one)
        types = [(x.shape, x.dtype) for x in program.out_avals]
        if types != [(one.shape, one.dtype)]:
            raise ValueError(
                f"`each_matrix`: `fun` must return {one.dtype}{list(one.shape)} for"
                f" such a matrix, but returned {types}."
            )
        return program

    def way_of(self, sharding: NamedSharding, mesh: Mesh) -> _Way:
        """Return the way to whole matrices of a leaf that is divided so."""
        spec = sharding.spec
        names = [names_at(spec, i) for i in range(len(spec))]
        of_stack = {name for each in names[:-2] for name in each}
        is_dealt = {
            name: self.names is None or name in self.names for name in mesh.shape
        }
        # The last name of an axis divides it most finely, so it goes first.
        parts = [
            (i, name, mesh.shape[name], is_dealt[name])
            for i, each in ((2, names[-1]), (1, names[-2]))
            for name in reversed(each)
        ]
        of_matrix = {name for _, name, _, _ in parts}
        copies = [
            (name, size)
            for name, size in mesh.shape.items()
            if size > 1 and is_dealt[name] and name not in of_stack | of_matrix
        ]
        return _Way(tuple(parts), tuple(copies))

    def of_device(
        self, leaves: Sequence[jax.Array], funs: Sequence[Any], ways: Sequence[_Way]
    ) -> list[jax.Array]:
        """Return the results for one device's parts of leaves.

        Whole rounds of a leaf run in place. What is left of leaves alike, single
        matrices say, runs together: copies of the last matrix fill the last round.
        """
        stacks = [self._narrowed(x).reshape(-1, *x.shape[-2:]) for x in leaves]
        done: list[list[jax.Array]] = [[] for _ in leaves]
        rest: dict[Any, list[int]] = {}
        for k, (stack, way) in enumerate(zip(stacks, ways, strict=True)):
            end = len(stack) - len(stack) % way.at_once
            if end:
                fun = _as(leaves[k].dtype, funs[k])
                done[k].append(_in_rounds(fun, stack[:end], way))
            if end < len(stack):
                kind = stack.shape[1:], leaves[k].dtype, way
                rest.setdefault(kind, []).append(k)
                stacks[k] = stack[end:]
        for (_, dtype, way), alike in rest.items():
            ends = np.cumsum([len(stacks[k]) for k in alike])
            last = stacks[alike[-1]][-1:]
            fill = jnp.broadcast_to(last, (-ends[-1] % way.at_once, *last.shape[1:]))
            stack = jnp.concatenate([*(stacks[k] for k in alike), fill])
            stack = _in_rounds(_as(dtype, funs[alike[0]]), stack, way)
            parts = jnp.split(stack[: ends[-1]], ends[:-1])
            for k, part in zip(alike, parts, strict=True):
                done[k].append(part)
        return [
            jnp.concatenate(parts).reshape(x.shape).astype(x.dtype)
            for parts, x in zip(done, leaves, strict=True)
        ]

    def _narrowed(self, x: jax.Array) -> jax.Array:
        """Round an array once, for both ways."""
        is_wider = self.sent is not None and x.dtype.itemsize > self.sent.itemsize
        return x.astype(self.sent) if is_wider else x


def _may_share_rounds(x: jax.Array) -> bool:
    """Return whether devices may compute matrices of this leaf beside another leaf's.

    Of what is stacked twice, such as experts in layers, the rest of a last round is
    little.
    """
    return x.ndim <= 3 and are_several_in_sight()


def _as(dtype: Any, program: Any) -> Function:
    """Return a function that computes in a dtype, and returns the dtype it is given."""

    def fun(x: jax.Array) -> jax.Array:
        (y,) = program(x.astype(dtype))
        return y.astype(x.dtype)

    return fun


def _in_rounds(fun: Function, stack: jax.Array, way: _Way) -> jax.Array:
    """Map a function over a stack in place, some matrices in each round."""

    def step(i, stack):
        start = i * way.at_once
        some = lax.dynamic_slice_in_dim(stack, start, way.at_once)
        some = way.back(fun(way.there(some)))
        return lax.dynamic_update_slice_in_dim(stack, some, start, 0)

    return lax.fori_loop(0, len(stack) // way.at_once, step, stack)


def _known(sharding: Any, mesh: Mesh, ndim: int) -> NamedSharding:
    """Return a sharding of XLA by names of a mesh: replicated if it has none."""
    everywhere = NamedSharding(mesh, PartitionSpec(*[None] * ndim))
    if sharding is None:
        return everywhere
    sizes, names = list(mesh.shape.values()), list(mesh.shape)
    # Of an array with as many numbers along each axis as there are devices, what each
    # device has tells which axes of the mesh divide which axis.
    places = sharding.devices_indices_map((mesh.size,) * ndim)
    starts = np.array(
        [[each.start or 0 for each in places[device]] for device in mesh.devices.flat]
    ).reshape(*sizes, ndim)
    entries: list[Any] = []
    for i in range(ndim):
        steps = {
            name: int(starts[..., i].take(1, axis=k).flat[0])
            for k, name in enumerate(names)
            if sizes[k] > 1
        }
        dividing = sorted([x for x in steps if steps[x]], key=lambda x: -steps[x])
        entries.append(tuple(dividing) or None)
    found = NamedSharding(mesh, PartitionSpec(*entries))
    return found if found.is_equivalent_to(sharding, ndim) else everywhere
