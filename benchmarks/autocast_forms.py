"""A transformer in the forms that are measured: left to `mpx.autocast`, or cast by
hand. It is written in Flax Linen.

The model has two dtypes; with none of them, the same lines are left to `mpx.autocast`.
Products take their operands in the first and have their result in it, and so does what
is computed from that alone, such as an activation. The second is the dtype of the
stream: what products are added to, and what norms return. Statistics of norms,
softmaxes and the loss are float32 in every form. By hand with a float32 stream is what
`torch.autocast` does with a transformer; both in bfloat16 is what saves most.

Shapes: B examples, T positions, C = width, H heads of size D = C / H, V tokens.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import mpx
from examples.gpt.model import gelu

Loss = Callable[[Any, jax.Array], jax.Array]  # of the parameters and of tokens


# --- The model. ---
class Dtypes(NamedTuple):
    """The dtypes of a model that is cast by hand; None leaves them out."""

    products: Any = None  # of the operands and results of products
    stream: Any = None  # of the residual stream, and of what norms return

    def for_product(self, x: jax.Array) -> jax.Array:
        """Return the operand of a product, which without dtypes is the array itself."""
        return x if self.products is None else x.astype(self.products)

    def in_stream(self, x: jax.Array) -> jax.Array:
        """Return an array in the dtype of the stream; without dtypes in float32."""
        return x.astype(self.stream or jnp.float32)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the cross-entropy of logits (..., V) and labels (...), in float32 or
    wider.

    A label is compared with an iota: the gradient of a look-up would be a scatter into
    all logits.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    shifted = logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    is_label = jax.nn.one_hot(labels, logits.shape[-1], dtype=bool)
    return jnp.log(jnp.exp(shifted).sum(-1)) - jnp.where(is_label, shifted, 0).sum(-1)


class Attention(nn.Module):
    """Causal self-attention by `jax.nn.dot_product_attention`; cuDNN's kernel takes
    bfloat16 in every form.
    """

    heads: int
    dtypes: Dtypes
    implementation: Literal["xla", "cudnn"]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # (B, T, C)
        """Mix each position with those before it."""
        joined = nn.Dense(
            3 * x.shape[-1], dtype=self.dtypes.products, name="query_key_value"
        )(x)
        operands = (
            joined.astype(jnp.bfloat16) if self.implementation == "cudnn" else joined
        )
        if joined.dtype == jnp.float16 and jax.default_backend() == "cpu":
            # XLA on CPU has no products of float16 numbers with float32 sums.
            operands = joined.astype(jnp.float32)
        # 3 of (B, T, H, D).
        parts = jnp.split(
            operands.reshape(*x.shape[:-1], 3 * self.heads, -1), 3, axis=-2
        )
        mixed = jax.nn.dot_product_attention(
            *parts, is_causal=True, implementation=self.implementation
        )
        mixed = mixed.astype(joined.dtype).reshape(x.shape)
        return nn.Dense(x.shape[-1], dtype=self.dtypes.products, name="out")(mixed)


class Mlp(nn.Module):
    """Two layers with a GELU between them."""

    dtypes: Dtypes

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # (B, T, C)
        """Return what is added to the residual stream."""
        hidden = gelu(
            nn.Dense(4 * x.shape[-1], dtype=self.dtypes.products, name="expand")(x)
        )
        return nn.Dense(x.shape[-1], dtype=self.dtypes.products, name="contract")(
            hidden
        )


class Transformer(nn.Module):
    """A transformer with norms in front of each part, and a tied head."""

    width: int
    layers: int
    heads: int
    vocabulary: int
    dtypes: Dtypes
    attention: Literal["xla", "cudnn"]

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:  # (B, T)
        """Return the logits of each next token (B, T, V)."""
        dtypes = self.dtypes
        norm = lambda x, name: nn.LayerNorm(dtype=dtypes.stream, name=name)(x)
        tokens = nn.Embed(
            self.vocabulary, self.width, dtype=dtypes.stream, name="tokens"
        )
        positions = self.param(
            "positions", nn.initializers.normal(0.02), (inputs.shape[1], self.width)
        )
        x = dtypes.in_stream(tokens(inputs)) + dtypes.in_stream(positions)[None]
        for i in range(self.layers):
            attention = Attention(
                self.heads, dtypes, self.attention, name=f"attention_{i}"
            )
            x = x + dtypes.in_stream(attention(norm(x, f"attention_norm_{i}")))
            x = x + dtypes.in_stream(Mlp(dtypes, name=f"mlp_{i}")(norm(x, f"norm_{i}")))
        return (
            dtypes.for_product(norm(x, "norm")) @ dtypes.for_product(tokens.embedding).T
        )


class Size(NamedTuple):
    """Sizes of the model and of its batch; attention by cuDNN needs a GPU, or a
    target.
    """

    width: int
    layers: int
    heads: int
    context: int
    vocabulary: int
    batch: int
    attention: Literal["xla", "cudnn"] = "xla"

    def model(self, dtypes: Dtypes) -> Transformer:
        """Return the model."""
        return Transformer(
            self.width, self.layers, self.heads, self.vocabulary, dtypes, self.attention
        )


SIZES = {
    "tiny": Size(width=192, layers=4, heads=6, context=64, vocabulary=1024, batch=4),
    "gpt2": Size(
        width=768, layers=12, heads=12, context=1024, vocabulary=50_304, batch=8
    ),
}
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}


def make_params(size: Size, dtype: Any, seed: int = 0) -> Any:
    """Return the initial parameters, which are the same whatever a model computes
    in.
    """
    module = size._replace(attention="xla").model(Dtypes())
    init = lambda: module.init(
        jax.random.key(seed), jnp.zeros((1, size.context), jnp.int32)
    )["params"]
    return jax.tree.map(lambda p: p.astype(dtype), jax.jit(init)())


def make_tokens(size: Size, seed: int = 0) -> jax.Array:
    """Return random sequences with one token more than the model reads."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(
        rng.integers(size.vocabulary, size=(size.batch, size.context + 1)), jnp.int32
    )


def shapes(size: Size, dtype: Any) -> tuple[Any, Any]:
    """Return the shapes of the parameters and of the tokens."""
    tokens = jax.ShapeDtypeStruct((size.batch, size.context + 1), jnp.int32)
    return jax.eval_shape(lambda: make_params(size, dtype)), tokens


def make_loss(size: Size, dtypes: Dtypes) -> Loss:
    """Return the mean cross-entropy of a model; a new function each time."""
    model = size.model(dtypes)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        logits: Any = model.apply({"params": params}, tokens[:, :-1])
        return cross_entropy(logits, tokens[:, 1:]).mean()

    return loss


# --- The forms. ---
class Form(NamedTuple):
    """One way to run the model."""

    # Makes the loss from the dtype of products, and from a function that makes the
    # model's loss for the dtypes that are written into its layers.
    make: Callable[[Any, Callable[[Dtypes], Loss]], Loss]
    beside: str | None = None  # the form by hand that it is compared with, if any


def autocast_form(beside: str, **options: Any) -> Form:
    """Return the model without dtypes under `mpx.autocast`."""
    return Form(
        lambda half, model: mpx.autocast(model(Dtypes()), half, **options), beside
    )


dots = functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)

HAND, HAND_DOTS, HAND_STREAM = "by hand", "by hand, dots", "by hand, f32 stream"
FORMS = {
    HAND: Form(lambda half, model: model(Dtypes(half, half))),
    HAND_DOTS: Form(lambda half, model: dots(model(Dtypes(half, half)))),
    HAND_STREAM: Form(lambda half, model: model(Dtypes(half, jnp.float32)), HAND),
    "f32": Form(lambda half, model: model(Dtypes()), HAND),
    "autocast": autocast_form(HAND),
    "autocast, gradients f32": autocast_form(HAND, reduce_dtype=jnp.float32),
    "f32, dots": Form(lambda half, model: dots(model(Dtypes())), HAND_DOTS),
    "autocast, dots": autocast_form(HAND_DOTS, checkpoint="dots"),
}


def make_form(name: str, size: Size, half: Any = jnp.bfloat16) -> Loss:
    """Return the loss in one of the forms, in functions that JAX has not seen."""
    return FORMS[name].make(half, functools.partial(make_loss, size))
