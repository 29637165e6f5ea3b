"""What mpx finds itself in: versions, devices, memory, settings of the environment, and other packages called mpx."""

import base64
import dataclasses
import hashlib
import importlib.machinery
import importlib.metadata
import os
import pathlib
import platform
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.extend.backend
import jax.numpy as jnp

from mpx._autocast.explain import explain

DISTRIBUTION = "mpx-jax"
_PACKAGES = (DISTRIBUTION, "jax", "jaxlib", "optax", "flax", "numpy", "ml_dtypes")
_NVIDIA_DRIVER = pathlib.Path("/proc/driver/nvidia/version")


@dataclasses.dataclass(frozen=True)
class System:
    """Versions and drivers.

    Attributes:
        platform: the operating system and the kind of processor.
        python: its version.
        packages: versions of those that are installed; of `mpx-jax` also when Python imports another copy of it.
        backend: what JAX computes on; empty if it found nothing.
        backend_version: what the backend says of itself, such as the version of CUDA.
        nvidia_driver: the version of the driver in the kernel; None without one.
        processes: how many processes compute together.
        autocast_lowers: whether `mpx.autocast` lowers an ordinary product here; `jax.default_matmul_precision` may
            forbid it.
    """

    platform: str
    python: str
    packages: dict[str, str]
    backend: str = ""
    backend_version: str = ""
    nvidia_driver: str | None = None
    processes: int = 1
    autocast_lowers: bool = True


@dataclasses.dataclass(frozen=True)
class Devices:
    """Devices of one kind and memory size.

    Attributes:
        kind: as the maker names it.
        count: how many, in all processes.
        memory: whose memory it is: that of the `"device"`, or of the `"host"`, where caches of files count as used; or
            `"unknown"`.
        bytes_limit: of the memory that JAX may use, of each device; None if nothing tells.
        bytes_in_use: of the first device of this process; None if nothing tells.
    """

    kind: str
    count: int
    memory: str = "unknown"
    bytes_limit: int | None = None
    bytes_in_use: int | None = None


@dataclasses.dataclass(frozen=True)
class Setting:
    """An environment variable that bears on mixed precision.

    Attributes:
        name: of the variable.
        value: as it is set.
        meaning: what it does to mixed precision; empty if nothing is known of this value.
    """

    name: str
    value: str
    meaning: str


@dataclasses.dataclass(frozen=True)
class Imports:
    """Which package called mpx Python finds.

    Attributes:
        package: the folder of this one.
        checkout: whether it is a folder that was not installed, or installed as editable; that is fine.
        installed: the folder into which `mpx-jax` was installed; None if it was not, or as editable.
        in_this_folder: the file that `import mpx` finds in the working directory, if there is one.
        in_this_folder_is_mpx: whether that is this package or another copy of it.
        other_distributions: installed distributions that also bring a package called mpx.
        changed_files: installed files of `mpx-jax` that are not those that were installed.
    """

    package: str
    checkout: bool
    installed: str | None = None
    in_this_folder: str | None = None
    in_this_folder_is_mpx: bool = False
    other_distributions: tuple[str, ...] = ()
    changed_files: tuple[str, ...] = ()


def look_at_system() -> System:
    """Versions and drivers, without a look at the backend: nothing that can fail."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    driver = nvidia_driver(_NVIDIA_DRIVER.read_text()) if _NVIDIA_DRIVER.exists() else None
    return System(platform.platform(), platform.python_version(), versions, nvidia_driver=driver)


def with_backend(system: System) -> System:
    """The same with what the backend says; starts it, and raises where that fails."""
    return dataclasses.replace(
        system,
        backend=jax.default_backend(),
        backend_version=" ".join(jax.extend.backend.get_backend().platform_version.split()),
        processes=jax.process_count(),
        autocast_lowers=_autocast_lowers(),
    )


def nvidia_driver(text: str) -> str | None:
    """The version in the text by which the kernel's driver introduces itself.

    Example:
        >>> nvidia_driver("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024")
        '550.54.15'
    """
    words = text.split("\n")[0].split()
    return next((word for word in words if word[:1].isdigit() and "." in word), None)


def look_at_devices() -> tuple[Devices, ...]:
    """The devices by kind, with the memory of those that this process computes on."""
    local = {device.device_kind: device for device in reversed(jax.local_devices())}
    kinds = [device.device_kind for device in jax.devices()]
    return tuple(
        Devices(kind, kinds.count(kind), *(memory_of(local[kind]) if kind in local else ("unknown", None, None)))
        for kind in dict.fromkeys(kinds)
    )


def default_device() -> Any:
    """The device on which a computation runs if nothing else is asked for."""
    return next(iter(jnp.zeros(()).devices()))


def memory_of(device: Any) -> tuple[str, int | None, int | None]:
    """Whose memory a device computes in, how many bytes of it there are, and how many are in use."""
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return "device", stats["bytes_limit"], stats.get("bytes_in_use")
    if device.platform != "cpu" or "SC_AVPHYS_PAGES" not in getattr(os, "sysconf_names", ()):
        return "unknown", None, None
    page, total, free = (os.sysconf(name) for name in ("SC_PAGE_SIZE", "SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
    return "host", page * total, page * (total - free)


# What a variable does to mixed precision, by the value that it has.
_MEANINGS: dict[str, Callable[[str], str]] = {
    "XLA_FLAGS": lambda value: "; ".join(text for flag, text in _FLAGS.items() if flag in value),
    "JAX_PLATFORMS": lambda value: f"JAX looks for these backends only: {value}",
    "JAX_ENABLE_X64": lambda value: (
        "64-bit types are on: Optax computes bias corrections and schedules in float64" if _is_on(value) else ""
    ),
    "JAX_DEFAULT_MATMUL_PRECISION": lambda value: (
        f"products ask for {value}; what asks for more than the default is not lowered by autocast"
    ),
    "JAX_NUMPY_DTYPE_PROMOTION": lambda value: (
        "Optax's adam and adamw raise, and so does optax.apply_updates on 16-bit parameters"
        if value.lower() == "strict"
        else ""
    ),
    "JAX_DISABLE_JIT": lambda value: "nothing is compiled: every training is slow" if _is_on(value) else "",
    "NVIDIA_TF32_OVERRIDE": lambda value: (
        "NVIDIA's libraries do not use TF32, even where it is asked for" if value == "0" else ""
    ),
    "XLA_PYTHON_CLIENT_PREALLOCATE": lambda value: (
        "" if _is_on(value) else "memory is taken as it is needed, and may be fragmented in the end"
    ),
    "XLA_PYTHON_CLIENT_MEM_FRACTION": lambda value: f"JAX may use {value} of the device's memory; the default is 0.75",
}
_FLAGS = {
    "--xla_allow_excess_precision=false": "XLA keeps the roundings that a program asks for",
    "--xla_allow_excess_precision=0": "XLA keeps the roundings that a program asks for",
    "--xla_force_host_platform_device_count": "several CPU devices share the same cores and memory",
    "--xla_cpu_enable_fast_math=true": "the CPU may reorder sums and ignore NaN, which spoils Kahan summation",
}


def read_settings(variables: Mapping[str, str]) -> tuple[Setting, ...]:
    """The environment variables that bear on mixed precision, of those that are set.

    Example:
        >>> read_settings({"NVIDIA_TF32_OVERRIDE": "0", "HOME": "/home/me"})[0].name
        'NVIDIA_TF32_OVERRIDE'
    """
    return tuple(
        Setting(name, variables[name], meaning(variables[name]))
        for name, meaning in _MEANINGS.items()
        if variables.get(name)
    )


def look_at_imports() -> Imports:
    """Which package called mpx Python finds, and whether another one is in its way."""
    package = pathlib.Path(__file__).parents[1]
    spec = importlib.machinery.PathFinder.find_spec("mpx", [os.getcwd()])
    here = None if spec is None else spec.origin  # None for a folder that is no package
    try:
        files = importlib.metadata.distribution(DISTRIBUTION).files or ()
    except importlib.metadata.PackageNotFoundError:
        files = ()
    # Files of a checkout may be listed too, but without hashes.
    folders = [pathlib.Path(str(f.locate())).parent for f in files if str(f) == "mpx/__init__.py" and f.hash]
    installed = folders[0] if folders and folders[0].exists() else None
    return Imports(
        str(package),
        checkout=installed is None or installed.resolve() != package.resolve(),
        installed=None if installed is None else str(installed),
        in_this_folder=here,
        in_this_folder_is_mpx=here is not None and pathlib.Path(here).with_name("doctor.py").exists(),
        other_distributions=other_distributions(importlib.metadata.packages_distributions()),
        changed_files=changed_files(files),
    )


def other_distributions(providers: Mapping[str, Iterable[str]]) -> tuple[str, ...]:
    """The distributions, other than ours, that bring a package called mpx.

    Example:
        >>> other_distributions({"mpx": ["mpx-jax", "mixed-precision-for-JAX"], "jax": ["jax"]})
        ('mixed-precision-for-JAX',)
    """
    names = dict.fromkeys(providers.get("mpx", ()))
    return tuple(name for name in names if name.lower().replace("_", "-") != DISTRIBUTION)


def changed_files(files: Iterable[importlib.metadata.PackagePath]) -> tuple[str, ...]:
    """The source files of a distribution that are gone, or whose hash is not that of the installed ones.

    Two distributions with a package of one name are installed into one folder, and the later one overwrites.
    """
    found = []
    for file in files:
        if file.hash is None or file.hash.mode != "sha256" or file.suffix != ".py" or file.parts[0] != "mpx":
            continue
        path = pathlib.Path(str(file.locate()))
        digest = hashlib.sha256(path.read_bytes()).digest() if path.exists() else b""
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
            found.append(str(file))
    return tuple(found)


def _autocast_lowers() -> bool:
    matrix = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    return explain(jnp.matmul, "bf16")(matrix, matrix).narrowed_share == 1


def _is_on(value: str) -> bool:
    return value.lower() in ("1", "true", "yes", "on", "y", "t")
