"""Define GPT-2 in Flax NNX, once for all precisions and without dtypes.

The model is a float32 program. `mpx.autocast` casts the inputs of its matrix products,
and `policy.cast_to_param` casts its weights. The one exception is cuDNN's attention, a
kernel for 16-bit numbers: its inputs are cast in this file.

Sizes, initial weights and the order of operations follow GPT-2 (Radford et al., 2019):
learned positions, a norm before each part of a block and at the end, biases, the tanh
formula of GELU, one table for embedding and head.

Shapes: B sequences, T tokens each, C = width, H heads of size D = C / H, V = rows of
the embedding, padding included.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import mpx
from examples.gpt import devices


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a model and the layout of its program. The layout changes results in
    the last bits only.
    """

    width: int  # C, of the residual stream
    depth: int  # blocks
    heads: int  # of attention; `width` is a multiple of it
    context: int  # positions, the longest sequence
    vocabulary: int  # tokens
    # The embedding is padded to a multiple of so many rows, because matrix units work
    # on whole tiles. A padding row is never looked up, and its logit is minus infinity.
    vocabulary_multiple: int = 128
    attention: Literal["xla", "cudnn"] = "xla"  # "cudnn" is flash attention on a GPU
    attention_dtype: Literal["bfloat16", "float16"] = (
        "bfloat16"  # of the inputs of cuDNN's attention
    )
    # Whether each block has its own arrays, or all blocks one array for each weight:
    # the optimizer then runs one kernel for all. "stacked" unrolls the program too;
    # "scanned" compiles one block, and copies what it keeps into stacks.
    layers: Literal["unrolled", "stacked", "scanned"] = "unrolled"
    # What the backward pass keeps of each block: all activations; the results of its
    # linear layers and of attention ("dots"); of these all but the widest ("thin"); or
    # its input alone ("full"), or that in 8 bits ("8bit"), which changes gradients a
    # little. The others are computed again.
    checkpoint: Literal["none", "dots", "thin", "full", "8bit"] = "none"

    @property
    def padded_vocabulary(self) -> int:
        """Return the number of rows of the embedding."""
        return (
            -(-self.vocabulary // self.vocabulary_multiple) * self.vocabulary_multiple
        )


# The fields that decide the shapes of the arrays in a checkpoint.
SIZES = (
    "width",
    "depth",
    "heads",
    "context",
    "vocabulary",
    "vocabulary_multiple",
    "layers",
)
PRESETS = {
    "tiny": Config(width=128, depth=4, heads=4, context=64, vocabulary=256),
    "gpt2-124m": Config(width=768, depth=12, heads=12, context=1024, vocabulary=50_257),
    "gpt2-350m": Config(
        width=1024, depth=24, heads=16, context=1024, vocabulary=50_257
    ),
    "gpt2-1.5b": Config(
        width=1600, depth=48, heads=25, context=1024, vocabulary=50_257
    ),
}
INITIAL_SCALE = 0.02
ATTENTION = "attention"  # what a checkpoint keeps of it: its inputs or its result
# in JAX's names of the kernel, whose results have no name to be kept by
CUDNN_FORWARD = "dot_product_attention_fwd"


def get_preset(name: str) -> Config:
    """Return the sizes of a name, or raise a `ValueError` that lists all names."""
    if name not in PRESETS:
        raise ValueError(
            f"no model is called {name!r}; there are {', '.join(PRESETS)}."
        )
    return PRESETS[name]


class Attention(nnx.Module):
    """Causal self-attention."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.config = config
        self.query_key_value = _linear(config.width, 3 * config.width, rngs)
        self.out = _linear(
            config.width, config.width, rngs, 1 / (2 * config.depth) ** 0.5
        )

    def __call__(self, x: jax.Array) -> jax.Array:  # (B, T, C)
        """Return, for each position, a mean of the positions up to it."""
        batch, length, width = x.shape
        # Heads stand before the three parts: devices that share them have all of a
        # head.
        joined = self.query_key_value(x).reshape(
            batch, length, self.config.heads, 3, -1
        )
        query, key, value = (
            joined[:, :, :, 0],
            joined[:, :, :, 1],
            joined[:, :, :, 2],
        )  # (B, T, H, D)
        if self.config.attention == "cudnn":

            def narrow(x):
                return checkpoint_name(x.astype(self.config.attention_dtype), ATTENTION)

            query, key, value = narrow(query), narrow(key), narrow(value)
        mixed = jax.nn.dot_product_attention(
            query, key, value, is_causal=True, implementation=self.config.attention
        )  # (B, T, H, D)
        if self.config.attention == "xla":
            mixed = checkpoint_name(mixed, ATTENTION)
        mixed = mixed.astype(x.dtype)
        return self.out(mixed.reshape(batch, length, width))  # (B, T, C)


class Block(nnx.Module):
    """Attention and a two-layer perceptron; each reads a norm of the residual stream
    and is added to it.
    """

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        width = config.width
        self.attention_norm = _norm(width, rngs)
        self.attention = Attention(config, rngs)
        self.mlp_norm = _norm(width, rngs)
        self.expand = _linear(width, 4 * width, rngs)
        self.contract = _linear(4 * width, width, rngs, 1 / (2 * config.depth) ** 0.5)

    def __call__(self, x: jax.Array) -> jax.Array:  # (B, T, C)
        """Return the residual stream after this block."""
        x = x + self.attention(self.attention_norm(x))
        hidden = gelu(self.expand(self.mlp_norm(x)))  # (B, T, 4C)
        return x + self.contract(hidden)


class GPT(nnx.Module):
    """A GPT-2: from tokens to the logits of each next token."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.config = config
        normal = nnx.initializers.normal(INITIAL_SCALE, jnp.float32)
        self.token_embedding = nnx.Param(
            normal(rngs.params(), (config.padded_vocabulary, config.width))
        )
        self.position_embedding = nnx.Param(
            normal(rngs.params(), (config.context, config.width))
        )
        blocks = [Block(config, rngs) for _ in range(config.depth)]
        self.blocks = (
            nnx.List(blocks) if config.layers == "unrolled" else _stack(blocks)
        )
        self.norm = _norm(config.width, rngs)

    def head(self) -> jax.Array:  # (V, C)
        """Return the embedding. Gathered for each use, its two gradients are divided
        before they are added up.
        """
        return devices.gather(self.token_embedding[...], "token_embedding")

    def features(self, tokens: jax.Array) -> jax.Array:  # (B, T) integers
        """Return the inputs (B, T, C) of the head, which is the transposed token
        embedding.
        """
        positions = devices.gather(self.position_embedding[...], "position_embedding")
        x = self.head()[tokens] + positions[None, : tokens.shape[1]]  # (B, T, C)
        if self.config.layers == "unrolled":
            for graphdef, weights in map(nnx.split, self.blocks):
                x = _checkpointed(graphdef, self.config)(weights, x)
            return self.norm(x)
        graphdef, weights = nnx.split(self.blocks)
        run = _checkpointed(graphdef, self.config)
        if self.config.layers == "scanned":
            x, _ = jax.lax.scan(lambda x, weights: (run(weights, x), None), x, weights)
        else:
            for layer in _unstack(weights, self.config.depth):
                x = run(layer, x)
        return self.norm(x)

    def __call__(self, tokens: jax.Array) -> jax.Array:  # (B, T) integers
        """Return the logits (B, T, V) of each next token."""
        return masked_logits(self.features(tokens), self.head(), self.config.vocabulary)


def masked_logits(
    features: jax.Array, embedding: jax.Array, vocabulary: int
) -> jax.Array:
    """Return logits (..., V), with minus infinity for the padding rows of the embedding
    (V, C).
    """
    logits = features @ embedding.T
    if vocabulary == len(embedding):
        return logits
    return jnp.where(
        jnp.arange(len(embedding)) < vocabulary,
        logits,
        jnp.asarray(-jnp.inf, logits.dtype),
    )


def gelu(x: jax.Array) -> jax.Array:
    """Return GELU by its tanh formula: x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x +
    0.044715 x**3).

    It is written as x sigmoid(2 u), the same function. XLA for a GPU keeps the tanh in
    float32 between the passes, and computes the sigmoid again; and far below zero 1 +
    tanh(u) has no digits left.
    """
    return x * jax.nn.sigmoid(2 * (2 / jnp.pi) ** 0.5 * (x + 0.044715 * x**3))


def _linear(inputs: int, outputs: int, rngs: nnx.Rngs, gain: float = 1.0) -> nnx.Linear:
    return nnx.Linear(
        inputs,
        outputs,
        kernel_init=nnx.initializers.normal(gain * INITIAL_SCALE),
        rngs=rngs,
    )


def _norm(width: int, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)


def _stack(blocks: list[Block]) -> Block:
    """Stack the weights of all blocks along a new first axis, and return them as one
    block.
    """
    weights = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(nnx.state, blocks))
    return nnx.merge(nnx.graphdef(blocks[0]), weights)


def _unstack(weights: Any, depth: int) -> list[Any]:
    """Return the weights of each block. Slices would do too, but XLA joins the
    gradients of a split in one pass.
    """
    leaves, treedef = jax.tree.flatten(weights)
    parts = ([part[0] for part in jnp.split(leaf, depth)] for leaf in leaves)
    return [treedef.unflatten(layer) for layer in zip(*parts, strict=True)]


def _checkpointed(
    graphdef: nnx.GraphDef, config: Config
) -> Callable[[Any, jax.Array], jax.Array]:
    """Return a function that runs a block on its weights and keeps activations as
    `config.checkpoint` says.
    """

    def run(weights, x):
        return nnx.merge(graphdef, devices.gather(weights))(x)

    if config.checkpoint == "none":
        return run
    # A barrier keeps XLA from merging the two computations. It stands before the input
    # alone: before the weights it would have them copied out of their stacks. Those of
    # a scanned block cannot be merged.
    barriers = (False, config.layers != "scanned")
    if config.checkpoint == "8bit":
        return mpx.checkpoint(
            run, kept=mpx.Blockwise8bit(), argnums=1, prevent_cse=barriers
        )
    policies = jax.checkpoint_policies
    policy = None
    if config.checkpoint != "full":
        # The logits of attention (B, H, T, T) are not kept: they are the largest
        # arrays, and cheap to compute again.
        kept = (
            functools.partial(_is_kept_product, config),
            policies.save_only_these_names(ATTENTION),
            lambda primitive, *_, **__: CUDNN_FORWARD in primitive.name,
        )
        policy = functools.reduce(policies.save_from_both_policies, kept)
    return jax.checkpoint(run, policy=policy, prevent_cse=barriers)


def _is_kept_product(
    config: Config, primitive: Any, *operands: Any, **params: Any
) -> bool:
    """Return whether an operation is a linear layer whose result a checkpoint keeps."""
    if not jax.checkpoint_policies.dots_with_no_batch_dims_saveable(
        primitive, *operands, **params
    ):
        return False
    return config.checkpoint == "dots" or operands[1].shape[-1] < 4 * config.width
