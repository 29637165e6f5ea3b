"""`check_chain`: is anything changed after a wrapper has chosen what parameters shall be?

The transformations that round for a 16-bit parameter leave their name on the update in the traced program
(`_writeback.landing_update`). Here the program of one update is traced, not run, and each name is followed to the
result: on the way it may be selected against another value (a skipped step), multiplied by a boolean (`MultiSteps`)
or moved about, and nothing else.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mpx import _errors, _trees
from mpx._stored.leaves import leaves_of
from mpx._stored.roles import fields_of
from mpx._transforms.params_ema import ParamsEmaState
from mpx._transforms.writeback import MARK, SENT

# Primitives that move numbers about and change none.
_MOVES = frozenset({
    "broadcast_in_dim", "concatenate", "copy", "copy_p", "device_put", "dynamic_slice", "expand_dims", "gather", "name",
    "optimization_barrier", "pcast", "pvary", "reshape", "sharding_constraint", "slice", "split", "squeeze",
    "stop_gradient", "transpose",
})  # fmt: skip
_CONVERSIONS = _MOVES | {"convert_element_type"}


def check_chain(tx: optax.GradientTransformation, params: Any = None, **extra_args: Any) -> None:
    """Raises if a chain changes updates after the point where nothing may change them any more.

    `master_weights`, `kahan_summation` and `stochastic_rounding` emit updates that land on a number which they have
    chosen, and remember what that number lacks. Clipping or scaling such an update puts parameters out of step with
    what is remembered, and no error follows. Call this once, where the optimizer is made; it only traces.

    What it does not see: clipping in front of `loss_scaling`, which clips scaled gradients; and a bare Optax rule in
    front of `kahan_summation`, which keeps moments of 16-bit parameters in 16 bits, because one may want that.

    Args:
        tx: the whole transformation.
        params: parameters, or their shapes, if `tx` takes only certain trees (`optax.partition` with labels). A small
            bfloat16 tree if None.
        extra_args: what `tx.update` needs besides, such as `value`; arrays or shapes.

    Raises:
        TypeError: if `tx` is not a transformation.
        ValueError: if an element of a chain changes the updates after one of the three; if one of them follows
            another, or stands inside `upcast` or `master_weights`, where it does nothing (these say so themselves); if
            `master_weights` stands
            in a chain beside a rule that keeps its state in 16 bits, which it should wrap; or if `params_ema` is not
            the last element of its chain, or stands outside of `master_weights` and averages rounded parameters.

    Example:
        >>> check_chain(optax.chain(optax.clip(1.0), master_weights(optax.adam(1e-3))))
        >>> check_chain(optax.chain(kahan_summation(), optax.scale(-1e-3)))
        Traceback (most recent call last):
        ...
        ValueError: `check_chain`: the update of 'bias' was final when `kahan_summation` had rounded it, but `mul` \
changes it after that (2 of 2 such leaves). Nothing may change updates after `kahan_summation`: make it the last \
element of the chain.
    """
    tx = _errors.as_transformation(tx, "check_chain")
    if params is None:
        params = {
            "bias": jax.ShapeDtypeStruct((8,), jnp.bfloat16),
            "kernel": jax.ShapeDtypeStruct((8, 8), jnp.bfloat16),
        }
    trained = params.fast if isinstance(params, optax.LookaheadParams) else params
    grads = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, np.float32) if _trees.is_floating(p) else p, trained)
    state = jax.eval_shape(tx.init, params)
    traced, shapes = jax.make_jaxpr(
        lambda grads, state, params, extra: tx.update(grads, state, params, **extra), return_shape=True
    )(grads, state, params, extra_args)
    updates = _trees.leaves_by_path(shapes[0])
    histories = _Follower().outputs(traced.jaxpr, [None] * len(traced.jaxpr.invars))[: len(updates)]
    changed = {
        path: history for path, history in zip(updates, histories, strict=True) if history and history.changed_by
    }
    if changed:
        path, history = next(iter(changed.items()))
        raise ValueError(
            f"`check_chain`: the update of {_trees.path_string(path)!r} was final when `{history.author}` had rounded "
            f"it, but `{history.changed_by}` changes it after that ({len(changed)} of {len(_marked(histories))} such "
            f"leaves). {_advice(history.author)}"
        )
    _require_wide_state_before_masters(state)
    _require_averages_of_masters(state)
    _require_averages_at_the_end(state)


@dataclasses.dataclass(frozen=True)
class _History:
    """What has happened to an update since a transformation made it final."""

    author: str
    changed_by: str | None = None
    is_sent: bool = False  # as the number where it lands, not as an update, until it arrives: see `mpx.zero1`


_ZERO = _History("nobody")  # of a value that is zero everywhere


def _marked(histories: Sequence[_History | None]) -> list[_History]:
    """The histories of values that somebody made final."""
    return [history for history in histories if history and history is not _ZERO]


class _Follower:
    """Follows the histories of values through a jaxpr, and which values are zero or booleans in disguise."""

    def __init__(self) -> None:
        self.known: dict[Any, _History] = {}
        self.masks: set[Any] = set()

    def outputs(self, jaxpr: Any, inputs: Sequence[_History | None]) -> list[_History | None]:
        """The histories of a jaxpr's results, from those of its arguments."""
        for var, history in zip(jaxpr.invars, inputs, strict=True):
            self.note(var, history, is_mask=False)
        for eqn in jaxpr.eqns:
            is_mask = eqn.primitive.name in _CONVERSIONS and self.is_mask(eqn.invars[0])
            for var, history in zip(eqn.outvars, self.of_equation(eqn), strict=True):
                self.note(var, history, is_mask)
        return [self.of(var) for var in jaxpr.outvars]

    def note(self, var: Any, history: _History | None, is_mask: bool) -> None:
        """Remembers what is known of a value; of an earlier run of the same program nothing may be left."""
        self.known.pop(var, None)
        self.masks.discard(var)
        if history:
            self.known[var] = history
        if is_mask:
            self.masks.add(var)

    def of(self, var: Any) -> _History | None:
        if hasattr(var, "val"):  # a literal
            return _ZERO if np.ndim(var.val) == 0 and var.val == 0 else None
        return self.known.get(var)

    def is_mask(self, var: Any) -> bool:
        return var.aval.dtype == np.bool_ or (not hasattr(var, "val") and var in self.masks)

    def of_equation(self, eqn: Any) -> list[_History | None]:
        name = eqn.primitive.name
        inputs = [self.of(var) for var in eqn.invars]
        if name == "name" and eqn.params["name"].startswith(MARK):
            return [_named(eqn.params["name"].removeprefix(MARK), _marked(inputs))]
        programs = _sub_programs(eqn.params)
        if programs:
            arguments = inputs[len(inputs) - len(programs[0].invars) :]  # a conditional's first input is its index
            return [
                _one_of(results, name) for results in zip(*(self.outputs(p, arguments) for p in programs), strict=True)
            ]
        if name == "select_n":
            return [_one_of(inputs[1:], name)]
        if name in _MOVES or (name == "convert_element_type" and not _narrows(eqn)):
            return [_together(inputs)] * len(eqn.outvars)
        if name == "mul" and any(self.is_mask(var) for var in eqn.invars):
            return [_together(inputs)]
        changed = [_changed(history, name) for history in _marked(inputs)]
        return [changed[0] if changed else None] * len(eqn.outvars)


def _named(author: str, earlier: Sequence[_History]) -> _History:
    """The history of an update on which a transformation leaves its name."""
    if author == SENT:
        return dataclasses.replace(earlier[0], is_sent=True) if earlier else _History(author, is_sent=True)
    if not earlier:
        return _History(author)
    if earlier[0].is_sent:
        return _History(author if earlier[0].author == SENT else earlier[0].author, earlier[0].changed_by)
    return _History(earlier[0].author, author)


def _changed(history: _History, by: str) -> _History:
    return history if history.is_sent else _History(history.author, history.changed_by or by)


def _sub_programs(params: Mapping[str, Any]) -> list[Any]:
    """The programs that a call or a conditional runs once; none for loops, whose results depend on all inputs."""
    if "length" in params or "body_jaxpr" in params or "cond_jaxpr" in params:
        return []
    programs = params.get("branches") or [params[key] for key in ("jaxpr", "call_jaxpr") if key in params]
    return [getattr(program, "jaxpr", program) for program in programs]


def _one_of(histories: Sequence[_History | None], chooser: str) -> _History | None:
    """The history of a value that is one of several. A final update may give way to zero, and to nothing else."""
    marked = _marked(histories)
    if not marked:
        return _ZERO if all(history is _ZERO for history in histories) else None
    if marked[0].is_sent:
        return marked[0]
    changed_by = next((history.changed_by for history in marked if history.changed_by), None)
    return _History(marked[0].author, changed_by or (chooser if None in histories else None))


def _together(histories: Sequence[_History | None]) -> _History | None:
    """The history of values put side by side, or of one that is masked: a changed one if there is one."""
    marked = _marked(histories)
    if not marked:
        return _ZERO if _ZERO in histories else None
    return next((history for history in marked if history.changed_by), marked[0])


def _narrows(eqn: Any) -> bool:
    return eqn.params["new_dtype"].itemsize < eqn.invars[0].aval.dtype.itemsize


def _advice(author: str) -> str:
    if author == "master_weights":
        return (
            "Nothing may change updates after `master_weights`: put it around the whole chain, "
            "`master_weights(optax.chain(...))`, or move what clips or scales gradients in front of it."
        )
    return f"Nothing may change updates after `{author}`: make it the last element of the chain."


def _require_wide_state_before_masters(state: Any) -> None:
    """Raise if a rule keeps 16-bit state outside of masters, which give their own rule float32."""
    leaves = leaves_of(state)
    if not any(leaf.role == "master" for leaf in leaves):
        return
    narrow = [
        f"{_trees.path_string(leaf.path)!r} ({_trees.dtype_and_shape(leaf.leaf)})"
        for leaf in leaves
        if not leaf.wrapped and _trees.is_narrower(leaf.leaf, np.dtype(np.float32)) and leaf.leaf.shape
    ]
    if narrow:
        raise ValueError(
            f"`check_chain`: a rule outside `master_weights` keeps its state in 16 bits: {', '.join(narrow)}. Masters "
            "belong around the whole chain, `master_weights(optax.chain(...))`, so that every rule in it sees float32."
        )


def _require_averages_of_masters(state: Any) -> None:
    """Raise if an average is taken of parameters whose masters it could have."""
    has_masters = lambda x: (fields := fields_of(type(x))) is not None and "master" in fields.roles.values()
    parts = [part for part in jax.tree.leaves(state, is_leaf=has_masters) if has_masters(part)]
    inside = {id(average) for part in parts for average in _trees.find_states(tuple(part), ParamsEmaState)}
    with_masters = {leaf.below for leaf in leaves_of(state) if leaf.role == "master"}
    for average in _trees.find_states(state, ParamsEmaState):
        rounded = [path for path in _trees.leaves_by_path(average.ema) if path in with_masters]
        if rounded and id(average) not in inside:
            raise ValueError(
                f"`check_chain`: `params_ema` stands outside of `master_weights` and averages the rounded parameters, "
                f"{_trees.path_string(rounded[0])!r} for one, not their masters. Put it inside, at the end of the "
                "chain: `master_weights(optax.chain(rule, params_ema(decay)))`."
            )


def _require_averages_at_the_end(state: Any) -> None:
    """Raises if something may change updates after `params_ema`, which averages what they lead to."""
    is_chain = lambda x: type(x) is tuple and any(isinstance(part, ParamsEmaState) for part in x)
    for chain in jax.tree.leaves(state, is_leaf=is_chain):
        if not is_chain(chain):
            continue
        first = next(i for i, part in enumerate(chain) if isinstance(part, ParamsEmaState))
        if not all(isinstance(part, ParamsEmaState) or _is_measure(part) for part in chain[first:]):
            raise ValueError(
                "`check_chain`: `params_ema` averages the parameters that its updates lead to, but another element "
                "comes after it and may change them. Make it the last element of the chain."
            )


def _is_measure(state: Any) -> bool:
    """Return whether a state only measures, as a snapshot does: nothing is computed from it."""
    fields = fields_of(type(state))
    return fields is not None and set(fields.roles.values()) == {"measure"}
