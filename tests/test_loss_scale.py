"""Loss scales: their trajectories against models in plain Python, their lives as
pytrees, and what they refuse.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpx
from mpx._loss_scale import require_powers_of_two
from tests.helpers import assert_same_bits, bits, examples, types_of

GOOD, BAD = jnp.bool_(True), jnp.bool_(False)
INT32_MAX = 2**31 - 1


def run(scale, pattern):
    """Return the scales after each step, step by step."""
    trajectory = []
    for finite in pattern:
        scale = scale.adjust(jnp.bool_(finite))
        trajectory.append(float(scale.loss_scale))
    return trajectory


def grad_scaler(
    pattern,
    init,
    growth_factor,
    growth_interval,
    minimum=0.0,
    maximum=math.inf,
    hysteresis=1,
):
    """Run Megatron-LM's `DynamicGradScaler.update`, with a maximum.

    With a hysteresis of 1 it is the `_amp_update_scale_` of `torch.amp.GradScaler`,
    between bounds.
    """
    scale, growth_tracker, hysteresis_tracker, trajectory = init, 0, hysteresis, []
    for finite in pattern:
        if not finite:
            growth_tracker = 0
            hysteresis_tracker -= 1
            if hysteresis_tracker <= 0:
                scale = max(scale / growth_factor, minimum)
        else:
            growth_tracker += 1
            if growth_tracker == growth_interval:
                growth_tracker = 0
                hysteresis_tracker = hysteresis
                scale = min(scale * growth_factor, maximum)
        trajectory.append(scale)
    return trajectory


patterns = st.lists(st.sampled_from([True, True, True, False]), min_size=1, max_size=40)
scale_settings = st.fixed_dictionaries(
    {
        "init": st.integers(0, 24).map(lambda n: 2.0**n),
        "growth_factor": st.sampled_from([2.0, 4.0]),
        "growth_interval": st.integers(1, 6),
        "minimum": st.integers(-3, 0).map(lambda n: 2.0**n),
        "maximum": st.integers(24, 27).map(lambda n: 2.0**n),
    }
)


def dynamic(init, growth_factor, growth_interval, minimum, maximum, hysteresis=1):
    return mpx.DynamicLossScale(
        init, 0, growth_interval, growth_factor, minimum, maximum, hysteresis
    )


@jax.jit
def scan_adjust(scale, pattern):
    """Return the scales after each step, in one program; the settings are traced if the
    value has them as arrays.
    """

    def step(scale, finite):
        scale = scale.adjust(finite)
        return scale, scale.loss_scale

    return jax.lax.scan(step, scale, pattern)


@given(pattern=patterns, options=scale_settings, hysteresis=st.integers(1, 4))
@examples(60)
def test_trajectories_are_those_of_torch_and_with_hysteresis_those_of_megatron(
    pattern, options, hysteresis
):
    for settings in (options, options | {"hysteresis": hysteresis}):
        assert run(dynamic(**settings), pattern) == grad_scaler(pattern, **settings)


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_trajectories_in_a_scan_are_those_of_the_models_and_with_traced_settings_the_same(
    hysteresis,
):
    """400 steps, 8% of them bad, through growths, backoffs and both bounds."""
    options = dict(
        init=2.0**10,
        growth_factor=2.0,
        growth_interval=5,
        minimum=2.0**8,
        maximum=2.0**13,
    )
    scale = dynamic(**options, hysteresis=hysteresis)
    traced = mpx.DynamicLossScale(
        *[jnp.asarray(getattr(scale, x.name)) for x in dataclasses.fields(scale)]
    )
    for seed in range(3):
        pattern = np.random.default_rng(seed).random(400) > 0.08
        expected = grad_scaler(pattern, hysteresis=hysteresis, **options)
        assert scan_adjust(scale, pattern)[1].tolist() == expected
        assert scan_adjust(traced, pattern)[1].tolist() == expected
        assert hysteresis > 1 or {2.0**8, 2.0**13} <= set(expected)


@pytest.mark.parametrize(
    "counter", [2, 1000], ids=["in its period", "beyond it, of a run with a longer one"]
)
def test_a_value_restored_from_a_checkpoint_continues_where_it_was(counter):
    assert run(mpx.DynamicLossScale(2.0**10, counter=counter, period=3), [1]) == [
        2.0**11
    ]


def test_the_scale_stays_between_its_bounds_and_where_it_began_if_that_is_above():
    for start in (2.0**22, 2.0**24, 2.0**26):
        trajectory = run(mpx.DynamicLossScale(start, period=1), [True] * 5)
        assert trajectory[-1] == max(start, 2.0**24)
        assert trajectory == sorted(trajectory)
    for factor, minimum in [(2.0, 0.25), (3.0, 16.0)]:
        trajectory = run(
            mpx.DynamicLossScale(64.0, factor=factor, min_loss_scale=minimum),
            [False] * 10,
        )
        assert min(trajectory) == trajectory[-1] == minimum


@pytest.mark.parametrize(
    "scale",
    [np.float32(2.0**127), np.float16(2.0**15)],
    ids=["float32 without maximum", "float16"],
)
def test_the_scale_never_becomes_infinite(scale):
    """From 2**127 float32 has no double, from 2**15 float16 has none; jmp stays there
    too.
    """
    value = mpx.DynamicLossScale(jnp.asarray(scale), period=1, max_loss_scale=math.inf)
    assert run(value, [1, 1, 0, 1]) == [scale, scale, scale / 2, scale]


@pytest.mark.parametrize(
    "scale",
    [mpx.DynamicLossScale(), mpx.StaticLossScale(np.float32(2))],
    ids=["dynamic", "static"],
)
def test_leaves_stay_leaves_whatever_takes_their_places(scale):
    """Masks, axes of `vmap` and `equinox.partition` are trees of Python's booleans,
    numbers and None.
    """
    for other in (True, 0, 1.0, None, "name"):
        tree = jax.tree.map(lambda x, other=other: other, scale)
        assert jax.tree.leaves(tree, is_leaf=lambda x: x is None) == [other] * len(
            jax.tree.leaves(scale)
        )
    assert_same_bits(
        jax.tree.map(lambda mask, x: x, jax.tree.map(lambda x: True, scale), scale),
        scale,
    )
    assert jax.tree.structure(jax.tree.map(float, scale)) == jax.tree.structure(scale)


def test_python_numbers_belong_to_the_structure_and_arrays_are_leaves():
    leaves = lambda *args, **options: len(
        jax.tree.leaves(mpx.DynamicLossScale(*args, **options))
    )
    assert [leaves(), leaves(hysteresis=2), leaves(period=jnp.int32(3))] == [2, 3, 3]
    assert (
        jax.tree.leaves(mpx.NoOpLossScale())
        == jax.tree.leaves(mpx.StaticLossScale(2.0))
        == []
    )
    assert jax.tree.leaves(mpx.StaticLossScale(jnp.float32(2.0))) == [2.0]
    paths = [
        jax.tree_util.keystr(path)
        for path, _ in jax.tree.leaves_with_path(mpx.DynamicLossScale())
    ]
    assert paths == [".loss_scale", ".counter"]


@pytest.mark.parametrize("hysteresis", [1, 2])
def test_python_numbers_become_arrays_of_the_types_that_adjust_returns(hysteresis):
    scale = mpx.DynamicLossScale(2**15, 0, hysteresis=hysteresis)
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(scale)]
    assert dtypes == [np.float32, np.int32, np.int32][: len(dtypes)]
    expected = types_of(jax.tree.map(jnp.asarray, scale))
    assert types_of(scale.adjust(GOOD)) == types_of(scale.adjust(BAD)) == expected
    with jax.enable_x64(True):
        for finite in (GOOD, BAD):
            assert (
                types_of(
                    mpx.DynamicLossScale(2**15, 0, hysteresis=hysteresis).adjust(finite)
                )
                == expected
            )


SCALES = [
    mpx.StaticLossScale(2.0**16),
    mpx.DynamicLossScale(2.0**16),
    mpx.StaticLossScale(jnp.float32(2.0**16)),
]


@pytest.mark.parametrize("scale", SCALES, ids=repr)
@pytest.mark.parametrize(
    "dtype", ["float8_e5m2", "float8_e4m3fn", "float16", "bfloat16", "float32"]
)
def test_leaves_are_scaled_and_unscaled_in_float32(scale, dtype):
    """3 * 2**16 and 2**-9 / 2**16 have no float16 value, and JAX promotes no 8-bit
    float by itself.
    """
    values = np.array([3.0, -0.0, 2.0**-9], np.float32)
    tree = {"w": jnp.asarray(values).astype(dtype), "none": None}
    assert_same_bits(
        scale.scale(tree),
        {"w": jnp.asarray(values * np.float32(2.0**16)), "none": None},
    )
    assert_same_bits(
        scale.unscale(tree),
        {"w": jnp.asarray(values * np.float32(2.0**-16)), "none": None},
    )
    assert jnp.isinf(jnp.float16(3.0) * 2.0**16)  # negative controls
    assert jnp.float16(2.0**-9) * 2.0**-16 == 0


def test_an_integer_array_is_warned_of_and_a_python_integer_is_not():
    for name in ("loss_scale", "min_loss_scale"):
        with pytest.warns(
            UserWarning, match=f"Expected floating type for {name}, got int32"
        ):
            mpx.DynamicLossScale(**{name: jnp.int32(1)})
    assert mpx.DynamicLossScale(8).loss_scale.dtype == np.float32


def test_powers_of_two_and_traced_scales_are_accepted():
    for number in (jnp.float32(0.5), 2.0**-126, 2.0**126):
        require_powers_of_two(mpx.StaticLossScale(number), "test")
    for scale in (mpx.NoOpLossScale(), mpx.DynamicLossScale()):
        require_powers_of_two(scale, "test")
    jax.jit(lambda s: require_powers_of_two(mpx.StaticLossScale(s), "test"))(
        jnp.float32(3)
    )


@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float32", "complex64", "float8_e5m2"]
)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_one_number_that_is_not_finite_is_found_in_any_dtype_and_place(wrap, dtype):
    all_finite, key = wrap(mpx.all_finite), jax.random.key(1)
    good = {
        "x": jnp.zeros((2, 3), dtype),
        "n": jnp.arange(2),
        "key": key,
        "none": None,
        "empty": jnp.ones(0),
    }
    assert all_finite(good)
    for bad in (np.inf, -np.inf, np.nan):
        assert not all_finite(good | {"x": good["x"].at[1, 2].set(bad)})
        assert not all_finite(good | {"scalar": jnp.float32(bad)})
        assert not all_finite(jax.lax.complex(jnp.float32(0), jnp.float32(bad)))


def odd_tree(flip):
    """Return leaves whose bits arithmetic would change: -0.0, NaN payloads, subnormals,
    keys; with `flip`, others.
    """
    wide = np.array(
        [0x8000_0000, 0x7FC0_0001, 0xFFFF_FFFF, 0x0000_0001, 0xFF80_0000], np.uint32
    ) ^ np.uint32(flip)
    half = np.array([0x8000, 0x7E01, 0xFFFF, 0x0001, 0xFC00], np.uint16) ^ np.uint16(
        flip
    )
    brain = np.array([0x8000, 0x7FC0, 0xFFC0, 0x0001, 0xFF00], np.uint16) ^ np.uint16(
        0x8000 * (flip > 0)
    )
    return {
        "float32": jnp.asarray(wide.view(np.float32)),
        "float16": jnp.asarray(half.view(np.float16)),
        "bfloat16": jnp.asarray(brain.view(jnp.bfloat16)),
        "int": jnp.arange(3) + flip,
        "bool": jnp.array([True, False]) ^ bool(flip),
        "key": jax.random.key(flip),
        "keys": jax.random.split(jax.random.key(flip), 2),
        "none": None,
        "empty": jnp.ones((0, 2), jnp.float32),
    }


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_select_tree_keeps_the_bits_of_the_chosen_tree(wrap):
    a, b = odd_tree(0), odd_tree(2)
    assert all(
        (bits(a[name]) != bits(b[name])).all()
        for name in a
        if name not in ("none", "key", "keys")
    )
    select = wrap(mpx.select_tree)
    for chooses_a in (GOOD, True, np.True_):
        assert_same_bits(select(chooses_a, a, b), a)
    assert_same_bits(select(BAD, a, b), b)
    # A CPU has no bfloat16 select and goes through float32, which may change the
    # payload of a NaN.
    nan = jnp.asarray(np.array([0x7F81, 0xFFFF], np.uint16).view(jnp.bfloat16))
    assert jnp.isnan(select(GOOD, nan, jnp.zeros(2, jnp.bfloat16))).all()
    # Negative control: arithmetic loses the sign.
    assert not np.signbit(jnp.float32(-0.0) * 1.0 + jnp.float32(1) * 0.0)


def test_counters_saturate():
    scale = mpx.DynamicLossScale(2.0**10, hysteresis=2, bad_steps=INT32_MAX).adjust(BAD)
    assert (scale.bad_steps, scale.loss_scale) == (INT32_MAX, 2.0**9)
    assert jnp.int32(INT32_MAX) + 1 < 0  # negative control
    for counter in (INT32_MAX - 1, INT32_MAX):
        scale = mpx.DynamicLossScale(
            2.0**10, counter=jnp.int32(counter), period=INT32_MAX
        ).adjust(GOOD)
        assert (scale.counter, scale.loss_scale) == (0, 2.0**11)


@pytest.mark.parametrize(
    "make",
    [
        lambda: mpx.StaticLossScale("x"),
        lambda: mpx.StaticLossScale(None),
        lambda: mpx.DynamicLossScale("x"),
        lambda: mpx.DynamicLossScale(counter=[1]),
        lambda: mpx.DynamicLossScale(factor="2"),
    ],
)
def test_what_is_no_number_is_refused_when_a_scale_is_made(make):
    with pytest.raises(TypeError, match=r"LossScale`: `\w+` must be a number, but got"):
        make()
