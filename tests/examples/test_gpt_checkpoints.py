"""Checkpoints: the same bits on any number of devices, nothing else than what was asked for, and runs that resume."""

import functools
import io
import shutil
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from rich.console import Console

import mpx
from examples.gpt import checkpoints as module
from examples.gpt.checkpoints import KEPT, CheckpointError, Checkpoints, SaveError
from examples.gpt.devices import AXIS, state_shardings
from examples.gpt.model import Config
from examples.gpt.recipes import RECIPES
from examples.gpt.training import Hyperparameters, make_optimizer
from tests.examples.disks import full_disk, leaves_garbage
from tests.helpers import QUICKLY, assert_same_bits

# Optax adds arrays of two dtypes, and Flax's norms arrays of two ranks.
pytestmark = [pytest.mark.optax_promotion, pytest.mark.slow]  # real models are trained

DESCRIPTION = {"step": 3, "identity": {"recipe": "bf16-split", "seed": 0}, "position": 7}
SHAPE = jax.ShapeDtypeStruct


def state():
    """Return all kinds of leaves that recipes have."""
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


def on_one_device(shapes):
    return state_shardings(mesh_of(1), shapes, {}, "replicated")[0]


@pytest.fixture
def folder(tmp_path):
    """A checkpoint of step 3, saved from eight devices that divide the optimizer state."""
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(3, jax.device_put(state(), placement(8)), DESCRIPTION)
    return tmp_path / "checkpoints"


@pytest.mark.parametrize(("count", "parallel"), [(1, "replicated"), (2, "zero"), (8, "replicated"), (8, "zero")])
def test_any_number_of_devices_gets_the_same_bits(folder, count, parallel):
    shardings = placement(count, parallel)
    with Checkpoints(folder) as checkpoints:
        assert (checkpoints.newest, checkpoints.description()) == (3, DESCRIPTION)
        restored = checkpoints.restore(jax.eval_shape(state), shardings)
    assert_same_bits(restored, state())
    for leaf, sharding in zip(jax.tree.leaves(restored), jax.tree.leaves(shardings), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
        assert len(leaf.sharding.device_set) == count


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"w": SHAPE((8, 3), jnp.bfloat16)}, r"\[0\]\['w'\] is bfloat16\[16, 3\], but should be bfloat16\[8, 3\]"),
        ({"w": SHAPE((16, 4), jnp.bfloat16)}, r"\[0\]\['w'\] is bfloat16\[16, 3\], but should be bfloat16\[16, 4\]"),
        ({"w": SHAPE((16, 3), jnp.float32)}, r"\[0\]\['w'\] is bfloat16\[16, 3\], but should be float32"),
        ({f"x{i}": SHAPE((2,), jnp.float32) for i in range(9)}, r"\[0\]\['x4'\] is missing, .* and 4 more\."),
        (None, r"\[1\]\['count'\] is int32\[\], but should be absent"),
    ],
    ids=["smaller", "larger", "another dtype", "more", "less"],
)
def test_other_arrays_than_those_of_the_run_are_refused_by_name(folder, changes, message):
    """Orbax would round to another dtype, or take parts of an array, and say nothing."""
    params, opt_state = jax.eval_shape(state)
    shapes = (params, {}) if changes is None else (params | changes, opt_state)
    with Checkpoints(folder) as checkpoints, pytest.raises(CheckpointError, match=message) as caught:
        checkpoints.restore(shapes, state_shardings(mesh_of(1), *shapes, "replicated"))
    assert f"the checkpoint of step 3 in {folder} does not hold the arrays of this run" in str(caught.value)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    with Checkpoints(tmp_path / "new") as checkpoints:
        assert checkpoints.newest is None
        for ask in (checkpoints.description, lambda: checkpoints.restore({}, {})):
            with pytest.raises(CheckpointError, match=r"there is no checkpoint in .*new; start without --resume"):
                ask()


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
        restored = checkpoints.restore(shapes, on_one_device(shapes))
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
    """Return arrays that no compression makes small."""
    return {"w": jax.random.normal(jax.random.key(seed), (64, 64)), "n": jnp.int32(seed)}


def restored_noise(checkpoints):
    shapes = jax.eval_shape(noise)
    return checkpoints.restore(shapes, on_one_device(shapes))


FULL = "the checkpoint of step 2 could not be saved in .*: File too large. The checkpoints before it are whole"


@leaves_garbage
@pytest.mark.usefixtures("collected")
def test_after_a_full_disk_the_checkpoint_before_is_whole_and_what_is_left_of_the_other_goes(tmp_path, caplog):
    """The error is told when the next one is due, or at the end of the run."""
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, noise(1), {})
        checkpoints.wait()
        with full_disk():
            checkpoints.save(2, noise(2), {})
            with pytest.raises(SaveError, match=FULL):
                checkpoints.save(3, noise(3), {})
    assert [path.name for path in tmp_path.iterdir() if "tmp" in path.name]
    with full_disk(), pytest.raises(SaveError, match=FULL), Checkpoints(tmp_path, cleans=True) as checkpoints:
        checkpoints.save(2, noise(2), {})
    assert caplog.text == ""  # Orbax would log pages
    with Checkpoints(tmp_path, cleans=True) as checkpoints:
        assert checkpoints.newest == 1
        assert_same_bits(restored_noise(checkpoints), noise(1))
        checkpoints.save(2, noise(2), {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


@leaves_garbage
@pytest.mark.usefixtures("collected")
def test_whichever_file_of_a_checkpoint_is_cut_off_nothing_wrong_is_restored(tmp_path):
    """Without some files Orbax can do; the others are named with the step and the folder, and what to do."""
    whole, refused = tmp_path / "whole", []
    with Checkpoints(whole) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, noise(step), {"step": step})
    files = [path.relative_to(whole) for path in (whole / "2").rglob("*") if path.is_file()]
    for number, file in enumerate(files):
        folder = shutil.copytree(whole, tmp_path / str(number))
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


# --- A training run that is resumed. ---
def save(folder, state, step=2):
    with Checkpoints(folder) as checkpoints:
        module.save(checkpoints, *state, step=step, position=7, identity={"seed": 0})


def resume(folder, shapes, seed=0):
    """Return parameters, optimizer state, step and position from the newest checkpoint, and what was printed."""
    console = Console(record=True, file=io.StringIO())
    with Checkpoints(folder) as checkpoints:
        shardings = state_shardings(mesh_of(1), *shapes, "replicated")
        params, opt_state, *place = module.resume(checkpoints, shapes, shardings, {"seed": seed}, console)
    return (params, opt_state), place, " ".join(console.export_text().split())


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_after_a_restart_every_recipe_goes_on_to_the_same_bits(recipe, tmp_path):
    """The steps have random gradients, scaled if the recipe scales the loss."""
    config = Config(width=8, depth=1, heads=1, context=8, vocabulary=16)
    tx = make_optimizer(recipe, config, Hyperparameters(20, 1e-2))

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def step(params, opt_state, key):
        grads = jax.tree.map(lambda leaf: jax.random.normal(key, leaf.shape), params)
        scaled = mpx.get_loss_scale(opt_state).scale(grads)
        if recipe.compute == "plain":
            scaled = optax.tree.cast_like(scaled, params)
        updates, opt_state = tx.update(scaled, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    weights = {"kernel": jax.random.normal(jax.random.key(0), (64, 64)), "bias": jnp.ones(5)}
    params = recipe.policy.cast_to_param(weights)
    state = jax.jit(lambda params: (params, tx.init(params)), compiler_options=QUICKLY)(params)
    state = jax.device_put(state, state_shardings(mesh_of(1), *state, "replicated"))
    for number in range(3):
        state = step(*state, jax.random.key(number))
    before = state
    save(tmp_path, state)
    restored, place, printed = resume(tmp_path, jax.eval_shape(lambda: state))
    assert_same_bits(restored, state)
    assert (place, printed) == ([2, 7], "")
    for number in range(3, 8):
        state, restored = (step(*each, jax.random.key(number)) for each in (state, restored))
    assert_same_bits(restored, state)
    # Negative control: something was trained.
    pairs = zip(jax.tree.leaves(state[0]), jax.tree.leaves(before[0]), strict=True)
    assert any((np.asarray(a) != np.asarray(b)).any() for a, b in pairs)


def trained():
    """Return weights whose masters have more bits, after a step."""
    tx, params = mpx.master_weights(optax.sgd(0.5)), {"w": jnp.asarray([1.0, 2.0, -3.0], jnp.bfloat16)}
    updates, opt_state = tx.update({"w": jnp.asarray([1e-3, 1e-3, 1e-3])}, tx.init(params), params)
    return optax.apply_updates(params, updates), opt_state


def test_masters_follow_parameters_that_were_changed_from_outside(tmp_path):
    """A checkpoint with the first weight set to 5: after that the parameters are the masters."""
    shapes = jax.eval_shape(trained)
    save(tmp_path, trained())
    assert resume(tmp_path, shapes)[2] == ""
    with Checkpoints(tmp_path) as checkpoints:
        params, opt_state = trained()
        checkpoints.save(3, ({"w": params["w"].at[0].set(5)}, opt_state), checkpoints.description())
    (params, opt_state), _, printed = resume(tmp_path, shapes)
    assert "they were changed from outside. Going on from them, as they are." in printed
    assert_same_bits(params["w"], trained()[0]["w"].at[0].set(5))
    assert_same_bits(opt_state.master["w"], params["w"].astype(jnp.float32))


def test_a_state_that_was_out_of_sync_when_it_was_saved_stays_as_it_was(tmp_path):
    """So is that of a weight which has just come within 2^-16 of zero."""
    params, opt_state = trained()
    state = {"w": params["w"].at[0].set(0)}, opt_state
    assert not mpx.is_synced(*state)
    save(tmp_path, state)
    restored, _, printed = resume(tmp_path, jax.eval_shape(trained))
    assert_same_bits(restored, state)
    assert printed == ""


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
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.newest == 1
    module.check_health(optax.sgd(0.1).init(jnp.ones(2)))  # nothing is asked of a state without a loss scale
