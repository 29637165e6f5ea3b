"""`fp8_report`: what the 8-bit formats lose of each operand of the matrix products that run in them."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import JaxprEqn

from mpx._autocast.explain import line_of
from mpx._autocast.fp8 import Observed
from mpx._autocast.transform import autocast_of
from mpx._gradients import value_and_grad
from mpx._tables import Result, Table
from mpx.tools.monitor import exponents

_Key = tuple[str, str, tuple[int, ...], np.dtype]  # the line, the operand, its shape, the format


@dataclasses.dataclass(frozen=True)
class Fp8Operand:
    """Say what a format loses of an operand of a matrix product. Shares are of its nonzero finite numbers.

    Attributes:
        where: the line of the user's code, `file:line (function)`.
        operand: `"left"`, `"right"` or `"cotangent"`, the gradient that flows back into the product.
        shape: its shape.
        dtype: the format.
        numbers: how many of its numbers were rounded: in all iterations of a loop, in all products of the line with
            this shape, and again where the backward pass recomputes them.
        zero: the share that becomes zero.
        subnormal: the share that becomes subnormal and loses bits.
        nonfinite: count of its infinities and NaN.
    """

    where: str
    operand: str
    shape: tuple[int, ...]
    dtype: np.dtype
    numbers: int
    zero: float
    subnormal: float
    nonfinite: int


@dataclasses.dataclass(frozen=True)
class Fp8Report(Result):
    """Result of `fp8_report`, which prints as a table.

    Attributes:
        operands: the operands of all products in 8 bits, in the order of the program, then of the backward pass.
    """

    operands: tuple[Fp8Operand, ...]

    @property
    def verdict(self) -> str:
        """Say which operand loses most, and what keeps more."""
        if not self.operands:
            return "No product runs in 8 bits: `mpx.explain` says why."
        for row in self.operands:
            if row.nonfinite:
                place = f"the {row.operand} operand of {row.where}"
                return f"Infinite or NaN: {row.nonfinite:,} numbers, first seen in {place}."
        worst = max(self.operands, key=lambda row: (row.zero, row.subnormal))
        if not worst.zero + worst.subnormal:
            return "All numbers are normal in their formats."
        return (
            f"Most is lost of the {worst.operand} operand of {worst.where}: {worst.zero:.2%} become zero, "
            f"{worst.subnormal:.2%} subnormal. `mpx.Fp8(scaling='row')` keeps more, and an override of the policy "
            "keeps it in 16 bits."
        )

    def _parts(self) -> Iterator[Table | str]:
        lines = [("where", "operand", "shape", "format", "numbers", "zero", "subnormal", "nonfinite")]
        for x in self.operands:
            what = (x.where, x.operand, "x".join(map(str, x.shape)), str(x.dtype))
            lines.append((*what, f"{x.numbers:,}", f"{x.zero:.2%}", f"{x.subnormal:.2%}", f"{x.nonfinite:,}"))
        yield Table("Operands of products in 8 bits, after their scales", lines, right=range(4, 8))
        yield self.verdict


def fp8_report(fun: Callable[..., Any], *, has_aux: bool = False) -> Callable[..., Fp8Report]:
    """Count what the 8-bit formats lose of each operand, in a loss function under `autocast(..., "fp8")`.

    It tells which layer to keep in 16 bits when a run in FP8 learns worse. The function runs once with its gradient,
    and each operand is counted where it is rounded, after its scale. The numbers go to the host one product at a time,
    so it is slow: call it where you log, not in each step.

    Args:
        fun: a function to a loss, as `autocast` returned it.
        has_aux: whether `fun` returns a pair of the loss and something else.

    Returns:
        A function of the arguments of `fun` that returns an `Fp8Report`. It differentiates by the first argument.

    Raises:
        ValueError: if `fun` does not compute in FP8.
        TypeError: at the call, inside `jax.jit`.

    Example:
        >>> loss_fn = lambda w, x: jnp.mean((x @ w) ** 2)
        >>> x = jnp.ones((16, 16)).at[0, 0].set(2.0**20)  # beside it, a number of 1 becomes zero
        >>> report = mpx.monitor.fp8_report(mpx.autocast(loss_fn, mpx.Fp8(min_extent=0)))(jnp.ones((16, 16)), x)
        >>> [(row.operand, str(row.dtype), round(row.zero, 3)) for row in report.operands]
        [('left', 'float8_e4m3fn', 0.996), ('right', 'float8_e4m3fn', 0.0), ('cotangent', 'float8_e5m2', 0.0)]
    """
    record = autocast_of(fun)
    fp8 = None if record is None else record.settings.compute.fp8
    if record is None or fp8 is None:
        raise ValueError("`fp8_report` needs a function in FP8: what `mpx.autocast(fun, 'fp8')` returned.")

    def reported(*args: Any, **kwargs: Any) -> Fp8Report:
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((args, kwargs))):
            raise TypeError("`fp8_report` counts concrete numbers: call it outside of `jax.jit`.")
        counts: dict[_Key, np.ndarray] = {}
        observed = Observed(**dataclasses.asdict(fp8), observe=functools.partial(_observe, counts))
        policy = observed if record.policy is None else dataclasses.replace(record.policy, fp8=observed)
        watched = record.around(record.fun, policy)
        jax.block_until_ready(value_and_grad(watched, has_aux=has_aux)(*args, **kwargs))
        jax.effects_barrier()
        return Fp8Report(tuple(_row(*pair) for pair in counts.items()))

    return reported


def _observe(counts: dict[_Key, np.ndarray], eqn: JaxprEqn, operand: str, x: jax.Array, dtype: np.dtype) -> None:
    """Count what becomes of the numbers of an operand whenever it is rounded."""
    key = line_of(eqn, ()), operand, x.shape, dtype
    counts.setdefault(key, np.zeros(len(exponents.FATES) + 1, np.int64))

    def add(fates: jax.Array) -> None:
        counts[key] += exponents.sum_int64(fates)

    jax.debug.callback(add, exponents.count_fates(x, exponents.range_of(dtype, "fp8_report").edges()))


def _row(key: _Key, counted: np.ndarray) -> Fp8Operand:
    *fates, nonfinite = counted.tolist()
    zero, subnormal, *_ = exponents.shares_of(counted).tolist()
    return Fp8Operand(*key, sum(fates), zero, subnormal, nonfinite)
