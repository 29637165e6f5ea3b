"""What one AdamW step costs: its time beside the same step by hand, and on a GPU beside the bytes that it must move.

    PYTHONPATH=. python -m benchmarks.on_gpu --parts optimizer --out found

Six recipes, on the 148 tensors of GPT-2 124M and on one tensor of 2**27 numbers:

1. f32: `optax.adamw` on float32 parameters and gradients. mpx has no part in it: it is the yardstick.
2. full: bfloat16 parameters and gradients, float32 masters.
3. split: the same with the masters' 16 low bits.
4. split + 8-bit: the same with both moments in 8 bits, in blocks of 256.
5. Kahan + bf16 moments: bfloat16 parameters, compensation and moments.
6. fused split + 8-bit: the fourth, by `mpx.fused_update`.

A step is `tx.update` and `optax.apply_updates`, or the same written for each tensor in plain `jax.numpy`: AdamW's
equations, the new parameter written directly, masters split and sums compensated by hand. Only the 8-bit codec is
shared, since what is measured is the wrapper around it. Both are compiled ahead, parameters and state are donated, and
they are run in turn, A B B A, from several fresh starts. Before that, the results of three steps are compared. A
master or parameter that has just fallen almost to zero may differ by 2**-24 of what it was, which is much of what it
is: see `mpx.master_weights`.

On a GPU calls are asynchronous: the time of a step is that of many, enqueued one behind another and waited for once. A
single step, and how long the host needs to enqueue it, are given beside it; where the latter is as long as the step,
the host is what was measured. Torch's optimizers run there too, where they can be imported, in a process of their own.

Bytes are those of parameters and state, read and written once, and of gradients, read once. Beside the times stands
what the compiled programs say: bytes moved, kernels, temporaries and, where the device's figures are known, a bound of
the time (`benchmarks.reading`). Targets:

- The time with mpx is at most 1.03 of the time by hand.
- On a GPU it is at most 1.15 of what copying as many bytes takes; the bandwidth of a copy is measured in the same run.
- On a GPU split + 8-bit takes at most 1 / 1.5 of the time of the float32 step.

The sizes are divided by `scale`: the leading dimension of matrices, or the length of the one tensor.

On a CPU, XLA takes temporary arrays of 32 MiB and more anew from the system at every step, page by page: where one side
needs a little more of them, it can lose much time that says nothing about a GPU.
"""

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import mpx
from benchmarks.adamw_by_hand import (
    BLOCK_SIZE,
    LEARNING_RATE,
    WEIGHT_DECAY,
    BlockwiseArray,
    ByHand,
    full_step,
    joined,
    kahan_step,
    plain_step,
    split_step,
    step_by_hand,
)
from benchmarks.adamw_in_torch import torch_times
from benchmarks.reading import absent_figures, compiled_figures, start_compiler
from benchmarks.report import SIDES, Sheet, ratio_cells, verdict
from benchmarks.timing import own, timed_ratio
from mpx._stored.blockwise import Blockwise8bit

Shapes = dict[str, tuple[int, ...]]

MIN_SIZE = 4096  # as in `low_precision_state`

BITS_STEPS = 3  # steps after which results are compared
CALLS = {"cpu": 1, "gpu": 16}  # steps in a turn; a GPU's queue holds a few dozen
COPY_BYTES, COPY_CALLS, COPY_ROUNDS = 2**30, 10, 10

STEP_TARGET, COPY_TARGET, SPEED_TARGET = 1.03, 1.15, 1.5


# ---------------------------------------------------------------------------------------------------------------------
# The recipes.


def coded_zeros(p: jax.Array) -> Any:
    """A moment to start with, in 8 bits; small tensors stay float32."""
    if p.size < MIN_SIZE:
        return jnp.zeros_like(p, jnp.float32)
    scale = jax.eval_shape(Blockwise8bit(BLOCK_SIZE).scales_of, jax.ShapeDtypeStruct(p.shape, jnp.float32))
    return BlockwiseArray(jnp.zeros_like(p, jnp.uint8), jnp.zeros_like(scale))


def split_8bit() -> optax.GradientTransformation:
    """AdamW with both moments in 8 bits, and split masters."""
    moments = {"mu": mpx.Blockwise8bit(), "nu": mpx.Blockwise8bit()}
    inner = mpx.low_precision_state(optax.adamw(LEARNING_RATE), moments)
    return mpx.master_weights(inner, storage="split")


def kahan() -> optax.GradientTransformation:
    """AdamW in 16 bits."""
    options = {"momentum_dtype": jnp.bfloat16, "variance_dtype": jnp.bfloat16, "use_kahan_summation": True}
    return mpx.any_precision_adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY, **options)


class Recipe(NamedTuple):
    """One recipe, twice.

    Attributes:
        dtype: of parameters and gradients.
        make: makes the transformation.
        by_hand: the same step of one tensor.
        beside: what the step by hand keeps beside a parameter, to start with.
        moment: a moment of the step by hand, to start with.
        is_fused: whether the step with mpx is that of `mpx.fused_update`.
    """

    dtype: Any
    make: Callable[[], optax.GradientTransformation]
    by_hand: Callable
    beside: Callable[[jax.Array], jax.Array | None]
    moment: Callable[[jax.Array], Any] = functools.partial(jnp.zeros_like, dtype=jnp.float32)
    is_fused: bool = False


low_bits = lambda p: jnp.zeros_like(p, jnp.uint16)

RECIPES = {
    "f32": Recipe(jnp.float32, lambda: optax.adamw(LEARNING_RATE), plain_step, lambda p: None),
    "full": Recipe(
        jnp.bfloat16, lambda: mpx.master_weights(optax.adamw(LEARNING_RATE)), full_step, lambda p: p.astype(jnp.float32)
    ),
    "split": Recipe(
        jnp.bfloat16, lambda: mpx.master_weights(optax.adamw(LEARNING_RATE), storage="split"), split_step, low_bits
    ),
    "split + 8-bit": Recipe(jnp.bfloat16, split_8bit, split_step, low_bits, coded_zeros),
    "Kahan + bf16 moments": Recipe(jnp.bfloat16, kahan, kahan_step, jnp.zeros_like, jnp.zeros_like),
}
RECIPES["fused split + 8-bit"] = RECIPES["split + 8-bit"]._replace(is_fused=True)
YARDSTICK, FASTEST = "f32", "split + 8-bit"


class WithMpx(NamedTuple):
    """What a training loop with mpx keeps."""

    params: dict[str, jax.Array]
    opt_state: Any


def make_steps(recipe: Recipe) -> tuple[Callable, Callable]:
    """The step by hand and that with mpx, or with Optax alone, each of `(state, grads)`."""
    tx = recipe.make()

    def by_hand(state: ByHand, grads: Any) -> ByHand:
        return step_by_hand(recipe.by_hand, state, grads)

    def with_mpx(state: WithMpx, grads: Any) -> WithMpx:
        if recipe.is_fused:
            return WithMpx(*mpx.fused_update(tx)(grads, state.opt_state, state.params))
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        return WithMpx(optax.apply_updates(state.params, updates), opt_state)

    return by_hand, with_mpx


def make_starts(recipe: Recipe, params: dict[str, jax.Array]) -> tuple[ByHand, WithMpx]:
    """The two states to start from; steps get copies, since every step gives its old state back."""
    zeros = lambda make: {name: make(p) for name, p in params.items()}
    by_hand = ByHand(params, zeros(recipe.beside), zeros(recipe.moment), zeros(recipe.moment), jnp.int32(0))
    return by_hand, WithMpx(params, recipe.make().init(params))


def make_data(shapes: Shapes) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """float32 parameters and gradients: random, and of a model's magnitudes."""
    rng = np.random.default_rng(0)
    normal = lambda shape, size: jnp.asarray(np.float32(size) * rng.standard_normal(shape, np.float32))
    return tuple({name: normal(shape, size) for name, shape in shapes.items()} for size in (0.02, 1e-3))


def compile_steps(
    recipe: Recipe, states: Sequence[Any], grads: Any, options: dict[str, Any] | None = None
) -> list[Callable]:
    """Both steps, compiled ahead with parameters and state donated; only such programs tell what XLA estimates."""
    return [
        jax.jit(step, donate_argnums=0).lower(state, grads).compile(compiler_options=options)
        for step, state in zip(make_steps(recipe), states, strict=True)
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Comparison of results.


def compare_results(steps: Sequence[Callable], states: Sequence[Any], grads: Any) -> dict[str, dict[str, Any]]:
    """What differs after a few steps: of each part of the results how many numbers, and by how much of themselves."""
    for _ in range(BITS_STEPS):
        states = [step(state, grads) for step, state in zip(steps, states, strict=True)]
    by_hand, ours = parts_by_hand(states[0]), parts_with_mpx(states[1])
    assert by_hand.keys() == ours.keys()
    return {name: differences(by_hand[name], ours[name]) for name in ours}


def parts_by_hand(state: ByHand) -> dict[str, list[jax.Array]]:
    """The numbers of a state by kind: parameters, masters, compensation, moments and their codes."""
    beside = jax.tree.leaves(state.beside)
    parts = {"parameters": jax.tree.leaves(state.params)}
    if beside and beside[0].dtype == jnp.bfloat16:
        parts["compensation"] = beside
    elif beside:
        split = beside[0].dtype == jnp.uint16
        parts["masters"] = jax.tree.leaves(jax.tree.map(joined, state.params, state.beside)) if split else beside
    return parts | parts_of_moments((state.mu, state.nu))


def parts_with_mpx(state: WithMpx) -> dict[str, list[jax.Array]]:
    """The same of a state of mpx."""
    parts = {"parameters": jax.tree.leaves(state.params)}
    if (compensation := optax.tree.get(state.opt_state, "compensation")) is not None:
        parts["compensation"] = jax.tree.leaves(compensation)
    elif optax.tree.get(state.opt_state, "master") is not None:
        parts["masters"] = jax.tree.leaves(mpx.master_params(state.params, state.opt_state))
    scales = optax.tree.get(state.opt_state, "block_scales") or {}
    in_order = [scales[name] for name in sorted(scales, key=lambda name: int(name.partition(".")[0]))]
    moments = [optax.tree.get(state.opt_state, name) for name in ("mu", "nu")]
    return parts | parts_of_moments((*moments, in_order))


def parts_of_moments(moments: Any) -> dict[str, list[jax.Array]]:
    """Moments, and where they are kept in 8 bits, the codes; the scales of blocks count as moments."""
    coded = lambda x: isinstance(x, BlockwiseArray)
    arrays = jax.tree.leaves(moments, is_leaf=coded)
    scales = [x.scale for x in arrays if coded(x)]  # mpx has them behind all moments
    leaves = [x.codes if coded(x) else x for x in arrays] + scales
    codes = [x for x in leaves if x.dtype == jnp.uint8]
    parts = {"moments": [x for x in leaves if x.dtype != jnp.uint8]}
    return parts | ({"codes": codes} if codes else {})


def differences(a: list[jax.Array], b: list[jax.Array]) -> dict[str, Any]:
    """How many numbers differ in any bit, of how many, and the largest difference; of codes only how many."""
    counts, relative, absolute = jax.device_get(_differences(a, b))
    coded = a[0].dtype == jnp.uint8
    return {
        "differ": sum(map(int, counts)),
        "of": sum(x.size for x in a),
        "largest relative difference": None if coded else float(max(relative)),
        "largest difference": None if coded else float(max(absolute)),
    }


@jax.jit
def _differences(a: list[jax.Array], b: list[jax.Array]) -> Any:
    def one(x, y):
        bits = [lax.bitcast_convert_type(z, jnp.dtype(f"u{z.dtype.itemsize}")) for z in (x, y)]
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        absolute = jnp.where(x == y, 0.0, jnp.abs(x - y))
        relative = jnp.where(x == y, 0.0, absolute / jnp.maximum(jnp.abs(x), jnp.abs(y)))
        return jnp.sum(bits[0] != bits[1]), jnp.max(relative, initial=0.0), jnp.max(absolute, initial=0.0)

    return tuple(zip(*(one(x, y) for x, y in zip(a, b, strict=True)), strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# Measurement.


def measure(recipe: str, tensors: str, scale: int, starts: int, turns: int) -> dict[str, Any]:
    """Results and times of one recipe, and what its programs say.

    Args:
        recipe: its name.
        tensors: `"gpt2"`, or `"one"`.
        scale: what their sizes are divided by.
        starts: fresh states of each step.
        turns: timed turns from each.
    """
    chosen, shapes = RECIPES[recipe], make_shapes(tensors, scale)
    params, grads = jax.tree.map(lambda x: x.astype(chosen.dtype), make_data(shapes))
    states = make_starts(chosen, params)
    make_states = lambda: tuple(map(own, states))
    steps = compile_steps(chosen, states, grads)
    calls = CALLS.get(jax.default_backend(), CALLS["gpu"])
    row = {"recipe": recipe, "title": title_of(tensors, shapes), "bytes": bytes_moved(states[1], grads)}
    row |= {"results": compare_results(steps, make_states(), grads), "steps in a turn": calls}
    row |= timed_ratio(steps, make_states, grads, starts, turns, calls)
    row |= {f"program {side}": compiled_figures(step) for side, step in zip(SIDES, steps, strict=True)}
    if recipe != YARDSTICK:
        row |= {"target": STEP_TARGET, "met": row["ratio"] <= STEP_TARGET}
    if jax.default_backend() != "gpu":
        return row
    return row | speeds(row, copy_bandwidth()) | measure_single(steps, make_states, grads, starts, turns)


def title_of(tensors: str, shapes: Shapes) -> str:
    """What a set of tensors is called."""
    count = "1 tensor" if len(shapes) == 1 else f"{len(shapes)} tensors"
    return f"{tensors}: {count}, {sum(map(math.prod, shapes.values())):,} parameters"


def measure_torch(tensors: str, scale: int, turns: int) -> list[dict[str, Any]]:
    """The times of Torch's optimizers on the same tensors; none without a GPU."""
    shapes = make_shapes(tensors, scale)
    rows = torch_times({"shapes": list(shapes.values()), "turns": turns, "calls": CALLS["gpu"]})
    return [{"title": title_of(tensors, shapes)} | row for row in rows]


def read(recipe: str, tensors: str, scale: int, target: str) -> dict[str, Any]:
    """What the programs of one recipe say that are compiled for a target."""
    chosen, shapes = RECIPES[recipe], make_shapes(tensors, scale)
    start_compiler(target)
    params = {name: jax.ShapeDtypeStruct(shape, chosen.dtype) for name, shape in shapes.items()}
    states = jax.eval_shape(functools.partial(make_starts, chosen), params)
    sides = zip(SIDES, make_steps(chosen), states, strict=True)
    row = {
        f"program {side}": absent_figures(step, state, params, target=target, donate=0) for side, step, state in sides
    }
    return {"recipe": recipe, "parameters": sum(map(math.prod, shapes.values()))} | row


def measure_single(
    steps: Sequence[Callable], make_states: Callable, grads: Any, starts: int, turns: int
) -> dict[str, float]:
    """Milliseconds of a step that is waited for, and of the host's part in it."""
    times = timed_ratio(steps, make_states, grads, starts, turns)
    row = {f"single {side} ms": times[f"{side} ms"] for side in SIDES}
    for side, step, state in zip(SIDES, steps, make_states(), strict=True):
        seconds = []
        for _ in range(2 + turns):
            start = time.perf_counter()
            state = step(state, grads)
            seconds.append(time.perf_counter() - start)
            jax.block_until_ready(state)
        row[f"enqueue {side} ms"] = 1e3 * statistics.median(seconds[2:])
    return row


def bytes_moved(state: WithMpx, grads: Any) -> int:
    """The bytes that a step must move: parameters and state are read and written, gradients are read."""
    count = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))
    return 2 * count(state) + count(grads)


def copy_bandwidth() -> float:
    """GB/s that a program reads and writes that adds 1 to an array; the best of many, in place or not."""
    best = math.inf
    for donated in ((), (0,)):
        add = jax.jit(lambda x: x + 1, donate_argnums=donated)
        x = jax.random.normal(jax.random.key(0), (COPY_BYTES // 4,), jnp.float32)
        for _ in range(1 + COPY_ROUNDS):
            start = time.perf_counter()
            for _ in range(COPY_CALLS):
                x = add(x)
            x.block_until_ready()
            best = min(best, (time.perf_counter() - start) / COPY_CALLS)
    return 2 * COPY_BYTES / best / 1e9


def speeds(row: dict[str, Any], bandwidth: float) -> dict[str, Any]:
    """How fast memory was, in GB/s, and how a time compares with that of a copy of as many bytes."""
    found = {f"{side} GB/s": row["bytes"] / row[f"{side} ms"] / 1e6 for side in SIDES}
    found |= {f"{side} / copy": bandwidth / found[f"{side} GB/s"] for side in SIDES}
    found["copy GB/s"] = bandwidth
    return found | {"copy target": COPY_TARGET, "copy target met": found["mpx / copy"] <= COPY_TARGET}


def add_gains(rows: list[dict[str, Any]]) -> None:
    """Adds to the rows of one set of tensors how many times as fast they are as the float32 step."""
    yardstick = next((row["mpx ms"] for row in rows if row["recipe"] == YARDSTICK), math.nan)
    for row in rows:
        row["times as fast as f32"] = yardstick / row["mpx ms"]
        if row["recipe"].endswith(FASTEST):
            row |= {"speed target": SPEED_TARGET, "speed target met": row["times as fast as f32"] >= SPEED_TARGET}


def gpt2_shapes() -> dict[str, tuple[int, ...]]:
    """The shapes of GPT-2 124M: 148 tensors, 124 million numbers."""
    block = {
        "ln_1.w": (768,), "ln_1.b": (768,), "attn.c_attn.w": (768, 2304), "attn.c_attn.b": (2304,),
        "attn.c_proj.w": (768, 768), "attn.c_proj.b": (768,), "ln_2.w": (768,), "ln_2.b": (768,),
        "mlp.c_fc.w": (768, 3072), "mlp.c_fc.b": (3072,), "mlp.c_proj.w": (3072, 768), "mlp.c_proj.b": (768,),
    }  # fmt: skip
    shapes = {"wte": (50257, 768), "wpe": (1024, 768), "ln_f.w": (768,), "ln_f.b": (768,)}
    return shapes | {f"h.{i}.{name}": shape for i in range(12) for name, shape in block.items()}


def make_shapes(tensors: str, scale: int) -> Shapes:
    """The shapes of GPT-2's tensors, with the rows of matrices divided, or one shorter vector."""
    if tensors == "one":
        return {"one": (2**27 // scale,)}
    return {
        name: (max(shape[0] // scale, 1), *shape[1:]) if len(shape) > 1 else shape
        for name, shape in gpt2_shapes().items()
    }


# ---------------------------------------------------------------------------------------------------------------------
# Printing.


def sheets(title: str, rows: list[dict[str, Any]]) -> list[Sheet]:
    """All tables of one set of tensors."""
    add_gains(rows)
    found = [Sheet(title, [{"recipe": row["recipe"]} | ratio_cells(row) for row in rows])]
    if all("mpx GB/s" in row for row in rows):
        found += [Sheet(f"{title}: memory and launches", list(map(memory_cells, rows)))]
    return [*found, differing_sheet(f"{title}: what differs after {BITS_STEPS} steps", rows, "recipe")]


def memory_cells(row: dict[str, Any]) -> dict[str, str]:
    """Times beside that of a copy and beside the float32 step, and those of steps that are waited for one by one."""
    cells = {"recipe": row["recipe"]} | {f"GB/s {side}": f"{row[f'{side} GB/s']:.0f}" for side in SIDES}
    cells |= {f"{side} / copy": f"{row[f'{side} / copy']:.2f}" for side in SIDES}
    cells["copy, GB/s"] = f"{row['copy GB/s']:.0f}"
    cells["target"] = f"at most {COPY_TARGET}: {verdict(row['copy target met'])}"
    speed = f", at least {SPEED_TARGET}: {verdict(row['speed target met'])}" if "speed target" in row else ""
    cells["times as fast as f32"] = f"{row['times as fast as f32']:.2f}{speed}"
    for what in ("single", "enqueue"):
        cells[f"{what} by hand, mpx, ms"] = ", ".join(f"{row[f'{what} {side} ms']:.3f}" for side in SIDES)
    return cells


def differing_sheet(title: str, rows: list[dict[str, Any]], name: str) -> Sheet:
    """What differs between the results by hand and with mpx; `name` is the key of what a row is called."""
    cells = [
        {name: row[name], "numbers": kind} | differing_cells(found)
        for row in rows
        for kind, found in row["results"].items()
        if found["differ"]
    ]
    return Sheet(title, cells, "" if cells else "Nothing differs.")


def differing_cells(found: dict[str, Any]) -> dict[str, str]:
    """How much of a kind of numbers differs."""
    size = lambda key: "" if found[key] is None else f"{found[key]:.1e}"
    cells = {"differ": f"{found['differ']:,}", "of": f"{found['of']:,}"}
    return cells | {key: size(key) for key in ("largest relative difference", "largest difference")}


def torch_sheet(title: str, rows: list[dict[str, Any]]) -> Sheet:
    """Torch's optimizers; of one that is missing, why."""
    times = lambda row: {"ms": f"{row['ms']:.3f}", "single, ms": f"{row['single ms']:.3f}"}
    cells = [{"optimizer": row["what"]} | (times(row) if "ms" in row else {"note": row["left out"]}) for row in rows]
    return Sheet(f"{title}: Torch", cells)
