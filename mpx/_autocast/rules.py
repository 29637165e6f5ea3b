"""The table of `autocast`: which operations run in the compute dtype, which may pass it on, and which stay as they are.

Data only. A rule is one of five words:

| rule | what happens |
|---|---|
| `lower` | float32 operands are rounded to the compute dtype, and so is the result |
| `lower_on_grid` | as `lower` where operands are values of the compute dtype already, or weights; else as `keep` |
| `follow` | runs as traced; its results are values of its operands, so that rounding them again would be exact |
| `enter` | an operation that holds a program: the table is applied to that one |
| `keep` | runs as traced, in float32 |
"""

from typing import Literal, NamedTuple

Rule = Literal["lower", "lower_on_grid", "follow", "enter", "keep"]


class Group(NamedTuple):
    """Primitives that have a rule for one reason.

    Attributes:
        rule: what happens to them.
        reason: why, as `explain` shows it.
        primitives: their names, those of `jax.extend.core.Primitive.name`.
        can_lower: whether a user's table may lower them: arithmetic on floating-point arrays and nothing else.
    """

    rule: Rule
    reason: str
    primitives: tuple[str, ...]
    can_lower: bool = False


GROUPS = (
    Group(
        "lower",
        "contraction: nearly all FLOPs of a model; tensor cores multiply 16-bit numbers and add in float32",
        ("conv_general_dilated", "dot_general", "ragged_dot_general"),
        can_lower=True,
    ),
    Group(
        "follow",
        "moves values",
        (
            *("broadcast_in_dim", "broadcast_to", "concatenate", "copy", "copy_p", "dynamic_slice", "gather"),
            *("dynamic_update_slice", "pad", "reshape", "rev", "roll", "scatter", "select_n", "slice", "sort"),
            *("split", "squeeze", "stack", "tile", "top_k", "transpose", "unstack"),
        ),
    ),
    Group(
        "follow",
        "moves values between devices",
        (
            *("all_gather", "all_gather_invariant", "all_gather_reduced", "all_to_all", "device_put", "pbroadcast"),
            *("ppermute", "pvary", "ragged_all_to_all", "reshard", "sharding_constraint"),
        ),
    ),
    Group(
        "follow",
        "leaves values as they are",
        ("convert_element_type", "layout_constraint", "name", "optimization_barrier", "stop_gradient"),
    ),
    Group(
        "follow",
        "selects one of its operands' values",
        (
            *("clamp", "cummax", "cummin", "max", "min", "pmax", "pmin", "reduce_max", "reduce_min"),
            *("reduce_window_max", "reduce_window_min"),
        ),
    ),
    Group(
        "follow",
        "exact on the numbers of any floating-point format",
        ("abs", "ceil", "floor", "neg", "round", "sign"),
    ),
    Group(
        "enter",
        "holds a program",
        ("call", "closed_call", "cond", "eval_jaxpr", "jit", "remat2", "scan", "shard_map", "while"),
    ),
    Group(
        "keep",
        "a custom derivative belongs to the function that its author wrote",
        ("custom_jvp_call", "custom_lin", "custom_vjp_call", "custom_vmap_call", "linear_call"),
    ),
    Group(
        "keep",
        "a kernel or a foreign call has dtypes of its own",
        (
            *(
                "call_exported",
                "composite",
                "compute_on",
                "core_map",
                "cudnn_fusion",
                "custom_partitioning",
                "ffi_call",
            ),
            *("mpmd_map", "pallas_call", "scaled_dot", "scaled_matmul", "scaled_matmul_wrapper", "tpu_custom_call"),
            *("dot_product_attention_fwd", "dot_product_attention_fwd_wrapper", "xla_metadata_call"),
            *("dot_product_attention_bwd", "dot_product_attention_bwd_wrapper"),
        ),
    ),
    Group(
        "keep",
        "a sum adds up the roundings of its terms",
        ("add", "add_any", "cumsum", "psum", "psum_invariant", "reduce_scatter", "reduce_sum", "sub"),
        can_lower=True,
    ),
    Group(
        "keep",
        "a sum, or another function, of many terms",
        (
            *("reduce", "reduce_window", "reduce_window_sum", "scatter-add", "scatter-mul", "scatter-sub"),
            *("select_and_gather_add", "select_and_scatter", "select_and_scatter_add"),
            *("unreduced_psum", "unreduced_reduce_scatter"),
        ),
    ),
    Group(
        "keep",
        "a product can leave the range of float16",
        ("cumprod", "div", "integer_pow", "mul", "one_minus_square", "pow", "reciprocal", "reduce_prod", "square"),
        can_lower=True,
    ),
    Group(
        "keep",
        "exponentials, logarithms and roots magnify rounding errors or leave the range",
        (
            *("cbrt", "cumlogsumexp", "exp", "exp2", "expm1", "log", "log1p", "log2", "rsqrt", "sqrt"),
            *("asinh", "acosh", "cosh", "sinh"),
        ),
        can_lower=True,
    ),
    Group(
        "keep",
        "elementwise, fused into its neighbours: float32 costs nothing there",
        ("atanh", "erf", "erf_inv", "erfc", "logistic", "tanh"),
        can_lower=True,
    ),
    Group(
        "keep",
        "angles and positions are large numbers of which the last bits count",
        ("acos", "asin", "atan", "atan2", "cos", "rem", "sin", "tan"),
        can_lower=True,
    ),
    Group("keep", "numbers that last bits tell apart", ("iota", "nextafter")),
    Group(
        "keep",
        "special functions are defined for float32",
        (
            *("bessel_i0e", "bessel_i1e", "digamma", "igamma", "igamma_grad_a", "igammac", "lgamma", "polygamma"),
            *("random_gamma", "random_gamma_grad", "regularized_incomplete_beta", "zeta"),
        ),
    ),
    Group(
        "keep",
        "linear algebra: errors grow with the condition number",
        (
            *("cholesky", "cholesky_update", "custom_linear_solve", "eig", "eigh", "hessenberg", "lu"),
            *("lu_pivots_to_permutation", "householder_product", "qr", "schur", "svd", "symmetric_product"),
            *("triangular_solve", "tridiagonal", "tridiagonal_solve", "geqrf", "geqp3"),
        ),
    ),
    Group(
        "keep",
        "has no floating-point result, or decides about one",
        (
            *("and", "approx_top_k", "argmax", "argmin", "bitcast_convert_type", "clz", "eq", "eq_to", "ge", "gt"),
            *("is_finite", "le", "le_to", "lt", "lt_to", "mulhi", "ne", "not", "or", "population_count", "xor"),
            *("reduce_and", "reduce_or", "reduce_xor", "shift_left", "shift_right_arithmetic", "shift_right_logical"),
            *("reduce_precision", "scatter-max", "scatter-min", "stochastic_round"),
        ),
    ),
    Group("keep", "complex numbers have no 16-bit format", ("complex", "conj", "fft", "imag", "real")),
    Group(
        "keep",
        "random numbers",
        (
            *("random_bits", "random_clone", "random_fold_in", "random_seed", "random_split", "random_unwrap"),
            *("random_wrap", "rng_bit_generator", "rng_uniform", "threefry2x32", "iota_2x32_shape"),
        ),
    ),
    Group(
        "keep",
        "effects, references and bookkeeping",
        (
            *("addupdate", "after_all", "axis_index", "callback", "check", "create_token", "debug_callback"),
            *("debug_print", "dce_sink", "empty", "empty2", "empty_ref", "free_ref", "freeze", "get", "infeed"),
            *("io_callback", "new_ref", "outfeed", "platform_index", "pure_callback", "ref", "run_state", "swap"),
            *("inspect_sharding", "xla_metadata_value", "zeros_like", "dimension_size", "create_linear"),
        ),
    ),
)

DEFAULT_RULES: dict[str, Rule] = {name: group.rule for group in GROUPS for name in group.primitives}
"""The rule of each primitive. Extend it with `|`: `rules=mpx.DEFAULT_RULES | {"conv_general_dilated": "keep"}`."""

_ELEMENTWISE: tuple[str, ...] = ("add", "mul", "integer_pow", "tanh", "logistic", "erf", "erfc")

FAST_RULES: dict[str, Rule] = {**DEFAULT_RULES, **dict.fromkeys(_ELEMENTWISE, "lower_on_grid")}
"""`DEFAULT_RULES`, with the elementwise operations of activations, gates and biases in the compute dtype.

Sums, products, `tanh`, `logistic` and `erf` of values that lie on the grid of the compute dtype anyway, results of
contractions for the most part, run in it; biases and constants of the source code are rounded for that. What the
backward pass keeps is then as small as that of a model cast by hand, also without `checkpoint`. Squares stay float32
(norms add them up), and so do softmax, norms, losses and what a loop carries. Gradients of weights and biases are added
up in float32 as ever. What is lost: each activation has a rounding error of its own, a residual stream that is written
out layer by layer is rounded at each layer, a sum of 300 ones that is written out is 256, and in float16 a product of
two activations can overflow.

Measured against float64 (`benchmarks/autocast.py`, a transformer of 4 layers after 50 steps, mean of 5 seeds, on a CPU,
jax 0.10.2): the relative error of the gradient in bfloat16 is 8.5e-3, with the default table 8.2e-3, cast by hand
1.1e-2; with bfloat16 parameters 7.9e-3, 6.8e-3 and 8.5e-3; in float16 1.1e-3, 1.0e-3 and 1.4e-3.
"""

LOWERABLE: frozenset[str] = frozenset(name for group in GROUPS if group.can_lower for name in group.primitives)

REASONS: dict[str, str] = {name: group.reason for group in GROUPS for name in group.primitives}
