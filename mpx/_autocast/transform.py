"""`autocast` and `full_precision`: choose the precision of a function from outside."""

import dataclasses
import enum
import functools
import inspect
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core
from jax.typing import DTypeLike

from mpx import _errors, _trees
from mpx._autocast import (
    contraction,
    differentiation,
    in_place,
    interpreter,
    recompute,
)
from mpx._autocast import precision as precisions
from mpx._autocast.control_flow import HANDLERS
from mpx._autocast.plan import DECIDED, Plan, Settings, walk
from mpx._autocast.planner import Planner
from mpx._autocast.rules import DEFAULT_RULES, Rule, can_narrow, known_names
from mpx._autocast.tags import Tag
from mpx._dtypes import dtype_or_none
from mpx._fp8 import Fp8
from mpx._jaxprs import called_jaxpr, constants_of, dtype_of, open_jaxpr
from mpx._loss_scale import NoOpLossScale, StaticLossScale, require_powers_of_two
from mpx._policy import Policy, get_policy
from mpx._primitives import facts_of

F = TypeVar("F", bound=Callable[..., Any])

# Short names of jax's policies.
_CHECKPOINTS = (
    "dots",
    "dots_with_no_batch_dims",
    "everything",
    "nothing",
)


class _Argument(NamedTuple):
    """A leaf of the arguments that is an array."""

    leaf: Any
    view: differentiation.View | None  # if a gradient around differentiates it
    name: str  # its path inside of the argument
    is_as_it_is: bool  # whether the user wants no float32 view of it


@dataclasses.dataclass(frozen=True)
class Autocast:
    """The parts of an autocast function, as other parts of mpx read them from it."""

    fun: Callable[..., Any]
    settings: Settings
    policy: Policy | None  # if the user gave one, and not a dtype
    checkpoint: Callable[..., Any] | None  # a policy of `jax.checkpoint`
    # If float16 needs no scale from `value_and_grad`.
    loss_scale: NoOpLossScale | StaticLossScale | None
    # The arguments that get no float32 view: numbers, or a pattern of paths.
    as_they_are: tuple[int, ...] | str

    def run(
        self, traced: "Traced", args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the result of the function for the arguments it was traced with."""
        precision, plan = self.settings.precision, traced.plan
        reason = _why_nothing_is_narrowed(precision, plan)
        if reason is not None:
            _errors.warn(
                f"`autocast`: no matrix product of `{_name_of(self.fun)}` runs in"
                f" {precision.name}: {reason} `mpx.explain` shows each product."
            )
        if self.checkpoint is None:
            plan = recompute.with_activations(plan, self.settings)
        # The mark tells an autocast around this one that precisions are decided here.
        with jax.named_scope(DECIDED):
            scale, arrays = None, traced.arrays
            if isinstance(self.loss_scale, StaticLossScale):
                scale = self.loss_scale.loss_scale
                # Cotangents leave by the arguments, and by the values that the function
                # closes over.
                closed_over = differentiation.with_cotangents_times(
                    constants_of(plan.jaxpr), 1 / scale
                )
                arrays = differentiation.with_cotangents_times(arrays, 1 / scale)
                plan = dataclasses.replace(
                    plan,
                    jaxpr=jex_core.ClosedJaxpr(open_jaxpr(plan.jaxpr), closed_over),
                )

            def evaluate(arrays):
                return interpreter.run(plan, arrays, self.settings)

            if self.checkpoint is not None:
                evaluate = jax.checkpoint(evaluate, policy=self.checkpoint)
            values = evaluate(arrays)
            if scale is not None:
                values = differentiation.with_cotangents_times(values, scale)
            if self.needs_a_scale and not traced.plan.runs_as_traced:
                values = differentiation.needing_a_scale(values, _name_of(self.fun))
        result, changes = traced.rebuild(values)
        in_place.hand_back((args, kwargs), changes)
        return result

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Traced":
        """Trace the function on a float32 view of its arguments, and plan what to do
        with each operation.
        """
        # The paths of leaves inside of their arguments.
        names = {
            path: "/".join(name.split("/")[2:])
            for path, name in _trees.path_names((args, kwargs)).items()
        }
        kept = self._as_they_are(names)
        # A leaf that a gradient around differentiates in float32 is its view already.
        # Others in 16 bits are widened inside of the program, so that their gradients
        # come back in 16 bits, and a checkpoint keeps 16 bits.
        flat = jax.tree.leaves_with_path((args, kwargs))
        views, leaves = differentiation.views_of(
            [leaf for _, leaf in flat], _name_of(self.fun)
        )
        arrays, put = _trees.partition_leaves(leaves, _is_traced)
        given = [
            _Argument(leaf, view, names[path], path in kept)
            for (path, _), leaf, view in zip(flat, leaves, views, strict=True)
            if _is_traced(leaf)
        ]
        result: list[Any] = []

        def program(*arrays):
            viewed = [
                x.astype(np.float32)
                if _trees.is_narrower(leaf) and not is_as_it_is
                else x
                for x, (leaf, *_, is_as_it_is) in zip(arrays, given, strict=True)
            ]
            copy = in_place.copy_with(args, kwargs, put(viewed))
            returned = self.fun(*copy.args, **copy.kwargs)
            _require_leaves(self.fun, jax.tree.leaves(returned))
            out, out_treedef = jax.tree.flatten((returned, copy.find_changes()))
            result[:] = [
                out_treedef,
                [None if _trees.is_array(leaf) else leaf for leaf in out],
            ]
            return [leaf for leaf in out if _trees.is_array(leaf)]

        arrays = [
            jnp.asarray(x) if isinstance(x, (np.ndarray, np.generic)) else x
            for x in arrays
        ]
        try:
            jaxpr = jax.make_jaxpr(program)(*arrays)
        except TypeError as error:
            _explain_dtypes(error)
            raise
        tags = [
            Tag(
                view and view.stored_in,
                self._override(name, leaf),
                is_argument=True,
                gradient_in=view and view.gradient_in,
                is_cast=is_as_it_is,
            )
            for leaf, view, name, is_as_it_is in given
        ]
        plan = Planner(self.settings).plan(jaxpr, tuple(tags))
        for argument, demand in zip(given, plan.demands, strict=True):
            if argument.view is not None:
                argument.view.rounded_to.append(
                    None if self.settings.has_wide_gradients else demand.cotangent_in
                )
        return Traced(plan, arrays, *result)

    def _as_they_are(self, names: Mapping[Any, str]) -> set[Any]:
        """Return the paths of leaves that the user wants in their own dtype."""

        def is_named(path: Any) -> bool:
            if isinstance(self.as_they_are, str):
                return bool(re.search(self.as_they_are, names[path]))
            return path[0].idx == 0 and path[1].idx in self.as_they_are

        kept = set(filter(is_named, names))
        if not kept and self.as_they_are != ():
            raise ValueError(
                f"`autocast`: `as_they_are={self.as_they_are!r}` names no argument of"
                f" `{_name_of(self.fun)}`, and no leaf of one. Give numbers of"
                " arguments, or a pattern that is found in the path of a leaf:"
                f" {_errors.listed(list(names.values()), 4)}."
            )
        return kept

    @property
    def has_float16(self) -> bool:
        """Return whether the function computes in float16, or may by an override."""
        overrides = self.policy.overrides if self.policy else ()
        dtypes = [
            self.settings.precision.dtype,
            *(np.dtype(override) for _, override in overrides),
        ]
        return np.dtype(np.float16) in dtypes

    @property
    def needs_a_scale(self) -> bool:
        """Return whether a gradient needs a scale that nobody has given here."""
        return self.has_float16 and self.loss_scale is None

    def _override(self, name: str, leaf: Any) -> precisions.ContractionPrecision | None:
        """Return the precision of contractions with a leaf, if an override of the
        policy names it.
        """
        if self.policy is None or not _trees.is_floating(leaf):
            return None
        dtype = self.policy.override_at(name)
        return None if dtype is None else precisions.precision_of_dtype(dtype)


@dataclasses.dataclass(frozen=True)
class Traced:
    """A traced function, and the decisions about it."""

    plan: Plan
    arrays: list[Any]  # the arguments that are arrays
    treedef: Any  # of the result, and of what the function changes in Flax NNX modules
    # The leaves of these that are not arrays, and None in the place of arrays.
    static: list[Any]

    def rebuild(self, arrays: list[Any]) -> tuple[Any, Any]:
        """Return the function's result and its changes, from their arrays."""
        rest = iter(arrays)
        return jax.tree.unflatten(
            self.treedef, [next(rest) if leaf is None else leaf for leaf in self.static]
        )


class AutocastFunction:
    """A function under autocast. Unlike a closure it can be pickled under any name."""

    def __init__(self, record: Autocast) -> None:
        # The attributes of a model are its weights: the wrapped function must not keep
        # them alive.
        functools.update_wrapper(
            self,
            record.fun,
            updated=("__dict__",) if inspect.isroutine(record.fun) else (),
        )
        # last: a function around an autocast function may have its attributes
        self.record = record

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.record.run(self.record.trace(args, kwargs), args, kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __reduce__(self) -> tuple[Any, ...]:
        return AutocastFunction, (self.record,)


def autocast_of(fun: Any) -> Autocast | None:
    """Return the parts of a function that `autocast` made; None for any other
    function.
    """
    return fun.record if isinstance(fun, AutocastFunction) else None


def autocast(
    fun: F,
    policy_or_dtype: Policy | Fp8 | DTypeLike,
    *,
    rules: Mapping[Any, Rule] = DEFAULT_RULES,
    checkpoint: str | Callable[..., Any] | None = None,
    reduce_dtype: DTypeLike | None = None,
    loss_scale: NoOpLossScale | StaticLossScale | None = None,
    as_they_are: int | Sequence[int] | str = (),
) -> F:
    """Run a function in float32, with its contractions in a lower precision:
    `torch.autocast` for JAX.

    The model is written once, without dtypes. Its matrix products and convolutions run
    in bfloat16, float16, TF32 or three bfloat16 products. Everything else runs in
    float32: softmax, norms, exponentials, losses, and every sum, in the backward pass
    too. (Gradients of parameters that are cast to bfloat16 are added up in bfloat16,
    where 1 added 1,000 times is 256.)

    Arguments are viewed as float32, without a copy. A contraction of float32 values
    rounds its operands to the compute dtype, and so do the contractions of its
    gradients. The result is in the compute dtype and viewed as float32 again. Products
    with a vector (`vdot`, norms, counts), sums of fewer than 8 numbers (rotary angles),
    products that ask for a high precision, and the bodies of custom derivatives and
    kernels run as they are. A product of two matrices, or of a vector and an argument
    in 16 bits, is narrowed also if it counts: `full_precision` keeps it. `explain`
    shows what happens to a function.

    Each call traces the function, so put `jax.jit` around it. What the function changes
    in variables of a Flax NNX module among its arguments, such as batch statistics,
    changes in that module; other arguments stay as they were, as under `jax.jit`.
    `autocast` composes with the transformations of JAX, inside and outside. Of two
    autocasts the inner one wins.

    Args:
        fun: any function of pytrees. It gets arguments that are not arrays (flags,
            `np.bool_` too, strings) unchanged. Arrays that it closes over keep their
            dtype: pass parameters as arguments.
        policy_or_dtype: a dtype or its name (`"bf16"`, `"f16"`); for matrix products
            only, `"bf16x3"`, `"tf32"` (float32 on a CPU), `"fp8"` or an `Fp8`; or the
            name of a recipe, a policy or its string (`"compute=bf16"`). `autocast`
            reads a policy's `compute_dtype`, `fp8`, `reduce_dtype` and `overrides` (for
            contractions with the arguments they name). It rounds no result:
            `Policy.cast_to_output` does.
        rules: from primitives or their names to `"narrow"`, `"follow"`, `"keep"` or
            `"enter"`; `DEFAULT_RULES` has the rules of all others.
        checkpoint: what is kept for the backward pass instead of computed again:
            `"dots"` (results of contractions, in the compute dtype),
            `"dots_with_no_batch_dims"`, `"nothing"`, `"everything"`, or a policy of
            `jax.checkpoint`. None leaves it to the function. Around a whole loss it
            shrinks what is kept between the passes; around each layer it lowers the
            peak too.
        reduce_dtype: the dtype of gradients of weights while they are added up, over
            devices too: float32, or the compute dtype, which sends half as many bytes
            and rounds at each addition between devices. None: as the policy says, else
            float32 if the program may run on more than one device (`jax.set_mesh`, or
            `jax.device_count()`), and the compute dtype on one. It reaches weights that
            go into a contraction directly, reshaped or moved, not `w + lora`.
        loss_scale: for a float16 function that somebody differentiates without
            `mpx.value_and_grad`, such as a trainer with a `jax.grad` of its own.
            `StaticLossScale(2.0**12)` scales inside of the function: cotangents are
            multiplied where they enter it, and divided in float32 where they leave, so
            that the trainer gets true gradients (or infinities, if the scale is too
            large). It allows no forward mode (`jax.jvp`). A `jax.custom_vjp` inside
            that clips its cotangent clips the scaled one. `NoOpLossScale()` says that
            the caller scales the loss himself, or wants no scale. None warns: gradients
            below 6e-8 become zero in float16.
        as_they_are: what keeps its dtype inside of `fun`, such as a cache in 16 bits
            that it writes to: numbers of arguments, or a pattern that is found in the
            path of a leaf, as in the overrides of a policy (`"cache|cached_key"`).

    Returns:
        A function with the arguments of `fun` and its results for float32 arguments: a
        parameter in 16 bits that it returns comes back in float32. What
        `as_they_are` names comes back in the dtype that `fun` gives it, so that a loop
        can carry a cache. Gradients have the dtypes of the arguments; those of
        `mpx.value_and_grad` and `mpx.grad` are unrounded float32.

    Raises:
        TypeError: if `fun` is not a function; at the call, if a result is neither an
            array nor a pytree.
        ValueError: if an option has another value; at the call, if `as_they_are` names
            nothing.

    Example:
        >>> layer = lambda w, x: jax.nn.softmax(x @ w)
        >>> w, x = jnp.ones((8, 2), jnp.bfloat16), jnp.ones((3, 8))
        >>> eqns = jax.make_jaxpr(autocast(layer, "bf16"))(w, x).eqns
        >>> [
        ...     eqn.outvars[0].aval.dtype
        ...     for eqn in eqns
        ...     if eqn.primitive.name == "dot_general"
        ... ]
        [dtype(bfloat16)]
        >>> autocast(layer, "bf16")(w, x).dtype
        dtype('float32')

    References:
        Micikevicius et al. 2018, Mixed Precision Training (arXiv 1710.03740); the lists
        of `torch.amp`.
    """
    if not callable(fun):
        raise TypeError(f"`autocast` needs a function, but got {type(fun).__name__}.")
    if isinstance(policy_or_dtype, str) and (
        "=" in policy_or_dtype or "-" in policy_or_dtype
    ):
        policy_or_dtype = get_policy(policy_or_dtype)
    precision = precisions.get_precision(policy_or_dtype)
    policy = policy_or_dtype if isinstance(policy_or_dtype, Policy) else None
    if reduce_dtype is None and policy is not None:
        reduce_dtype = policy.reduce_dtype
    reduced = _checked_reduce_dtype(reduce_dtype, precision)
    settings = Settings(precision, _checked_rules(rules), reduced)
    if not (
        loss_scale is None or isinstance(loss_scale, (NoOpLossScale, StaticLossScale))
    ):
        raise TypeError(
            "`autocast`: `loss_scale` must be `StaticLossScale(number)`,"
            f" `NoOpLossScale()` or None, but got {loss_scale!r}. A dynamic scale lives"
            " in the optimizer's state: see `mpx.value_and_grad`."
        )
    record = Autocast(
        fun,
        settings,
        policy,
        _checkpoint_policy(checkpoint),
        loss_scale,
        _checked_names(as_they_are),
    )
    if isinstance(loss_scale, StaticLossScale):
        require_powers_of_two(loss_scale, "autocast")
        if not record.has_float16:
            raise ValueError(
                f"`autocast`: `loss_scale` was given, but {precision.name} needs none."
                " Leave it out."
            )
    return AutocastFunction(record)  # type: ignore[return-value]


def _checked_names(as_they_are: Any) -> tuple[int, ...] | str:
    if isinstance(as_they_are, str):
        _errors.require_pattern(as_they_are, "`autocast`: `as_they_are`")
        return as_they_are
    numbers = (as_they_are,) if _errors.is_integer(as_they_are) else as_they_are
    if not isinstance(numbers, Sequence) or not all(map(_errors.is_integer, numbers)):
        raise TypeError(
            "`autocast`: `as_they_are` must be numbers of arguments, or a pattern of"
            f" paths such as 'cache|cached_key', but got {as_they_are!r}."
        )
    return tuple(numbers)


def _explain_dtypes(error: TypeError) -> None:
    """Say what to do to an error of JAX about 16-bit dtypes."""
    if re.search(r"float16|bf16|f16\b", str(error)):
        where = _errors.line_of_user(error.__traceback__)
        error.add_note(
            f"This was raised under `mpx.autocast`{where and f', at {where}'}."
            " It gives a function float32 views of its arguments in 16 bits. If the"
            " array in 16 bits is a cache among the arguments, name it:"
            ' `autocast(..., as_they_are="cache")`. If the function makes it, such as'
            " a carry of a loop, make it in the dtype of what is added to it:"
            " `jnp.zeros(shape, x.dtype)`."
        )


def full_precision(fun: F) -> F:
    """Make a function an island of float32, where `autocast` narrows nothing.

    Outside `autocast`, 16-bit floating arguments are widened to float32, the function
    runs in float32, and float32 results are cast back to the dtype of the floating
    arguments, if they share one. Inside `autocast`, arguments and results are float32.
    Matrix products of float32 numbers run at the highest precision, not in TF32.

    Args:
        fun: any function of pytrees.

    Returns:
        A function with the same arguments.

    Raises:
        TypeError: if `fun` is not a function.

    Example:
        >>> logits = full_precision(lambda x, w: x @ w)
        >>> logits(jnp.ones((2, 8), jnp.bfloat16), jnp.ones((8, 3), jnp.bfloat16)).dtype
        dtype(bfloat16)
        >>> program = jax.make_jaxpr(autocast(logits, "bf16"))(
        ...     jnp.ones((2, 8)), jnp.ones((8, 3))
        ... )
        >>> program.eqns[0].outvars[0].aval.dtype
        dtype('float32')
    """
    if not callable(fun):
        raise TypeError(
            f"`full_precision` needs a function, but got {type(fun).__name__}."
        )

    @functools.wraps(fun)
    def wrapped(*args, **kwargs):
        leaves = jax.tree.leaves((args, kwargs))
        dtypes = {leaf.dtype for leaf in leaves if _trees.is_floating(leaf)}
        with jax.named_scope(DECIDED), jax.default_matmul_precision("highest"):
            # Pass the original arguments, since the function may change them.
            if not any(map(_trees.is_narrower, leaves)):
                return fun(*args, **kwargs)
            leaves = _trees.cast_tree(leaves, np.float32, which=_trees.is_narrower)
            wide = in_place.copy_with(args, kwargs, leaves)
            result = fun(*wide.args, **wide.kwargs)
            in_place.hand_back((args, kwargs), wide.find_changes())
            if len(dtypes) > 1:
                return result
            return _trees.cast_tree(
                result, dtypes.pop(), which=lambda leaf: leaf.dtype == np.float32
            )

    return wrapped  # type: ignore[return-value]


def _why_nothing_is_narrowed(
    precision: precisions.ContractionPrecision, plan: Plan
) -> str | None:
    """Return why all products stay wider than asked for, if it is a reason that their
    author may not know.
    """
    products, around = [], []
    for step, _, outer in walk(plan.steps):
        if facts_of(step.eqn).contraction:
            products.append(step)
            around += outer
    bytes_of_operands = {dtype_of(step.eqn.invars[0]).itemsize for step in products}
    if precision.fp8 is not None:
        # Here, or by an autocast inside.
        if 1 in bytes_of_operands or any(step.precision.fp8 for step in products):
            return None
        missed = [x.reason for x in products if x.action == "narrow" and x.reason]
        if missed:
            return f"the reason for the first of {len(missed)} is: {missed[0]}."
    # Kept products of 16 bits were narrowed by their author, or by an autocast inside.
    is_narrowed = any(step.action == "narrow" for step in products)
    if not precision.is_narrow or is_narrowed or bytes_of_operands & {1, 2}:
        return None
    custom = [eqn for eqn in around if facts_of(eqn).runs == "custom"]
    if custom:
        source = open_jaxpr(called_jaxpr(custom[0])).debug_info.func_src_info
        return (
            "they stand in a function with a custom derivative,"
            f" `{source.split(' at ')[0]}`, and run as its author wrote it. Put"
            " `autocast` around what it calls (of a differential equation: around the"
            " vector field)."
        )
    setting = getattr(jax.config, "jax_default_matmul_precision", None)
    if setting is not None and any(
        contraction.asked_precision(step.eqn) for step in products
    ):
        return (
            f"`jax_default_matmul_precision` is {setting!r}, which some libraries set"
            " when they are imported."
        )
    reasons = [step.reason or "" for step in products]
    if reasons and all(
        reason.startswith(("operands are complex", "operands are float"))
        for reason in reasons
    ):
        return f"{reasons[0]}."
    return None


def _is_traced(leaf: Any) -> bool:
    return _trees.is_array(leaf) and not isinstance(leaf, np.bool_)


def _name_of(fun: Any) -> str:
    return getattr(fun, "__qualname__", type(fun).__name__)


def _require_leaves(fun: Any, leaves: list[Any]) -> None:
    """Raise for a result that is no pytree: JAX would not see the arrays inside of
    it.
    """
    plain = (bool, int, float, complex, str, bytes, np.dtype, enum.Enum)
    for leaf in leaves:
        if not (_trees.is_array(leaf) or isinstance(leaf, plain) or callable(leaf)):
            raise TypeError(
                f"`autocast`: `{_name_of(fun)}` returns a value of type {type(leaf)},"
                " which is neither an array nor a pytree. Return the arrays inside of"
                " it, or register the type (`jax.tree_util.register_dataclass`)."
            )


def _checked_rules(rules: Mapping[Any, Rule]) -> Mapping[str, Rule]:
    """Return the table by names of primitives. Unknown names are refused, because they
    would do nothing.
    """
    checked = dict(DEFAULT_RULES)
    for key, rule in rules.items():
        is_own = isinstance(key, jex_core.Primitive)
        name = key.name if is_own else key
        if not is_own and name not in known_names():
            raise ValueError(
                f"`autocast`: no primitive of jax is called {name!r}, which `rules`"
                " has. Print `jax.make_jaxpr` of the function to see names. For a"
                " primitive of your own, give the primitive itself."
            )
        possible = _possible_rules(name, is_own=is_own)
        if rule not in possible:
            raise ValueError(
                f"`autocast`: the rule of {name!r} is {rule!r}; it can be"
                f" {' or '.join(possible)}."
            )
        checked[name] = rule
    return checked


def _possible_rules(name: str, *, is_own: bool) -> tuple[Rule, ...]:
    if name in HANDLERS:
        return ("enter", "keep")
    is_arithmetic = is_own or can_narrow(name)
    return ("narrow", "follow", "keep") if is_arithmetic else ("follow", "keep")


def _checked_reduce_dtype(
    reduce_dtype: DTypeLike | None, precision: precisions.ContractionPrecision
) -> np.dtype | None:
    dtype = None if reduce_dtype is None else dtype_or_none(reduce_dtype)
    if reduce_dtype is not None and dtype not in (np.float32, precision.dtype):
        raise ValueError(
            "`autocast`: `reduce_dtype` must be float32, the compute dtype"
            f" ({precision.dtype}) or None, but got {reduce_dtype!r}."
        )
    return dtype


def _checkpoint_policy(
    checkpoint: str | Callable[..., Any] | None,
) -> Callable[..., Any] | None:
    if checkpoint is None or callable(checkpoint):
        return checkpoint
    if checkpoint not in _CHECKPOINTS:
        raise ValueError(
            "`autocast`: `checkpoint` must be one of"
            f" {', '.join(map(repr, _CHECKPOINTS))}, a policy such as those in"
            f" `jax.checkpoint_policies`, or None, but got {checkpoint!r}."
        )
    return getattr(jax.checkpoint_policies, f"{checkpoint}_saveable")
