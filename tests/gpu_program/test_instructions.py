"""Check how many instructions the fused step of a recipe has on an H200."""

import pytest

from benchmarks import instructions

LISTING = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 FMUL.FTZ R3, R3, 2 ;
        /*0020*/         @UP1      MUFU.SQRT R4, R3 ;
.L_x_1:
        /*0030*/                   FMNMX R4, R4, R5, PT ;
        /*0040*/                   NOP;
"""


def test_each_instruction_of_a_listing_counts_but_those_that_do_nothing():
    found = instructions.counted(LISTING)
    assert found == {"LDC": 1, "FMUL": 1, "MUFU": 1, "FMNMX": 1}


def test_a_kernel_takes_as_long_as_its_slowest_pipe():
    issue, narrow = instructions.seconds({"FMUL": 6, "FMNMX": 2, "MUFU": 0}, 2**20)
    assert narrow == pytest.approx(issue / 2)
    _, roots = instructions.seconds({"FMUL": 6, "FMNMX": 0, "MUFU": 2}, 2**20)
    assert roots == pytest.approx(4 * narrow)


# 104.6, 117.0 and 118.4 were counted with ptxas 12.9.
@pytest.mark.parametrize(
    ("recipe", "budget"),
    [
        ("bf16-split-8bit", 105),
        ("bf16-split24-8bit", 120),
        ("bf16-split24-4bit", 135),
    ],
)
def test_the_fused_step_has_no_more_instructions_than_it_had(h200, recipe, budget):
    try:
        instructions.tool("nvdisasm", "nvidia-cuda-nvdisasm")
        instructions.tool("ptxas", "nvidia-cuda-nvcc")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert instructions.measured(recipe)["all"] <= budget
