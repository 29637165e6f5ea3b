"""`check_chain`: find what changes numbers of a chain that must arrive unchanged.

The program of one update is traced, not run, and values are followed through it;
`TRANSFER` has a rule a primitive:

- Updates that land on a number which a transformation has chosen (`landing_update`). On
  their way to the result they may be selected against zero (a skipped step), multiplied
  by a boolean (`MultiSteps`) or moved about. What the state keeps of the weight must
  then be selected as often against what it was before.
- Gradients, until `loss_scaling` receives them. In front of it, whatever is not linear
  sees scaled gradients.
- Updates of `loss_scaling`. What is added to them changes weights in a skipped step.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import JaxprEqn

from mpx import _errors, _trees
from mpx._jaxprs import dtype_of, is_literal, propagate, propagate_inside
from mpx._loss_scale import GRADIENTS
from mpx._primitives import PRIMITIVES, holds_programs_run_once
from mpx._stored.leaves import StateLeaf, leaves_of
from mpx._stored.roles import KEPT_OF_WEIGHTS, ROLES, WRITES_BACK
from mpx._stored.state_format import shown
from mpx._transforms.loss_scaling import SCALED, SKIPPED, UNSCALED
from mpx._writeback import MARK, SENT


def check_chain(
    tx: optax.GradientTransformation, params: Any = None, **extra_args: Any
) -> None:
    """Raise if a chain changes updates or scaled gradients where nothing may change
    them.

    `master_weights`, `kahan_summation` and `stochastic_rounding` choose the new number
    of a parameter, and emit the update that lands on it. The first two also remember
    what that number lacks. If such an update is clipped or scaled, parameters get out
    of step with what is remembered, and no error follows; if it becomes zero, the
    weight that is remembered trains on. `loss_scaling` takes the gradients of a scaled
    loss: clipping in front of it clips scaled gradients, and an average over steps
    (`optax.MultiSteps`) never loses a NaN again, so that every later step is skipped.
    What is added behind it, such as weight decay, is added in skipped steps too. A rule
    outside of `master_weights` may not keep its state in 16 bits, and none may join
    parameters of several dtypes there (`optax.flatten`). Call this once, where
    the optimizer is made; it only traces.

    Args:
        tx: the whole transformation.
        params: parameters, or their shapes, if `tx` takes only certain trees
            (`optax.partition` with labels). A small bfloat16 tree if None.
        extra_args: other arguments that `tx.update` needs, such as `value`; arrays or
            shapes.

    Raises:
        ValueError: if the chain does any of this, or if `tx` does not take the small
            tree, and `params` is None.

    Example:
        >>> check_chain(optax.chain(optax.clip(1.0), master_weights(optax.adam(1e-3))))
        >>> check_chain(optax.chain(kahan_summation(), optax.scale(-1e-3)))
        Traceback (most recent call last):
        ...
        ValueError: `check_chain`: the update of 'bias' was final when \
    `kahan_summation` had rounded it, but `mul` changes it after that (2 of 2 such \
    leaves). Put what changes updates inside of `kahan_summation`, or in front of it.
    """
    tx = _errors.as_transformation(tx, "check_chain")
    is_given = params is not None
    if not is_given:
        params = {
            "bias": jax.ShapeDtypeStruct((8,), jnp.bfloat16),
            "kernel": jax.ShapeDtypeStruct((8, 8), jnp.bfloat16),
        }
    trained = params.fast if isinstance(params, optax.LookaheadParams) else params
    # A rule may take functions too.
    arrays, with_arrays = _trees.partition_leaves(extra_args, _trees.is_array)

    def update(grads, state, params, arrays):
        return tx.update(grads, state, params, **with_arrays(arrays))

    errors = []
    # `optax.contrib.differentially_private_aggregate` in front takes gradients of
    # examples, with an axis for these.
    for examples in ((), (2,)):

        def of(p, n=examples):
            if not _trees.is_floating(p):
                return p
            return jax.ShapeDtypeStruct((*n, *p.shape), np.float32)

        grads = jax.tree.map(of, trained)
        try:
            state = jax.eval_shape(tx.init, params)
            program, (updates, new_state) = jax.make_jaxpr(update, return_shape=True)(
                grads, state, params, arrays
            )
            break
        except Exception as error:
            errors.append(error)
    else:
        if is_given:
            raise errors[0]
        raise ValueError(
            "`check_chain` was not given `params`, and `tx` does not take the"
            " {'bias', 'kernel'} that stand for them. Give it the parameters or"
            " their shapes (for `optax.lookahead`: `optax.LookaheadParams`), and the"
            f" other arguments that `tx.update` needs. {type(errors[0]).__name__}:"
            f" {errors[0]}"
        ) from errors[0]
    inputs = [Value(GRADIENT) for _ in jax.tree.leaves(grads)]
    inputs += [Value(OLD) for _ in jax.tree.leaves(state)]
    results, received, _ = followed(program, inputs)
    _require_linear_gradients(received[SCALED], received[UNSCALED])
    leaves = _trees.leaves_by_path(updates)
    histories = {
        path: value
        for (path, leaf), value in zip(leaves.items(), results, strict=False)
        if _trees.is_floating(leaf)
    }
    states = leaves_of(state)
    if received[SCALED]:
        _require_unscaled_gradients(histories)
    if any(received.values()):
        require_no_state_behind(states, "check_chain")
    _require_nothing_added(histories)
    _require_final_updates(histories)
    of_state = _trees.leaves_by_path(new_state)
    after = dict(zip(of_state, results[len(leaves) :], strict=True))
    _require_masters(tx, trained if is_given else None)
    _require_no_lost_updates(states, histories, after)
    _require_wide_state_before_masters(states)


# ---- values on their way -------------------------------------------------------------

GRADIENT, OLD, ZERO = "gradients", "old", "zero"


class Value(NamedTuple):
    """The history of a value."""

    # `GRADIENT`, `SKIPPED`, or the transformation that made it a final update. Of other
    # values: `OLD` if it is what the state held before the step, `ZERO` if it is zero
    # everywhere, else empty.
    origin: str = ""
    # The first primitive, or transformation, that changed it where nothing may.
    changed_by: str = ""
    is_mask: bool = False  # whether it is a boolean, perhaps in a numeric dtype
    zeros: int = 0  # how often it was selected against zero
    olds: int = 0  # how often it was selected against what the state held
    is_summed: bool = False  # whether it was added to what the state held

    @property
    def is_tracked(self) -> bool:
        return self.origin not in ("", OLD, ZERO)

    @property
    def is_final(self) -> bool:
        return self.is_tracked and self.origin not in (GRADIENT, SKIPPED)


_OTHER = Value()


def followed(
    program: Any, inputs: list[Value]
) -> tuple[list[Value], dict[str, list[Value]], list[Value]]:
    """Return the histories of results, of gradients that `loss_scaling` receives, by
    the name that it gives them, and of updates that are added.
    """
    received, landed = {SCALED: list[Value](), UNSCALED: list[Value]()}, list[Value]()

    def rule(eqn: JaxprEqn, operands: list[Value]) -> Sequence[Value]:
        name = eqn.primitive.name
        if name == "name" and eqn.params["name"] in received:
            received[eqn.params["name"]].append(operands[0])
        if name == "add" and any(value.origin == OLD for value in operands):
            landed.extend(value for value in operands if value.is_final)
        if holds_programs_run_once(eqn):
            return [
                _one_of(eqn, column)
                for column in propagate_inside(eqn, operands, rule, constant)
            ]
        return [TRANSFER.get(name, _computed)(eqn, operands)] * len(eqn.outvars)

    def constant(v):
        is_zero = is_literal(v) and np.ndim(v.val) == 0 and v.val == 0
        return Value(ZERO) if is_zero else _OTHER

    rest = [_OTHER] * (len(program.in_avals) - len(inputs))
    return propagate(program, inputs + rest, rule, constant), received, landed


# ---- rules: from the histories of operands to that of the results --------------------


def _leading(values: Sequence[Value]) -> Value:
    """Return the first final update, or else the first gradient, or else the first; a
    changed one comes before.
    """

    def rank(value):
        return (not value.is_tracked, value.origin == GRADIENT, not value.changed_by)

    return min(values, key=rank, default=_OTHER)


def _changed(value: Value, by: str) -> Value:
    """Return the history of a value after a change that nothing may make; only the
    first is recorded.
    """
    is_recorded = value.is_tracked and value.origin != SENT and not value.changed_by
    return value._replace(changed_by=by) if is_recorded else value


def _computed(
    eqn: JaxprEqn, operands: Sequence[Value], harmless: Collection[str] = (SKIPPED,)
) -> Value:
    """Compute new numbers, which changes all but what has a harmless origin."""
    value = _leading(operands)
    if not value.is_tracked:
        return _OTHER
    is_summed = any(other.is_summed for other in operands)
    result = Value(value.origin, value.changed_by, is_summed=is_summed)
    return result if result.origin in harmless else _changed(result, eqn.primitive.name)


def _linear(eqn: JaxprEqn, operands: Sequence[Value]) -> Value:
    return _computed(eqn, operands, (GRADIENT, SKIPPED))


def _sum(eqn: JaxprEqn, operands: Sequence[Value]) -> Value:
    """Only gradients may be added to gradients, and to what skips steps only its
    like.
    """
    origins = {value.origin for value in operands} - {ZERO}
    result = _computed(eqn, operands, (GRADIENT, SKIPPED) if len(origins) == 1 else ())
    return result._replace(is_summed=result.is_summed or origins == {GRADIENT, OLD})


def _bilinear(eqn: JaxprEqn, operands: Sequence[Value]) -> Value:
    gradients = [value for value in operands if value.origin == GRADIENT]
    return (_linear if len(gradients) == 1 else _computed)(eqn, operands)


def _product(eqn: JaxprEqn, operands: Sequence[Value]) -> Value:
    """Multiply: a mask selects a final update against zero."""
    value = _leading(operands)
    if value.is_final and any(other.is_mask for other in operands):
        return value._replace(zeros=value.zeros + 1)
    if not value.is_tracked and any(other.origin == ZERO for other in operands):
        return Value(ZERO)
    return _bilinear(eqn, operands)


def _quotient(eqn: JaxprEqn, operands: Sequence[Value]) -> Value:
    return (_computed if operands[1].origin == GRADIENT else _linear)(eqn, operands)


def _compared(eqn: JaxprEqn, operands: Sequence[Value]) -> Value:
    """Compare; whether a number is finite does not depend on a scale:
    `optax.zero_nans`, `apply_if_finite`.
    """
    return _OTHER if eqn.invars[0] is eqn.invars[-1] else _computed(eqn, operands)


def _moved(eqn: JaxprEqn, operands: Sequence[Value]) -> Value:
    """Move numbers, or convert them: to fewer bytes is a change of what is final."""
    value, old = _leading(operands), dtype_of(eqn.invars[0])
    if value.is_final and eqn.params.get("new_dtype", old).itemsize < old.itemsize:
        return _changed(value, eqn.primitive.name)
    return value._replace(is_mask=value.is_mask or old == np.bool_)


def _one_of(eqn: JaxprEqn, operands: Sequence[Value]) -> Value:
    """Choose one of several values: zero may take the place of a tracked one."""
    index, *values = (
        operands if eqn.primitive.name == "select_n" else [_OTHER, *operands]
    )
    origins = {value.origin for value in values}
    if len(values) == 1 or origins in ({OLD}, {ZERO}):
        return values[0]
    chosen = origins - {ZERO}
    is_of_one_kind = chosen == {GRADIENT} or chosen.isdisjoint({"", OLD, GRADIENT})
    result = _computed(eqn, values, chosen if is_of_one_kind else ())
    if index.origin == GRADIENT and result.origin in ("", GRADIENT):
        result = _changed(index, eqn.primitive.name)
    return result._replace(
        zeros=max(value.zeros for value in values) + (ZERO in origins),
        olds=max(value.olds for value in values) + (OLD in origins),
    )


def _named(eqn: JaxprEqn, operands: Sequence[Value]) -> Value:
    """Pass a name, which says what a value is if mpx gave it."""
    name, value = eqn.params["name"], operands[0]
    if name == GRADIENTS:
        return Value(GRADIENT)
    if name in (SCALED, UNSCALED):
        return _OTHER if value.origin == GRADIENT else value
    if name == SKIPPED:
        return value if value.is_tracked else Value(SKIPPED)
    author = name.removeprefix(MARK)
    if author == name:
        return value
    # `mpx.zero1` sends the number that an update lands on, unless something was wrong
    # before.
    is_sent = SENT in (author, value.origin) and not value.changed_by
    return Value(author) if is_sent or not value.is_final else _changed(value, author)


# A primitive that is not here computes new numbers.
TRANSFER: dict[str, Callable[[JaxprEqn, list[Value]], Value]] = {
    **{name: _linear for name, facts in PRIMITIVES.items() if facts.linear},
    **{
        name: _moved
        for name, facts in PRIMITIVES.items()
        if facts.moves in ("same", "moved")
    },
    **dict.fromkeys(("add", "add_any", "sub"), _sum),
    **dict.fromkeys(("is_finite", "ne"), _compared),
    "convert_element_type": _moved,
    "div": _quotient,
    "dot_general": _bilinear,
    "mul": _product,
    "name": _named,
    "select_n": _one_of,
}


# ---- what nothing may do -------------------------------------------------------------


def _require_masters(tx: optax.GradientTransformation, params: Any) -> None:
    """Raise if nothing is kept of 16-bit parameters since they were joined with others:
    `optax.flatten` makes one float32 array of bfloat16 and float32 ones.
    """
    if params is None:
        dtypes = {"bias": np.float32, "kernel": jnp.bfloat16}
        params = {name: jax.ShapeDtypeStruct((8,), x) for name, x in dtypes.items()}
    try:
        state = jax.eval_shape(tx.init, params)
    except Exception:  # a rule that wants other parameters, or all of one dtype
        return
    kept = [
        (WRITES_BACK[type(found)], getattr(found, field))
        for found in _trees.find_states(state, tuple(WRITES_BACK))
        for field, role in ROLES[type(found)].items()
        if role in KEPT_OF_WEIGHTS
    ]
    narrow = map(_trees.is_narrower, jax.tree.leaves(params))
    if kept and all(_trees.is_masked(tree) for _, tree in kept) and any(narrow):
        raise ValueError(
            f"`check_chain`: `{kept[0][0]}` sees one float32 array in the place of all"
            " parameters, some of which have 16 bits, so it keeps nothing of them:"
            " something around it joins them, as `optax.flatten` does. Put that inside,"
            " around the rule alone, as in `master_weights(optax.flatten(rule))`."
        )


def _require_linear_gradients(
    scaled: Sequence[Value], unscaled: Sequence[Value]
) -> None:
    """Raise if something in front of `loss_scaling` is not linear in the gradients, or
    in front of a scale of 1 adds them up over steps.
    """
    by = _leading([value for value in scaled if value.origin == GRADIENT]).changed_by
    if by:
        raise ValueError(
            f"`check_chain`: gradients reach `loss_scaling` scaled, but `{by}` in front"
            " of it is not linear in them: clipping there sees scaled gradients, and a"
            " mean over steps never loses a NaN (or, if it skips those, the scale"
            " never sees one, and never shrinks). Put it inside:"
            " `loss_scaling(optax.chain(...))`, `loss_scaling(optax.MultiSteps(...))`."
        )
    if any(value.is_summed for value in unscaled):
        raise ValueError(
            "`check_chain`: gradients reach `loss_scaling` as a mean over steps, which"
            " never loses a NaN, so that every later step is skipped. Put it inside:"
            " `loss_scaling(optax.MultiSteps(...))`."
        )


def _require_unscaled_gradients(updates: dict[_trees.Path, Value]) -> None:
    """Raise if a gradient becomes an update with the loss scale in it."""
    scaled = [path for path, value in updates.items() if value.origin == GRADIENT]
    if scaled:
        raise ValueError(
            f"`check_chain`: the gradient of {_trees.path_string(scaled[0])!r} reaches"
            " its update past `loss_scaling`, with the loss scale in it"
            f" ({len(scaled)} of {len(updates)} leaves). Put `loss_scaling` around"
            " everything: `loss_scaling(optax.partition(...))`."
        )


def _require_nothing_added(updates: dict[_trees.Path, Value]) -> None:
    """Raise if something is added to an update that is zero in a skipped step."""
    added = [
        path
        for path, value in updates.items()
        if value.origin == SKIPPED and value.changed_by
    ]
    if added:
        raise ValueError(
            f"`check_chain`: `{updates[added[0]].changed_by}` adds to the update of"
            f" {_trees.path_string(added[0])!r} behind `loss_scaling`, also in a step"
            f" that it skips ({len(added)} of {len(updates)} leaves). Put what changes"
            " updates inside: `loss_scaling(optax.chain(rule,"
            " optax.add_decayed_weights(1e-4)))`."
        )


def _require_final_updates(updates: dict[_trees.Path, Value]) -> None:
    """Raise if an update is changed after a transformation has chosen where it
    lands.
    """
    final = {path: value for path, value in updates.items() if value.is_final}
    changed = [path for path, value in final.items() if value.changed_by]
    if changed:
        author, by, *_ = final[changed[0]]
        raise ValueError(
            f"`check_chain`: the update of {_trees.path_string(changed[0])!r} was final"
            f" when `{author}` had rounded it, but `{by}` changes it after that"
            f" ({len(changed)} of {len(final)} such leaves). Put what changes updates"
            f" inside of `{author}`, or in front of it."
        )


def _require_no_lost_updates(
    states: list[StateLeaf],
    updates: dict[_trees.Path, Value],
    after: dict[_trees.Path, Value],
) -> None:
    """Raise if an update becomes zero, and what the state keeps of the weight changes
    nevertheless.
    """
    kept = [
        leaf
        for leaf in states
        if leaf.role in KEPT_OF_WEIGHTS
        and leaf.owner in WRITES_BACK
        and leaf.path_of_parameter in updates
    ]
    lost = [
        leaf
        for leaf in kept
        if not (update := updates[leaf.path_of_parameter]).is_final
        or update.zeros > after[leaf.path].olds
    ]
    if lost:
        author = WRITES_BACK[lost[0].owner]
        path = _trees.path_string(lost[0].path_of_parameter)
        raise ValueError(
            f"`check_chain`: the update of {path!r} becomes zero after `{author}` has"
            f" chosen it, but what `{author}` keeps of the weight trains on"
            f" ({len(lost)} of {len(kept)} such leaves). Freeze inside of `{author}` or"
            " in front of it, as in `master_weights(optax.chain(rule,"
            " optax.freeze(mask)))`, or by `optax.partition` with mpx in one part."
        )


# ---- states --------------------------------------------------------------------------


def require_no_state_behind(leaves: list[StateLeaf], caller: str) -> None:
    """Raise if a rule keeps a state behind `loss_scaling`, where a skipped step changes
    it.
    """
    scale = next(leaf.path[:-1] for leaf in leaves if leaf.role == "loss scale")
    behind, is_past = {}, False
    for leaf in leaves:
        fork = next(
            (key for key, other in zip(leaf.path, scale, strict=False) if key != other),
            None,
        )
        is_past |= fork is None
        if (
            is_past
            and leaf.owner is None
            and not isinstance(fork, jax.tree_util.GetAttrKey | None)
        ):
            behind[leaf.path] = shown(leaf.leaf)
    what = (
        f"`{caller}`: a rule behind `loss_scaling` keeps a state, which the steps that"
        " it skips change"
    )
    remedy = "What keeps a state must stand inside: `loss_scaling(optax.chain(...))`."
    _errors.refuse(behind, what, remedy)


def _require_wide_state_before_masters(leaves: list[StateLeaf]) -> None:
    """Raise if a rule keeps 16-bit state outside of masters, which give their own rule
    float32.
    """
    narrow = {
        leaf.path: _trees.dtype_and_shape(leaf.leaf)
        for leaf in leaves
        if not leaf.wrapped and _trees.is_narrower(leaf.leaf)
    }
    if narrow and any(leaf.role == "master" for leaf in leaves):
        what = (
            "`check_chain`: a rule outside of `master_weights` keeps its state in 16"
            " bits"
        )
        remedy = (
            "Masters belong around the whole chain: `master_weights(optax.chain(...))`."
            " `optax.inject_hyperparams` may stand around them with"
            " `hyperparam_dtype=jnp.float32`: without it, 0.999 becomes 1."
        )
        _errors.refuse(narrow, what, remedy)
