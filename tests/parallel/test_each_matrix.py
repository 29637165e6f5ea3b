"""Check `each_matrix` on eight devices: what is computed, what is sent, where arrays lie,
and what it refuses.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import mpx
from tests.helpers import QUICKLY, all_eqns, assert_same_bits, cases, stepper

pytestmark = pytest.mark.optax_promotion

KINDS = {"automatic": AxisType.Auto, "explicit": AxisType.Explicit}
# Stacks that eight devices divide and do not, experts in layers, two matrices alike.
SHAPES = {
    "stack": (8, 16, 32),
    "odd": (3, 32, 16),
    "experts": (2, 8, 16, 32),
    "one": (32, 16),
    "other": (32, 16),
}
PLACES = {
    "rows": {
        "stack": P(None, "data"),
        "odd": P(None, "data"),
        "experts": P(None, None, "data"),
        "one": P("data"),
        "other": P("data"),
    },
    "columns": {
        "stack": P(None, None, "data"),
        "odd": P(None, None, "data"),
        "one": P(None, "data"),
    },
    "stacks": {"stack": P("data"), "experts": P(None, "data")},
    "everywhere": {},
    "parts": {
        "stack": P(None, "data", "model"),
        "odd": P(None, "model", "data"),
        "experts": P(None, "model", "data"),
        "one": P("model"),
        "other": P(None, ("model", "data")),
    },
}
RANDOM = np.random.default_rng(0)
# Products of small integers are exact, in whatever order they are added up.
INTEGERS = {
    name: RANDOM.integers(-2, 3, shape).astype(np.float32)
    for name, shape in SHAPES.items()
}
NORMAL = {
    name: RANDOM.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()
}


def cube(x):
    return x @ x.T @ x


def of_all(fun, tree):
    """Map a function over all matrices of a tree, without mpx."""

    def of_leaf(x):
        return jax.vmap(fun)(x.reshape(-1, *x.shape[-2:])).reshape(x.shape)

    return jax.tree.map(of_leaf, tree)


CUBES = mpx.each_matrix(cube)
ALONE = optax.stateless(lambda updates, _: of_all(cube, updates))


def around(element):
    return optax.chain(
        optax.trace(0.5), element, optax.add_decayed_weights(0.5), optax.scale(-0.25)
    )


def mesh_of(place, kind):
    shape, names = ((4, 2), ("data", "model")) if place == "parts" else (8, ("data",))
    shape = shape if isinstance(shape, tuple) else (shape,)
    kinds = (KINDS[kind],) * len(shape)
    return jax.make_mesh(shape, names, axis_types=kinds, devices=jax.devices("cpu"))


def placed(tree, place, mesh):
    def put(path, x):
        return jax.device_put(
            x, NamedSharding(mesh, PLACES[place].get(path[0].key, P()))
        )

    return jax.tree.map_with_path(put, tree)


def stepped(tx, params, steps=2):
    """Return parameters and state after some steps by one gradient."""
    state = jax.jit(tx.init)(params)
    compiled = jax.jit(stepper(tx), compiler_options=QUICKLY)
    grads = params
    for _ in range(steps):
        params, state = compiled(params, state, grads)
    return params, state


def program(tx, params):
    """Return the text of the program of an update, for the devices of its arrays."""
    update = jax.jit(lambda g, p: tx.update(g, tx.init(p), p)[0])
    return update.lower(params, params).compile(compiler_options=QUICKLY).as_text()


def sends(text):
    """Return the kinds of collectives in a program."""
    kinds = "all-to-all|all-gather|all-reduce|collective-permute|reduce-scatter"
    return set(re.findall(rf" ({kinds})(?:-start)?\(", text))


def whole(tree):
    return jax.tree.map(np.asarray, tree)


QUICK = [
    ("rows", "explicit"),
    ("columns", "automatic"),
    ("stacks", "automatic"),
    ("parts", "explicit"),
    ("everywhere", "automatic"),
]


@pytest.mark.parametrize(
    "case",
    cases([(place, kind) for place in PLACES for kind in KINDS], QUICK),
    ids=" ".join,
)
def test_eight_devices_have_the_bits_of_one_and_arrays_stay_where_they_lie(case):
    place, kind = case
    mesh = mesh_of(place, kind)
    with jax.set_mesh(mesh):
        params, state = stepped(around(CUBES), placed(INTEGERS, place, mesh))
    assert_same_bits(whole((params, state)), whole(stepped(around(ALONE), INTEGERS)))
    for name, p in params.items():
        if kind == "explicit" or name in PLACES[place]:  # else XLA may divide it
            spec = NamedSharding(mesh, PLACES[place].get(name, P()))
            assert p.sharding.is_equivalent_to(spec, p.ndim)


@pytest.mark.parametrize("kind", KINDS)
def test_no_mesh_needs_to_be_set_and_it_runs_eagerly(kind):
    params = placed(INTEGERS, "rows", mesh_of("rows", kind))
    updates, _ = CUBES.update(params, CUBES.init(params), params)
    assert_same_bits(whole(updates), whole(of_all(cube, INTEGERS)))
    assert updates["stack"].sharding.is_equivalent_to(params["stack"].sharding, 3)
    assert sends(program(CUBES, params)) == {"all-to-all"}


@pytest.mark.parametrize("kind", KINDS)
def test_what_devices_have_whole_is_not_sent(kind):
    """Experts that are divided along experts, and stacks along layers. Divided by rows
    they are: the negative control.
    """
    owned = {name: INTEGERS[name] for name in ("stack", "experts")}
    mesh = mesh_of("stacks", kind)
    assert not sends(program(CUBES, placed(owned, "stacks", mesh)))
    assert sends(program(CUBES, placed(owned, "rows", mesh)))


def test_a_stack_that_an_axis_divides_is_dealt_out_along_the_others_alone():
    """Of a mesh of 4 x 2 the first axis divides experts and the second one rows: only
    groups of two devices send.
    """
    mesh = mesh_of("parts", "automatic")
    x = jax.device_put(
        INTEGERS["experts"], NamedSharding(mesh, P(None, "data", "model"))
    )
    text = program(CUBES, {"experts": x})
    assert sends(text) == {"all-to-all"}
    # Listed, of some size in a grid, or along axes of a mesh.
    form = r"all-to-all.*?replica_groups=(\{\{.*?\}\}|\[[\d,]+\]|mesh\[.*?\] *\{.*?\})"
    groups = re.findall(form, text)
    assert groups
    pairs = r"\{\{\d,\d\}|\[4,2\]|mesh\[.*\] *\{'?model'?\}"
    assert all(re.match(pairs, group) for group in groups), groups


@pytest.mark.parametrize(
    "behind",
    [
        lambda x: x / (jnp.sqrt(jnp.mean(x**2)) + 1),
        lambda x: x / (1 + jnp.abs(x).mean()),
        lambda x: x - x.mean(0, keepdims=True),
    ],
    ids=["block rms", "mean of a leaf", "less the mean of a stack"],
)
def test_what_mixes_a_leaf_behind_it_sees_the_whole_leaf(behind):
    """A rule that was searched for its matrices took such means for parts of one."""
    mixes = optax.stateless(lambda updates, _: jax.tree.map(behind, updates))
    mesh = mesh_of("rows", "automatic")
    with jax.set_mesh(mesh):
        eight = stepped(optax.chain(CUBES, mixes), placed(NORMAL, "rows", mesh), 1)[0]
    alone = stepped(optax.chain(ALONE, mixes), NORMAL, 1)[0]
    for name in NORMAL:
        np.testing.assert_allclose(eight[name], alone[name], rtol=1e-4, atol=1e-4)


def muon(**options):
    return optax.chain(
        optax.ema(0.95), mpx.each_matrix(mpx.newton_schulz, **options), optax.scale(-1)
    )


def test_the_chain_of_muon_differs_from_optaxs_muon_by_roundings_of_float32():
    """Kernels of a matrix and of a stack add up in another order. Products in bfloat16
    are the control.
    """
    numbers = jax.tree.map(lambda _: MuonDimensionNumbers(-2, -1), NORMAL)
    optaxs = optax.chain(
        optax.contrib.scale_by_muon(nesterov=False, weight_dimension_numbers=numbers),
        optax.scale(-1),
    )
    alone = stepped(optaxs, NORMAL)[0]
    mesh = mesh_of("rows", "explicit")
    with jax.set_mesh(mesh):
        eight = stepped(muon(), placed(NORMAL, "rows", mesh))[0]
    rounded = stepped(muon(products="bf16"), NORMAL)[0]
    one = stepped(muon(), NORMAL)[0]

    def difference(params):
        return max(np.abs(params[name] - alone[name]).max() for name in NORMAL)

    assert difference(one) < 5e-5
    assert difference(whole(eight)) < 5e-5
    assert difference(rounded) > 1e-3


@pytest.mark.parametrize("products", ["bf16", "f16"])
def test_products_are_in_few_bits_and_norms_in_float32(products):
    tx = mpx.each_matrix(mpx.newton_schulz, products=products)
    update = jax.make_jaxpr(lambda g: tx.update(g, tx.init(g)))
    eqns = list(all_eqns(update(NORMAL)))

    def dtypes(name):
        found = [eqn for eqn in eqns if eqn.primitive.name == name]
        return {eqn.invars[0].aval.dtype for eqn in found}

    assert dtypes("dot_general") == {mpx.get_policy(products).compute_dtype}
    assert dtypes("reduce_sum") == {np.dtype(np.float32)}


def test_what_is_sent_is_rounded_once_there_and_once_back():
    """A cube of small integers is exact in float32. 2^8 + 1 is the first integer that
    bfloat16 has not.
    """
    tx = mpx.each_matrix(cube, sent="bf16")
    mesh = mesh_of("rows", "explicit")
    params = placed(INTEGERS, "rows", mesh)
    text = program(tx, params)
    assert sends(text) == {"all-to-all"}
    exact = of_all(cube, INTEGERS)
    expected = jax.tree.map(lambda x: mpx.formats.round_to(x, jnp.bfloat16), exact)
    for given in (params, INTEGERS):
        updates, _ = tx.update(given, tx.init(given), given)
        assert_same_bits(whole(updates), whole(expected))
    assert any((expected[name] != exact[name]).any() for name in exact)


def test_axes_that_are_not_named_compute_the_same_matrices():
    mesh = mesh_of("parts", "automatic")
    tx = mpx.each_matrix(cube, axis="data")
    params = placed(INTEGERS, "parts", mesh)
    assert "all-gather" in sends(program(tx, params))
    updates, _ = tx.update(params, tx.init(params), params)
    assert_same_bits(whole(updates), whole(of_all(cube, INTEGERS)))


def test_what_a_function_closes_over_may_be_an_array_or_traced():
    mesh = mesh_of("rows", "automatic")

    @jax.jit
    def update(x, factor):
        tx = mpx.each_matrix(lambda x: cube(x) * factor + offset[None])
        return tx.update(x, tx.init(x), x)[0]

    offset = jnp.arange(32.0)
    x = {"stack": INTEGERS["stack"]}
    found = update(placed(x, "rows", mesh), jnp.float32(2))
    expected = of_all(lambda x: cube(x) * 2 + offset[None], x)
    assert_same_bits(whole(found), whole(expected))


def test_boxes_masked_leaves_and_float16_pass_through():
    tx = optax.partition(
        {"muon": mpx.each_matrix(cube), "other": optax.identity()},
        {"box": "muon", "half": "muon", "bias": "other"},
    )
    params = {
        "box": nn.Partitioned(jnp.ones((2, 4, 4)), (None, "data", None)),
        "half": jnp.ones((4, 4), jnp.float16),
        "bias": jnp.ones(4),
    }
    updates, _ = tx.update(params, tx.init(params), params)
    assert updates["box"].names == (None, "data", None)
    assert updates["box"].value[0, 0, 0] == 16
    assert updates["half"].dtype == jnp.float16
    assert updates["bias"][0] == 1


def test_inside_a_recipe_it_trains_in_16_bits_on_eight_devices():
    recipe = "bf16-split24-8bit"
    tx = mpx.chain(
        mpx.mixed_precision(recipe, key=jax.random.key(0)),
        optax.trace(0.95, nesterov=True),
        mpx.each_matrix(mpx.newton_schulz, products="f16", sent="bf16"),
        optax.scale(-0.01),
    )
    mesh = mesh_of("rows", "explicit")
    params = mpx.get_policy(recipe).cast_to_param(placed(NORMAL, "rows", mesh))
    with jax.set_mesh(mesh):
        trained, _ = stepped(tx, params)
    for name, p in trained.items():
        assert p.dtype == jnp.bfloat16
        assert (p != params[name]).any()
        assert p.sharding.is_equivalent_to(params[name].sharding, p.ndim)


REFUSALS = [
    ("no_function", lambda: mpx.each_matrix(3), "`fun` must be a function, but got 3"),
    ("axis", lambda: mpx.each_matrix(cube, axis=3), "`axis` must be a name"),
    ("sent", lambda: mpx.each_matrix(cube, sent="f16"), "`each_matrix`: `sent`"),
    ("products", lambda: mpx.each_matrix(cube, products="int8"), "autocast"),
    (
        "no_matrix",
        lambda: CUBES.update({"a": {"bias": jnp.ones(3)}}, optax.EmptyState()),
        r"leaves are no matrices. Give them to another rule, by `optax.partition`.\n"
        r"  'a/bias': \[3\]",
    ),
    (
        "another_shape",
        lambda: mpx.each_matrix(lambda x: x @ x.T).update(
            [jnp.ones((2, 3))], optax.EmptyState()
        ),
        r"`fun` must return float32\[2, 3\] for such a matrix, but returned .*\(2, 2\)",
    ),
    ("stack", lambda: mpx.newton_schulz(jnp.ones((2, 3, 4))), "takes one matrix"),
]


@pytest.mark.parametrize(
    ("call", "text"), [row[1:] for row in REFUSALS], ids=[row[0] for row in REFUSALS]
)
def test_what_cannot_be_is_refused_in_words(call, text):
    with pytest.raises((TypeError, ValueError), match=text):
        call()


def test_a_mesh_without_the_axis_is_refused():
    mesh = mesh_of("rows", "explicit")
    tx = mpx.each_matrix(cube, axis="model")
    params = placed(INTEGERS, "rows", mesh)
    with pytest.raises(ValueError, match=r"the mesh has the axes \('data',\)"):
        tx.update(params, tx.init(params), params)


def test_a_part_that_a_device_sees_inside_of_shard_map_is_refused():
    mesh = mesh_of("rows", "explicit")
    update = jax.shard_map(
        lambda x: CUBES.update(x, CUBES.init(x), x)[0],
        mesh=mesh,
        in_specs=P(None, "data"),
        out_specs=P(None, "data"),
    )
    with pytest.raises(ValueError, match=r"inside `jax\.shard_map` over 'data'"):
        update(placed(INTEGERS, "rows", mesh)["stack"])
