"""Runs in processes of their own: killed while they save, stopped by Ctrl-C, and two that train as one."""

import signal
import socket
import time

import jax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import SingleDeviceSharding

from examples.gpt.output import read_log
from tests.examples import nano
from tests.helpers import assert_same_bits

pytestmark = pytest.mark.slow

STEPS = 12
LONGEST_RUN = 240.0  # seconds
TIMES = ("seconds_per_step", "tokens_per_second", "mfu")
ONE = {"recipe": "bf16-split-8bit", "batch_size": 2, "steps": STEPS, "save_every": 2, "evaluate_every": STEPS}
TWO = ONE | {"recipe": "bf16-split", "batch_size": 8, "parallel": "zero", "save_every": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Tokens, and compiled programs that all runs share."""
    folder = tmp_path_factory.mktemp("runs")
    nano.make_tokens(folder / "text")
    return folder


def start(folder, name, *flags, **options):
    return nano.start(folder / "cache", *flags, data=folder / "text" / "tokens", out=folder / name, **options)


def start_two(folder, name, *flags, **options):
    """Start two processes with four devices each."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{found.getsockname()[1]}"  # a free port
    together = options | {"coordinator_address": address, "num_processes": 2, "devices": 4}
    return [start(folder, name, *flags, **together, process_id=number) for number in range(2)]


def end(*processes):
    """Wait for processes; return their exit codes and what each printed."""
    try:
        outputs = [process.communicate(timeout=LONGEST_RUN)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [process.returncode for process in processes], outputs


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
    log = [{key: line[key] for key in line if key not in TIMES} for line in read_log(folder / name / "log.jsonl")]
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}, log


def assert_same_result(folder, name, other):
    (arrays, log), (expected, expected_log) = result_of(folder, name), result_of(folder, other)
    assert_same_bits(arrays, expected)
    assert log == expected_log


def test_a_run_that_is_killed_while_it_saves_is_resumed_to_the_same_bits(folder):
    """Killed three times, while a temporary folder of Orbax shows that a checkpoint is half written."""
    codes, outputs = end(start(folder, "undisturbed", **ONE))
    assert codes == [0], outputs
    is_saving = lambda: any((folder / "killed").glob("checkpoints/*orbax-checkpoint-tmp*"))
    for number in range(3):
        before = saved_steps(folder, "killed")
        process = start(folder, "killed", *["--resume"] * bool(before), **ONE)
        try:
            wait_until(lambda seen=before: saved_steps(folder, "killed") != seen or not seen, process)
            wait_until(is_saving, process)
        finally:
            process.kill()
        codes, outputs = end(process)
        assert codes == [-signal.SIGKILL], outputs
        assert not before or f"Going on from step {before[-1]} to" in outputs[0]
        assert saved_steps(folder, "killed") >= before, number  # no whole one was lost
    resumed = ["--resume"] * bool(saved_steps(folder, "killed"))
    codes, outputs = end(start(folder, "killed", *resumed, **ONE))
    assert codes == [0], outputs
    assert_same_result(folder, "killed", "undisturbed")


def test_two_quick_ctrl_c_end_a_training_without_a_crash(folder):
    """An exception in place of the second one has ended the interpreter in a segmentation fault, now and then."""
    process = start(folder, "interrupted", **ONE | {"steps": 100_000, "save_every": 1})
    wait_until(lambda: len(read_log(folder / "interrupted" / "log.jsonl")) > 2, process)
    process.send_signal(signal.SIGINT)
    for line in process.stdout:
        if line.startswith("Finishing"):
            process.send_signal(signal.SIGINT)
            break
    codes, (output,) = end(process)
    assert codes == [130]
    assert "Traceback" not in output


def test_two_processes_train_as_one_with_all_devices_and_go_on_after_a_kill_to_the_same_bits(folder):
    """What they send each other is added up in another order than in one process, if at all."""
    codes, (first, second) = end(*start_two(folder, "two", **TWO))
    assert codes == [0, 0], (first, second)
    assert "on 8 x cpu" in first
    assert "step " not in second
    codes, outputs = end(start(folder, "one", devices=8, **TWO))
    assert codes == [0], outputs
    for lines in zip(result_of(folder, "two")[1], result_of(folder, "one")[1], strict=True):
        numbers = [[value for value in line.values() if value is not None] for line in lines]
        assert numbers[0] == pytest.approx(numbers[1], rel=1e-3)

    processes = start_two(folder, "two killed", **TWO)
    wait_until(lambda: len(read_log(folder / "two killed" / "log.jsonl")) >= 5, processes[0])
    processes[1].kill()
    processes[0].kill()
    end(*processes)
    before = saved_steps(folder, "two killed")
    codes, outputs = end(*start_two(folder, "two killed", "--resume", **TWO))
    assert codes == [0, 0], outputs
    assert f"Going on from step {before[-1]}" in outputs[0]
    assert_same_result(folder, "two killed", "two")


def test_after_ctrl_c_to_one_process_all_save_the_same_step(folder):
    processes = start_two(folder, "two interrupted", **TWO | {"steps": 100_000})
    wait_until(lambda: len(read_log(folder / "two interrupted" / "log.jsonl")) > 2, processes[0])
    processes[1].send_signal(signal.SIGINT)
    codes, outputs = end(*processes)
    assert codes == [128 + signal.SIGTERM, 128 + signal.SIGINT], outputs
    assert "Stopped; the checkpoint is saved. Go on with --resume." in outputs[0]
    last = read_log(folder / "two interrupted" / "log.jsonl")[-1]["step"]
    assert saved_steps(folder, "two interrupted")[-1] == last
