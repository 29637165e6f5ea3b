"""Describe the software around mpx: versions, and other packages called mpx."""

import dataclasses
import importlib.machinery
import importlib.metadata
import os
import pathlib
import platform
from collections.abc import Iterable, Mapping

DISTRIBUTION = "mpx-jax"
_PACKAGES = (DISTRIBUTION, "jax", "jaxlib", "optax", "flax", "numpy", "ml_dtypes")
_NVIDIA_DRIVER = pathlib.Path("/proc/driver/nvidia/version")


@dataclasses.dataclass(frozen=True)
class Environment:
    """The software around mpx."""

    versions: dict[str, str]  # of Python and of the packages that are installed
    has_nvidia_driver: bool
    package: str  # the folder of this mpx
    in_this_folder: str | None = None  # the file that `import mpx` finds in the working directory
    in_this_folder_is_mpx: bool = False  # whether that file belongs to this package or to another copy of it
    other_distributions: tuple[str, ...] = ()  # installed ones that bring a package called mpx, too


def collect_environment() -> Environment:
    """Return the versions, and the packages called mpx that Python can find, without starting JAX."""
    first_ones_last = reversed(list(importlib.metadata.distributions()))
    versions = {found.name: found.version for found in first_ones_last if found.name in _PACKAGES}
    spec = importlib.machinery.PathFinder.find_spec("mpx", [os.getcwd()])
    here = None if spec is None else spec.origin  # None for a folder that is no package
    return Environment(
        {"python": platform.python_version()} | {name: versions[name] for name in _PACKAGES if name in versions},
        _NVIDIA_DRIVER.exists(),
        str(pathlib.Path(__file__).parents[2]),
        in_this_folder=here,
        in_this_folder_is_mpx=here is not None and pathlib.Path(here).with_name("doctor.py").exists(),
        other_distributions=other_distributions(importlib.metadata.packages_distributions()),
    )


def other_distributions(providers: Mapping[str, Iterable[str]]) -> tuple[str, ...]:
    """Return the distributions, other than ours, that bring a package called mpx."""
    names = dict.fromkeys(providers.get("mpx", ()))
    return tuple(name for name in names if name.lower().replace("_", "-") != DISTRIBUTION)
