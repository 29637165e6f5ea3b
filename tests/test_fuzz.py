"""Try random trees, values, chains of wrappers and policies: each gives a clear error, or every invariant holds."""

import re
import traceback
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpx
from mpx import _trees
from tests.helpers import bits, examples, types_of

pytestmark = pytest.mark.optax_promotion


# --- Trees. ---
class Box(NamedTuple):
    """A container with the field under which Flax keeps an array in a box."""

    value: Any


SHAPES = [(), (3,), (2, 9), (0, 2, 1)]
TINY = [2.0**-149, 2.0**-133, 2.0**-126, 2.0**-100, 6e-8, 6e-5]
USUAL = [1e-3, 0.1, 1.0, 1.5, 1.00390625, 3.0, 100.0, 0.78539816, 1.2345678, 27.182818, 0.0123456]
HUGE = [65504.0, 70000.0, 1e19, 3.3e38]
VALUES = [0.0, *USUAL, *TINY, *HUGE]
# Some names of parameters are fields of states, some make paths that are equal as strings.
TREES = [
    lambda a, b, c: a,
    lambda a, b, c: {"w": a, "mu": [b, c], "nu": None},
    lambda a, b, c: {"a": {"b": a}, "a/b": b, "": Box(c)},
    lambda a, b, c: ({"value": a, "ema": optax.MaskedNode()}, Box({"inner_state": b, "master": (c,)})),
    lambda a, b, c: {"0": {"counter": a}, "b": Box(None)},
]


def array(shape, dtype, values):
    """Return an array that repeats the values, each as the nearest finite number."""
    dtype = np.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        return np.ones(shape, dtype)
    largest = float(jnp.finfo(dtype).max)
    return np.asarray(np.clip(np.resize(np.array(values), shape), -largest, largest), dtype)


def values():
    signed = st.builds(lambda number, sign: sign * number, st.sampled_from(VALUES), st.sampled_from([1.0, -1.0]))
    return st.lists(signed, min_size=1, max_size=5)


def trees(dtypes):
    leaf = st.builds(array, st.sampled_from(SHAPES), st.sampled_from(dtypes), values())
    return st.builds(lambda make, *leaves: make(*leaves), st.sampled_from(TREES), leaf, leaf, leaf)


# --- Chains. ---
def low_precision_state(inner, pattern, chosen, rounding):
    key = jax.random.key(1) if rounding == "stochastic" else None
    return mpx.low_precision_state(inner, {pattern: chosen}, min_size=4, rounding=rounding, key=key)


def every_second(tree, first, second):
    """Return a tree like this one, whose leaves are one or the other in turn."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten([second if i % 2 else first for i in range(len(leaves))])


PARTS = {
    "adam": lambda: optax.adam(1e-2),
    "sgd": lambda: optax.sgd(0.1),
    "leaps": lambda: optax.sgd(4.0),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "lion": lambda: optax.lion(1e-2),
    "rmsprop": lambda: optax.rmsprop(1e-2),
    "clip": lambda: optax.clip_by_global_norm(1.0),
    "decay": lambda: optax.add_decayed_weights(1e-2),
    "kahan": lambda: mpx.kahan_summation(),
    "kahan in float32": lambda: mpx.kahan_summation(jnp.float32),
    "stochastic rounding": lambda: mpx.stochastic_rounding(jax.random.key(0)),
    "ema": lambda: mpx.params_ema(0.9),
}
WRAPPERS = {
    "upcast": mpx.upcast,
    "full": mpx.master_weights,
    "split": lambda tx: mpx.master_weights(tx, storage="split"),
    "no scale": lambda tx: mpx.loss_scaling(tx, mpx.NoOpLossScale()),
    "static scale": lambda tx: mpx.loss_scaling(tx, mpx.StaticLossScale(8.0)),
    "dynamic scale": lambda tx: mpx.loss_scaling(tx, mpx.DynamicLossScale(4.0, period=1, hysteresis=2)),
    "masked": lambda tx: optax.masked(tx, lambda tree: every_second(tree, True, False)),
    "floating": lambda tx: optax.masked(tx, lambda tree: jax.tree.map(_trees.is_floating, tree)),
    "multi steps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "float64": lambda tx: mpx.master_weights(tx, jnp.float64),
}
FORMATS = ["bf16", "f16", mpx.Blockwise8bit(16), mpx.Blockwise8bit(16, signed=True)]
PATTERNS = ["mu", "nu", "mu|nu", "trace|mu", ".*"]
KINDS = [*WRAPPERS, "low", "partition", *PARTS]
INSIDE = [*KINDS, *["upcast", "full", "split", "low"] * 4]  # what the promises are about
INSIDE.remove("float64")  # it needs 64-bit types


def around(kind, inner):
    """Return a strategy for a chain of a kind, as nested tuples of names, which `build` understands."""
    if kind == "low":
        roundings = st.sampled_from(["nearest", "stochastic"])
        return st.tuples(st.just(kind), inner, st.sampled_from(PATTERNS), st.sampled_from(FORMATS), roundings)
    if kind == "partition":
        return st.tuples(st.just(kind), inner, st.sampled_from(list(PARTS)))
    return st.tuples(st.just(kind), inner) if kind in WRAPPERS else st.tuples(st.just("chain"), inner, st.just(kind))


def chains(depth=2):
    parts = st.sampled_from(list(PARTS))
    return (
        st.one_of(parts, st.sampled_from(INSIDE).flatmap(lambda kind: around(kind, chains(depth - 1))))
        if depth
        else parts
    )


def build(chain):
    """Return the transformation that nested tuples of names describe."""
    if isinstance(chain, str):
        return PARTS[chain]()
    kind, *rest = chain
    if kind == "low":
        return low_precision_state(build(rest[0]), *rest[1:])
    inner = [build(part) for part in rest]
    if kind == "chain":
        return optax.chain(*inner)
    if kind == "partition":
        return optax.partition(dict(enumerate(inner)), lambda tree: every_second(tree, 0, 1))
    return WRAPPERS[kind](*inner)


# --- What is promised. ---
NAMES_OF_MPX = {name for name in dir(mpx) if not name.startswith("_")}
STATES = tuple(value for name, value in vars(mpx.states).items() if name.endswith("State"))


def is_clear(error):
    """Tell whether an error is one of ours: it begins with the name of the function that was called."""
    found = re.match(r"`(\w+)`", str(error))
    return isinstance(error, (ValueError, TypeError)) and found is not None and found[1] in NAMES_OF_MPX


def outcome(function, *args, **options):
    """Return the result and the error of a function, one of them None."""
    try:
        return function(*args, **options), None
    except Exception as error:
        return None, error


def our_states(state):
    """Return the outermost states of mpx in a state; what Optax keeps beside them is Optax's."""
    is_ours = lambda part: isinstance(part, STATES)
    return [part for part in jax.tree.leaves(state, is_leaf=is_ours) if is_ours(part)]


def same_bits(a, b):
    a, b = jax.tree.leaves(a), jax.tree.leaves(b)
    return all(np.array_equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True))


def flushed(tree):
    """Replace subnormal numbers by zeros, as a CPU does in every addition, also in `optax.apply_updates`."""
    flush = lambda x: np.where(
        np.abs(x.astype(np.float64)) < 2.0**-126, np.copysign(0, x.astype(np.float64)).astype(x.dtype), x
    )
    return jax.tree.map(lambda x: flush(np.asarray(x)), tree)


def pointers(tree):
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree) if leaf.size]


def rounded(master, dtype):
    """Round a master as its parameter holds it: to nearest even, and nothing finite becomes infinite."""
    largest = jnp.finfo(dtype).max.astype(master.dtype)
    with np.errstate(over="ignore"):
        return np.where(np.isfinite(master), np.clip(master, -largest, largest), master).astype(dtype)


def out_of_step(before, after, state, is_finite=True):
    """Return the parameters that are not their masters, rounded, where the documentation does not allow it."""
    found = []
    old, new = _trees.leaves_by_path(before), _trees.leaves_by_path(after)
    for part in _trees.find_states(state, mpx.states.MasterWeightsState):
        for path, master in _trees.leaves_by_path(part.master).items():
            if master.dtype == np.uint16:
                continue
            was, now, master = (flushed(x) for x in (old[path], new[path], master))
            wide = lambda x: x.astype(np.float64)
            wanted = rounded(master, now.dtype)
            allowed = np.maximum(2.0**-24 * np.abs(wide(was)), 2.0**-126)  # a weight that falls almost to zero
            with np.errstate(invalid="ignore"):
                is_right = (now == wanted) | (np.abs(wide(now) - wide(wanted)) <= allowed)
            excused = ~np.isfinite(wide(master)) | ~np.isfinite(wide(was))
            if not is_finite:  # `optax.MultiSteps` multiplies what it does not want by zero
                excused |= np.isnan(wide(now))
            if not np.all(is_right | excused):
                found.append((path, was, now, master))
    return found


def require_step(before, state, grads, after, new_state):
    """Raise unless a step has kept what every transformation promises."""
    assert types_of(after) == types_of(before)
    kept = lambda tree: [leaf for leaf in jax.tree.leaves(tree) if not _trees.is_floating(leaf)]
    assert same_bits(kept(after), kept(before))
    for old, new in zip(our_states(state), our_states(new_state), strict=True):
        assert types_of(new) == types_of(old)
    for old, new in zip(*(_trees.find_states(s, mpx.states.LossScalingState) for s in (state, new_state)), strict=True):
        if new.skipped_steps > old.skipped_steps:
            assert same_bits(new.inner_state, old.inner_state)
    is_bad = [not np.isfinite(np.asarray(g, np.float32)).all() for g in jax.tree.leaves(grads)]
    if isinstance(state, mpx.states.LossScalingState):
        assert int(new_state.skipped_steps) == int(state.skipped_steps) + any(is_bad)
        if any(is_bad):
            assert same_bits(flushed(after), flushed(before))
            assert int(new_state.first_nonfinite) == is_bad.index(True)
    assert not out_of_step(before, after, new_state, is_finite=not any(is_bad))
    masters = mpx.master_params(after, new_state)
    assert jax.tree.structure(masters) == jax.tree.structure(after)
    assert not any(_trees.is_narrower(leaf, np.dtype(np.float32)) for leaf in jax.tree.leaves(masters))
    assert mpx.is_synced(after, mpx.resync(after, new_state))


def started(chain, params):
    """Return a transformation and its state, or None if it was refused; an error that is not clear fails the test."""

    def start():
        tx = build(chain)
        state = tx.init(params)
        mpx.check_chain(tx, params)
        return tx, state

    result, error = outcome(start)
    assert error is None or is_clear(error), "".join(traceback.format_exception(error))
    return result


def train(chain, params, gradients):
    """Train a tree, check each step, and return how many there were: 0 if the chain was refused."""
    chain, params, gradients = on_device((chain, params, gradients))
    start = started(chain, params)
    if start is None:
        return 0
    tx, state = start
    assert not set(pointers(params)) & set(pointers(state))
    for grads in gradients:
        updates, new_state = tx.update(grads, state, params)
        after = optax.apply_updates(params, updates)
        require_step(params, state, grads, after, new_state)
        params, state = after, new_state
    return len(gradients)


def on_device(training):
    chain, *trees = training
    return chain, *jax.tree.map(jnp.asarray, trees)


@st.composite
def trainings(draw, dtypes, kind):
    """Draw a chain of a kind, parameters, and gradients of a few steps, perhaps one not finite."""
    params = draw(trees(dtypes))
    of_parameters = draw(st.booleans())

    def gradient(p):
        if p.dtype.kind == "i":
            return np.zeros_like(p)
        return array(p.shape, p.dtype if of_parameters else np.float32, draw(values()))

    gradients = [jax.tree.map(gradient, params) for _ in range(draw(st.integers(1, 3)))]
    leaves, treedef = jax.tree.flatten(gradients)
    places = [i for i, leaf in enumerate(leaves) if leaf.size and leaf.dtype.kind != "i"]
    if places and draw(st.booleans()):
        i, poison = draw(st.sampled_from(places)), draw(st.sampled_from([np.inf, -np.inf, np.nan]))
        leaves[i].flat[-1] = poison
    return draw(around(kind, chains())), params, treedef.unflatten(leaves)


NARROW_AND_WIDE = [jnp.bfloat16, np.float16, np.float32]
MORE_DTYPES = {"floating": [*NARROW_AND_WIDE, np.int32], "float64": [np.float32, np.float64]}


@pytest.mark.parametrize("kind", KINDS)
@examples(10)
@given(data=st.data())
def test_a_random_chain_is_refused_or_keeps_every_promise(kind, data):
    training = data.draw(trainings(MORE_DTYPES.get(kind, NARROW_AND_WIDE), kind))
    with jax.enable_x64(kind == "float64"):
        train(*training)


DEEP = [
    ("dynamic scale", ("split", ("low", ("chain", "clip", "adam"), "mu|nu", mpx.Blockwise8bit(16), "stochastic"))),
    ("partition", ("full", ("chain", "rmsprop", "ema")), ("chain", ("upcast", "lion"), "kahan")),
    ("masked", ("static scale", ("multi steps", ("full", ("chain", "decay", "momentum"))))),
    ("chain", ("low", "sgd", ".*", "bf16", "nearest"), "stochastic rounding"),
]


@pytest.mark.slow
@pytest.mark.parametrize("chain", DEEP[:3], ids=str)
def test_deep_chains_are_not_refused(chain):
    """Make sure that the tests above do look at them."""
    params = {"a": array((2, 9), jnp.bfloat16, USUAL), "b": array((3,), np.float16, USUAL)}
    assert train(chain, params, [params] * 2) == 2


def test_a_chain_that_makes_no_sense_is_refused():
    assert train(DEEP[3], {"a": array((2, 9), jnp.bfloat16, USUAL)}, []) == 0  # SGD has no state to store
    assert train(("chain", ("full", "sgd"), "clip"), {"a": array((3,), jnp.bfloat16, USUAL)}, []) == 0


@pytest.mark.parametrize(
    "error",
    [ValueError("no name"), ValueError("`jit` is not ours"), KeyError("`upcast`"), AttributeError("`upcast`: no x")],
    ids=repr,
)
def test_errors_of_others_are_not_clear(error):
    """Check the check: a negative control."""
    assert not is_clear(error)


def test_the_checks_above_see_broken_promises():
    """Negative controls: updates clipped after the masters, a step that is not skipped, a shared buffer."""

    def after_a_step(tx, gradient):
        params = {"w": jnp.asarray(array((2, 9), jnp.bfloat16, USUAL))}
        state, grads = tx.init(params), {"w": jnp.full((2, 9), gradient)}
        updates, new_state = tx.update(grads, state, params)
        return params, state, grads, optax.apply_updates(params, updates), new_state

    clipped = optax.chain(mpx.master_weights(optax.sgd(1.0)), optax.clip(0.5))  # `check_chain` refuses it
    before, _, _, after, state = after_a_step(clipped, 3.0)
    assert out_of_step(before, after, state)
    step = after_a_step(mpx.loss_scaling(mpx.master_weights(optax.sgd(1.0))), jnp.inf)
    require_step(*step)
    with pytest.raises(AssertionError):
        require_step(*step[:3], jax.tree.map(lambda p: p + p.dtype.type(1), step[3]), step[4])
    keeper = optax.GradientTransformation(lambda params: params, lambda updates, state, params=None: (updates, state))
    params = jnp.ones(3)
    assert set(pointers(params)) & set(pointers(keeper.init(params)))
    assert not set(pointers(params)) & set(pointers(mpx.upcast(keeper).init(params)))
