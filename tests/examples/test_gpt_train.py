"""The command `examples.gpt.train`: what a run writes, how it stops and goes on, what it refuses.

A training step takes seconds to compile, so all tests share a few programs, and runs that several tests look at.
"""

import functools
import json
import math
import os
import re
import signal
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from typer.testing import CliRunner

import mpx
from examples.gpt import checkpoints, data, evaluate, meter, train, training
from examples.gpt.model import PRESETS
from examples.gpt.output import read_log
from examples.gpt.train import Interruption
from examples.gpt.training import Hyperparameters
from tests.examples.nano import NANO, make_tokens
from tests.helpers import assert_same_bits

# Optax adds arrays of two dtypes, and Flax's norms arrays of two ranks.
pytestmark = [pytest.mark.optax_promotion, pytest.mark.slow]  # real models are trained

STEPS, TOKENS_PER_STEP = 6, 2 * 8 * NANO.context
OPTIONS = {
    "preset": "nano",
    "recipe": "bf16-split",
    "steps": STEPS,
    "batch_size": 8,
    "token_budget": TOKENS_PER_STEP,
    "report_every": 1,
    "evaluate_every": 3,
    "validation_batches": 2,
    "save_every": 2,
    "sample_tokens": 0,
}
JOIN = train.join
RUNS = {}  # what `make_run` made, by folder; of several the first


@pytest.fixture(scope="module", autouse=True)
def small_and_quick():
    """Use a smaller model than any preset, and one program for all runs of the same settings, compiled quickly.

    A program that `jax.jit` compiled of one function serves every other `jax.jit` of it.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "nano", NANO)
        patch.setattr(train, "make_program", functools.cache(train.make_program))
        quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
        patch.setattr(train, "jax", SimpleNamespace(**vars(jax) | {"jit": quick_jit}))
        # Devices are in use already, and this process is alone.
        patch.setattr(train, "join", lambda *arguments: None)
        patch.setattr(meter, "matmul_rate", {"bfloat16": 1e12}.__getitem__)  # the dtype in which the recipe computes
        make_run = train.make_run

        def recorded(settings):
            made = make_run(settings)
            RUNS.setdefault(settings.out, made)
            return made

        patch.setattr(train, "make_run", recorded)
        yield


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
    """Return the newest checkpoint of a run: its step, its arrays and its position in the data."""
    of_run = RUNS[out]
    with checkpoints.opened(out / "checkpoints") as manager:
        described = checkpoints.description_of(manager)
        return described["step"], checkpoints.restore(manager, of_run.shapes, of_run.shardings), described["position"]


def logged(out, *names):
    """Return columns of the log of a run; without names its lines but for times."""
    lines = read_log(out / "log.jsonl")
    if not names:
        times = {"seconds_per_step", "tokens_per_second", "mfu"}
        return [{name: value for name, value in line.items() if name not in times} for line in lines]
    return [line[names[0]] for line in lines] if len(names) == 1 else [[line[name] for name in names] for line in lines]


def steps_in(output):
    return [int(step) for step in re.findall(r"^step (\d+):", output, re.M)]


@pytest.fixture(scope="module")
def whole(tokens, tmp_path_factory):
    """A run from the first to the last step, and its output."""
    folder = tmp_path_factory.mktemp("whole")
    questions = folder / "questions.jsonl"
    lines = [{"ctx": "line", "endings": ["of a text", "xyz"], "label": number % 2} for number in range(3)]
    questions.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = run(folder / "run", tokens, sample_tokens=8, prompt="line ", multiple_choice=questions)
    assert result.exit_code == 0, result.output
    return folder / "run", result.output


# --- What a run writes. ---
def test_a_run_says_what_it_trains_and_reports_each_step(whole):
    _, output = whole
    parameters = 256 * 32 + 16 * 32 + 12 * 32**2 + 13 * 32 + 2 * 32
    assert f"nano: {parameters:,} parameters, bf16-split, on 8 x cpu." in output
    assert "A step has 2 x 8 x 16 = 256 tokens. MFU is of 8.00 TFLOP/s" in output
    assert "\nFrom step 0 to 6.\n" in output
    assert steps_in(output) == list(range(1, STEPS + 1))


def test_a_run_writes_a_line_for_each_report_a_plot_and_its_newest_checkpoints(whole):
    folder, _ = whole
    lines = read_log(folder / "log.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["step"] for line in lines if line["validation_loss"] is not None] == [3, 6]
    assert lines[-1]["validation_loss"] < lines[2]["validation_loss"] < math.log(256)
    schedule = Hyperparameters(STEPS, 1e-3).schedule()
    assert [line["learning_rate"] for line in lines] == [float(schedule(step)) for step in range(STEPS)]
    first, *others = lines  # the first step compiles, and is not timed
    assert (first["seconds_per_step"], first["tokens_per_second"], first["mfu"]) == (None, None, None)
    assert all(line["tokens_per_second"] * line["seconds_per_step"] == pytest.approx(256) for line in others)
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["4", "6"]
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoints", "log.jsonl", "loss.png"]


# --- Going on. ---
def doing(action, step):
    """Return a `report` that does something first after so many steps, while the loop waits for the device."""
    report = train.report
    return lambda run, at, *arguments: (at == step and action()) or report(run, at, *arguments)


def killed_at(step):
    return doing(lambda: 1 / 0, step)


def interrupted_at(step):
    return doing(lambda: signal.raise_signal(signal.SIGINT), step)


def test_a_run_that_was_killed_goes_on_to_the_same_bits(whole, tokens, tmp_path, monkeypatch):
    """Killed in the sixth step, with a checkpoint of the fourth; of the fifth there is a line in the log."""
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(train, "report", killed_at(6))
        assert isinstance(run(out, tokens).exception, ZeroDivisionError)
    with (out / "log.jsonl").open("a") as log:
        log.write('{"step": 6, "lo')
    assert logged(out, "step") == [1, 2, 3, 4, 5]
    assert saved(out)[0] == 4
    result = run(out, tokens, "--resume")

    assert result.exit_code == 0, result.output
    assert "Going on from step 4 to 6" in result.output
    assert steps_in(result.output) == [5, 6]
    assert_same_bits(saved(out)[:2], saved(whole[0])[:2])
    assert saved(out)[2] == saved(whole[0])[2]
    assert logged(out) == logged(whole[0])


def test_ctrl_c_ends_with_the_step_at_work_and_what_follows_has_the_same_bits(whole, tokens, tmp_path, monkeypatch):
    """The signal comes while the loop waits for step 3, when it has been decided that this is not the last one."""
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(train, "report", interrupted_at(3))
        stopped = run(out, tokens)
    assert stopped.exit_code == 130
    assert "Stopped; the checkpoint is saved. Go on with --resume." in stopped.output
    assert saved(out)[0] == 4
    assert logged(out, "step") == [1, 2, 3, 4]
    assert logged(out, "validation_loss")[-1] is not None

    resumed = run(out, tokens, "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert_same_bits(saved(out)[:2], saved(whole[0])[:2])
    assert logged(out, "loss") == logged(whole[0], "loss")
    # Negative control: no step has the loss of another, as it would with data of another position.
    assert len(set(logged(whole[0], "loss"))) == STEPS


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_run_is_made_ready_saves_its_first_step(number, tokens, tmp_path, monkeypatch):
    start = train.start
    monkeypatch.setattr(train, "start", lambda *given: signal.raise_signal(number) or start(*given))
    assert run(tmp_path, tokens).exit_code == 128 + number
    assert saved(tmp_path)[0] == 1


def test_validation_losses_do_not_wait_for_a_report(tokens, tmp_path):
    options = {"report_every": 5, "evaluate_every": 2, "save_every": 100}
    assert run(tmp_path, tokens, **options).exit_code == 0
    assert logged(tmp_path, "step") == [1, 2, 4, 5, 6]
    assert [step for step, loss in logged(tmp_path, "step", "validation_loss") if loss is not None] == [2, 4, 6]


def test_a_run_that_diverged_ends_with_what_is_wrong_and_leaves_its_checkpoint(tokens, tmp_path, monkeypatch):
    def diverged(opt_state, params=None):
        raise mpx.StuckError("`check_health`: 10 steps in a row were skipped")

    monkeypatch.setattr(train, "report", doing(lambda: monkeypatch.setattr(checkpoints, "check_health", diverged), 4))
    result = run(tmp_path, tokens)
    assert result.exit_code == 1
    assert "\nError: `check_health`: 10 steps in a row were skipped\n" in result.output
    assert saved(tmp_path)[0] == 2


def test_a_finished_run_that_goes_on_only_shows_its_end(whole, tokens):
    folder, _ = whole
    log = (folder / "log.jsonl").read_text()
    result = run(folder, tokens, "--resume")
    assert result.exit_code == 0, result.output
    assert "\nstep " not in result.output
    assert (folder / "log.jsonl").read_text() == log


def test_a_finished_run_goes_on_to_more_steps_and_says_what_learning_rate_that_means(tokens, tmp_path):
    assert run(tmp_path, tokens, steps=2).exit_code == 0
    result = run(tmp_path, tokens, "--resume", steps=4)

    assert result.exit_code == 0, result.output
    assert saved(tmp_path)[0] == 4
    rates = logged(tmp_path, "learning_rate")
    short, long = (Hyperparameters(steps, 1e-3).schedule() for steps in (2, 4))
    assert rates == [float(rate) for rate in (short(0), short(1), long(2), long(3))]
    assert f"jumps from {short(2):.2e}, the end of a run of 2 steps, to {long(2):.2e}, where a run" in result.output
    assert "learning rate jumps" not in run(tmp_path, tokens, "--resume", steps=4).output


def test_a_run_that_goes_on_reports_the_same_steps_as_one_that_was_never_stopped(tokens, tmp_path, monkeypatch):
    """A report of step 5, the first after a checkpoint, would be a dip or a peak that only this plot has."""
    options = {"report_every": 6, "evaluate_every": 100, "save_every": 2}
    with monkeypatch.context() as patch:
        patch.setattr(train, "report", killed_at(6))
        run(tmp_path, tokens, **options)
    assert saved(tmp_path)[0] == 4
    assert run(tmp_path, tokens, "--resume", **options).exit_code == 0
    assert logged(tmp_path, "step") == [1, 6]


# --- What is refused. ---
@pytest.fixture
def no_training(monkeypatch):
    """Make a test fail that gets as far as the loop."""
    monkeypatch.setattr(train, "train", lambda *arguments: pytest.fail("an error came too late"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preset": "huge"}, "--preset: no model is called 'huge'; there are tiny, gpt2-124m, "),
        ({"recipe": "bf17"}, "no recipe is called 'bf17'; there are f32, tf32, "),
        ({"batch_size": 12}, "--batch-size 12 cannot be divided among 8 devices; choose a multiple"),
        ({"token_budget": 300}, "--token-budget 300 is not a multiple of a microbatch, 8 x 16 = 128 tokens"),
        ({"loss_chunks": 3}, "--loss-chunks 3 does not divide the context, 16"),
        ({"attention": "cudnn"}, "--attention cudnn is a kernel for 16-bit numbers on a GPU, but this run computes"),
        ({"learning_rate": 0}, "--learning-rate must be positive, but is 0.0"),
        ({"temperature": "inf"}, "--temperature must be finite, but is inf"),
        ({"top_k": 257}, "--top-k 257 is more than the vocabulary, 256 tokens"),
        ({"seed": 2**31}, "Invalid value for '--seed'"),
        ({"multiple_choice": "no-such-file"}, "No such file or directory: 'no-such-file'"),
        ({"validation_batches": 1000}, "1000 batches of 8 need 8,000; ask for fewer batches"),
        ({"data": "no-such-folder"}, "the folder no-such-folder has no file tokens.json"),
    ],
)
@pytest.mark.usefixtures("no_training")
def test_options_that_cannot_work_are_refused_at_once(changes, message, tokens, tmp_path):
    result = run(tmp_path / "run", tokens, **changes)

    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output
    assert not (tmp_path / "run" / "log.jsonl").exists()


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

    assert result.exit_code == 1
    assert message in " ".join(result.output.split())
    assert (folder / "log.jsonl").read_text() == log


def test_without_data_the_standard_library_is_read_once_and_a_run_that_goes_on_knows_its_tokens(
    whole, tokens, tmp_path, monkeypatch
):
    made = []
    monkeypatch.setattr(data, "prepare", made.append)
    new, resumed = train.Settings(out=tmp_path), train.Settings(out=whole[0], resume=True)
    assert train.tokens_of(new) == tmp_path / "tokens"
    assert made == [tmp_path / "tokens"]
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / data.INDEX_NAME).touch()
    assert train.tokens_of(new) == tmp_path / "tokens"
    assert len(made) == 1
    assert train.tokens_of(resumed) == tokens


# --- Devices. ---
def test_a_divided_optimizer_state_gives_the_losses_of_a_whole_one(tokens, tmp_path):
    """ZeRO: every device keeps an eighth of each moment and all parameters."""
    losses, states = {}, {}
    for parallel in ("replicated", "zero"):
        options = OPTIONS | {"recipe": "f32", "loss_chunks": 2, "learning_rate": 1e-2, "parallel": parallel}
        settings = train.Settings(**options, data=tokens, out=tmp_path)
        of_run = train.make_run(settings)
        params, opt_state = of_run.program.init(0)
        losses[parallel] = []
        for seed in range(3):
            rows = np.random.default_rng(seed).integers(0, 256, (16, NANO.context + 1)).astype(np.uint16)
            rows = training.microbatches_on(of_run.mesh, of_run.microbatches, rows)
            params, opt_state, metrics = of_run.program.train_step(params, opt_state, rows)
            losses[parallel].append(metrics)
        states[parallel] = params, opt_state

    np.testing.assert_allclose(losses["zero"], losses["replicated"], rtol=1e-5)
    for parallel, (params, opt_state) in states.items():
        assert {leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(params)} == {True}
        for moment in ("mu", "nu"):
            for leaf in jax.tree.leaves(optax.tree.get(opt_state, moment)):
                part = leaf.size // 8 if parallel == "zero" else leaf.size
                assert {shard.data.size for shard in leaf.addressable_shards} == {part}
        assert optax.tree.get(opt_state, "mu")["token_embedding"][...].shape == (256, 32)


# --- Reports. ---


def reported(step, opt_state):
    """Return the report on ten steps of 1,024 tokens in 2.5 s."""
    of_run = SimpleNamespace(
        tokens_per_step=1024, shapes=({"w": np.zeros(1)},), peak_rate=8e12,
        hyperparameters=Hyperparameters(1000, 2.0, warmup=0.1), program=SimpleNamespace(config=PRESETS["gpt2-124m"]),
    )  # fmt: skip
    return train.report(of_run, step, 3.0, 0.5, opt_state, 0.25)


def test_mfu_is_the_models_own_operations_and_skipped_steps_do_not_advance_the_learning_rate():
    """1,024 tokens in a quarter of a second, at 854,438,400 operations each, of eight times 1e12.

    The learning rate rises by 0.02 a step; the tenth one has seen nine updates, and four were skipped.
    """
    opt_state = mpx.loss_scaling(optax.sgd(1.0)).init({"w": np.zeros(1, np.float32)})
    record = reported(10, opt_state)
    assert record["tokens_per_second"] == 4096
    assert record["mfu"] == pytest.approx(4096 * 854_438_400 / 8e12)
    assert (record["loss"], record["gradient_norm"]) == (3.0, 0.5)
    assert (record["skipped_steps"], record["loss_scale"]) == (0, 2.0**15)
    assert record["learning_rate"] == pytest.approx(0.18)
    record = reported(10, opt_state._replace(skipped_steps=np.int32(4)))
    assert (record["learning_rate"], record["skipped_steps"]) == (pytest.approx(0.1), 4)


# --- What is evaluated afterwards. ---
def evaluated(*arguments):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("raise"):
        return CliRunner().invoke(evaluate.app, [str(argument) for argument in arguments], env={"COLUMNS": "400"})


def test_a_finished_run_is_evaluated_on_one_device_as_it_was_on_all(whole, tokens):
    out, output = whole
    questions = out.parent / "questions.jsonl"
    options = ["--batches", 2, "--sample-tokens", 8, "--prompt", "line ", "--multiple-choice", questions]
    result = evaluated("--run", out, "--data", tokens, *options)
    assert result.exit_code == 0, result.output
    loss = logged(out, "validation_loss")[-1]
    shown = re.search(rf"step {STEPS}: validation loss (\d+\.\d+) ", result.output)[1]
    assert float(shown) == pytest.approx(loss, abs=2e-4)
    assert output[output.index("3 questions:") :] == result.output[result.output.index("3 questions:") :]


def test_a_folder_without_a_run_is_not_evaluated_and_stays_as_it_is(tokens, tmp_path):
    result = evaluated("--run", tmp_path / "nothing", "--data", tokens)
    assert result.exit_code == 2
    assert "is no folder of a run" in result.output
    assert not (tmp_path / "nothing").exists()


# --- Signals and processes. ---
@pytest.fixture
def exits(monkeypatch):
    """Raise `SystemExit` where a program would end at once."""

    def leave(code):
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", leave)


@pytest.mark.usefixtures("exits")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_makes_the_next_step_the_last_and_a_second_one_stops_at_once(number):
    before = signal.getsignal(number)
    with Interruption() as interruption:
        assert not interruption.is_due(1)
        signal.raise_signal(signal.SIGINT)
        assert interruption.is_due(2)
        assert interruption.exit_code == 130
        with pytest.raises(SystemExit) as caught:
            signal.raise_signal(number)
    assert caught.value.code == 128 + number
    assert signal.getsignal(number) == before


def test_of_several_processes_the_one_with_ctrl_c_sends_itself_what_jax_tells_all(monkeypatch):
    """JAX decides the step, whatever this process has received."""
    sent, asked = [], []
    several = SimpleNamespace(process_count=lambda: 2, process_index=lambda: 1)
    monkeypatch.setattr(train, "jax", several)
    monkeypatch.setattr(os, "kill", lambda *arguments: sent.append(arguments))
    reached = lambda step: asked.append(step) or step == 5
    monkeypatch.setattr(train.multihost_utils, "reached_preemption_sync_point", reached)
    interruption = Interruption()
    interruption.receive(signal.SIGINT)
    assert sent == [(os.getpid(), signal.SIGTERM)]
    assert [interruption.is_due(step) for step in (4, 5)] == [False, True]
    assert asked == [4, 5]
    assert interruption.exit_code == 130


@pytest.mark.parametrize("arguments", [("host:1", None, None), (None, 2, None), (None, None, 0), (None, None, None)])
def test_some_of_the_options_of_processes_are_refused_where_there_is_no_cluster(arguments, monkeypatch):
    """An address in the environment counts as an option; without any a process is alone."""

    def initialize(*given):
        assert given == arguments
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(train, "jax", SimpleNamespace(distributed=SimpleNamespace(initialize=initialize)))
    monkeypatch.delenv("JAX_COORDINATOR_ADDRESS", raising=False)
    if not any(argument is not None for argument in arguments):
        JOIN(*arguments)
        monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "host:1")
    with pytest.raises(ValueError, match="must all be given where JAX finds no cluster: coordinator_address should"):
        JOIN(*arguments)
