"""What a run does with its checkpoint: goes on to the same bits, and follows parameters that were changed."""

import ast
import functools
import io
import pickle
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from rich.console import Console

import mpx
from examples.gpt import resuming
from examples.gpt.checkpoints import Checkpoints
from examples.gpt.devices import AXIS, state_shardings
from examples.gpt.loader import Position
from examples.gpt.model import Config
from examples.gpt.recipes import RECIPES
from examples.gpt.training import Hyperparameters, make_program
from tests.helpers import QUICKLY, assert_same_bits

# Optax adds arrays of two dtypes, and Flax's norms arrays of two ranks.
pytestmark = pytest.mark.optax_promotion

PICO = Config(width=8, depth=1, heads=1, context=8, vocabulary=16)
STEPS, FURTHER_STEPS = 2, 10


def run_of(folder, shapes, identity=None):
    """What a run says of itself to those who start and save it."""
    mesh = jax.make_mesh((1,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    settings = SimpleNamespace(out=folder, resume=True, seed=0)
    shardings = state_shardings(mesh, *shapes, "replicated")
    return SimpleNamespace(
        settings=settings, identity=identity or {"seed": 0}, folder=folder, shapes=shapes, shardings=shardings
    )


def restarted(run):
    """Parameters and optimizer state from the newest checkpoint, and what was printed."""
    console = Console(record=True, file=io.StringIO())
    with Checkpoints(run.settings.out / "checkpoints") as checkpoints:
        params, opt_state, step, _ = resuming.start(run, checkpoints, console)
    return params, opt_state, step, console.export_text()


def saved(run, state, step=STEPS):
    with Checkpoints(run.settings.out / "checkpoints") as checkpoints:
        resuming.save(checkpoints, run, *state, step, Position(0, 0, step))


# --- The same bits, in every recipe. ---
@functools.cache
def float32_params():
    """The same weights for all recipes, of which the first compiles them."""
    program = make_program(RECIPES[0], PICO, Hyperparameters(20, 1e-2))
    params, _ = jax.jit(program.init, compiler_options=QUICKLY)(0)
    return params


def tokens_of(step):
    return np.random.default_rng(step).integers(0, 16, (1, 2, PICO.context + 1)).astype(np.uint16)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_after_a_restart_every_recipe_goes_on_to_the_same_bits(recipe, tmp_path):
    program = make_program(recipe, PICO, Hyperparameters(20, 1e-2))
    params = mpx.get_policy(recipe.policy).cast_to_param(float32_params())
    state = params, program.tx.init(params)
    train_step = jax.jit(program.train_step, compiler_options=QUICKLY)
    for step in range(STEPS):
        *state, _ = train_step(*state, tokens_of(step))
    run = run_of(tmp_path, jax.eval_shape(lambda: tuple(state)))
    saved(run, state)
    *restored, step, printed = restarted(run)
    assert_same_bits(tuple(restored), tuple(state))
    assert (step, printed) == (STEPS, "")
    before = jax.tree.leaves(state[0])
    for step in range(STEPS, STEPS + FURTHER_STEPS):
        *state, metrics = train_step(*state, tokens_of(step))
        *restored, same = train_step(*restored, tokens_of(step))
        assert_same_bits(same, metrics)
    assert_same_bits(tuple(restored), tuple(state))
    # Negative control: something was trained.
    after = jax.tree.leaves(state[0])
    assert any((np.asarray(a) != np.asarray(b)).any() for a, b in zip(after, before, strict=True))


# --- Parameters that were changed from outside. ---
TX = mpx.master_weights(optax.sgd(0.5))


def trained():
    """Weights whose masters have more bits, after a step."""
    params = {"w": jnp.asarray([1.0, 2.0, -3.0], jnp.bfloat16)}
    opt_state = TX.init(params)
    updates, opt_state = TX.update({"w": jnp.asarray([1e-3, 1e-3, 1e-3])}, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


@pytest.fixture
def run(tmp_path):
    return run_of(tmp_path, jax.eval_shape(trained))


def edited(run, change):
    """Writes a checkpoint of its own with other parameters, and the description of the one before."""
    with Checkpoints(run.settings.out / "checkpoints") as checkpoints:
        params, opt_state = checkpoints.restore(run.shapes, run.shardings)
        checkpoints.save(STEPS + 1, (change(params), opt_state), checkpoints.description())


def test_what_was_not_changed_is_restored_to_the_bit_without_a_word(run):
    saved(run, trained())
    params, opt_state, _, printed = restarted(run)
    assert_same_bits((params, opt_state), trained())
    assert printed == ""


def test_masters_follow_parameters_that_were_changed_from_outside(run):
    """The first weight is set to 5; the others keep what their masters have beyond bfloat16."""
    saved(run, trained())
    edited(run, lambda params: {"w": params["w"].at[0].set(5)})
    params, opt_state, _, printed = restarted(run)
    assert "they were changed from outside. Going on from them, as they are." in " ".join(printed.split())
    assert_same_bits(params["w"], trained()[0]["w"].at[0].set(5))
    assert_same_bits(opt_state.master["w"], trained()[1].master["w"].at[0].set(5))


def test_a_state_that_was_out_of_sync_when_it_was_saved_stays_as_it_was(run):
    """As that of a weight which has just come within 2^-16 of zero."""
    params, opt_state = trained()
    state = {"w": params["w"].at[0].set(0)}, opt_state
    assert not mpx.is_synced(*state)
    saved(run, state)
    *restored, _, printed = restarted(run)
    assert_same_bits(tuple(restored), state)
    assert printed == ""


# --- A run that came to nothing. ---
def stuck(steps):
    tx = mpx.loss_scaling(optax.sgd(0.1), mpx.DynamicLossScale(1.0))
    state = tx.init({"w": jnp.ones(2)})
    for _ in range(steps):
        _, state = tx.update({"w": jnp.asarray([1.0, jnp.nan])}, state)
    return {"w": jnp.ones(2)}, state


def test_a_run_that_skips_every_step_is_not_saved(tmp_path):
    run = run_of(tmp_path, jax.eval_shape(lambda: stuck(0)))
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        resuming.save(checkpoints, run, *stuck(1), 1, Position())
        with pytest.raises(mpx.StuckError, match="'w'"):
            resuming.save(checkpoints, run, *stuck(10), 10, Position())
        assert checkpoints.newest == 1


def test_nothing_is_asked_of_a_state_that_does_not_scale_the_loss():
    resuming.check_health(optax.sgd(0.1).init(jnp.ones(2)))


# --- Nothing that would run when it is read. ---
def is_pickle(content):
    """Protocols from 2 on begin with their number, and all end with a full stop."""
    return content[:1] == b"\x80" and content[1:2] in b"\x02\x03\x04\x05" and content.endswith(b".")


def test_no_file_of_a_checkpoint_is_a_pickle(run):
    saved(run, trained())
    files = [path for path in (run.settings.out / "checkpoints").rglob("*") if path.is_file()]
    assert len(files) > 5
    assert not any(is_pickle(path.read_bytes()) for path in files)
    assert all(is_pickle(pickle.dumps(x, protocol)) for x in (1, np.ones(2)) for protocol in (2, 3, 4, 5))


def unsafe_lines(path):
    """Where a file imports what runs foreign code as it reads, or lets NumPy do so."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        unsafe = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
        if unsafe & {name.split(".")[0] for name in names}:
            found.append(f"{path}:{node.lineno}")
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            if not (isinstance(node.value, ast.Constant) and node.value.value is False):
                found.append(f"{path}:{node.value.lineno}")
    return found


def test_neither_the_library_nor_the_examples_unpickle_anything(tmp_path):
    root = Path(mpx.__file__).parent.parent
    files = [path for folder in ("mpx", "examples") for path in (root / folder).rglob("*.py")]
    assert len(files) > 40
    assert [line for path in files for line in unsafe_lines(path)] == []
    (tmp_path / "unsafe.py").write_text("from dill import loads\nimport pickle as p\nnp.load(x, allow_pickle=y)\n")
    assert len(unsafe_lines(tmp_path / "unsafe.py")) == 3
