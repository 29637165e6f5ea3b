"""Checkpoints: the same bits on any number of devices, and nothing else than what was asked for."""

import os
import shutil
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from examples.gpt.checkpoints import KEPT, CheckpointError, Checkpoints, SaveError
from examples.gpt.devices import AXIS, state_shardings
from tests.examples import nano
from tests.examples.disks import full_disk, leaves_garbage
from tests.helpers import assert_same_bits

DESCRIPTION = {"step": 3, "identity": {"recipe": "bf16-split", "seed": 0}, "position": {"epoch": 1}}


def state():
    """Of all kinds of leaves that recipes have."""
    params = {"w": jnp.linspace(-1, 1, 48, dtype=jnp.bfloat16).reshape(16, 3), "b": jnp.asarray([jnp.nan, -0.0, 1e-40])}
    bits = jnp.arange(16 * 8).reshape(8, 16)
    opt_state = {
        "low bits": bits.astype(jnp.uint16),
        "moment": bits.astype(jnp.float8_e4m3fn),
        "count": jnp.int32(7),
        "key": jax.random.key(3),
    }
    return params, opt_state


def mesh_of(count):
    return jax.make_mesh((count,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:count])


def placement(count, parallel="zero"):
    return state_shardings(mesh_of(count), *jax.eval_shape(state), parallel)


@pytest.fixture
def folder(tmp_path):
    """A checkpoint of step 3, saved from eight devices that divide the optimizer state."""
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(3, jax.device_put(state(), placement(8)), DESCRIPTION)
    return tmp_path / "checkpoints"


@pytest.mark.parametrize("parallel", ["replicated", "zero"])
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_any_number_of_devices_gets_the_same_bits(folder, count, parallel):
    shardings = placement(count, parallel)
    with Checkpoints(folder) as checkpoints:
        restored = checkpoints.restore(jax.eval_shape(state), shardings)

    assert_same_bits(restored, state())
    for leaf, sharding in zip(jax.tree.leaves(restored), jax.tree.leaves(shardings), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
        assert len(leaf.sharding.device_set) == count


def test_the_description_comes_back(folder):
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.newest == 3
        assert checkpoints.description() == DESCRIPTION


def changed(**changes):
    """The shapes of another run."""
    params, opt_state = jax.eval_shape(state)
    return params | changes, opt_state


SHAPE = jax.ShapeDtypeStruct


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (
            lambda: changed(w=SHAPE((8, 3), jnp.bfloat16)),
            r"\[0\]\['w'\] is bfloat16\[16, 3\], but should be bfloat16\[8",
        ),
        (
            lambda: changed(w=SHAPE((16, 4), jnp.bfloat16)),
            r"\[0\]\['w'\] is bfloat16\[16, 3\], but should be bf.*16, 4",
        ),
        (lambda: changed(w=SHAPE((16, 3), jnp.float32)), r"\[0\]\['w'\] is bfloat16\[16, 3\], but should be float32"),
        (lambda: changed(more=SHAPE((2,), jnp.float32)), r"\[0\]\['more'\] is missing, but should be float32\[2\]"),
        (lambda: (changed()[0], {}), r"\[1\]\['count'\] is int32\[\], but should be absent"),
    ],
    ids=["smaller", "larger", "another dtype", "one more", "one less"],
)
def test_other_arrays_than_those_of_the_run_are_refused_by_name(folder, shapes, message):
    """Orbax would round to another dtype, or take parts of an array, and say nothing."""
    shapes = shapes()
    shardings = state_shardings(mesh_of(1), *shapes, "replicated")
    with Checkpoints(folder) as checkpoints, pytest.raises(CheckpointError, match=message) as caught:
        checkpoints.restore(shapes, shardings)
    assert f"the checkpoint of step 3 in {folder} does not hold the arrays of this run" in str(caught.value)


def test_of_many_differences_only_the_first_are_named(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {f"w{number}": jnp.zeros(2, jnp.float32) for number in range(9)}, {})
        shapes = {f"w{number}": SHAPE((3,), jnp.float32) for number in range(9)}
        shardings, _ = state_shardings(mesh_of(1), shapes, {}, "replicated")
        with pytest.raises(
            CheckpointError, match=r"\['w4'\] is float32\[2\], but should be float32\[3\]; and 4 more\."
        ):
            checkpoints.restore(shapes, shardings)


@pytest.mark.parametrize(
    "ask", [lambda c: c.description(), lambda c: c.restore({}, {})], ids=["description", "restore"]
)
def test_a_folder_without_a_checkpoint_is_refused(ask, tmp_path):
    with Checkpoints(tmp_path / "new") as checkpoints:
        assert checkpoints.newest is None
        with pytest.raises(CheckpointError, match=r"there is no checkpoint in .*new; start without --resume"):
            ask(checkpoints)


def test_arrays_may_be_donated_while_they_are_saved(tmp_path):
    """A hundred steps follow at once; each one writes over the arrays that are on their way to the disk."""
    step = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    arrays = {"w": jnp.zeros((256, 256)), "n": jnp.zeros((), jnp.int32)}
    with Checkpoints(tmp_path) as checkpoints, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        checkpoints.save(1, arrays, {})
        for _ in range(100):
            arrays = step(arrays)
    with Checkpoints(tmp_path) as checkpoints:
        shapes = jax.eval_shape(lambda: arrays)
        restored = checkpoints.restore(shapes, state_shardings(mesh_of(1), shapes, {}, "replicated")[0])
    assert (arrays["w"] == 100).all()  # the steps were taken
    assert_same_bits(restored, {"w": jnp.zeros((256, 256)), "n": jnp.zeros((), jnp.int32)})


def test_the_newest_checkpoints_are_kept(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2, 3, 4):
            checkpoints.save(step, {"w": np.full(2, step, np.float32)}, {"step": step})
        checkpoints.save(4, {"w": np.zeros(2, np.float32)}, {"step": "again"})  # is there already
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.newest == 4
        assert checkpoints.description() == {"step": 4}
    assert len([path for path in tmp_path.iterdir() if path.name.isdigit()]) == KEPT


# --- Disks that are full, folders that are read-only, files that are damaged. ---
def noise(seed=0):
    """Arrays that no compression makes small."""
    return {"w": jax.random.normal(jax.random.key(seed), (64, 64)), "n": jnp.int32(seed)}


def restored_noise(checkpoints):
    shapes = jax.eval_shape(noise)
    return checkpoints.restore(shapes, state_shardings(mesh_of(1), shapes, {}, "replicated")[0])


FULL = "the checkpoint of step 2 could not be saved in .*: File too large. The checkpoints before it are whole"


@leaves_garbage
@pytest.mark.usefixtures("collected")
def test_a_full_disk_is_told_when_the_next_checkpoint_is_due(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, noise(1), {})
        checkpoints.wait()
        with full_disk():
            checkpoints.save(2, noise(2), {})
            with pytest.raises(SaveError, match=FULL):
                checkpoints.save(3, noise(3), {})


@leaves_garbage
@pytest.mark.usefixtures("collected")
def test_a_full_disk_is_told_at_the_end_of_a_run_at_the_latest(tmp_path, caplog):
    with full_disk(), pytest.raises(SaveError, match=FULL), Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, noise(2), {})
    assert caplog.text == ""  # Orbax would log pages


@leaves_garbage
@pytest.mark.usefixtures("collected")
def test_after_a_full_disk_the_checkpoint_before_is_whole_and_what_is_left_of_the_other_goes(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, noise(1), {})
        checkpoints.wait()
        with full_disk():
            checkpoints.save(2, noise(2), {})
            with pytest.raises(SaveError):
                checkpoints.wait()
    assert [path.name for path in tmp_path.iterdir() if "tmp" in path.name]
    with Checkpoints(tmp_path, cleans=True) as checkpoints:
        assert checkpoints.newest == 1
        assert_same_bits(restored_noise(checkpoints), noise(1))
        checkpoints.save(2, noise(2), {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


# The superuser may write everywhere, until it gives up the capabilities 1 and 2, which only the next program notices.
UNPRIVILEGED = """
import ctypes, os, sys
if os.geteuid() == 0:
    for capability in (1, 2):
        assert ctypes.CDLL(None).prctl(24, capability, 0, 0, 0) == 0
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
SAVE_THERE = """
from pathlib import Path
import numpy as np
import typer
from examples.gpt import processes
from examples.gpt.checkpoints import Checkpoints, SaveError

def main(folder: Path):
    try:
        with Checkpoints(folder) as checkpoints:
            checkpoints.save(2, {"w": np.zeros(2, np.float32)}, {})
    except SaveError as error:
        processes.fail(str(error))

app = typer.Typer()
app.command()(main)
processes.run(app)
"""


def test_a_read_only_folder_is_told_in_a_line_and_ends_the_program_at_once(tmp_path):
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(1, noise(1), {})
    (tmp_path / "checkpoints").chmod(0o555)
    result = subprocess.run(
        [sys.executable, "-c", UNPRIVILEGED, "-c", SAVE_THERE, tmp_path / "checkpoints"], cwd=nano.ROOT,
        env=os.environ | {"PYTHONPATH": str(nano.ROOT)}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: the checkpoint of step 2 could not be saved in")
    assert ": Permission denied. The checkpoints before it are whole" in line
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        assert_same_bits(restored_noise(checkpoints), noise(1))


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    with Checkpoints(folder) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, noise(step), {"step": step})
    return folder


@leaves_garbage
@pytest.mark.usefixtures("collected")
def test_whichever_file_of_a_checkpoint_is_cut_off_nothing_wrong_is_restored(two_checkpoints, tmp_path):
    """Without some files Orbax can do; the others are named with the step and the folder, and what to do."""
    files = [path.relative_to(two_checkpoints) for path in (two_checkpoints / "2").rglob("*") if path.is_file()]
    refused = []
    for number, file in enumerate(files):
        folder = tmp_path / str(number)
        shutil.copytree(two_checkpoints, folder)
        (folder / file).write_bytes((folder / file).read_bytes()[: (folder / file).stat().st_size // 2])
        message = None
        try:
            with Checkpoints(folder) as checkpoints:
                assert checkpoints.description() == {"step": 2}
                assert_same_bits(restored_noise(checkpoints), noise(2))
        except CheckpointError as error:
            message = str(error)
        if message:
            refused.append(file.name)
            assert message.startswith(f"the checkpoint of step 2 in {folder} cannot be read: ")
            assert message.endswith(f"Move its folder, {folder / '2'}, away to go on from the one before.")
            assert len(message) < 600
        shutil.rmtree(folder / "2")
        with Checkpoints(folder) as checkpoints:
            assert_same_bits(restored_noise(checkpoints), noise(1))
    assert {"manifest.ocdbt", "_METADATA", "metadata"} <= set(refused)
