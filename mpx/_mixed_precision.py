"""`mixed_precision`: put a whole recipe around any rule."""

from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np
import optax

from mpx import _errors, _flax, _trees
from mpx._chain import element
from mpx._loss_scale import LossScale
from mpx._policy import Policy, as_policy, policy_text, with_policy
from mpx._recipes import RECIPES
from mpx._stored.blockwise import Blockwise4bit, Blockwise8bit
from mpx._stored.leaves import leaves_of
from mpx._transforms.kahan_summation import kahan_summation
from mpx._transforms.loss_scaling import loss_scaling
from mpx._transforms.low_precision_state import low_precision_state
from mpx._transforms.master_weights import Storage, master_weights
from mpx._transforms.stochastic_rounding import stochastic_rounding
from mpx._transforms.upcast import upcast

# What a recipe keeps in few bits, by the roles of `register_state`.
_FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {"first moment": "bf16", "second moment": "bf16"},
    "8bit": {"first moment": Blockwise8bit(), "second moment": Blockwise8bit()},
    "4bit": {"first moment": Blockwise4bit(), "second moment": Blockwise8bit()},
}
_MIN_SIZE = 4096  # smaller leaves stay float32, in recipes that keep codes


@element
def mixed_precision(
    inner: optax.GradientTransformation,
    policy: Policy | str,
    *,
    storage: Storage | None = None,
    key: jax.Array | None = None,
    loss_scale: LossScale | None = None,
    axis_name: Hashable | tuple[Hashable, ...] | None = None,
    updates_in_param_dtype: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Make any rule train a model under a recipe or a policy.

    The name of a recipe chooses the policy, how masters are kept, and the formats of
    the rule's moments; `recipes` lists the names. Under any other policy:

    - Parameters stored in less than float32 (by the policy or an override) get
      `master_weights`.
    - Where gradients are float16, because the model computes in it or stores parameters
      in it, they get `loss_scaling`, around the masters.
    - Under a policy that needs neither, the rule gets neither.

    Parameters come as the policy stores them (`Policy.cast_to_param`). Only a model of
    Flax NNX may come in float32: `init` casts its variables where they are, so that it
    goes to a trainer that makes models and `nnx.Optimizer` itself. (`jax.jit(tx.init)`
    casts copies: use `nnx.jit`.)

    Args:
        inner: any Optax transformation or chain. Without it this is an element of
            `chain`.
        policy: the name of a recipe such as `"bf16-split-8bit"`, a `Policy`, or the
            string of one.
        storage: how masters are kept, as in `master_weights`, if no recipe says so.
            None is `"split"`, which keeps the 16 bits that a bfloat16 parameter lacks:
            AdamW takes 14 bytes a parameter, where float32 takes 16. Masters of float16
            parameters are full.
        key: a PRNG key, for recipes and masters that are rounded at random, as all in 8
            and 4 bits are; `jax.random.key(0)` if None. Other recipes leave it unused.
        loss_scale: of `loss_scaling`; `DynamicLossScale()` if None.
        axis_name: of `loss_scaling`.
        updates_in_param_dtype: of `master_weights`, for libraries that add updates
            without a cast: with the recipe `"bf16-masters"`, or with `storage="full"`.

    Raises:
        TypeError: if `inner` is not a transformation.
        ValueError: if there is no such recipe or policy; if `storage`, `key`,
            `loss_scale` or `axis_name` is given and would do nothing, or
            `updates_in_param_dtype` without full masters; at `init` and `update`, if
            the policy stores parameters below float32 and all given ones are float32 or
            wider (and not of NNX, at `init`); at `init`, if this stands inside a
            wrapper that hides them, such as `low_precision_state`, or if a recipe keeps
            moments in fewer bits and the rule has no moments.

    Example:
        >>> tx = mixed_precision(optax.adamw(3e-4), "bf16-split24-8bit")
        >>> state = tx.init({"w": jnp.ones((64, 64), jnp.bfloat16)})
        >>> state.master["w"].dtype, optax.tree.get(state, "nu")["w"].codes.dtype
        (dtype('uint8'), dtype('uint8'))
        >>> tx = mixed_precision(optax.adamw(3e-4), "params=f32,compute=f16,output=f32")
        >>> type(tx.init({"w": jnp.ones(2)})).__name__
        'LossScalingState'
    """
    policy = as_policy(policy, "mixed_precision")
    recipe = RECIPES.get(policy.recipe or "")
    tx: Any = _errors.as_transformation(inner, "mixed_precision")
    stored: list[Any] = [policy.param_dtype, *(dtype for _, dtype in policy.overrides)]
    is_narrow = any(dtype.itemsize < 4 for dtype in stored)
    needs_scaling = np.float16 in (policy.compute_dtype, *stored)
    says = "is a recipe, which says how weights are kept"
    is_wide = "stores no parameters below float32"
    is_unscaled = "has no float16 in it"
    _require_use(
        policy,
        storage=(storage, is_narrow and not recipe, says if recipe else is_wide),
        key=(key, is_narrow or recipe, is_wide),
        loss_scale=(loss_scale, needs_scaling, is_unscaled),
        axis_name=(axis_name, needs_scaling, is_unscaled),
    )
    # Under a recipe of float32 parameters an override may store some in 16 bits.
    weights: Any = (recipe.weights if recipe else storage) or (
        "split" if is_narrow else None
    )
    moments = recipe.moments if recipe else None
    if moments is not None:
        tx = _with_moments(tx, moments, policy, None if moments == "bf16" else key)
    if recipe is not None and weights not in ("split24", "stochastic"):
        key = None  # so that the name of the recipe is all that changes
    if updates_in_param_dtype and weights != "full":
        raise ValueError(
            "`mixed_precision`: `updates_in_param_dtype` needs full masters, which"
            f" {policy_text(policy)!r} does not keep. Take the recipe 'bf16-masters',"
            ' or a policy with 16-bit parameters and `storage="full"`.'
        )
    if recipe and weights == "kahan":
        tx = optax.chain(tx if moments else upcast(tx), kahan_summation())
    elif recipe and weights == "stochastic":
        tx = optax.chain(upcast(tx), stochastic_rounding(key))
    elif weights is not None:
        kept: Any = weights
        tx = master_weights(
            tx, storage=kept, key=key, updates_in_param_dtype=updates_in_param_dtype
        )
    if weights is not None:
        tx = _checked(optax.with_extra_args_support(tx), policy)
    if needs_scaling:
        tx = loss_scaling(tx, loss_scale, axis_name=axis_name)
    if weights is None and not needs_scaling:
        tx = _errors.with_checked_shapes(tx, "mixed_precision")
    return with_policy(tx, policy, "mixed_precision")


def _with_moments(
    inner: optax.GradientTransformationExtraArgs,
    moments: str,
    policy: Policy,
    key: jax.Array | None,
) -> optax.GradientTransformationExtraArgs:
    """Keep the moments of a rule in fewer bits, all of them in 16, large ones in 8 or
    4.
    """
    formats, min_size = _FORMATS[moments], 0 if moments == "bf16" else _MIN_SIZE
    tx = low_precision_state(inner, formats, min_size=min_size, key=key)

    def init_fn(params):
        leaves = [
            found
            for found in leaves_of(jax.eval_shape(inner.init, _trees.shapes_of(params)))
            if _trees.is_inexact(found.leaf) and found.leaf.shape
        ]
        unknown = [
            _trees.path_string(found.path)
            for found in leaves
            if found.role == "unknown" and found.leaf.size >= _MIN_SIZE
        ]
        remedy = _DECLARE.format(_errors.listed(unknown, 5)) if unknown else ""
        # A group of `optax.partition` may have no parameters, or numbers alone, whose
        # moments stay as they are.
        has_arrays = any(
            _trees.is_floating(p) and np.ndim(p) for p in jax.tree.leaves(params)
        )
        if has_arrays and all(found.role not in formats for found in leaves):
            raise ValueError(
                f"`mixed_precision`: the recipe {policy.recipe!r} keeps the rule's"
                " moments in fewer bits, but no field of its state is known as a"
                " moment. Take a recipe that leaves its state alone, such as"
                f" 'bf16-split'.{remedy}"
            )
        if unknown:
            _errors.warn(
                f"`mixed_precision`: the recipe {policy.recipe!r} keeps moments in"
                f" fewer bits.{remedy}"
            )
        return tx.init(params)

    return optax.GradientTransformationExtraArgs(init_fn, tx.update)


_DECLARE = (
    " It does not know what these leaves of the state are, so they stay as they are:"
    " {}. Declare the fields of the state's type: `mpx.register_state(name_of_field="
    '"first moment", ...)` (or "second moment", if it is never negative; or "weights",'
    " which nothing may round)."
)


def _checked(
    tx: optax.GradientTransformationExtraArgs, policy: Policy
) -> optax.GradientTransformationExtraArgs:
    """Cast the variables of a model of NNX; refuse other parameters that nobody has
    cast, or that a wrapper widened.
    """

    def narrow(tree):
        return any(map(_trees.is_narrower, jax.tree.leaves(tree)))

    def as_stored(tree):
        return policy.cast_to(policy.param_dtype, tree)

    def is_uncast(params):
        return not narrow(params) and narrow(as_stored(_trees.shapes_of(params)))

    def require_cast(params, remedy):
        if is_uncast(params):
            raise ValueError(
                f"`mixed_precision`: the policy {policy_text(policy)!r} stores"
                " parameters below float32, but all of those given are float32 or"
                " wider. Cast them first: `params = policy.cast_to_param(params)`."
                f" {remedy}"
            )

    def init_fn(params):
        if is_uncast(params):
            _cast_variables(params, as_stored)
        require_cast(
            params,
            "If they are cast, a wrapper around this hides it (`upcast`,"
            " `low_precision_state`, `master_weights`): put this around everything"
            " else, as in `mixed_precision(low_precision_state(rule, formats),"
            " policy)`. If a library makes the call, take a recipe of float32"
            " parameters, such as 'bf16-autocast'.",
        )
        return tx.init(params)

    def update_fn(updates, state, params=None, **extra_args):
        require_cast(
            params,
            "Those that `init` got were cast. `optax.apply_updates` keeps dtypes"
            " (`equinox.apply_updates` does not: see `updates_in_param_dtype`)."
            " Of an NNX model `jax.jit(tx.init)` casts copies of its variables, and a"
            " wrapper around this may have made some: call `init` outside of `jax.jit`,"
            " or inside of `nnx.jit`, or cast the model first.",
        )
        return tx.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _cast_variables(params: Any, cast: Callable[[Any], Any]) -> None:
    """Cast variables of NNX where they are: `nnx.Optimizer` hands over those of its
    model, not copies.
    """
    variables, others = map(_flax.variables_of, (params, cast(params)))
    for variable, other in zip(variables, others, strict=True):
        value = other.get_value()
        # Labels of arrays make `optax.partition` hand over copies of variables.
        if _trees.is_masked(value):
            raise ValueError(
                "`mixed_precision`: the variables of this NNX model are copies,"
                " which a wrapper around this made (`optax.partition` with labels"
                " of arrays), so that the model cannot be cast. Label variables:"
                " `jax.tree.map_with_path(label_of, params, is_leaf=lambda x:"
                " isinstance(x, nnx.Variable))`. Or cast the model first, by"
                " `nnx.update(model, policy.cast_to_param(nnx.state(model,"
                " nnx.Param)))`; or put this around the wrapper."
            )
        variable.set_value(value)


def _require_use(policy: Policy, **uses: tuple[Any, Any, str]) -> None:
    """Raise for an argument that is given and not used, and say why it is not."""
    for argument, (given, is_used, reason) in uses.items():
        if given is not None and not is_used:
            raise ValueError(
                f"`mixed_precision`: `{argument}` was given, but the policy"
                f" {policy_text(policy)!r} {reason}, so it would do nothing. Leave it"
                " out, or wrap the rule by hand."
            )
