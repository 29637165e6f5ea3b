"""The command `examples.gpt.train`: what a run writes, how it stops and goes on, what it refuses.

A training step takes seconds to compile, so all tests share a few programs, and a run that several tests look at.
"""

import functools
import json
import math
import re
import signal
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from typer.testing import CliRunner

import mpx
from examples.gpt import checkpoints, data, evaluate, train
from examples.gpt.model import PRESETS
from examples.gpt.train import read_log
from examples.gpt.training import Hyperparameters, Metrics
from tests.examples.nano import NANO, make_tokens
from tests.helpers import assert_same_bits

# Optax adds arrays of two dtypes, and Flax's norms arrays of two ranks.
pytestmark = [pytest.mark.optax_promotion, pytest.mark.slow]  # real models are trained

STEPS = 6
OPTIONS = {"preset": "nano", "steps": STEPS, "batch_size": 8, "microbatches": 2, "report_every": 1, "save_every": 2}
JOIN, RUNS = train.join, {}  # the first `Run` of each folder


@pytest.fixture(scope="module", autouse=True)
def small_and_quick():
    """Use a smaller model than any preset, and one program for all runs of the same settings, compiled quickly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "nano", NANO)
        patch.setattr(train, "Program", functools.cache(train.Program))
        options, kept = {"xla_backend_optimization_level": 0}, []  # of a method that is gone JAX forgets the program
        quick_jit = lambda fun, **more: kept.append(fun) or jax.jit(fun, compiler_options=options, **more)
        patch.setattr(train, "jax", SimpleNamespace(**vars(jax) | {"jit": quick_jit}))
        patch.setattr(train, "join", lambda *arguments: None)  # devices are in use already, and this process is alone
        patch.setattr(train, "VALIDATION_BATCHES", 2)
        make = train.Run
        patch.setattr(
            train,
            "Run",
            lambda settings, manager: RUNS.setdefault(settings.out, run := make(settings, manager)) and run,
        )
        yield


@pytest.fixture(autouse=True)
def signals():
    """A run handles signals for as long as its process lives, which is not over here."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return make_tokens(tmp_path_factory.mktemp("text") / "one", "line of a text")


def run(out, tokens, *flags, **changes):
    """Run the command, in the modes of the test suite also in a fixture: other modes would compile anew."""
    options = OPTIONS | {"data": tokens, "out": out} | changes
    pairs = [(f"--{name.replace('_', '-')}", str(value)) for name, value in options.items() if value is not None]
    arguments = [*flags, *(part for pair in pairs for part in pair)]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("raise"):
        return CliRunner().invoke(train.app, arguments, env={"COLUMNS": "400"})


def saved(out):
    """Return the newest checkpoint of a run: its step, its description and its arrays."""
    of_run = RUNS[out]
    with checkpoints.opened(out / "checkpoints") as manager:
        return *checkpoints.newest(manager), checkpoints.restore(manager, of_run.shapes)


def logged(out, name=None):
    """Return a column of the log of a run; without a name its lines but for times."""
    lines = read_log(out / "log.jsonl")
    return [line[name] if name else line | {"tokens_per_second": None} for line in lines]


@pytest.fixture(scope="module")
def whole(tokens, tmp_path_factory):
    """A run from the first to the last step, and its output."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    result = run(folder, tokens)
    assert result.exit_code == 0, result.output
    return folder, result.output


# --- What a run writes. ---
def test_a_run_says_what_it_trains_and_writes_each_step_a_plot_and_its_newest_checkpoints(whole):
    folder, output = whole
    parameters = 256 * 32 + 16 * 32 + 12 * 32**2 + 13 * 32 + 2 * 32
    assert f"nano: {parameters:,} parameters, bf16-split, on 8 x cpu." in output
    assert "to train on, 256 a step.\nFrom step 0 to 6.\n" in output
    assert [int(step) for step in re.findall(r"^step (\d+):", output, re.M)] == list(range(1, STEPS + 1))
    lines = read_log(folder / "log.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["step"] for line in lines if line["validation_loss"] is not None] == [2, 4, 6]
    assert lines[-1]["validation_loss"] < lines[1]["validation_loss"] < math.log(256)
    schedule = Hyperparameters(STEPS, 1e-3).schedule()
    assert [line["learning_rate"] for line in lines] == [float(schedule(step)) for step in range(STEPS)]
    assert [line["tokens_per_second"] is None for line in lines] == [True] + [False] * 5  # the first step compiles
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["4", "6"]
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoints", "log.jsonl", "loss.png"]


def test_checkpoints_do_not_wait_for_a_report(tokens, tmp_path):
    assert run(tmp_path, tokens, report_every=5, save_every=4).exit_code == 0
    assert logged(tmp_path, "step") == [1, 4, 5, 6]
    assert [line["step"] for line in logged(tmp_path) if line["validation_loss"] is not None] == [4, 6]
    assert saved(tmp_path)[0] == 6


def test_a_line_has_what_is_known_and_a_report_counts_tokens_and_skipped_steps(monkeypatch):
    """Two steps of 1,024 tokens in half a second. The learning rate rises by 0.02 a step; the tenth one has seen nine
    updates, and four were skipped.
    """
    of_run = SimpleNamespace(
        tokens_per_step=1024, hyperparameters=Hyperparameters(1000, 2.0, warmup=0.1), shapes=({"w": np.zeros(1)},)
    )
    opt_state = mpx.loss_scaling(optax.sgd(1.0)).init({"w": np.zeros(1, np.float32)})
    opt_state = opt_state._replace(skipped_steps=np.int32(4))
    monkeypatch.setattr(train.time, "perf_counter", lambda: 10.5)
    record = train.report(of_run, 10, Metrics(jnp.float32(3), jnp.float32(0.5)), opt_state, (8, 10.0))
    assert record["learning_rate"] == pytest.approx(0.1)
    assert train.line_of(record | {"validation_loss": 2.5}) == (
        "step 10: loss 3.0000, validation 2.5000, lr 1.00e-01, norm 0.50, scale 32768, 4 skipped, 4,096 tokens/s"
    )
    plain = train.report(of_run, 1, Metrics(jnp.float32(3), jnp.float32(0.5)), optax.sgd(1.0).init({}), None)
    assert train.line_of(plain) == "step 1: loss 3.0000, norm 0.50"


@pytest.mark.parametrize("kept", [0, 1, 9, 10, 19, 30])
def test_a_log_that_a_kill_cut_off_keeps_its_whole_lines_without_the_steps_that_are_repeated(tmp_path, kept):
    path = tmp_path / "log.jsonl"
    lines = [f'{{"step":{step}}}\n' for step in (1, 2, 9)]  # ten or eleven bytes each
    path.write_text("".join(f'{{"step":{step}}}\n' for step in (1, 2, 9))[:kept])
    train.begin_log(path, done=2)
    assert [line["step"] for line in read_log(path)] == [1, 2][: min(kept // len(lines[0]), 2)]


def test_every_log_has_a_plot(tmp_path):
    for losses in ([], [5.0], [math.nan, 4.0]):
        lines = [{"step": at, "loss": loss, "validation_loss": loss if at else None} for at, loss in enumerate(losses)]
        train.plot_log(tmp_path / "loss.png", lines, "title")


# --- Going on. ---
def doing(action, step):
    """Return a `report` that does something first after so many steps, while the loop waits for the device."""
    report = train.report
    return lambda run, at, *arguments: (at == step and action()) or report(run, at, *arguments)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_with_the_step_at_work_and_what_follows_has_the_same_bits(
    number, whole, tokens, tmp_path, monkeypatch
):
    """The signal comes while the loop waits for step 3, when it has been decided that this is not the last one.

    A second one would not be handled, but end the process.
    """
    out, handlers = tmp_path / "run", []
    signalled = lambda: signal.raise_signal(number) or handlers.append(signal.getsignal(number))
    with monkeypatch.context() as patch:
        patch.setattr(train, "report", doing(signalled, 3))
        stopped = run(out, tokens)
    assert stopped.exit_code == 128 + number
    assert "Stopped; the checkpoint is saved. Go on with --resume." in stopped.output
    assert handlers == [signal.SIG_DFL]
    assert saved(out)[0] == 4
    assert logged(out, "step") == [1, 2, 3, 4]
    assert logged(out, "validation_loss")[-1] is not None

    result = run(out, None, "--resume")  # it knows its tokens
    assert result.exit_code == 0, result.output
    assert "Going on from step 4 to 6" in result.output
    assert_same_bits(saved(out)[2], saved(whole[0])[2])
    assert saved(out)[:2] == saved(whole[0])[:2]
    assert logged(out) == logged(whole[0])
    # Negative control: no step has the loss of another, as it would with data of another position.
    assert len(set(logged(whole[0], "loss"))) == STEPS


def test_a_finished_run_goes_on_to_more_steps_with_their_learning_rate(tokens, tmp_path):
    assert run(tmp_path, tokens, steps=2).exit_code == 0
    assert run(tmp_path, tokens, "--resume", steps=4).exit_code == 0
    assert saved(tmp_path)[0] == 4
    short, long = (Hyperparameters(steps, 1e-3).schedule() for steps in (2, 4))
    assert logged(tmp_path, "learning_rate") == [float(rate) for rate in (short(0), short(1), long(2), long(3))]


def test_a_run_that_skips_every_step_ends_before_it_is_saved(tokens, tmp_path, monkeypatch):
    tx = mpx.loss_scaling(optax.sgd(0.1), mpx.DynamicLossScale(1.0))
    state = tx.init({"w": jnp.ones(2)})
    for _ in range(10):
        _, state = tx.update({"w": jnp.asarray([1.0, jnp.nan])}, state)
    report = train.report
    monkeypatch.setattr(train, "report", lambda run, step, metrics, _, clock: report(run, step, metrics, state, clock))
    result = run(tmp_path, tokens)
    assert isinstance(result.exception, mpx.StuckError)
    assert "10 steps in a row were skipped" in str(result.exception)
    assert list((tmp_path / "checkpoints").iterdir()) == []


# --- What is refused. ---
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preset": "huge"}, "no model is called 'huge'; there are tiny, gpt2-124m, "),
        ({"recipe": "bf17"}, "no recipe is called 'bf17'; there are f32, tf32, "),
        ({"attention": "cudnn", "recipe": "f32"}, "--attention cudnn is a kernel for 16-bit numbers"),
        ({"learning_rate": 0}, "--learning-rate must be positive, but is 0.0"),
        ({"batch_size": 800}, "2 batches of 800 need 1,600: use more text"),
        ({"mesh": "fsdp=4,tensor=2"}, "is not sizes of data, fsdp, model, like fsdp=4,model=2"),
        ({"mesh": "8"}, "--mesh 8 is not sizes"),
        ({"mesh": "fsdp=4,fsdp=8"}, "--mesh fsdp=4,fsdp=8 is not sizes"),
        ({"mesh": "fsdp=4"}, "--mesh fsdp=4 is for 4 devices, but there are 8."),
        ({"mesh": "fsdp=2,model=4"}, "--mesh fsdp=2,model=4 divides the heads of attention by 4, but it is 2."),
        ({"batch_size": 4}, "--mesh fsdp=8 divides --batch-size by 8, but it is 4."),
        ({"data": "no-such-folder"}, "the folder no-such-folder has no file tokens.json"),
    ],
)
def test_options_that_cannot_work_are_refused_at_once(changes, message, tokens, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "train", lambda *arguments: pytest.fail("an error came too late"))
    result = run(tmp_path / "run", tokens, **changes)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("flags", "changes", "message"),
    [
        ([], {}, "has a checkpoint of step 6; go on with --resume, or choose another --out"),
        (["--resume"], {"recipe": "bf16-kahan"}, "recipe is 'bf16-kahan', but was 'bf16-split'."),
        (["--resume"], {"steps": 7, "seed": 1}, "seed is 1, but was 0."),
        (["--resume"], {"data": "another text"}, "another --out: tokens is "),
    ],
)
def test_a_run_does_not_go_on_as_another_one(flags, changes, message, whole, tokens, tmp_path):
    folder, _ = whole
    log = (folder / "log.jsonl").read_text()
    if "data" in changes:
        changes = {"data": make_tokens(tmp_path / "other", "another line")}
    result = run(folder, tokens, *flags, **changes)

    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert (folder / "log.jsonl").read_text() == log


def test_a_folder_without_a_checkpoint_is_not_resumed(tokens, tmp_path):
    assert "there is no checkpoint in" in run(tmp_path, tokens, "--resume").output


def test_only_a_finished_run_goes_on_to_more_steps():
    identity = {"seed": 0, "steps": 9}
    train.check_identity(identity, identity, 2)
    train.check_identity(identity, identity | {"steps": 10}, 9)
    for steps, done in ((10, 2), (8, 9)):
        with pytest.raises(ValueError, match=f"another --out: steps is {steps}, but was 9"):
            train.check_identity(identity, identity | {"steps": steps}, done)
    with pytest.raises(ValueError, match="name is 'x', but was None"):
        train.check_identity(identity, identity | {"name": "x"}, 2)


def test_without_data_the_standard_library_is_read_once(tmp_path, monkeypatch):
    made = []
    prepare = lambda folder: made.append(folder) or folder.mkdir() or (folder / data.INDEX_NAME).touch()
    monkeypatch.setattr(data, "prepare", prepare)
    for _ in range(2):
        assert train.own_tokens(tmp_path) == tmp_path / "tokens"
    assert made == [tmp_path / "tokens"]


# --- Processes. ---
@pytest.mark.parametrize("arguments", [("host:1", None, None), (None, 2, None), (None, None, 0), (None, None, None)])
def test_some_of_the_options_of_processes_are_refused_where_there_is_no_cluster(arguments, monkeypatch):
    """Without any a process is alone."""

    def initialize(*given):
        assert given == arguments
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(train, "jax", SimpleNamespace(distributed=SimpleNamespace(initialize=initialize)))
    if arguments == (None, None, None):
        JOIN(*arguments)
    else:
        with pytest.raises(ValueError, match="coordinator_address should be defined"):
            JOIN(*arguments)


# --- What is evaluated afterwards. ---
def evaluated(*arguments):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("raise"):
        return CliRunner().invoke(evaluate.app, [str(argument) for argument in arguments], env={"COLUMNS": "400"})


def test_a_finished_run_is_evaluated_on_one_device_as_it_was_on_all(whole, tmp_path):
    out, _ = whole
    lines = [{"ctx": "line", "endings": ["of a text", "xyz"], "label": number % 2} for number in range(3)]
    (tmp_path / "questions").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--batches", 2, "--sample-tokens", 8, "--prompt", "line ", "--multiple-choice", tmp_path / "questions"]
    result = evaluated("--run", out, *options)
    assert result.exit_code == 0, result.output
    shown = re.search(rf"step {STEPS}: validation loss (\d+\.\d+) ", result.output)[1]
    assert float(shown) == pytest.approx(logged(out, "validation_loss")[-1], abs=2e-4)
    assert re.search(r"^3 questions: acc 0\.\d{4}, acc_norm 0\.\d{4}$", result.output, re.M)
    assert "A sample:\nline " in result.output


def test_a_folder_without_a_run_is_not_evaluated_and_stays_as_it_is(tmp_path):
    result = evaluated("--run", tmp_path / "nothing")
    assert result.exit_code == 2
    assert "is no folder of a run" in result.output
    assert not (tmp_path / "nothing").exists()
