"""The same in libraries: Flax Linen and NNX, Equinox, Optax."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from tests.programs import integers, program, rows

D = 16


def of_shapes(make):
    """Return the parameters of a model as shapes, from a function that makes them,
    without a compilation.
    """
    return jax.tree.map(lambda leaf: leaf.shape, jax.eval_shape(make))


class Perceptron(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm()(nn.Dense(D)(x))
        return nn.Dense(4)(nn.Dropout(0.2, deterministic=True)(nn.gelu(x)))


PERCEPTRON = Perceptron()


@program(
    of_shapes(lambda: PERCEPTRON.init(jax.random.key(0), jnp.ones((1, D)))),
    x=rows(D),
    label=integers(4),
)
def perceptron_in_linen(p, x, label):
    return optax.softmax_cross_entropy_with_integer_labels(
        PERCEPTRON.apply(p, x), label
    ).mean()


ATTENTION = nn.MultiHeadDotProductAttention(num_heads=2)


@program(
    of_shapes(lambda: ATTENTION.init(jax.random.key(0), jnp.ones((1, 8, D)))),
    x=rows(8, D),
)
def attention_in_linen(p, x):
    mask = nn.make_causal_mask(x[..., 0])
    return optax.huber_loss(x + ATTENTION.apply(p, x, mask=mask)).mean()


DECODER = nn.MultiHeadDotProductAttention(num_heads=2, decode=True)


@program(
    of_shapes(lambda: DECODER.init(jax.random.key(0), jnp.ones((1, 8, D)))["params"]),
    x=rows(8, D),
)
def decoding_in_linen(p, x):
    cache = DECODER.init(jax.random.key(0), x)["cache"]

    def step(cache, x):
        y, changed = DECODER.apply(
            {"params": p, "cache": cache}, x[:, None], mutable=["cache"]
        )
        return changed["cache"], y[:, 0]

    _, ys = jax.lax.scan(step, cache, x.swapaxes(0, 1))
    return optax.huber_loss(ys.swapaxes(0, 1)[:, :-1], x[:, 1:]).mean()


CELL = nn.RNN(nn.OptimizedLSTMCell(D))


@program(
    of_shapes(lambda: CELL.init(jax.random.key(0), jnp.ones((1, 8, D)))), x=rows(8, D)
)
def lstm_in_linen(p, x):
    return optax.l2_loss(CELL.apply(p, x)[:, :-1], x[:, 1:]).mean()


NNX, NNX_STATE = nnx.split(
    nnx.eval_shape(
        lambda: nnx.Sequential(
            nnx.Linear(D, D, rngs=nnx.Rngs(0)),
            nnx.gelu,
            nnx.Linear(D, D, rngs=nnx.Rngs(1)),
        )
    )
)


@program(
    jax.tree.map(lambda leaf: leaf.shape, nnx.to_pure_dict(NNX_STATE)),
    x=rows(D),
    y=rows(D),
)
def perceptron_in_nnx(p, x, y):
    state = jax.tree.map(lambda v: v, NNX_STATE)
    nnx.replace_by_pure_dict(state, p)
    return jnp.square(nnx.merge(NNX, state)(x) - y).mean()


EQUINOX, STATIC = eqx.partition(
    eqx.nn.MLP(D, 4, D, 2, key=jax.random.key(0)), eqx.is_array
)


@program(jax.tree.map(lambda leaf: leaf.shape, EQUINOX), x=rows(D), y=rows(4))
def perceptron_in_equinox(p, x, y):
    return jnp.square(jax.vmap(eqx.combine(p, STATIC))(x) - y).mean()
