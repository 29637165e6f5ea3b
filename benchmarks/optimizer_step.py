"""What one AdamW step costs on the device: its time beside another step, and beside the
bound of its program.

    PYTHONPATH=. python -m benchmarks.on_gpu --parts optimizer --out found

On the 148 tensors of GPT-2 124M and on one tensor of 2**27 numbers:

- `mpx.fused_update` with the recipes that keep moments in few bits, and with 8-bit
  codes to nearest, each beside float32 AdamW by Optax alone.
- Float32 by Optax alone; float32 masters (full); their 16 low bits (split); split
  masters with both moments in 8 bits to nearest; Kahan summation with bfloat16 moments;
  each beside the same step by hand for each tensor in plain `jax.numpy`
  (`benchmarks.adamw_by_hand`).

Parameters and gradients are bfloat16, those of float32 AdamW float32. A step is the
fused one, or `tx.update` and `optax.apply_updates`. All is compiled ahead, with
parameters and state donated. Two steps run in turn, A B B A, from several fresh starts:
in a loop inside of one program, which is the device's time, and by separate calls,
which the host can make longer. Before that, the results of three steps are compared.

Beside the times stands what the compiled programs say (`benchmarks.reading`). The
target: the time with mpx is at most 1.03 of the time by hand. Sizes are divided by
`scale`: the leading dimension of matrices, or the length of the tensor.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import mpx
from benchmarks import adamw_by_hand as hand
from benchmarks.adamw_by_hand import ByHand
from benchmarks.report import Row, Sheet
from benchmarks.timing import COLUMNS, LOOP_STEPS, compare_in_loops, in_a_loop, own

Shapes = dict[str, tuple[int, ...]]

BITS_STEPS = 3  # steps after which results are compared
GPU_CALLS = 16  # steps in a turn on a GPU, whose queue holds a few dozen


def adamw() -> optax.GradientTransformation:
    """Return the rule of all recipes."""
    return optax.adamw(hand.LEARNING_RATE)


def split_8bit() -> optax.GradientTransformation:
    """Return AdamW with both moments in 8 bits to nearest, and split masters."""
    moments = {"mu": mpx.Blockwise8bit(), "nu": mpx.Blockwise8bit()}
    return mpx.master_weights(
        mpx.low_precision_state(adamw(), moments, rounding="nearest"), storage="split"
    )


def kahan() -> optax.GradientTransformation:
    """Return AdamW in 16 bits."""
    options = {
        "momentum_dtype": jnp.bfloat16,
        "variance_dtype": jnp.bfloat16,
        "use_kahan_summation": True,
    }
    return mpx.any_precision_adamw(
        hand.LEARNING_RATE, weight_decay=hand.WEIGHT_DECAY, **options
    )


class Recipe(NamedTuple):
    """One recipe, twice.

    Attributes:
        dtype: of parameters and gradients.
        make: makes the transformation.
        by_hand: the same step of one tensor. With None the step is that of
            `mpx.fused_update`, beside float32 AdamW.
        beside: what the step by hand keeps beside a parameter, to start with.
        moment: a moment of the step by hand, to start with.
    """

    dtype: Any
    make: Callable[[], optax.GradientTransformation]
    by_hand: Callable | None = None
    beside: Callable[[jax.Array], jax.Array | None] = lambda p: None
    moment: Callable[[jax.Array, bool], Any] = lambda p, signed: jnp.zeros_like(
        p, jnp.float32
    )


def zeros(dtype: Any) -> Callable[[jax.Array], jax.Array]:
    """Return what makes zeros for a parameter."""
    return functools.partial(jnp.zeros_like, dtype=dtype)


def fused(name: str) -> Recipe:
    """Return the fused step of a recipe of mpx."""
    return Recipe(jnp.bfloat16, lambda: mpx.mixed_precision(adamw(), name))


F32 = Recipe(jnp.float32, adamw, hand.plain_step)
FUSED = {
    "fused, 8-bit to nearest": Recipe(jnp.bfloat16, split_8bit),
    **{
        f"fused, {name}": fused(name)
        for name in ("bf16-split-8bit", "bf16-split24-8bit", "bf16-split24-4bit")
    },
}
BY_HAND = {
    "f32": F32,
    "full": Recipe(
        jnp.bfloat16,
        lambda: mpx.master_weights(adamw()),
        hand.full_step,
        lambda p: p.astype(jnp.float32),
    ),
    "split": Recipe(
        jnp.bfloat16,
        lambda: mpx.master_weights(adamw(), storage="split"),
        hand.split_step,
        zeros(jnp.uint16),
    ),
    "split + 8-bit": Recipe(
        jnp.bfloat16, split_8bit, hand.split_step, zeros(jnp.uint16), hand.coded_zeros
    ),
    "Kahan + bf16 moments": Recipe(
        jnp.bfloat16,
        kahan,
        hand.kahan_step,
        jnp.zeros_like,
        lambda p, _: jnp.zeros_like(p),
    ),
}
RECIPES = FUSED | BY_HAND


class WithMpx(NamedTuple):
    """What a training loop with mpx keeps."""

    params: Any
    opt_state: Any


class Side(NamedTuple):
    """One of two steps.

    Attributes:
        dtype: of parameters and gradients.
        start: makes the state from parameters.
        step: of `(state, grads)`.
    """

    dtype: Any
    start: Callable[[Any], Any]
    step: Callable[[Any, Any], Any]


def side_by_hand(recipe: Recipe, tensor_step: Callable) -> Side:
    """Return the step by hand."""

    def start(params: dict[str, jax.Array]) -> ByHand:
        beside = {name: recipe.beside(p) for name, p in params.items()}
        mu, nu = (
            {name: recipe.moment(p, signed) for name, p in params.items()}
            for signed in (True, False)
        )
        return ByHand(params, beside, mu, nu, jnp.int32(0))

    step = functools.partial(hand.step_by_hand, tensor_step)
    return Side(recipe.dtype, start, step)


def side_of_rule(recipe: Recipe) -> Side:
    """Return the step with mpx, or with Optax alone."""
    tx = recipe.make()

    def plain(state: WithMpx, grads: Any) -> WithMpx:
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        return WithMpx(optax.apply_updates(state.params, updates), opt_state)

    def fused(state: WithMpx, grads: Any) -> WithMpx:
        return WithMpx(*mpx.fused_update(tx)(grads, state.opt_state, state.params))

    return Side(
        recipe.dtype,
        lambda params: WithMpx(params, tx.init(params)),
        plain if recipe.by_hand else fused,
    )


def sides_of(recipe: Recipe) -> tuple[Side, Side]:
    """Return the step that a recipe stands beside, and its own."""
    by_hand = recipe.by_hand
    beside = side_by_hand(recipe, by_hand) if by_hand else side_of_rule(F32)
    return beside, side_of_rule(recipe)


def make_data(shapes: Shapes) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Return float32 parameters and gradients: random, and of a model's magnitudes."""
    rng = np.random.default_rng(0)
    normal = lambda shape, size: jnp.asarray(
        np.float32(size) * rng.standard_normal(shape, np.float32)
    )
    make = lambda size: {name: normal(shape, size) for name, shape in shapes.items()}
    return make(0.02), make(1e-3)


def compile_steps(
    steps: Sequence[Callable], states: Sequence[Any], data: Sequence[Any]
) -> list[Callable]:
    """Return steps, compiled ahead with their states donated, as in training; only such
    programs can be read.
    """
    return [
        jax.jit(step, donate_argnums=0).lower(*arguments).compile()
        for step, *arguments in zip(steps, states, data, strict=True)
    ]


def gpt2_shapes() -> Shapes:
    """Return the shapes of GPT-2 124M: 148 tensors, 124 million numbers."""
    block = {
        "ln_1.w": (768,), "ln_1.b": (768,), "attn.c_attn.w": (768, 2304), "attn.c_attn.b": (2304,),
        "attn.c_proj.w": (768, 768), "attn.c_proj.b": (768,), "ln_2.w": (768,), "ln_2.b": (768,),
        "mlp.c_fc.w": (768, 3072), "mlp.c_fc.b": (3072,), "mlp.c_proj.w": (3072, 768), "mlp.c_proj.b": (768,),
    }  # fmt: skip
    shapes = {
        "wte": (50257, 768),
        "wpe": (1024, 768),
        "ln_f.w": (768,),
        "ln_f.b": (768,),
    }
    return shapes | {
        f"h.{i}.{name}": shape for i in range(12) for name, shape in block.items()
    }


def make_shapes(tensors: str, scale: int) -> Shapes:
    """Return the shapes of GPT-2's tensors, with the rows of matrices divided, or of
    one shorter vector.
    """
    if tensors == "one":
        return {"one": (2**27 // scale,)}
    return {
        name: (max(shape[0] // scale, 1), *shape[1:]) if len(shape) > 1 else shape
        for name, shape in gpt2_shapes().items()
    }


def title_of(tensors: str, shapes: Shapes) -> str:
    """Return what a set of tensors is called."""
    count = "1 tensor" if len(shapes) == 1 else f"{len(shapes)} tensors"
    return f"{tensors}: {count}, {sum(map(math.prod, shapes.values())):,} parameters"


# --- Comparison of results. ---
def compare_results(
    steps: Sequence[Callable], states: Sequence[Any], grads: Sequence[Any]
) -> list[Row]:
    """Return for each part of the results how many numbers differ from those by hand
    after a few steps, and by how much; of a fused step only what low bits were lost.
    """
    for _ in range(BITS_STEPS):
        states = [step(*of) for step, *of in zip(steps, states, grads, strict=True)]
    beside, ours = states
    lost = zero_low_bits("mpx", ours.opt_state)
    if not isinstance(beside, ByHand):
        return lost
    moments = [optax.tree.get(ours.opt_state, name) for name in ("mu", "nu")]
    masters = jax.tree.map(
        master_by_hand, beside.params, beside.beside, is_leaf=lambda x: x is None
    )
    pairs = {
        "parameters": (beside.params, ours.params),
        "masters": (masters, mpx.master_params(ours.params, ours.opt_state)),
        "moments": ((beside.mu, beside.nu), moments),
    }
    return differing(pairs) + zero_low_bits("by hand", beside.beside) + lost


def zero_low_bits(side: str, state: Any) -> list[Row]:
    """Return a row if more low bits of masters are zero than the one of 65,536 that
    chance makes so: some were lost.
    """
    low = [x for x in jax.tree.leaves(state) if x.dtype == np.uint16]
    zeros, size = sum(int(jnp.sum(x == 0)) for x in low), sum(x.size for x in low)
    row = {
        "numbers": f"zero low bits, {side}",
        "differ": zeros,
        "of": size,
        "relative": 1.0,
        "absolute": 0.0,
    }
    return [row] if zeros > size / 1_000 else []


def master_by_hand(p: jax.Array, beside: jax.Array | None) -> jax.Array:
    """Return the best float32 value of a parameter."""
    if beside is None or beside.dtype == jnp.float32:
        return p if beside is None else beside
    return (
        hand.joined(p, beside)
        if beside.dtype == jnp.uint16
        else p.astype(jnp.float32) + beside.astype(jnp.float32)
    )


def differing(pairs: dict[str, tuple[Any, Any]]) -> list[Row]:
    """Return a row for each kind of numbers in two results."""
    return [
        {"numbers": kind} | differences(*map(jax.tree.leaves, pair))
        for kind, pair in pairs.items()
    ]


def differences(a: list[jax.Array], b: list[jax.Array]) -> Row:
    """Return how many numbers differ in any bit, of how many, and the largest
    difference.
    """
    counts, relative, absolute = jax.device_get(_differences(a, b))
    row: Row = {"differ": sum(map(int, counts)), "of": sum(x.size for x in a)}
    return row | {"relative": float(max(relative)), "absolute": float(max(absolute))}


@jax.jit
def _differences(a: list[jax.Array], b: list[jax.Array]) -> Any:
    def one(x, y):
        bits = [
            lax.bitcast_convert_type(z, jnp.dtype(f"u{z.dtype.itemsize}"))
            for z in (x, y)
        ]
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        absolute = jnp.where(x == y, 0.0, jnp.abs(x - y))
        relative = jnp.where(
            x == y, 0.0, absolute / jnp.maximum(jnp.abs(x), jnp.abs(y))
        )
        return (
            jnp.sum(bits[0] != bits[1]),
            jnp.max(relative, initial=0.0),
            jnp.max(absolute, initial=0.0),
        )

    return tuple(zip(*(one(x, y) for x, y in zip(a, b, strict=True)), strict=True))


# --- Measurement. ---
def measure(recipe: str, tensors: str, scale: int, starts: int, turns: int) -> Row:
    """Return results and times of one recipe, and what its programs say.

    Args:
        recipe: its name.
        tensors: `"gpt2"`, or `"one"`.
        scale: what their sizes are divided by.
        starts: fresh states of each step.
        turns: timed turns from each.
    """
    chosen, shapes = RECIPES[recipe], make_shapes(tensors, scale)
    sides, made = sides_of(chosen), make_data(shapes)

    def stored(side: Side, tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(side.dtype), tree)

    states = [jax.jit(side.start)(stored(side, made[0])) for side in sides]
    grads = [stored(side, made[1]) for side in sides]
    make_states = lambda: tuple(map(own, states))
    steps = compile_steps([side.step for side in sides], states, grads)
    is_by_hand = chosen.by_hand is not None
    row: Row = {
        "recipe": recipe,
        "title": title_of(tensors, shapes),
        "beside": "by hand" if is_by_hand else "f32",
        "results": compare_results(steps, make_states(), grads),
    }
    count = LOOP_STEPS.get(jax.default_backend(), 4)
    looped = [in_a_loop(side.step, count) for side in sides]
    return row | compare_in_loops(
        steps,
        compile_steps(looped, states, grads),
        count,
        make_states,
        grads,
        starts=starts,
        turns=turns,
        gpu_calls=GPU_CALLS,
        judge=is_by_hand and chosen is not F32,
    )


# --- Tables. ---
DIFFERING = {
    "differ": "{differ:,}",
    "of": "{of:,}",
    "by, relative": "{relative:.1e}",
    "by": "{absolute:.1e}",
}


def sheets(rows: list[Row]) -> list[Sheet]:
    """Return all tables of each set of tensors."""
    found = []
    columns = {"recipe": "{recipe}", "beside": "{beside}"} | COLUMNS
    for title in dict.fromkeys(row["title"] for row in rows):
        group = [row for row in rows if row["title"] == title]
        found.append(Sheet(title, group, columns))
        found.append(
            differing_sheet(
                f"{title}: what differs after {BITS_STEPS} steps", group, "recipe"
            )
        )
    return found


def differing_sheet(title: str, rows: list[Row], name: str) -> Sheet:
    """Return what differs between the results by hand and with mpx; `name` is the key
    of what a row is called.
    """
    cells = [
        {name: row[name]} | found
        for row in rows
        for found in row["results"]
        if found["differ"]
    ]
    columns = {name: f"{{{name}}}", "numbers": "{numbers}"} | DIFFERING
    return Sheet(title, cells, columns, "" if cells else "Nothing differs.")
