"""Check every optimizer of Optax and `optax.contrib` in every wrapper, with what stands
inside and around it.

Each is right, beside the same rule in float32 without mpx, or it is refused in words.
By default each rule runs in one place (`tests/matrix.py`), and one rule of each kind is
trained for longer; CI runs them all.
"""

import functools
import pickle
import re
from pathlib import Path

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import export
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mpx
from mpx import _trees
from mpx.states import (
    KahanSummationState,
    LossScalingState,
    LowPrecisionState,
    MasterWeightsState,
    StoredLeaf,
)
from tests import rules
from tests.helpers import assert_same_bits, bits, cases, eight_cpu_devices, types_of
from tests.matrix import AROUND, CASES, COMPOSED, QUICK, REFUSED, SIDES, WRAPPERS, Case
from tests.rules import (
    EXCLUDED,
    PARTS,
    RULES,
    bfloat16_params,
    exported_transformations,
    gradients,
    loss,
)

pytestmark = pytest.mark.optax_promotion

STEPS = 20
# Moments, momentum, factored and matrix-shaped state, signs, a key, an average of the
# weights; a rule that wants the loss, the gradients of each example, or the initial
# weights.
FAMILIES = {
    "adafactor", "adamw", "lion", "noisy_sgd", "polyak_sgd", "sgd", "contrib.cocob", "contrib.dpsgd", "contrib.muon",
    "contrib.schedule_free",
}  # fmt: skip
AVERAGING = [name for name in RULES if rules.moment_fields(name)]
WITH_KEYS = {"noisy_sgd", "contrib.dpsgd"}  # typed ones, which Flax does not serialize
# By Optax itself, whose states hold other arrays there.
UNMAPPED = {
    "sm3",
    "contrib.muon",
}


# Rule by rule, for the programs that the tests of one share.
every_rule = pytest.mark.parametrize(
    "name", cases(RULES, sorted(FAMILIES)[::2]), scope="module"
)


def test_the_table_of_rules_is_complete():
    assert exported_transformations() - PARTS - set(EXCLUDED) == set(RULES)
    assert FAMILIES <= RULES.keys()


# One step at a time, beside the rule without mpx.


def rule_state(state):
    """Return the state of the rule in float32: what is stored is decoded, and what mpx
    adds is left out.
    """
    own = (MasterWeightsState, LossScalingState, LowPrecisionState)
    is_kahan = lambda node: (
        isinstance(node, tuple)
        and any(isinstance(part, KahanSummationState) for part in node)
    )
    is_ours = lambda node: isinstance(node, (*own, StoredLeaf)) or is_kahan(node)

    def without(node):
        if isinstance(node, StoredLeaf):
            return node.decode()
        return (
            rule_state(node.inner_state if isinstance(node, own) else node[0])
            if is_ours(node)
            else node
        )

    return jax.tree.map(without, state, is_leaf=is_ours)


def furthest(actual, expected):
    """Return the largest difference between two trees of one structure, relative to the
    largest number of a leaf.
    """
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    differences = [0.0]
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if not np.array_equal(bits(a := jnp.asarray(a)), bits(e := jnp.asarray(e))):
            a, e = (np.asarray(x, np.float64) for x in (a, e))
            differences.append(
                np.nan_to_num(np.abs(a - e) / np.abs(e).max(), nan=np.inf).max()
            )
    return max(differences)


def arguments(case, params, state, grads):
    """Return the gradients and the other arguments of an update; a rule may want the
    loss of the masters.
    """
    masters = mpx.master_params(params, state)
    scaled = jax.tree.map(lambda g: g * case.scale, grads)
    return scaled, RULES[case.rule].extra_args(
        getattr(masters, "fast", masters), scaled
    )


def stepped(case, tx, params, state, grads):
    scaled, extra = arguments(case, params, state, grads)
    updates, state = tx.update(scaled, state, params, **extra)
    return optax.apply_updates(params, updates), state


def differences_in_a_step(case, tx, params, state, grads):
    """Return how far the weights and the rule's state are from those of the rule in
    float32, and the new two.
    """
    masters = mpx.master_params(params, state)
    # Beside a compensation the rule sees the parameters as they are stored.
    seen = (
        jax.tree.map(lambda p: p.astype(jnp.float32), params)
        if case.wrapper == "Kahan"
        else masters
    )
    _, extra = arguments(case, params, state, grads)
    if "grad" in extra:
        extra["grad"] = grads
    updates, expected = case.plain().update(grads, rule_state(state), seen, **extra)
    params, state = stepped(case, tx, params, state, grads)
    weights = optax.apply_updates(masters, updates)
    return (
        (
            furthest(mpx.master_params(params, state), weights),
            furthest(rule_state(state), expected),
        ),
        params,
        state,
    )


# Relative to the largest number of a leaf. 24 bits and a compensation in bfloat16 round
# a weight once a step, the former up or down; signed codes of 8 bits are at most
# 1/127 * (2 - 1/127) apart.
OF_WEIGHTS = {"split24": 2.0**-15, "Kahan": 2.0**-17}
OF_STATE = {"8-bit": 2 / 127}
# Low bits and compensations, which fit other parameters too.
FITS_ANY = ("split", "split24", "Kahan")


def buffers_stand_once(params, state):
    buffers = [id(leaf) for leaf in jax.tree.leaves((params, state))]
    return len(set(buffers)) == len(buffers)


@pytest.mark.parametrize("case", cases(CASES, QUICK), ids=str)
def test_a_step_is_that_of_the_float32_rule_wherever_the_wrapper_stands(case):
    """Without `jit` no product is contracted with a sum, so that equal arithmetic has
    equal bits.
    """
    rule, steps = RULES[case.rule], 1 if case.rule == "lbfgs" else 2
    grads, tx, params = gradients(rule, steps), case.wrapped(), case.params()
    if not (rule.extra_args({}, {}) or rule.per_example):
        mpx.check_chain(tx, params)
    with jax.disable_jit():
        state = tx.init(params)
        assert case.side == "outside" or buffers_stand_once(params, state)
        types = types_of(state)
        assert (
            furthest(
                rule_state(state), case.plain().init(mpx.master_params(params, state))
            )
            == 0
        )
        for i in range(steps):
            step = jax.tree.map(lambda g, i=i: g[i], grads)
            (weights, of_state), params, state = differences_in_a_step(
                case, tx, params, state, step
            )
            assert weights <= OF_WEIGHTS.get(case.wrapper, 0)
            assert of_state <= OF_STATE.get(case.wrapper, 0)
        assert case.side == "outside" or types_of(state) == types
        assert case.wrapper in (*FITS_ANY, "8-bit") or bool(
            mpx.is_synced(params, state)
        )


def test_a_bare_rule_that_keeps_the_initial_weights_shares_their_buffers():
    """Look at `cocob`, the negative control: donating parameters and state would fail."""
    params = bfloat16_params()
    assert not buffers_stand_once(params, RULES["contrib.cocob"].make().init(params))


def test_every_place_of_every_wrapper_is_a_case():
    places = {(case.around, case.side, case.wrapper) for case in CASES if case.around}
    expected = {
        (around, side, wrapper)
        for around in AROUND
        for side in SIDES
        for wrapper in WRAPPERS
    }
    assert places == expected - {
        (around, "outside", wrapper) for around, wrapper in REFUSED
    }


@pytest.mark.parametrize(("around", "wrapper"), REFUSED)
def test_what_cannot_stand_around_a_wrapper_is_refused(around, wrapper):
    simple = [
        name
        for name, rule in RULES.items()
        if not (rule.extra_args({}, {}) or rule.per_example)
    ]
    case = Case(
        simple[list(REFUSED).index((around, wrapper))], wrapper, around, "outside"
    )
    with pytest.raises(ValueError, match=REFUSED[around, wrapper]):
        mpx.check_chain(case.wrapped(), case.params())


def test_a_step_without_masters_is_none_of_the_float32_rule():
    """Take bfloat16 parameters and gradients as they are, the negative control."""
    case, narrow = (
        Case("adamw", "full"),
        lambda tree: jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree),
    )
    tx, params = case.plain(), case.params()
    tx = optax.GradientTransformation(
        tx.init, lambda grads, *rest, update=tx.update: update(narrow(grads), *rest)
    )
    grads = jax.tree.map(lambda g: g[0], gradients(RULES["adamw"], 1))
    (weights, of_state), _, _ = differences_in_a_step(
        case, tx, params, tx.init(params), grads
    )
    assert weights > OF_WEIGHTS["split24"]
    assert of_state > 1e-3


# Composed with JAX, and kept between runs.


def run_of(case, tx, params, state, grads, decay=0.0):
    """Take a step for each of stacked gradients, to which a part of the weights is
    added; return the new two.
    """
    for i in range(len(grads["bias"])):
        masters = mpx.master_params(params, state)
        pull = lambda g, p, i=i: g[i] + decay * jnp.broadcast_to(p, g[i].shape)
        step = jax.tree.map(pull, grads, getattr(masters, "fast", masters))
        params, state = stepped(case, tx, params, state, step)
    return params, state


def weights_and_state(run):
    return mpx.master_params(*run), rule_state(run[1])


composed = pytest.mark.parametrize("case", cases(COMPOSED[::2], COMPOSED[:1]), ids=str)


@composed
def test_two_models_are_trained_by_vmap_as_each_alone(case):
    tx, grads = case.wrapped(), gradients(RULES[case.rule], 2)
    with jax.disable_jit():
        both = jax.tree.map(lambda p: jnp.stack([p, 2 * p]), case.params())
        trained = jax.vmap(
            lambda params: run_of(case, tx, params, tx.init(params), grads)
        )(both)
        for i in range(2):
            params, run = jax.tree.map(lambda x, i=i: x[i], (both, trained))
            alone = run_of(case, tx, params, tx.init(params), grads)
            assert furthest(weights_and_state(run), weights_and_state(alone)) < 1e-5


# An update that is clipped has no derivative, and a sum of those few that are not may
# be anything near zero.
UNCLIPPED = [case for case in COMPOSED if case.around != "clipping after"]


@pytest.mark.parametrize("case", cases(UNCLIPPED[1::2], UNCLIPPED[1:2]), ids=str)
def test_derivatives_through_steps_are_those_of_the_float32_rule(case):
    """Differentiate with respect to a rate, and to the first weights, which may be
    bfloat16 numbers.
    """
    grads = gradients(RULES[case.rule], 2)

    def derivatives(case, make, params):
        def after(rate, params):
            tx = make(rate)
            return loss(
                mpx.master_params(
                    *run_of(case, tx, params, tx.init(params), grads, decay=0.1)
                )
            )

        return jax.grad(after, (0, 1))(1.0, params)

    with jax.disable_jit():
        params = case.params()
        wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
        is_stored = lambda x: isinstance(x, StoredLeaf)
        if any(
            map(
                is_stored,
                jax.tree.leaves(case.wrapped().init(params), is_leaf=is_stored),
            )
        ):
            with pytest.raises(TypeError, match="codes of `Blockwise8bit"):
                derivatives(case, case.wrapped, params)
        else:
            # Whose gradients have no scale.
            expected = derivatives(case._replace(wrapper="full"), case.plain, wide)
            assert furthest(derivatives(case, case.wrapped, params), expected) < 0.01


@composed
def test_a_run_exported_for_eight_devices_that_takes_its_arguments_is_that_of_single_steps(
    case,
):
    """Scan over steps on sharded parameters and state, which are donated, in a program
    of `jax.export`.
    """
    tx, params, grads = case.wrapped(), case.params(), gradients(RULES[case.rule], 2)
    state = jax.tree.map(strongly_typed, tx.init(params))
    with jax.disable_jit():
        alone = jax.tree.map(
            jnp.copy, weights_and_state(run_of(case, tx, params, state, grads))
        )
    leaves, structure = jax.tree.flatten((params, state))
    mesh = eight_cpu_devices()
    place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    leaves = [place(x, P("data") if x.shape[:1] == (8,) else P()) for x in leaves]
    grads = jax.tree.map(lambda g: place(g, P()), grads)

    def run(leaves, grads):
        step = lambda carry, grads: (stepped(case, tx, *carry, grads), None)
        return jax.tree.leaves(
            jax.lax.scan(step, structure.unflatten(leaves), grads)[0]
        )

    exported = export.export(jax.jit(run))(leaves, grads)
    ran = structure.unflatten(jax.jit(exported.call, donate_argnums=0)(leaves, grads))
    # JAX hands on what a rule never changes.
    assert all(x.is_deleted() for x in leaves[: len(jax.tree.leaves(params))])
    assert furthest(weights_and_state(ran), alone) < (
        0.01 if case.wrapper == "8-bit" else 1e-5
    )


@pytest.mark.parametrize("case", cases(COMPOSED, COMPOSED[::3]), ids=str)
def test_a_state_is_pickled_serialized_and_mapped_as_the_rule_s_own(case):
    """Map a name to each array of a parameter, as shardings are mapped: Optax finds
    those that it finds in the rule.
    """

    def numbered(state):
        is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return jax.tree.map(
            lambda x: (
                x if is_key(x) else jnp.arange(x.size).reshape(x.shape).astype(x.dtype)
            ),
            state,
        )

    tx, state = case.wrapped(), numbered(case.wrapped().init(case.params()))
    assert_same_bits(pickle.loads(pickle.dumps(state)), state)
    if case.rule not in WITH_KEYS:
        assert_same_bits(
            flax.serialization.from_bytes(state, flax.serialization.to_bytes(state)),
            state,
        )
    # Whose state has parameters of another structure.
    if case.rule not in UNMAPPED and case.around != "lookahead":
        names = jax.tree.map_with_path(lambda path, _: str(path), case.params())
        is_leaf = lambda x: isinstance(x, (StoredLeaf, optax.MaskedNode))
        named = lambda tx, state: optax.tree.map_params(
            tx,
            lambda _, name: name,
            state,
            names,
            transform_non_params=lambda _: "none",
            is_leaf=is_leaf,
        )
        assert jax.tree.leaves(rule_state(named(tx, state))) == jax.tree.leaves(
            named(case.plain(), rule_state(state))
        )


# Many steps in one program.


def strongly_typed(x):
    """Return the array with a type that a scan keeps."""
    x = jnp.asarray(x)
    return jax.lax.convert_element_type(x, x.dtype) if x.aval.weak_type else x


@every_rule
def test_masters_follow_the_float32_trajectory_to_the_bit_in_one_program(name):
    case = Case(name, "full")
    params, rules = case.params(), (case.plain(), case.wrapped())
    exact = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    runs = (
        (exact, jax.tree.map(strongly_typed, rules[0].init(exact))),
        (
            params,
            rules[1].init(params),
        ),
    )
    step = lambda runs, grads: (
        [stepped(case, tx, *run, grads) for tx, run in zip(rules, runs, strict=True)],
        None,
    )
    train = jax.jit(lambda runs, grads: jax.lax.scan(step, runs, grads)[0])
    (exact, _), (params, state) = train([*runs], gradients(RULES[name], STEPS))
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(exact))
    assert_same_bits(mpx.master_params(params, state), exact)
    assert bool(mpx.is_synced(params, state))


def test_the_table_in_the_docs_counts_every_rule_and_names_those_that_lose():
    table = Path(__file__).parents[1] / "benchmarks" / "STATE_FORMATS.md"
    summary, *sections = re.split(r"^## ", table.read_text(), flags=re.MULTILINE)
    cells_of = lambda text: [
        re.split(r" *\| *", line)[1:-1]
        for line in text.splitlines()
        if line.startswith("| ")
    ]
    head, *counted = cells_of(summary)
    assert head[1:] == list(rules.WRITE_BACKS)
    assert [state for state, *_ in counted] == [
        section.splitlines()[0] for section in sections
    ]
    for (state, *counts), section in zip(counted, sections, strict=True):
        those = list(RULES) if state == "f32" else AVERAGING
        lost = {rule: figures for rule, _, *figures in cells_of(section)[1:]}
        assert set(lost) <= set(those)
        for i, count in enumerate(counts):
            bold = sum("**" in figures[i] for figures in lost.values())
            assert count == f"{len(those) - bold} of {len(those)}", (state, head[1 + i])


# What a recipe stores in 8 bits, by the fields of the rule's state: averages, whatever
# a rule calls them. Sums, differences and copies of weights stay in float32.
IN_8_BITS = {
    "adabelief": "mu nu", "adadelta": "e_g e_x", "adafactor": "v", "adagrad": "sum_of_squares", "adam": "mu nu",
    "adamax": "mu nu", "adamaxw": "mu nu", "adamw": "mu nu", "adan": "g m n v", "amsgrad": "mu nu nu_max",
    "lamb": "mu nu", "lars": "trace", "lion": "mu", "nadam": "mu nu", "nadamw": "mu nu", "novograd": "mu",
    "optimistic_adam_v2": "mu nu", "radam": "mu nu", "rmsprop": "nu trace", "sgd": "trace", "signum": "ema",
    "sm3": "nu", "yogi": "mu nu", "contrib.acprop": "mu nu", "contrib.ademamix": "m1 m2 nu",
    "contrib.adopt": "mu nu", "contrib.dadapt_adamw": "exp_avg exp_avg_sq", "contrib.galore": "mu nu",
    "contrib.madgrad": "grad_sum_sq", "contrib.mechanize": "mu nu", "contrib.momo": "exp_avg",
    "contrib.momo_adam": "exp_avg exp_avg_sq", "contrib.muon": "mu", "contrib.prodigy": "exp_avg exp_avg_sq",
    "contrib.schedule_free": "mu nu", "contrib.schedule_free_adamw": "nu", "contrib.simplified_ademamix": "m n",
    "contrib.sophia": "mu nu",
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_a_recipe_stores_the_averages_of_every_rule_in_8_bits(name):
    params = {"w": jax.ShapeDtypeStruct((64, 128), jnp.bfloat16)}
    make = RULES[name].make
    if name == "adafactor":  # its factors are small
        make = functools.partial(optax.adafactor, 1e-2, factored=False)
    elif name == "contrib.galore":
        make = functools.partial(optax.contrib.galore, 1e-2, rank=64)
    tx = mpx.mixed_precision(make(), "bf16-split-8bit")
    if name not in IN_8_BITS:
        with pytest.raises(ValueError, match="no field of its state is known"):
            jax.eval_shape(tx.init, params)
        return
    state = jax.eval_shape(tx.init, params)
    stored = {
        [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)][-1]
        for path, leaf in _trees.leaves_by_path(
            state, lambda x: isinstance(x, StoredLeaf)
        ).items()
        if isinstance(leaf, StoredLeaf)
    }
    assert stored == set(IN_8_BITS[name].split())
