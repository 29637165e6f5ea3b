"""The command `examples.gpt.train`: what a run writes, how it stops and goes on, what it refuses.

A training step takes seconds to compile, so all tests share a few programs, and runs that several tests look at.
"""

import dataclasses
import functools
import json
import math
import re
import signal
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from typer.testing import CliRunner

import mpx
from examples.gpt import data, devices, evaluate, meter, shards, train
from examples.gpt.checkpoints import Checkpoints
from examples.gpt.model import PRESETS, Config
from examples.gpt.run_log import Record, read_records
from examples.gpt.training import Hyperparameters, Metrics
from tests.helpers import assert_same_bits

# Optax adds arrays of two dtypes, and Flax's norms arrays of two ranks.
pytestmark = [pytest.mark.optax_promotion, pytest.mark.slow]  # real models are trained

NANO = Config(width=32, depth=1, heads=2, context=16, vocabulary=256)
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
        patch.setattr(train.processes, "join", lambda *arguments: None)
        patch.setattr(meter, "matmul_rate", {"bfloat16": 1e12}.__getitem__)  # the dtype in which the recipe computes
        make_run = train.make_run

        def recorded(settings, console):
            made = make_run(settings, console)
            RUNS.setdefault(settings.out, made)
            return made

        patch.setattr(train, "make_run", recorded)
        yield


def make_shards(folder, line):
    folder.mkdir()
    (folder / "text.txt").write_text("".join(f"{line} {number}\n" for number in range(600)))
    data.prepare(folder / "tokens", [folder / "text.txt"], context=NANO.context, shard_tokens=2000)
    return folder / "tokens"


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("text") / "one", "line of a text")


def run(out, tokens, *flags, **changes):
    """Run the command, in the modes of the test suite also in a fixture: other modes would compile anew."""
    options = OPTIONS | {"data": tokens, "out": out} | changes
    pairs = [(f"--{name.replace('_', '-')}", str(value)) for name, value in options.items() if value is not None]
    arguments = [*flags, *(part for pair in pairs for part in pair)]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("raise"):
        return CliRunner().invoke(train.app, arguments, env={"COLUMNS": "400"})


def saved(out):
    """Return the newest checkpoint of a run: its step, its arrays and the loader's position."""
    of_run = RUNS[out]
    with Checkpoints(out / "checkpoints") as checkpoints:
        state = checkpoints.restore(of_run.shapes, of_run.shardings)
        return checkpoints.newest, state, checkpoints.description()["position"]


def without_times(records):
    return [dataclasses.replace(record, seconds_per_step=0, tokens_per_second=0, mfu=0) for record in records]


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
    assert f"nano: {parameters:,} parameters, bf16 + split masters, on 8 x cpu." in output
    assert "From step 0 to 6, each of 2 x 8 x 16 = 256 tokens. MFU is of 8.00 TFLOP/s" in output
    assert [line.split(":")[0] for line in output.splitlines() if line.startswith("step ")] == [
        f"step {step}" for step in range(1, STEPS + 1)
    ]


def test_a_run_writes_a_line_with_every_field_for_each_report(whole):
    folder, _ = whole
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert {tuple(line) for line in lines} == {tuple(field.name for field in dataclasses.fields(Record))}
    assert [line["step"] for line in lines if line["validation_loss"] is not None] == [3, 6]
    assert lines[-1]["validation_loss"] < lines[2]["validation_loss"] < math.log(256)
    schedule = Hyperparameters(STEPS, 1e-3).schedule()
    assert [line["learning_rate"] for line in lines] == [float(schedule(step)) for step in range(STEPS)]
    first, *others = lines  # the first step compiles, and is not timed
    assert (first["seconds_per_step"], first["tokens_per_second"], first["mfu"]) == (None, None, None)
    assert all(line["tokens_per_second"] * line["seconds_per_step"] == pytest.approx(256) for line in others)


def test_a_run_draws_its_plot_and_keeps_its_newest_checkpoints(whole):
    folder, _ = whole
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
    assert [record.step for record in read_records(out / "log.jsonl")] == [1, 2, 3, 4, 5]
    assert saved(out)[0] == 4
    result = run(out, tokens, "--resume")

    assert result.exit_code == 0, result.output
    assert "Going on from step 4 to 6" in result.output
    assert [line.split(":")[0] for line in result.output.splitlines() if line.startswith("step ")] == [
        "step 5",
        "step 6",
    ]
    assert_same_bits(saved(out), saved(whole[0]))
    assert saved(out)[2] == STEPS * TOKENS_PER_STEP // NANO.context  # rows that its token budget has
    logs = [without_times(read_records(folder / "log.jsonl")) for folder in (out, whole[0])]
    assert logs[0] == logs[1]


def test_ctrl_c_ends_with_the_step_at_work_and_what_follows_has_the_same_bits(whole, tokens, tmp_path, monkeypatch):
    """The signal comes while the loop waits for step 3, when it has been decided that this is not the last one."""
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(train, "report", interrupted_at(3))
        stopped = run(out, tokens)
    assert stopped.exit_code == 130
    assert "Stopped; the checkpoint is saved. Go on with --resume." in stopped.output
    assert saved(out)[0] == 4
    logged = read_records(out / "log.jsonl")
    assert [record.step for record in logged] == [1, 2, 3, 4]
    assert logged[-1].validation_loss is not None

    resumed = run(out, tokens, "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert_same_bits(saved(out), saved(whole[0]))
    losses = [[record.loss for record in read_records(folder / "log.jsonl")] for folder in (out, whole[0])]
    assert losses[0] == losses[1]
    # Negative control: no step has the loss of another, as it would with data of another position.
    assert len(set(losses[1])) == STEPS


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_run_is_made_ready_saves_its_first_step(number, tokens, tmp_path, monkeypatch):
    start = train.start
    monkeypatch.setattr(train, "start", lambda *given: signal.raise_signal(number) or start(*given))
    assert run(tmp_path, tokens).exit_code == 128 + number
    assert saved(tmp_path)[0] == 1


def test_validation_losses_do_not_wait_for_a_report(tokens, tmp_path):
    options = {"report_every": 5, "evaluate_every": 2, "save_every": 100}
    assert run(tmp_path, tokens, **options).exit_code == 0
    records = read_records(tmp_path / "log.jsonl")
    assert [record.step for record in records] == [1, 2, 4, 5, 6]
    assert [record.step for record in records if record.validation_loss is not None] == [2, 4, 6]


def test_a_run_that_diverged_ends_with_what_is_wrong_and_leaves_its_checkpoint(tokens, tmp_path, monkeypatch):
    def diverged(opt_state, params=None):
        raise mpx.StuckError("`check_health`: 10 steps in a row were skipped")

    monkeypatch.setattr(train, "report", doing(lambda: monkeypatch.setattr(train, "check_health", diverged), 4))
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
    rates = [record.learning_rate for record in read_records(tmp_path / "log.jsonl")]
    short, long = (Hyperparameters(steps, 1e-3).schedule() for steps in (2, 4))
    assert rates == [float(rate) for rate in (short(0), short(1), long(2), long(3))]
    assert (
        f"The run was finished after 2 steps, at a learning rate of {short(2):.2e}. It goes on along the schedule of 4 "
        f"steps, which is at {long(2):.2e} here and ends at {long(4):.2e}."
    ) in result.output
    assert "finished after" not in run(tmp_path, tokens, "--resume", steps=4).output


def test_a_run_that_goes_on_reports_the_same_steps_as_one_that_was_never_stopped(tokens, tmp_path, monkeypatch):
    """A report of step 5, the first after a checkpoint, would be a dip or a peak that only this plot has."""
    options = {"report_every": 6, "evaluate_every": 100, "save_every": 2}
    with monkeypatch.context() as patch:
        patch.setattr(train, "report", killed_at(6))
        run(tmp_path, tokens, **options)
    assert saved(tmp_path)[0] == 4
    assert run(tmp_path, tokens, "--resume", **options).exit_code == 0
    assert [record.step for record in read_records(tmp_path / "log.jsonl")] == [1, 6]


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
        ({"multiple_choice": "no-such-file"}, "cannot read no-such-file"),
        ({"validation_batches": 1000}, "1000 batches of 8 need 8,000; ask for fewer batches"),
        ({"data": "no-such-folder"}, "the folder no-such-folder has no file index.json"),
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
        (["--resume"], {"seed": 1}, "seed is 1, but was 0."),
        (["--resume"], {"steps": 5}, "steps is 5, but was 6."),
        (["--resume"], {"steps": 7, "seed": 1}, "seed is 1, but was 0."),
        (["--resume"], {"learning_rate": 0.5}, "learning_rate is 0.5, but was 0.001."),
    ],
)
def test_a_run_does_not_go_on_as_another_one(flags, changes, message, whole, tokens):
    folder, _ = whole
    log = (folder / "log.jsonl").read_text()
    result = run(folder, tokens, *flags, **changes)

    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert (folder / "log.jsonl").read_text() == log


def test_a_run_does_not_go_on_with_another_text(whole, tmp_path):
    folder, _ = whole
    other = make_shards(tmp_path / "other", "another line")
    result = run(folder, other, "--resume")
    assert result.exit_code == 2
    assert f"tokens is '{shards.fingerprint(shards.read_index(other))}', but was '" in " ".join(result.output.split())


def test_without_a_checkpoint_there_is_nothing_to_go_on_from(tokens, tmp_path):
    result = run(tmp_path / "new", tokens, "--resume")
    assert result.exit_code == 2
    assert "there is no checkpoint in" in result.output


def test_without_data_the_standard_library_is_read_once_and_a_run_that_goes_on_knows_its_shards(
    whole, tokens, tmp_path, monkeypatch
):
    made = []
    monkeypatch.setattr(data, "prepare", made.append)
    console = SimpleNamespace(print=lambda *text, **options: None)
    new, resumed = train.Settings(out=tmp_path), train.Settings(out=whole[0], resume=True)
    assert train._shards(new, console) == tmp_path / "tokens"
    assert made == [tmp_path / "tokens"]
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / shards.INDEX_NAME).touch()
    assert train._shards(new, console) == tmp_path / "tokens"
    assert len(made) == 1
    assert train._shards(resumed, console) == tokens


# --- Devices. ---
def test_a_divided_optimizer_state_gives_the_losses_of_a_whole_one(tokens, tmp_path):
    """ZeRO: every device keeps an eighth of each moment and all parameters."""
    losses, states = {}, {}
    for parallel in ("replicated", "zero"):
        options = OPTIONS | {"recipe": "f32", "loss_chunks": 2, "learning_rate": 1e-2, "parallel": parallel}
        settings = train.Settings(**options, data=tokens, out=tmp_path)
        of_run = train.make_run(settings, console=None)
        params, opt_state = of_run.program.init(0)
        losses[parallel] = []
        for seed in range(3):
            rows = np.random.default_rng(seed).integers(0, 256, (16, NANO.context + 1)).astype(np.uint16)
            put = devices.microbatches_on(of_run.mesh, of_run.microbatches)
            params, opt_state, metrics = of_run.program.train_step(params, opt_state, put(rows))
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
    stopwatch = SimpleNamespace(seconds_per_step=lambda step: 0.25)
    return train.report(of_run, step, Metrics(np.float32(3), np.float32(0.5)), opt_state, stopwatch)


def test_mfu_is_the_models_own_operations_and_skipped_steps_do_not_advance_the_learning_rate():
    """1,024 tokens in a quarter of a second, at 854,438,400 operations each, of eight times 1e12.

    The learning rate rises by 0.02 a step; the tenth one has seen nine updates, of which four were skipped.
    """
    opt_state = mpx.loss_scaling(optax.sgd(1.0)).init({"w": np.zeros(1, np.float32)})
    record = reported(10, opt_state)
    assert record.tokens_per_second == 4096
    assert record.mfu == pytest.approx(4096 * 854_438_400 / 8e12)
    assert (record.loss, record.gradient_norm, record.skipped_steps, record.loss_scale) == (3.0, 0.5, 0, 2.0**15)
    assert record.learning_rate == pytest.approx(0.18)
    record = reported(10, opt_state._replace(skipped_steps=np.int32(4)))
    assert (record.learning_rate, record.skipped_steps) == (pytest.approx(0.1), 4)


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
    loss = read_records(out / "log.jsonl")[-1].validation_loss
    shown = re.search(rf"step {STEPS}: validation loss (\d+\.\d+) ", result.output)[1]
    assert float(shown) == pytest.approx(loss, abs=2e-4)
    assert output[output.index("3 questions:") :] == result.output[result.output.index("3 questions:") :]


def test_a_folder_without_a_run_is_not_evaluated_and_stays_as_it_is(tokens, tmp_path):
    result = evaluated("--run", tmp_path / "nothing", "--data", tokens)
    assert result.exit_code == 2
    assert "is no folder of a run" in result.output
    assert not (tmp_path / "nothing").exists()
