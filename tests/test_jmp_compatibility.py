"""`import mpx as jmp`: jmp's names, jmp's own test suite, and equal results on generated trees.

Where the two differ on purpose, a test says so.
"""

import contextlib
import importlib.util
import sys
import types
import unittest
import warnings

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpx
from tests.helpers import assert_same_bits

SUITES = {"policy": 72, "loss_scale": 25}  # how many tests jmp 0.0.4 has


@contextlib.contextmanager
def in_place_of(name, module):
    """Let `import name` give another module, also as an attribute of its package."""
    package_name, attribute = name.rsplit(".", 1)
    package = importlib.import_module(package_name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, name, module)
        patch.setattr(package, attribute, module)
        yield


def mpx_as(name):
    """A module with mpx's names, and the private table at which jmp's tests look."""
    module = types.ModuleType(name)
    vars(module).update({public: getattr(mpx, public) for public in jmp.__all__})
    module.dtype_to_names = importlib.import_module("jmp._src.policy").dtype_to_names
    return module


def jmp_suite(topic, substitute):
    """jmp's own test file, unchanged, against another implementation."""
    with in_place_of(f"jmp._src.{topic}", substitute):
        spec = importlib.util.find_spec(f"jmp._src.{topic}_test")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    assert module.jmp is substitute
    return unittest.defaultTestLoader.loadTestsFromModule(module)


def run_suite(suite):
    result = unittest.TestResult()
    # jmp's tests are older than strict promotion, and their own arithmetic overflows float32 in NumPy 2.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        suite.run(result)
    return result


@pytest.mark.parametrize("topic", SUITES)
def test_jmps_own_test_suite_passes(topic):
    result = run_suite(jmp_suite(topic, mpx_as(f"jmp._src.{topic}")))
    assert result.failures + result.errors == []
    assert result.testsRun == SUITES[topic]
    assert all("not supported on" in reason for _, reason in result.skipped)


@pytest.mark.parametrize(
    ("topic", "name", "broken"),
    [
        ("policy", "get_policy", lambda text: mpx.Policy("f32", "f32", "f32")),
        ("loss_scale", "all_finite", lambda tree: jnp.asarray(True)),
    ],
)
def test_jmps_test_suite_fails_for_a_wrong_implementation(topic, name, broken):
    substitute = mpx_as(f"jmp._src.{topic}")
    setattr(substitute, name, broken)
    assert run_suite(jmp_suite(topic, substitute)).failures


def test_every_public_name_of_jmp_is_one_of_mpx():
    assert importlib.import_module("jmp._src.policy").Policy is jmp.Policy is not mpx.Policy  # itself again
    for name in jmp.__all__:
        is_class = isinstance(getattr(jmp, name), type) or name == "LossScale"  # a base class here, there a union
        assert isinstance(getattr(mpx, name), type) == is_class


NAMES = ["half", "bf16", "bfloat16", "f16", "float16", "full", "f32", "float32"]


@st.composite
def policy_strings(draw):
    keys = draw(st.permutations([["p", "params"], ["c", "compute"], ["o", "output"]]))
    chosen = [draw(st.sampled_from(pair)) for pair in keys[: draw(st.integers(1, 3))]]
    parts = [f"{key}={draw(st.sampled_from(NAMES))}" for key in chosen]
    return draw(st.sampled_from([",".join(parts), draw(st.sampled_from(NAMES))]))


def arrays():
    """Arrays of jax and numpy, and leaves that are none."""
    numbers = st.lists(st.floats(-60_000, 60_000, width=16), min_size=0, max_size=3)
    dtypes = st.sampled_from(["bfloat16", "float16", "float32", "int32", "bool", "complex64"])
    kinds = st.sampled_from([np.asarray, jnp.asarray])
    array = st.builds(lambda values, dtype, kind: kind(np.array(values).astype(dtype)), numbers, dtypes, kinds)
    others = st.sampled_from([None, 3, 2.5, "text", np.float32(1.5), object])
    return st.one_of(array, others)


def trees():
    branch = lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from("abc"), inner, max_size=3), st.tuples(inner, inner)
    )
    return st.recursive(arrays(), branch, max_leaves=6)


def assert_same_tree(actual, expected):
    """Compare structure, bits of arrays, which of them are NumPy's, and the identity of other leaves."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert isinstance(a, jax.Array) == isinstance(e, jax.Array)
        if isinstance(e, (jax.Array, np.ndarray)):
            assert_same_bits(a, e)
        else:
            assert a is e


@given(text=policy_strings(), tree=trees())
@settings(max_examples=60)
def test_policies_cast_any_tree_as_those_of_jmp(text, tree):
    ours, theirs = mpx.get_policy(text), jmp.get_policy(text)
    assert str(ours) == str(theirs)
    assert ours.param_dtype == theirs.param_dtype
    for name in ("cast_to_param", "cast_to_compute", "cast_to_output"):
        assert_same_tree(getattr(ours, name)(tree), getattr(theirs, name)(tree))
    for name in ("cast_to_half", "cast_to_full"):
        assert_same_tree(getattr(mpx, name)(tree), getattr(jmp, name)(tree))


def test_where_mpx_differs_on_purpose():
    loss, x, w = jnp.float16(4.0), jnp.ones(2, jnp.float8_e4m3fn), jnp.ones(2)
    assert mpx.StaticLossScale(2.0**16).scale(loss) == 2.0**18  # in float32
    assert jnp.isinf(jmp.StaticLossScale(2.0**16).scale(loss))
    assert mpx.cast_to_full(x) is x  # 8-bit floats are left alone
    assert jmp.cast_to_full(x).dtype == np.float32
    ours, theirs = mpx.cast_to_half([w, w]), jmp.cast_to_half([w, w])
    assert ours[0] is ours[1]  # tied arrays stay tied
    assert theirs[0] is not theirs[1]
    assert jmp.get_policy("p=f32,p=bf16").param_dtype == jnp.bfloat16  # in jmp the last one of two keys wins
    with pytest.raises(ValueError, match="gives 'p' twice"):
        mpx.get_policy("p=f32,p=bf16")
