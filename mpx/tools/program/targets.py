"""Devices that programs can be compiled for on a machine without them."""

import dataclasses
import importlib.util
import os
from collections.abc import Mapping
from typing import Any

import jax
from jax.experimental import topologies

_CONSTRAINTS = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
_LAUNCH_SECONDS = 2e-6  # of one kernel; an estimate, not a published figure


@dataclasses.dataclass(frozen=True)
class Target:
    """A device, with the figures that its maker publishes.

    Attributes:
        name: what it is called.
        memory_bytes: its memory.
        bandwidth: bytes a second between that memory and the chip.
        rates: FLOPs a second of dense products, by the dtype of their operands, as in the rows of a report.
        launch_seconds: seconds that each kernel takes at least.
        platform: `cuda` or `tpu`.
        topology: for a TPU, what JAX calls its smallest slice.
        description: for a GPU, the properties that XLA compiles for.
    """

    name: str
    memory_bytes: int
    bandwidth: float
    rates: Mapping[str, float]
    launch_seconds: float = _LAUNCH_SECONDS
    platform: str = "cuda"
    topology: str = ""
    description: str = ""


def _gpu(
    name: str, memory_bytes: int, bandwidth: float, rates: Mapping[str, float], *, cores: int, clock: float,
    units: int, capability: tuple[int, int], cache: int, shared: int,
) -> Target:  # fmt: skip
    """Return a GPU. What XLA asks for and no maker publishes is what the device's driver reports."""
    description = f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  shared_memory_per_block: 49152 shared_memory_per_core: {shared} shared_memory_per_block_optin: {shared - 1024}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  core_count: {cores} fpus_per_core: {units} clock_rate_ghz: {clock} l2_cache_size: {cache}
  memory_bandwidth: {int(bandwidth)} device_memory_size: {memory_bytes}
  cuda_compute_capability {{ major: {capability[0]} minor: {capability[1]} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "NVIDIA {name}"
"""
    return Target(name, memory_bytes, bandwidth, rates, description=description)


def _dense(bf16: float, tf32: float, f32: float, f8: float | None = None) -> dict[str, float]:
    rates = {"bf16": bf16, "f16": bf16, "tf32": tf32, "f32": f32}
    return rates if f8 is None else rates | {"f8e4m3fn": f8, "f8e5m2": f8}


_HOPPER = _dense(989.4e12, 494.7e12, 66.9e12, 1978.9e12)
_HOPPER_CHIP = {"cores": 132, "clock": 1.98, "units": 128, "capability": (9, 0), "cache": 50 * 2**20, "shared": 233472}
TARGETS = {
    "a100": _gpu(
        "A100-SXM4-80GB", 80 * 2**30, 2.039e12, _dense(312e12, 156e12, 19.5e12),
        cores=108, clock=1.41, units=64, capability=(8, 0), cache=40 * 2**20, shared=167936,
    ),
    "h100": _gpu("H100 80GB HBM3", 80 * 2**30, 3.35e12, _HOPPER, **_HOPPER_CHIP),
    "h200": _gpu("H200", 141 * 10**9, 4.8e12, _HOPPER, **_HOPPER_CHIP),
    "b200": _gpu(
        "B200", 180 * 10**9, 7.7e12, _dense(2250e12, 1100e12, 75e12, 4500e12),
        cores=148, clock=1.965, units=128, capability=(10, 0), cache=126 * 2**20, shared=233472,
    ),
    "v5e": Target("TPU v5e", 16 * 2**30, 0.819e12, {"bf16": 197e12}, platform="tpu", topology="v5e:2x2x1"),
    "v6e": Target("TPU v6e", 32 * 2**30, 1.64e12, {"bf16": 918e12}, platform="tpu", topology="v6e:2x2x1"),
}  # fmt: skip


def get_target(given: "str | Target") -> Target:
    """Return the target of a name."""
    if isinstance(given, Target):
        return given
    if given not in TARGETS:
        raise ValueError(f"`step_report`: `target` must be one of {', '.join(TARGETS)} or None, but got {given!r}.")
    return TARGETS[given]


def target_here() -> Target | None:
    """Return the target that this machine's first device is; None if its figures are not known."""
    kind = jax.devices()[0].device_kind.lower().replace("tpu v5 lite", "tpu v5e").replace("tpu v6 lite", "tpu v6e")
    return next((target for name, target in TARGETS.items() if name in kind.replace("-", " ").split()), None)


def target_devices(target: "str | Target", count: int = 1) -> list[Any]:
    """Return devices of a machine that is not here, to compile for: nothing can be run or stored on them.

    Args:
        target: `"a100"`, `"h100"`, `"h200"`, `"b200"`, `"v5e"` or `"v6e"`, or a `Target`.
        count: how many GPUs one machine has, or 1 to 4 TPUs of one host.

    Returns:
        A list for `jax.sharding.Mesh`. The shardings of the shapes that `step_report` gets stand on such a mesh.

    Raises:
        ValueError: if the target is not known, or the count is below 1 or too large.
        RuntimeError: if the plugin that compiles for it is missing, or JAX started without leave to do without a GPU.
    """
    target = get_target(target)
    if target.platform == "tpu":
        _require("libtpu", "tpu")
        devices = topologies.get_topology_desc(target.topology, "tpu").devices
        if not 1 <= count <= len(devices):
            raise ValueError(f"`target_devices`: {target.name} has 1 to {len(devices)} devices, but got {count}.")
        return list(devices[:count])
    if count < 1:
        raise ValueError(f"`target_devices`: `count` must be 1 or more, but got {count}.")
    major, minor = next((v for name, v in _CUDA.items() if importlib.util.find_spec(f"jax_{name}_plugin")), (0, 0))
    if not major:
        _require("jax_cuda13_plugin", "cuda13")
    allow_targets()
    config = f"{target.description}runtime_version {{ major: {major} minor: {minor} patch: 0 }}\n"
    try:
        return list(topologies.get_topology_desc("", "cuda", target_config=config, topology=f"1x1x{count}").devices)
    except NotImplementedError as error:
        raise RuntimeError(
            f"`target_devices`: JAX started without a GPU, and then it compiles for none. Set {_CONSTRAINTS}=1 in the "
            "environment before JAX starts; `mpx program` does."
        ) from error


_CUDA = {"cuda12": (12, 9), "cuda13": (13, 0)}


def allow_targets() -> None:
    """Let JAX's CUDA plugin start on a machine without a GPU. It reads this when the first backend starts."""
    os.environ.setdefault(_CONSTRAINTS, "1")


def _require(module: str, extra: str) -> None:
    if importlib.util.find_spec(module) is None:
        what = 'pip install "jax[tpu]"' if extra == "tpu" else 'pip install "mpx-jax[cuda13]", or [cuda12]'
        raise RuntimeError(f"`target_devices`: the compiler for this target is not installed: {what}.")
