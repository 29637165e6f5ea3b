"""Check the tool that runs on a CPU what was compiled for another device."""

import jax.numpy as jnp
import pytest

from tests.gpu_program.on_cpu import as_written, portable, program_for
from tests.helpers import assert_same_bits


@pytest.mark.parametrize(
    ("layout", "operation", "why"),
    [
        ("1,0", 'custom-call(%x), custom_call_target="f"', "calls what is not in it: ROOT %y = .* custom-call"),
        ("0,1", "copy(%x)", r"array in the order \{0,1\}"),
    ],
)
def test_a_program_that_means_nothing_on_a_cpu_is_refused(layout, operation, why):
    lines = "%x = f32[2,2]{1,0} parameter(0)", f"ROOT %y = f32[2,2]{{{layout}}} {operation}"
    with pytest.raises(ValueError, match=why):
        portable("\n".join(["HloModule m", "ENTRY %main {", *lines, "}"]))


def test_the_sign_of_a_zero_in_a_program_is_read(h200):
    x = jnp.array([-0.0, 0.0, 1.0])
    add_zero = as_written(program_for(h200[0], lambda x: x + jnp.where(x < 1, -0.0, 1.0), x))
    assert_same_bits(add_zero(x), jnp.array([-0.0, 0.0, 2.0]))
