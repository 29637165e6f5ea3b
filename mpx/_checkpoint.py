"""`jax.checkpoint` that keeps activations in few bits until the backward pass.

An activation goes through a primitive that returns it unchanged. Where JAX divides the
program of a checkpoint into two passes, the first one also encodes the array, and the
second one decodes it, as JAX offloads arrays to a host.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir, partial_eval
from jax.typing import DTypeLike

from mpx import _trees
from mpx._errors import is_integer, require_one_of
from mpx._jaxprs import is_literal, with_source_of
from mpx._shardings import parts_at
from mpx._stored.state_format import Cast, StateFormat, placed_by_xla


def checkpoint(
    fun: Callable[..., Any],
    *,
    kept: DTypeLike | StateFormat,
    argnums: int | Sequence[int],
    **options: Any,
) -> Callable[..., Any]:
    """Compute a layer again in the backward pass, as `jax.checkpoint` does, from inputs
    that are kept in few bits.

    The forward pass is exact. Gradients are computed at the decoded inputs, and cannot
    be differentiated again. What `fun` changes in a Flax NNX module (batch statistics,
    counts of dropout) is lost, as under `jax.checkpoint`: let it return
    `nnx.state(module, ...)`, and `nnx.update` the module with that.

    Args:
        fun: a layer, or any function that `jax.checkpoint` takes.
        kept: `"bf16"`, `"f16"` (numbers above 65,504 become infinite), or a
            `StateFormat` such as `Blockwise8bit()`, rounded to nearest. Each row, along
            the last axis, is encoded by itself.
        argnums: the positional arguments that are activations, arrays or pytrees.
            Floating-point arrays with at least one axis are encoded in them. Weights,
            keys, integers and what `fun` closes over are kept as they come.
        **options: passed to `jax.checkpoint`. What a `policy` keeps is exact, and is
            not encoded.

    Raises:
        TypeError: if `fun` is not a function; when a gradient is differentiated.
        ValueError: if `kept` is something else; when the layer is called, if nothing
            would be encoded.

    Example:
        >>> layer = checkpoint(
        ...     lambda x, w: x + jnp.tanh(x @ w), kept=Blockwise8bit(), argnums=0
        ... )
        >>> value, pull = jax.vjp(layer, jnp.ones((8, 256)), jnp.ones((256, 256)))
        >>> [(x.dtype.name, x.shape) for x in jax.tree.leaves(pull)]
        [('float32', (256, 256)), ('int8', (8, 256)), ('float32', (8, 1))]

    References:
        Chakrabarti and Moseley 2019, "Backprop with Approximate Activations for
        Memory-efficient Network Training" (arXiv 1901.07988).
    """
    if not callable(fun):
        raise TypeError(f"`checkpoint` needs a function, but got {type(fun).__name__}.")
    if not isinstance(kept, StateFormat):
        if isinstance(kept, type) and issubclass(kept, StateFormat):
            raise ValueError(
                "`checkpoint`: `kept` is a class, not a format. Make one:"
                f" `{kept.__name__}()`."
            )
        argument = (
            "`checkpoint`: `kept`, if it is no `StateFormat` such as `Blockwise8bit()`,"
        )
        kept = Cast(
            require_one_of((np.dtype(jnp.bfloat16), np.float16), kept, argument).name
        )
    numbers: Any = (argnums,) if is_integer(argnums) else argnums

    def is_encoded(x):
        return _trees.is_floating(x) and x.ndim > 0

    others = options.pop("policy", None) or jax.checkpoint_policies.nothing_saveable

    @functools.wraps(fun)
    def with_kept(*args, **kwargs):
        chosen = {i % len(args) for i in numbers if -len(args) <= i < len(args)}
        if len(chosen) < len(numbers) or not any(
            map(is_encoded, jax.tree.leaves([args[i] for i in chosen]))
        ):
            raise ValueError(
                f"`checkpoint`: among {len(args)} positional arguments, {argnums=} are"
                " no floating-point arrays."
            )

        def keep(x):
            return _kept.bind(x, format=kept) if is_encoded(x) else x

        given = [
            jax.tree.map(keep, arg) if i in chosen else arg
            for i, arg in enumerate(args)
        ]
        return fun(*given, **kwargs)

    def keeps(primitive, *types, **params):
        return primitive is _kept or others(primitive, *types, **params)

    return jax.checkpoint(with_kept, policy=keeps, **options)


def _divided(
    saveable: Any, unknown: Sequence[bool], in_backward: Sequence[bool], eqn: JaxprEqn
) -> tuple[Any, ...]:
    """Return the equations of both passes, whether the first lacks the result, the
    second has it, and what is kept.
    """
    (x,), format = eqn.invars, eqn.params["format"]
    # One around it keeps less.
    is_saved = saveable(_kept, x.aval, **eqn.params) is True
    if unknown[0] or format is None or not is_saved:
        first = None if unknown[0] else eqn
        kept = [] if in_backward[0] or is_literal(x) else [x]
        return first, eqn, unknown, [True], kept
    encode, decode = _coders(x.aval, format)
    with with_source_of(eqn), jax.disable_jit(False):
        program, (_, parts) = jax.make_jaxpr(
            jax.jit(lambda x: (x, encode(x))), return_shape=True
        )(x.aval)
        codes = program.eqns[0].outvars[1:]
        again = jax.make_jaxpr(jax.jit(decode))(
            *jax.tree.unflatten(jax.tree.structure(parts), [v.aval for v in codes])
        )
    first = program.eqns[0].replace(invars=[x], outvars=[*eqn.outvars, *codes])
    second = again.eqns[0].replace(invars=codes, outvars=eqn.outvars)
    return first, second, [False], [True], codes


def _coders(
    of: Any, format: StateFormat
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return what encodes and decodes arrays of a type, row by row: no example sees
    another, and no device sends.
    """
    parts = parts_at(of.sharding.mesh, of.sharding.spec, of.ndim - 1)
    format = format if parts == 1 else format.for_shards(of.shape[-1] // parts)
    encode, decode = lambda x, _: format.encode(x), format.decode
    codes = jax.eval_shape(encode, jax.ShapeDtypeStruct(of.shape, np.float32), None)
    # A TPU would copy an array for its rows.
    if any(x.shape[:-1] != of.shape[:-1] for x in jax.tree.leaves(codes)):
        for _ in range(of.ndim - 1):
            encode, decode = jax.vmap(encode), jax.vmap(decode)

    def encoded(x):
        x = _kept.bind(x, format=None).astype(np.float32)
        return placed_by_xla(encode, x, None)

    def decoded(*codes):
        return placed_by_xla(decode, *codes).astype(of.dtype)

    return encoded, decoded


def _derivative(
    primals: Any, tangents: Any, format: StateFormat | None
) -> tuple[Any, Any]:
    if format is None:
        raise TypeError(
            "`checkpoint`: codes have no derivative, and a gradient has. Use"
            " `jax.checkpoint` there."
        )
    return _kept.bind(*primals, format=format), tangents[0]


def _batched(operands: Any, at: Any, **params: Any) -> tuple[Any, int]:
    return _kept.bind(jnp.moveaxis(operands[0], at[0], 0), **params), 0


# `format` is None where it is encoded, to see who differentiates that: JAX drops custom
# derivatives in loops on the way to the second derivative.
_kept = Primitive("kept_between_passes")
_kept.def_impl(lambda x, **_: x)
_kept.def_abstract_eval(lambda x, **_: x)
ad.deflinear2(_kept, lambda cotangent, _, **__: [cotangent])
ad.primitive_jvps[_kept] = _derivative
batching.primitive_batchers[_kept] = _batched
mlir.register_lowering(_kept, lambda _, x, **__: [x])
partial_eval.partial_eval_jaxpr_custom_rules[_kept] = _divided
