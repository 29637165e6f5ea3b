"""Check that a step in the loop that makes a gradient has the bits of the same step on
all gradients, and that other gradients are kept.
"""

import contextlib
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax import lax
from jax.sharding import AxisType

import mpx
from mpx._fused import released
from mpx._recipes import RECIPES
from tests.helpers import BF16, F16, F32, assert_same_bits, cases, unfused
from tests.rules import RULES

pytestmark = pytest.mark.optax_promotion

DEPTH, WIDTH = 3, 16
STACKS = ("w", "b", "s")
NOT_IN_A_LOOP = released.NO_LOOP
RELEASED = ""
X = np.asarray(np.random.default_rng(9).normal(size=(4, WIDTH)), np.float32)
ADAMW = optax.adamw(1e-2, weight_decay=0.1)


def weights(seed=0, dtype=jnp.float32, depth=(DEPTH,), width=WIDTH):
    """Return stacks of matrices, of rows and of scalars, and a matrix outside."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape) * 0.3, dtype)

    return {
        "w": normal(*depth, width, width),
        "b": normal(*depth, width),
        "s": normal(*depth),
        "head": normal(width, 2),
    }


def layer(x, p):
    return jnp.tanh(x @ p["w"] + p["b"][None]) * (1 + p["s"]), None


def stacks(params):
    return {name: params[name] for name in STACKS}


def loss_of(body=layer, **options):
    """Return the loss of a model that scans `body`."""

    def loss(params, x):
        x, _ = lax.scan(body, x.astype(params["w"].dtype), stacks(params), **options)
        return ((x @ params["head"]).astype(jnp.float32) ** 2).mean()

    return loss


LOSS = loss_of()


def ways(loss, tx, interpret=False, **options):
    """Return the step in loops, and that on all gradients."""
    has_aux, at = options.get("has_aux", False), options.get("argnums", 0)
    options = {"grad_dtype": "as_computed"} | options

    def apart(params, state, *batch):
        args = [*batch[:at], params, *batch[at:]]
        scale = mpx.get_loss_scale(state)
        value, grads = mpx.value_and_grad(loss, scale, **options)(*args)
        new = mpx.fused_update(tx, interpret=interpret)(grads, state, params)
        return *new, *(value if has_aux else (value,))

    return mpx.train_step(loss, tx, interpret=interpret, **options), apart


def in_order(params):
    """Return compiler options under which equal arithmetic has equal bits.

    Models of experts and models in 16 bits keep the wrappers (see `unfused`): without
    them XLA of jax 0.10 also multiplies transposed matrices in 16 bits wrongly.
    """
    leaves = jax.tree.leaves(params)
    return unfused(any(x.ndim > 3 or x.dtype.itemsize == 2 for x in leaves))


def rewriting_nothing(params):
    """Return such options under which XLA also rewrites no `(m / a) / b`."""
    options = in_order(params)
    passes = options["xla_disable_hlo_passes"]
    return options | {"xla_disable_hlo_passes": f"{passes},algsimp"}


def on_one_device():
    """Set a mesh of one device: then it has all layers."""
    return jax.set_mesh(jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,)))


def assert_same_training(
    loss, tx, params, *batch, steps=2, same=assert_same_bits, order=in_order, **options
):
    """Raise unless both ways give the same bits, step after step; return the reason why
    each gradient is kept.
    """
    state = tx.init(params)
    one, two = ways(loss, tx, **options)
    plan = one.plan(params, state, *batch)

    def both(params, state, batch):
        return one(params, state, *batch), two(params, state, *batch)

    both = jax.jit(both, compiler_options=order(params))
    for _ in range(steps):
        actual, expected = both(params, state, batch)
        same(actual, expected)
        params, state, *_ = expected
    return {row.path: row.reason for row in plan.rows}


ALL_RELEASED = dict.fromkeys(STACKS, RELEASED) | {"head": NOT_IN_A_LOOP}
ALL_KEPT = dict.fromkeys([*STACKS, "head"], NOT_IN_A_LOOP)


def kept(reason, *names):
    return ALL_RELEASED | dict.fromkeys(names or STACKS, reason)


def test_each_layer_is_stepped_where_its_gradient_is_made():
    assert assert_same_training(LOSS, ADAMW, weights(), X) == ALL_RELEASED


# Negative controls.


def test_a_loop_that_writes_to_the_layer_before_is_seen(monkeypatch):
    put = lax.dynamic_update_index_in_dim
    monkeypatch.setattr(
        lax,
        "dynamic_update_index_in_dim",
        lambda x, new, i, axis: put(x, new, (i - 1) % x.shape[0], axis),
    )
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        assert_same_training(LOSS, optax.sgd(1e-2), weights(), X, steps=1)


def test_a_loop_that_computes_a_gradient_with_other_weights_is_seen(monkeypatch):
    of = released._Weight.of
    monkeypatch.setattr(released._Weight, "of", lambda self, known: of(self, known) * 2)
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        assert_same_training(LOSS, optax.sgd(1e-2), weights(), X, steps=1)


# Models.


def groups(params, x):
    def group(x, p):
        return lax.scan(layer, x, p)[0], None

    x, _ = lax.scan(group, x, stacks(params))
    return ((x @ params["head"]) ** 2).mean()


def reshaped_groups(params, x):
    grouped = {k: v.reshape(2, -1, *v.shape[1:]) for k, v in stacks(params).items()}
    return groups(params | grouped, x)


def tied(params, x):
    return LOSS(params, x) + (params["w"][0] ** 2).mean()


def scanned_twice(params, x):
    for _ in range(2):
        x, _ = lax.scan(layer, x, stacks(params))
    return ((x @ params["head"]) ** 2).mean()


def closed_over(params, x):
    def body(x, i):
        return layer(x, jax.tree.map(lambda p: p[i], stacks(params)))

    x, _ = lax.scan(body, x, jnp.arange(DEPTH))
    return ((x @ params["head"]) ** 2).mean()


def in_a_fori_loop(params, x):
    def body(i, x):
        return layer(x, jax.tree.map(lambda p: p[i], stacks(params)))[0]

    return ((lax.fori_loop(0, DEPTH, body, x) @ params["head"]) ** 2).mean()


def without_a_loop(params, x):
    for i in range(DEPTH):
        x, _ = layer(x, jax.tree.map(lambda p, i=i: p[i], stacks(params)))
    return ((x @ params["head"]) ** 2).mean()


def with_a_penalty(params, x):
    return LOSS(params, x) + 0.1 * sum((p**2).sum() for p in jax.tree.leaves(params))


def read_again(params, x):
    return LOSS(params, x) + sum(
        lax.stop_gradient(p).sum() for p in jax.tree.leaves(params)
    )


def with_a_branch(x, p):
    apply = lambda x: layer(x, p)[0]
    return lax.cond(x.sum() > 0, apply, lambda x: x * p["s"], x), None


def with_new_weights(function, *names):
    names = names or STACKS

    def loss(params, x):
        return LOSS(params | {name: function(params[name]) for name in names}, x)

    return loss


def checkpointed(kept):
    return loss_of(mpx.checkpoint(layer, kept=kept, argnums=0))


MODELS: dict[str, tuple[Any, dict[str, str]]] = {
    "groups": (groups, ALL_RELEASED),
    "reshaped groups": (reshaped_groups, ALL_KEPT),
    "reverse": (loss_of(reverse=True), ALL_RELEASED),
    "unrolled by two": (loss_of(unroll=2), ALL_RELEASED),
    "unrolled at all": (loss_of(unroll=True), ALL_RELEASED),
    "checkpoint": (loss_of(jax.checkpoint(layer)), ALL_RELEASED),
    "inputs in bfloat16": (checkpointed("bf16"), ALL_RELEASED),
    "inputs in 8 bits": (checkpointed(mpx.Blockwise8bit()), ALL_RELEASED),
    "a scan in a checkpoint": (jax.checkpoint(LOSS), ALL_KEPT),
    "tied": (tied, kept(NOT_IN_A_LOOP, "w")),
    "scanned twice": (scanned_twice, ALL_KEPT),
    "closed over": (closed_over, ALL_KEPT),
    "fori_loop": (in_a_fori_loop, ALL_KEPT),
    "no loop": (without_a_loop, ALL_KEPT),
    "a penalty": (with_a_penalty, ALL_KEPT),
    "read again": (read_again, ALL_RELEASED),
    "a branch": (loss_of(with_a_branch), ALL_RELEASED),
    "negated": (with_new_weights(lambda p: -p), ALL_RELEASED),
    "doubled": (with_new_weights(lambda p: p * 2.0), ALL_RELEASED),
    "clipped": (with_new_weights(lambda p: jnp.clip(p, -0.1, 0.1)), ALL_KEPT),
    "transposed": (
        with_new_weights(lambda w: w.swapaxes(1, 2), "w"),
        kept(NOT_IN_A_LOOP, "w"),
    ),
    "in another order": (
        with_new_weights(lambda w: w[::-1], "w"),
        kept(NOT_IN_A_LOOP, "w"),
    ),
    "divided by the norm of all": (
        with_new_weights(lambda w: w / jnp.sqrt((w**2).sum()), "w"),
        kept(NOT_IN_A_LOOP, "w"),
    ),
}
QUICK_MODELS = {"groups", "reverse", "tied", "read again"}


@pytest.mark.parametrize("name", cases(MODELS, QUICK_MODELS))
def test_a_model_has_the_same_bits(name):
    loss, reasons = MODELS[name]
    depth = {"groups": (2, 3), "reshaped groups": (6,)}.get(name, (DEPTH,))
    params = weights(depth=depth)
    assert assert_same_training(loss, ADAMW, params, X) == reasons


@pytest.mark.slow
def test_two_scans_are_two_loops():
    def loss(params, x):
        for name in ("first", "second"):
            x, _ = lax.scan(layer, x, stacks(params[name]))
        return (x**2).mean()

    params = {"first": weights(), "second": weights(1, depth=(5,))}
    params = {name: stacks(tree) for name, tree in params.items()}
    reasons = assert_same_training(loss, ADAMW, params, X)
    assert set(reasons.values()) == {RELEASED}


def two_scans(params, x):
    for name in ("first", "second"):
        x, _ = lax.scan(layer, x, stacks(params[name]))
    return ((x @ params["first"]["head"]) ** 2).mean()


@pytest.mark.parametrize("max_norm", [1e9, 1e-2])
def test_loops_run_twice_where_a_norm_of_all_gradients_comes_first(max_norm):
    """What is not clipped has the same bits; norms are added up in another order."""
    sgd = optax.sgd(1.0, momentum=0.9)
    tx = optax.chain(optax.clip_by_global_norm(max_norm), sgd)
    params = {"first": weights(), "second": stacks(weights(1, depth=(5,)))}
    state = tx.init(params)
    twice = mpx.train_step(two_scans, tx, recompute_gradients=True)
    _, apart = ways(two_scans, tx)
    both = jax.jit(
        lambda *given: (twice(*given), apart(*given)), compiler_options=in_order(params)
    )
    for _ in range(2):
        actual, expected = both(params, state, X)
        if max_norm > 1:
            assert_same_bits(actual, expected)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7),
            actual,
            expected,
        )
        params, state, _ = expected
    rows = twice.plan(params, state, X).rows
    assert {row.path for row in rows if row.is_recomputed} == {
        f"{scan}/{name}" for scan in ("first", "second") for name in STACKS
    }
    assert {row.reason for row in rows if row.is_recomputed} == {RELEASED}


def test_a_choice_that_is_no_sum_keeps_gradients():
    tx = optax.apply_if_finite(ADAMW, 3)
    step = mpx.train_step(LOSS, tx, recompute_gradients=True)
    plan = step.plan(weights(), tx.init(weights()), X)
    assert {row.path: row.reason for row in plan.rows} == BY_A_BRANCH


SUMS = {
    "of rows": lambda g: jnp.sqrt((g**2).sum(-1)).sum(),
    "over layers": lambda g: jnp.abs(g.reshape(-1, WIDTH)).max(0).sum(),
    "of maxima": lambda g: jnp.abs(g).max(-1).sum(),
    "of blocks that reach over layers": lambda g: (
        jnp.abs(g.reshape(2, -1)).max(-1).sum()
    ),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_of_anything_but_elements_keeps_gradients(name):
    """Elements of a result may be more than one layer, or less."""
    divided = lambda grads, _: jax.tree.map(
        lambda g: g / (1 + SUMS[name](grads["w"])), grads
    )
    tx = optax.chain(optax.stateless(divided), optax.sgd(1.0))
    params = weights()
    one = mpx.train_step(LOSS, tx, recompute_gradients=True)
    _, two = ways(LOSS, tx)
    given = params, tx.init(params), X
    assert "w" not in {row.path for row in one.plan(*given).rows if not row.reason}
    chex.assert_trees_all_close(jax.jit(one)(*given), jax.jit(two)(*given), rtol=1e-5)


@pytest.mark.slow
def test_a_scan_of_one_layer_is_a_loop():
    """Its stack of scalars is a scalar: XLA computes that."""
    reasons = assert_same_training(LOSS, ADAMW, weights(depth=(1,)), X)
    assert [reasons[name] for name in ("w", "b")] == [RELEASED] * 2


@pytest.mark.slow
def test_one_gradient_of_two_parameters_is_kept():
    def loss(params, x):
        return LOSS(jax.tree.map(jnp.add, *params), x)

    reasons = assert_same_training(loss, ADAMW, [weights(), weights(1)], X)
    assert {reasons["0/w"], reasons["1/w"]} == {released.READ_ELSEWHERE}


@pytest.mark.slow
def test_experts_and_keys_of_dropout_are_layers_too():
    def loss(params, x, key):
        def body(x, now):
            p, key = now
            x = jnp.tanh(jnp.einsum("bn,enm->ebm", x, p["w"]) + p["b"][:, None])
            return x.mean(0) * jax.random.bernoulli(key, 0.5, x.shape[1:]), None

        x, _ = lax.scan(body, x, (params, jax.random.split(key, DEPTH)))
        return (x**2).mean()

    params = weights(depth=(DEPTH, 4))
    params = {name: params[name] for name in ("w", "b")}
    reasons = assert_same_training(loss, ADAMW, params, X, jax.random.key(0))
    assert set(reasons.values()) == {RELEASED}


def scan_that_scales(factor):
    """Return a scan whose derivative multiplies all gradients by a number that its
    backward pass returns.
    """

    @jax.custom_vjp
    def scanned(x, p):
        return lax.scan(layer, x, p)[0]

    def forward(x, p):
        return lax.scan(lambda x, p: (layer(x, p)[0], x), x, p)[0], (x, p)

    def backward(kept, g):
        x, p = kept
        _, inputs = lax.scan(lambda x, p: (layer(x, p)[0], x), x, p)

        def body(carry, now):
            g, n = carry
            x, p = now
            g, of_p = jax.vjp(lambda x, p: layer(x, p)[0], x, p)[1](g)
            return (g, n + (of_p["w"] ** 2).sum()), of_p

        start = g, jnp.float32(1)
        (g, n), grads = lax.scan(body, start, (inputs, p), reverse=True)
        return g, jax.tree.map(lambda x: x * factor(n), grads)

    scanned.defvjp(forward, backward)
    return lambda params, x: ((scanned(x, stacks(params)) @ params["head"]) ** 2).mean()


@pytest.mark.slow
@pytest.mark.parametrize("factor", [lambda n: n, jnp.sqrt], ids=["itself", "later"])
def test_a_number_that_a_loop_returns_cannot_multiply_gradients_in_it(factor):
    reasons = assert_same_training(scan_that_scales(factor), ADAMW, weights(), X)
    assert reasons == kept("a number that is known later multiplies its gradient")


# Optimizers.

NEEDS_ALL = kept(released.NEEDS_GRADIENTS)
BY_A_BRANCH = kept("arrays come from `cond`")


class Twice(NamedTuple):
    first: Any
    second: Any


def one_average_twice():
    """A rule that keeps the same average under two names."""

    def init(params):
        zeros, ones = (jax.tree.map(f, params) for f in (jnp.zeros_like, jnp.ones_like))
        return Twice(zeros, ones)

    def update(grads, state, params=None):
        new = jax.tree.map(lambda m, g: 0.9 * m + g, state.first, grads)
        steps = jax.tree.map(lambda m, old: -0.01 * (m + old), new, state.second)
        return steps, Twice(new, new)

    return optax.GradientTransformation(init, update)


def changing_places():
    """A rule whose two averages change places."""

    def init(params):
        return Twice(*one_average_twice().init(params))

    def update(grads, state, params=None):
        first = jax.tree.map(jnp.add, state.first, grads)
        return jax.tree.map(jnp.subtract, first, state.second), Twice(
            state.second, first
        )

    return optax.chain(optax.GradientTransformation(init, update), optax.scale(-0.01))


def new_parameters_in_the_state():
    def init(params):
        return Twice(jax.tree.map(jnp.zeros_like, params), ())

    def update(grads, state, params):
        steps = jax.tree.map(lambda g, old: -0.01 * (g + old), grads, state.first)
        return steps, Twice(jax.tree.map(jnp.add, params, steps), ())

    return optax.GradientTransformation(init, update)


def remembers_the_gradient():
    """Return SGD whose state is written and never read."""

    def init(params):
        return Twice(jax.tree.map(jnp.zeros_like, params), ())

    def update(grads, state, params):
        steps = jax.tree.map(lambda g: -0.01 * g, grads)
        return steps, Twice(jax.tree.map(lambda g: 2 * g, grads), ())

    return optax.GradientTransformation(init, update)


def turned(x):
    """Mix all elements of a matrix, by operations without roundings."""
    return x.T[::-1].T + jnp.max(jnp.abs(x))


def muon_on_matrices():
    muon = optax.chain(optax.trace(0.95), mpx.each_matrix(turned), optax.scale(-1e-2))
    return optax.partition(
        {"muon": muon, "adam": ADAMW},
        lambda params: jax.tree.map(
            lambda p: "muon" if p.ndim == 3 else "adam", params
        ),
    )


OPTIMIZERS = {
    "clip": (lambda: optax.chain(optax.clip(0.1), ADAMW), ALL_RELEASED),
    "clip_by_global_norm": (
        lambda: optax.chain(optax.clip_by_global_norm(0.1), ADAMW),
        NEEDS_ALL,
    ),
    "MultiSteps": (
        lambda: optax.MultiSteps(ADAMW, 2).gradient_transformation(),
        BY_A_BRANCH,
    ),
    "apply_if_finite": (lambda: optax.apply_if_finite(ADAMW, 3), BY_A_BRANCH),
    "flatten": (lambda: optax.flatten(ADAMW), kept("`concatenate` mixes elements")),
    "ema": (lambda: optax.chain(ADAMW, optax.ema(0.9)), ALL_RELEASED),
    "add_noise": (
        lambda: optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), ADAMW),
        ALL_RELEASED,
    ),
    "inject_hyperparams": (
        lambda: optax.inject_hyperparams(optax.adamw)(
            learning_rate=optax.linear_schedule(0.1, 0, 9)
        ),
        ALL_RELEASED,
    ),
    "masked": (
        lambda: optax.masked(
            ADAMW, lambda tree: jax.tree.map(lambda p: p.ndim > 2, tree)
        ),
        ALL_RELEASED,
    ),
    "muon": (
        muon_on_matrices,
        kept("devices may have parts of the matrices that its step needs whole", "w"),
    ),
    "static scale": (
        lambda: mpx.loss_scaling(ADAMW, mpx.StaticLossScale(2.0**8)),
        NEEDS_ALL,
    ),
    "dynamic scale": (
        lambda: mpx.loss_scaling(ADAMW, mpx.DynamicLossScale()),
        NEEDS_ALL,
    ),
    "one average twice": (one_average_twice, ALL_RELEASED),
    "averages that change places": (changing_places, ALL_RELEASED),
    "new parameters in the state": (new_parameters_in_the_state, ALL_RELEASED),
}
QUICK_OPTIMIZERS = {"clip_by_global_norm", "one average twice"}


@pytest.mark.parametrize("name", cases(OPTIMIZERS, QUICK_OPTIMIZERS))
def test_an_optimizer_has_the_same_bits(name):
    make, reasons = OPTIMIZERS[name]
    order = rewriting_nothing if name == "masked" else in_order
    assert assert_same_training(LOSS, make(), weights(), X, order=order) == reasons


@pytest.mark.parametrize("recipe", cases(["f32", "bf16-split24-8bit"], {"f32"}))
def test_a_function_of_matrices_is_called_where_a_layer_is_stepped(recipe):
    """One device has all matrices whole."""
    tx = mpx.mixed_precision(muon_on_matrices(), recipe)
    params = mpx.get_policy(recipe).cast_to_param(weights(width=64))
    loss = mpx.autocast(LOSS, recipe)
    with on_one_device():
        reasons = assert_same_training(loss, tx, params, np.tile(X, (4, 4)))
    assert reasons == ALL_RELEASED


# Rules that need all elements of a leaf or of the tree, or gradients of the step before
# or a condition. Others work element by element.
WHOLE = {
    "adafactor", "adan", "fromage", "lamb", "lars", "novograd", "optimistic_gradient_descent", "sm3",
    "contrib.dadapt_adamw", "contrib.galore", "contrib.mechanize", "contrib.muon", "contrib.prodigy",
}  # fmt: skip
RUNNING = [
    name
    for name, rule in RULES.items()
    if not rule.per_example and name not in ("lbfgs", "polyak_sgd")
    if name not in ("contrib.momo", "contrib.momo_adam", "contrib.sophia")
]


@pytest.mark.parametrize("name", cases(RUNNING, {"lion", "sm3"}))
def test_a_rule_has_the_same_bits(name):
    params, tx = weights(width=8), RULES[name].make()

    def same(actual, expected):
        # XLA orders sums of two programs as it likes. And of a stack of numbers a layer
        # is one, for which a CPU may have instructions that round otherwise.
        is_near = lambda x: name in WHOLE or np.shape(x) == (DEPTH,)
        near, bits = (
            [
                [x for x in jax.tree.leaves(tree) if is_near(x) == asked]
                for tree in (actual, expected)
            ]
            for asked in (True, False)
        )
        chex.assert_trees_all_close(*near, rtol=1e-6)
        assert_same_bits(*bits)

    reasons = assert_same_training(LOSS, tx, params, X[:, :8], same=same)
    assert (set(map(reasons.get, STACKS)) == {RELEASED}) == (name not in WHOLE)


# Formats.


@pytest.mark.filterwarnings("ignore:`autocast`. no matrix product:UserWarning")
@pytest.mark.parametrize("recipe", cases(RECIPES, {"bf16-split"}))
def test_a_recipe_has_the_same_bits(recipe):
    tx = mpx.mixed_precision(ADAMW, recipe)
    params = mpx.get_policy(recipe).cast_to_param(weights(width=64, depth=(2,)))
    loss = mpx.autocast(LOSS, recipe)
    x = jnp.asarray(np.tile(X, (4, 4)))
    is_in_few_bits = "bit" in (RECIPES[recipe].moments or "")
    options = {"interpret": is_in_few_bits, "order": lambda _: unfused(recipe != "f32")}
    with on_one_device():
        reasons = assert_same_training(loss, tx, params, x, **options)
    assert reasons == (NEEDS_ALL if recipe == "f16-scaled" else ALL_RELEASED)


def in_blocks(**options):
    moments = {"mu|nu": mpx.Blockwise8bit()}
    return mpx.low_precision_state(ADAMW, moments, min_size=16, **options)


@pytest.mark.slow
@pytest.mark.parametrize("interpret", [False, True])
@pytest.mark.parametrize("where", [contextlib.nullcontext, on_one_device])
def test_blocks_lie_within_layers_or_the_gradient_is_kept(where, interpret):
    """A layer of 16 x 16 is one block of 256. Stacks of 48 and of 1,200 numbers have
    blocks that are filled up.
    """
    with where():
        reasons = assert_same_training(
            LOSS, in_blocks(), weights(), X, interpret=interpret
        )
    assert reasons == kept("`pad` mixes elements", "b")
    reasons = assert_same_training(
        LOSS, in_blocks(), weights(width=20), X[:, :1] + np.zeros((1, 20), np.float32)
    )
    assert reasons == kept("`pad` mixes elements", "w", "b")


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [lambda: ADAMW, lambda: optax.sgd(1.0), remembers_the_gradient]
)
def test_a_step_without_blocks_is_written_into_stacks_too(make):
    params = weights(width=256)
    with on_one_device():
        reasons = assert_same_training(
            LOSS, make(), params, np.tile(X, 16), interpret=True
        )
    assert reasons == ALL_RELEASED


@pytest.mark.slow
def test_a_layer_may_end_within_a_row_of_its_stack():
    """Rows have 1,024 numbers, and a layer 248 x 248."""
    params = weights(depth=(16,), width=248)
    x = np.asarray(np.random.default_rng(0).normal(size=(4, 248)), np.float32)
    with on_one_device():
        reasons = assert_same_training(LOSS, ADAMW, params, x, interpret=True)
    assert reasons == ALL_RELEASED


@pytest.mark.slow
def test_a_block_that_reaches_over_layers_keeps_the_gradient():
    """A layer of 8 x 8 is a quarter of a block, and eight layers are two."""
    params = weights(width=8, depth=(8,))
    reasons = assert_same_training(LOSS, in_blocks(), params, X[:, :8])
    assert reasons["w"] == "its blocks reach over layers"


@pytest.mark.slow
def test_a_stochastic_rounding_has_the_same_random_bits():
    tx = in_blocks(rounding="stochastic", key=jax.random.key(0))
    reasons = assert_same_training(LOSS, tx, weights(), X, interpret=True)
    assert reasons["w"] == RELEASED


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_parameters_of_each_dtype_have_the_same_bits(dtype):
    tx = mpx.master_weights(ADAMW) if dtype != F32 else ADAMW
    if dtype == F16:
        tx = mpx.loss_scaling(tx, mpx.DynamicLossScale())
    reasons = assert_same_training(LOSS, tx, weights(dtype=dtype), X)
    assert reasons == (NEEDS_ALL if dtype == F16 else ALL_RELEASED)


@pytest.mark.slow
def test_parameters_of_two_dtypes_have_the_same_bits():
    def body(x, p):
        return layer(x, p | {"w": p["w"].astype(jnp.float32)})

    def loss(params, x):
        return (lax.scan(body, x, stacks(params))[0] ** 2).mean()

    params = weights()
    params["w"] = params["w"].astype(jnp.bfloat16)
    reasons = assert_same_training(loss, mpx.upcast(ADAMW), params, X)
    assert reasons == ALL_RELEASED
