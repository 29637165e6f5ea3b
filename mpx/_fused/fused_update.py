"""`fused_update`: compute the whole step of an optimizer in one kernel a leaf."""

import dataclasses
import functools
import importlib.util
from collections.abc import Iterable
from concurrent import futures
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.extend import core as jex_core
from jax.sharding import NamedSharding, PartitionSpec

from mpx import _errors, _trees
from mpx._dtypes import bytes_of
from mpx._fused.kernels import in_a_kernel
from mpx._fused.partition import Leaf, Partition, Var
from mpx._fused.schedule import run_partition
from mpx._jaxprs import Calls, flatten, is_literal, traced_flat
from mpx._shardings import as_in_auto, explicit_mesh, in_auto
from mpx._tables import Result, Table

_NOT_DIFFERENTIABLE = (
    "`fused_update` cannot be differentiated. To differentiate through a step of an"
    " optimizer, call `tx.update` and `optax.apply_updates`."
)
_Given = tuple[Any, Any, Any]  # gradients, state and parameters


def fused_update(
    tx: optax.GradientTransformation, *, interpret: bool = False
) -> "FusedUpdate":
    """Compute `tx.update` and `optax.apply_updates` together, on a GPU in one kernel
    for each large leaf.

    XLA computes the step of a leaf in one kernel by itself, unless moments are kept in
    8-bit blocks: it must know the scale of a block before its codes, so it reads
    gradients and moments twice. Here a kernel holds whole blocks and does the whole
    step on them, for any optimizer that treats each element by itself. XLA computes all
    other leaves: small ones without blocks, and leaves whose elements the optimizer
    mixes (sums along an axis, a matrix product, a sort). `plan` says which and why.
    State and parameters are written in place: donate them, and return them in the order
    of the arguments.

    Kernels are written in Pallas and compiled by Triton. Without a GPU this is
    `tx.update` and `optax.apply_updates`. With several devices, each runs kernels on
    its own shards, however arrays are sharded, with and without `zero1`.

    Args:
        tx: any Optax transformation, with the wrappers of mpx in it or around it.
        interpret: whether to run the kernels without a GPU, slowly, for tests. (Inside
            of `jax.shard_map` JAX interprets them with `check_vma=False` only.)

    Returns:
        A function `step(grads, opt_state, params, **extra_args)` that returns the new
        parameters and the new state. Results are bit-identical to the plain step,
        unless XLA rewrites one of the two programs: for example, `(m / a) / b` as `m /
        (a * b)`, or the order in which a norm is added up. A 16-bit parameter is
        written as its master says, also where no addition would reach that: infinite
        parameters, and those that were far from their masters. Call it inside
        `jax.jit`. It is not differentiable.

    Raises:
        TypeError: if the step is differentiated.

    Example:
        >>> moments = {"mu": Blockwise8bit(), "nu": Blockwise8bit()}
        >>> tx = mixed_precision(
        ...     low_precision_state(optax.adamw(1e-3), moments),
        ...     "params=bf16,compute=bf16",
        ... )
        >>> params = {
        ...     "w": jnp.ones((64, 256), jnp.bfloat16),
        ...     "b": jnp.ones(100, jnp.bfloat16),
        ... }
        >>> update = fused_update(tx)
        >>> step = jax.jit(
        ...     lambda params, opt_state, grads: update(grads, opt_state, params),
        ...     donate_argnums=(0, 1),
        ... )
        >>> params, opt_state = step(
        ...     params, tx.init(params), jax.tree.map(jnp.zeros_like, params)
        ... )
        >>> print(update.plan(params))
        leaf  elements  runs in  bytes an element  why
        b          100  XLA                        it is small and has no blocks
        w       16,384  a kernel            14.06
    """
    tx = _errors.with_checked_shapes(
        _errors.as_transformation(tx, "fused_update"), "fused_update"
    )
    return FusedUpdate(tx, bool(interpret))


@dataclasses.dataclass(frozen=True)
class FusedUpdate:
    """Computes the step of an optimizer; `fused_update` returns it."""

    tx: optax.GradientTransformationExtraArgs
    interpret: bool = False

    def __call__(
        self, grads: Any, opt_state: Any, params: Any, **extra_args: Any
    ) -> tuple[Any, Any]:
        """Return the new parameters and the new state."""
        step = self._step if explicit_mesh(params) is None else self._placed_by_xla
        return step(
            *_errors.not_differentiable(
                ((grads, opt_state, params), extra_args), _NOT_DIFFERENTIABLE
            )
        )

    def _step(self, given: _Given, extra_args: dict[str, Any]) -> tuple[Any, Any]:
        def by_kernels(*given):
            return _by_kernels(self.tx, given, extra_args, self.interpret)

        def by_xla(*given):
            return as_it_stands(self.tx, given, extra_args)

        return run_by(by_kernels, by_xla, self.interpret, *given)

    def _placed_by_xla(
        self, given: _Given, extra_args: dict[str, Any]
    ) -> tuple[Any, Any]:
        """Run under automatic axes: on explicit ones each view inside of a kernel would
        need a sharding.
        """
        arrays, put = _trees.partition_leaves(extra_args, _trees.is_array)
        plain = jax.eval_shape(
            lambda given: as_it_stands(self.tx, given, extra_args), given
        )
        mesh = explicit_mesh(given)
        # Constants, such as settings of a loss scale, have none.
        everywhere = NamedSharding(mesh, PartitionSpec())
        shardings = jax.tree.map(lambda x: x.sharding or everywhere, plain)
        return in_auto(
            lambda given, arrays: self._step(given, put(arrays)), mesh, shardings
        )(given, arrays)

    def plan(self, params: Any, grads: Any = None, **extra_args: Any) -> "FusedPlan":
        """Return where each leaf is computed.

        Args:
            params: the parameters, or their shapes.
            grads: the gradients, or their shapes; None: like the parameters.
            extra_args: other arguments that `tx.update` needs.
        """
        context = as_in_auto(params)
        params = _trees.shapes_of(params)
        grads = params if grads is None else _trees.shapes_of(grads)
        with context:
            opt_state = jax.eval_shape(self.tx.init, params)
            given = grads, opt_state, params
            program, _, _, calls = _traced(self.tx, given, extra_args)
        partition = Partition(program, calls)
        of_output = {v: leaf for leaf in partition.leaves for v in leaf.outputs}
        names = _trees.path_names(params)
        rows = []
        for (path, p), v in zip(
            _trees.leaves_by_path(params).items(), program.outvars, strict=False
        ):
            rows += [
                _row(names[path], p, of_output[sent], " on shards")
                for sent in partition.sent_to(v)
                if sent in of_output
            ]
            rows.append(_row(names[path], p, of_output.get(partition.resolved(v))))
        return FusedPlan(tuple(rows))


@dataclasses.dataclass(frozen=True)
class FusedRow:
    """Says where one leaf is computed.

    Under `zero1` a leaf has two rows. The first is the step: each device computes a
    shard of it, and sends that to the others. The second is the new parameter, which
    each device computes from all shards.

    Attributes:
        path: the path of the parameter.
        size: the number of its elements.
        runs: `"a kernel"` or `"XLA"`; followed by `" on shards"` if each device
            computes a shard of the leaf.
        moved_bytes: bytes that its kernel reads and writes; None for XLA.
        reason: why it is left to XLA; empty for a kernel.
    """

    path: str
    size: int
    runs: str
    moved_bytes: int | None
    reason: str


@dataclasses.dataclass(frozen=True)
class FusedPlan(Result):
    """Says where each leaf is computed; prints as a table."""

    rows: tuple[FusedRow, ...]

    def _parts(self) -> Iterable[Table | str]:
        header = ("leaf", "elements", "runs in", "bytes an element", "why")

        def moved(row):
            return (
                "" if row.moved_bytes is None else f"{row.moved_bytes / row.size:.2f}"
            )

        lines = [
            (row.path, f"{row.size:,}", row.runs, moved(row), row.reason)
            for row in self.rows
        ]
        return [Table("", (header, *lines), right=(1, 3))]


def _row(path: str, p: Any, leaf: Leaf | None, on: str = "") -> FusedRow:
    size = int(np.prod(p.shape))
    if leaf is None or leaf.part is None:
        reason = leaf.reason if leaf else "its elements are not computed one by one"
        return FusedRow(path, size, f"XLA{on}", None, reason)
    part = leaf.part
    moved = sum(
        bytes_of(v.aval.dtype, v.aval.size) for v in (*part.arrays, *part.outputs)
    )
    return FusedRow(path, size, f"a kernel{on}", moved, "")


def as_it_stands(tx: Any, given: _Given, extra_args: dict[str, Any]) -> tuple[Any, Any]:
    """Return the new parameters and the new state, as Optax computes them."""
    grads, opt_state, params = given
    updates, new_state = tx.update(grads, opt_state, params, **extra_args)
    return optax.apply_updates(params, updates), new_state


def _by_kernels(
    tx: Any, given: _Given, extra_args: dict[str, Any], interpret: bool
) -> tuple[Any, Any]:
    program, values, tree, calls = _traced(tx, given, extra_args)
    partition = Partition(program, calls)
    _, opt_state, params = given
    in_place = in_place_of(
        program,
        partition,
        len(jax.tree.leaves(params)),
        len(jax.tree.leaves(opt_state)),
    )
    return jax.tree.unflatten(
        tree, run_partition(program, values, partition, in_place, interpret)
    )


def _traced(
    tx: Any, given: _Given, extra_args: dict[str, Any]
) -> tuple[Any, Any, Any, Calls]:
    """Return the step without calls, the values of its inputs and constants, the
    structure of its results, and its calls.
    """
    return traced_flat(lambda *given: as_it_stands(tx, given, extra_args), given)


def in_place_of(
    program: jex_core.Jaxpr, partition: Partition, of_params: int, of_state: int
) -> dict[Var, Var]:
    """Return what may be written over what: new parameters over old ones, and a new
    state over the old one.
    """
    inputs = program.invars
    # In the order of the results: the new parameters, then the new state.
    old = (
        inputs[len(inputs) - of_params :]
        + inputs[len(inputs) - of_params - of_state : len(inputs) - of_params]
    )
    # A state may change its structure.
    pairs = zip(old, map(partition.unplaced, program.outvars), strict=False)

    def type_of(v):
        return (v.aval.shape, v.aval.dtype)

    return {
        v: new for v, new in pairs if not is_literal(new) and type_of(v) == type_of(new)
    }


# Where kernels run.


def run_by(by_kernels: Any, by_xla: Any, interpret: bool, *given: Any) -> Any:
    """Call one of two functions: with kernels on a GPU, or to interpret them."""
    if not may_run_kernels(interpret):
        return by_xla(*given)
    if interpret:
        return by_kernels(*given)
    # The platform of the step is not known yet: arrays on the CPU stay there on a
    # machine with a GPU.
    return lax.platform_dependent(*given, cuda=by_kernels, default=by_xla)


def may_run_kernels(interpret: bool) -> bool:
    """Return whether a step that is traced here may have kernels."""
    mesh = jax.sharding.get_abstract_mesh()
    if jax.sharding.AxisType.Explicit in mesh.axis_types:
        return False  # their types would have to say how each view is sharded
    if mesh.manual_axes and any(
        mesh.shape[name] > 1 for name in {*mesh.axis_names} - {*mesh.manual_axes}
    ):
        # inside of `jax.shard_map` JAX does not say how other axes divide the work of a
        # kernel
        return False
    if interpret:
        return True
    if jax.default_backend() == "gpu":
        return _kernels_work()
    # Without a GPU a step may be compiled for one that is elsewhere: `step_report(step,
    # ..., target="h200")`.
    return any(
        importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)
    )


@functools.cache
def _kernels_work() -> bool:
    """Return whether a small kernel compiles on this GPU and gives the right numbers;
    warn once if it does not.

    The answer is cached, so it must not depend on the first caller. A thread of its own
    has none of the caller's meshes, settings and traces.
    """
    try:
        with futures.ThreadPoolExecutor(1) as thread:
            thread.submit(_try_kernel).result()
    except Exception as error:  # whatever it is, it is no reason to stop a training run
        _errors.warn(
            "mpx: kernels of Pallas do not run on this GPU, so `fused_update` leaves"
            f" its work to XLA. {type(error).__name__}: {error}"
        )
        return False
    return True


def _try_kernel() -> None:
    def scaled(x):
        blocks = x.reshape(-1, 256)
        return (blocks / jnp.max(blocks, axis=1, keepdims=True)).reshape(x.shape)

    x = np.arange(1, 16 * 256 + 1, dtype=np.float32).reshape(16, 256)
    program, _, calls = flatten(jax.make_jaxpr(scaled)(x))
    part = Partition(program, calls).leaves[0].part
    assert part is not None
    (result,) = jax.jit(lambda x: in_a_kernel(part, {}, False, [x], []))(
        jax.device_put(x)
    )
    np.testing.assert_allclose(
        jax.device_get(result), x / x.max(axis=1, keepdims=True), rtol=1e-6
    )
