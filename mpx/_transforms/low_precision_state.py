"""`low_precision_state`: compute a rule in float32 and keep its moments in 16, 8 or 4
bits between steps.
"""

import itertools
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import jax
import numpy as np
import optax
from jax.typing import DTypeLike

from mpx import _errors, _flax, _trees
from mpx._chain import element
from mpx._noise import kept_key, keys_of_step
from mpx._stored.assignment import (
    Assignment,
    assign,
    checked_patterns,
    require_every_pattern_used,
    require_sound_formats,
    require_stored_as_assigned,
)
from mpx._stored.blocks import BlockFormat
from mpx._stored.blockwise import Blockwise4bit
from mpx._stored.leaves import leaves_of
from mpx._stored.roles import register_state
from mpx._stored.state_format import FLOAT32, StateFormat, is_stored, store
from mpx._transforms.upcast import run_in_float32, with_measurements_of

Rounding = Literal["nearest", "stochastic"]
_F32 = np.dtype(np.float32)


@register_state(inner_state="inner", key="key")
class LowPrecisionState(NamedTuple):
    """State of `low_precision_state`.

    Attributes:
        inner_state: state of the wrapped rule. Each chosen leaf is a bfloat16 or
            float16 array, or a `StoredLeaf` that holds the codes, the scales and the
            format.
        key: the raw data (uint32) of the PRNG key for the next step; `optax.MaskedNode`
            if rounding is to nearest.
    """

    inner_state: optax.OptState
    key: Any


@element
def low_precision_state(
    inner: optax.GradientTransformation,
    formats: Mapping[str, DTypeLike | StateFormat],
    *,
    min_size: int = 4096,
    rounding: Rounding | None = None,
    key: jax.Array | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Keep chosen leaves of any rule's state in 16, 8 or 4 bits between steps; the rule
    computes in float32.

    Adam keeps 8 bytes a parameter. With both moments in 8 bits it keeps 2; with split
    masters around it and bfloat16 weights and gradients a training run takes 8 bytes a
    parameter in all, and its masters are float32.

    The rule sees float32 parameters, gradients and state, as in `upcast`; its new state
    is rounded once, when it is stored. Rounded to nearest, a slow average stands still:
    in 8 bits a first moment stops at 0.5% of the largest of its block or more, and a
    second moment with a decay of 0.999 never falls, in bfloat16 neither. Stochastic
    rounding follows such an average in the mean. Codes are rounded so by default.

    Args:
        inner: any Optax transformation or chain. Without it this is an element of
            `chain`.
        formats: regular expressions, each with the format of the leaves it matches:
            bfloat16, float16, float32 (for exceptions), by name or dtype; or a
            `StateFormat` such as `Blockwise8bit()` or `Blockwise4bit()`. An expression
            is searched in the "/"-joined path of a leaf of the rule's state, such as
            `0/mu/layers/kernel`, and matches whole components. The first that matches
            wins, so exceptions come first. A role (`"first moment"`, `"second moment"`
            or `"sum of gradients"`) stands for all leaves of that role, whatever a rule
            calls them: `mu` matches those of a layer called `mu` too.
        min_size: leaves with fewer elements stay float32: they cost little, and biases
            and gains need their precision.
        rounding: `"stochastic"`: up or down at random such that the mean is right. (In
            8 bits a second moment below the smallest code is always rounded up to it.
            Equal numbers of a leaf are rounded alike.) `"nearest"`: refused for
            `Blockwise4bit`, with which training fails. None: codes at random, bfloat16
            and float16 to nearest.
        key: a PRNG key, for stochastic rounding; `jax.random.key(0)` if None. The state
            keeps it, and every update changes it, except a step that `loss_scaling`,
            `optax.apply_if_finite` or `optax.MultiSteps` *around* this skips.

    Returns:
        A transformation with state `LowPrecisionState`. Its updates are float32.
        Integers, booleans and scalars in the state are never touched.

    Raises:
        ValueError: at `init`, if a pattern decides about no leaf, or about one that
            must not be rounded so (float64 and complex leaves, masters, compensations,
            second moments in float16).

    Example:
        >>> tx = low_precision_state(
        ...     optax.adam(1e-3), {"mu": "bf16", "nu": Blockwise8bit()}
        ... )
        >>> params = {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}
        >>> state = tx.init(params)
        >>> {name: mu.dtype for name, mu in optax.tree.get(state, "mu").items()}
        {'b': dtype('float32'), 'w': dtype(bfloat16)}

    References:
        Dettmers et al. 2021 (arXiv 2110.02861), for 8 bits; Zamirai et al. 2020 (arXiv
        2010.06192), for 16 at random.
    """
    inner = run_in_float32(inner, _F32, "low_precision_state")
    patterns = checked_patterns(formats)
    if not _errors.is_integer(min_size) or min_size < 0:
        raise ValueError(
            "`low_precision_state`: `min_size` must be a number of elements, but got"
            f" {min_size!r}."
        )
    is_random = _require_sound_rounding(rounding, key, patterns)
    key = None if key is None else _errors.one_key(key, "low_precision_state")

    def init_fn(params):
        state = inner.init(params)
        if _trees.find_states(state, LowPrecisionState):
            raise ValueError(
                "`low_precision_state`: the rule inside stores its state in few bits"
                " already. Give all formats to one of the two."
            )
        assignment = assign(state, patterns, min_size)
        # Else there is no state at all.
        if any(_trees.is_inexact(p) and np.shape(p) for p in jax.tree.leaves(params)):
            require_every_pattern_used(state, patterns, assignment)
        require_sound_formats(state, patterns, assignment)
        _warn_of_losses_in_4_bits(state, assignment)
        kept = kept_key(key) if is_random else optax.MaskedNode()
        return LowPrecisionState(_store(state, assignment, None, rounding), kept)

    def update_fn(updates, state, params=None, **extra_args):
        _errors.require_state(state, LowPrecisionState, "low_precision_state")
        params = _errors.trained(params, updates)
        # From the state that came, which may be one of a checkpoint, or of other
        # settings.
        assignment = assign(state.inner_state, patterns, min_size)

        # A function, since it traces `inner.init`, and most updates have no use for it.
        def as_made():
            made = jax.eval_shape(inner.init, updates if params is None else params)
            return with_measurements_of(state.inner_state, made)

        require_stored_as_assigned(state.inner_state, assignment, as_made)
        has_boxes = bool(_flax.boxes_of(updates))
        wide = _load(state.inner_state, assignment, as_made() if has_boxes else None)
        updates, wide = inner.update(updates, wide, params, **extra_args)
        inner_state = with_measurements_of(wide, state.inner_state)
        if inner_state is not state.inner_state:
            assignment = assign(inner_state, patterns, min_size)
        keys, next_key = None, state.key
        if is_random:
            stored = [assigned.format for assigned in assignment.values()]
            count = 1 + sum(not isinstance(x, BlockFormat) for x in stored)
            keys, next_key = keys_of_step(state.key, key, count, "low_precision_state")
        stored = _store(wide, assignment, keys, rounding)
        # Names stay as `init` gave them, which may have seen axes that are explicit.
        if has_boxes:
            stored = jax.tree.unflatten(
                jax.tree.structure(inner_state), jax.tree.leaves(stored)
            )
        return updates, LowPrecisionState(stored, next_key)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


# Rules that train worse with averages of 4 bits, by the table of state formats.
_LOSE_IN_4_BITS = {
    "MuonState": "Muon",
    "MadgradState": "MADGRAD",
    "ScaleByAdanState": "Adan",
    "ScaleBySimplifiedAdEMAMixState": "Simplified AdEMAMix",
}


def _warn_of_losses_in_4_bits(state: Any, assignment: Assignment) -> None:
    """Warn if averages are to be kept in 4 bits that a rule multiplies or sums up."""
    losing = {
        _LOSE_IN_4_BITS[owner]
        for i, found in enumerate(leaves_of(state))
        if i in assignment and isinstance(assignment[i].format, Blockwise4bit)
        for owner in (part.partition(".")[0] for part in found.path_in_rule)
        if owner in _LOSE_IN_4_BITS
    }
    for rule in sorted(losing):
        _errors.warn(
            f"`low_precision_state`: in 4 bits {rule} trains worse: 3 to 24 spreads"
            " above float32 on a small regression. Keep its state in 8 bits:"
            ' "bf16-split24-8bit", or `mpx.Blockwise8bit()`.'
        )


def _load(state: Any, assignment: Assignment, boxed: Any) -> Any:
    """Return the rule's state in float32; in the boxes of `boxed`, since those of codes
    may lack names.
    """

    def widened(i, leaf):
        if is_stored(leaf):
            return leaf.decode()
        is_rounded = i in assignment and assignment[i].format != FLOAT32
        return leaf.astype(_F32) if is_rounded else leaf

    leaves, treedef = jax.tree.flatten(state, is_leaf=is_stored)
    treedef = treedef if boxed is None else jax.tree.structure(boxed)
    return treedef.unflatten([widened(i, leaf) for i, leaf in enumerate(leaves)])


def _store(
    state: Any,
    assignment: Assignment,
    keys: jax.Array | None,
    rounding: Rounding | None,
) -> Any:
    """Encode the rule's state to keep it until the next step; with keys, one for all
    blocks and one for each other leaf, round at random what is to be.
    """
    # The noise of blocks is a hash of key and number, so they share a key. Then the
    # kernels of all leaves share their scalars.
    of_leaves = itertools.repeat(None) if keys is None else iter(keys)
    of_blocks, numbers = next(of_leaves), itertools.count()

    def keep(node):  # an array, or a box of Flax with one
        assigned = [assignment.get(next(numbers)) for _ in jax.tree.leaves(node)]
        if len(assigned) != 1 or assigned[0] is None or assigned[0].format == FLOAT32:
            return node
        format, (leaf,) = assigned[0].format, jax.tree.leaves(node)
        key = of_blocks if isinstance(format, BlockFormat) else next(of_leaves)
        is_random = rounding == "stochastic" or format.rounds_at_random
        kept = store(node, format, key if is_random else None)
        if is_stored(kept) and kept.shape != leaf.shape:
            name = type(format).__name__
            raise TypeError(
                f"`low_precision_state`: `{name}.decode` must return the shape that was"
                f" given to `{name}.encode`, but for {_trees.dtype_and_shape(leaf)} it"
                f" returned {list(kept.shape)}."
            )
        return kept

    return jax.tree.map(keep, state, is_leaf=_flax.is_box)


def _require_sound_rounding(
    rounding: Any, key: Any, patterns: Mapping[str, StateFormat]
) -> bool:
    """Return whether anything is rounded at random; raise if that cannot be, or is not
    what was asked for.
    """
    formats = patterns.values()
    if rounding is None:
        is_random = any(format.rounds_at_random for format in formats)
    else:
        _errors.require_choice(
            get_args(Rounding), rounding, "`low_precision_state`: `rounding`"
        )
        is_random = rounding == "stochastic"
    if is_random and all(format == FLOAT32 for format in formats):
        raise ValueError(
            "`low_precision_state`: every format is float32, so stochastic rounding"
            " would do nothing."
        )
    if rounding == "nearest" and any(isinstance(x, Blockwise4bit) for x in formats):
        raise ValueError(
            "`low_precision_state`: training fails if `Blockwise4bit` is rounded to"
            " nearest. Leave `rounding` out."
        )
    if key is not None and not is_random:
        raise ValueError(
            "`low_precision_state`: a `key` was given, but rounding to nearest has no"
            ' use for it. Add `rounding="stochastic"`, or leave the key out.'
        )
    return is_random
