"""Say whether mpx is exact on this machine: `mpx.doctor.examine()`, on the command line
`mpx doctor`.

Claims of exactness are tried in compiled programs, whose results are compared, bit by
bit, with numbers that NumPy and ml_dtypes compute.
"""

import collections
import contextlib
import dataclasses
import importlib.metadata
import logging
import os
import pathlib
import platform
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from mpx import formats
from mpx._inspect.masters import master_params
from mpx._tables import Result, Table
from mpx._transforms.kahan_summation import kahan_summation
from mpx._transforms.master_weights import master_weights

_PACKAGES = ("mpx-jax", "jax", "jaxlib", "optax", "flax", "numpy", "ml_dtypes")
_BF16, _F32 = np.dtype(jnp.bfloat16), np.dtype(np.float32)
_STEPS = 1000
# Every sum from 1 on is exact in float32.
_UPDATES = (np.arange(64) % 8 - 3).astype(_F32) * np.float32(2.0**-13)
_SUMS = np.float32(1) + np.float32(_STEPS) * _UPDATES


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing that mpx claims to be exact."""

    name: str
    exact: bool  # whether mpx's numbers are the ones computed beforehand
    detail: str = ""  # how many numbers are wrong, or the error that was raised


@dataclasses.dataclass(frozen=True)
class Diagnosis(Result):
    """Hold the result of `examine`; prints its verdict, then what is exact and what is
    here.
    """

    versions: dict[str, str]  # of Python and the packages around mpx
    package: str  # the folder of this mpx
    devices: dict[str, int]  # the number of devices of each kind
    checks: tuple[Check, ...]  # whether mpx is exact, claim by claim
    not_started: tuple[str, ...] = ()  # plugins of JAX that failed, and their errors

    @property
    def is_exact(self) -> bool:
        """Return whether everything that mpx claims to be exact is exact here."""
        return all(check.exact for check in self.checks)

    @property
    def verdict(self) -> str:
        """Say whether all is well, and what to do if it is not."""
        if self.is_exact:
            return "mpx is exact to the bit on this machine."
        wrong = (
            f"{sum(not check.exact for check in self.checks)} of"
            f" {len(self.checks)} claims fail"
        )
        return f"mpx is NOT exact on this machine: {wrong}. Report it, with this page."

    def _parts(self) -> Iterator[Table | str]:
        yield self.verdict
        checks = [
            (check.name, "yes" if check.exact else f"NO: {check.detail}")
            for check in self.checks
        ]
        yield Table("Claims", [("claim", "exact"), *checks], ())
        devices = ", ".join(f"{count} x {kind}" for kind, count in self.devices.items())
        here = {"mpx imported from": self.package, "devices": devices}
        if self.not_started:
            here["JAX could not start"] = "; ".join(self.not_started)
        yield Table("System", [("what", "is"), *(self.versions | here).items()], ())


def examine() -> Diagnosis:
    """Examine this machine: what is here, and whether mpx is exact on the default
    device.

    Raises:
        RuntimeError: if JAX finds no device.

    Example:
        >>> diagnosis = examine()
        >>> len(diagnosis.checks), diagnosis.verdict
        (10, 'mpx is exact to the bit on this machine.')
    """
    found = {each.name: each.version for each in importlib.metadata.distributions()}
    versions = {"python": platform.python_version()} | {
        name: found[name] for name in _PACKAGES if name in found
    }
    try:
        with _failing_plugins() as not_started:
            found_devices = jax.devices()
        devices = collections.Counter(device.device_kind for device in found_devices)
    # jax raises assertions without a text too, if JAX_PLATFORMS names what is not
    # installed
    except Exception as error:
        asked = (
            "JAX finds no device"
            f" (JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}): {error!r}"
        )
        remedy = (
            "install the jax that fits the hardware (`pip install 'jax[cuda13]'`), or"
            " set JAX_PLATFORMS=cpu"
        )
        raise RuntimeError(f"{asked}; {remedy}.") from error
    with jax.disable_jit(False):  # compiled programs are examined, whatever the mode
        return Diagnosis(
            versions,
            str(pathlib.Path(__file__).parent),
            dict(devices),
            tuple(_check(*claim) for claim in _claims()),
            tuple(not_started),
        )


@contextlib.contextmanager
def _failing_plugins() -> Iterator[list[str]]:
    """Collect a line for each plugin that fails as JAX starts, in place of the
    traceback that JAX logs.

    A compiler for GPUs without CUDA's libraries fails so on a machine without a GPU.
    """
    lines: list[str] = []

    def without_traceback(record):
        error = record.exc_info and record.exc_info[1]
        if error:
            plugin = record.args[0] if record.args else "a plugin"
            said = str(error).split("\n")[0]
            lines.append(f"{plugin}: {type(error).__name__}: {said[:200]}")
        return not error

    logger = logging.getLogger("jax._src.xla_bridge")
    logger.addFilter(without_traceback)
    try:
        yield lines
    finally:
        logger.removeFilter(without_traceback)


def _claims() -> Iterator[tuple[str, Callable[[], Any], Any]]:
    """Yield what is claimed, and a function with the float32 numbers that it returns.

    Train a few weights with each kind of state, and round where a compiler may drop a
    rounding.
    """
    for name, tx in (
        ("Kahan compensations keep 1,000 updates", kahan_summation()),
        (
            "masters split in two keep 1,000 updates",
            master_weights(optax.sgd(-1.0), storage="split"),
        ),
    ):
        yield name, partial(_trained, tx), _SUMS
    for dtype in (_BF16, np.dtype(np.float16)):
        round_to = partial(formats.round_to, dtype=dtype)
        for name, program, operands, expected in _roundings(dtype, round_to):
            compute = partial(jax.jit(program), *operands)
            yield f"`round_to` {dtype} {name}", compute, expected


def _roundings(
    dtype: np.dtype, round_to: Callable[[Any], Any]
) -> Iterator[tuple[str, Callable[..., Any], Any, Any]]:
    """Yield places where a compiler may drop a rounding or flush to 0: a name, a
    program, its operands, its result.
    """

    def kept(x):
        return x.astype(dtype).astype(_F32)

    x, y = np.random.default_rng(1).normal(size=(2, 4096)).astype(_F32)
    yield "after a sum", lambda x, y: round_to(x + y), (x, y), kept(x + y)
    # Multiples of 1/64: every sum of products is exact in float32, in any order, and
    # too long for 16 bits.
    a, b = np.random.default_rng(2).integers(-127, 128, (2, 64, 64)) / 64

    def product(a, b):
        return round_to(lax.dot(a, b, preferred_element_type=_F32))

    narrow = (a.astype(dtype), b.astype(dtype))
    expected = kept((a @ b).astype(_F32))
    yield "after a product of 16-bit matrices", product, narrow, expected
    # 1 added to an even number whose neighbour is 2 away is that number itself; the
    # second time too.
    large = np.full(8, 2.0 ** (jnp.finfo(dtype).nmant + 1), _F32)

    def once(x, y):
        return round_to(x.astype(_F32) + y.astype(_F32))

    def twice(x, y):
        return once(once(x, y), y)

    operands = (large.astype(dtype), np.ones(8, dtype))
    yield "between sums of 16-bit numbers", twice, operands, large
    half = np.full(1, float(jnp.finfo(dtype).smallest_normal) / 2, _F32)
    yield "to a subnormal number", round_to, (half,), half


def _check(name: str, compute: Callable[[], Any], expected: np.ndarray) -> Check:
    """Compare the bits of the float32 array that is computed with those of the expected
    one.
    """
    try:
        # Optax adds float32 updates to bfloat16 parameters.
        with jax.numpy_dtype_promotion("standard"):
            result = np.asarray(compute())
    except Exception as error:  # on a machine where this fails, that is the finding
        return Check(name, False, f"{type(error).__name__}: {error}".splitlines()[0])
    wrong = int(np.sum(result.view(np.uint32) != expected.view(np.uint32)))
    detail = f"{wrong} of {expected.size} numbers are wrong" if wrong else ""
    return Check(name, not wrong, detail)


def _trained(tx: optax.GradientTransformation) -> Any:
    """Return the float32 masters of bfloat16 weights after all steps, which are one
    program.
    """

    def step(carry, gradients):
        params, state = carry
        updates, state = tx.update(gradients, state, params)
        return (optax.apply_updates(params, updates), state), None

    def train(params, gradients):
        return lax.scan(step, (params, tx.init(params)), gradients)[0]

    params = jnp.ones(_UPDATES.shape, _BF16)
    return master_params(*jax.jit(train)(params, np.tile(_UPDATES, (_STEPS, 1))))
