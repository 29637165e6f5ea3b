"""Devices that programs can be compiled for on a machine without them."""

import dataclasses
import importlib.util
import os
from collections.abc import Mapping
from typing import Any

import jax
from jax.experimental import topologies

_CONSTRAINTS = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
_CUDA = {"cuda12": "{ major: 12 minor: 9 }", "cuda13": "{ major: 13 minor: 0 }"}


@dataclasses.dataclass(frozen=True)
class Target:
    """A device, with the figures that its maker publishes."""

    name: str  # what it is called
    memory_bytes: int  # its memory
    bandwidth: float  # bytes a second between that memory and the chip
    # FLOPs a second of dense products, by the dtype of their operands, as in a report
    rates: Mapping[str, float]
    # Of a GPU: `cores`, arithmetic `units` of each, `clock` in GHz, bytes of `cache`
    # and of `shared` memory a core, and its compute `capability`, such as `(9, 0)`.
    # Without them memory can be planned, but nothing is compiled.
    # What XLA must know of its chip, as `TARGETS` has.
    gpu: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tpu: str = ""  # for a TPU, what JAX calls it
    launch_seconds: float = (
        2e-6  # that each kernel takes at least: an estimate, not a published figure
    )
    # how it multiplies float32 numbers unless more is asked for, as in the rows of a
    # report
    float32: str = "tf32"

    @property
    def usable_bytes(self) -> int:
        """The part of its memory that JAX uses by default: 75% of a GPU's (see
        XLA_PYTHON_CLIENT_MEM_FRACTION).
        """
        return self.memory_bytes if self.tpu else self.memory_bytes * 3 // 4

    def bound_seconds(self, moved_bytes: int, flops: Mapping[str, int]) -> float:
        """Return what a kernel takes at least: the larger of bytes over bandwidth and
        FLOPs over rate, and a launch.
        """
        fastest = max(self.rates.values())
        work = sum(
            count / self.rates.get(dtype.split(" ")[0], fastest)
            for dtype, count in flops.items()
        )
        return max(moved_bytes / self.bandwidth, work) + self.launch_seconds


# What XLA asks for and no maker publishes is what the driver of such a GPU reports.
_AMPERE = {
    "cores": 108,
    "units": 64,
    "clock": 1.41,
    "cache": 40 * 2**20,
    "shared": 164 * 2**10,
    "capability": (8, 0),
}
_HOPPER = {
    "cores": 132,
    "units": 128,
    "clock": 1.98,
    "cache": 50 * 2**20,
    "shared": 228 * 2**10,
    "capability": (9, 0),
}
_BLACKWELL = _HOPPER | {
    "cores": 148,
    "clock": 1.965,
    "cache": 126 * 2**20,
    "capability": (10, 0),
}
_GRACE_BLACKWELL = _BLACKWELL | {"cores": 152, "clock": 2.062, "cache": 135528448}
_GPU = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_core: {shared}
  shared_memory_per_block_optin: {optin} core_count: {cores}
  fpus_per_core: {units} clock_rate_ghz: {clock} l2_cache_size: {cache}
  memory_bandwidth: {bandwidth} device_memory_size: {memory}
  cuda_compute_capability {{ major: {capability[0]} minor: {capability[1]} }}
}}
platform_name: "CUDA"
device_description_str: "NVIDIA {name}"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {version}
"""


def _rates(f32: float, tf32: float, bf16: float, *f8: float) -> dict[str, float]:
    rates = {"f32": f32, "tf32": tf32, "bf16": bf16, "f16": bf16}
    return rates | {dtype: rate for rate in f8 for dtype in ("f8e4m3fn", "f8e5m2")}


_TPU: dict[str, Any] = {"launch_seconds": 0, "float32": "bf16 (f32)"}
_HOPPER_RATES = _rates(66.9e12, 494.7e12, 989.4e12, 1978.9e12)
TARGETS = {
    "rtx4090": Target(
        "GeForce RTX 4090",
        24 * 2**30,
        1.008e12,
        _rates(82.6e12, 82.6e12, 165.2e12, 330.3e12),
    ),
    "l40s": Target(
        "L40S", 48 * 10**9, 0.864e12, _rates(91.6e12, 183e12, 362e12, 733e12)
    ),
    "a100": Target(
        "A100-SXM4-80GB", 80 * 2**30, 2.039e12, _rates(19.5e12, 156e12, 312e12), _AMPERE
    ),
    "h100": Target("H100 80GB HBM3", 80 * 2**30, 3.35e12, _HOPPER_RATES, _HOPPER),
    "h100-nvl": Target(
        "H100 NVL", 94 * 10**9, 3.9e12, _rates(60e12, 417.5e12, 835.5e12, 1670.5e12)
    ),
    "h200": Target("H200", 141 * 10**9, 4.8e12, _HOPPER_RATES, _HOPPER),
    "b200": Target(
        "B200",
        180 * 10**9,
        7.7e12,
        _rates(75e12, 1100e12, 2250e12, 4500e12),
        _BLACKWELL,
    ),
    "gb200": Target(
        "GB200",
        186 * 10**9,
        8e12,
        _rates(80e12, 1250e12, 2500e12, 5000e12),
        _GRACE_BLACKWELL,
    ),
    "v5e": Target("TPU v5e", 16 * 2**30, 0.819e12, {"bf16": 197e12}, tpu="v5e", **_TPU),
    "v6e": Target("TPU v6e", 32 * 2**30, 1.64e12, {"bf16": 918e12}, tpu="v6e", **_TPU),
}


def get_target(given: "str | Target") -> Target:
    """Return the target of a name."""
    if isinstance(given, Target):
        return given
    if given not in TARGETS:
        raise ValueError(
            f"`step_report`: `target` must be one of {', '.join(TARGETS)} or None, but"
            f" got {given!r}."
        )
    return TARGETS[given]


def target_here() -> Target | None:
    """Return the target that this machine's first device is; None if its figures are
    not known.

    The whole name must match: an H100 PCIe, a slice of an H100 (MIG) and an A100 of 40
    GB have others.
    """
    # "TPU v5 lite" is a v5e.
    kind = jax.devices()[0].device_kind.removeprefix("NVIDIA ").replace(" lite", "e")
    return next((target for target in TARGETS.values() if target.name == kind), None)


def target_devices(target: "str | Target", count: int = 1) -> list[Any]:
    """Return devices of a machine that is not here, to compile for: nothing can be run
    or stored on them.

    Args:
        target: `"a100"`, `"h100"`, `"h200"`, `"b200"`, `"gb200"`, `"v5e"` or `"v6e"`,
            or a `Target`.
        count: how many GPUs one machine has, or 1 to 8 TPUs of one host.

    Returns:
        A list for `jax.sharding.Mesh`. The shardings of the shapes that `step_report`
        gets stand on such a mesh.

    Raises:
        ValueError: if the target is not known or cannot be compiled for, or the count
            is below 1 or too large.
        RuntimeError: if the plugin that compiles for it is missing, or JAX started
            without leave to do without a GPU.
    """
    target = get_target(target)
    if count < 1:
        raise ValueError(
            f"`target_devices`: `count` must be 1 or more, but got {count}."
        )
    if not target.tpu:
        return _gpus(target, count)
    if importlib.util.find_spec("libtpu") is None:
        raise RuntimeError(
            f"The compiler for the {target.name} is not installed: pip install"
            ' "jax[tpu]".'
        )
    if count > 8:
        raise ValueError(
            f"`target_devices`: a host has up to 8 {target.name}, but got {count}."
        )
    slice_shape = "2x2x1" if count <= 4 else "2x4x1"
    return list(
        topologies.get_topology_desc(f"{target.tpu}:{slice_shape}", "tpu").devices[
            :count
        ]
    )


def _gpus(target: Target, count: int) -> list[Any]:
    if not target.gpu:
        raise ValueError(
            f"`target_devices`: the {target.name} can be planned for (`mpx plan`), but"
            " not compiled for."
        )
    versions = [
        version
        for name, version in _CUDA.items()
        if importlib.util.find_spec(f"jax_{name}_plugin")
    ]
    if not versions:
        raise RuntimeError(
            f"The compiler for the {target.name} is not installed: pip install"
            ' "jax[cuda13-local]".'
        )
    allow_targets()
    config = _GPU.format(
        name=target.name,
        memory=target.memory_bytes,
        bandwidth=int(target.bandwidth),
        optin=target.gpu["shared"] - 2**10,
        version=versions[0],
        **target.gpu,
    )
    try:
        return list(
            topologies.get_topology_desc(
                "", "cuda", target_config=config, topology=f"1x1x{count}"
            ).devices
        )
    except NotImplementedError as error:
        raise RuntimeError(
            "`target_devices`: JAX started without a GPU, and then it compiles for"
            f" none. Set {_CONSTRAINTS}=1 in the environment before JAX starts; `mpx"
            " program` does."
        ) from error


def allow_targets() -> None:
    """Let JAX's CUDA plugin start on a machine without a GPU. It reads this when the
    first backend starts.
    """
    os.environ.setdefault(_CONSTRAINTS, "1")
