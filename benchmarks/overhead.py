"""What mpx costs beside the same work written by hand, and what its casts cost beside
jmp's.

    PYTHONPATH=. python -m benchmarks.on_gpu --parts overhead --out found

1. A training step, and an optimizer step alone, with mpx and by hand in plain JAX and
   Optax: bfloat16 with float32 masters, and float16 with masters and dynamic loss
   scaling. First the bits are compared: masters and moments must be the same. Target:
   the ratio of the median times is at most 1.03.
2. The cast of 2,000 arrays of 1,000 numbers. Target: at least 5 times as fast as jmp's,
  which must be installed.

What is compared is run in turn, A B B A, in one process, and everything timed is waited
for. The sizes are chosen by device, so that a step takes several milliseconds.
"""

import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpx
from benchmarks.optimizer_step import WithMpx, compile_steps, differing, differing_sheet
from benchmarks.report import Row, Sheet, judged
from benchmarks.timing import COLUMNS, compare, own, ratio, timed

# Width, layers and batch of the model. A GPU gets a larger one: its small steps measure
# nothing but launches.
SIZES = {"cpu": (384, 4, 64), "gpu": (2048, 12, 4096)}
RESULTS_STEPS = 5  # after which results are compared
CAST_ROUNDS = 40
LEARNING_RATE = 1e-3
LOSS_SCALE, GROWTH_PERIOD = 2.0**15, 2000
CAST_TARGET = 5.0

LIBRARIES = ("mpx", "jmp")


# --- Steps. The model: a stack of residual blocks of two matrices, whose loss is summed in float32. ---
def make_params(width: int, layers: int, dtype: Any) -> dict[str, Any]:
    """Return residual blocks `width -> 4 width -> width`, each with a gain and biases,
    as in a transformer.
    """
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(
        rng.normal(size=shape) * shape[0] ** -0.5, dtype
    )
    return {
        f"block_{i}": {
            "gain": jnp.ones(width, dtype),
            "up": {
                "kernel": normal(width, 4 * width),
                "bias": jnp.zeros(4 * width, dtype),
            },
            "down": {
                "kernel": normal(4 * width, width) * 0.1,
                "bias": jnp.zeros(width, dtype),
            },
        }
        for i in range(layers)
    }


def loss_fn(params: dict[str, Any], batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Return the float32 loss of a model that computes in the dtype of its
    parameters.
    """
    x, y = batch
    for block in params.values():
        hidden = jax.nn.relu(
            (x * block["gain"]) @ block["up"]["kernel"] + block["up"]["bias"]
        )
        x = x + hidden @ block["down"]["kernel"] + block["down"]["bias"]
    return jnp.mean((x.astype(jnp.float32) - y) ** 2)


class ByHand(NamedTuple):
    """What a training loop written by hand keeps: bfloat16 or float16 parameters,
    masters, Adam's state, a scale.
    """

    params: Any
    masters: Any
    rule_state: Any
    loss_scale: Any = None
    good_steps: Any = None


def init_by_hand(params: Any, scaled: bool) -> ByHand:
    """Return masters made from the parameters, and Adam's state made from the
    masters.
    """
    masters = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    scale = (jnp.float32(LOSS_SCALE), jnp.int32(0)) if scaled else ()
    return ByHand(params, masters, optax.adamw(LEARNING_RATE).init(masters), *scale)


def update_by_hand(state: ByHand, grads: Any) -> ByHand:
    """Make one AdamW step of the masters; the parameters are the masters, cast; a step
    that is not finite is undone.
    """
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    if state.loss_scale is not None:
        finite = functools.reduce(
            jnp.logical_and, [jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]
        )
        grads = jax.tree.map(lambda g: g * (1 / state.loss_scale), grads)
    updates, rule_state = optax.adamw(LEARNING_RATE).update(
        grads, state.rule_state, state.masters
    )
    masters = optax.apply_updates(state.masters, updates)
    params = jax.tree.map(lambda m, p: m.astype(p.dtype), masters, state.params)
    if state.loss_scale is None:
        return ByHand(params, masters, rule_state)
    keep = lambda new, old: jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)
    grows = finite & (state.good_steps >= GROWTH_PERIOD - 1)
    grown = jnp.where(
        grows, jnp.minimum(state.loss_scale * 2, 2.0**24), state.loss_scale
    )
    loss_scale = jnp.where(finite, grown, jnp.maximum(state.loss_scale / 2, 1.0))
    good_steps = jnp.where(finite & ~grows, state.good_steps + 1, 0)
    return ByHand._make(
        [*keep((params, masters, rule_state), state[:3]), loss_scale, good_steps]
    )


def train_by_hand(state: ByHand, batch: Any) -> ByHand:
    """Make a whole training step without mpx."""
    scale = 1.0 if state.loss_scale is None else state.loss_scale
    return update_by_hand(
        state, jax.grad(lambda params: loss_fn(params, batch) * scale)(state.params)
    )


def make_mpx_steps(policy: str) -> tuple[Callable, Callable, Callable]:
    """Return the same with mpx: `init(params)`, `update(state, grads)` and
    `train(state, batch)`.
    """
    tx = mpx.mixed_precision(optax.adamw(LEARNING_RATE), policy)

    def update(state: WithMpx, grads: Any) -> WithMpx:
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        return WithMpx(optax.apply_updates(state.params, updates), opt_state)

    def train(state: WithMpx, batch: Any) -> WithMpx:
        grads = mpx.grad(loss_fn, mpx.get_loss_scale(state.opt_state))(
            state.params, batch
        )
        return update(state, grads)

    return lambda params: WithMpx(params, tx.init(params)), update, train


def measure_steps(
    dtype_name: str, size: Sequence[int] | None, starts: int, turns: int
) -> list[Row]:
    """Return results and times of the two kinds of step of one recipe, and what their
    programs say.
    """
    dtype = np.dtype(dtype_name)
    scaled = dtype == np.float16
    width, layers, batch_size = size or SIZES.get(jax.default_backend(), SIZES["gpu"])
    rng = np.random.default_rng(1)
    params = make_params(width, layers, dtype)
    x, y = (
        jnp.asarray(rng.normal(size=(batch_size, width)), jnp.float32) for _ in range(2)
    )
    grads = jax.tree.map(
        lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), params
    )
    init, update, train = make_mpx_steps(
        f"params={dtype_name},compute={dtype_name},output=f32"
    )
    # Each side gets its own buffers: every step gives its old state back to the
    # allocator, as in training.
    make_states = lambda: (init_by_hand(own(params), scaled), init(own(params)))
    recipe = f"{dtype_name}, masters" + (", dynamic loss scale" if scaled else "")
    kinds = {
        "training": (train_by_hand, train, (x.astype(dtype), y)),
        "optimizer": (update_by_hand, update, grads),
    }
    rows = []
    for kind, (*pair, data) in kinds.items():
        steps = compile_steps(pair, make_states(), (data, data))
        row: Row = {
            "what": f"{kind} step, {recipe}",
            "results": compare_results(steps, list(make_states()), data),
        }
        rows.append(
            row | compare(steps, make_states, (data, data), starts=starts, turns=turns)
        )
    return rows


def compare_results(
    steps: Sequence[Callable], states: list[Any], data: Any
) -> list[Row]:
    """Return what differs after a few steps.

    Masters and Adam's moments must not. A parameter may, by at most 2**-24 of its value
    a step earlier: an update can only be added to it, and a sum that comes out near
    zero cannot be hit exactly.
    """
    for _ in range(RESULTS_STEPS):
        states = [step(state, data) for step, state in zip(steps, states, strict=True)]
    by_hand, ours = states
    moments = lambda state: (optax.tree.get(state, "mu"), optax.tree.get(state, "nu"))
    pairs = {
        "parameters": (by_hand.params, ours.params),
        "masters": (by_hand.masters, mpx.master_params(ours.params, ours.opt_state)),
        "moments": (moments(by_hand.rule_state), moments(ours.opt_state)),
    }
    return differing(pairs)


# --- Casts. ---
def caster(library: str) -> Callable[[Any], Any]:
    """Return a library's function that casts a tree to bfloat16."""
    if library == "mpx":
        return mpx.get_policy("params=bf16").cast_to_param
    import jmp  # only where it is measured: it need not be installed

    return jmp.get_policy("params=bfloat16").cast_to_param


def measure_casts() -> Row:
    """Time the casts of 2,000 arrays, after a warm-up."""
    tree = {
        f"leaf_{i}": jax.device_put(np.full(1000, i, np.float32)) for i in range(2000)
    }
    casts = [caster(library) for library in LIBRARIES]
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(-3, CAST_ROUNDS):
        for side in (0, 1) if turn % 2 else (1, 0):
            seconds, _ = timed(casts[side], tree)
            if turn >= 0:
                times[side].append(seconds)
    ours, theirs = times
    row: Row = {"what": "cast of 2,000 arrays of 1,000"} | ratio(theirs, ours)
    row |= {
        "jmp ms": 1e3 * statistics.median(theirs),
        "mpx ms": 1e3 * statistics.median(ours),
    }
    return row | {"target": judged(row["ratio"], least=CAST_TARGET)}


# --- Tables. ---
CASTS = {
    "cast": "{what}",
    "jmp, ms": "{jmp ms:.1f}",
    "mpx, ms": "{mpx ms:.1f}",
    "times as fast": "{ratio:.2f}",
    "95%": "{low:.2f} to {high:.2f}",
    "target": "{target}",
}


def steps_sheets(rows: list[Row]) -> list[Sheet]:
    """Return the tables of times of steps, and of what differs."""
    title = f"what differs after {RESULTS_STEPS} steps"
    return [
        Sheet("a step beside that by hand", rows, {"what": "{what}"} | COLUMNS),
        differing_sheet(title, rows, "what"),
    ]
