"""`mpx.doctor`: whether mpx is exact on a machine, and what stands in the way there."""

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx
from mpx import doctor
from mpx.doctor import Check

BFLOAT16, FLOAT16 = np.dtype(jnp.bfloat16), np.dtype(np.float16)

# A GPU on which nothing is wrong.
GPU = doctor.Diagnosis(
    {"python": "3.12.0", "jax": "0.10.2"},
    "/env/site-packages/mpx",
    devices={"NVIDIA H200": 8},
    checks=(
        Check("masters are exact", True),
        Check("`round_to` bfloat16 after a sum", True),
    ),
)
EXACT = "mpx is exact to the bit on this machine."


def test_mpx_is_exact_on_this_machine_and_what_is_found_is_printed_and_goes_into_json():
    examined = doctor.examine()
    assert (examined.is_exact, len(examined.checks), examined.verdict) == (
        True,
        10,
        EXACT,
    )
    found = json.loads(json.dumps(examined.as_dict()))
    assert found["versions"]["jax"] == jax.__version__
    assert found["package"] == str(pathlib.Path(mpx.__file__).parent)
    assert found["is_exact"]
    for part in ("masters split in two keep 1,000 updates ", jax.__version__, "x cpu"):
        assert part in str(examined)


def test_without_a_device_it_says_which_was_asked_for_and_what_to_do(monkeypatch):
    def fail():
        raise AssertionError

    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setattr(jax, "devices", fail)
    with pytest.raises(
        RuntimeError,
        match=r"no device \(JAX_PLATFORMS=cuda\): AssertionError\(\); install the jax",
    ):
        doctor.examine()


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16])
def test_each_rounding_is_on_operands_that_are_exact_and_a_program_that_loses_it_fails(
    dtype,
):
    """The negative control rounds nothing. A subnormal number is its own rounding:
    there the fault is a flush.
    """
    for name, program, operands, expected in doctor._roundings(dtype, lambda x: x):
        assert np.array_equal(expected, expected.astype(dtype).astype(np.float32)), name
        program = (lambda x: 0 * x) if "subnormal" in name else program
        lost = doctor._check(name, lambda: jax.jit(program)(*operands), expected)  # noqa: B023
        assert re.fullmatch(
            rf"\d+ of {expected.size} numbers are wrong", lost.detail
        ), name
        if "product" in name:
            a, b = (operand.astype(np.float64) for operand in operands)
            # All partial sums are multiples of 2^-12, of 24 bits.
            assert np.max(np.abs(a) @ np.abs(b)) * 64**2 < 2**24


@pytest.mark.optax_promotion
def test_a_training_run_without_mpx_fails_the_check_that_mpx_passes_and_so_does_an_error():
    """Add updates of up to 2^-11 to a bfloat16 1, which change nothing."""
    naive = doctor._check(
        "naive", lambda: doctor._trained(optax.identity()), doctor._SUMS
    )
    assert naive.detail.endswith("of 64 numbers are wrong")
    assert not naive.exact
    assert doctor._check("claim", lambda: 1 / 0, doctor._SUMS) == Check(
        "claim", False, "ZeroDivisionError: division by zero"
    )


def test_the_verdict_comes_first():
    wrong = dataclasses.replace(
        GPU, checks=(*GPU.checks, Check("a claim", False, "3 of 64"))
    )
    for found, is_exact, verdict in (
        (GPU, True, EXACT),
        (wrong, False, "mpx is NOT exact on this machine: 1 of 3"),
    ):
        assert found.is_exact == is_exact
        assert str(found).startswith(verdict)
        assert ("NO: 3 of 64" in str(found)) != is_exact
        assert "8 x NVIDIA H200" in str(found)


def test_a_plugin_of_jax_that_fails_is_a_line_and_no_traceback(tmp_path):
    """The compiler for GPUs fails so without CUDA's libraries."""
    folder = tmp_path / "jax_plugins" / "broken"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(
        "def initialize(): raise RuntimeError('no cuSPARSE')"
    )
    code = "import mpx.doctor; print(mpx.doctor.examine())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ
        | {
            "PYTHONPATH": f"{tmp_path}{os.pathsep}{pathlib.Path(mpx.__file__).parents[1]}"
        },
        capture_output=True,
        text=True,
    )
    assert "Traceback" not in done.stdout + done.stderr
    assert "jax_plugins.broken: RuntimeError: no cuSPARSE" in done.stdout
