"""`jax.checkpoint` that keeps activations in few bits until the backward pass.

An activation goes through a primitive that returns it unchanged. Only where JAX divides the program of a checkpoint
into its two passes does that differ: the forward pass also encodes the array, and the backward pass begins with what is
decoded. JAX keeps arrays on a host between the passes by the same means (`jax.checkpoint_policies`).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe
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
    argnums: int | Sequence[int] = 0,
    policy: Callable[..., Any] | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """Compute a function again in the backward pass, from activations that are kept in few bits until then.

    It is `jax.checkpoint` whose first argument, or those of `argnums`, waits for the backward pass in `kept`. The forward
    pass is exact. The backward pass computes the gradients of `fun` at what is decoded.
    """
    if not callable(fun):
        raise TypeError(f"`checkpoint` needs a function, but got {type(fun).__name__}.")
    if not isinstance(kept, StateFormat):
        kept = Cast(require_one_of((np.dtype("bfloat16"), np.float16), kept, "x").name)
    chosen: Sequence[int] = (argnums,) if is_integer(argnums) else tuple(argnums)
    keep = lambda x: _kept.bind(x, format=kept) if _trees.is_floating(x) and x.ndim else x

    @functools.wraps(fun)
    def with_kept(*args, **kwargs):
        args = list(args)
        for i in chosen:
            args[i] = jax.tree.map(keep, args[i])
        return fun(*args, **kwargs)

    return jax.checkpoint(with_kept, policy=_Policy(policy), **options)


@dataclasses.dataclass(frozen=True)
class _Policy:
    """Keep the activations, and what the policy of the user keeps."""

    others: Callable[..., Any] | None

    def __call__(self, primitive, *types, **params):
        return primitive is _kept or (self.others is not None and self.others(primitive, *types, **params))


def _divided(saveable, unknown, in_backward, eqn: JaxprEqn):
    """Return the equations of both passes, what is known of the result in each, and what is kept."""
    (x,), (result,), format = eqn.invars, eqn.outvars, eqn.params["format"]
    if unknown[0]:  # depends on a tangent
        return None, eqn, [True], [True], []
    if format is None or saveable(_kept, x.aval, **eqn.params) is not True:  # a checkpoint around this one keeps less
        return eqn, eqn, [False], [True], [] if in_backward[0] or is_literal(x) else [x]
    encode, decode = _coders(x.aval, format)
    with with_source_of(eqn), jax.disable_jit(False):
        program, (_, parts) = jax.make_jaxpr(jax.jit(lambda x: (x, encode(x))), return_shape=True)(x.aval)
        codes = program.eqns[0].outvars[1:]
        parts = jax.tree.unflatten(jax.tree.structure(parts), [v.aval for v in codes])
        again = jax.make_jaxpr(jax.jit(decode))(*parts)
    first = program.eqns[0].replace(invars=[x], outvars=[result, *codes])
    second = again.eqns[0].replace(invars=codes, outvars=[result])
    return first, second, [False], [True], codes


def _coders(of: Any, format: StateFormat) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return what encodes an array of a type, and decodes it. Each row has codes and scales of its own.

    So no example sees another one, and no device sends its part of the array.
    """
    parts = parts_at(of.sharding.mesh, of.sharding.spec, of.ndim - 1)
    of_shards = format if parts == 1 else format.for_shards(of.shape[-1] // parts)
    encode = _of_rows(lambda x, _: of_shards.encode(x), of.ndim)
    decode = _of_rows(of_shards.decode, of.ndim)
    once = lambda x: _kept.bind(x, format=None).astype(np.float32)
    return lambda x: placed_by_xla(encode, once(x), None), lambda *x: placed_by_xla(decode, *x).astype(of.dtype)


def _of_rows(function: Callable[..., Any], axes: int) -> Callable[..., Any]:
    for _ in range(axes - 1):
        function = jax.vmap(function)
    return function


def _derivative(primals, tangents, format: StateFormat | None):
    if format is None:
        raise TypeError(
            "`checkpoint`: a gradient is differentiated once more, but what is kept in few bits has no derivative. Use "
            "`jax.checkpoint` there."
        )
    return _kept.bind(*primals, format=format), tangents[0]


_kept = Primitive("kept_between_passes")  # `format` is None for an array that is encoded
_kept.def_impl(lambda x, **_: x)
_kept.def_abstract_eval(lambda x, **_: x)
ad.deflinear2(_kept, lambda cotangent, _, **__: [cotangent])
ad.primitive_jvps[_kept] = _derivative
batching.primitive_batchers[_kept] = lambda xs, axes, **params: (_kept.bind(jnp.moveaxis(*xs, *axes, 0), **params), 0)
mlir.register_lowering(_kept, lambda _, x, **__: [x])
pe.partial_eval_jaxpr_custom_rules[_kept] = _divided
