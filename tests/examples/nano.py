"""The command `examples.gpt.train` with a model that is smaller than any preset, for tests that start processes.

python -m tests.examples.nano --preset nano --data tokens --out run
"""

import os
import subprocess
import sys
from pathlib import Path

from examples.gpt import data, train
from examples.gpt.model import PRESETS, Config
from tests.helpers import HAS_EMITTERS

ROOT = Path(__file__).resolve().parents[2]
NANO = Config(width=32, depth=1, heads=2, context=16, vocabulary=256)


def start(cache, *flags, **options):
    """Start the command on one CPU; compiled programs are shared by all processes with the same cache."""
    # As `conftest.py` has it; XLA's newer emitters take half of the time that a process lives here.
    xla_flags = "--xla_force_host_platform_device_count=1 --xla_backend_optimization_level=0 "
    xla_flags += "--xla_llvm_disable_expensive_passes=true " + "--xla_cpu_use_fusion_emitters=false" * HAS_EMITTERS
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags, "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    options = {"preset": "nano", "report_every": 1} | options
    pairs = ((f"--{name.replace('_', '-')}", str(value)) for name, value in options.items())
    arguments = [*(part for pair in pairs for part in pair), *flags]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.examples.nano", *arguments],
        env=environment, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def make_tokens(folder):
    """Make a folder of tokens of a short text."""
    folder.mkdir(parents=True)
    (folder / "text.txt").write_text("".join(f"line of a text {number}\n" for number in range(6000)))
    data.prepare(folder / "tokens", [folder / "text.txt"])
    return folder / "tokens"


if __name__ == "__main__":
    PRESETS["nano"] = NANO
    train.app()
