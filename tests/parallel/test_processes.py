"""Check that a run of two processes, with four devices each, is the run of one process with eight."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.helpers import assert_same_bits, end, free_address
from tests.parallel import fsdp

pytestmark = [pytest.mark.slow, pytest.mark.optax_promotion, pytest.mark.many_devices]

ROOT = Path(__file__).resolve().parents[2]
LONGEST_RUN = 300.0  # seconds
every_run = pytest.mark.parametrize("name", fsdp.NAMES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return where two processes have saved their runs."""
    folder = tmp_path_factory.mktemp("runs")
    address = free_address()
    flags = re.sub("device_count=8", "device_count=4", os.environ["XLA_FLAGS"])
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.parallel.fsdp", folder, address, "2", str(index)],
            env=environment, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for index in range(2)
    ]  # fmt: skip
    codes, outputs = end(*processes, within=LONGEST_RUN)
    assert codes == [0, 0], outputs
    return folder


@pytest.fixture(scope="module")
def plain():
    """Return the start and the end of a run of one process with eight devices, without `fused_update`, by its dtype."""
    runs = {}
    with jax.set_mesh(fsdp.mesh_of(jax.devices("cpu"))):
        for dtype in ("bf16", "f16"):
            start = fsdp.started(dtype)
            runs[dtype] = start, fsdp.trained(dtype, start, 0, fsdp.STEPS)
    return {name: runs[name.split()[0]] for name in fsdp.NAMES}


def assert_equal_runs(actual, expected):
    assert_same_bits(*(jax.tree.map(np.asarray, run) for run in (actual, expected)))


@every_run
@pytest.mark.parametrize("interface", ["new", "older"])
def test_two_processes_have_the_bits_of_one_also_after_a_checkpoint(name, interface, folder, plain):
    _, expected = plain[name]
    with jax.set_mesh(fsdp.mesh_of(jax.devices("cpu"))):
        end = fsdp.ocp.load(folder / name / f"end of {interface}", fsdp.like(expected))
    assert_equal_runs(end, expected)


@every_run
def test_both_processes_and_one_process_say_the_same_of_a_run(name, folder, plain):
    with jax.set_mesh(fsdp.mesh_of(jax.devices("cpu"))):
        expected = json.loads(json.dumps(fsdp.observed(name, plain[name][1])))
    assert (expected["skipped"], expected["scale"]) == ((1, 8) if fsdp.is_scaled(name) else (0, 1))
    assert all(expected[key] for key in ("synced", "resynced", "finite"))
    for index in range(2):
        assert json.loads((folder / name / f"observed {index}.json").read_text()) == expected


@every_run
@pytest.mark.parametrize(("count", "interface"), [(8, "new"), (4, "older"), (1, "new")])
def test_one_process_goes_on_from_the_checkpoint_of_two(name, count, interface, folder, plain):
    """The shapes are those of a state made for eight devices: on four, 8-bit columns would have larger blocks."""
    start, expected = plain[name]
    with jax.set_mesh(fsdp.mesh_of(jax.devices("cpu")[:count])):
        run = fsdp.restored(folder / name, interface, fsdp.like(start))
        assert_equal_runs(fsdp.trained(name, run, fsdp.SAVED, fsdp.STEPS), expected)
