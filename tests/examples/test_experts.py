"""Check the example's mixture of experts: against one written plainly, and on eight
devices against one.
"""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from orbax.checkpoint import v1 as ocp
from typer.testing import CliRunner

import mpx
from examples import experts, llama
from tests.helpers import assert_same_bits

pytestmark = [pytest.mark.optax_promotion, pytest.mark.many_devices]

SMALL = experts.Config(
    *(64, 32, 2, 4, 2, 64), head_size=16, experts=8, chosen=2, shared=32, loss_parts=2
)
FEW_BITS, EXPLICIT = "bf16-split24-4bit", (AxisType.Explicit,)
TOKENS = np.random.default_rng(0).integers(0, 64, (8, 33)).astype("int32")


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def plainly_mixed(config, x, chosen, weights, weights_of_experts):
    """Return the weighted sum, of products of all experts with one-hot masks, for
    tokens that are counted one by one.
    """
    gate, up, down = weights_of_experts
    batch, length, k = chosen.shape
    capacity = int(np.ceil(config.capacity * length * k / config.experts))
    has_place = np.zeros((batch, length, k, config.experts), np.float32)
    for b in range(batch):
        taken = [0] * config.experts
        for t in range(length):
            for i, expert in enumerate(chosen[b, t]):
                has_place[b, t, i, expert] = taken[expert] < capacity
                taken[expert] += 1
    hidden = jax.nn.silu(jnp.einsum("btc,ech->bteh", x, gate))
    hidden = hidden * jnp.einsum("btc,ech->bteh", x, up)
    results = jnp.einsum("bteh,ehc->btec", hidden, down)
    return jnp.einsum("btec,btk,btke->btc", results, weights, has_place), has_place


def test_results_gradients_and_what_is_dropped_are_those_of_one_hot_masks():
    config = dataclasses.replace(SMALL, capacity=0.75)
    x, weights, target = normal(0, 2, 16, 64), normal(1, 2, 16, 2), normal(2, 2, 16, 64)
    chosen = np.argsort(normal(3, 2, 16, 8), -1)[..., :2].astype("int32")
    shapes = ((64, 32), (64, 32), (32, 64))
    by_experts = [normal(i, 8, *shape) / 8 for i, shape in enumerate(shapes)]

    def of(mixed):
        def loss(x, weights, by_experts):
            result, more = mixed(config, x, chosen, weights, by_experts)
            return (result * target).sum(), more

        return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(x, weights, by_experts)

    (loss, dropped), grads = of(experts.mixed)
    (expected, has_place), plain = of(plainly_mixed)
    assert 0.1 < dropped.mean() < 0.9
    np.testing.assert_allclose(dropped, 1 - has_place.sum((1, 2, 3)) / 32, rtol=1e-6)
    np.testing.assert_allclose(loss, expected, rtol=1e-4)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4),
        grads,
        plain,
    )


@pytest.mark.parametrize(
    ("capacity", "dropped"), [(4.0, 0.0), (1.0, 0.75), (0.5, 0.875)]
)
def test_tokens_that_all_choose_the_same_experts_take_its_places(capacity, dropped):
    """16 tokens choose 2 of 8 experts: with capacity 1 each has 4 places."""
    config = dataclasses.replace(SMALL, capacity=capacity)
    chosen = jnp.broadcast_to(jnp.array([1, 5], jnp.int32), (2, 16, 2))
    x, weights = jnp.ones((2, 16, 4)), jnp.full((2, 16, 2), 0.5)
    by_experts = [jnp.ones((8, 4, 4))] * 3
    result, share = experts.mixed(config, x, chosen, weights, by_experts)
    np.testing.assert_array_equal(share, [dropped] * 2)
    # The first tokens have places.
    has_result = np.asarray(result).any(-1)
    np.testing.assert_array_equal(
        has_result, np.broadcast_to(np.arange(16) < 16 * (1 - dropped), (2, 16))
    )


def test_no_gradient_of_all_layers_is_ever_whole():
    loss = mpx.autocast(functools.partial(experts.loss_fn, SMALL), "bf16")
    tx = mpx.mixed_precision(llama.make_rule("adamw", 1e-3), "bf16-split24-4bit")
    params = jax.eval_shape(
        functools.partial(experts.init_params, SMALL), jax.random.key(0)
    )
    params = mpx.get_policy("bf16-split24-4bit").cast_to_param(params)
    step = mpx.train_step(loss, tx, has_aux=True)
    plan = step.plan(params, jax.eval_shape(tx.init, params), TOKENS)
    kept = {row.path for row in plan.rows if row.reason}
    assert kept == {"embedding", "head", "norm"}


def devices(count):
    """Return a context with a mesh of so many devices; one has no mesh."""
    if count == 1:
        return contextlib.nullcontext()
    return jax.set_mesh(
        jax.make_mesh((count,), ("data",), devices=jax.devices("cpu")[:count])
    )


def go_on(step, run, steps):
    """Return the losses of some steps and what was dropped, and where the run is."""
    tokens = llama.on_mesh(jnp.asarray(TOKENS), llama.DIVIDED)
    rows = []
    for _ in range(steps):
        *run, loss, aux = step(*run, tokens)
        rows.append((float(loss), float(aux["dropped"])))
    return np.array(rows), run


def losses_on(count, recipe):
    start, step = experts.make_step(SMALL, recipe, learning_rate=1e-2)
    with devices(count):
        return go_on(step, jax.jit(start)(jax.random.key(0)), 4)[0]


@pytest.mark.slow  # two compilations of 10 seconds each
@pytest.mark.parametrize(
    ("recipe", "of_losses", "of_shares"),
    # Where two experts are nearly as likely, a rounding may choose.
    [("f32", 1e-4, 1e-4), (FEW_BITS, 1e-2, 3e-2)],
)
def test_eight_devices_train_with_the_losses_of_one_and_drop_the_same(
    recipe, of_losses, of_shares
):
    one, eight = (losses_on(count, recipe) for count in (1, 8))
    assert one[-1, 0] < one[0, 0] - 0.3
    assert (one[:, 1] > 0).all()
    np.testing.assert_allclose(eight[:, 0], one[:, 0], rtol=of_losses)
    np.testing.assert_allclose(eight[:, 1], one[:, 1], atol=of_shares)


@pytest.mark.slow  # two compilations of 10 seconds each
def test_a_run_on_eight_devices_is_killed_and_goes_on_with_four(tmp_path):
    start, step = experts.make_step(SMALL, FEW_BITS, learning_rate=1e-2)

    def begin():
        return start(jax.random.key(0))

    with devices(8):
        first, run = go_on(step, jax.jit(begin)(), 2)
        ocp.save(tmp_path / "run", run)
        saved = jax.tree.map(np.array, run)
        expected, _ = go_on(step, run, 3)
    with jax.sharding.use_abstract_mesh(AbstractMesh((8,), ("data",), EXPLICIT)):
        shapes = jax.eval_shape(begin)
    with devices(4):
        mesh = jax.sharding.get_mesh()

        def on_four(shape):
            spec = getattr(shape.sharding, "spec", llama.WHOLE)
            return shape.update(sharding=NamedSharding(mesh, spec))

        run = ocp.load(tmp_path / "run", jax.tree.map(on_four, shapes))
        assert_same_bits(jax.tree.map(np.array, list(run)), saved)
        resumed, _ = go_on(step, run, 3)
    # One run, whose losses are far from where it began.
    assert resumed[0, 0] < first[0, 0] - 0.1
    np.testing.assert_allclose(resumed[:, 0], expected[:, 0], rtol=1e-2)


@pytest.mark.slow  # two compilations of 10 seconds each
def test_old_experts_keep_masters_and_moments_where_new_ones_are_added():
    """As `docs/guides/next_steps.md` grows a vocabulary: in float32, and back."""
    rule = llama.make_rule("adamw", 1e-2)
    tx = mpx.mixed_precision(rule, FEW_BITS)
    start, step = experts.make_step(SMALL, FEW_BITS, learning_rate=1e-2)
    _, run = go_on(step, jax.jit(start)(jax.random.key(0)), 2)
    before = mpx.convert_state(*run, tx, rule, policy="f32")

    larger = dataclasses.replace(SMALL, experts=16)
    fresh = experts.init_params(larger, jax.random.key(1))
    corner = lambda x: tuple(map(slice, x.shape))
    grown = jax.tree.map(
        lambda old, new: jnp.asarray(new).at[corner(old)].set(old),
        before,
        (fresh, rule.init(fresh)),
    )
    run = mpx.convert_state(*grown, rule, tx)
    moment = optax.tree.get(run[1], "mu")["layers"]["gate"]
    assert isinstance(moment.format, mpx.Blockwise4bit)
    after = mpx.convert_state(*run, tx, rule, policy="f32")
    assert_same_bits(
        jax.tree.map(lambda old, new: new[corner(old)], before, after), before
    )
    _, step = experts.make_step(larger, FEW_BITS, learning_rate=1e-2)
    losses, _ = go_on(step, run, 3)
    assert losses[-1, 0] < losses[0, 0] - 0.3


@pytest.mark.slow  # it reads Python's library
def test_the_command_trains_and_shows_what_is_dropped():
    result = CliRunner().invoke(
        experts.app,
        ["--steps", "20", "--length", "32", "--rows", "8"],
        catch_exceptions=False,
    )
    lines = [line.split() for line in result.output.splitlines()]
    losses = [float(words[3].strip(",")) for words in lines]
    assert [words[4] for words in lines] == ["dropped"] * 2
    assert all(0 <= float(words[5].strip("%")) < 100 for words in lines)
    assert losses[1] < losses[0] < 5.8
