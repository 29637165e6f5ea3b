"""The commands of `examples.gpt`: what a run writes, how it stops and goes on, what it
refuses, and its evaluation.

A training step takes seconds to compile, so all tests share a few programs, and a run
that several tests look at.
"""

import functools
import math
import re
import signal
from types import SimpleNamespace

import jax
import pytest
from typer.testing import CliRunner

from examples.gpt import checkpoints, data, evaluate, train
from examples.gpt.model import PRESETS, Config
from examples.gpt.train import read_log
from examples.gpt.training import Hyperparameters
from tests.helpers import assert_same_bits

# Optax adds arrays of two dtypes, and Flax's norms arrays of two ranks.
pytestmark = [pytest.mark.optax_promotion, pytest.mark.slow]  # real models are trained

NANO = Config(width=32, depth=1, heads=2, context=16, vocabulary=256)
STEPS = 6
RUNS = {}  # the first `Run` of each folder
OPTIONS = {
    "preset": "nano",
    "steps": STEPS,
    "batch_size": 8,
    "microbatches": 2,
    "report_every": 1,
    "save_every": 2,
}


@pytest.fixture(scope="module", autouse=True)
def small_and_quick():
    """Use a smaller model than any preset, and one program for all runs of the same
    settings, compiled quickly.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "nano", NANO)
        patch.setattr(train, "Program", functools.cache(train.Program))
        # Of a method that is gone JAX forgets the program.
        options, kept = (
            {"xla_backend_optimization_level": 0},
            [],
        )
        quick_jit = lambda fun, **more: (
            kept.append(fun) or jax.jit(fun, compiler_options=options, **more)
        )
        patch.setattr(train, "jax", SimpleNamespace(**vars(jax) | {"jit": quick_jit}))
        # Devices are in use already, and this process is alone.
        patch.setattr(train, "join", lambda *arguments: None)
        patch.setattr(train, "VALIDATION_BATCHES", 2)
        make = train.Run
        remembered = lambda settings, manager: (
            RUNS.setdefault(settings.out, run := make(settings, manager)) and run
        )
        patch.setattr(train, "Run", remembered)
        yield


@pytest.fixture(autouse=True)
def signals():
    """A run handles signals for as long as its process lives, which is not over here."""
    before = {
        number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """Make a folder of tokens of a short text, by the command."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text(
        "".join(f"line of a text {number}\n" for number in range(6000))
    )
    result = CliRunner().invoke(
        data.app, ["--text", str(folder / "text.txt"), "--out", str(folder / "tokens")]
    )
    assert "tokens to train on" in result.output
    return folder / "tokens"


def run(out, tokens, *flags, **changes):
    """Run the command, in the modes of the test suite also in a fixture: other modes
    would compile anew.
    """
    options = OPTIONS | {"data": tokens, "out": out} | changes
    pairs = [
        (f"--{name.replace('_', '-')}", str(value))
        for name, value in options.items()
        if value is not None
    ]
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
    return [
        line[name] if name else line | {"tokens_per_second": None} for line in lines
    ]


@pytest.fixture(scope="module")
def whole(tokens, tmp_path_factory):
    """A run from the first to the last step, and its output."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    result = run(folder, tokens)
    assert result.exit_code == 0, result.output
    return folder, result.output


# --- What a run writes. ---
def test_a_run_says_what_it_trains_and_writes_each_step_and_its_newest_checkpoints(
    whole,
):
    folder, output = whole
    parameters = 256 * 32 + 16 * 32 + 12 * 32**2 + 13 * 32 + 2 * 32
    assert f"nano: {parameters:,} parameters, bf16-split, on 8 x cpu." in output
    assert "to train on, 256 a step.\nFrom step 0 to 6.\n" in output
    assert [int(step) for step in re.findall(r"^step (\d+):", output, re.M)] == list(
        range(1, STEPS + 1)
    )
    lines = read_log(folder / "log.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["step"] for line in lines if line["validation_loss"] is not None] == [
        2,
        4,
        6,
    ]
    assert lines[-1]["validation_loss"] < lines[1]["validation_loss"] < math.log(256)
    schedule = Hyperparameters(STEPS, 1e-3).schedule()
    assert [line["learning_rate"] for line in lines] == [
        float(schedule(step)) for step in range(STEPS)
    ]
    assert [line["tokens_per_second"] is None for line in lines] == [True] + [
        False
    ] * 5  # the first step compiles
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "4",
        "6",
    ]
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoints",
        "log.jsonl",
    ]


# --- Going on. ---
def test_a_signal_ends_with_the_step_at_work_and_what_follows_has_the_same_bits(
    whole, tokens, tmp_path, monkeypatch
):
    """The signal comes while the loop waits for step 3, when it has been decided that
    this is not the last one.

    A second one would not be handled, but end the process.
    """
    out, handlers, report = tmp_path / "run", [], train.report

    def signalled(run, step, *arguments):
        if step == 3:
            signal.raise_signal(signal.SIGINT)
            handlers.append(signal.getsignal(signal.SIGINT))
        return report(run, step, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(train, "report", signalled)
        stopped = run(out, tokens)
    assert stopped.exit_code == 128 + signal.SIGINT
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
    # Negative control: no step has the loss of another, as it would with data of
    # another position.
    assert len(set(logged(whole[0], "loss"))) == STEPS


# --- What is refused. ---
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preset": "huge"}, "no model is called 'huge'; there are tiny, gpt2-124m, "),
        (
            {"attention": "cudnn", "recipe": "f32"},
            "--attention cudnn is a kernel for 16-bit numbers",
        ),
        ({"batch_size": 800}, "2 batches of 800 need 1,600: use more text"),
        (
            {"mesh": "fsdp=4,tensor=2"},
            "is not sizes of data, fsdp, model, like fsdp=4,model=2",
        ),
        ({"mesh": "fsdp=4"}, "--mesh fsdp=4 is for 4 devices, but there are 8."),
        (
            {"mesh": "fsdp=2,model=4"},
            "--mesh fsdp=2,model=4 divides the heads of attention by 4, but it is 2.",
        ),
        (
            {"data": "no-such-folder"},
            "the folder no-such-folder has no file tokens.json",
        ),
    ],
)
def test_options_that_cannot_work_are_refused_at_once(
    changes, message, tokens, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        train, "train", lambda *arguments: pytest.fail("an error came too late")
    )
    result = run(tmp_path / "run", tokens, **changes)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("flags", "changes", "message"),
    [
        (
            [],
            {},
            "has a checkpoint of step 6; go on with --resume, or choose another --out",
        ),
        (
            ["--resume"],
            {"recipe": "bf16-kahan"},
            "recipe is 'bf16-kahan', but was 'bf16-split'.",
        ),
        (["--resume"], {"steps": 7, "seed": 1}, "seed is 1, but was 0."),
    ],
)
def test_a_run_does_not_go_on_as_another_one(flags, changes, message, whole, tokens):
    folder, _ = whole
    log = (folder / "log.jsonl").read_text()
    result = run(folder, tokens, *flags, **changes)

    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert (folder / "log.jsonl").read_text() == log


# --- What is evaluated afterwards. ---
def evaluated(*arguments):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("raise"):
        return CliRunner().invoke(
            evaluate.app,
            [str(argument) for argument in arguments],
            env={"COLUMNS": "400"},
        )


def test_a_finished_run_is_evaluated_on_one_device_as_it_was_on_all(whole):
    out, _ = whole
    result = evaluated(
        "--run", out, "--batches", 2, "--sample-tokens", 8, "--prompt", "line "
    )
    assert result.exit_code == 0, result.output
    shown = re.search(rf"step {STEPS}: validation loss (\d+\.\d+) ", result.output)[1]
    assert float(shown) == pytest.approx(logged(out, "validation_loss")[-1], abs=2e-4)
    assert "A sample:\nline " in result.output
