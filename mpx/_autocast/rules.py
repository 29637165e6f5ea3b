"""The table of `autocast`: which operations run in the compute dtype, which may pass it on, and which stay as they are.

Data only. A rule is one of five words:

| rule | what happens |
|---|---|
| `narrow` | float32 operands are rounded to the compute dtype, and so is the result |
| `narrow_if_representable` | as `narrow` if the compute dtype represents the operands already, or they are weights |
| `follow` | runs as traced; its results are values of its operands, so that rounding them again would be exact |
| `enter` | an operation that holds a program: the table is applied to that one |
| `keep` | runs as traced, in float32 |
"""

from collections.abc import Collection
from typing import Literal, NamedTuple

from mpx import _jaxprs

Rule = Literal["narrow", "narrow_if_representable", "follow", "enter", "keep"]


class Group(NamedTuple):
    """Primitives that have a rule for one reason."""

    rule: Rule
    reason: str  # as `explain` shows it
    primitives: Collection[str]  # names, those of `jax.extend.core.Primitive.name`
    can_narrow: bool = False  # whether a user's table may narrow them: arithmetic on floating-point arrays only


# A primitive that moves or selects values is added to a set in `_jaxprs`; every other one here.
GROUPS = (
    Group(
        "narrow",
        "contraction: nearly all FLOPs of a model; tensor cores multiply 16-bit numbers and add in float32",
        _jaxprs.CONTRACTIONS,
        can_narrow=True,
    ),
    Group("follow", "leaves values as they are", _jaxprs.IDENTITIES | {"convert_element_type"}),
    Group("follow", "moves values", _jaxprs.REARRANGEMENTS),
    Group("follow", "moves values between devices", _jaxprs.EXCHANGES),
    Group("follow", "selects one of its operands' values", _jaxprs.SELECTIONS | _jaxprs.AGREEMENTS),
    Group("follow", "exact on the numbers of any floating-point format", "abs ceil floor neg round sign".split()),
    Group("enter", "holds a program", _jaxprs.CALLS | _jaxprs.LOOPS | {"cond", "shard_map"}),
    Group(
        "keep",
        "a custom derivative belongs to the function that its author wrote",
        _jaxprs.CUSTOM_CALLS | {"custom_lin", "custom_vmap_call", "linear_call"},
    ),
    Group(
        "keep",
        "a kernel or a foreign call has dtypes of its own",
        (
            "call_exported composite compute_on core_map cudnn_fusion custom_partitioning ffi_call mpmd_map "
            "pallas_call scaled_dot scaled_matmul scaled_matmul_wrapper tpu_custom_call xla_metadata_call "
            "dot_product_attention_bwd dot_product_attention_bwd_wrapper dot_product_attention_fwd "
            "dot_product_attention_fwd_wrapper"
        ).split(),
    ),
    Group(
        "keep",
        "a sum adds up the roundings of its terms",
        _jaxprs.SUMS | {"add", "cumsum", "sub"},
        can_narrow=True,
    ),
    Group(
        "keep",
        "a sum, or another function, of many terms",
        (
            "reduce reduce_window reduce_window_sum scatter-add scatter-mul scatter-sub select_and_gather_add "
            "select_and_scatter select_and_scatter_add unreduced_psum unreduced_reduce_scatter"
        ).split(),
    ),
    Group(
        "keep",
        "a product can leave the range of float16",
        "cumprod div integer_pow mul one_minus_square polynomial pow reciprocal reduce_prod square".split(),
        can_narrow=True,
    ),
    Group(
        "keep",
        "exponentials, logarithms and roots magnify rounding errors or leave the range",
        "acosh asinh cbrt cosh cumlogsumexp exp exp2 expm1 log log1p log2 rsqrt sinh sqrt".split(),
        can_narrow=True,
    ),
    Group(
        "keep",
        "elementwise, fused into its neighbours: float32 costs nothing there",
        "atanh erf erf_inv erfc logistic tanh".split(),
        can_narrow=True,
    ),
    Group(
        "keep",
        "the low bits of angles and positions matter",
        "acos asin atan atan2 cos rem sin tan".split(),
        can_narrow=True,
    ),
    Group("keep", "rounding would make different numbers equal", ("iota", "nextafter")),
    Group(
        "keep",
        "special functions are defined for float32",
        (
            "bessel_i0e bessel_i1e digamma igamma igamma_grad_a igammac lgamma polygamma random_gamma "
            "random_gamma_grad regularized_incomplete_beta zeta"
        ).split(),
    ),
    Group(
        "keep",
        "linear algebra: errors grow with the condition number",
        (
            "cholesky cholesky_update custom_linear_solve eig eigh geqp3 geqrf hessenberg householder_product lu "
            "lu_pivots_to_permutation qr schur svd symmetric_product triangular_solve tridiagonal tridiagonal_solve"
        ).split(),
    ),
    Group(
        "keep",
        "has no floating-point result, or decides about one",
        (
            "and approx_top_k argmax argmin bitcast_convert_type clz eq eq_to ge gt is_finite le le_to lt lt_to mulhi "
            "ne not or population_count reduce_and reduce_or reduce_precision reduce_xor scatter-max scatter-min "
            "shift_left shift_right_arithmetic shift_right_logical stochastic_round xor"
        ).split(),
    ),
    Group("keep", "complex numbers have no 16-bit format", "complex conj fft imag real".split()),
    Group(
        "keep",
        "random numbers",
        (
            "iota_2x32_shape random_bits random_clone random_fold_in random_seed random_split random_unwrap "
            "random_wrap rng_bit_generator rng_uniform threefry2x32"
        ).split(),
    ),
    Group(
        "keep",
        "effects, references and bookkeeping",
        (
            "addupdate after_all axis_index callback check create_linear create_token dce_sink debug_callback "
            "debug_print dimension_size empty empty2 empty_ref free_ref freeze get infeed inspect_sharding "
            "io_callback new_ref outfeed platform_index pure_callback ref run_state swap xla_metadata_value zeros_like"
        ).split(),
    ),
)

DEFAULT_RULES: dict[str, Rule] = {name: group.rule for group in GROUPS for name in sorted(group.primitives)}
"""The rule of each primitive. Extend it with `|`: `rules=mpx.DEFAULT_RULES | {"conv_general_dilated": "keep"}`."""

_ACTIVATIONS = ("add", "mul", "integer_pow", "tanh", "logistic", "erf", "erfc")

FAST_RULES: dict[str, Rule] = {**DEFAULT_RULES, **dict.fromkeys(_ACTIVATIONS, "narrow_if_representable")}
"""`DEFAULT_RULES`, with the elementwise operations of activations, gates and biases in the compute dtype.

Sums, products, `tanh`, `logistic` and `erf` run in the compute dtype if it represents their operands anyway, as it does
most results of contractions; biases and constants of the source code are rounded for that. What the backward pass keeps
is then as small as that of a model cast by hand, also without `checkpoint`. Squares (norms add them up), softmax,
norms, losses, carries of loops, and sums that make gradients of weights and biases stay float32. The price: each
activation has a rounding error of its own, a residual stream that is written out layer by layer is rounded at each
layer, a sum of 300 ones that is written out is 256, and in float16 a product of two activations can overflow.

Measured against float64 (`benchmarks/autocast_accuracy.py`, a transformer of 3 layers after 50 steps, 5 seeds, on a
CPU): the relative error of the gradient in bfloat16 is 9.4e-3, with the default table 8.9e-3, cast by hand 1.1e-2.
"""

CAN_NARROW: frozenset[str] = frozenset(name for group in GROUPS if group.can_narrow for name in group.primitives)

REASONS: dict[str, str] = {name: group.reason for group in GROUPS for name in group.primitives}
