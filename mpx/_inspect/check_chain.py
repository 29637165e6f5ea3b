"""`check_chain`: find what changes numbers of a chain that must arrive unchanged.

The program of one update is traced, not run, and two kinds of values are followed through it by `propagate`:

- Updates that land on a number which a transformation has chosen (`landing_update`). On their way to the result they
  may be selected against zero (a skipped step), multiplied by a boolean (`MultiSteps`) or moved about.
- Gradients, until `loss_scaling` receives them. In front of it, whatever is not linear sees scaled gradients.
"""

import itertools
import re
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.extend import core as jex_core
from jax.extend.core import JaxprEqn

from mpx import _errors, _trees
from mpx._jaxprs import dtype_of, is_literal, propagate, propagate_inside
from mpx._primitives import facts_of, holds_programs_run_once
from mpx._stored.leaves import leaves_of
from mpx._stored.roles import Role, fields_of, fields_with_role
from mpx._transforms.loss_scaling import SCALED, UNSCALED
from mpx._writeback import MARK, SENT


def check_chain(tx: optax.GradientTransformation, params: Any = None, **extra_args: Any) -> None:
    """Raise if a chain changes updates or scaled gradients where nothing may change them; warn of gathered matrices.

    `master_weights`, `kahan_summation` and `stochastic_rounding` choose the new number of a parameter, and emit the
    update that lands on it. The first two also remember what that number lacks. If such an update is clipped or scaled,
    parameters get out of step with what is remembered, and no error follows. `loss_scaling` takes the gradients of a
    scaled loss: clipping in front of it clips scaled gradients, and an average over steps (`optax.MultiSteps`) never
    loses a NaN again, so that every later step is skipped. Call this once, where the optimizer is made; it only traces.

    A rule that multiplies matrices, such as Muon, needs them whole: if parameters are sharded, a warning says so.

    A bare Optax optimizer in front of `kahan_summation`, which keeps moments of 16-bit parameters in 16 bits, passes.

    Args:
        tx: the whole transformation.
        params: parameters, or their shapes, if `tx` takes only certain trees (`optax.partition` with labels). A small
            bfloat16 tree if None.
        extra_args: other arguments that `tx.update` needs, such as `value`; arrays or shapes.

    Raises:
        TypeError: if `tx` is not a transformation.
        ValueError: if an element of a chain changes the updates after one of the three; if one of them follows another
            (inside `upcast` or `master_weights` they would do nothing, and `init` refuses them); if something in front
            of `loss_scaling` is not linear in the gradients, unless the scale is always 1, or adds them up over steps;
            if `master_weights` stands in a chain beside an optimizer that keeps its state in 16 bits, which it should
            wrap; or if `params_ema`, or another state that declares an average by `register_state`, is not the last
            element of its chain, or stands outside of `master_weights` and averages rounded parameters.

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
    program, (updates, _) = jax.make_jaxpr(
        lambda grads, state, params, extra: tx.update(grads, state, params, **extra), return_shape=True
    )(grads, state, params, extra_args)
    _warn_of_gathers(program, params)
    results, received = _followed(program, len(jax.tree.leaves(grads)), jax.tree.leaves(state))
    _require_linear_gradients(received)
    paths = list(_trees.leaves_by_path(updates))
    _require_final_updates(paths, results[: len(paths)])
    _require_wide_state_before_masters(state)
    _require_averages_of_masters(state)
    _require_averages_at_the_end(state)


def _warn_of_gathers(program: Any, params: Any) -> None:
    """Warn if a rule multiplies matrices that are sharded over devices."""
    is_sharded = lambda leaf: isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) and not _is_whole(leaf)
    sharded = [path for path, leaf in _trees.leaves_by_path(params).items() if is_sharded(leaf)]
    if sharded and _multiplies_matrices(program.jaxpr):
        warnings.warn(
            f"`check_chain`: the optimizer multiplies matrices, and {_trees.path_string(sharded[0])!r} is sharded over "
            f"devices ({len(sharded)} such parameters). XLA sends float32 matrices to all devices for these products: "
            "see `mpx.step_report(...).sent_by_kind`.",
            stacklevel=3,
        )


def _is_whole(leaf: Any) -> bool:
    sharding = None if isinstance(leaf, Tracer) else leaf.sharding
    return sharding is None or sharding.is_fully_replicated


def _multiplies_matrices(program: jex_core.Jaxpr) -> bool:
    return any(
        facts_of(eqn).contraction or any(map(_multiplies_matrices, jex_core.jaxprs_in_params(eqn.params)))
        for eqn in program.eqns
    )


# ---- values on their way --------------------------------------------------------------------------------------------

_GRADIENT = "gradient"


class _Value(NamedTuple):
    """The history of a value."""

    origin: str = ""  # `gradient`, or the transformation that made it a final update; empty for other values
    changed_by: str = ""  # the first primitive, or transformation, that changed it where nothing may
    is_average: bool = False  # whether that added a gradient to a part of the state
    is_sent: bool = False  # whether an update travels as the number that it lands on, as in `mpx.zero1`
    is_state: bool = False  # whether it is computed from arrays of the state
    is_zero: bool = False  # whether it is zero everywhere
    is_mask: bool = False  # whether it is a boolean, perhaps in a numeric dtype


_OTHER = _Value()


def _followed(program: Any, gradients: int, state: Sequence[Any]) -> tuple[list[_Value], list[tuple[str, _Value]]]:
    """Return the histories of the program's results, and of the gradients that `loss_scaling` receives."""
    inputs = [_Value(_GRADIENT)] * gradients
    inputs += [_Value(is_state=_trees.is_floating(leaf) and leaf.ndim > 0) for leaf in state]
    inputs += [_OTHER] * (len(program.jaxpr.invars) - len(inputs))
    received: list[tuple[str, _Value]] = []

    def rule(eqn: JaxprEqn, operands: list[_Value]) -> Sequence[_Value]:
        mark = eqn.params["name"] if eqn.primitive.name == "name" else ""
        if mark in (SCALED, UNSCALED):
            received.append((mark, operands[0]))
            return [_OTHER if operands[0].origin == _GRADIENT else operands[0]]
        if mark.startswith(MARK):
            return [_named(mark.removeprefix(MARK), operands[0])]
        if holds_programs_run_once(eqn):
            columns = propagate_inside(eqn, operands, rule, constant)
            return [_one_of(column, eqn.primitive.name) for column in columns]
        return [_result(eqn, operands)] * len(eqn.outvars)

    constant = lambda v: _Value(is_zero=is_literal(v) and np.ndim(v.val) == 0 and v.val == 0)
    return propagate(program, inputs, rule, constant), received


def _tracked(values: Sequence[_Value]) -> list[_Value]:
    """Return the final updates among values, or else the gradients; one that is changed comes first."""
    found = [value for value in values if value.origin]
    final = [value for value in found if value.origin != _GRADIENT]
    return sorted(final or found, key=lambda value: not value.changed_by)


def _named(author: str, earlier: _Value) -> _Value:
    """Return the history of an update after a transformation has left its name on it."""
    if earlier.origin in ("", _GRADIENT):
        return _Value(author, is_sent=author == SENT)
    if author == SENT:
        return earlier._replace(is_sent=True)
    if earlier.is_sent:
        return _Value(author if earlier.origin == SENT else earlier.origin, earlier.changed_by)
    return _Value(earlier.origin, author)


def _result(eqn: JaxprEqn, operands: list[_Value]) -> _Value:
    """Return the history of an equation's results, from the histories of its operands."""
    name, facts = eqn.primitive.name, facts_of(eqn)
    if name == "select_n":
        return _one_of(operands[1:], name, operands[0])
    moves = facts.moves in ("same", "moved") or name == "convert_element_type"
    is_mask = [value.is_mask or dtype_of(v) == np.bool_ for v, value in zip(eqn.invars, operands, strict=True)]
    is_state = any(value.is_state for value in operands)
    tracked = _tracked(operands)
    if not tracked:
        is_zero = (moves or name == "mul") and any(value.is_zero for value in operands)
        return _Value(is_state=is_state, is_zero=is_zero, is_mask=moves and is_mask[0])
    if tracked[0].origin == _GRADIENT:
        is_allowed = moves or _is_linear(eqn, operands)
    else:
        is_allowed = (moves and not _narrows(eqn)) or (name == "mul" and any(is_mask))
    result = tracked[0] if is_allowed else _changed(tracked[0], name, is_state and name in ("add", "sub"))
    return result._replace(is_mask=moves and is_mask[0])


def _one_of(values: Sequence[_Value], chooser: str, index: _Value = _OTHER) -> _Value:
    """Return the history of a value that is one of several: zero may take the place of a tracked one."""
    tracked = _tracked(values)
    if index.origin == _GRADIENT and (not tracked or tracked[0].origin == _GRADIENT):
        return _changed(index, chooser)
    if not tracked:
        is_state, is_zero = any(value.is_state for value in values), all(value.is_zero for value in values)
        return values[0] if len(values) == 1 else _Value(is_state=is_state, is_zero=is_zero)
    is_allowed = all(value in tracked or value.is_zero for value in values)
    return tracked[0] if is_allowed else _changed(tracked[0], chooser)


def _changed(value: _Value, by: str, is_average: bool = False) -> _Value:
    """Return the history of a value after a change that nothing may make; only the first is recorded."""
    is_first = not (value.changed_by or value.is_sent)
    return value._replace(changed_by=by, is_average=is_average) if is_first else value


def _is_linear(eqn: JaxprEqn, operands: Sequence[_Value]) -> bool:
    """Return whether a primitive, of gradients and other values, is linear in the gradients."""
    name, is_gradient = eqn.primitive.name, [value.origin == _GRADIENT for value in operands]
    if name in ("mul", "dot_general"):
        return sum(is_gradient) == 1
    if name == "div":
        return not is_gradient[1]
    return all(is_gradient) if name in ("add", "add_any", "sub") else facts_of(eqn).linear


def _narrows(eqn: JaxprEqn) -> bool:
    to = eqn.params.get("new_dtype")
    return to is not None and to.itemsize < dtype_of(eqn.invars[0]).itemsize


# ---- what nothing may do --------------------------------------------------------------------------------------------


def _require_linear_gradients(received: Sequence[tuple[str, _Value]]) -> None:
    """Raise if something in front of `loss_scaling` is not linear in the gradients, or adds them up over steps."""
    for mark, value in received:
        if value.origin == _GRADIENT and value.is_average:
            raise ValueError(
                f"`check_chain`: an average or a sum over steps (`{value.changed_by}`) stands in front of "
                "`loss_scaling`. It never loses an infinity or NaN, so that every later step is skipped. Put it "
                "inside: `loss_scaling(optax.MultiSteps(...))`."
            )
        if value.origin == _GRADIENT and value.changed_by and mark == SCALED:
            raise ValueError(
                f"`check_chain`: gradients reach `loss_scaling` scaled, but `{value.changed_by}` in front of it is not "
                "linear in them, as in clipping, and sees scaled gradients. Put it inside: "
                "`loss_scaling(optax.chain(...))`."
            )


def _require_final_updates(paths: Sequence[_trees.Path], updates: Sequence[_Value]) -> None:
    """Raise if an update is changed after a transformation has chosen where it lands."""
    final = {path: value for path, value in zip(paths, updates, strict=True) if value.origin not in ("", _GRADIENT)}
    changed = [path for path, value in final.items() if value.changed_by]
    if not changed:
        return
    author, by = final[changed[0]].origin, final[changed[0]].changed_by
    advice = "make it the last element of the chain."
    if author == "master_weights":
        advice = (
            "put it around the whole chain, `master_weights(optax.chain(...))`, or move what clips or scales gradients "
            "in front of it."
        )
    raise ValueError(
        f"`check_chain`: the update of {_trees.path_string(changed[0])!r} was final when `{author}` had rounded it, "
        f"but `{by}` changes it after that ({len(changed)} of {len(final)} such leaves). "
        f"Nothing may change updates after `{author}`: {advice}"
    )


# ---- states ---------------------------------------------------------------------------------------------------------


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
            "`check_chain`: a rule outside `master_weights` keeps its state in 16 bits. Masters belong around the "
            "whole chain, `master_weights(optax.chain(...))`, so that every rule in it sees float32. In 16 bits: "
            f"{', '.join(narrow)}."
        )


def _require_averages_of_masters(state: Any) -> None:
    """Raise if an average is taken of parameters whose masters it could have."""
    has_masters = lambda x: _declares(x, "master")
    parts = [part for part in jax.tree.leaves(state, is_leaf=has_masters) if has_masters(part)]
    inside = {id(owner) for part in parts for owner, _ in fields_with_role(tuple(part), "average")}
    with_masters = {leaf.below for leaf in leaves_of(state) if leaf.role == "master"}
    for owner, average in fields_with_role(state, "average"):
        rounded = [path for path in _trees.leaves_by_path(average) if path in with_masters]
        if rounded and id(owner) not in inside:
            name = _name_of(owner)
            raise ValueError(
                f"`check_chain`: `{name}` stands outside of `master_weights` and averages the rounded parameters, "
                f"{_trees.path_string(rounded[0])!r} for one, not their masters. Put it inside, at the end of the "
                f"chain: `master_weights(optax.chain(rule, {name}(...)))`."
            )


def _require_averages_at_the_end(state: Any) -> None:
    """Raise if something may change updates after an average of the parameters that they lead to."""
    averages = lambda part: _declares(part, "average")
    parts_of = lambda x: list(x.values() if isinstance(x, dict) else x)
    is_chain = lambda x: type(x) in (tuple, dict) and any(map(averages, parts_of(x)))
    for chain in filter(is_chain, jax.tree.leaves(state, is_leaf=is_chain)):
        first, *after = itertools.dropwhile(lambda part: not averages(part), parts_of(chain))
        if not all(averages(part) or _is_measure(part) for part in after):
            raise ValueError(
                f"`check_chain`: `{_name_of(first)}` averages the parameters that its updates lead to, but another "
                "element comes after it and may change them. Make it the last element of the chain."
            )


def _declares(state: Any, role: Role) -> bool:
    fields = fields_of(type(state))
    return fields is not None and role in fields.roles.values()


def _name_of(state: Any) -> str:
    """Return the name of a state's transformation, by Optax's convention: `params_ema` of `ParamsEmaState`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(state).__name__.removesuffix("State")).lower()


def _is_measure(state: Any) -> bool:
    """Return whether a state only measures, as a snapshot does: nothing is computed from it."""
    fields = fields_of(type(state))
    return fields is not None and set(fields.roles.values()) == {"measure"}
