"""`import mpx as jmp`: jmp's names, jmp's own test suite, and where the two differ on
purpose.
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

import mpx

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
    # jmp's tests are older than strict promotion, and their own arithmetic overflows
    # float32 in NumPy 2.
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        warnings.catch_warnings(),
    ):
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
    # Itself again.
    assert (
        importlib.import_module("jmp._src.policy").Policy
        is jmp.Policy
        is not mpx.Policy
    )
    for name in jmp.__all__:
        # A base class here, there a union.
        is_class = isinstance(getattr(jmp, name), type) or name == "LossScale"
        assert isinstance(getattr(mpx, name), type) == is_class


def test_where_mpx_differs_on_purpose():
    loss, x, w = jnp.float16(4.0), jnp.ones(2, jnp.float8_e4m3fn), jnp.ones(2)
    assert mpx.StaticLossScale(2.0**16).scale(loss) == 2.0**18  # in float32
    assert jnp.isinf(jmp.StaticLossScale(2.0**16).scale(loss))
    assert mpx.cast_to_full(x) is x  # 8-bit floats are left alone
    assert jmp.cast_to_full(x).dtype == np.float32
    ours, theirs = mpx.cast_to_half([w, w]), jmp.cast_to_half([w, w])
    assert ours[0] is ours[1]  # tied arrays stay tied
    assert theirs[0] is not theirs[1]
    # In jmp the last one of two keys wins.
    assert jmp.get_policy("p=f32,p=bf16").param_dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="gives 'p' twice"):
        mpx.get_policy("p=f32,p=bf16")
