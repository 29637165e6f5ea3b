"""`explain`: where each contraction is in the user's code, what it costs, in what it
runs, and why not otherwise.
"""

import inspect
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax
from jax.experimental import pallas as pl

import mpx

ROOT = pathlib.Path(__file__).parents[2]
THIS_FILE = "tests/autocast/test_explain.py"


@pytest.fixture(autouse=True)
def in_the_root_of_the_repository(monkeypatch):
    """Paths are shown relative to the working directory."""
    monkeypatch.chdir(ROOT)


def shape(*dims, dtype=np.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


def product(a, b):
    return a @ b


def total(fun):
    return lambda *args: fun(*args).sum()


def line(fun, offset=1):
    """Return where a line of a function is, counted from its `def`, its first decorator
    or its `lambda`.
    """
    fun = inspect.unwrap(fun)
    return f"{THIS_FILE}:{fun.__code__.co_firstlineno + offset} ({fun.__qualname__.rsplit('.<locals>.')[-1]})"


def contractions(fun, *args, **options):
    return mpx.explain(mpx.autocast(fun, "bf16", **options))(*args).contractions


def only(rows):
    (row,) = rows
    return row


# --- where ------------------------------------------------------------------------------------------------------------


def test_rows_are_at_the_users_own_line(tmp_path, monkeypatch):
    """Relative to the working directory, or with the whole path outside of it; in a
    library where no line is ours.
    """
    args = shape(3, 5), shape(5, 7)
    assert only(contractions(product, *args)).where == line(product)
    module = nn.Dense(7)
    variables = jax.eval_shape(module.init, jax.random.key(0), shape(3, 5))
    assert re.search(
        r"flax/linen/linear\.py:\d+",
        only(contractions(module.apply, variables, shape(3, 5))).where,
    )
    model, called = (
        nnx.eval_shape(lambda: nnx.Linear(5, 7, rngs=nnx.Rngs(0))),
        lambda model, x: model(x),
    )
    assert only(contractions(called, model, shape(3, 5))).where == line(called, 0)
    monkeypatch.chdir(tmp_path)
    assert only(contractions(product, *args)).where == f"{ROOT}/{line(product)}"


# --- how much ---------------------------------------------------------------------------------------------------------


def scanned(length, body):
    return lambda a, b: lax.scan(lambda a, _: (body(a, b), None), a, length=length)[0]


SQUARE = (shape(3, 8), shape(8, 8))


def test_iterations_count_as_often_as_they_run():
    """Iterations of nested scans multiply, also in a scan that is kept whole; a while
    loop counts as one.
    """
    flops, nested = 2 * 3 * 8 * 8, scanned(7, scanned(5, product))
    loop = lambda a, b: lax.while_loop(
        lambda carry: carry.sum() < 1, lambda carry: carry @ b, a
    )
    for fun, count in ((scanned(7, product), 7), (nested, 35), (loop, 1)):
        row = only(contractions(fun, *SQUARE))
        assert (row.count, row.flops, row.runs_in) == (count, count * flops, "bf16")
    row = only(
        contractions(nested, *SQUARE, rules=mpx.DEFAULT_RULES | {"scan": "keep"})
    )
    assert (row.count, row.flops, row.runs_in) == (35, 35 * flops, "f32")


def test_each_branch_of_a_cond_has_its_rows_and_the_inside_of_a_kernel_has_none():
    def chosen(a, b):
        return lax.cond(a.sum() > 0, lambda: a @ b, lambda: a @ b[:, :2] @ b[:2])

    rows = contractions(chosen, *SQUARE)
    assert [row.shapes for row in rows] == [
        "f32[3,8] f32[8,2]",
        "f32[3,2] f32[2,8]",
        "f32[3,8] f32[8,8]",
    ]
    assert {(row.runs_in, row.count) for row in rows} == {("bf16", 1), ("f32", 1)}
    kernel = pl.pallas_call(
        lambda x, out: out.__setitem__(..., x[...] @ x[...]), out_shape=shape(4, 4)
    )
    found = mpx.explain(kernel, "bf16")(shape(4, 4))
    assert found.contractions == ()
    assert found.others == 1


# --- in what, and why -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fun"), [("dot_general", product), ("scan", scanned(3, product))]
)
def test_a_contraction_that_the_users_rules_keep_says_so(name, fun):
    row = only(contractions(fun, *SQUARE, rules=mpx.DEFAULT_RULES | {name: "keep"}))
    assert row.runs_in == "f32"
    assert "rule" in row.reason


# --- the share, and the other operations ------------------------------------------------------------------------------


def test_the_narrowed_share_is_that_of_the_flops():
    """All that autocast narrows, inside of a gradient too; of no FLOPs it is NaN, None
    in JSON and not printed.
    """
    mixed = lambda a, b: (a @ b, jnp.dot(a, b[:, :2], precision="highest"))
    assert mpx.explain(mixed, "bf16")(*SQUARE).narrowed_share == 8 / 10
    for wider in (np.complex64, np.float64):
        beside = lambda a, b, wider=wider: lax.dot(
            a, b.astype(wider), preferred_element_type=wider
        )
        with jax.enable_x64(True):
            assert mpx.explain(beside, "bf16")(*SQUARE).narrowed_share == 0
    for differentiate in (jax.grad, mpx.grad):
        explanation = mpx.explain(
            differentiate(mpx.autocast(total(product), "bf16")), "bf16"
        )(*SQUARE)
        assert {row.runs_in for row in explanation.contractions} == {"bf16"}
        assert explanation.narrowed_share == 1
    for fun, args, title in (
        (jnp.exp, [shape(4)], "none"),
        (product, [shape(0, 4), shape(4, 2)], "of no FLOPs"),
    ):
        explanation = mpx.explain(fun, "bf16")(*args)
        assert math.isnan(explanation.narrowed_share)
        assert explanation.as_dict()["narrowed_share"] is None
        assert str(explanation).startswith(f"Contractions: {title}")


def test_the_title_counts_other_operations():
    """Moving values around is no operation, and neither is what has no floating-point
    numbers.
    """

    def activations(x, index):
        y = 2 * jnp.exp(x @ x)
        return jnp.broadcast_to(y.T.reshape(-1)[index + 1], x.shape)

    explanation = mpx.explain(scanned(7, activations), "bf16")(
        shape(8, 8), shape(dtype=np.int32)
    )
    assert explanation.others == 14
    assert str(explanation).startswith(
        "Contractions: 100.0% of their FLOPs narrowed; 14 other operations\n"
    )


@pytest.mark.parametrize(("batch", "share"), [(1344, 0.5), (1347, 0.0)])
def test_the_title_counts_fp8_apart(batch, share):
    """A product of 16 rows and one with a batch of matrices, of equal FLOPs; 1,347 is
    no multiple of 16.
    """
    both = lambda a, b: (a @ b, jnp.einsum("bij,bjk->bik", a[None], b[None]))
    explanation = mpx.explain(both, mpx.Fp8(min_extent=0))(
        shape(batch, 16), shape(16, 32)
    )
    assert str(explanation).startswith(
        f"Contractions: 100.0% of their FLOPs narrowed, {share:.1%} to FP8\n"
    )
    assert explanation.fp8_share == share


# --- as text ----------------------------------------------------------------------------------------------------------


def test_an_explanation_prints_as_a_table():
    """The column `why` has a text in each row, or is absent where all contractions are
    narrowed.
    """

    def layer(a, b):
        hidden = a @ b
        return jnp.exp(hidden), jnp.dot(hidden, b.T, precision="highest")

    first, second = line(layer), line(layer, 2)
    width = len(first)
    assert str(mpx.explain(layer, "bf16")(shape(8, 100), shape(100, 1000))).split(
        "\n"
    ) == [
        "Contractions: 50.0% of their FLOPs narrowed; 1 other operations",
        (
            f"{'where':{width}}  operation    {'operands':25}  runs in  {'why':30} "
            " count      FLOPs"
        ),
        (
            f"{first}  dot_general  f32[8,100] f32[100,1000]   bf16    "
            f" {'narrowed':30}      1  1,600,000"
        ),
        (
            f"{second}  dot_general  f32[8,1000] f32[1000,100]  f32      precision"
            " HIGHEST is asked for      1  1,600,000"
        ),
    ]
    assert str(mpx.explain(product, "bf16")(*SQUARE)).split("\n") == [
        "Contractions: 100.0% of their FLOPs narrowed",
        (
            f"{'where':{len(line(product))}}  operation    operands           runs in "
            " count  FLOPs"
        ),
        f"{line(product)}  dot_general  f32[3,8] f32[8,8]  bf16         1    384",
    ]
