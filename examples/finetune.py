r"""Fine-tune GPT-2 in any recipe: from a published file of weights to such a file
again, and a checkpoint.

    python -m examples.finetune gpt2/model.safetensors
    python -m examples.finetune gpt2/model.safetensors --text my_texts \
        --recipe bf16-split-8bit --out tuned

The file has GPT-2's weights under the names of Hugging Face, in any floating dtypes,
and `config.json` beside it. Without a text it reads the source code of Python's
standard library. The folder `--out` gets `model.safetensors`, the float32 weights that
were trained, rounded once to the dtypes of the file that was read; `config.json`, as it
was; `checkpoint`, parameters and optimizer state as Orbax saves them; and `tokens`, the
text.

All bits of a float32 file are trained: `mpx.convert_state` makes masters of it.
`policy.cast_to_param` alone would round the weights before there is a master.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from flax import nnx
from orbax.checkpoint import v1 as ocp
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from typer import Argument, Option

import mpx
from examples.gpt import data
from examples.gpt.loss import cross_entropy

FILE, CONFIG = "model.safetensors", "config.json"
VALIDATION_BATCHES = 4
# Constants in older files, which are written as they were read.
MASKS = (
    ".attn.bias",
    ".attn.masked_bias",
)


# --- The model. Its attributes have the names of the file: a path is a name. ---
class Config(NamedTuple):
    """The sizes of a GPT-2."""

    vocabulary: int
    context: int  # positions
    width: int
    depth: int
    heads: int
    epsilon: float  # of the norms


class Block(nnx.Module):
    """Attention and a perceptron; each reads a norm of the residual stream and is added
    to it.
    """

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        def linear(inputs, outputs):
            return nnx.Linear(inputs * config.width, outputs * config.width, rngs=rngs)

        self.heads = config.heads
        self.ln_1 = nnx.LayerNorm(config.width, epsilon=config.epsilon, rngs=rngs)
        self.attn = nnx.Dict(c_attn=linear(1, 3), c_proj=linear(1, 1))
        self.ln_2 = nnx.LayerNorm(config.width, epsilon=config.epsilon, rngs=rngs)
        self.mlp = nnx.Dict(c_fc=linear(1, 4), c_proj=linear(4, 1))

    def __call__(self, x: jax.Array) -> jax.Array:  # (B, T, C)
        """Return the residual stream after this block."""
        parts = self.attn.c_attn(self.ln_1(x)).reshape(*x.shape[:2], 3, self.heads, -1)
        query, key, value = (
            parts[:, :, 0],
            parts[:, :, 1],
            parts[:, :, 2],
        )  # (B, T, H, D)
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attn.c_proj(mixed.reshape(x.shape))
        return x + self.mlp.c_proj(
            jax.nn.gelu(self.mlp.c_fc(self.ln_2(x)), approximate=True)
        )


class GPT2(nnx.Module):
    """A GPT-2: from tokens (B, T) to the logits (B, T, V) of each next token. Its head
    is the token embedding.
    """

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.wte = nnx.Embed(config.vocabulary, config.width, rngs=rngs)
        self.wpe = nnx.Embed(config.context, config.width, rngs=rngs)
        self.h = nnx.List([Block(config, rngs) for _ in range(config.depth)])
        self.ln_f = nnx.LayerNorm(config.width, epsilon=config.epsilon, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return the logits."""
        x = self.wte(tokens) + self.wpe(jnp.arange(tokens.shape[1]))[None]
        for block in self.h:
            x = block(x)
        return self.wte.attend(self.ln_f(x))


# --- The files. ---
class Published(NamedTuple):
    """What was read."""

    graphdef: Any  # of the model
    config: Config
    names: Any  # in the file, of each parameter
    tensors: Mapping[str, np.ndarray]  # as they are in the file


def name_of(path: tuple[Any, ...], prefix: str) -> str:
    """Return the name that a parameter with this path has in the file."""
    where, _, last = jax.tree_util.keystr(path, simple=True, separator=".").rpartition(
        "."
    )
    return f"{prefix}{where}.{'bias' if last == 'bias' else 'weight'}"


def read(file: Path) -> Published:
    """Read the weights of a GPT-2; raise if there are others, or not all of them."""
    try:
        tensors = load_file(file)
    except SafetensorError as error:
        raise ValueError(
            f"{file} is not a whole file of safetensors: {error}."
        ) from error
    described = file.parent / CONFIG
    if not described.is_file():
        raise ValueError(
            f"there is no {CONFIG} beside {file}; it says how many heads the weights"
            " are for."
        )
    settings = json.loads(described.read_text())
    sizes = [
        settings.get(name)
        for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")
    ]
    kind = settings.get("model_type"), settings.get("activation_function", "gelu_new")
    if kind != ("gpt2", "gelu_new") or None in sizes:
        raise ValueError(
            f"{described} does not give the sizes of a GPT-2; it is of {kind}."
        )
    config = Config(*sizes, settings.get("layer_norm_epsilon", 1e-5))
    graphdef, shapes = nnx.split(
        nnx.eval_shape(lambda: GPT2(config, nnx.Rngs(0))), nnx.Param
    )
    prefix = (
        "transformer."
        if any(name.startswith("transformer.") for name in tensors)
        else ""
    )
    names = jax.tree.map_with_path(
        lambda path, _: name_of(path, prefix), nnx.as_pure(shapes)
    )
    wanted = dict(
        zip(
            jax.tree.leaves(names),
            (shape.shape for shape in jax.tree.leaves(shapes)),
            strict=True,
        )
    )
    found = {
        name: tensor.shape
        for name, tensor in tensors.items()
        if not name.endswith(MASKS)
    }
    wrong = sorted(
        name
        for name in wanted.keys() | found.keys()
        if wanted.get(name) != found.get(name)
    )
    if wrong:
        differences = (
            f"{x} is {found.get(x, 'missing')}, not {wanted.get(x, 'in GPT-2')}"
            for x in wrong[:3]
        )
        raise ValueError(
            f"{file} does not have the weights of {CONFIG}, in {len(wrong)}:"
            f" {'; '.join(differences)}."
        )
    return Published(graphdef, config, names, tensors)


def save(
    out: Path, published: Published, params: Any, opt_state: optax.OptState
) -> None:
    """Write the weights under the names and in the dtypes that were read, and a
    checkpoint of the run.
    """
    tensors, names = dict(published.tensors), jax.tree.leaves(published.names)
    for name, weight in zip(
        names, jax.tree.leaves(mpx.master_params(params, opt_state)), strict=True
    ):
        tensors[name] = np.asarray(weight.astype(tensors[name].dtype))
    # Without it transformers refuses the file.
    save_file(tensors, out / FILE, metadata={"format": "pt"})
    ocp.save(out.absolute() / "checkpoint", {"params": params, "opt_state": opt_state})


# --- The run. ---
def main(
    weights: Annotated[
        Path,
        Argument(exists=True, dir_okay=False, help="model.safetensors of a GPT-2."),
    ],
    text: Annotated[
        list[Path] | None, Option(help="File or folder; without it Python's library.")
    ] = None,
    tokenizer: Annotated[
        Literal["bytes", "gpt2"], Option(help="What a token is.")
    ] = "gpt2",
    recipe: Annotated[
        str, Option(help="The name of a recipe, see `mpx.recipes()`.")
    ] = "bf16-split",
    out: Annotated[Path, Option(help="Folder of the run, a new one.")] = Path(
        "finetuned"
    ),
    steps: Annotated[int, Option(min=1)] = 200,
    batch_size: Annotated[int, Option(min=1)] = 4,
    context: Annotated[int, Option(min=1, help="Tokens of a sequence.")] = 256,
    learning_rate: Annotated[
        float, Option(help="At the first step; it falls to 0 along a cosine.")
    ] = 3e-5,
    seed: Annotated[
        int,
        Option(help="Decides the order of the text, and what is rounded at random."),
    ] = 0,
) -> None:
    """Fine-tune a GPT-2, in any recipe."""
    rule = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.cosine_decay_schedule(learning_rate, steps)),
    )
    try:
        published = read(weights)
        tx = mpx.mixed_precision(rule, recipe, key=jax.random.key(seed))
        if (
            data.get_tokenizer(tokenizer).vocabulary > published.config.vocabulary
            or context > published.config.context
        ):
            raise ValueError(
                f"--tokenizer {tokenizer} or --context {context} is too large for"
                f" {published.config}."
            )
        data.prepare(out / "tokens", text or [], tokenizer)
        held_out = data.validation_batches(
            out / "tokens", VALIDATION_BATCHES, batch_size, context
        ).astype("int32")
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    shutil.copy(weights.parent / CONFIG, out / CONFIG)
    float32 = jax.tree.map(
        lambda name: jnp.asarray(published.tensors[name], "float32"), published.names
    )
    params, opt_state = mpx.convert_state(float32, rule.init(float32), rule, tx)

    def mean_loss(params: Any, tokens: jax.Array) -> jax.Array:
        logits = nnx.merge(published.graphdef, params)(tokens[:, :-1])
        return cross_entropy(logits, tokens[:, 1:]).mean()

    loss_fn = mpx.autocast(mean_loss, recipe)
    train_step = jax.jit(mpx.train_step(loss_fn, tx), donate_argnums=(0, 1))
    validate = jax.jit(
        lambda params, batches: jax.lax.map(
            lambda tokens: loss_fn(params, tokens), batches
        ).mean()
    )
    typer.echo(f"Validation loss before: {validate(params, held_out):.4f}")
    rows = data.batches(
        data.Rows(out / "tokens", "training", context), batch_size=batch_size, seed=seed
    )
    for step, tokens in zip(range(1, steps + 1), rows, strict=False):
        params, opt_state, loss = train_step(params, opt_state, tokens.astype("int32"))
        if step % 10 == 0 or step == steps:
            typer.echo(f"step {step}: loss {loss:.4f}")
    typer.echo(f"Validation loss after: {validate(params, held_out):.4f}")
    save(out, published, params, opt_state)
    typer.echo(f"Written: {out / FILE} and {out / 'checkpoint'}.")


app = typer.Typer(
    add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)
app.command()(main)

if __name__ == "__main__":
    app()
