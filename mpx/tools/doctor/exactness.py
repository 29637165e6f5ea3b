"""Test on this machine what mpx claims to be exact.

All of it runs in compiled programs and is compared, bit by bit, with numbers that NumPy and ml_dtypes compute.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from mpx._inspect.masters import master_params
from mpx._transforms.kahan_summation import kahan_summation
from mpx._transforms.master_weights import master_weights
from mpx.formats import round_to
from mpx.tools.doctor.products import first_line

_BF16, _F32 = np.dtype(jnp.bfloat16), np.dtype(np.float32)
_STEPS = 1000
UPDATES = (np.arange(64) % 8 - 3).astype(_F32) * np.float32(2.0**-13)  # every sum from 1 on is exact in float32
SUMS = np.float32(1) + np.float32(_STEPS) * UPDATES


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing that mpx claims to be exact."""

    name: str
    exact: bool  # whether mpx's numbers are the ones computed beforehand
    detail: str = ""  # how many numbers are wrong, or the error that was raised


def try_claims() -> Iterator[Check]:
    """Train a few weights with each kind of state, and round where a compiler may drop a rounding."""
    wide = lambda x: np.asarray(x).astype(_F32)
    compensated = lambda params, state: wide(params) + wide(state.compensation)
    full, split = (master_weights(optax.sgd(-1.0), storage=storage) for storage in ("full", "split"))
    yield check("Kahan compensations keep 1,000 updates", lambda: compensated(*trained(kahan_summation())), SUMS)
    yield check("float32 masters keep 1,000 updates", lambda: master_params(*trained(full)), SUMS)
    yield check("masters split in two keep 1,000 updates", lambda: master_params(*trained(split)), SUMS)
    for dtype in (_BF16, np.dtype(np.float16)):
        for name, program, operands, expected in roundings(dtype, partial(round_to, dtype=dtype)):
            yield check(f"`round_to` {dtype} {name}", partial(jax.jit(program), *operands), expected)


def roundings(dtype: np.dtype, round_to: Callable[[Any], Any]) -> Iterator[tuple[str, Callable[..., Any], Any, Any]]:
    """Yield places where a compiler may drop a rounding or flush to 0: a name, a program, its operands, its result."""
    kept = lambda x: x.astype(dtype).astype(_F32)
    x, y = np.random.default_rng(1).normal(size=(2, 4096)).astype(_F32)
    yield "after a sum", lambda x, y: round_to(x + y), (x, y), kept(x + y)
    # Multiples of 1/64: every sum of products is exact in float32, in any order, and too long for 16 bits.
    a, b = np.random.default_rng(2).integers(-127, 128, (2, 64, 64)) / 64
    product = lambda a, b: round_to(lax.dot(a, b, preferred_element_type=_F32))
    yield "after a product of 16-bit matrices", product, (a.astype(dtype), b.astype(dtype)), kept((a @ b).astype(_F32))
    # 1 added to an even number whose neighbour is 2 away is that number itself; the second time too.
    large, ones = np.full(8, 2.0 ** (jnp.finfo(dtype).nmant + 1), _F32), np.ones(8, dtype)
    once = lambda x, y: round_to(x.astype(_F32) + y.astype(_F32))
    yield "between sums of 16-bit numbers", lambda x, y: once(once(x, y), y), (large.astype(dtype), ones), large
    half = np.full(1, float(jnp.finfo(dtype).smallest_normal) / 2, _F32)
    yield "to a subnormal number", round_to, (half,), half


def check(name: str, compute: Callable[[], Any], expected: np.ndarray) -> Check:
    """Compare the bits of the float32 array that is computed with those of the expected one."""
    try:
        with jax.numpy_dtype_promotion("standard"):  # Optax adds float32 updates to bfloat16 parameters
            result = np.asarray(compute())
    except Exception as error:  # on a machine where this fails, that is the finding
        return Check(name, False, first_line(error))
    wrong = int(np.sum(result.view(np.uint32) != expected.view(np.uint32)))
    return Check(name, wrong == 0, f"{wrong} of {expected.size} numbers are wrong" if wrong else "")


def trained(tx: optax.GradientTransformation) -> tuple[jax.Array, Any]:
    """Return bfloat16 weights and the state after all steps, which are one program."""

    def step(carry, gradients):
        params, state = carry
        updates, state = tx.update(gradients, state, params)
        return (optax.apply_updates(params, updates), state), None

    train = jax.jit(lambda params, gradients: lax.scan(step, (params, tx.init(params)), gradients)[0])
    return train(jnp.ones(UPDATES.shape, _BF16), np.tile(UPDATES, (_STEPS, 1)))
