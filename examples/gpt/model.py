"""A small GPT in Flax NNX, written once and without dtypes.

It is a plain float32 program. In which precision it is stored and run is not the model's business: `mpx.autocast`
lowers its matrix products and nothing else, `policy.cast_to_param` stores its weights. There are no biases but those of
the norms: the gradient of a bias is one more sum over all tokens.

Shapes: B sequences, T bytes each, C = width, H heads of size D = C / H.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

VOCABULARY = 256  # bytes
HEAD_SIZE = 32


class Attention(nnx.Module):
    """Causal self-attention."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.heads = width // HEAD_SIZE
        self.query_key_value = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(width, width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # (B, T, C)
        """Mixes each position with those before it."""
        batch, length, width = x.shape
        joined = self.query_key_value(x).reshape(batch, length, 3, self.heads, HEAD_SIZE)
        query, key, value = joined[:, :, 0], joined[:, :, 1], joined[:, :, 2]  # (B, T, H, D)
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)  # (B, T, H, D)
        return self.out(mixed.reshape(batch, length, width))  # (B, T, C)


class Block(nnx.Module):
    """Attention and a two-layer perceptron, each after a norm and added to the residual stream."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs)
        self.attention = Attention(width, rngs)
        self.mlp_norm = nnx.LayerNorm(width, rngs=rngs)
        self.expand = nnx.Linear(width, 4 * width, use_bias=False, rngs=rngs)
        self.contract = nnx.Linear(4 * width, width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # (B, T, C)
        """The residual stream after this block."""
        x = x + self.attention(self.attention_norm(x))
        hidden = nnx.gelu(self.expand(self.mlp_norm(x)))  # (B, T, 4C)
        return x + self.contract(hidden)


class GPT(nnx.Module):
    """Logits of the next byte, for each byte of each sequence."""

    def __init__(self, *, width: int, depth: int, context: int, rngs: nnx.Rngs) -> None:
        normal = nnx.initializers.normal(0.02)
        self.token_embedding = nnx.Param(normal(rngs.params(), (VOCABULARY, width)))
        self.position_embedding = nnx.Param(normal(rngs.params(), (context, width)))
        self.blocks = nnx.List([Block(width, rngs) for _ in range(depth)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:  # (B, T) integers
        """The logits of each following byte."""
        x = self.token_embedding[...][tokens]  # (B, T, C)
        x = x + self.position_embedding[...][None, : tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # (B, T, 256)


def next_byte_loss(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats a byte; a float32 scalar, also for 16-bit logits."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets).mean()
