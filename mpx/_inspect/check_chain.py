"""`check_chain`: find what changes numbers of a chain that must arrive unchanged.

The program of one update is traced, not run, and two kinds of values are followed through it by `propagate`:

- Updates that land on a number which a transformation has chosen (`landing_update`). On their way to the result they
  may be selected against zero (a skipped step), multiplied by a boolean (`MultiSteps`) or moved about. What the state
  keeps of the weight must then be selected as often against what it was before.
- Gradients, until `loss_scaling` receives them. In front of it, whatever is not linear sees scaled gradients.
- Updates of `loss_scaling`. What is added to them changes weights in a skipped step.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import JaxprEqn

from mpx import _errors, _trees
from mpx._jaxprs import dtype_of, is_literal, propagate, propagate_inside
from mpx._loss_scale import GRADIENTS
from mpx._primitives import facts_of, holds_programs_run_once
from mpx._stored.leaves import StateLeaf, leaves_of
from mpx._stored.roles import KEPT_OF_WEIGHTS, WRITES_BACK
from mpx._stored.state_format import shown
from mpx._transforms.loss_scaling import SCALED, SKIPPED
from mpx._writeback import MARK, SENT


def check_chain(tx: optax.GradientTransformation, params: Any = None, **extra_args: Any) -> None:
    """Raise if a chain changes updates or scaled gradients where nothing may change them.

    `master_weights`, `kahan_summation` and `stochastic_rounding` choose the new number of a parameter, and emit the
    update that lands on it. The first two also remember what that number lacks. If such an update is clipped or scaled,
    parameters get out of step with what is remembered, and no error follows; if it becomes zero, the weight that is
    remembered trains on. `loss_scaling` takes the gradients of a scaled loss: clipping in front of it clips scaled
    gradients, and an average over steps (`optax.MultiSteps`) never loses a NaN again, so that every later step is
    skipped. What is added behind it, such as weight decay, is added in skipped steps too. A rule outside of
    `master_weights` may not keep its state in 16 bits. Call this once, where the optimizer is made; it only traces.

    Args:
        tx: the whole transformation.
        params: parameters, or their shapes, if `tx` takes only certain trees (`optax.partition` with labels). A small
            bfloat16 tree if None.
        extra_args: other arguments that `tx.update` needs, such as `value`; arrays or shapes.

    Raises:
        ValueError: if the chain does any of this, or if `tx` does not take the small tree, and `params` is None.

    Example:
        >>> check_chain(optax.chain(optax.clip(1.0), master_weights(optax.adam(1e-3))))
        >>> check_chain(optax.chain(kahan_summation(), optax.scale(-1e-3)))
        Traceback (most recent call last):
        ...
        ValueError: `check_chain`: the update of 'bias' was final when `kahan_summation` had rounded it, but `mul` \
    changes it after that (2 of 2 such leaves). Put what changes updates inside of `kahan_summation`, or in front of it.
    """
    tx = _errors.as_transformation(tx, "check_chain")
    is_given = params is not None
    if not is_given:
        shapes = {"bias": (8,), "kernel": (8, 8)}
        params = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    trained = params.fast if isinstance(params, optax.LookaheadParams) else params
    arrays, with_arrays = _trees.partition_leaves(extra_args, _trees.is_array)  # a rule may take functions too
    update = lambda grads, state, params, arrays: tx.update(grads, state, params, **with_arrays(arrays))
    errors = []
    # `optax.contrib.differentially_private_aggregate` in front takes gradients of examples, with an axis for these.
    for examples in ((), (2,)):
        of = lambda p, n=examples: jax.ShapeDtypeStruct((*n, *p.shape), np.float32) if _trees.is_floating(p) else p
        grads = jax.tree.map(of, trained)
        try:
            state = jax.eval_shape(tx.init, params)
            program, (updates, new_state) = jax.make_jaxpr(update, return_shape=True)(grads, state, params, arrays)
            break
        except Exception as error:
            errors.append(error)
    else:
        if is_given:
            raise errors[0]
        raise ValueError(
            "`check_chain` was not given `params`, and `tx` does not take the {'bias', 'kernel'} that stand for them. "
            "Give it the parameters or their shapes (for `optax.lookahead`: `optax.LookaheadParams`), and the other "
            f"arguments that `tx.update` needs. {type(errors[0]).__name__}: {errors[0]}"
        ) from errors[0]
    inputs = [Value(GRADIENT)] * len(jax.tree.leaves(grads)) + [Value(is_old=True)] * len(jax.tree.leaves(state))
    results, received, _ = followed(program, inputs)
    _require_linear_gradients(received)
    leaves = _trees.leaves_by_path(updates)
    histories = dict(zip(leaves, results, strict=False))
    states = leaves_of(state)
    if received:
        _require_unscaled_gradients({path: histories[path] for path in leaves if _trees.is_floating(leaves[path])})
        require_no_state_behind(states, "check_chain")
    _require_nothing_added(histories)
    _require_final_updates(histories)
    after = dict(zip(_trees.leaves_by_path(new_state), results[len(leaves) :], strict=True))
    _require_no_lost_updates(states, histories, after)
    _require_wide_state_before_masters(states)


# ---- values on their way --------------------------------------------------------------------------------------------

GRADIENT = "gradients"


class Value(NamedTuple):
    """The history of a value."""

    # `GRADIENT`, `SKIPPED`, or the transformation that made it a final update; empty for other values.
    origin: str = ""
    changed_by: str = ""  # the first primitive, or transformation, that changed it where nothing may
    is_zero: bool = False  # whether it is zero everywhere
    is_mask: bool = False  # whether it is a boolean, perhaps in a numeric dtype
    is_old: bool = False  # whether it is what the state held before the step
    zeros: int = 0  # how often it was selected against zero
    olds: int = 0  # how often it was selected against what the state held


_OTHER = Value()


def followed(program: Any, inputs: list[Value]) -> tuple[list[Value], list[Value], list[Value]]:
    """Return the histories of results, of gradients that `loss_scaling` receives, and of updates that are added."""
    received, landed = list[Value](), list[Value]()

    def rule(eqn: JaxprEqn, operands: list[Value]) -> Sequence[Value]:
        mark = eqn.params["name"] if eqn.primitive.name == "name" else ""
        if mark == SCALED:
            received.append(operands[0])
            return [_OTHER if operands[0].origin == GRADIENT else operands[0]]
        if mark == SKIPPED:
            return [operands[0] if operands[0].origin else operands[0]._replace(origin=SKIPPED)]
        if mark == GRADIENTS:
            return [Value(GRADIENT)]
        if mark.startswith(MARK):
            return [_named(mark.removeprefix(MARK), operands[0])]
        if eqn.primitive.name == "add" and any(value.is_old for value in operands):
            landed.extend(value for value in operands if value.origin not in ("", GRADIENT, SKIPPED))
        if holds_programs_run_once(eqn):
            columns = propagate_inside(eqn, operands, rule, constant)
            return [_one_of(column, eqn.primitive.name) for column in columns]
        return [_result(eqn, operands)] * len(eqn.outvars)

    constant = lambda v: Value(is_zero=is_literal(v) and np.ndim(v.val) == 0 and v.val == 0)
    rest = [_OTHER] * (len(program.in_avals) - len(inputs))
    return propagate(program, inputs + rest, rule, constant), received, landed


def _tracked(values: Sequence[Value]) -> list[Value]:
    """Return the final updates among values, or else the gradients; one that is changed comes first."""
    found = [value for value in values if value.origin]
    final = [value for value in found if value.origin != GRADIENT]
    return sorted(final or found, key=lambda value: not value.changed_by)


def _named(author: str, earlier: Value) -> Value:
    """Return the history of an update after a transformation has left its name on it."""
    if earlier.origin in ("", GRADIENT, SENT, SKIPPED):
        return Value(author)
    if author == SENT:  # `mpx.zero1` sends the number that it lands on, unless something was wrong before
        return earlier if earlier.changed_by else Value(SENT)
    return _changed(earlier, author)


def _result(eqn: JaxprEqn, operands: list[Value]) -> Value:
    """Return the history of an equation's results, from the histories of its operands."""
    name, facts = eqn.primitive.name, facts_of(eqn)
    if name == "select_n":
        return _one_of(operands[1:], name, operands[0])
    if name == "is_finite" or (name == "ne" and eqn.invars[0] is eqn.invars[1]):
        return _OTHER  # whether a number is finite does not depend on a scale: `optax.zero_nans`, `apply_if_finite`
    moves = facts.moves in ("same", "moved") or name == "convert_element_type"
    is_mask = [value.is_mask or dtype_of(v) == np.bool_ for v, value in zip(eqn.invars, operands, strict=True)]
    tracked = _tracked(operands)
    if not tracked:
        is_zero = (moves or name == "mul") and any(value.is_zero for value in operands)
        same = operands[0] if moves else _OTHER
        return same._replace(is_zero=is_zero, is_mask=moves and is_mask[0])
    result, is_selected = tracked[0], name == "mul" and any(is_mask)
    if result.origin == GRADIENT:
        is_allowed = moves or _is_linear(eqn, operands)
    elif result.origin == SKIPPED:
        is_allowed = name not in ("add", "sub") or all(value.origin == SKIPPED or value.is_zero for value in operands)
    else:
        is_allowed = (moves and not _narrows(eqn)) or is_selected
    zeros, olds = (result.zeros + is_selected, result.olds) if moves or is_selected else (0, 0)
    result = result if is_allowed else _changed(result, name)
    return result._replace(is_mask=moves and is_mask[0], zeros=zeros, olds=olds)


def _one_of(values: Sequence[Value], chooser: str, index: Value = _OTHER) -> Value:
    """Return the history of a value that is one of several: zero may take the place of a tracked one."""
    if len(values) == 1 or all(value.is_old for value in values):
        return values[0]
    tracked = _tracked(values)
    counts = [(value.is_zero, value.zeros, value.is_old, value.olds) for value in values]
    zeros = max(0 if is_zero else count for is_zero, count, *_ in counts) + any(is_zero for is_zero, *_ in counts)
    olds = max(0 if is_old else count for *_, is_old, count in counts) + any(is_old for *_, is_old, _ in counts)
    if index.origin == GRADIENT and (not tracked or tracked[0].origin == GRADIENT):
        return _changed(index, chooser)._replace(zeros=zeros, olds=olds)
    if not tracked:
        return Value(is_zero=all(value.is_zero for value in values), zeros=zeros, olds=olds)
    is_allowed = all(value in tracked or value.is_zero for value in values)
    return (tracked[0] if is_allowed else _changed(tracked[0], chooser))._replace(zeros=zeros, olds=olds)


def _changed(value: Value, by: str) -> Value:
    """Return the history of a value after a change that nothing may make; only the first is recorded."""
    return value if value.changed_by or value.origin == SENT else value._replace(changed_by=by)


def _is_linear(eqn: JaxprEqn, operands: Sequence[Value]) -> bool:
    """Return whether a primitive, of gradients and other values, is linear in the gradients."""
    name, is_gradient = eqn.primitive.name, [value.origin == GRADIENT for value in operands]
    if name in ("mul", "dot_general"):
        return sum(is_gradient) == 1
    if name == "div":
        return not is_gradient[1]
    return all(is_gradient) if name in ("add", "add_any", "sub") else facts_of(eqn).linear


def _narrows(eqn: JaxprEqn) -> bool:
    to = eqn.params.get("new_dtype")
    return to is not None and to.itemsize < dtype_of(eqn.invars[0]).itemsize


# ---- what nothing may do --------------------------------------------------------------------------------------------


def _require_linear_gradients(received: Sequence[Value]) -> None:
    """Raise if something in front of `loss_scaling` is not linear in the gradients, or adds them up over steps."""
    by = next((value.changed_by for value in received if value.origin == GRADIENT and value.changed_by), None)
    if by is not None:
        raise ValueError(
            f"`check_chain`: gradients reach `loss_scaling` scaled, but `{by}` in front of it is not linear in them: "
            "clipping there sees scaled gradients, and a mean over steps never loses a NaN (or, if it skips those, the "
            "scale never sees one, and never shrinks). Put it inside: "
            "`loss_scaling(optax.chain(...))`, `loss_scaling(optax.MultiSteps(...))`."
        )


def _require_unscaled_gradients(updates: dict[_trees.Path, Value]) -> None:
    """Raise if a gradient becomes an update with the loss scale in it."""
    scaled = [path for path, value in updates.items() if value.origin == GRADIENT]
    if scaled:
        raise ValueError(
            f"`check_chain`: the gradient of {_trees.path_string(scaled[0])!r} reaches its update past `loss_scaling`, "
            f"with the loss scale in it ({len(scaled)} of {len(updates)} leaves). Put `loss_scaling` around "
            "everything: `loss_scaling(optax.partition(...))`."
        )


def _require_nothing_added(updates: dict[_trees.Path, Value]) -> None:
    """Raise if something is added to an update that is zero in a skipped step."""
    added = [path for path, value in updates.items() if value.origin == SKIPPED and value.changed_by]
    if added:
        raise ValueError(
            f"`check_chain`: `{updates[added[0]].changed_by}` adds to the update of "
            f"{_trees.path_string(added[0])!r} behind `loss_scaling`, also in a step that it skips ({len(added)} of "
            f"{len(updates)} leaves). Put what changes updates inside: `loss_scaling(optax.chain(rule, "
            "optax.add_decayed_weights(1e-4)))`."
        )


def _require_final_updates(updates: dict[_trees.Path, Value]) -> None:
    """Raise if an update is changed after a transformation has chosen where it lands."""
    final = {path: value for path, value in updates.items() if value.origin not in ("", GRADIENT, SKIPPED)}
    changed = [path for path, value in final.items() if value.changed_by]
    if changed:
        author, by, *_ = final[changed[0]]
        raise ValueError(
            f"`check_chain`: the update of {_trees.path_string(changed[0])!r} was final when `{author}` had rounded "
            f"it, but `{by}` changes it after that ({len(changed)} of {len(final)} such leaves). Put what changes "
            f"updates inside of `{author}`, or in front of it."
        )


def _require_no_lost_updates(
    states: list[StateLeaf], updates: dict[_trees.Path, Value], after: dict[_trees.Path, Value]
) -> None:
    """Raise if an update becomes zero, and what the state keeps of the weight changes nevertheless."""
    kept = [leaf for leaf in states if leaf.role in KEPT_OF_WEIGHTS and leaf.owner in WRITES_BACK]
    kept = [leaf for leaf in kept if leaf.path_of_parameter in updates]
    is_lost = lambda value, kept: value.origin in ("", GRADIENT, SKIPPED) or value.zeros > kept.olds
    lost = [leaf for leaf in kept if is_lost(updates[leaf.path_of_parameter], after[leaf.path])]
    if lost:
        author, path = WRITES_BACK[lost[0].owner], _trees.path_string(lost[0].path_of_parameter)
        raise ValueError(
            f"`check_chain`: the update of {path!r} becomes zero after `{author}` has "
            f"chosen it, but what `{author}` keeps of the weight trains on ({len(lost)} of {len(kept)} such leaves). "
            f"Freeze inside of `{author}` or in front of it, as in `master_weights(optax.chain(rule, "
            "optax.freeze(mask)))`, or by `optax.partition` with mpx in one part."
        )


# ---- states ---------------------------------------------------------------------------------------------------------


def require_no_state_behind(leaves: list[StateLeaf], caller: str) -> None:
    """Raise if a rule keeps a state behind `loss_scaling`, where a skipped step changes it."""
    scale = next(leaf.path[:-1] for leaf in leaves if leaf.role == "loss scale")
    behind, is_past = {}, False
    for leaf in leaves:
        fork = next((key for key, other in zip(leaf.path, scale, strict=False) if key != other), None)
        is_past |= fork is None
        if is_past and leaf.owner is None and not isinstance(fork, jax.tree_util.GetAttrKey | None):
            behind[leaf.path] = shown(leaf.leaf)
    what = f"`{caller}`: a rule behind `loss_scaling` keeps a state, which the steps that it skips change"
    remedy = "What keeps a state must stand inside: `loss_scaling(optax.chain(...))`."
    _errors.refuse(behind, what, remedy)


def _require_wide_state_before_masters(leaves: list[StateLeaf]) -> None:
    """Raise if a rule keeps 16-bit state outside of masters, which give their own rule float32."""
    is_narrow = lambda leaf: not leaf.wrapped and _trees.is_narrower(leaf.leaf)
    narrow = {leaf.path: _trees.dtype_and_shape(leaf.leaf) for leaf in leaves if is_narrow(leaf)}
    if narrow and any(leaf.role == "master" for leaf in leaves):
        what = "`check_chain`: a rule outside of `master_weights` keeps its state in 16 bits"
        remedy = (
            "Masters belong around the whole chain: `master_weights(optax.chain(...))`. `optax.inject_hyperparams` may "
            "stand around them with `hyperparam_dtype=jnp.float32`: without it, 0.999 becomes 1."
        )
        _errors.refuse(narrow, what, remedy)
