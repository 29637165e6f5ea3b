"""Define models in Flax Linen that are cast by hand, or, with the same lines and no dtypes, left to `mpx.autocast`.

A model has two dtypes. Products take their operands in the one, have their result in it, and so has what is computed
from that alone, such as an activation. The other one is that of the stream: what products are added to, what norms
return, and what a loop carries. Statistics of norms, softmaxes and the loss are float32 in every form. By
hand with a float32 stream is what `torch.autocast` does with a transformer; both in bfloat16 is what saves most.

Shapes: B examples, T positions, C = width, H heads of size D = C / H, E experts, V tokens or classes.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from examples.gpt.model import gelu


class Dtypes(NamedTuple):
    """The dtypes of a model that is cast by hand; None where it is written without.

    Attributes:
        products: of the operands and results of products.
        stream: of the residual stream, of what norms return, and of what a loop carries.
    """

    products: Any = None
    stream: Any = None

    def for_product(self, x: jax.Array) -> jax.Array:
        """Return the operand of a product; without dtypes as it is."""
        return x if self.products is None else x.astype(self.products)

    def in_stream(self, x: jax.Array) -> jax.Array:
        """Return an array in the dtype of the stream; without dtypes in float32."""
        return x.astype(self.stream or jnp.float32)


class Model(NamedTuple):
    """A model with its batch.

    Attributes:
        module: a Linen module, from inputs to logits.
        inputs: the shape and dtype of its inputs.
        labels: the shape of the labels, which are integers.
    """

    module: nn.Module
    inputs: jax.ShapeDtypeStruct
    labels: tuple[int, ...]

    def shapes(self) -> tuple[Any, Any, tuple[Any, Any]]:
        """Return the shapes of the parameters, of what else the model keeps, and of a batch."""
        kept = dict(jax.eval_shape(self.module.init, jax.random.key(0), self.inputs))
        return kept.pop("params"), kept, (self.inputs, jax.ShapeDtypeStruct(self.labels, jnp.int32))

    def loss(self, params: Any, kept: Any, batch: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, Any]:
        """Return the mean cross-entropy, and what the model keeps from step to step, such as running means."""
        logits, kept = self.module.apply({"params": params, **kept}, batch[0], mutable=list(kept))
        return cross_entropy(logits, batch[1]).mean(), kept


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the cross-entropy of logits (..., V) and labels (...), in float32 or wider.

    A label is compared with an iota: the gradient of a look-up would be a scatter into all logits.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    shifted = logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    is_label = jax.nn.one_hot(labels, logits.shape[-1], dtype=bool)
    return jnp.log(jnp.exp(shifted).sum(-1)) - jnp.where(is_label, shifted, 0).sum(-1)


# ---- transformers ---------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Self-attention by `jax.nn.dot_product_attention`; cuDNN's kernel takes bfloat16 in every form."""

    heads: int
    dtypes: Dtypes
    causal: bool
    implementation: Literal["xla", "cudnn"]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # (B, T, C)
        """Return, for each position, a mean of others."""
        joined = nn.Dense(3 * x.shape[-1], dtype=self.dtypes.products, name="query_key_value")(x)
        operands = joined.astype(jnp.bfloat16) if self.implementation == "cudnn" else joined
        if joined.dtype == jnp.float16 and jax.default_backend() == "cpu":
            operands = joined.astype(jnp.float32)  # XLA on CPU has no products of float16 numbers with float32 sums
        parts = jnp.split(operands.reshape(*x.shape[:-1], 3 * self.heads, -1), 3, axis=-2)  # 3 of (B, T, H, D)
        mixed = jax.nn.dot_product_attention(*parts, is_causal=self.causal, implementation=self.implementation)
        mixed = mixed.astype(joined.dtype).reshape(x.shape)
        return nn.Dense(x.shape[-1], dtype=self.dtypes.products, name="out")(mixed)


class Mlp(nn.Module):
    """Two layers with a GELU between them."""

    dtypes: Dtypes

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # (B, T, C)
        """Return what is added to the residual stream."""
        hidden = gelu(nn.Dense(4 * x.shape[-1], dtype=self.dtypes.products, name="expand")(x))
        return nn.Dense(x.shape[-1], dtype=self.dtypes.products, name="contract")(hidden)


class Experts(nn.Module):
    """A mixture of experts: a token goes to the one that a router chooses, if that has room (Fedus et al., 2021)."""

    experts: int
    dtypes: Dtypes
    room: float = 1.25  # times the tokens that an expert has on average

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # (B, T, C)
        """Return the results of the chosen experts, times their probabilities."""
        _, length, width = x.shape
        capacity = int(self.room * length / self.experts)  # R, tokens of each sequence
        weight = lambda name, *shape: self.param(name, nn.initializers.lecun_normal(batch_axis=0), shape)
        product = lambda form, *operands: jnp.einsum(form, *map(self.dtypes.for_product, operands))
        scores = nn.Dense(self.experts, dtype=self.dtypes.products, name="router")(x)
        probabilities = jax.nn.softmax(scores.astype(jnp.float32))  # (B, T, E)
        chosen = jax.nn.one_hot(probabilities.argmax(-1), self.experts)
        place = (jnp.cumsum(chosen, axis=1) * chosen).astype(jnp.int32) - 1  # -1 where a token does not go
        sent = jax.nn.one_hot(place, capacity)  # (B, T, E, R)
        inputs = product("bter,btc->ebrc", sent, x)
        hidden = gelu(product("ebrc,ecf->ebrf", inputs, weight("expand", self.experts, width, 4 * width)))
        outputs = product("ebrf,efc->ebrc", hidden, weight("contract", self.experts, 4 * width, width))
        return product("bter,ebrc->btc", sent * (probabilities * chosen).sum(-1)[..., None, None], outputs)


class Transformer(nn.Module):
    """A transformer with norms in front of each part, of tokens with a tied head, or of the patches of images."""

    width: int
    layers: int
    heads: int
    classes: int
    dtypes: Dtypes
    patch: int = 0  # pixels a side; 0 for tokens
    experts: int = 0  # in every second block
    attention: Literal["xla", "cudnn"] = "cudnn"

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:  # tokens (B, T), or images (B, height, width, channels)
        """Return logits: of each next token (B, T, V), or of each image (B, V)."""
        dtypes, of_tokens = self.dtypes, not self.patch
        norm = lambda x, name: nn.LayerNorm(dtype=dtypes.stream, name=name)(x)
        tokens = nn.Embed(self.classes, self.width, dtype=dtypes.stream, name="tokens")
        x = dtypes.in_stream(tokens(inputs) if of_tokens else self.patches(inputs))
        positions = self.param("positions", nn.initializers.normal(0.02), (x.shape[1], self.width))
        x = x + dtypes.in_stream(positions)[None]
        for i in range(self.layers):
            attention = Attention(self.heads, dtypes, of_tokens, self.attention, name=f"attention_{i}")
            has_experts = self.experts and i % 2
            part = Experts(self.experts, dtypes, name=f"experts_{i}") if has_experts else Mlp(dtypes, name=f"mlp_{i}")
            x = x + dtypes.in_stream(attention(norm(x, f"attention_norm_{i}")))
            x = x + dtypes.in_stream(part(norm(x, f"norm_{i}")))
        x = norm(x, "norm")
        if of_tokens:
            return dtypes.for_product(x) @ dtypes.for_product(tokens.embedding).T
        return nn.Dense(self.classes, dtype=dtypes.products, name="head")(x.mean(1, dtype=jnp.float32))

    def patches(self, images: jax.Array) -> jax.Array:
        """Return the embeddings (B, T, C) of the patches of images."""
        sides = (self.patch, self.patch)
        found = nn.Conv(self.width, sides, sides, padding="VALID", dtype=self.dtypes.products, name="patches")(images)
        return found.reshape(len(images), -1, self.width)


# ---- others ---------------------------------------------------------------------------------------------------------


class ConvNet(nn.Module):
    """A residual network: two convolutions a block, each with a batch norm, and half the size at each stage."""

    widths: tuple[int, ...]
    blocks: int  # of each stage
    classes: int
    dtypes: Dtypes

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:  # (B, height, width, channels)
        """Return the logits (B, classes)."""
        x = nn.relu(self.convolution(images, self.widths[0], 7, 2))
        for stage, width in enumerate(self.widths):
            for block in range(self.blocks):
                stride = 2 if stage and not block else 1
                beside = x if stride == 1 else self.convolution(x, width, 1, stride)
                found = nn.relu(self.convolution(x, width, 3, stride))
                x = nn.relu(beside + self.convolution(found, width, 3, 1))
        return nn.Dense(self.classes, dtype=self.dtypes.products)(x.mean((1, 2), dtype=jnp.float32))

    def convolution(self, x: jax.Array, width: int, side: int, stride: int) -> jax.Array:
        """Return a convolution of images, normed over the batch."""
        x = nn.Conv(width, (side, side), (stride, stride), use_bias=False, dtype=self.dtypes.products)(x)
        return nn.BatchNorm(use_running_average=False, dtype=self.dtypes.stream)(x)


class Lstm(nn.Module):
    """A language model of LSTM layers, each a scan over the positions."""

    width: int
    layers: int
    classes: int
    dtypes: Dtypes
    checkpoint: bool = False  # of each step: products are kept, and the rest is computed again

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:  # (B, T)
        """Return the logits (B, T, classes) of each next token."""
        x = nn.Embed(self.classes, self.width, dtype=self.dtypes.stream)(tokens)
        for i in range(self.layers):
            x = self.layer(x, i)
        return nn.Dense(self.classes, dtype=self.dtypes.products, name="head")(x)

    def layer(self, x: jax.Array, i: int) -> jax.Array:  # (B, T, C)
        """Return the states of a layer at all positions. The products of its inputs are one product."""
        dtypes, for_product = self.dtypes, self.dtypes.for_product
        inputs = nn.Dense(4 * self.width, use_bias=False, dtype=dtypes.products, name=f"inputs_{i}")(x)
        weight = self.param(f"states_{i}", nn.initializers.orthogonal(), (self.width, 4 * self.width))
        bias = self.param(f"bias_{i}", nn.initializers.zeros, (4 * self.width,))

        def step(carry: tuple[jax.Array, jax.Array], inputs: jax.Array) -> tuple[Any, jax.Array]:
            cell, state = carry
            gates = inputs + for_product(state) @ for_product(weight) + for_product(bias)[None]
            take, forget, new, give = jnp.split(gates, 4, axis=-1)
            cell = nn.sigmoid(forget) * cell + nn.sigmoid(take) * nn.tanh(new)
            state = dtypes.in_stream(nn.sigmoid(give) * nn.tanh(cell))
            return (dtypes.in_stream(cell), state), state

        start = dtypes.in_stream(jnp.zeros((len(x), self.width)))
        kept = jax.checkpoint_policies.dots_saveable
        run = jax.checkpoint(step, policy=kept, prevent_cse=False) if self.checkpoint else step
        _, states = jax.lax.scan(run, (start, start), inputs.swapaxes(0, 1))
        return states.swapaxes(0, 1)


# ---- sizes ----------------------------------------------------------------------------------------------------------


class Size(NamedTuple):
    """Of a transformer of tokens and its batch."""

    width: int
    layers: int
    heads: int
    context: int
    vocabulary: int
    batch: int


GPT2 = Size(width=768, layers=12, heads=12, context=1024, vocabulary=50_304, batch=16)  # its 124M parameters


def language_model(size: Size, dtypes: Dtypes, **options: Any) -> Model:
    """Return a transformer that predicts tokens."""
    module = Transformer(size.width, size.layers, size.heads, size.vocabulary, dtypes, **options)
    return of_tokens(module, size.batch, size.context)


def vision_transformer(dtypes: Dtypes) -> Model:
    """Return four layers of a ViT-B with patches of 16 pixels, their mean for the head, and images of 256 pixels."""
    return of_images(Transformer(768, 4, 12, 1000, dtypes, patch=16), 64, 256)


def residual_network(dtypes: Dtypes) -> Model:
    """Return a ResNet-18: 20 convolutions, three of them beside a block, each with a batch norm."""
    return of_images(ConvNet((64, 128, 256, 512), 2, 1000, dtypes), 128, 224)


def lstm(dtypes: Dtypes, **options: Any) -> Model:
    """Return a language model of two LSTM layers."""
    return of_tokens(Lstm(1024, 2, 32_768, dtypes, **options), 128, 128)


def of_tokens(module: nn.Module, batch: int, length: int) -> Model:
    """Return a model whose inputs and labels are tokens (B, T)."""
    return Model(module, jax.ShapeDtypeStruct((batch, length), jnp.int32), (batch, length))


def of_images(module: nn.Module, batch: int, side: int) -> Model:
    """Return a model whose inputs are square images (B, side, side, 3), with a label each."""
    return Model(module, jax.ShapeDtypeStruct((batch, side, side, 3), jnp.float32), (batch,))


MODELS: dict[str, Callable[[Dtypes], Model]] = {
    "GPT-2": functools.partial(language_model, GPT2),
    "ConvNet": residual_network,
    "ViT": vision_transformer,
    "LSTM": lstm,
    "LSTM, steps checkpointed": functools.partial(lstm, checkpoint=True),
    "experts": functools.partial(language_model, GPT2._replace(layers=4, vocabulary=32_768), experts=8),
}
