"""Checkpoints: the same bits on any number of devices, and runs that resume."""

import functools
import shutil

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType

import mpx
from examples.gpt import checkpoints
from examples.gpt.checkpoints import CheckpointError
from examples.gpt.model import Config
from examples.gpt.recipes import RECIPES
from examples.gpt.training import AXIS, Hyperparameters, make_optimizer, state_shardings
from tests.helpers import QUICKLY, assert_same_bits

# Optax adds arrays of two dtypes, and Flax's norms arrays of two ranks.
pytestmark = [pytest.mark.optax_promotion, pytest.mark.slow]  # real models are trained

IDENTITY = {"seed": 0, "steps": 9}


def mesh_of(count):
    return jax.make_mesh((count,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:count])


def save(folder, state, step=2):
    with checkpoints.opened(folder) as manager:
        checkpoints.save(manager, *state, step, {"position": 7, "identity": IDENTITY})


def resume(folder, state, identity=IDENTITY, shardings=None):
    """Return parameters and optimizer state of the newest checkpoint, and its description."""
    shapes = jax.eval_shape(lambda: state)
    with checkpoints.opened(folder) as manager:
        *restored, description = checkpoints.resume(
            manager, shapes, shardings or state_shardings(mesh_of(1), *shapes, "replicated"), identity
        )
    return tuple(restored), description


def state_of(value=0.0):
    """Return all kinds of leaves that recipes have."""
    params = {"w": jnp.linspace(-1, 1, 48, dtype=jnp.bfloat16).reshape(16, 3), "b": jnp.asarray([jnp.nan, -0.0, 1e-40])}
    bits = jnp.arange(16 * 8).reshape(8, 16)
    codes = {"low bits": bits.astype(jnp.uint16), "moment": bits.astype(jnp.float8_e4m3fn)}
    rest = {"count": jnp.int32(7), "key": jax.random.key(3), "value": jnp.float32(value)}
    return params, optax.TraceState(codes | rest)


@pytest.mark.parametrize(("count", "parallel"), [(1, "replicated"), (2, "zero"), (8, "replicated"), (8, "zero")])
def test_any_number_of_devices_gets_the_same_bits(tmp_path, count, parallel):
    """Of eight that divide the optimizer state."""
    save(tmp_path, jax.device_put(state_of(), state_shardings(mesh_of(8), *state_of(), "zero")))
    shardings = state_shardings(mesh_of(count), *state_of(), parallel)
    restored, description = resume(tmp_path, state_of(), shardings=shardings)
    assert_same_bits(restored, state_of())
    assert (description["step"], description["position"]) == (2, 7)
    for leaf, sharding in zip(jax.tree.leaves(restored), jax.tree.leaves(shardings), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def test_the_newest_checkpoints_are_kept_and_arrays_may_be_donated_while_they_are_saved(tmp_path):
    """Fifty steps follow each one at once, and write over the arrays that are on their way to the disk."""
    step = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    state = {"w": jnp.zeros((256, 256))}, optax.TraceState(jnp.zeros(64))
    with checkpoints.opened(tmp_path) as manager:
        for number in (0, 50, 100, 150):
            checkpoints.save(manager, *state, number, {"identity": IDENTITY})
            checkpoints.save(manager, *jax.tree.map(jnp.ones_like, state), number, {})  # is there already
            for _ in range(50):
                state = step(state)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["100", "150"]
    restored, _ = resume(tmp_path, state)
    assert_same_bits(restored, jax.tree.map(lambda x: jnp.full_like(x, 150), state))


@pytest.mark.parametrize(
    ("identity", "message"),
    [
        (IDENTITY | {"seed": 1}, r"begin anew in another --out: seed is 1, but was 0\."),
        (IDENTITY | {"steps": 10}, "steps is 10, but was 9"),  # it is not finished
        (IDENTITY | {"new": None, "name": "x"}, "name is 'x', but was None"),
    ],
)
def test_another_run_does_not_go_on(tmp_path, identity, message):
    with pytest.raises(CheckpointError, match=r"there is no checkpoint in .*; start without --resume"):
        resume(tmp_path, state_of())
    save(tmp_path, state_of())
    with pytest.raises(CheckpointError, match=message):
        resume(tmp_path, state_of(), identity)


def test_a_finished_run_may_have_more_steps(tmp_path):
    save(tmp_path, state_of(), step=9)
    assert resume(tmp_path, state_of(), IDENTITY | {"steps": 10})[1]["step"] == 9
    with pytest.raises(CheckpointError, match="steps is 8, but was 9"):
        resume(tmp_path, state_of(), IDENTITY | {"steps": 8})


# Where TensorStore fails it still calls an event loop of Orbax's that is closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("collected")
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_whole(tmp_path):
    for step in (1, 2):
        save(tmp_path, state_of(step), step=step)
    (manifest,) = (tmp_path / "2" / "state").glob("manifest.ocdbt")
    manifest.write_bytes(manifest.read_bytes()[:20])
    with pytest.raises(CheckpointError, match=r"of step 2 in .* cannot be read: .*Move its folder away") as caught:
        resume(tmp_path, state_of())
    assert len(str(caught.value)) < 600
    shutil.rmtree(tmp_path / "2")
    assert_same_bits(resume(tmp_path, state_of())[0], state_of(1))


def test_a_save_that_fails_says_why_and_leaves_the_one_before_whole(tmp_path, monkeypatch):
    """What a full disk raises in the background comes with the next save, or at the end."""
    save(tmp_path, state_of(1), step=1)
    fail = lambda *arguments, **options: (_ for _ in ()).throw(ValueError("No space left on device"))
    message = "could not be saved in .*: No space left on device. The ones before it are whole"
    for name in ("save", "wait_until_finished"):
        with monkeypatch.context() as patch:
            patch.setattr(ocp.CheckpointManager, name, fail)
            with pytest.raises(CheckpointError, match=message):
                save(tmp_path, state_of(2), step=2)
    assert_same_bits(resume(tmp_path, state_of())[0], state_of(1))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_the_state_of_every_recipe_comes_back_to_the_same_bits(recipe, tmp_path):
    """After a step with random gradients, scaled if the recipe scales the loss."""
    config = Config(width=8, depth=1, heads=1, context=8, vocabulary=16)
    tx = make_optimizer(recipe, config, Hyperparameters(20, 1e-2))
    weights = {"kernel": jax.random.normal(jax.random.key(0), (64, 64)), "bias": jnp.ones(5)}

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def after_a_step(params):
        opt_state = tx.init(params)
        grads = mpx.get_loss_scale(opt_state).scale(jax.tree.map(jnp.cos, weights))
        grads = optax.tree.cast_like(grads, params) if recipe.compute == "plain" else grads
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    state = after_a_step(recipe.policy.cast_to_param(weights))
    save(tmp_path, state)
    restored, description = resume(tmp_path, state)
    assert_same_bits(restored, state)
    assert not description["is_changed"]


def trained():
    """Return weights whose masters have more bits, after a step."""
    tx, params = mpx.master_weights(optax.sgd(0.5)), {"w": jnp.asarray([1.0, 2.0, -3.0], jnp.bfloat16)}
    updates, opt_state = tx.update({"w": jnp.asarray([1e-3, 1e-3, 1e-3])}, tx.init(params), params)
    return optax.apply_updates(params, updates), opt_state


def test_masters_follow_parameters_that_were_changed_from_outside(tmp_path):
    """A checkpoint with the first weight set to 5: after that the parameters are the masters."""
    save(tmp_path, trained())
    assert not resume(tmp_path, trained())[1]["is_changed"]
    params, opt_state = trained()
    changed = {"w": params["w"].at[0].set(5)}
    with checkpoints.opened(tmp_path) as manager:
        content = checkpoints.description_of(manager)
        parts = {"state": ocp.args.StandardSave((changed, opt_state)), "description": ocp.args.JsonSave(content)}
        manager.save(3, args=ocp.args.Composite(**parts))
    (params, opt_state), description = resume(tmp_path, trained())
    assert description["is_changed"]
    assert_same_bits(params, changed)
    assert_same_bits(opt_state.master["w"], params["w"].astype(jnp.float32))


def test_a_state_that_was_out_of_sync_when_it_was_saved_stays_as_it_was(tmp_path):
    """This happens to a weight that has just come within 2^-16 of zero."""
    params, opt_state = trained()
    state = {"w": params["w"].at[0].set(0)}, opt_state
    assert not mpx.is_synced(*state)
    save(tmp_path, state)
    restored, description = resume(tmp_path, state)
    assert_same_bits(restored, state)
    assert not description["is_changed"]


def test_a_run_that_skips_every_step_is_not_saved(tmp_path):
    def stuck(steps):
        tx = mpx.loss_scaling(optax.sgd(0.1), mpx.DynamicLossScale(1.0))
        state = tx.init({"w": jnp.ones(2)})
        for _ in range(steps):
            _, state = tx.update({"w": jnp.asarray([1.0, jnp.nan])}, state)
        return {"w": jnp.ones(2)}, state

    save(tmp_path, stuck(1), step=1)
    with pytest.raises(mpx.StuckError, match="'w'"):
        save(tmp_path, stuck(10), step=10)
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    checkpoints.check_health(optax.sgd(0.1).init(jnp.ones(2)))  # nothing is asked of a state without a loss scale
