"""`train_step`: loss, gradients and update in one program that keeps no tree of
gradients.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from mpx import _errors, _trees
from mpx._dtypes import bytes_of
from mpx._fused.fused_update import (
    FusedUpdate,
    as_it_stands,
    fused_update,
    in_place_of,
    run_by,
)
from mpx._fused.partition import Partition
from mpx._fused.released import Loop, Released, Search, Stack, bound, find_stack
from mpx._fused.schedule import needed_equations, run_partition, with_loops_late
from mpx._gradients import value_and_grad
from mpx._jaxprs import Graph, is_literal, run_equations, traced_flat
from mpx._shardings import as_in_auto, explicit_mesh, in_auto
from mpx._tables import Result, Table, shown, unit_for
from mpx._transforms.loss_scaling import get_loss_scale

_NOT_DIFFERENTIABLE = (
    "`train_step` cannot be differentiated. To differentiate through a training step,"
    " call `jax.value_and_grad`, `tx.update` and `optax.apply_updates`."
)


def train_step(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    *,
    has_aux: bool = False,
    argnums: int = 0,
    grad_dtype: DTypeLike | Literal["as_computed"] | None = "as_computed",
    recompute_gradients: bool = False,
    interpret: bool = False,
) -> "TrainStep":
    """Compute the loss, its gradients and the step of an optimizer, without ever
    holding the gradients of all layers.

    It is `value_and_grad` with the loss scale of the state, and `fused_update`. Where
    layers are a `jax.lax.scan`, its backward pass makes the gradients of one layer
    after another. If nothing else needs them together, the step of a layer runs there:
    parameters and state are written in place, and a gradient lives as long as its
    layer. `plan` says for which leaves, and why not for others. Layers that are not in
    a loop need none of this: XLA frees each gradient when it is used.

    Gradients of all leaves are kept for what needs them together: clipping by the
    global norm (without `recompute_gradients`), a loss scale of the optimizer (a step
    is skipped as a whole), accumulation. So are those of leaves that the optimizer does
    not treat element by element, in blocks inside of a layer, or as matrices that a
    device is known to have whole.

    Args:
        loss_fn: a function of parameters and other arguments that returns a scalar
            loss, or `(loss, aux)` if `has_aux`; one of `autocast`, or any other.
        tx: any Optax transformation that needs no other arguments, such as the loss.
        has_aux: whether `loss_fn` returns a pair.
        argnums: the number of the argument of `loss_fn` that the parameters are.
        grad_dtype: as in `value_and_grad`.
        recompute_gradients: if a step needs a sum over all gradients first, such as the
            norm of `optax.clip_by_global_norm`, run the loops of the backward pass
            twice: once for the sum, once for the steps. What prints there prints twice.
            Norms are added up layer by layer, so their last bits may differ. `plan`
            names the leaves that are computed twice; without such a leaf it changes
            nothing.
        interpret: whether to run kernels without a GPU, as in `fused_update`.

    Returns:
        A function `step(params, opt_state, *batch)` that returns the new parameters,
        the new state, the loss, and what else `loss_fn` returned. Call it inside
        `jax.jit` and donate parameters and state. Results have the bits of
        `value_and_grad` and `fused_update` in the same program, unless XLA contracts
        products and sums otherwise, or rewrites `(m / a) / b` as `m / (a * b)` in one
        of the two. It is not differentiable.

    Raises:
        TypeError: if `argnums` is not one number, or the step is differentiated.

    Example:
        >>> def loss_fn(params, x):
        ...     layer = lambda x, w: (jnp.tanh(x @ w), None)
        ...     return jax.lax.scan(layer, x, params["layers"])[0].sum()
        >>> params = {"layers": jnp.ones((3, 4, 4))}
        >>> tx = optax.adamw(1e-3)
        >>> step = train_step(loss_fn, tx)
        >>> train = jax.jit(step, donate_argnums=(0, 1))
        >>> print(step.plan(params, tx.init(params), jnp.ones((2, 4))))
        leaf    gradient, bytes  kept
        layers              192  never whole
        >>> params, opt_state, loss = train(params, tx.init(params), jnp.ones((2, 4)))

    References:
        Lv et al. 2023, "Full Parameter Fine-tuning for Large Language Models with
        Limited Resources" (arXiv 2306.09782), for the update inside of the backward
        pass.
    """
    if not _errors.is_integer(argnums) or argnums < 0:
        raise TypeError(
            f"`train_step`: `argnums` is {argnums!r}, but it must be the number of one"
            " argument, from 0."
        )
    tx = _errors.as_transformation(tx, "train_step")
    update = fused_update(tx, interpret=interpret)
    return TrainStep(
        loss_fn, update, has_aux, argnums, grad_dtype, bool(recompute_gradients)
    )


@dataclasses.dataclass(frozen=True)
class TrainStep:
    """Computes a training step; `train_step` returns it."""

    loss_fn: Callable[..., Any]
    update: FusedUpdate
    has_aux: bool
    argnums: int
    grad_dtype: Any
    recompute_gradients: bool

    def __call__(self, params: Any, opt_state: Any, *batch: Any) -> tuple[Any, ...]:
        """Return the new parameters, the new state, the loss, and what else the
        function returned.
        """
        given = _errors.not_differentiable(
            (params, opt_state, batch), _NOT_DIFFERENTIABLE
        )
        return _Programs(self, *given).run()

    def plan(self, params: Any, opt_state: Any, *batch: Any) -> "TrainPlan":
        """Return for each leaf whether its gradient is ever whole.

        Args:
            params: the parameters, or their shapes.
            opt_state: the state of the optimizer, or its shapes.
            batch: what else the loss is computed from, or its shapes.
        """
        programs = _Programs(self, params, opt_state, batch)
        rows = [
            TrainRow(
                path,
                bytes_of(v.aval.dtype, v.aval.size),
                "" if isinstance(x, Released) else x,
                isinstance(x, Released) and x.is_late,
            )
            for path, x, v in zip(
                _trees.path_names(params).values(),
                programs.released,
                programs.gradients,
                strict=True,
            )
        ]
        return TrainPlan(tuple(rows))


@dataclasses.dataclass(frozen=True)
class TrainRow:
    """Says what becomes of the gradient of one leaf.

    Attributes:
        path: the path of the parameter.
        bytes: the size of its gradient.
        reason: why the gradient is ever whole; empty if it is not.
        is_recomputed: whether it is computed twice, first for a sum.
    """

    path: str
    bytes: int
    reason: str
    is_recomputed: bool


@dataclasses.dataclass(frozen=True)
class TrainPlan(Result):
    """Says what becomes of each gradient; prints as a table."""

    rows: tuple[TrainRow, ...]

    def _parts(self) -> Iterable[Table | str]:
        unit = unit_for([row.bytes for row in self.rows])
        never = {False: "never whole", True: "never whole, computed twice"}
        lines = [
            (row.path, shown(row.bytes, unit), row.reason or never[row.is_recomputed])
            for row in self.rows
        ]
        header = ("leaf", f"gradient, {unit[0]}", "kept")
        return [Table("", (header, *lines), right=(1,))]


class _Programs:
    """The programs of gradients and update, and which leaves are released."""

    def __init__(self, step: TrainStep, params: Any, opt_state: Any, batch: Any):
        self._interpret = step.update.interpret
        arrays, put = _trees.partition_leaves(batch, _trees.is_array)
        leaves = jax.tree.leaves(params), jax.tree.leaves(opt_state)
        counts = self._counts = tuple(map(len, leaves))
        structure = jax.tree.structure(params)
        self._mesh = explicit_mesh(params)

        def gradients(params, opt_state, arrays):
            args = list(put(arrays))
            args.insert(step.argnums, params)
            value, grads = value_and_grad(
                step.loss_fn,
                get_loss_scale(opt_state),
                argnums=step.argnums,
                has_aux=step.has_aux,
                grad_dtype=step.grad_dtype,
            )(*args)
            return jax.tree.leaves(grads), value

        program, self._of_grads, self._results, _ = traced_flat(
            gradients, (params, opt_state, arrays)
        )
        live = needed_equations(program, program.outvars, {}, with_prints=True)
        live = with_loops_late(live)
        self._program = program.replace(eqns=live)
        graph = Graph(self._program)
        self.gradients: list[Any] = program.outvars[: counts[0]]
        self._stacks = [find_stack(graph, v) for v in self.gradients]
        # What gradients are made of in the program of the update.
        self._sources = [
            x.result if isinstance(x, Stack) else v
            for x, v in zip(self._stacks, self.gradients, strict=True)
        ]
        found = [x for x in self._stacks if isinstance(x, Stack)]
        self._factors = list(dict.fromkeys(v for x in found for v in x.factors))

        def update(sources, factors, opt_state, params):
            grads = self._finished(sources, factors)
            grads = jax.tree.unflatten(structure, grads)
            return as_it_stands(step.update.tx, (grads, opt_state, params), {})

        made = self._sources, self._factors
        state = opt_state, params
        # With their shardings, of explicit axes.
        typed = [[_shape_of(v) for v in vs] for vs in made]
        self._shapes = lambda: jax.tree.leaves(jax.eval_shape(update, *typed, *state))
        given = (*typed, *state)
        with as_in_auto(params):
            self._update, self._of_update, self._tree, calls = traced_flat(
                update, given if self._mesh is None else jax.tree.map(_unplaced, given)
            )
        self._partition = Partition(self._update, calls)
        self._in_place = in_place_of(self._update, self._partition, *counts)
        inputs = self._update.invars
        search = Search(
            graph,
            self._update,
            self._partition,
            self._sources,
            step.recompute_gradients,
        )
        self.released = [
            search.released(*pair) for pair in zip(self._stacks, inputs, strict=False)
        ]
        self._of_update |= zip(
            inputs[-sum(counts) :], leaves[1] + leaves[0], strict=True
        )
        for v in inputs[: -sum(counts)]:
            del self._of_update[v]
        of_params = dict(zip(program.invars, inputs[-counts[0] :], strict=False))
        self._loops = {
            id(eqn): Loop(graph, leaves, self._in_place, of_params)
            for eqn in live
            if (leaves := [x for x in self._gone if x.stack.loop is eqn])
        }

    @property
    def _gone(self) -> list[Released]:
        return [x for x in self.released if isinstance(x, Released)]

    def _finished(self, sources: list[Any], factors: list[Any]) -> list[Any]:
        """Return gradients, from what they are made of."""
        grads = []
        for source, v, x in zip(sources, self.gradients, self._stacks, strict=True):
            if isinstance(x, Stack):
                values = dict(zip(self._factors, factors, strict=True))
                values[x.result] = source
                for eqn in x.tail:
                    reads: list[Any] = eqn.invars
                    read = [u.val if is_literal(u) else values[u] for u in reads]
                    values[eqn.outvars[0]] = bound(eqn, *read)
                source = values[v]
            grads.append(source)
        return grads

    def run(self) -> tuple[Any, ...]:
        """Return the results of the step."""
        of_grads, of_update = self._of_grads, self._of_update
        tails = {id(eqn) for x in self._gone for eqn in x.stack.tail}
        waiting: list[Any] = []

        def value(v):
            return v.val if is_literal(v) else of_grads[v]

        def catch_up():
            run_equations(self._program, waiting, of_grads)
            waiting.clear()
            given = [*self._sources, *self._factors]
            pairs = zip(self._update.invars, given, strict=False)
            of_update.update(
                (v, value(x)) for v, x in pairs if is_literal(x) or x in of_grads
            )

        late: list[Loop] = []
        options = of_grads, of_update, self._interpret, self._placed_like
        for eqn in self._program.eqns:
            if loop := self._loops.get(id(eqn)):
                catch_up()
                if loop.is_late:
                    late.append(loop)
                else:
                    self._compute(loop.needed)
                loop.run(*options, has_steps=not loop.is_late)
            elif id(eqn) not in tails:
                waiting.append(eqn)
        catch_up()
        for loop in late:
            self._compute(loop.needed)
            loop.run(*options)
        new = jax.tree.unflatten(self._tree, self._rest())
        rest = map(value, self._program.outvars[self._counts[0] :])
        _, outcome = jax.tree.unflatten(self._results, [*self.gradients, *rest])
        return *new, *(outcome if isinstance(outcome, tuple) else (outcome,))

    def _compute(self, wanted: Iterable[Any]) -> None:
        """Add values of the update that depend on no gradient."""
        missing = [v for v in dict.fromkeys(wanted) if v not in self._of_update]
        eqns = needed_equations(self._update, missing, self._of_update)

        def compute(values):
            values = dict(zip(known, values, strict=True))
            run_equations(self._update, eqns, values)
            return [values[v] for v in missing]

        known = list(self._of_update)
        run = self._placed(compute, [PartitionSpec()] * len(missing))
        values = [self._of_update[v] for v in known]
        self._of_update |= zip(missing, run(values), strict=True)

    def _rest(self) -> list[Any]:
        """Return the results of the update, from gradients and what loops computed."""
        known = list(self._of_update)

        def compute(has_kernels, values):
            return run_partition(
                self._update,
                dict(zip(known, values, strict=True)),
                self._partition,
                self._in_place,
                self._interpret,
                has_kernels,
            )

        by_kernels, by_xla = (functools.partial(compute, x) for x in (True, False))
        run = functools.partial(run_by, by_kernels, by_xla, self._interpret)
        shapes = [] if self._mesh is None else self._shapes()
        specs = [x.sharding.spec if x.sharding else PartitionSpec() for x in shapes]
        return self._placed(run, specs)([self._of_update[v] for v in known])

    def _placed_like(
        self, function: Callable[..., Any], stacks: Sequence[Any]
    ) -> Callable[..., Any]:
        """Let XLA place the arrays inside a function, whose results lie like others."""
        if self._mesh is None:
            return function
        return self._placed(function, [jax.typeof(x).sharding.spec for x in stacks])

    def _placed(
        self, function: Callable[..., Any], specs: Sequence[PartitionSpec]
    ) -> Callable[..., Any]:
        if self._mesh is None:
            return function
        shardings = [NamedSharding(self._mesh, spec) for spec in specs]
        return in_auto(function, self._mesh, shardings)


def _shape_of(v: Any) -> jax.ShapeDtypeStruct:
    kind = v.aval
    return jax.ShapeDtypeStruct(
        kind.shape,
        kind.dtype,
        sharding=None if kind.sharding.mesh.empty else kind.sharding,
        weak_type=kind.weak_type,
        manual_axis_type=kind.manual_axis_type,
    )


def _unplaced(x: Any) -> Any:
    if not _trees.is_array(x):
        return x
    is_weak = getattr(x, "weak_type", False)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=is_weak)
