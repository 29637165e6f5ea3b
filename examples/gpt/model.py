"""GPT-2 in Flax NNX, written once and without dtypes.

It is a plain float32 program. In which precision it is stored and run is not the model's business: `mpx.autocast`
lowers its matrix products and nothing else, `policy.cast_to_param` stores its weights. The one exception is cuDNN's
attention, a kernel for 16-bit numbers: what goes into it is cast where it is called.

Sizes, initial weights and the order of operations are those of GPT-2 (Radford et al., 2019): learned positions, a norm
in front of each part of a block and at the end, biases, GELU by its tanh formula, one table for embedding and head.

Shapes: B sequences, T tokens each, C = width, H heads of size D = C / H, V = rows of the embedding, padding included.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name


@dataclasses.dataclass(frozen=True)
class Config:
    """A size of the model, and how its program is laid out; the layout changes no result but in the last bits.

    Attributes:
        width: of the residual stream, C.
        depth: blocks.
        heads: of attention; `width` is a multiple of it.
        context: positions, the longest sequence.
        vocabulary: tokens that exist.
        vocabulary_multiple: the embedding has rows up to a multiple of this, since matrix units work on whole tiles.
            No row beyond `vocabulary` is ever looked up, and as a logit it is minus infinity.
        attention: `"xla"`, or `"cudnn"` for flash attention on a GPU.
        attention_dtype: what cuDNN is given, `"bfloat16"` or `"float16"`.
        layers: `"scanned"` compiles one block and runs it `depth` times, on weights that are stacked.
        checkpoint: what the backward pass finds of each block: everything (`"none"`), the results of its linear layers
            and of attention (`"dots"`), or its input alone (`"full"`). The rest is computed again.

    Raises:
        ValueError: if a size is not positive, `width` cannot be divided among the heads, or a choice is none of those.
    """

    width: int
    depth: int
    heads: int
    context: int
    vocabulary: int
    vocabulary_multiple: int = 128
    attention: Literal["xla", "cudnn"] = "xla"
    attention_dtype: Literal["bfloat16", "float16"] = "bfloat16"
    layers: Literal["unrolled", "scanned"] = "unrolled"
    checkpoint: Literal["none", "dots", "full"] = "none"

    def __post_init__(self) -> None:
        sizes = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.type is int}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"Config: `{name}` must be at least 1, but is {size}.")
        for field in dataclasses.fields(self):
            choices, chosen = get_args(field.type), getattr(self, field.name)
            if choices and chosen not in choices:
                raise ValueError(f"Config: `{field.name}` must be one of {', '.join(choices)}, but is {chosen!r}.")
        if self.width % self.heads:
            raise ValueError(f"Config: `width` {self.width} is not a multiple of `heads`, {self.heads}.")

    @property
    def padded_vocabulary(self) -> int:
        """Rows of the embedding."""
        return -(-self.vocabulary // self.vocabulary_multiple) * self.vocabulary_multiple

    @property
    def flops_per_token(self) -> int:
        """Operations of a training step for a token, two for each multiplication and addition.

        Six for each weight of a matrix product, once forward and twice backward, and 12 C T a layer for attention to T
        positions (Chowdhery et al., 2022, appendix B), of which a causal model needs half: it is counted in full, as
        there and in the field. Neither padding nor what is computed again counts.
        """
        weights = 12 * self.depth * self.width**2 + self.vocabulary * self.width
        return 6 * weights + 12 * self.depth * self.width * self.context


PRESETS = {
    "tiny": Config(width=128, depth=4, heads=4, context=64, vocabulary=256),
    "gpt2-124m": Config(width=768, depth=12, heads=12, context=1024, vocabulary=50_257),
    "gpt2-350m": Config(width=1024, depth=24, heads=16, context=1024, vocabulary=50_257),
    "gpt2-1.5b": Config(width=1600, depth=48, heads=25, context=1024, vocabulary=50_257),
}
INITIAL_SCALE = 0.02
ATTENTION_RESULT = "attention result"


class Attention(nnx.Module):
    """Causal self-attention."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.config = config
        self.query_key_value = _linear(config.width, 3 * config.width, rngs)
        self.out = _linear(config.width, config.width, rngs, 1 / (2 * config.depth) ** 0.5)

    def __call__(self, x: jax.Array) -> jax.Array:  # (B, T, C)
        """Mixes each position with those before it."""
        batch, length, width = x.shape
        joined = self.query_key_value(x).reshape(batch, length, 3, self.config.heads, -1)
        query, key, value = joined[:, :, 0], joined[:, :, 1], joined[:, :, 2]  # (B, T, H, D)
        if self.config.attention == "cudnn":
            query, key, value = (x.astype(self.config.attention_dtype) for x in (query, key, value))
        mixed = jax.nn.dot_product_attention(
            query, key, value, is_causal=True, implementation=self.config.attention
        )  # (B, T, H, D)
        mixed = checkpoint_name(mixed, ATTENTION_RESULT).astype(x.dtype)
        return self.out(mixed.reshape(batch, length, width))  # (B, T, C)


class Block(nnx.Module):
    """Attention and a two-layer perceptron, each after a norm and added to the residual stream."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        width = config.width
        self.attention_norm = _norm(width, rngs)
        self.attention = Attention(config, rngs)
        self.mlp_norm = _norm(width, rngs)
        self.expand = _linear(width, 4 * width, rngs)
        self.contract = _linear(4 * width, width, rngs, 1 / (2 * config.depth) ** 0.5)

    def __call__(self, x: jax.Array) -> jax.Array:  # (B, T, C)
        """The residual stream after this block."""
        x = x + self.attention(self.attention_norm(x))
        hidden = nnx.gelu(self.expand(self.mlp_norm(x)), approximate=True)  # (B, T, 4C)
        return x + self.contract(hidden)


class GPT(nnx.Module):
    """Logits of the next token, for each token of each sequence."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.config = config
        normal = nnx.initializers.normal(INITIAL_SCALE, jnp.float32)
        self.token_embedding = nnx.Param(normal(rngs.params(), (config.padded_vocabulary, config.width)))
        self.position_embedding = nnx.Param(normal(rngs.params(), (config.context, config.width)))
        blocks = [Block(config, rngs) for _ in range(config.depth)]
        self.blocks = _stack(blocks) if config.layers == "scanned" else nnx.List(blocks)
        self.norm = _norm(config.width, rngs)

    def features(self, tokens: jax.Array) -> jax.Array:  # (B, T) integers
        """What the head, the transposed token embedding, makes logits of; (B, T, C)."""
        x = self.token_embedding[...][tokens]  # (B, T, C)
        x = x + self.position_embedding[...][None, : tokens.shape[1]]
        if self.config.layers == "scanned":
            graphdef, weights = nnx.split(self.blocks)
            run = _checkpointed(graphdef, self.config)
            x, _ = jax.lax.scan(lambda x, weights: (run(weights, x), None), x, weights)
        else:
            for block in self.blocks:
                graphdef, weights = nnx.split(block)
                x = _checkpointed(graphdef, self.config)(weights, x)
        return self.norm(x)

    def __call__(self, tokens: jax.Array) -> jax.Array:  # (B, T) integers
        """The logits of each following token; (B, T, V)."""
        return masked_logits(self.features(tokens), self.token_embedding[...], self.config.vocabulary)


def masked_logits(features: jax.Array, embedding: jax.Array, vocabulary: int) -> jax.Array:
    """Logits of shape (..., V), minus infinity for the rows of the embedding (V, C) that only pad it."""
    logits = features @ embedding.T
    if vocabulary == len(embedding):
        return logits
    return jnp.where(jnp.arange(len(embedding)) < vocabulary, logits, jnp.asarray(-jnp.inf, logits.dtype))


def _linear(inputs: int, outputs: int, rngs: nnx.Rngs, gain: float = 1.0) -> nnx.Linear:
    return nnx.Linear(inputs, outputs, kernel_init=nnx.initializers.normal(gain * INITIAL_SCALE), rngs=rngs)


def _norm(width: int, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)


def _stack(blocks: list[Block]) -> Block:
    """One block, each of whose weights is those of all blocks behind one another."""
    weights = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(nnx.state, blocks))
    return nnx.merge(nnx.graphdef(blocks[0]), weights)


def _checkpointed(graphdef: nnx.GraphDef, config: Config) -> Callable[[Any, jax.Array], jax.Array]:
    """Runs a block on its weights, and keeps of it for the backward pass what the configuration says."""
    run = lambda weights, x: nnx.merge(graphdef, weights)(x)
    if config.checkpoint == "none":
        return run
    policies = jax.checkpoint_policies
    policy = None
    if config.checkpoint == "dots":
        # Not the logits of attention, (B, H, T, T): they are the largest numbers there are, and cheap to make again.
        policy = policies.save_from_both_policies(
            policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names(ATTENTION_RESULT)
        )
    # Inside of a scan XLA cannot undo a checkpoint, so nothing need stand in its way.
    return jax.checkpoint(run, policy=policy, prevent_cse=config.layers == "unrolled")
