"""`autocast` and `full_precision`: the precision in which a function computes, chosen from outside."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core
from jax.typing import DTypeLike

from mpx import _trees
from mpx._autocast import compute as computes
from mpx._autocast import in_place, interpreter
from mpx._autocast.control_flow import HANDLERS
from mpx._autocast.plan import MARK, CastPlan, Planner, Settings, Tag
from mpx._autocast.rules import CAN_NARROW, DEFAULT_RULES, FAST_RULES, Rule
from mpx._dtypes import dtype_or_none
from mpx._fp8 import Fp8
from mpx._policy import Policy, get_policy

F = TypeVar("F", bound=Callable[..., Any])

_CHECKPOINTS = ("dots", "dots_with_no_batch_dims", "everything", "nothing")  # short names of those of jax
_RECORD = "__mpx_autocast__"


@dataclasses.dataclass(frozen=True)
class Autocast:
    """The parts of an autocast function, which other parts of mpx read off it."""

    fun: Callable[..., Any]
    settings: Settings
    policy: Policy | None  # if the user gave one, and not a dtype
    checkpoint: Callable[..., Any] | None  # a policy of `jax.checkpoint`

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], dtypes: list[np.dtype | None] | None = None) -> Any:
        """Call the function; `dtypes` tells which 16-bit dtypes represent the float32 leaves of the arguments."""
        traced = self.trace(args, kwargs, dtypes)
        evaluate = lambda arrays: interpreter.run(traced.plan, arrays, self.settings)
        if self.checkpoint is not None:
            evaluate = jax.checkpoint(evaluate, policy=self.checkpoint)
        # The mark tells an autocast around this one that the precision of what runs here is decided.
        with jax.named_scope(MARK):
            values = evaluate(traced.arrays)
        in_place.hand_back((args, kwargs), [c._replace(after=values[c.result]) for c in traced.changes])
        result = traced.rebuild(values)
        return result if self.policy is None else self.policy.cast_to_output(result)

    def trace(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], dtypes: list[np.dtype | None] | None = None
    ) -> "Traced":
        """Trace the function on a float32 view of its arguments, and plan what to do with each operation."""
        flat = jax.tree.leaves_with_path((args, kwargs))
        leaves = [leaf for _, leaf in flat]
        names = _trees.path_names((args, kwargs))
        positions = [i for i, leaf in enumerate(leaves) if _trees.is_array(leaf)]
        result: list[Any] = []

        def program(*arrays):
            viewed = list(leaves)
            for i, array in zip(positions, arrays, strict=True):
                viewed[i] = array.astype(jnp.float32) if _trees.is_narrower(array, np.dtype(np.float32)) else array
            copied_args, copied_kwargs = in_place.copy_with((args, kwargs), viewed)
            objects = in_place.objects_of((copied_args, copied_kwargs))
            out, out_treedef = jax.tree.flatten(self.fun(*copied_args, **copied_kwargs))
            results = [leaf for leaf in out if _trees.is_array(leaf)]
            changes = in_place.among_results(in_place.changes_of(objects), results)
            result[:] = [out_treedef, [None if _trees.is_array(leaf) else leaf for leaf in out], changes]
            return results

        arrays = [leaves[i] for i in positions]
        arrays = [jnp.asarray(x) if isinstance(x, (np.ndarray, np.generic)) else x for x in arrays]
        # A new function each time: nothing that jax remembers of an earlier trace can be found again, with the
        # values that the function closed over then.
        jaxpr = jax.make_jaxpr(program)(*arrays)
        tags = [
            Tag(None if dtypes is None else dtypes[i], self._override(names[flat[i][0]], leaves[i]), is_argument=True)
            for i in positions
        ]
        treedef, static, changes = result
        changes = in_place.real_changes(jaxpr.jaxpr, dict(zip(positions, jaxpr.jaxpr.invars, strict=True)), changes)
        return Traced(Planner(self.settings, HANDLERS).plan(jaxpr, tuple(tags)), arrays, treedef, static, changes)

    def _override(self, name: str, leaf: Any) -> computes.Compute | None:
        """Return how contractions with a leaf shall run, if an override of the policy names it."""
        if self.policy is None or not _trees.is_floating(leaf):
            return None
        dtype = self.policy.override_at("/".join(name.split("/")[2:]))  # without the argument that it stands in
        return None if dtype is None else computes.compute_of_dtype(dtype)


@dataclasses.dataclass(frozen=True)
class Traced:
    """A traced function, and the decisions about it."""

    plan: CastPlan
    arrays: list[Any]  # the arguments that are arrays
    treedef: Any  # of the result
    static: list[Any]  # the leaves of the result that are no arrays, and None for those that are
    changes: list[in_place.Change]  # what the function changes in its arguments

    def rebuild(self, arrays: list[Any]) -> Any:
        """Return the function's result, from its arrays."""
        rest = iter(arrays)
        return jax.tree.unflatten(self.treedef, [next(rest) if leaf is None else leaf for leaf in self.static])


def autocast_of(fun: Any) -> Autocast | None:
    """Return the parts of a function that `autocast` made; None for any other function."""
    function, record = getattr(fun, _RECORD, (None, None))
    # `functools.wraps` copies the attribute to functions around this one, which are others.
    return record if function is fun else None


def autocast(
    fun: F,
    policy_or_dtype: Policy | Fp8 | DTypeLike,
    *,
    rules: Mapping[Any, Rule] = DEFAULT_RULES,
    checkpoint: str | Callable[..., Any] | None = None,
    gradient_dtype: DTypeLike | None = None,
) -> F:
    """Run a function in float32 and its contractions in a lower precision: what `torch.autocast` does, for JAX.

    The model is written once, without dtypes. Its matrix products and convolutions run in bfloat16, float16, TF32 or
    three bfloat16 products, and everything else in float32: softmax, norms, exponentials, losses, and every sum, those
    of the backward pass too. (A model whose parameters are cast to bfloat16 adds up the gradients of all uses of a
    weight in bfloat16, where 1 added 1,000 times is 256.)

    Arguments are viewed as float32: a bfloat16 parameter is not copied for that. A contraction of float32 values
    rounds its operands to the compute dtype and has a result in it, which is viewed as float32 again; so do those of
    its gradients. Kept in float32: products of which nothing is summed (rotary angles), those that ask for
    `precision="high"` or `"highest"` (by `jax.default_matmul_precision` too), integers, float64 and complex numbers,
    and the bodies of custom derivatives and of kernels. `explain` shows what happens to a function.

    Like `jax.jit` it traces the function: on each call, so put `jax.jit` around it. What the function changes in an
    object among its arguments, such as the batch statistics of a Flax NNX model, is changed in that object. It composes
    with `jit`, `grad`, `vmap`, `scan`, `while`, `cond`, `checkpoint`, custom derivatives and `shard_map`, on either
    side; of two autocasts the inner one wins.

    Args:
        fun: any function of pytrees. Arguments that are no arrays (flags, strings, functions) reach it as they are.
            Arrays that it closes over keep their dtype: pass parameters as arguments.
        policy_or_dtype: a dtype or its name (`"bf16"`, `"f16"`); or a way to multiply float32 numbers, `"tf32"` (a CPU,
            which has none, does it in float32) or `"bf16x3"`, for matrix products only; or `"fp8"` or an `Fp8`, for
            matrix products of 8-bit floats; or a policy or its string (`"compute=bf16"`). Of a policy count
            `compute_dtype` and `fp8`, the overrides, for contractions with the arguments that they name, and
            `output_dtype`, for all floating results (left out in a string, it follows `compute`).
        rules: a table like `DEFAULT_RULES`, from the names of primitives (or primitives) to `"narrow"`, `"follow"`,
            `"keep"`, `"narrow_if_representable"` or `"enter"`. `FAST_RULES` also runs activations in the compute dtype.
        checkpoint: the values that the backward pass finds in memory, instead of computing them again: `"dots"`
            (results of contractions, in the compute dtype), `"dots_with_no_batch_dims"`, `"nothing"`, `"everything"`,
            another name of `jax.checkpoint_policies` that is a policy itself, or a policy; None leaves it to the
            function. Around a whole loss it shrinks what is kept between the passes, around each layer the peak too.
        gradient_dtype: float32 for gradients of weights that are sums in float32 which nothing rounds, so that data
            parallel training adds them up in float32 too; None for the compute dtype. It reaches weights that go into
            their contraction as they are, reshaped or moved; not `w + lora`. Such a function has no forward mode, and
            mapped by `vmap` from outside it makes a gradient for each example before they are added up: map inside.

    Returns:
        A function with the arguments and the results of `fun` for float32 arguments. Gradients have the dtypes of the
        arguments; `mpx.value_and_grad` and `mpx.grad` of this very function (not of a function around it; `jax.jit`
        comes last) give them in float32, without any rounding.

    Raises:
        TypeError: if `fun` is no function.
        ValueError: if an option is none of the above; at the call, if `fun` gives an argument another structure, such
            as a Flax NNX model a new variable.

    Example:
        >>> layer = lambda w, x: jax.nn.softmax(x @ w)
        >>> w, x = jnp.ones((4, 2), jnp.bfloat16), jnp.ones((3, 4))
        >>> jax.make_jaxpr(autocast(layer, "bf16"))(w, x).eqns[1].outvars[0].aval.dtype
        dtype(bfloat16)
        >>> autocast(layer, "bf16")(w, x).dtype
        dtype('float32')

    References:
        Micikevicius et al. 2018, Mixed Precision Training (arXiv 1710.03740); the lists of `torch.amp`.
    """
    record = make_autocast(fun, policy_or_dtype, rules, checkpoint, gradient_dtype)

    # The attributes of a model are its weights: the wrapped function must not keep them alive.
    @functools.wraps(fun, updated=("__dict__",) if inspect.isroutine(fun) else ())
    def wrapped(*args, **kwargs):
        return record.call(args, kwargs)

    setattr(wrapped, _RECORD, (wrapped, record))
    return wrapped  # type: ignore[return-value]


def make_autocast(
    fun: Callable[..., Any],
    policy_or_dtype: Policy | Fp8 | DTypeLike,
    rules: Mapping[Any, Rule],
    checkpoint: str | Callable[..., Any] | None,
    gradient_dtype: DTypeLike | None,
) -> Autocast:
    """Check the arguments of `autocast`, and return the parts of the function that it makes."""
    if not callable(fun):
        raise TypeError(f"`autocast` needs a function, but got {type(fun).__name__}.")
    if isinstance(policy_or_dtype, str) and "=" in policy_or_dtype:
        policy_or_dtype = get_policy(policy_or_dtype)
    compute = computes.get_compute(policy_or_dtype)
    settings = Settings(compute, _checked_rules(rules), _checked_gradient_dtype(gradient_dtype, compute))
    policy = policy_or_dtype if isinstance(policy_or_dtype, Policy) else None
    return Autocast(fun, settings, policy, _checkpoint_policy(checkpoint))


def full_precision(fun: F) -> F:
    """Make a function an island of float32, in which `autocast` narrows nothing.

    Outside of `autocast` 16-bit floating arguments are widened to float32, the function runs in float32, and its
    float32 results are cast back to the dtype of its floating arguments, if these have one dtype. Inside `autocast`,
    where arguments are float32, so are the results. Matrix products of float32 numbers run at the highest precision,
    not in TF32.

    Args:
        fun: any function of pytrees.

    Returns:
        A function with the same arguments.

    Raises:
        TypeError: if `fun` is no function.
        ValueError: at the call, if `fun` gives another structure to an argument whose 16-bit arrays were widened.

    Example:
        >>> logits = full_precision(lambda x, w: x @ w)
        >>> logits(jnp.ones((2, 4), jnp.bfloat16), jnp.ones((4, 3), jnp.bfloat16)).dtype
        dtype(bfloat16)
        >>> program = jax.make_jaxpr(autocast(logits, "bf16"))(jnp.ones((2, 4)), jnp.ones((4, 3)))
        >>> program.eqns[0].outvars[0].aval.dtype
        dtype('float32')
    """
    if not callable(fun):
        raise TypeError(f"`full_precision` needs a function, but got {type(fun).__name__}.")

    @functools.wraps(fun)
    def wrapped(*args, **kwargs):
        dtypes = {leaf.dtype for leaf in jax.tree.leaves((args, kwargs)) if _trees.is_floating(leaf)}
        halves = {dtype for dtype in dtypes if dtype.itemsize == 2}
        with jax.named_scope(MARK), jax.default_matmul_precision("highest"):
            if not halves:  # the very arguments: the function may change them
                return fun(*args, **kwargs)
            narrow = lambda leaf: leaf.dtype.itemsize == 2
            leaves = _trees.cast_tree(jax.tree.leaves((args, kwargs)), jnp.float32, which=narrow)
            wide = in_place.copy_with((args, kwargs), leaves)
            objects = in_place.objects_of(wide)
            result = fun(*wide[0], **wide[1])
            in_place.hand_back((args, kwargs), in_place.changes_of(objects))
            is_f32 = lambda leaf: leaf.dtype == jnp.float32
            return _trees.cast_tree(result, dtypes.pop(), which=is_f32) if len(dtypes) == 1 else result

    return wrapped  # type: ignore[return-value]


def _checked_rules(rules: Mapping[Any, Rule]) -> Mapping[str, Rule]:
    """Return the table by names of primitives. A name that no primitive has would do nothing, and is refused."""
    if rules is DEFAULT_RULES or rules is FAST_RULES:
        return rules  # type: ignore[return-value]
    if not isinstance(rules, Mapping):
        raise TypeError(f"`autocast`: `rules` must be a mapping such as `mpx.DEFAULT_RULES`, but got {type(rules)}.")
    checked = {}
    for key, rule in rules.items():
        name = key.name if isinstance(key, jex_core.Primitive) else key
        if isinstance(key, str) and name not in DEFAULT_RULES:
            raise ValueError(
                f"`autocast`: `rules` has {name!r}, but no primitive of jax is called that; names are those of "
                "`mpx.DEFAULT_RULES`. For a primitive of your own, give the primitive itself."
            )
        possible = _possible_rules(name, is_own=not isinstance(key, str))
        if rule not in possible:
            raise ValueError(f"`autocast`: the rule of {name!r} is {rule!r}; it can be {' or '.join(possible)}.")
        checked[name] = rule
    missing = sorted(DEFAULT_RULES.keys() - checked.keys())
    if missing:
        raise ValueError(
            f"`autocast`: `rules` lacks {', '.join(missing[:3])} and others. Take the rules of other primitives from "
            "the default table: `rules=mpx.DEFAULT_RULES | {...}`."
        )
    return checked


def _possible_rules(name: str, *, is_own: bool) -> tuple[Rule, ...]:
    if name in HANDLERS:
        return ("enter", "keep")
    can_narrow = is_own or name in CAN_NARROW
    return ("narrow", "narrow_if_representable", "follow", "keep") if can_narrow else ("follow", "keep")


def _checked_gradient_dtype(gradient_dtype: DTypeLike | None, compute: computes.Compute) -> np.dtype | None:
    if gradient_dtype is None:
        return None
    if dtype_or_none(gradient_dtype) != np.float32:
        raise ValueError(f"`autocast`: `gradient_dtype` must be float32 or None, but got {gradient_dtype!r}.")
    return np.dtype(np.float32) if compute.is_narrow else None


def _checkpoint_policy(checkpoint: str | Callable[..., Any] | None) -> Callable[..., Any] | None:
    if checkpoint is None or callable(checkpoint):
        return checkpoint
    policies = {name for name in dir(jax.checkpoint_policies) if name.endswith("_saveable") or "checkpoint_" in name}
    name = f"{checkpoint}_saveable" if checkpoint in _CHECKPOINTS else str(checkpoint)
    if name not in policies:
        raise ValueError(
            f"`autocast`: `checkpoint` must be one of {', '.join(map(repr, _CHECKPOINTS))}, a name of "
            f"`jax.checkpoint_policies` ({', '.join(sorted(policies))}), a policy or None, but got {checkpoint!r}."
        )
    return getattr(jax.checkpoint_policies, name)
