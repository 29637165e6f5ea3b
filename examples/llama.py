"""Train a Llama, from a tiny one to one of 405 billion parameters, in any recipe, on
one device or on many.

Run it from the root of the repository. It trains on the bytes of Python's standard
library:

    python -m examples.llama
    python -m examples.llama --recipe bf16-split24-8bit --steps 300

What a large step would need is read off its program, on a machine without a GPU
(`step_and_arguments`).

Model and sizes are Llama 3's (arXiv 2407.21783): RMSNorm, rotary positions, queries
that share keys, SwiGLU, an embedding and a head of their own. All layers are one stack
of weights and one `scan`. What makes a large one fit:

- Each device keeps a part of every weight, and a layer gathers its own (FSDP). autocast
  gathers them in bfloat16.
- Between the passes a layer keeps its input alone, in 8 bits if `Config.kept` says so.
- AdamW's step of a layer runs where its gradient is made: no gradient of all layers
  exists.
- Attention is computed for one head of keys at a time, and logits for one part of the
  vocabulary, so that no device ever has the head or its gradient whole.
- A device looks up all tokens in its columns of the embedding: neither that nor its
  gradient is ever whole.

Shapes: B sequences, T tokens each, C = width, heads of size D; several share keys and
values.
"""

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from typer import Option

import mpx
from examples.gpt import devices
from examples.gpt.loss import log_sum_exp, target_logits


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a model and the layout of its program."""

    width: int  # of the residual stream
    hidden: int  # of the perceptron
    depth: int
    heads: int
    key_heads: int = 8
    vocabulary: int = 128_256
    attention: Literal["xla", "cudnn"] = (
        "xla"  # "cudnn" is flash attention on a GPU, in bfloat16
    )
    kept: Literal["bf16"] | mpx.StateFormat | None = (
        None  # how a layer keeps its input; None: as it is
    )
    loss_parts: int = 2  # of the vocabulary; each gathers its part of the head


CONFIGS = {
    "tiny": Config(
        width=128, hidden=384, depth=4, heads=8, key_heads=2, vocabulary=256
    ),
    "1B": Config(width=2048, hidden=8192, depth=16, heads=32),
    "8B": Config(width=4096, hidden=14_336, depth=32, heads=32),
    "70B": Config(width=8192, hidden=28_672, depth=80, heads=64),
    "405B": Config(width=16_384, hidden=53_248, depth=126, heads=128),
}
WHOLE, DIVIDED = P(), P("data")
KEPT = "kept"  # the name of what a layer keeps beside its input
PLACES = {
    "embedding": P(None, "data"),
    "layers": P(None, "data"),
    "norm": WHOLE,
    "head": DIVIDED,
}


def is_divided() -> bool:
    """Return whether a mesh is set."""
    return "data" in jax.sharding.get_abstract_mesh().axis_names


def on_mesh(tree: Any, spec: P = WHOLE) -> Any:
    """Return arrays where `spec` says, by default whole on every device; without a
    mesh, unchanged.
    """
    return (
        jax.tree.map(lambda x: jax.sharding.reshard(x, spec), tree)
        if is_divided()
        else tree
    )


# --- The model. ---
def init_params(config: Config, key: jax.Array) -> dict[str, Any]:
    """Return float32 weights; each device of the mesh that is set keeps a part."""
    width, hidden, keys = (
        config.width,
        config.hidden,
        config.key_heads * config.width // config.heads,
    )
    sizes = {
        "query": (width, width),
        "key": (width, keys),
        "value": (width, keys),
        "out": (width, width),
    }
    sizes |= {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    return random_params(config, sizes, key)


def random_params(
    config: Config, sizes: dict[str, tuple[int, ...]], key: jax.Array
) -> dict[str, Any]:
    """Return float32 weights of a model whose layers have weights of these sizes."""
    random = iter(jax.random.split(key, len(sizes) + 2))

    def normal(*shape):
        return 0.02 * jax.random.normal(next(random), shape, jnp.float32)

    def ones(*shape):
        return jnp.ones(shape, jnp.float32)

    params: dict[str, Any] = {
        "embedding": normal(config.vocabulary, config.width),
        "head": normal(config.width, config.vocabulary),
    }
    params["layers"] = {
        name: normal(config.depth, *size) for name, size in sizes.items()
    }
    params["layers"] |= {
        name: ones(config.depth, config.width)
        for name in ("attention_norm", "mlp_norm")
    }
    params["norm"] = ones(config.width)
    return {name: on_mesh(tree, PLACES[name]) for name, tree in params.items()}


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Return the RMSNorm of x (B, T, C)."""
    return (
        x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5) * scale[None, None]
    )


def rotated(x: jax.Array) -> jax.Array:
    """Return queries or keys (B, T, heads, D), rotated by their positions."""
    frequencies = 500_000.0 ** (
        -jnp.arange(0, x.shape[-1], 2, jnp.float32) / x.shape[-1]
    )
    angles = jnp.outer(jnp.arange(x.shape[1], dtype=jnp.float32), frequencies)[
        None, :, None
    ]  # (1, T, 1, D / 2)
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate(
        [
            a * jnp.cos(angles) - b * jnp.sin(angles),
            b * jnp.cos(angles) + a * jnp.sin(angles),
        ],
        -1,
    )


def attention(config: Config, x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    """Return, for each position of x (B, T, C), a mean of the positions up to it."""

    def heads(name):
        size = w["query"].shape[-1] // config.heads
        return (x @ w[name]).reshape(*x.shape[:2], -1, size)

    operands = [
        rotated(heads("query")),
        rotated(heads("key")),
        heads("value"),
    ]  # (B, T, heads, D)

    def attend(qkv):
        return jax.nn.dot_product_attention(
            *qkv, is_causal=True, implementation=config.attention
        )

    # In a shard_map, or each device would compute the attention of all sequences.
    if config.attention == "cudnn":
        kernel = (
            jax.shard_map(attend, in_specs=DIVIDED, out_specs=DIVIDED)
            if is_divided()
            else attend
        )
        mixed = kernel([z.astype(jnp.bfloat16) for z in operands]).astype(x.dtype)
    else:
        groups = [jnp.stack(jnp.split(z, config.key_heads, 2)) for z in operands]
        mixed = jnp.concatenate(list(jax.lax.map(jax.checkpoint(attend), groups)), 2)
    return mixed.reshape(*x.shape[:2], -1) @ w["out"]


def layer(config: Config, x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    """Return the residual stream (B, T, C) after a layer, which gathers its weights."""
    w = on_mesh(w)
    x = x + attention(config, norm(x, w["attention_norm"]), w)
    h = norm(x, w["mlp_norm"])
    return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]


def loss_fn(config: Config, params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    """Return the mean cross-entropy of each next token, in nats, of tokens (B, T +
    1).
    """
    x, _ = through_layers(
        config, lambda x, w: (layer(config, x, w), None), params, tokens
    )
    return next_token_loss(config, params, x, tokens)


def through_layers(
    config: Config,
    layer: Callable[[jax.Array, Any], tuple[jax.Array, Any]],
    params: dict[str, Any],
    tokens: jax.Array,
) -> tuple[jax.Array, Any]:
    """Return the residual stream (B, T, C) of tokens (B, T + 1) behind all layers, and
    what else each of them returns.
    """
    # All tokens in some columns, then some in all.
    x = on_mesh(params["embedding"][on_mesh(tokens[:, :-1])], DIVIDED)
    in_few_bits = functools.partial(mpx.checkpoint, kept=config.kept, argnums=0)
    checkpoint = jax.checkpoint if config.kept is None else in_few_bits
    small = jax.checkpoint_policies.save_only_these_names(KEPT)
    return jax.lax.scan(checkpoint(layer, policy=small), x, params["layers"])


def next_token_loss(
    config: Config, params: dict[str, Any], x: jax.Array, tokens: jax.Array
) -> jax.Array:
    """Return the mean cross-entropy of tokens (B, T + 1) from the residual stream.

    The softmax is taken of one part of the vocabulary after another: a part of the head
    is gathered for all tokens, and its gradient is added up over devices once.
    """
    x, targets = norm(x, params["norm"]), tokens[:, 1:]
    size = config.vocabulary // config.loss_parts

    def part(head, start):
        logits = x @ on_mesh(head)
        return log_sum_exp(logits), target_logits(logits, targets - start)

    heads = params["head"].reshape(config.width, config.loss_parts, size)
    parts = jnp.moveaxis(heads, 1, 0), size * jnp.arange(config.loss_parts)
    totals, of_targets = jax.lax.map(lambda z: jax.checkpoint(part)(*z), parts)
    return (jax.nn.logsumexp(totals, 0) - of_targets.sum(0)).mean()


# --- The step. ---
class Model(NamedTuple):
    """What a training step needs of a model."""

    configs: Mapping[str, Any]
    init_params: Callable[[Any, jax.Array], dict[str, Any]]
    loss_fn: Callable[[Any, dict[str, Any], jax.Array], Any]
    has_aux: bool = False  # whether the loss comes with shares that are shown by name


LLAMA = Model(CONFIGS, init_params, loss_fn)


def make_rule(
    rule: Literal["adamw", "muon"], learning_rate: float
) -> optax.GradientTransformation:
    """Return AdamW, or Muon on the matrices of the layers, each whole on one device,
    and AdamW on all else. Gradients are clipped by a norm that needs few of them.
    """
    clip = mpx.clip_by_predicted_norm(1.0, by="head|norm")
    if rule == "adamw":
        return optax.chain(clip, optax.adamw(learning_rate, weight_decay=0.1))

    muon = optax.chain(
        optax.trace(0.95, nesterov=True),
        mpx.each_matrix(mpx.newton_schulz, products="f16", sent="bf16"),
        optax.stateless(lambda updates, _: jax.tree.map(as_large_as_adams, updates)),
        optax.add_decayed_weights(0.1),
        optax.scale_by_learning_rate(learning_rate),
    )
    rules = {"muon": muon, "adam": optax.adamw(learning_rate, weight_decay=0.1)}

    def rule_of(params: Any) -> Any:  # stacks are (depth, ..., inputs, outputs)
        return jax.tree.map(lambda p: "muon" if p.ndim > 2 else "adam", params)

    return optax.chain(clip, optax.partition(rules, rule_of))


def as_large_as_adams(update: jax.Array) -> jax.Array:
    """Scale what Muon makes of matrices, so that AdamW's rate and decay fit."""
    return 0.2 * max(update.shape[-2:]) ** 0.5 * update


def make_step(
    config: Config,
    recipe: str,
    *,
    rule: Literal["adamw", "muon"] = "adamw",
    learning_rate: float = 3e-4,
    grad_dtype: Any = "as_computed",
    model: Model = LLAMA,
) -> tuple[Callable[[jax.Array], tuple[Any, Any]], Callable[..., Any]]:
    """Return a function from a key to (params, opt_state), and the step of both and
    tokens, which donates them.
    """
    tx = mpx.mixed_precision(make_rule(rule, learning_rate), recipe)
    loss = mpx.autocast(functools.partial(model.loss_fn, config), recipe)

    def start(key: jax.Array) -> tuple[Any, Any]:
        params = mpx.get_policy(recipe).cast_to_param(model.init_params(config, key))
        return params, tx.init(params)

    step = mpx.train_step(loss, tx, has_aux=model.has_aux, grad_dtype=grad_dtype)
    return start, jax.jit(step, donate_argnums=(0, 1))


def step_and_arguments(
    size: str = "tiny",
    recipe: str = "bf16-split24-8bit",
    gpus: Sequence[Any] = (),
    rows: int = 1,
    *,
    model: Model = LLAMA,
    **options: Any,
) -> tuple[Callable[..., Any], tuple[Any, ...], tuple[()]]:
    """Return a step and the shapes of its arguments for `mpx program`, with nothing
    more to donate.

    `gpus` need not be there (`mpx.tools.program.target_devices("h200", 8)`); each has
    some `rows` of `length` tokens. `options` are fields of the configuration, `length`,
    and options of `make_step`.
    """
    config = model.configs[size]
    fields = {
        field.name: options.pop(field.name)
        for field in dataclasses.fields(config)
        if field.name in options
    }
    shape = (rows * max(1, len(gpus)), options.pop("length", 4096) + 1)
    config = dataclasses.replace(config, **fields)
    start, step = make_step(config, recipe, model=model, **options)

    def arguments():
        return (
            *start(jax.random.key(0)),
            on_mesh(jnp.zeros(shape, jnp.int32), DIVIDED),
        )

    if not gpus:
        return step, jax.eval_shape(arguments), ()
    mesh = Mesh(np.array(gpus), ("data",), axis_types=(AxisType.Explicit,))
    return step, devices.place(mesh, devices.shapes_on(mesh.shape, arguments)), ()


def command(model: Model) -> typer.Typer:
    """Return the command that trains a model on bytes, on all devices that there
    are.
    """
    app = typer.Typer(
        add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
    )
    sizes = f"Of {', '.join(model.configs)}."

    @app.command()
    def main(
        recipe: Annotated[
            str, Option(help="The name of a recipe, see `mpx.recipes()`.")
        ] = "bf16-split-8bit",
        size: Annotated[str, Option(help=sizes)] = "tiny",
        steps: Annotated[int, Option(min=1)] = 100,
        rows: Annotated[
            int,
            Option(help="Sequences of a batch, a multiple of the number of devices."),
        ] = 16,
        length: Annotated[int, Option(help="Tokens of a sequence.")] = 128,
        rule: Annotated[
            Literal["adamw", "muon"], Option(help="The optimizer.")
        ] = "adamw",
    ) -> None:
        """Train on bytes, on all devices that there are."""
        config = dataclasses.replace(model.configs[size], vocabulary=256)
        options = {"rule": rule, "learning_rate": 1e-3, "model": model}
        start, step = make_step(config, recipe, **options)
        with jax.set_mesh(jax.make_mesh((jax.device_count(),), ("data",))):
            train(start, step, steps, rows, length)

    return app


def train(
    start: Callable[..., Any],
    step: Callable[..., Any],
    steps: int,
    rows: int,
    length: int,
) -> None:
    """Train on the bytes of Python's standard library, and print losses."""
    # Here, since it needs Grain, and a step does not.
    from examples.gpt import data

    with tempfile.TemporaryDirectory() as folder:
        data.prepare(Path(folder) / "tokens")
        text = data.Rows(Path(folder) / "tokens", "training", length)
        params, opt_state = jax.jit(start)(jax.random.key(0))
        batches = data.batches(text, batch_size=rows, seed=0)
        for number, tokens in zip(range(1, steps + 1), batches, strict=False):
            tokens = jax.device_put(tokens.astype("int32"), DIVIDED)
            params, opt_state, loss, *aux = step(params, opt_state, tokens)
            if number % 10 == 0 or number == steps:
                shown = [f"{name} {x:.1%}" for d in aux for name, x in d.items()]
                typer.echo(", ".join([f"step {number}: loss {loss:.4f}", *shown]))


app = command(LLAMA)

if __name__ == "__main__":
    app()
