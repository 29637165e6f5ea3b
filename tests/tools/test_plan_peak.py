"""Each term of a peak, by hand. The sum is held against programs in
`tests/gpu_program/test_plans.py`.
"""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from mpx.tools.plan import memory_plan
from mpx.tools.plan.peak import shapes_of, sizes_of

MESH = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
FSDP = {
    "mesh": MESH,
    "axis": None,
    "param_specs": [P("data")] * 2 + [P(None, "data")] * 8,
}
# 3 layers of width 256, with 2 groups of queries of 128, a gated perceptron of 1,024,
# and 512 words.
LAYER = [
    (256, 256),
    (256, 256),
    (256, 128),
    (256, 128),
    (256, 1024),
    (256, 1024),
    (1024, 256),
]
STACKED = [(512, 256), (256, 512), *((3, *shape) for shape in LAYER), (3, 256)]
UNROLLED = [(256, 512), (256, 512), *LAYER, *LAYER, *LAYER, (256,)]
IN_A_LAYER = 256 * (256 + 256 + 128 + 128 + 3 * 1024)
HEAD, TOKENS = 512 * 256, 2 * 64
OPEN = {"attention": None, "logits": None, "checkpoint": None, "scan": None}
THRIFTY = {"attention": "kernel", "logits": "whole", "checkpoint": True, "scan": True}
PLAIN = {"attention": "xla", "logits": "whole", "checkpoint": False, "scan": False}


def plan_of(shapes=STACKED, policy="bf16", rule=None, **options: Any):
    tree = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    given = {"batch": 2, "sequence": 64, "heads": 4} | THRIFTY | options
    return memory_plan(tree, rule or optax.sgd(0.1), policy, **given)


def ends(shapes=STACKED, policy="bf16", **options: Any):
    """Return the bytes at both ends of each term."""
    return {
        term: (least, most)
        for term, (least, most, _) in plan_of(shapes, policy, **options).peak.items()
    }


@pytest.mark.parametrize(("policy", "n"), [("bf16", 2), ("f32", 4)])
@pytest.mark.parametrize("shapes", [STACKED, UNROLLED])
def test_with_checkpoints_a_step_needs_the_inputs_of_layers_and_what_one_layer_computes(
    shapes, policy, n
):
    """Numbers of a product have n bytes; float32 sums, and gradients of the logits and
    of a look-up, stand beside.
    """
    one = TOKENS * (2 * n * 3 * 1024 + (12 + 5 * n) * 256)
    kept, logits = 3 * TOKENS * 256 * 4, n * TOKENS * 512
    found = {
        "kept by layers": kept,
        "one layer": one,
        "logits": logits,
        "embedding's gradient": (4 - n) * HEAD,
    }
    assert ends(shapes, policy) == {
        term: (count, count) for term, count in found.items() if count
    }


def test_attention_by_xla_makes_arrays_of_scores_and_a_kernel_none():
    each = TOKENS * 4 * 64  # of 4 heads
    assert ends(attention="xla")["scores"] == (3 * 2 * each, 4 * 2 * each)
    unsaid = ends(attention="xla", heads=None)  # heads of 128 to 64 numbers
    assert unsaid["scores"] == (3 * each, 4 * 2 * each)


@pytest.mark.parametrize(
    ("how", "a_token"),
    [
        # Operands of products in bfloat16, sums in float32, and scores in either.
        (PLAIN, (20 * 256 + 10 * 1024 + 4 * 4 * 64, 20 * 256 + 10 * 1024 + 6 * 4 * 64)),
        # `autocast` keeps results of products.
        (
            PLAIN | {"scan": True},
            (14 * 256 + 4 * 1024 + 2 * 4 * 64, 20 * 256 + 4 * 1024 + 2 * 4 * 64),
        ),
        (
            PLAIN | {"scan": True, "attention": "kernel"},
            (14 * 256 + 4 * 1024, 20 * 256 + 4 * 1024),
        ),
    ],
)
def test_without_checkpoints_layers_keep_what_their_backward_pass_needs(how, a_token):
    assert ends(**how)["kept by layers"] == tuple(
        3 * TOKENS * count for count in a_token
    )


def test_a_scan_in_float32_keeps_all_that_jax_saves():
    a_token = 4 * (12 * 256 + 6 * 1024 + 2 * 4 * 64)
    assert (
        ends(policy="f32", **PLAIN | {"scan": True})["kept by layers"]
        == (3 * TOKENS * a_token,) * 2
    )


@pytest.mark.parametrize(("kept", "size"), [("bf16", 2), ("8bit", 1)])
def test_what_is_kept_between_layers_has_the_bytes_of_its_format(kept, size):
    assert (
        ends(kept=kept, checkpoint=None)["kept by layers"]
        == (3 * TOKENS * 256 * size,) * 2
    )


def test_many_words_need_most_where_logits_are_whole_and_in_parts_a_sum_of_the_heads_gradients():
    shapes = [(2**16, 256), (256, 2**16), *STACKED[2:]]
    long = {"sequence": 4096}
    logits = 2 * 4096 * 2**16
    assert ends(shapes, **long)["logits"] == (
        6 * logits,
        6 * logits,
    )  # in float32 and bfloat16
    in_parts = ends(shapes, logits="parts", **long)
    assert in_parts["logits"] == (6 * logits // 8, 6 * logits // 8)
    assert in_parts["head's gradient"] == (6 * 2**16 * 256,) * 2


def test_unrolled_layers_may_free_gradients_before_all_are_made():
    """In bfloat16: those of layers, and not of the embedding, the head and a bias."""
    assert ends(UNROLLED, scan=False)["gradients freed"] == (-2 * 3 * IN_A_LAYER, 0)


def test_fsdp_gathers_two_layers_and_may_keep_parts_in_another_layout():
    found = ends(**FSDP)
    assert found["gathered weights"] == (2 * 2 * IN_A_LAYER,) * 2
    assert found["second layout"] == (0, 4 * 3 * IN_A_LAYER // 8)
    assert found["embedding's gradient"] == (4 * HEAD // 8, 4 * HEAD)
    assert ends(**FSDP, **{"scan": False})["whole gradients"] == (0, 4 * 3 * IN_A_LAYER)


def test_weights_that_are_on_every_device_are_not_gathered():
    assert ends(mesh=MESH, axis="data").keys() == ends().keys()


def test_a_token_passes_through_one_or_two_of_many_experts():
    dense = [
        (256, 512),
        (512, 256),
        *[(256, 768), (256, 256), (256, 1024), (1024, 256)] * 3,
    ]
    experts = [
        (256, 512),
        (512, 256),
        *[(256, 768), (256, 256), (256, 8), (8, 256, 1024), (8, 1024, 256)] * 3,
    ]
    stacked = [*experts[:2], *((3, *shape) for shape in experts[2:7])]
    for shapes in (experts, stacked):
        sizes = sizes_of(shapes)
        assert (sizes.layers, sizes.width, sizes.hidden, sizes.ups) == (
            3,
            256,
            (1024, 2048),
            1,
        )
    assert sizes_of(dense).hidden == (1024, 1024)


def test_heads_and_their_sizes_may_be_axes_of_their_own_as_in_flax():
    attention = [(256, 4, 64)] * 3 + [(4, 64, 256)]
    shapes = [(512, 256), (256, 512), *[*attention, (256, 1024), (1024, 256)] * 3]
    sizes = sizes_of(shapes)
    assert (sizes.layers, sizes.width, sizes.hidden, sizes.heads) == (
        3,
        256,
        (1024, 1024),
        (4, 4),
    )
    assert sizes.in_a_layer == 4 * 256**2 + 2 * 256 * 1024
    stacked = [(12, 256, 4, 64)] * 3 + [
        (12, 4, 64, 256),
        (12, 256, 1024),
        (12, 1024, 256),
    ]
    biases = [(12, 256)] * 6 + [(12, 1024), (12, 4, 64)]
    assert sizes_of([*shapes[:2], *stacked, *biases]) == sizes._replace(layers=12)


def test_a_model_without_matrices_has_no_peak_of_its_own():
    plan = plan_of([(1000,)])
    assert str(plan).splitlines()[-1].startswith("held")
    assert (
        plan.peak_bytes_a_device
        == plan.least_peak_bytes_a_device
        == plan.total_bytes_a_device
    )


def test_without_a_batch_a_plan_counts_what_is_held_alone():
    plan = plan_of(batch=0)
    assert plan.peak == {}
    assert (
        plan.peak_bytes_a_device
        == plan.least_peak_bytes_a_device
        == plan.total_bytes_a_device
    )
    assert str(plan).splitlines()[-1].startswith("held")


def test_what_is_open_is_a_range_from_the_program_that_needs_least_to_the_one_that_needs_most():
    anything = plan_of(**OPEN)
    programs = [
        plan_of(**how)
        for how in (
            THRIFTY,
            PLAIN,
            THRIFTY | {"scan": False},
            PLAIN | {"logits": "parts"},
        )
    ]
    assert anything.least_peak_bytes_a_device == min(
        plan.least_peak_bytes_a_device for plan in programs
    )
    assert anything.peak_bytes_a_device == max(
        plan.peak_bytes_a_device for plan in programs
    )
    needs = sum(most for _, most, _ in anything.peak.values())
    assert needs == anything.peak_bytes_a_device - anything.total_bytes_a_device


def test_a_plan_names_the_program_whose_peak_it_gives():
    layers = "a transformer of 3 layers of width 256"
    head = (
        f"The peak is that of {layers} on 2 x 64 tokens a device, gradients in"
        " bfloat16:\n"
    )
    last = str(plan_of()).split("\n\n")[-1]
    assert (
        last
        == head
        + "attention in a kernel, logits whole, a checkpoint a layer and layers in a"
        " scan."
    )
    ends_of_it = (
        str(plan_of(checkpoint=None)).split("\n\n")[-1].removeprefix(head).splitlines()
    )
    assert ends_of_it == [
        (
            "from attention in a kernel, logits whole, a checkpoint a layer and layers"
            " in a scan,"
        ),
        "to attention in a kernel, logits whole, no checkpoint and layers in a scan.",
    ]


def test_the_terms_add_up_to_the_peak_below_them_and_the_least_peak_has_a_row_of_its_own():
    table = str(plan_of(**OPEN)).split("\n\n")[1]
    rows = {
        row[:20].strip(): [float(x) for x in row[20:].split()[:2]]
        for row in table.splitlines()[2:]
    }
    plan, unit = plan_of(**OPEN), 1e6
    assert rows["least peak"][0] == pytest.approx(
        plan.least_peak_bytes_a_device / unit, rel=1e-3
    )
    peak = rows.pop("peak, with held")
    del rows["least peak"]
    held = plan.total_bytes_a_device / unit
    for end in (0, 1):
        assert held + sum(row[end] for row in rows.values()) == pytest.approx(
            peak[end], rel=1e-2
        )
    assert "least peak" not in str(plan_of())


def test_a_plan_says_with_what_it_fits():
    anything, plain, thrifty = plan_of(**OPEN), plan_of(**PLAIN), plan_of(**THRIFTY)
    assert anything.fits(anything.peak_bytes_a_device) == "yes"
    assert anything.fits(anything.least_peak_bytes_a_device - 1) == "no"
    assert (
        anything.fits(anything.least_peak_bytes_a_device) == "perhaps"
    )  # if XLA frees gradients
    thrift = "only with attention in a kernel, logits whole and a checkpoint a layer"
    assert anything.fits(thrifty.peak_bytes_a_device) == thrift
    without = plan_of(checkpoint=None, scan=None).fits(thrifty.peak_bytes_a_device)
    assert without == "only with a checkpoint a layer"
    many = [(2**16, 256), (256, 2**16), *STACKED[2:]]
    in_parts = plan_of(
        many, **THRIFTY | {"logits": "parts"}, sequence=4096
    ).peak_bytes_a_device
    assert (
        plan_of(many, **THRIFTY | {"logits": None}, sequence=4096).fits(in_parts)
        == "only with logits in 8 parts"
    )
    assert (
        plain.fits(plain.peak_bytes_a_device - 1) == "perhaps"
    )  # XLA chooses the dtype of scores


def test_a_program_fits_exactly_if_it_has_the_choices_of_a_way_that_a_plan_names():
    anything, answers = plan_of(**OPEN), set()
    for limit in [peak.most for peak in anything._peaks]:
        answer = anything.fits(limit + anything.total_bytes_a_device)
        answers.add(answer)
        ways = [
            re.split(", | and ", way)
            for way in answer.removeprefix("only with ").split(", or with ")
        ]
        for peak in anything._peaks if answer.startswith("only") else ():
            named = any(
                all(choice in str(peak.program) for choice in way) for way in ways
            )
            assert named == (peak.most <= limit), (answer, peak.program)
    assert "or with" in str(answers)


@pytest.mark.parametrize(
    "wrong", [{"batch": -1}, {"batch": 0.5}, {"sequence": 0}, {"heads": 0}], ids=str
)
def test_a_plan_refuses_counts_that_are_none(wrong):
    with pytest.raises(
        ValueError,
        match=f"`memory_plan`: `{next(iter(wrong))}` must be an integer of at least",
    ):
        plan_of(**wrong)


def test_heads_divide_the_width():
    with pytest.raises(
        ValueError,
        match="`memory_plan`: 33 heads do not divide the width, which is 256",
    ):
        plan_of(heads=33)
    of_qwen = memory_plan(
        7_000_000_000, optax.adamw(1e-3), heads=28
    )  # the width of a count, 4,096, is a guess
    assert any(
        "of 28 heads" in why
        for peak in of_qwen._peaks
        for *_, why in peak.needs.values()
    )


@pytest.mark.parametrize(
    ("parameters", "layers", "width"),
    [
        (1_498e6, 16, 2048),
        (6_738e6, 32, 4096),
        (8_030e6, 32, 4096),
        (70_550e6, 80, 8192),
        (405_900e6, 126, 16_384),
    ],
)
def test_a_number_stands_for_the_llama_of_that_size(parameters, layers, width):
    shapes = shapes_of(int(parameters))
    assert (layers, width, width) in shapes
    assert sum(map(math.prod, shapes)) == pytest.approx(parameters, rel=1e-3)


def test_a_number_between_two_llamas_stands_for_sizes_between_theirs():
    """And so does one below GPT-2; above the largest Llama it stands for that one."""
    stacks = [shapes_of(n)[2] for n in (10**3, 10**8, 10**9, 10**10, 10**11, 10**13)]
    assert stacks == sorted(stacks)
    assert (32, 4096) < shapes_of(2 * 10**10)[2][:2] < (80, 8192)
