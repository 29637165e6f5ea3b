"""The command `examples.gpt.train` with a model that is smaller than any preset, for tests that start processes.

    python -m tests.examples.nano --preset nano --data tokens --out run

It makes a file with the number of its process in the folder `NANO_PROCESSES`, if there is such a variable.
"""

import os
import subprocess
import sys
from pathlib import Path

from examples.gpt import data, processes, train
from examples.gpt.model import PRESETS, Config
from tests.helpers import HAS_EMITTERS

ROOT = Path(__file__).resolve().parents[2]
NANO = Config(width=32, depth=1, heads=2, context=16, vocabulary=256)
COMMAND = ("-m", "tests.examples.nano")


def start(cache, options, *flags, command=COMMAND, devices=1, **variables):
    """Start the command on the CPU; compiled programs are shared by all processes with the same cache."""
    # As `conftest.py` has it; XLA's newer emitters take half of the time that a process lives here.
    xla_flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0 "
    xla_flags += "--xla_llvm_disable_expensive_passes=true " + "--xla_cpu_use_fusion_emitters=false" * HAS_EMITTERS
    environment = os.environ | variables | {
        "JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags, "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONPATH": str(ROOT), "COLUMNS": "400",
    }  # fmt: skip
    arguments = [str(part) for name, value in ({"preset": "nano"} | options).items() for part in (f"--{name}", value)]
    return subprocess.Popen(
        [sys.executable, *command, *arguments, *flags], env=environment, cwd=ROOT, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip


def make_shards(folder: Path) -> Path:
    """Make shards of a short text."""
    folder.mkdir(parents=True)
    (folder / "text.txt").write_text("".join(f"line of a text {number}\n" for number in range(600)))
    data.prepare(folder / "tokens", [folder / "text.txt"], context=NANO.context, shard_tokens=2000)
    return folder / "tokens"


if __name__ == "__main__":
    PRESETS["nano"] = NANO
    if "NANO_PROCESSES" in os.environ:
        Path(os.environ["NANO_PROCESSES"], str(os.getpid())).touch()
    processes.run(train.app)
