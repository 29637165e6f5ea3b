"""Examine this machine: what is here, which dtypes are worth using, whether mpx is exact, and the recipe for it."""

import collections
import importlib.metadata
import os
import pathlib
import platform

import jax
import jax.numpy as jnp

from mpx._autocast.explain import explain
from mpx.tools.doctor.diagnosis import Diagnosis
from mpx.tools.doctor.exactness import try_claims
from mpx.tools.doctor.products import WAYS, first_line, try_product

_PACKAGES = ("mpx-jax", "jax", "jaxlib", "optax", "flax", "numpy", "ml_dtypes")


def examine(*, quick: bool = False) -> Diagnosis:
    """Examine this machine: what is here, which dtypes are worth using, and whether mpx is exact.

    Everything runs on the default device, under the settings that a training run would find. It takes about 10 seconds
    on a CPU with 2 cores, and fewer with `quick`.

    Args:
        quick: leave out what is timed.

    Returns:
        A `Diagnosis`.

    Example:
        >>> diagnosis = examine(quick=True)
        >>> diagnosis.is_exact, {product.teraflops for product in diagnosis.products}
        (True, {None})
    """
    versions = {"python": platform.python_version()}
    versions |= {found.name: found.version for found in importlib.metadata.distributions() if found.name in _PACKAGES}
    package = str(pathlib.Path(__file__).parents[2])
    try:
        devices = collections.Counter(device.device_kind for device in jax.devices())
    except Exception as error:  # jax raises assertions too, if JAX_PLATFORMS names what is not installed
        failure = f"{first_line(error)} (JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')})"
        return Diagnosis(versions, package, failure=failure)
    with jax.disable_jit(False):  # compiled programs are examined, whatever the mode
        matrix = jax.ShapeDtypeStruct((8, 8), jnp.float32)
        return Diagnosis(
            versions,
            package,
            backend=jax.default_backend(),
            devices=dict(devices),
            products=tuple(try_product(name, way, is_timed=not quick) for name, way in WAYS.items()),
            checks=tuple(try_claims()),
            autocast_narrows=explain(jnp.matmul, "bf16")(matrix, matrix).narrowed_share == 1,
        )
