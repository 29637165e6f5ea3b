"""Check `fused_update` wherever a step is: donated, in loops, eagerly, in 64-bit mode,
with bad input.
"""

import contextlib
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType

import mpx
from mpx._fused import fused_update
from tests.fused.helpers import plain_step, tree
from tests.helpers import all_eqns, assert_same_bits, unfused

pytestmark = pytest.mark.optax_promotion

# One moment and a rate that falls: a count reaches kernels as with Adam, and programs
# compile in half the time.
MOMENTUM = optax.sgd(optax.linear_schedule(1e-2, 0, 10), momentum=0.9)
TX = mpx.low_precision_state(MOMENTUM, {"trace": mpx.Blockwise8bit()}, min_size=512)
TX = mpx.master_weights(TX, storage="split")
FUSED = mpx.fused_update(TX, interpret=True)
PLAIN = plain_step(TX)
SHAPES = {"large": (32, 64), "equal": [(128,), (2, 64)], "ragged": (3, 50)}


def start():
    params = tree(0, jnp.bfloat16, shapes=SHAPES)
    return tree(1, jnp.bfloat16, shapes=SHAPES), TX.init(params), params


def compiled(step):
    return jax.jit(step, compiler_options=unfused())


def test_a_donated_step_uses_all_that_is_donated():
    grads, state, params = start()
    expected = compiled(PLAIN)(grads, state, params)
    donated = jax.jit(FUSED, donate_argnums=(1, 2), compiler_options=unfused())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_bits(donated(grads, state, params), expected)
    assert all(x.is_deleted() for x in jax.tree.leaves(params))


def test_an_ensemble_is_trained_under_vmap():
    given = jax.tree.map(
        lambda *x: jnp.stack(x), start(), jax.tree.map(lambda x: x, start())
    )
    assert_same_bits(
        compiled(jax.vmap(FUSED))(*given), compiled(jax.vmap(PLAIN))(*given)
    )


@pytest.mark.slow
@pytest.mark.eager
def test_a_step_outside_of_jit_is_the_same():
    """Operation by operation nothing is fused."""
    grads, _, params = start()
    tx = mpx.master_weights(optax.sgd(0.5, momentum=0.5), storage="split")
    given = grads, tx.init(params), params
    assert_same_bits(
        mpx.fused_update(tx, interpret=True)(*given), plain_step(tx)(*given)
    )


def test_without_a_gpu_a_step_is_that_of_the_transformation():
    """Where the compiler for GPUs is installed, the traced step holds both; the program
    for a CPU does not.
    """
    given = start()
    program = lambda step: compiled(step).lower(*given).as_text()
    assert "triton" not in program(mpx.fused_update(TX))
    assert program(mpx.fused_update(TX)).count("multiply") == program(PLAIN).count(
        "multiply"
    )
    assert_same_bits(compiled(mpx.fused_update(TX))(*given), compiled(PLAIN)(*given))


@pytest.mark.parametrize(
    "update", [mpx.fused_update(TX), FUSED], ids=["without a GPU", "by kernels"]
)
@pytest.mark.parametrize(
    "wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["", "jit", "checkpoint"]
)
def test_a_step_is_not_differentiated_with_or_without_kernels(update, wrap):
    """For a kernel JAX would raise an error of its own, and only where there is a GPU."""
    grads, state, params = start()
    moved = wrap(lambda grads: optax.tree.norm(update(grads, state, params)[0]))
    forward = lambda grads: jax.jvp(moved, (grads,), (grads,))
    for differentiated in (jax.grad(moved), forward):
        with pytest.raises(
            TypeError,
            match=r"`fused_update` cannot be differentiated.* call `tx\.update` and",
        ):
            differentiated(grads)


AROUND = {
    "nothing": contextlib.nullcontext,
    "no jit": jax.disable_jit,
    "no transfers": lambda: jax.transfer_guard("disallow"),
    "axes manual and explicit": lambda: jax.sharding.use_abstract_mesh(
        AbstractMesh(
            (4, 2), ("a", "b"), axis_types=(AxisType.Manual, AxisType.Explicit)
        )
    ),
}


@pytest.mark.parametrize("around", AROUND)
def test_whether_kernels_work_does_not_depend_on_where_it_is_asked(around, monkeypatch):
    """The answer holds for the process: a wrong one would leave all steps to XLA."""
    in_a_kernel = fused_update.in_a_kernel
    interpreted = lambda part, in_place, _, *given: in_a_kernel(
        part, in_place, True, *given
    )
    monkeypatch.setattr(fused_update, "in_a_kernel", interpreted)
    with AROUND[around]():
        assert fused_update._kernels_work.__wrapped__()


def kernels_of(tx, shapes, dtype=jnp.bfloat16):
    params = tree(0, dtype, shapes=shapes)
    jaxpr = jax.make_jaxpr(mpx.fused_update(tx, interpret=True))(
        params, tx.init(params), params
    )
    return sum(eqn.primitive.name == "pallas_call" for eqn in all_eqns(jaxpr)), jaxpr


def programs_of(jaxpr):
    """Return how many programs there are with a kernel in them: calls of the same one
    share it.
    """
    calls = [
        eqn.params["jaxpr"] for eqn in all_eqns(jaxpr) if eqn.primitive.name == "jit"
    ]
    return len(
        {
            id(call.jaxpr)
            for call in calls
            if any(e.primitive.name == "pallas_call" for e in call.eqns)
        }
    )


def test_leaves_of_equal_shape_share_the_program_of_a_kernel():
    shapes = {"a": (64, 32), "b": (64, 32), "c": (128, 16), "d": (128, 32)}
    count, jaxpr = kernels_of(TX, shapes)
    assert count == 4
    assert programs_of(jaxpr) == 2


def test_leaves_that_a_rule_treats_otherwise_share_none():
    """Scale one leaf by a literal of its own, the negative control."""
    scales = {"a": 0.5, "b": 0.25}
    tx = optax.stateless(
        lambda updates, params: {
            name: updates[name] * scale for name, scale in scales.items()
        }
    )
    _, jaxpr = kernels_of(tx, {"a": (32, 64), "b": (32, 64)})
    assert programs_of(jaxpr) == 2
