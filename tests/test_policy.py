"""Policies: the grammar of their strings, overrides, the table, and which cast does
what.
"""

import re
import textwrap

import flax
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from hypothesis import strategies as st

import mpx
from mpx import _trees
from mpx._policy import policy_text
from tests.helpers import BF16, F16, F32, examples

F64 = np.dtype(np.float64)

DTYPES = {
    "bf16": BF16,
    "bfloat16": BF16,
    "f16": F16,
    "fp16": F16,
    "float16": F16,
    "half": F16,
}
DTYPES |= {
    "full": F32,
    "f32": F32,
    "fp32": F32,
    "float32": F32,
    "f64": F64,
    "fp64": F64,
    "float64": F64,
}


def dtypes(policy):
    return policy.param_dtype, policy.compute_dtype, policy.output_dtype


def test_every_key_takes_every_dtype_in_its_short_and_its_long_form():
    """`half` is float16 on everything but a TPU."""
    for name, dtype in DTYPES.items():
        assert (
            dtypes(mpx.get_policy(name))
            == dtypes(mpx.get_policy(f" {name} "))
            == (dtype,) * 3
        )
        for i, keys in enumerate([("p", "params"), ("c", "compute"), ("o", "output")]):
            short, long = (dtypes(mpx.get_policy(f"{key}={name}")) for key in keys)
            assert short == long
            assert short[i] == dtype


policies = st.builds(
    lambda param, compute, output, overrides, fp8, reduce: mpx.Policy(
        param, compute if fp8 is None else BF16, output, overrides, fp8, reduce
    ),
    *[st.sampled_from([BF16, F16, F32, F64])] * 3,
    st.lists(
        st.tuples(
            st.text(max_size=8).map(re.escape), st.sampled_from([BF16, F16, F32, F64])
        ),
        max_size=3,
    ),
    st.none()
    | st.builds(
        mpx.Fp8,
        st.sampled_from(["e4m3", "e5m2"]),
        st.sampled_from(["e4m3", "e5m2"]),
        st.integers(0, 1000),
    ),
    st.none() | st.sampled_from([BF16, F16, F32, F64]),
)


@hypothesis.given(policies)
@examples(100)
def test_the_string_of_any_policy_reads_back_as_the_policy(policy):
    """With overrides, whatever is in the patterns, all settings of products of 8-bit
    floats, and the dtype of sums.
    """
    assert mpx.get_policy(str(policy)) == policy
    assert mpx.get_policy(policy_text(policy)) == policy


def test_overrides_and_settings_of_fp8_can_be_written_into_the_string():
    text = (
        "params=bf16, compute=fp8(forward=e5m2, min_extent=0), output=f32, 'norm|a,b='"
        ' = f32, "head"=bf16'
    )
    policy = mpx.get_policy(text, overrides=[("last", "f16")])
    assert policy.overrides == (("norm|a,b=", F32), ("head", BF16), ("last", F16))
    assert policy.fp8 == mpx.Fp8(forward="e5m2", min_extent=0)


def test_a_policy_is_a_static_argument_of_jit_and_traces_once_for_equal_ones():
    """Also with overrides in lists, which it keeps as a hashable tuple."""
    traces = []

    def cast(policy, tree):
        traces.append(policy)
        return policy.cast_to_compute(tree)

    cast = jax.jit(cast, static_argnums=0)
    for text in ("c=bf16", "c=bf16,o=bf16", "c=f16"):
        cast(
            mpx.get_policy(text, overrides=[["norm", jnp.float32]]), {"w": jnp.ones(2)}
        )
    assert len(traces) == 2
    assert traces[0].overrides == (("norm", F32),)


def params():
    block = lambda: {
        "norm": {"scale": jnp.ones(3, F32)},
        "dense": {"kernel": jnp.ones((3, 3), F32), "bias": jnp.ones(3, F32)},
    }
    return {
        "blocks": [block(), block()],
        "head": {"kernel": jnp.ones((3, 2), F32)},
        "step": jnp.zeros((), jnp.int32),
    }


class Normed(nnx.Module):
    def __init__(self):
        self.dense, self.norm = (
            nnx.Linear(2, 3, rngs=nnx.Rngs(0)),
            nnx.BatchNorm(3, rngs=nnx.Rngs(0)),
        )


class RunningMax(nnx.BatchStat):
    """A statistic of a user's own type."""


class InFp8(nn.Module):
    """A layer of Flax in FP8, whose scales and histories of largest magnitudes stand
    beside the parameters.
    """

    @nn.compact
    def __call__(self, x):
        return nn.Dense(16, dot_general_cls=nn.Fp8DirectDotGeneralOp)(x)


IN_FP8 = [
    f"{name}_{part}"
    for name in ("input", "kernel", "output_grad")
    for part in ("amax_history", "scale")
]
IN_FP8 = {
    f"_overwrite_with_gradient/Dense_0/Fp8DirectDotGeneralOp_0/{name}"
    for name in IN_FP8
}


def variables_in_fp8():
    return InFp8().init(jax.random.key(0), jnp.ones((16, 16), F32))


def variables_of_linen():
    return nn.BatchNorm(use_running_average=True).init(
        jax.random.key(0), jnp.ones((1, 3), F32)
    )


IN_LINEN = {"batch_stats/mean", "batch_stats/var"}
STATISTICS = {  # trees, and what Flax says is a statistic in them
    "state of NNX": (nnx.state(Normed()), {"norm/mean", "norm/var"}),
    "module of NNX": (Normed(), {"norm/mean", "norm/var"}),
    "own type": (
        {"max": RunningMax(jnp.ones(3, F32)), "mean": jnp.ones(3, F32)},
        {"max"},
    ),
    "Linen": (variables_of_linen(), IN_LINEN),
    "frozen": (flax.core.freeze(variables_of_linen()), IN_LINEN),
    "inside": (
        {"model": variables_of_linen()},
        {"model/batch_stats/mean", "model/batch_stats/var"},
    ),
    "a parameter that is called so": ({"batch_stats": jnp.ones(3, F32)}, set()),
    "FP8 and Linen": (variables_in_fp8() | variables_of_linen(), IN_FP8 | IN_LINEN),
}


@pytest.mark.parametrize(("tree", "statistics"), STATISTICS.values(), ids=STATISTICS)
@pytest.mark.filterwarnings(
    "ignore:`Policy.cast_to_param`. no floating leaf's path matches"
)
@pytest.mark.parametrize(
    "overrides", [(), (("norm|max|stats", F16),)], ids=["", "overrides"]
)
def test_batch_statistics_stay_as_they_are_if_flax_says_what_they_are(
    tree, statistics, overrides
):
    policy = mpx.Policy(BF16, BF16, F32, overrides)
    for cast in (policy.cast_to_param, policy.cast_to_compute):
        after = cast(tree)
        names, leaves = _trees.path_names(after), _trees.leaves_by_path(after)
        assert {
            names[path] for path, leaf in leaves.items() if leaf.dtype == F32
        } == statistics
    rows = {
        row.split()[0]: row
        for row in mpx.Policy(BF16, BF16, F32).describe(tree).splitlines()[1:-1]
    }
    assert {
        name for name, row in rows.items() if row.count("float32") == 2
    } == statistics


@pytest.mark.optax_promotion
def test_a_step_through_an_fp8_layer_of_flax_keeps_its_histories_in_float32():
    """The history is of the weights' largest magnitude, and the next scale is that over
    448, neither rounded.
    """
    policy = mpx.get_policy("bf16-split")
    params = policy.cast_to_param(variables_in_fp8())
    state = TrainState.create(
        apply_fn=InFp8().apply,
        params=params,
        tx=mpx.mixed_precision(optax.sgd(0.1), policy),
    )
    loss_fn = mpx.autocast(
        lambda params, x: jnp.mean(state.apply_fn(params, x) ** 2), policy
    )
    x = jnp.full((16, 16), 1.001, F32)  # which bfloat16 does not hold
    for _ in range(2):
        state = state.apply_gradients(grads=jax.jit(mpx.grad(loss_fn))(state.params, x))
    measured = state.params["_overwrite_with_gradient"]["Dense_0"][
        "Fp8DirectDotGeneralOp_0"
    ]
    assert {leaf.dtype for leaf in measured.values()} == {F32}
    assert measured["input_amax_history"][0] == np.float32(1.001)
    assert measured["input_scale"][0] == np.float32(1.001) / np.float32(448)
    assert state.params["params"]["Dense_0"]["kernel"].dtype == BF16


def test_an_override_is_searched_in_the_path_and_sets_storage_and_compute_but_not_output():
    policy = mpx.get_policy(
        "params=bf16,compute=f16,output=bf16", overrides=(("norm|step", "float32"),)
    )
    for cast, dtype, norm in [
        (policy.cast_to_param, BF16, F32),
        (policy.cast_to_compute, F16, F32),
        (policy.cast_to_output, BF16, BF16),
    ]:
        tree = cast(params())
        assert tree["blocks"][1]["norm"]["scale"].dtype == norm
        assert tree["blocks"][1]["dense"]["kernel"].dtype == dtype
        # Leaves that are not floating are never touched.
        assert tree["step"].dtype == np.int32


def test_the_first_override_that_matches_wins():
    rules = [("blocks/0/.*kernel", F16), ("kernel$", F32), ("bias", "float16")]
    for overrides, first in [(rules, F16), (rules[1:], F32), (rules[1::-1], F32)]:
        tree = mpx.get_policy("bf16", overrides=tuple(overrides)).cast_to_param(
            params()
        )
        assert tree["blocks"][0]["dense"]["kernel"].dtype == first
        assert tree["blocks"][1]["dense"]["kernel"].dtype == F32
        assert tree["blocks"][0]["norm"]["scale"].dtype == BF16


def test_describe_shows_a_line_a_leaf_and_the_total_of_the_bytes_stored():
    """It says the same of shapes, and leaves out functions, which Equinox modules have
    for leaves.
    """
    policy = mpx.get_policy("params=bf16,compute=f16", overrides=(("norm", "float32"),))
    expected = """\
        leaf                   shape     stored    compute   bytes
        blocks/0/dense/bias    (3,)      bfloat16  float16       6
        blocks/0/dense/kernel  (3, 3)    bfloat16  float16      18
        blocks/0/norm/scale    (3,)      float32   float32      12
        head                   (9, 100)  bfloat16  float16   1,800
        key                    ()        key<fry>  key<fry>      8
        step                   ()        int32     int32         4
        total                                                1,848"""
    tree = params() | {"head": jnp.ones((9, 100)), "key": jax.random.key(0)}
    tree["blocks"] = tree["blocks"][:1]
    assert policy.describe(
        tree | {"activation": jnp.tanh, "nothing": None}
    ) == textwrap.dedent(expected)
    assert policy.describe(jax.eval_shape(lambda: tree)) == textwrap.dedent(expected)
    assert mpx.get_policy("bf16").describe({}).splitlines()[-1].split() == [
        "total",
        "0",
    ]


TAKE_A_DTYPE = {
    "upcast": lambda dtype: mpx.upcast(optax.sgd(1.0), dtype),
    "master_weights": lambda dtype: mpx.master_weights(optax.sgd(1.0), dtype=dtype),
    "kahan_summation": mpx.kahan_summation,
    "low_precision_state": lambda dtype: mpx.low_precision_state(
        optax.sgd(1.0), {"mu": dtype}
    ),
    "momentum": lambda dtype: mpx.any_precision_adamw(momentum_dtype=dtype),
    "variance": lambda dtype: mpx.any_precision_adamw(variance_dtype=dtype),
    "compensation": lambda dtype: mpx.any_precision_adamw(
        compensation_buffer_dtype=dtype
    ),
    "grad": lambda dtype: mpx.grad(jnp.sum, grad_dtype=dtype),
    "autocast": lambda dtype: mpx.autocast(jnp.sum, dtype),
    "reduce_dtype": lambda dtype: mpx.autocast(jnp.sum, "bf16", reduce_dtype=dtype),
    "cast": lambda dtype: mpx.cast(jnp.ones(2), dtype),
    "formats": lambda dtype: mpx.formats.round_to(jnp.ones(2, F32), dtype),
    "monitor": mpx.monitor.underflow,
}


# NumPy reads some of these as formats of a record, and raises a SyntaxError.
NO_DTYPES = ["f23", ",", "08", "(V,", [0], {"": ""}]


@pytest.mark.parametrize("name", TAKE_A_DTYPE)
def test_every_function_reads_a_short_dtype_name(name):
    TAKE_A_DTYPE[name]("f32")
    for wrong in NO_DTYPES:
        with pytest.raises((ValueError, TypeError), match=r"`\w+`|^Policy"):
            TAKE_A_DTYPE[name](wrong)


def test_an_override_that_matches_nothing_warns_with_the_paths_that_come_near():
    policy = mpx.get_policy("bf16-split,'rotuer'=f32,'head'=f32")
    tree = {"body": jnp.ones(2), "head": jnp.ones(2), "router": jnp.ones(2)}
    with pytest.warns(
        UserWarning,
        match="no floating leaf's path matches 'rotuer'. .* one of these: router, ",
    ):
        cast = policy.cast_to_param(tree)
    assert jax.tree.map(lambda x: x.dtype, cast) == {
        "body": BF16,
        "head": F32,
        "router": BF16,
    }
    tx = mpx.mixed_precision(optax.sgd(0.1), policy)
    # A group of `optax.partition` need not have all leaves: no warning, which would be
    # an error here.
    tx.init(cast)
    policy.cast_to_compute(tree)
    # Nothing to cast, nothing to say.
    policy.cast_to_param({"step": jnp.zeros((), jnp.int32)})
    with pytest.warns(UserWarning, match="Cast all parts of a model in one tree"):
        policy.cast_to_param({"body": tree["body"]})
