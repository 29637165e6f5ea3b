"""Give test files what several of them need: comparison of bits and types, slow cases,
counts of examples.
"""

import contextlib
import importlib.metadata
import socket

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend import core as jex_core

BF16, F16, F32 = np.dtype(jnp.bfloat16), np.dtype(np.float16), np.dtype(np.float32)

# Compiler options for tests that do not judge what LLVM makes of a program: it then
# takes less time to compile.
QUICKLY = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}

# Or rather the option to do without them.
HAS_EMITTERS = importlib.metadata.version("jaxlib").startswith("0.10.")


def cases(names, quick):
    """Return the parameters of a test over names, of which all but the quick ones are
    slow.
    """
    return [
        pytest.param(name, marks=[] if name in quick else pytest.mark.slow)
        for name in names
    ]


def examples(count):
    """Return Hypothesis settings for `count` examples in CI, and for their share of the
    profile elsewhere.
    """
    return hypothesis.settings(
        max_examples=-(-count * hypothesis.settings.default.max_examples // 100)
    )


def free_address():
    """Return an address of this machine with a free port, for `jax.distributed`."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{found.getsockname()[1]}"


def end(*processes, within):
    """Wait for processes, some seconds at most; return their exit codes and what each
    printed.
    """
    try:
        outputs = [process.communicate(timeout=within)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [process.returncode for process in processes], outputs


def bits(x):
    """Return the bits of an array as unsigned integers, so that NaN equals NaN and +0
    differs from -0.
    """
    x = np.asarray(
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    )
    return x.view(f"u{x.dtype.itemsize}") if x.dtype != np.bool_ else x


def assert_same_bits(actual, expected):
    """Raise unless two trees have the same structure, shapes, dtypes and bits."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    actual, expected = jax.tree.map(jnp.asarray, (actual, expected))
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    for (path, a), e in zip(
        jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_array_equal(
            bits(a), bits(e), err_msg=jax.tree_util.keystr(path)
        )


def assert_same_bits_everywhere(
    function, *rows, ways=("jit", "scan", "vmap", "64 bits", "64 bits in jit", "no jit")
):
    """Raise unless a function of one row of each array has its bits of eager mode in
    each way to run it.
    """
    each = [function(*row) for row in zip(*rows, strict=True)]
    stacked, first = jax.tree.map(lambda *x: jnp.stack(x), *each), [x[0] for x in rows]
    run = {
        "jit": lambda: [jax.jit(function)(*row) for row in zip(*rows, strict=True)],
        "scan": lambda: jax.lax.scan(lambda c, row: (c, function(*row)), 0, rows)[1],
        "vmap": lambda: jax.jit(jax.vmap(function))(*rows),
        "64 bits": lambda: function(*first),
        "64 bits in jit": lambda: jax.jit(function)(*first),
        "no jit": lambda: function(*first),
    }
    expected = {"jit": each, "scan": stacked, "vmap": stacked}
    for way in ways:
        with (
            jax.enable_x64("64" in way or jax.config.jax_enable_x64),
            jax.disable_jit(way == "no jit"),
        ):
            assert_same_bits(run[way](), expected.get(way, each[0]))


def stepper(tx):
    """Return a training step of an optimizer: from parameters, state and gradients to
    the new two.
    """

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def types_of(tree):
    """Return structure, shapes, dtypes, weak types and explicit shardings of a tree, to
    compare with `==`.

    Types are text: JAX 0.10 compares its types by identity, and in a long process two
    equal types can be two objects.
    """
    return jax.tree.structure(tree), [
        str(jax.typeof(leaf)) for leaf in jax.tree.leaves(tree)
    ]


def unfused(batched_products=False):
    """Return compiler options for programs in which no two operations become one that
    rounds once.

    Equal arithmetic then has equal bits whatever stands around it. On a CPU each
    operation is a kernel by itself, of which LLVM can make little more: without its
    optimizations, and without a wrapper around each operation, a program compiles in a
    third of the time. Batched products need the wrapper: without it XLA of jax 0.10
    computes others.
    """
    if jax.default_backend() != "cpu":
        return {"xla_disable_hlo_passes": "fusion"}
    passes = {
        "xla_disable_hlo_passes": (
            "fusion" if batched_products else "fusion,fusion-wrapper"
        )
    }
    emitters = {"xla_cpu_use_fusion_emitters": batched_products} if HAS_EMITTERS else {}
    return passes | emitters | {"xla_backend_optimization_level": 0}


def on_an_absent_gpu():
    """Return a context in which kernels are lowered for a GPU that is not here.

    Pallas of JAX 0.12 must know which GPU; that of JAX 0.10 does not ask, and has no
    words to say it.
    """
    if not hasattr(jax.sharding, "AbstractDevice"):
        return contextlib.nullcontext()
    device = jax.sharding.AbstractDevice(
        device_kind="NVIDIA H200", num_cores=132, platform="gpu"
    )
    return jax.sharding.use_abstract_mesh(
        jax.sharding.AbstractMesh((), (), abstract_device=device)
    )


def eight_cpu_devices():
    """Return a mesh of the eight devices that `conftest.py` asks for, on a machine with
    a GPU too.
    """
    return jax.make_mesh(
        (8,),
        ("data",),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=jax.devices("cpu"),
    )


def all_eqns(jaxpr):
    """Yield all equations of a jaxpr and of those inside, in order."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for inner in jex_core.jaxprs_in_params(eqn.params):
            yield from all_eqns(inner)


def float32_round_trips(fun, *args):
    """Return the conversions `f32 -> 16 bits -> f32` in the traced program of a
    function, which a GPU may drop.
    """
    found, narrowed = [], {}
    for eqn in all_eqns(jax.make_jaxpr(fun)(*args)):
        if eqn.primitive.name == "convert_element_type":
            source, target = eqn.invars[0], eqn.outvars[0]
            if source.aval.dtype == np.float32 and target.aval.dtype in (
                jnp.bfloat16,
                np.float16,
            ):
                narrowed[target] = eqn
            if (
                target.aval.dtype == np.float32
                and not hasattr(source, "val")
                and source in narrowed
            ):
                found.append((narrowed[source], eqn))
    return found
