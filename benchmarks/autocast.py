"""What `mpx.autocast` costs beside the same model cast by hand: time, memory, tracing, and what is lost in accuracy.

    PYTHONPATH=. python -m benchmarks.on_gpu --parts autocast --out found

One transformer in Flax NNX, in the way of GPT-2: pre-norm, biases, a gelu, a head tied to the embedding, and attention
by `jax.nn.dot_product_attention` (not cuDNN's, which takes 16-bit operands only). Written without dtypes it is what
`autocast` gets; cast by hand it is the same with `dtype=jnp.bfloat16` in every layer, so that its activations are
bfloat16 throughout, its norms and its softmax float32 inside. Logits are widened before the loss in both. Parameters
have the dtype of `--params` on both sides.

1. Steps: the loss and its gradient by `mpx.value_and_grad`, with `--update` also AdamW. Each form of autocast is run in
   turn, A B B A, with the form by hand that the table names: with the same policy of `jax.checkpoint` around the whole
   loss, or with none on both sides. Target: with `checkpoint="dots"` or `FAST_RULES` at most 1.03 of the time by hand.
2. Residuals: the bytes that the backward pass gets from the forward pass, 6 layers: the distinct arrays in the function
   that `jax.vjp` returns, traced and not run. Counted are the casts that are made of weights; parameters and tokens
   that are handed on as they are stand in a column of their own. XLA may keep less: it fuses a widening into what uses
   it. By hand the logits of attention are float32, under autocast bfloat16. Target: with `checkpoint="dots"` no more
   than by hand with the same policy.
3. Tracing: `jax.jit(gradient).trace(...)` and `.lower()` for 24 layers, unrolled, of a small model, without and with
   autocast, in turn; new functions and empty caches each time. Target: at most 2 times as long, both together.
4. Accuracy: the relative error of the loss, and of the gradient by the norm of the whole tree, against the same program
   in float64 on the same weights. Mean and largest of 5 seeds, at the initial weights and after 50 steps of AdamW. The
   model and its data are the same on all machines. Gradients are taken at a loss scale of 4,096, for float16's sake. By
   hand in float16 on a CPU, attention runs in float32: XLA refuses there what it asks for. XLA may leave out roundings
   to 16 bits, as it may for users.

Parts 2 and 4 give both dtypes of parameters whatever `--params` is. A form that the backend cannot run is left out of
part 1. A GPU multiplies float32 matrices in TF32; a CPU has few products of bfloat16 numbers or none, so that times
there say little about a GPU. The size is `gpt2` on a GPU and `tiny` elsewhere.
"""

import dataclasses
import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import mpx
from benchmarks.reading import compiled_figures
from benchmarks.report import Sheet, ratio_cells, spread_cell, target_cell
from benchmarks.timing import own, ratio_with_spread, timed_ratio

Loss = Callable[[Any, jax.Array], jax.Array]  # of the parameters and of tokens

CALLS = {"cpu": 1, "gpu": 8}  # steps in a turn
RESIDUAL_LAYERS = 6
TRACED_LAYERS, TRACED_TURNS = 24, 4
SEEDS, TRAINED_STEPS, LOSS_SCALE = 5, 50, 2.0**12
LEARNING_RATE = 1e-3
SUCCESSORS = 4  # tokens that may follow a token in the data that is learned

STEP_TARGET, RESIDUAL_TARGET, TRACING_TARGET = 1.03, 1.0, 2.0


@dataclasses.dataclass(frozen=True)
class Size:
    """Of a model and its batch."""

    width: int
    layers: int
    heads: int
    context: int
    vocabulary: int
    batch: int


SIZES = {
    "tiny": Size(width=192, layers=4, heads=6, context=64, vocabulary=1024, batch=4),
    "small": Size(width=384, layers=6, heads=6, context=256, vocabulary=8192, batch=8),
    "gpt2": Size(width=768, layers=12, heads=12, context=1024, vocabulary=50304, batch=8),
}
TRACED_SIZE = Size(width=64, layers=TRACED_LAYERS, heads=2, context=32, vocabulary=128, batch=2)
ACCURACY_SIZE = Size(width=128, layers=3, heads=4, context=64, vocabulary=256, batch=8)
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}


# ---------------------------------------------------------------------------------------------------------------------
# The model. Shapes: B sequences, T tokens each, C = width, H heads of size D = C / H.


class Block(nnx.Module):
    """Attention and a two-layer perceptron, each after a norm and added to the residual stream."""

    def __init__(self, size: Size, dtype: Any, rngs: nnx.Rngs) -> None:
        norm = functools.partial(nnx.LayerNorm, size.width, dtype=dtype, rngs=rngs)
        linear = functools.partial(nnx.Linear, dtype=dtype, rngs=rngs)
        self.heads = size.heads
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.query_key_value = linear(size.width, 3 * size.width)
        self.out = linear(size.width, size.width)
        self.expand = linear(size.width, 4 * size.width)
        self.contract = linear(4 * size.width, size.width)

    def __call__(self, x: jax.Array) -> jax.Array:  # (B, T, C)
        """The residual stream after this block."""
        x = x + self.out(self.attention(self.query_key_value(self.attention_norm(x))))
        return x + self.contract(nnx.gelu(self.expand(self.mlp_norm(x))))

    def attention(self, joined: jax.Array) -> jax.Array:  # (B, T, 3C)
        """Mixes each position with those before it."""
        batch, length, width = joined.shape[0], joined.shape[1], joined.shape[2] // 3
        parts = joined.reshape(batch, length, 3, self.heads, width // self.heads)
        if joined.dtype == jnp.float16 and jax.default_backend() == "cpu":
            parts = parts.astype(jnp.float32)  # XLA on CPU has no products of float16 numbers with float32 sums
        query, key, value = parts[:, :, 0], parts[:, :, 1], parts[:, :, 2]  # (B, T, H, D)
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        return mixed.astype(joined.dtype).reshape(batch, length, width)


class Transformer(nnx.Module):
    """Logits of the next token, for each token of each sequence; `dtype` None for a model written without dtypes."""

    def __init__(self, size: Size, dtype: Any, rngs: nnx.Rngs) -> None:
        self.tokens = nnx.Embed(size.vocabulary, size.width, dtype=dtype, rngs=rngs)
        self.positions = nnx.Embed(size.context, size.width, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([Block(size, dtype, rngs) for _ in range(size.layers)])
        self.norm = nnx.LayerNorm(size.width, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:  # (B, T) integers
        """The logits, (B, T, vocabulary)."""
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1])[None])
        for block in self.blocks:
            x = block(x)
        return self.tokens.attend(self.norm(x))


def make_params(size: Size, dtype: Any, seed: int = 0) -> Any:
    """The initial parameters, which do not depend on the dtype in which a model computes."""
    params = nnx.state(Transformer(size, None, nnx.Rngs(seed)), nnx.Param)
    return jax.tree.map(lambda p: p.astype(dtype), params)


@functools.cache
def make_graph(size: Size, dtype: Any) -> Any:
    """What a model is without its parameters."""
    return nnx.graphdef(nnx.eval_shape(lambda: Transformer(size, dtype, nnx.Rngs(0))))


def make_loss(size: Size, dtype: Any) -> Loss:
    """The mean cross-entropy of a model that computes in a dtype, or without dtypes; a new function each time."""
    graph = make_graph(size, dtype)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        logits = nnx.merge(graph, params)(tokens[:, :-1])
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return loss


def make_tokens(size: Size, seed: int = 0) -> jax.Array:
    """Random sequences with one token more than the model reads."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.integers(size.vocabulary, size=(size.batch, size.context + 1)), jnp.int32)


# ---------------------------------------------------------------------------------------------------------------------
# Its forms.


class Form(NamedTuple):
    """One way to run the model.

    Attributes:
        make: the loss, from the dtype in which matrices are multiplied, and a function that makes the model's loss for
            the dtype that is written into its layers, or None.
        beside: the form by hand with which it is compared, if any.
        has_step_target: whether the target of steps speaks of it.
        has_residual_target: whether the target of residuals does.
    """

    make: Callable[[Any, Callable[[Any], Loss]], Loss]
    beside: str | None = None
    has_step_target: bool = False
    has_residual_target: bool = False


def autocast_form(beside: str, *, targets: tuple[bool, bool] = (False, False), **options: Any) -> Form:
    """The model without dtypes under `mpx.autocast`."""
    return Form(lambda half, model: mpx.autocast(model(None), half, **options), beside, *targets)


dots = functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)

HAND, HAND_DOTS = "by hand", "by hand, dots"
FAST, DOTS, WIDE = {"rules": mpx.FAST_RULES}, {"checkpoint": "dots"}, {"gradient_dtype": jnp.float32}
FORMS = {
    HAND: Form(lambda half, model: model(half)),
    HAND_DOTS: Form(lambda half, model: dots(model(half))),
    "f32": Form(lambda half, model: model(None), HAND),
    "autocast": autocast_form(HAND),
    "autocast, FAST_RULES": autocast_form(HAND, targets=(True, False), **FAST),
    "autocast, gradients f32": autocast_form(HAND, **WIDE),
    "f32, dots": Form(lambda half, model: dots(model(None)), HAND_DOTS),
    "autocast, dots": autocast_form(HAND_DOTS, targets=(True, True), **DOTS),
    "autocast, dots, FAST_RULES": autocast_form(HAND_DOTS, **DOTS, **FAST),
    "autocast, dots, gradients f32": autocast_form(HAND_DOTS, **DOTS, **WIDE),
}
TRACED_FORMS = {  # what is traced, and the model without autocast beside it
    "autocast": "f32",
    "autocast, FAST_RULES": "f32",
    "autocast, gradients f32": "f32",
    "autocast, dots": "f32, dots",
}
ACCURACY_DTYPES = (("f32", "bf16"), ("bf16", "bf16"), ("f32", "f16"), ("f16", "f16"))  # parameters, products
ACCURACY_FORMS = ("f32", HAND, "autocast", "autocast, FAST_RULES")


def make_form(name: str, size: Size, half: Any = jnp.bfloat16) -> Loss:
    """The loss in one of the forms, in functions that jax has not seen."""
    return FORMS[name].make(half, functools.partial(make_loss, size))


# ---------------------------------------------------------------------------------------------------------------------
# 1. Steps.


class State(NamedTuple):
    """What goes from step to step.

    Attributes:
        params: the parameters.
        rest: the state of the optimizer, or the gradients of the last step.
        loss: the last loss.
    """

    params: Any
    rest: Any
    loss: jax.Array


def make_optimizer(dtype: Any) -> optax.GradientTransformation:
    """AdamW, with float32 masters of bfloat16 parameters."""
    rule = optax.adamw(LEARNING_RATE)
    return rule if dtype == jnp.float32 else mpx.master_weights(rule)


def make_step(loss: Loss, tx: optax.GradientTransformation | None) -> Callable[[State, jax.Array], State]:
    """The loss and its gradient, and without a transformation no more than these."""

    def step(state: State, tokens: jax.Array) -> State:
        value, grads = mpx.value_and_grad(loss)(state.params, tokens)
        if tx is None:
            return State(state.params, grads, value)
        updates, opt_state = tx.update(grads, state.rest, state.params)
        return State(optax.apply_updates(state.params, updates), opt_state, value)

    return step


def make_start(size: Size, dtype: Any, tx: optax.GradientTransformation | None) -> State:
    """The state before the first step."""
    params = make_params(size, dtype)
    rest = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params) if tx is None else tx.init(params)
    return State(params, rest, jnp.float32(0))


def measure_steps(
    size: str, params: str, update: bool, starts: int, turns: int, names: Iterable[str] = FORMS
) -> list[dict[str, Any]]:
    """Times of forms beside those by hand.

    Args:
        size: the name of the size of the model.
        params: the name of the dtype of its parameters.
        update: whether a step has an AdamW update too.
        starts: fresh states of each step.
        turns: timed turns from each.
        names: of the forms.
    """
    chosen, dtype = SIZES[size], DTYPES[params]
    tx = make_optimizer(dtype) if update else None
    start, tokens = make_start(chosen, dtype, tx), make_tokens(chosen)
    calls = CALLS.get(jax.default_backend(), CALLS["gpu"])

    @functools.cache
    def compiled(name: str) -> Callable:
        step = make_step(make_form(name, chosen), tx)
        return jax.jit(step, donate_argnums=0).lower(start, tokens).compile()

    rows = []
    for name in names:
        form = FORMS[name]
        if form.beside is None:
            continue
        row: dict[str, Any] = {"form": name, "beside": form.beside, "size": size, "params": params}
        try:
            steps = compiled(form.beside), compiled(name)
            row |= timed_ratio(steps, lambda: (own(start), own(start)), tokens, starts, turns, calls)
        except jax.errors.JaxRuntimeError as error:
            rows.append(row | {"left out": str(error).splitlines()[0]})  # what a backend cannot do is a result too
            continue
        row |= {"program mpx": compiled_figures(steps[1]), "program by hand": compiled_figures(steps[0])}
        row |= {"target": STEP_TARGET, "met": row["ratio"] <= STEP_TARGET} if form.has_step_target else {}
        rows.append(row)
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# 2. Residuals.


def residual_bytes(loss: Loss, params: Any, tokens: Any) -> tuple[int, int]:
    """The bytes that `jax.vjp` keeps for the backward pass: made on the way, and handed on as they came.

    An array is known by its tracer: one that is kept twice counts once.
    """
    found: list[int] = []

    def trace(params: Any, tokens: jax.Array) -> None:
        _, pullback = jax.vjp(lambda params: loss(params, tokens), params)
        given = {id(x) for x in jax.tree.leaves((params, tokens))}
        kept = {id(x): x.size * x.dtype.itemsize for x in jax.tree.leaves(pullback) if hasattr(x, "dtype")}
        found.append(sum(size for which, size in kept.items() if which not in given))
        found.append(sum(size for which, size in kept.items() if which in given))

    jax.eval_shape(trace, params, tokens)
    return found[0], found[1]


def measure_residuals(size_name: str, params_name: str) -> list[dict[str, Any]]:
    """What all forms keep for the backward pass; nothing is run."""
    size = dataclasses.replace(SIZES[size_name], layers=RESIDUAL_LAYERS)
    params = jax.eval_shape(lambda: make_params(size, DTYPES[params_name]))
    tokens = jax.ShapeDtypeStruct((size.batch, size.context + 1), jnp.int32)
    found = {name: residual_bytes(make_form(name, size), params, tokens) for name in FORMS}
    rows = []
    for name, form in FORMS.items():
        row: dict[str, Any] = {"form": name, "params": params_name}
        row |= dict(zip(("bytes", "bytes handed on"), found[name], strict=True))
        if form.beside is not None:
            row |= {"beside": form.beside, "ratio": found[name][0] / found[form.beside][0]}
        if form.has_residual_target:
            row |= {"target": RESIDUAL_TARGET, "met": row["ratio"] <= RESIDUAL_TARGET}
        rows.append(row)
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# 3. Tracing.


def trace_seconds(name: str, size: Size, params: Any, tokens: Any) -> tuple[float, float]:
    """Seconds to trace a form's gradient, and to lower it to StableHLO, with nothing remembered from before."""
    gradient = jax.jit(mpx.value_and_grad(make_form(name, size)))
    jax.clear_caches()
    gc.collect()
    start = time.perf_counter()
    traced = gradient.trace(params, tokens)
    middle = time.perf_counter()
    traced.lower()
    return middle - start, time.perf_counter() - middle


def measure_tracing(
    params_name: str = "f32", turns: int = TRACED_TURNS, size: Size = TRACED_SIZE
) -> list[dict[str, Any]]:
    """Times of tracing and lowering with autocast and without, in turn."""
    params = jax.eval_shape(lambda: make_params(size, DTYPES[params_name]))
    tokens = jax.ShapeDtypeStruct((size.batch, size.context + 1), jnp.int32)
    rows = []
    for name, beside in TRACED_FORMS.items():
        times: dict[str, list[tuple[float, float]]] = {beside: [], name: []}
        for turn in range(-1, turns):
            for side in (beside, name) if turn % 2 else (name, beside):
                seconds = trace_seconds(side, size, params, tokens)
                if turn >= 0:
                    times[side].append(seconds)
        rows.append(
            {"form": name, "beside": beside, "layers": size.layers} | compare_tracing(times[name], times[beside])
        )
    return rows


def compare_tracing(ours: list[tuple[float, float]], plain: list[tuple[float, float]]) -> dict[str, Any]:
    """Medians of tracing, of lowering and of both, and their ratios."""
    parts: dict[str, Callable] = {"trace": lambda pair: pair[0], "lower": lambda pair: pair[1], "both": sum}
    row: dict[str, Any] = {}
    for what, part in parts.items():
        a, b = list(map(part, ours)), list(map(part, plain))
        low, ratio, high = ratio_with_spread(a, b)
        row[what] = {
            "s": statistics.median(a),
            "beside s": statistics.median(b),
            "ratio": ratio,
            "ratio 95%": [low, high],
        }
    return row | {"target": TRACING_TARGET, "met": row["both"]["ratio"] <= TRACING_TARGET}


# ---------------------------------------------------------------------------------------------------------------------
# 4. Accuracy.


def make_text(size: Size, seed: int) -> Callable[[int], jax.Array]:
    """Batches that can be learned: each token is followed by one of a few."""
    successors = np.random.default_rng(seed).integers(size.vocabulary, size=(size.vocabulary, SUCCESSORS))

    def batch(i: int) -> jax.Array:
        rng = np.random.default_rng((seed, i))
        tokens = [rng.integers(size.vocabulary, size=size.batch)]
        for _ in range(size.context):
            tokens.append(successors[tokens[-1], rng.integers(SUCCESSORS, size=size.batch)])
        return jnp.asarray(np.stack(tokens, axis=1), jnp.int32)

    return batch


def trained_params(size: Size, seeds: int, steps: int) -> list[tuple[Any, jax.Array]]:
    """For each seed, weights after some steps of float32 training, and a batch that they have not seen."""
    tx = make_optimizer(jnp.float32)
    train = jax.jit(make_step(make_loss(size, None), tx), donate_argnums=0)
    points = []
    for seed in range(seeds):
        text, params = make_text(size, seed), make_params(size, jnp.float32, seed)
        state = State(params, tx.init(params), jnp.float32(0))
        for i in range(steps):
            state = train(state, text(i))
        points.append((state.params, text(steps)))
    return points


def flat(value_and_grads: tuple[Any, Any]) -> tuple[np.ndarray, list[np.ndarray]]:
    """A loss and the leaves of its gradient, in float64 on the host."""
    return jax.tree.map(
        lambda x: np.asarray(x).astype(np.float64), (value_and_grads[0], jax.tree.leaves(value_and_grads[1]))
    )


def relative_errors(found: tuple[Any, list[np.ndarray]], exact: tuple[Any, list[np.ndarray]]) -> tuple[float, float]:
    """Of the loss, and of the gradient as one vector."""
    norm = lambda arrays: np.sqrt(sum(float(np.sum(a * a)) for a in arrays))
    difference = [a - b for a, b in zip(found[1], exact[1], strict=True)]
    return float(abs(found[0] - exact[0]) / abs(exact[0])), float(norm(difference) / norm(exact[1]))


def measure_accuracy(
    size: Size = ACCURACY_SIZE,
    seeds: int = SEEDS,
    trained_steps: int = TRAINED_STEPS,
    dtypes: Iterable[tuple[str, str]] = ACCURACY_DTYPES,
) -> list[dict[str, Any]]:
    """Errors of the loss and the gradient, at the initial weights and at trained ones, over seeds."""
    points = {steps: trained_params(size, seeds, steps) for steps in (0, trained_steps)}
    with jax.enable_x64(True):
        wide = jax.jit(jax.value_and_grad(make_loss(size, jnp.float64)))
    scale, rows = mpx.StaticLossScale(LOSS_SCALE), []
    for params_dtype, half in dtypes:
        cast = lambda tree, dtype=DTYPES[params_dtype]: jax.tree.map(lambda p: p.astype(dtype), tree)
        names = ACCURACY_FORMS if half == "bf16" else ACCURACY_FORMS[1:]  # float32 does not depend on it
        gradients = {name: jax.jit(mpx.value_and_grad(make_form(name, size, DTYPES[half]), scale)) for name in names}
        for steps, starts in points.items():
            errors: dict[str, list[tuple[float, float]]] = {name: [] for name in gradients}
            for params, tokens in starts:
                params = cast(params)
                with jax.enable_x64(True):
                    exact = flat(wide(jax.tree.map(lambda p: p.astype(jnp.float64), params), tokens))
                for name, gradient in gradients.items():
                    value, grads = gradient(params, tokens)
                    errors[name].append(relative_errors(flat((value, scale.unscale(grads))), exact))
            about = {"compute": half, "params": params_dtype, "steps": steps}
            rows += [{"form": name} | about | summary(errors[name]) for name in errors]
    return rows


def summary(errors: list[tuple[float, float]]) -> dict[str, float]:
    """Mean and largest error over seeds."""
    loss, gradient = zip(*errors, strict=True)
    of_loss = {"loss mean": statistics.mean(loss), "loss max": max(loss)}
    return of_loss | {"gradient mean": statistics.mean(gradient), "gradient max": max(gradient)}


# ---------------------------------------------------------------------------------------------------------------------
# Printing.


def steps_table(title: str, rows: list[dict[str, Any]]) -> Sheet:
    """Times of steps."""
    cells = lambda row: {"note": f"left out: {row['left out']}"} if "left out" in row else ratio_cells(row)
    return Sheet(title, [{"form": row["form"], "beside": row["beside"]} | cells(row) for row in rows])


def residuals_table(title: str, rows: list[dict[str, Any]]) -> Sheet:
    """Bytes kept for the backward pass."""
    mb = lambda row, key: f"{row[key] / 1e6:.2f}"
    cells = [
        {
            "form": row["form"],
            "parameters": row["params"],
            "MB": mb(row, "bytes"),
            "parameters handed on, MB": mb(row, "bytes handed on"),
            "beside": row.get("beside", ""),
            "ratio": f"{row['ratio']:.3f}" if "ratio" in row else "",
            "target": target_cell(row),
        }
        for row in rows
    ]
    return Sheet(title, cells)


def tracing_table(title: str, rows: list[dict[str, Any]]) -> Sheet:
    """Times of tracing and lowering."""
    cells = [
        {
            "form": row["form"],
            "beside": row["beside"],
            "what": what,
            "s": f"{row[what]['s']:.3f}",
            "beside, s": f"{row[what]['beside s']:.3f}",
            "ratio": f"{row[what]['ratio']:.2f}",
            "95%": spread_cell(row[what]["ratio 95%"]),
            "target": target_cell(row) if what == "both" else "",
        }
        for row in rows
        for what in ("trace", "lower", "both")
    ]
    return Sheet(title, cells)


def accuracy_table(title: str, rows: list[dict[str, Any]]) -> Sheet:
    """Relative errors."""
    about = {"compute": "compute", "params": "parameters", "steps": "after steps", "form": "form"}
    errors = "loss mean", "loss max", "gradient mean", "gradient max"
    cells = lambda row: {name: str(row[key]) for key, name in about.items()} | {e: f"{row[e]:.1e}" for e in errors}
    return Sheet(title, list(map(cells, rows)))
