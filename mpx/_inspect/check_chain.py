"""`check_chain`: does anything in a chain change numbers that must reach their place as they are?

The program of one update is traced, not run. Two kinds of values bear names in it, and are followed by `propagate`:

- Updates that land on a number which a transformation has chosen (`writeback.landing_update`). On their way to the
  result they may be selected against zero (a skipped step), multiplied by a boolean (`MultiSteps`) or moved about.
- The gradients that `loss_scaling` receives. In front of it, whatever is not linear sees scaled gradients.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import JaxprEqn

from mpx import _errors, _trees
from mpx._jaxprs import (
    EXCHANGES,
    MOVES,
    SUMS,
    dtype_of,
    holds_programs_run_once,
    is_literal,
    propagate,
    propagate_inside,
)
from mpx._stored.leaves import leaves_of
from mpx._stored.roles import fields_of
from mpx._transforms.loss_scaling import SCALED, UNSCALED
from mpx._transforms.params_ema import ParamsEmaState
from mpx._writeback import MARK, SENT


def check_chain(tx: optax.GradientTransformation, params: Any = None, **extra_args: Any) -> None:
    """Raise if a chain changes updates or scaled gradients where nothing may change them.

    `master_weights`, `kahan_summation` and `stochastic_rounding` emit updates that land on a number which they have
    chosen, and remember what that number lacks. If such an update is clipped or scaled, parameters get out of step with
    what is remembered, and no error follows. `loss_scaling` takes the gradients of a scaled loss: clipping in front of
    it clips scaled gradients, and an average over steps (`optax.MultiSteps`) never loses a NaN again, so that every
    later step is skipped. Call this once, where the optimizer is made; it only traces.

    It does not see a bare Optax rule in front of `kahan_summation`, which keeps moments of 16-bit parameters in 16
    bits, because one may want that.

    Args:
        tx: the whole transformation.
        params: parameters, or their shapes, if `tx` takes only certain trees (`optax.partition` with labels). A small
            bfloat16 tree if None.
        extra_args: other arguments that `tx.update` needs, such as `value`; arrays or shapes.

    Raises:
        TypeError: if `tx` is not a transformation.
        ValueError: if an element of a chain changes the updates after one of the three; if one of them follows
            another (those inside `upcast` or `master_weights` do nothing, and are refused at `init`); if something in
            front of `loss_scaling` is not linear in the gradients, unless the scale is always 1, or adds them up over
            steps; if `master_weights` stands in a chain beside a rule that keeps its state in 16 bits, which it should
            wrap; or if `params_ema` is not the last element of its chain, or stands outside of `master_weights` and
            averages rounded parameters.

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
    _require_linear_gradients(program, len(jax.tree.leaves(grads)), jax.tree.leaves(state))
    _require_final_updates(program, updates)
    _require_wide_state_before_masters(state)
    _require_averages_of_masters(state)
    _require_averages_at_the_end(state)


# ---- updates that are final -----------------------------------------------------------------------------------------


class _Update(NamedTuple):
    """The history of a value since a transformation made it final.

    Attributes:
        author: the transformation; empty for a value that nobody made final.
        changed_by: the first primitive, or transformation, that changed it after that; or empty.
        is_sent: whether it travels as the number where it lands, not as an update, until it arrives: see `mpx.zero1`.
        is_zero: whether it is zero everywhere.
        is_mask: whether it is a boolean in a numeric dtype.
    """

    author: str = ""
    changed_by: str = ""
    is_sent: bool = False
    is_zero: bool = False
    is_mask: bool = False


def _require_final_updates(program: Any, updates: Any) -> None:
    """Raise if an update is changed after a transformation has chosen where it lands."""
    paths = list(_trees.leaves_by_path(updates))
    found = propagate(program, [_Update()] * len(program.jaxpr.invars), _update_rule, _constant)[: len(paths)]
    changed = [(path, update) for path, update in zip(paths, found, strict=True) if update.changed_by]
    if not changed:
        return
    path, update = changed[0]
    advice = "make it the last element of the chain."
    if update.author == "master_weights":
        advice = (
            "put it around the whole chain, `master_weights(optax.chain(...))`, or move what clips or scales gradients "
            "in front of it."
        )
    raise ValueError(
        f"`check_chain`: the update of {_trees.path_string(path)!r} was final when `{update.author}` had rounded it, "
        f"but `{update.changed_by}` changes it after that ({len(changed)} of {len(_final(found))} such leaves). "
        f"Nothing may change updates after `{update.author}`: {advice}"
    )


def _constant(v: Any) -> _Update:
    return _Update(is_zero=_is_zero(v))


def _final(values: Sequence[_Update]) -> list[_Update]:
    return [value for value in values if value.author]


def _update_rule(eqn: JaxprEqn, operands: list[_Update]) -> Sequence[_Update]:
    """Return what has happened to the results of an equation, from what has happened to its operands."""
    name, count = eqn.primitive.name, len(eqn.outvars)
    is_mask = [value.is_mask or dtype_of(v) == np.bool_ for v, value in zip(eqn.invars, operands, strict=True)]
    if name == "name" and eqn.params["name"].startswith(MARK):
        return [_named(eqn.params["name"].removeprefix(MARK), _final(operands))]
    if holds_programs_run_once(eqn):
        return [_one_of(values, name) for values in propagate_inside(eqn, operands, _update_rule, _constant)]
    if name == "select_n":
        return [_one_of(operands[1:], name)]
    if name in MOVES or (name == "convert_element_type" and not _narrows(eqn)):
        return [_together(operands)._replace(is_mask=is_mask[0])] * count
    if name == "mul" and any(is_mask):
        return [_together(operands)]
    final = _final(operands)
    return [_Update() if not final else final[0] if final[0].is_sent else _changed(final[0], name)] * count


def _changed(value: _Update, by: str) -> _Update:
    return _Update(value.author, value.changed_by or by)


def _named(author: str, earlier: Sequence[_Update]) -> _Update:
    """Return what has happened to an update on which a transformation leaves its name."""
    if not earlier:
        return _Update(author, is_sent=author == SENT)
    if author == SENT:
        return earlier[0]._replace(is_sent=True)
    if earlier[0].is_sent:
        return _Update(author if earlier[0].author == SENT else earlier[0].author, earlier[0].changed_by)
    return _Update(earlier[0].author, author)


def _one_of(values: Sequence[_Update], chooser: str) -> _Update:
    """Return what has happened to a value that is one of several: zero may take its place, and nothing else."""
    final = _final(values)
    if len(values) == 1 or (final and final[0].is_sent):
        return (final or values)[0]
    if not final:
        return _Update(is_zero=all(value.is_zero for value in values))
    others = any(not (value.author or value.is_zero) for value in values)
    return _changed(_together(values), chooser) if others else _together(values)


def _together(values: Sequence[_Update]) -> _Update:
    """Return what has happened to values put side by side, or to one that is masked: the change if there is one."""
    final = _final(values)
    if not final:
        return _Update(is_zero=any(value.is_zero for value in values))
    return next((value for value in final if value.changed_by), final[0])


def _narrows(eqn: JaxprEqn) -> bool:
    return eqn.params["new_dtype"].itemsize < dtype_of(eqn.invars[0]).itemsize


def _is_zero(v: Any) -> bool:
    return is_literal(v) and np.ndim(v.val) == 0 and v.val == 0


# ---- gradients that are scaled --------------------------------------------------------------------------------------

# How a value depends on the gradients: not at all, linearly, or through something that is not linear in them.
_OTHER, _ZERO, _STATE, _GRADIENT = "other", "zero", "state", "gradient"
_LINEAR = MOVES | SUMS | EXCHANGES | {"convert_element_type", "neg"}


class _NotLinear(NamedTuple):
    """The first primitive that is not linear in the gradients, and whether it adds them to a part of the state."""

    primitive: str
    is_average: bool


def _require_linear_gradients(program: Any, gradients: int, state: Sequence[Any]) -> None:
    """Raise if something in front of `loss_scaling` is not linear in the gradients, or adds them up over steps."""
    inputs = [_GRADIENT] * gradients
    inputs += [_STATE if _trees.is_floating(leaf) and leaf.ndim else _OTHER for leaf in state]
    inputs += [_OTHER] * (len(program.jaxpr.invars) - len(inputs))
    received: list[tuple[str, Any]] = []

    def rule(eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        name = eqn.primitive.name
        if name == "name" and eqn.params["name"] in (SCALED, UNSCALED):
            received.append((eqn.params["name"], operands[0]))
            return [_OTHER]
        if holds_programs_run_once(eqn):
            columns = propagate_inside(eqn, operands, rule, constant)
            return [_gradient_of("select_n", [_OTHER, *values]) for values in columns]
        return [_gradient_of(name, operands)] * len(eqn.outvars)

    constant = lambda v: _ZERO if _is_zero(v) else _OTHER
    propagate(program, inputs, rule, constant)
    for name, value in received:
        if isinstance(value, _NotLinear) and value.is_average:
            raise ValueError(
                f"`check_chain`: an average or a sum over steps (`{value.primitive}`) stands in front of "
                "`loss_scaling`. It never loses an infinity or NaN, so that every later step is skipped. Put it "
                "inside: `loss_scaling(optax.MultiSteps(...))`."
            )
        if isinstance(value, _NotLinear) and name == SCALED:
            raise ValueError(
                f"`check_chain`: gradients reach `loss_scaling` scaled, but `{value.primitive}` in front of it is not "
                "linear in them, as in clipping, and sees scaled gradients. Put it inside: "
                "`loss_scaling(optax.chain(...))`."
            )


def _gradient_of(name: str, operands: Sequence[Any]) -> Any:
    """Return how the results of a primitive depend on the gradients, from how its operands do."""
    not_linear = next((value for value in operands if isinstance(value, _NotLinear)), None)
    if not_linear is not None:
        return not_linear
    if _GRADIENT in operands:
        is_average = name in ("add", "sub") and _STATE in operands
        return _GRADIENT if _is_linear(name, operands) else _NotLinear(name, is_average)
    if _STATE in operands:
        return _STATE
    return _ZERO if name in MOVES and set(operands) == {_ZERO} else _OTHER


def _is_linear(name: str, operands: Sequence[Any]) -> bool:
    """Return whether a primitive, of gradients and other values, is linear in the gradients."""
    if name in ("mul", "dot_general"):
        return operands.count(_GRADIENT) == 1
    if name == "div":
        return operands[1] != _GRADIENT
    if name in ("add", "sub"):
        return set(operands) == {_GRADIENT}
    if name == "select_n":
        return operands[0] != _GRADIENT and set(operands[1:]) <= {_GRADIENT, _ZERO}
    return name in _LINEAR


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
    """Raise if something may change updates after `params_ema`, which averages what they lead to."""
    parts_of = lambda x: list(x.values()) if isinstance(x, dict) else list(x)
    is_chain = lambda x: type(x) in (tuple, dict) and any(isinstance(part, ParamsEmaState) for part in parts_of(x))
    for chain in jax.tree.leaves(state, is_leaf=is_chain):
        if not is_chain(chain):
            continue
        parts = parts_of(chain)
        first = next(i for i, part in enumerate(parts) if isinstance(part, ParamsEmaState))
        if not all(isinstance(part, ParamsEmaState) or _is_measure(part) for part in parts[first:]):
            raise ValueError(
                "`check_chain`: `params_ema` averages the parameters that its updates lead to, but another element "
                "comes after it and may change them. Make it the last element of the chain."
            )


def _is_measure(state: Any) -> bool:
    """Return whether a state only measures, as a snapshot does: nothing is computed from it."""
    fields = fields_of(type(state))
    return fields is not None and set(fields.roles.values()) == {"measure"}
