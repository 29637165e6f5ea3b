"""A run in a process of its own that is killed while it saves goes on to the same bits."""

import functools
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

STEPS = 12
LONGEST_RUN = 240.0  # seconds
end = functools.partial(helpers.end, within=LONGEST_RUN)


def wait_until(condition, process):
    stop = time.monotonic() + LONGEST_RUN
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < stop
        time.sleep(0.001)


def result_of(folder):
    """Return the arrays of the last checkpoint of a run by their paths, and its log but for times."""
    path = folder / "checkpoints" / str(STEPS) / "state"
    with ocp.StandardCheckpointer() as checkpointer:
        device = SingleDeviceSharding(jax.devices()[0])  # whichever the run had
        place = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device)
        tree = checkpointer.restore(path, jax.tree.map(place, checkpointer.metadata(path).item_metadata.tree))
    log = [line | {"tokens_per_second": None} for line in read_log(folder / "log.jsonl")]
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}, log


@pytest.mark.slow
def test_a_run_that_is_killed_while_it_saves_is_resumed_to_the_same_bits(tmp_path):
    """Killed while a temporary folder of Orbax shows that a checkpoint after the first one is half written."""
    options = {"data": nano.make_tokens(tmp_path / "text"), "recipe": "bf16-split-8bit", "batch_size": 2}
    options |= {"steps": STEPS, "save_every": 2}
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    start = lambda out, *flags: nano.start(tmp_path / "cache", *flags, out=out, **options)
    codes, outputs = end(start(undisturbed))
    assert codes == [0], outputs
    process = start(killed)
    saved_steps = lambda: sorted(int(path.name) for path in killed.glob("checkpoints/[0-9]*") if path.name.isdigit())
    is_saving = lambda: any(killed.glob("checkpoints/*orbax-checkpoint-tmp*"))
    try:
        wait_until(lambda: saved_steps() and is_saving(), process)
    finally:
        process.kill()
    assert end(process)[0] == [-signal.SIGKILL]
    before = saved_steps()
    codes, outputs = end(start(killed, "--resume"))
    assert codes == [0], outputs
    assert f"Going on from step {before[-1]} to" in outputs[0]
    (arrays, log), (expected, expected_log) = result_of(killed), result_of(undisturbed)
    assert_same_bits(arrays, expected)
    assert log == expected_log
