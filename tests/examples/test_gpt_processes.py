"""Runs in processes of their own: one that is killed while it saves, two that train as one, fewer devices later."""

import functools
import shutil
import signal
import time

import jax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import SingleDeviceSharding

from examples.gpt.train import read_log
from tests import helpers
from tests.examples import nano
from tests.helpers import assert_same_bits

pytestmark = pytest.mark.slow

STEPS = 12
LONGEST_RUN = 240.0  # seconds
end = functools.partial(helpers.end, within=LONGEST_RUN)
ONE = {"recipe": "bf16-split-8bit", "batch_size": 2, "steps": STEPS, "save_every": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Tokens, and compiled programs that all runs share."""
    folder = tmp_path_factory.mktemp("runs")
    nano.make_tokens(folder / "text")
    return folder


def start(folder, name, *flags, **options):
    return nano.start(folder / "cache", *flags, data=folder / "text" / "tokens", out=folder / name, **options)


def wait_until(condition, process):
    stop = time.monotonic() + LONGEST_RUN
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < stop
        time.sleep(0.001)


def saved_steps(folder, name):
    return sorted(int(path.name) for path in (folder / name).glob("checkpoints/[0-9]*") if path.name.isdigit())


def result_of(folder, name):
    """Return the arrays of the last checkpoint of a run by their paths, and its log but for times."""
    path = folder / name / "checkpoints" / str(STEPS) / "state"
    with ocp.StandardCheckpointer() as checkpointer:
        device = SingleDeviceSharding(jax.devices()[0])  # whichever the run had
        place = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device)
        tree = checkpointer.restore(path, jax.tree.map(place, checkpointer.metadata(path).item_metadata.tree))
    log = [line | {"tokens_per_second": None} for line in read_log(folder / name / "log.jsonl")]
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}, log


def test_a_run_that_is_killed_while_it_saves_is_resumed_to_the_same_bits(folder):
    """Killed while a temporary folder of Orbax shows that a checkpoint after the first one is half written."""
    codes, outputs = end(start(folder, "undisturbed", **ONE))
    assert codes == [0], outputs
    process = start(folder, "killed", **ONE)
    is_saving = lambda: any((folder / "killed").glob("checkpoints/*orbax-checkpoint-tmp*"))
    try:
        wait_until(lambda: saved_steps(folder, "killed") and is_saving(), process)
    finally:
        process.kill()
    assert end(process)[0] == [-signal.SIGKILL]
    before = saved_steps(folder, "killed")
    codes, outputs = end(start(folder, "killed", "--resume", **ONE))
    assert codes == [0], outputs
    assert f"Going on from step {before[-1]} to" in outputs[0]
    (arrays, log), (expected, expected_log) = result_of(folder, "killed"), result_of(folder, "undisturbed")
    assert_same_bits(arrays, expected)
    assert log == expected_log


def test_two_processes_train_as_one_with_all_devices_and_after_ctrl_c_to_one_both_save_the_same_step(folder):
    """What they send each other is added up in another order than in one process, if at all."""
    address = helpers.free_address()
    options = {"recipe": "bf16-split", "batch_size": 8, "mesh": "data=2,fsdp=4", "steps": 100_000}
    of_two = options | {"coordinator_address": address, "num_processes": 2, "devices": 4}
    runs = {"two": [start(folder, "two", **of_two, process_id=i) for i in range(2)]}
    runs["one"] = [start(folder, "one", **options, devices=8)]
    outputs = {}
    for name, processes in runs.items():
        wait_until(lambda name=name: len(read_log(folder / name / "log.jsonl")) > 4, processes[0])
        processes[-1].send_signal(signal.SIGINT)
        codes, outputs[name] = end(*processes)
        assert codes[-1] == 128 + signal.SIGINT, outputs
        assert saved_steps(folder, name)[-1] == read_log(folder / name / "log.jsonl")[-1]["step"]
    assert "on 8 x cpu" in outputs["two"][0]
    assert "Stopped; the checkpoint is saved. Go on with --resume." in outputs["two"][0]
    assert "step " not in outputs["two"][1]
    losses = {name: [line["loss"] for line in read_log(folder / name / "log.jsonl")[:4]] for name in runs}
    assert losses["two"] == pytest.approx(losses["one"], rel=1e-3)


def test_a_run_of_eight_devices_goes_on_with_four_on_another_mesh(folder):
    """The losses are those of eight to the end, but for the order of additions. Blocks of the state stay."""
    options = {"recipe": "bf16-split-8bit", "batch_size": 8, "save_every": 2, "learning_rate": 1e-2}
    on_eight, on_four = {"mesh": "fsdp=4,model=2", "devices": 8}, {"mesh": "data=2,fsdp=2", "devices": 4}
    whole, resumed = "on eight", "on four"
    codes, outputs = end(start(folder, whole, steps=4, **options, **on_eight))
    assert codes == [0], outputs
    shutil.copytree(folder / whole, folder / resumed)
    shutil.rmtree(folder / resumed / "checkpoints" / "4")
    codes, outputs = end(start(folder, resumed, "--resume", steps=4, **options, **on_four))
    assert codes == [0], outputs
    assert "on 4 x cpu" in outputs[0]
    assert "Going on from step 2 to 4" in outputs[0]
    losses = [[line["loss"] for line in read_log(folder / name / "log.jsonl")] for name in (whole, resumed)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert losses[0][3] < 0.9 * losses[0][1]  # Negative control: in two steps it falls by more
