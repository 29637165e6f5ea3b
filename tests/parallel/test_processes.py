"""Check that a run of two processes, with four devices each, is the run of one process
with eight.
"""

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return where two processes have saved their run."""
    folder = tmp_path_factory.mktemp("run")
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
    """Return the start and the end of the run in one process with eight devices,
    without `fused_update`.
    """
    with jax.set_mesh(fsdp.mesh_of(jax.devices("cpu"))):
        start = fsdp.started()
        return start, fsdp.trained(start, 0, fsdp.STEPS, fused=False)


def assert_equal_runs(actual, expected):
    assert_same_bits(*(jax.tree.map(np.asarray, run) for run in (actual, expected)))


def test_two_processes_have_the_bits_of_one_and_say_the_same_of_the_run(folder, plain):
    """Also after a checkpoint, from which they went on."""
    with jax.set_mesh(fsdp.mesh_of(jax.devices("cpu"))):
        assert_equal_runs(fsdp.ocp.load(folder / "end", fsdp.like(plain[1])), plain[1])
        expected = json.loads(json.dumps(fsdp.observed(plain[1])))
    assert (expected["skipped"], expected["scale"]) == (1, 8)
    assert all(expected[key] for key in ("resynced", "finite"))
    for index in range(2):
        assert json.loads((folder / f"observed {index}.json").read_text()) == expected


def test_two_processes_train_by_muon_to_the_bits_of_one(folder):
    """Matrices are sent from one process to the other, and no sums are."""
    with jax.set_mesh(fsdp.mesh_of(jax.devices("cpu"))):
        expected = fsdp.trained_by_muon()
        assert_equal_runs(fsdp.ocp.load(folder / "muon", fsdp.like(expected)), expected)


@pytest.mark.parametrize("count", [4, 1])
def test_one_process_goes_on_from_the_checkpoint_of_two(count, folder, plain):
    """The shapes are those of a state made for eight devices: on four, 8-bit columns
    would have larger blocks.
    """
    start, expected = plain
    with jax.set_mesh(fsdp.mesh_of(jax.devices("cpu")[:count])):
        run = fsdp.ocp.load(folder / "saved", fsdp.like(start))
        assert_equal_runs(fsdp.trained(run, fsdp.SAVED, fsdp.STEPS), expected)
