"""Check `whole_matrices` on eight devices: what is multiplied, and by whom, where
arrays lie, and what it refuses.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers
from orbax.checkpoint import v1 as ocp

import mpx
from tests.helpers import QUICKLY, all_eqns, assert_same_bits, cases, stepper, types_of
from tests.parallel import fsdp

pytestmark = pytest.mark.optax_promotion

KINDS = {"automatic": AxisType.Auto, "explicit": AxisType.Explicit}
# Stacks that eight devices divide and do not, experts in layers, two matrices alike,
# and a leaf without products.
SHAPES = {
    "stack": (8, 16, 32),
    "odd": (3, 32, 16),
    "experts": (2, 3, 16, 32),
    "one": (32, 16),
    "other": (32, 16),
    "bias": (24,),
}
PLACES = {
    "rows": {
        "stack": P(None, "data"),
        "odd": P(None, "data"),
        "experts": P(None, None, "data"),
        "one": P("data"),
    },
    "columns": {
        "stack": P(None, None, "data"),
        "odd": P(None, None, "data"),
        "one": P(None, "data"),
        "bias": P("data"),
    },
    "stacks": {"stack": P("data")},
    "everywhere": {},
    "parts": {
        "stack": P(None, "data", "model"),
        "odd": P(None, "model", "data"),
        "one": P("model"),
    },
}
RANDOM = np.random.default_rng(0)
# Products of small integers are exact, in whatever order they are added up.
INTEGERS = {
    name: RANDOM.integers(-2, 3, shape).astype(np.float32)
    for name, shape in SHAPES.items()
}
CUBES = optax.chain(
    optax.trace(0.5),
    optax.stateless(
        lambda g, p: jax.tree.map(lambda x: x @ x.mT @ x if x.ndim > 1 else x, g)
    ),
    optax.add_decayed_weights(0.5),
    optax.scale(-0.25),
)
NORMAL = {
    name: RANDOM.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()
}


def muon(**options):
    """Return Muon of two iterations for all leaves of two axes or more."""
    numbers = lambda params: jax.tree.map(
        lambda p: MuonDimensionNumbers(-2, -1) if p.ndim > 1 else None, params
    )
    return optax.contrib.muon(
        1e-2,
        ns_steps=2,
        weight_decay=0.1,
        muon_weight_dimension_numbers=numbers,
        **options,
    )


def stepped(tx, params, put=jnp.asarray, step=stepper):
    """Return parameters and state after two steps; `put` places a leaf of a name."""
    place = lambda tree: jax.tree.map_with_path(lambda path, x: put(x, *path), tree)
    grads, params = place(params), place(params)
    state = jax.jit(tx.init)(params)
    compiled = jax.jit(step(tx), compiler_options=QUICKLY)
    for _ in range(2):
        params, state = compiled(params, state, grads)
    return params, state


def on_one_device(tx, params, **options):
    return whole(stepped(tx, params, lambda x, key: jnp.asarray(x), **options))


def on_eight_devices(tx, params, place="rows", kind="explicit", **options):
    shape, names = (
        ((4, 2), ("data", "model")) if place == "parts" else ((8,), ("data",))
    )
    mesh = jax.make_mesh(
        shape, names, axis_types=(KINDS[kind],) * len(shape), devices=jax.devices("cpu")
    )
    put = lambda x, key: jax.device_put(
        x, NamedSharding(mesh, PLACES[place].get(key.key, P()))
    )
    with jax.set_mesh(mesh):
        return stepped(tx, params, put, **options)


def whole(tree):
    return jax.tree.map(np.asarray, tree)


QUICK = [
    ("rows", "explicit"),
    ("columns", "automatic"),
    ("stacks", "automatic"),
    ("parts", "explicit"),
]


@pytest.mark.parametrize(
    "case",
    cases([(place, kind) for place in PLACES for kind in KINDS], QUICK),
    ids=" ".join,
)
def test_eight_devices_have_the_bits_of_one_and_of_the_rule_alone_and_arrays_stay_where_they_lie(
    case,
):
    place, kind = case
    params, state = on_eight_devices(mpx.whole_matrices(CUBES), INTEGERS, place, kind)
    alone = on_one_device(CUBES, INTEGERS)
    assert_same_bits(whole((params, state)), alone)
    assert_same_bits(on_one_device(mpx.whole_matrices(CUBES), INTEGERS), alone)
    for name, p in params.items():
        if kind == "explicit" or name in PLACES[place]:  # else XLA may divide it
            spec = NamedSharding(p.sharding.mesh, PLACES[place].get(name, P()))
            assert p.sharding.is_equivalent_to(spec, p.ndim)
            assert optax.tree.get(state, "trace")[name].sharding.is_equivalent_to(
                spec, p.ndim
            )


@pytest.mark.parametrize("kind", KINDS)
def test_no_mesh_needs_to_be_set(kind):
    """Types of arrays say on which mesh they lie."""
    mesh = jax.make_mesh(
        (8,), ("data",), axis_types=(KINDS[kind],), devices=jax.devices("cpu")
    )
    params = {
        "stack": jax.device_put(INTEGERS["stack"], NamedSharding(mesh, P(None, "data")))
    }
    tx = mpx.whole_matrices(CUBES)
    state = tx.init(params)
    compiled = (
        jax.jit(tx.update, compiler_options=QUICKLY)
        .lower(params, state, params)
        .compile()
    )
    assert "all-to-all(" in compiled.as_text()
    updates, _ = tx.update(params, state, params)  # eagerly
    assert updates["stack"].sharding.is_equivalent_to(params["stack"].sharding, 3)
    assert_same_bits(whole(updates), whole(compiled(params, state, params)[0]))


def difference(actual, expected):
    """Return the largest difference of parameters."""
    return max(
        np.abs(actual[0][name] - expected[0][name]).max(initial=0) for name in actual[0]
    )


def test_muon_on_eight_devices_differs_from_one_and_from_itself_alone_by_roundings_of_float32():
    """Kernels for a matrix and for a stack add up in another order. Products in
    bfloat16 are the control.
    """
    alone = on_one_device(muon(), NORMAL)
    assert difference(on_one_device(mpx.whole_matrices(muon()), NORMAL), alone) < 1e-6
    assert (
        difference(whole(on_eight_devices(mpx.whole_matrices(muon()), NORMAL)), alone)
        < 1e-6
    )
    assert (
        difference(
            on_one_device(mpx.whole_matrices(muon(), products="bf16"), NORMAL), alone
        )
        > 1e-5
    )


# ---- what runs where


def traced(tx, params, mesh=None):
    """Return the equations of an update; the mesh need not exist."""
    with jax.sharding.use_abstract_mesh(mesh or AbstractMesh((), ())):
        return list(
            all_eqns(
                jax.make_jaxpr(tx.update)(
                    params, jax.eval_shape(tx.init, params), params
                )
            )
        )


@pytest.mark.parametrize(
    ("stacks", "devices", "rounds"),
    [
        ([126], 8, 16),
        ([36], 8, 5),
        ([64], 8, 8),
        ([0] * 7, 64, 1),
        ([0] * 65, 64, 2),
        ([5, 6, 8], 8, 3),
    ],
)
def test_a_device_has_at_most_one_matrix_more_than_another(stacks, devices, rounds):
    """Zero stands for a matrix without a stack. All are of one shape."""
    mesh = AbstractMesh((devices,), ("data",), axis_types=(AxisType.Auto,))
    params = [
        jax.ShapeDtypeStruct((n, 16, 32) if n else (16, 32), np.float32) for n in stacks
    ]
    eqns = traced(mpx.whole_matrices(CUBES), params, mesh)
    assert (
        sum(eqn.params["length"] for eqn in eqns if eqn.primitive.name == "scan")
        == rounds
    )
    sent = [eqn for eqn in eqns if eqn.primitive.name == "sharding_constraint"]
    assert ("data",) in {eqn.params["sharding"].spec[:1] for eqn in sent}


def test_matrices_without_a_stack_share_rounds_though_each_has_small_numbers_of_its_own():
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
    params = [jax.ShapeDtypeStruct((16, 32), np.float32)] * 7
    eqns = traced(mpx.whole_matrices(of_rows()), params, mesh)
    assert [eqn.params["length"] for eqn in eqns if eqn.primitive.name == "scan"] == [1]


@pytest.mark.parametrize("products", ["bf16", "f16"])
def test_products_are_in_few_bits_and_norms_in_float32(products):
    eqns = traced(mpx.whole_matrices(muon(), products=products), NORMAL)
    dtypes = lambda name: {
        eqn.invars[0].aval.dtype for eqn in eqns if eqn.primitive.name == name
    }
    assert dtypes("dot_general") == {mpx.get_policy(products).compute_dtype}
    assert dtypes("reduce_sum") == {np.dtype(np.float32)}


def test_what_is_sent_is_rounded_once_there_and_once_back():
    """A cube of rounded integers is exact; its results have 8 bits then, and 2^8 is the
    first that is rounded.
    """
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
    eqns = traced(mpx.whole_matrices(CUBES, sent="bf16"), INTEGERS, mesh)
    sent = [
        eqn.invars[0].aval.dtype
        for eqn in eqns
        if eqn.primitive.name == "sharding_constraint"
    ]
    assert set(sent) == {np.dtype(jnp.bfloat16)}
    rule = optax.stateless(lambda g, p: jax.tree.map(lambda x: x @ x.mT @ x, g))
    (plain, _), (rounded, _) = (
        tx.update([INTEGERS["stack"]], ())
        for tx in (rule, mpx.whole_matrices(rule, sent="bf16"))
    )
    assert_same_bits(rounded[0], mpx.formats.round_to(plain[0], jnp.bfloat16))
    assert (rounded[0] != plain[0]).any()


def test_a_rule_without_products_and_products_of_the_state_alone_are_left_alone():
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
    of_state = optax.GradientTransformation(
        lambda params: jnp.eye(4),
        lambda g, state, params=None: (g, state @ jnp.ones((4, 4)) @ state),
    )
    for tx in (optax.adam(1e-3), of_state):
        assert not any(
            eqn.primitive.name == "scan"
            for eqn in traced(mpx.whole_matrices(tx), NORMAL, mesh)
        )


def heads(params):
    return jax.tree.map(lambda p: MuonDimensionNumbers(1, (2, 3)), params)


def shampoo():
    """Return a rule with matrices in its state, of which it computes roots."""

    def root(x):
        values, vectors = jnp.linalg.eigh(
            x + jnp.broadcast_to(0.1 * jnp.eye(x.shape[-1]), x.shape)
        )
        return (vectors * values[..., None, :] ** -0.25) @ vectors.mT

    def init(params):
        square = lambda p, n: jnp.zeros((*p.shape[:-2], n, n))
        return jax.tree.map(
            lambda p: (square(p, p.shape[-2]), square(p, p.shape[-1])), params
        )

    def update(grads, state, params=None):
        leaves, treedef = jax.tree.flatten(grads)
        state = [
            (left + g @ g.mT, right + g.mT @ g)
            for g, (left, right) in zip(
                leaves, treedef.flatten_up_to(state), strict=True
            )
        ]
        updates = [
            -0.01 * root(left) @ g @ root(right)
            for g, (left, right) in zip(leaves, state, strict=True)
        ]
        return treedef.unflatten(updates), treedef.unflatten(state)

    return optax.GradientTransformation(init, update)


COEFFICIENTS = np.array([[3.4, -4.8, 2.0], [2.8, -3.1, 1.2]], np.float32)


def newton_schulz(x):
    """Iterate without a loop of JAX, with coefficients in an array."""
    x = x / jnp.linalg.norm(x, axis=(-2, -1), keepdims=True)
    for a, b, c in jnp.asarray(COEFFICIENTS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return -0.01 * x


def of_rows():
    """Return a rule that keeps a number for each row of what it multiplied, like
    NorMuon.
    """

    def update(grads, state, params=None):
        cubes = jax.tree.map(lambda x: x @ x.mT @ x, grads)
        state = jax.tree.map(
            lambda v, x: 0.9 * v + 0.1 * (x * x).mean(-1, keepdims=True), state, cubes
        )
        return (
            jax.tree.map(lambda x, v: -0.01 * x / jnp.sqrt(v + 1e-8), cubes, state),
            state,
        )

    init = lambda params: jax.tree.map(lambda p: jnp.zeros((*p.shape[:-1], 1)), params)
    return optax.GradientTransformation(init, update)


MATRICES = {name: x for name, x in NORMAL.items() if name in ("stack", "one")}
RULES = {
    "coefficients": (muon(ns_coeffs=((3.4, -4.8, 2.0), (2.8, -3.1, 1.2))), MATRICES),
    "spectral": (muon(preconditioning="spectral"), MATRICES),
    "aol": (muon(preconditioning="aol"), MATRICES),
    "norm of a stack": (muon(adaptive=True), MATRICES),
    "no nesterov": (muon(nesterov=False, consistent_rms=0.2), MATRICES),
    "clipped inside": (optax.chain(optax.clip_by_global_norm(0.1), muon()), NORMAL),
    "clipped after": (optax.chain(muon(), optax.clip_by_global_norm(0.1)), NORMAL),
    "heads": (
        optax.contrib.muon(1e-2, muon_weight_dimension_numbers=heads), {"qkv": NORMAL["experts"].reshape(6, 16, 4, 8)}
    ),
    "trust ratio": (optax.chain(muon(), optax.scale_by_trust_ratio(), optax.scale(1e-2)), MATRICES),
    "norms of columns": (optax.chain(muon(), optax.adaptive_grad_clip(0.1)), {"one": NORMAL["one"]}),
    "numbers of rows": (of_rows(), MATRICES),
    "no layers": (muon(), MATRICES | {"none": np.zeros((0, 16, 32), np.float32)}),
    "shampoo": (shampoo(), MATRICES),
    "by hand": (optax.stateless(lambda g, p: jax.tree.map(newton_schulz, g)), MATRICES),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", cases(RULES, ["norm of a stack", "heads", "trust ratio", "by hand"])
)
def test_every_rule_that_multiplies_matrices_computes_on_eight_devices_what_it_computes_alone(
    name,
):
    rule, params = RULES[name]
    alone = on_one_device(rule, params)
    assert (
        difference(
            whole(on_eight_devices(mpx.whole_matrices(rule), params, kind="automatic")),
            alone,
        )
        < 2e-5
    )


SEVERAL = (
    "heads",
    "shampoo",
    "norms of columns",
    "numbers of rows",
)  # of these more than a leaf is sent, or of no stack


@pytest.mark.parametrize("name", [name for name in RULES if name not in SEVERAL])
def test_one_array_of_a_leaf_goes_there_and_one_comes_back(name):
    """Of Shampoo the roots go, too."""
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
    eqns = traced(mpx.whole_matrices(RULES[name][0]), {"stack": NORMAL["stack"]}, mesh)
    assert [eqn.primitive.name for eqn in eqns].count("sharding_constraint") == 2


# ---- with the rest of mpx


def recipe(*around, **options):
    return mpx.chain(
        mpx.mixed_precision("bf16-split24-8bit", key=jax.random.key(0)),
        *around,
        mpx.whole_matrices(**options),
        CUBES,
    )


CHAINS = {
    "recipe": (recipe(), jnp.bfloat16),
    "fused": (recipe(), jnp.bfloat16),
    "8 bits inside": (
        mpx.whole_matrices(mpx.low_precision_state(CUBES, {"trace": mpx.Blockwise8bit(16)}, min_size=256)), np.float32
    ),
    "scaled": (mpx.loss_scaling(mpx.master_weights(mpx.whole_matrices(CUBES))), np.float16),
    "accumulated": (optax.MultiSteps(mpx.whole_matrices(CUBES), 2), np.float32),
    "kahan": (mpx.chain(mpx.upcast(), mpx.whole_matrices(), CUBES, mpx.kahan_summation()), jnp.bfloat16),
}  # fmt: skip


@pytest.mark.parametrize("name", cases(CHAINS, ["recipe", "scaled"]))
def test_it_goes_into_wrappers_and_around_states_in_few_bits(name):
    tx, dtype = CHAINS[name]
    params = jax.tree.map(lambda x: x.astype(dtype), INTEGERS)
    step = (
        (lambda tx: lambda p, s, g: mpx.fused_update(tx)(g, s, p))
        if name == "fused"
        else stepper
    )
    on_eight = on_eight_devices(tx, params, place="stacks", kind="automatic", step=step)
    unsigned = lambda tree: jax.tree.map(
        lambda x: x + np.zeros((), x.dtype), tree
    )  # MultiSteps makes -0.0 of a sum
    assert_same_bits(unsigned(whole(on_eight)), unsigned(on_one_device(tx, params)))
    mpx.check_chain(tx)


def test_the_state_is_that_of_the_rule_without_it_and_the_element_is_the_wrapper():
    params = jax.tree.map(jnp.asarray, NORMAL)
    alone = mpx.chain(mpx.master_weights("split"), muon())
    tx = mpx.chain(
        mpx.master_weights("split"), mpx.whole_matrices(products="f16"), muon()
    )
    assert types_of(tx.init(params)) == types_of(alone.init(params))
    nested = mpx.master_weights(
        mpx.whole_matrices(muon(), products="f16"), storage="split"
    )
    assert_same_bits(
        tx.update(params, tx.init(params), params),
        nested.update(params, nested.init(params), params),
    )
    _, converted = mpx.convert_state(params, alone.init(params), alone, tx)
    assert_same_bits(converted, tx.init(params))


def test_a_step_with_infinity_in_one_gradient_is_skipped():
    tx = mpx.loss_scaling(mpx.master_weights(mpx.whole_matrices(muon())))
    params = {"one": jnp.ones((4, 8), np.float16)}
    state = tx.init(params)
    updates, skipped = tx.update(
        {"one": params["one"].at[1, 2].set(np.inf)}, state, params
    )
    assert_same_bits(skipped.inner_state, state.inner_state)
    assert not updates["one"].any()


@pytest.mark.slow
def test_zero1_goes_around_it():
    """XLA then divides momentum too, and devices send new parameters."""
    mesh = jax.make_mesh(
        (8,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")
    )
    rule = mpx.master_weights(mpx.whole_matrices(CUBES))
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), INTEGERS)
    now, state = on_eight_devices(
        mpx.zero1(rule, mesh), params, "everywhere", "automatic"
    )
    assert_same_bits(whole((now, state)), on_one_device(rule, params))
    assert optax.tree.get(state, "trace")["stack"].sharding.spec == P("data")


def test_a_run_saved_on_eight_devices_goes_on_on_four(tmp_path):
    """The bound is two units of a master of 24 bits, rounded at random. A run with new
    momentum is the control.
    """
    tx = mpx.chain(
        mpx.mixed_precision("bf16-split24-8bit", key=jax.random.key(0)),
        mpx.whole_matrices(),
        muon(),
    )
    start, *gradients = (
        np.random.default_rng(0).normal(size=(4, 9, 16, 32)).astype(np.float32)
    )
    put = lambda x: {"stack": jax.device_put(x, P(None, "data"))}
    step = jax.jit(stepper(tx), compiler_options=QUICKLY)

    def trained(run, gradients):
        for grads in gradients:
            run = step(*run, put(grads))
        return run

    masters = lambda run: np.asarray(mpx.master_params(*run)["stack"])
    with jax.set_mesh(fsdp.mesh_of(jax.devices("cpu"))):
        params = put((0.1 * start).astype(jnp.bfloat16))
        saved = trained((params, tx.init(params)), gradients[:2])
        ocp.save(tmp_path / "saved", saved)
        expected = masters(trained(saved, gradients[2:]))
    with jax.set_mesh(fsdp.mesh_of(jax.devices("cpu")[:4])):
        restored = ocp.load(tmp_path / "saved", fsdp.like(saved))
        anew = restored[0], tx.init(restored[0])
        far, near = (
            np.abs(masters(trained(run, gradients[2:])) - expected).max()
            for run in (anew, restored)
        )
    assert np.dtype(np.int8) in [
        leaf.dtype for leaf in jax.tree.leaves(saved)
    ]  # momentum
    assert near < 2e-5 < 1e-3 < far


# ---- what it refuses


def test_what_it_cannot_do_is_refused():
    refused = [
        (
            lambda: mpx.whole_matrices(muon(), sent="f16"),
            "`whole_matrices`: `sent` must be bfloat16 or float32, but",
        ),
        (lambda: mpx.whole_matrices(muon(), products="bf17"), "'bf17'"),
        (
            lambda: mpx.whole_matrices(None),
            "`whole_matrices` needs an Optax gradient transformation",
        ),
    ]
    for call, text in refused:
        with pytest.raises((ValueError, TypeError), match=text):
            call()


TWO = optax.stateless(
    lambda g, p: {"one": g["one"] @ g["other"].T @ g["one"], "other": g["other"]}
)
LAST = optax.contrib.muon(
    1e-2,
    muon_weight_dimension_numbers=lambda p: jax.tree.map(
        lambda _: MuonDimensionNumbers(), p
    ),
)
CUBES_ALONE = optax.stateless(lambda g, p: jax.tree.map(lambda x: x @ x.mT @ x, g))
AFTER = optax.chain(
    CUBES_ALONE, optax.adaptive_grad_clip(0.1)
)  # a norm over the stack for each place in a matrix
BETWEEN = optax.stateless(
    lambda g, p: jax.tree.map(lambda x: (y := x @ x.mT) / jnp.linalg.norm(y) @ x, g)
)


@pytest.mark.parametrize(
    ("rule", "names", "text"),
    [
        (TWO, ["one", "other"], "multiplies them with each other: one, other. What runs"),
        (optax.MultiSteps(muon(), 2), ["one", "other"], "in one operation.*`optax.MultiSteps`, goes around"),
        (LAST, ["stack"], r"'stack' is \[8, 16, 32\]. The rule multiplies 32 matrices of it.*Move these to the front"),
        (AFTER, ["stack"], r"'stack' is .* multiplies 8 matrices .* put what mixes them around `whole_matrices`"),
        (BETWEEN, ["stack"], r"'stack' is .* multiplies 8 matrices of it, but not each by itself"),
    ],
    ids=["two leaves", "a condition", "the stack last", "norms over the stack", "a norm between products"],
)  # fmt: skip
def test_products_that_are_not_of_one_matrix_are_refused(rule, names, text):
    params = {name: NORMAL[name] for name in names}
    tx = mpx.whole_matrices(rule)
    with pytest.raises(ValueError, match=text):
        jax.eval_shape(
            lambda params: tx.update(params, tx.init(params), params), params
        )


def test_a_mesh_that_is_manual_or_lacks_the_axis_is_refused():
    mesh = jax.make_mesh(
        (8,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")
    )
    params, tx = {"one": jnp.ones((16, 8))}, mpx.whole_matrices(CUBES, axis="model")
    step = lambda params: tx.update(params, tx.init(params), params)
    with (
        jax.set_mesh(mesh),
        pytest.raises(
            ValueError, match=r"has the axes \('data',\), but `axis` is \('model',\)"
        ),
    ):
        step(params)
    with pytest.raises(ValueError, match=r"this is inside `jax.shard_map` over 'data'"):
        jax.eval_shape(
            jax.shard_map(
                step, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
            ),
            params,
        )
    with pytest.raises(
        TypeError,
        match=r"`axis` must be a name of a mesh's axis, or several, but got Mesh",
    ):
        mpx.whole_matrices(CUBES, axis=mesh)


# ---- precision


def error_of_update(products, scale=1.0, power=1):
    """Return how far Muon's update is from float32's, for singular values that fall
    like `i**-power`.
    """
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.normal(size=(n, 64)))[0] for n in (64, 128))
    grads = {
        "w": jnp.asarray(
            scale * (left * np.arange(1.0, 65) ** -power) @ right.T, np.float32
        )
    }
    updates = [
        np.asarray(
            jax.jit(tx.update, compiler_options=QUICKLY)(grads, tx.init(grads), grads)[
                0
            ]["w"]
        )
        for rule in [optax.contrib.muon(1.0, eps=1e-30)]
        for tx in (rule, mpx.whole_matrices(rule, products=products))
    ]
    assert np.isfinite(updates[1]).all()
    return np.linalg.norm(updates[1] - updates[0]) / np.linalg.norm(updates[0])


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_products_in_float16_are_nearer_to_float32_than_in_bfloat16_for_small_and_large_gradients(
    scale,
):
    """Muon divides by the norm first, in float32: nothing overflows, and nothing
    vanishes.
    """
    assert error_of_update("f16", scale) < 4e-3 < error_of_update("bf16", scale)
