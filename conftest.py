"""Set up the whole suite: eight CPU devices, a quick compiler, names for doctests."""

import gc
import importlib.metadata
import os

# Without LLVM's optimizations and XLA's newer emitters a program compiles in a third of
# the time. Where XLA_FLAGS is set, be it empty, on a GPU, and with a later jaxlib
# (which knows no flag for the emitters), programs are compiled as a user's are. So
# `.ci/run` repeats the numerical part.
if (
    "XLA_FLAGS" not in os.environ
    and importlib.metadata.version("jaxlib").startswith("0.10.")
    and not importlib.metadata.entry_points(group="jax_plugins")
):
    os.environ["XLA_FLAGS"] = (
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    )
    os.environ["XLA_FLAGS"] += "--xla_cpu_use_fusion_emitters=false"
# Eight devices share few cores, and devices that exchange arrays were seen to wait for
# each other for ever; likely because a program started before another one had ended. So
# programs run one after the other, and what is stuck for longer than this ends the
# process. (No cache of compiled programs: with one, programs were stuck more often, and
# a fresh run took longer.)
os.environ.setdefault("JAX_CPU_ENABLE_ASYNC_DISPATCH", "false")
if "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    )
    os.environ["XLA_FLAGS"] += (
        " --xla_cpu_collective_call_terminate_timeout_seconds=200"
    )
# Tests compile for GPUs that are not here. JAX reads this when its first backend
# starts, in whatever test that is.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
# By several workers; nothing runs on a TPU.
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx
from mpx._autocast import plan

# How many examples Hypothesis tries: few by default, all in CI.
# `tests.helpers.examples` scales a test's own number.
hypothesis.settings.register_profile(
    "full", deadline=None, derandomize=True, print_blob=True, max_examples=100
)
hypothesis.settings.register_profile(
    "quick", hypothesis.settings.get_profile("full"), max_examples=20
)
hypothesis.settings.load_profile("full" if "MPX_FULL" in os.environ else "quick")

# Tracing makes many objects and little garbage; a search takes 7% of the time.
gc.set_threshold(100_000, 50, 100)


@pytest.fixture(autouse=True)
def one_device_in_sight(request, monkeypatch):
    """The processes of the tests have eight devices; programs are made for one, except
    in tests with the mark.
    """
    if not request.node.get_closest_marker("many_devices"):
        monkeypatch.setattr(plan, "are_several_in_sight", lambda: False)


@pytest.fixture(autouse=True)
def names_for_doctests(doctest_namespace):
    """Give examples in docstrings the names that a user's file has after its
    imports.
    """
    public = {name: getattr(mpx, name) for name in dir(mpx) if not name.startswith("_")}
    formats = {
        name: getattr(mpx.formats, name)
        for name in dir(mpx.formats)
        if not name.startswith("_")
    }
    doctest_namespace.update(
        formats
        | public
        | {"mpx": mpx, "jax": jax, "jnp": jnp, "np": np, "optax": optax}
    )
