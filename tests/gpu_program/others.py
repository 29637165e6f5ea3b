"""Models as others write them, in plain JAX: a transformer by Optax's cross-entropy and
JAX's attention; its step.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mpx


@dataclasses.dataclass(frozen=True)
class Model:
    """The sizes of a model, how its program is written, and what it reads."""

    width: int = 768
    layers: int = 12
    hidden: int = 3072  # of the perceptron
    words: int = 50_304  # or classes of an image
    head_size: int = 64
    is_gated: bool = False  # the perceptron, as a Llama's
    experts: int = 0  # of which each token takes two
    patch: int = 0  # numbers of a patch of an image, for a ViT
    is_tied: bool = False  # whether the embedding is the head, too
    batch: int = 8
    sequence: int = 1024
    scan: bool = False
    checkpoint: bool = False
    kernel: bool = False  # attention by cuDNN
    parts: int = 1  # in which logits are made


def init(m):
    """Return float32 parameters; layers are a list, or stacked for a scan."""
    w = lambda *shape: jnp.zeros(shape, jnp.float32)
    stacks = (m.experts,) * bool(m.experts)
    layer = {
        "qkv": w(m.width, 3 * m.width),
        "out": w(m.width, m.width),
        "norms": w(4, m.width),
    }
    layer |= {
        "up": w(*stacks, m.width, m.hidden),
        "down": w(*stacks, m.hidden, m.width),
    }
    if m.is_gated:
        layer["gate"] = w(m.width, m.hidden)
    if m.experts:
        layer["router"] = w(m.width, m.experts)
    stacked = jax.tree.map(lambda x: w(m.layers, *x.shape), layer)
    params = {
        "layers": stacked if m.scan else [layer] * m.layers,
        "norm": w(2, m.width),
    }
    params |= {"positions": w(m.sequence, m.width), "head": w(m.width, m.words)}
    if not m.is_tied:
        params["embedding"] = w(m.patch or m.words, m.width)
    return params


def norm(x, scale, bias):
    x = x - x.mean(-1, keepdims=True)
    return (
        x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale[None, None]
        + bias[None, None]
    )


def perceptron(m, x, w):
    if m.is_gated:
        return (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]
    if not m.experts:
        return jax.nn.gelu(x @ w["up"]) @ w["down"]
    # As Switch and Mixtral in JAX: each expert has a place for so many tokens, and
    # sorted tokens are gathered into it.
    rows = x.reshape(-1, m.width)
    weights, chosen = jax.lax.top_k(jax.nn.softmax(rows @ w["router"]), 2)
    order = jnp.argsort(chosen.reshape(-1))
    places = rows[order // 2].reshape(m.experts, -1, m.width)
    out = jax.nn.gelu(places @ w["up"]) @ w["down"]
    out = out.reshape(-1, m.width) * weights.reshape(-1)[order][:, None]
    return jnp.zeros_like(rows).at[order // 2].add(out).reshape(x.shape)


def on_its_device(x):
    """Return activations with each sequence on its device, if there are several, as
    MaxText constrains them.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return (
        jax.lax.with_sharding_constraint(x, P("data"))
        if "data" in mesh.axis_names
        else x
    )


def layer(m, x, w):
    x = on_its_device(x)
    heads = lambda z: z.reshape(*z.shape[:2], -1, m.head_size)
    qkv = map(heads, jnp.split(norm(x, *w["norms"][:2]) @ w["qkv"], 3, -1))
    if m.kernel:
        qkv = (z.astype(jnp.bfloat16) for z in qkv)
    how = "cudnn" if m.kernel else "xla"
    mixed = jax.nn.dot_product_attention(
        *qkv, is_causal=not m.patch, implementation=how
    ).astype(x.dtype)
    x = x + mixed.reshape(x.shape) @ w["out"]
    return x + perceptron(m, norm(x, *w["norms"][2:]), w)


def loss_fn(m, params, inputs, targets):
    layer_of = functools.partial(layer, m)
    layer_of = jax.checkpoint(layer_of) if m.checkpoint else layer_of
    embedding = params["head"].T if m.is_tied else params["embedding"]
    x = (inputs @ embedding if m.patch else embedding[inputs]) + params["positions"][
        None
    ]
    if m.scan:
        x, _ = jax.lax.scan(lambda x, w: (layer_of(x, w), None), x, params["layers"])
    else:
        for w in params["layers"]:
            x = layer_of(x, w)
    x = norm(on_its_device(x), *params["norm"])

    def loss(x, targets):
        return optax.softmax_cross_entropy_with_integer_labels(
            x @ params["head"], targets
        ).sum()

    if m.patch:
        return loss(x.mean(1), targets[:, 0]) / m.batch
    if m.parts == 1:
        return loss(x, targets) / targets.size
    split = lambda z: jnp.stack(jnp.split(z, m.parts, 1))
    return (
        jax.lax.map(
            lambda part: jax.checkpoint(loss)(*part), (split(x), split(targets))
        ).sum()
        / targets.size
    )


def place(spec_of, tree, mesh):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, spec_of(x.shape))
        ),
        tree,
    )


def divided(count, shape):
    """Return how FSDP divides an array: along its largest axis, if it is a matrix."""
    largest = max(range(len(shape)), key=shape.__getitem__)
    whole = len(shape) < 2 or shape[largest] % count
    return (
        P()
        if whole
        else P(*("data" if i == largest else None for i in range(len(shape))))
    )


def program(m, recipe, devices=()) -> tuple[Any, Any, Any]:
    """Return the step, its arguments and the transformation; on several devices
    parameters and batch are divided.
    """
    tx = mpx.mixed_precision(optax.adamw(1e-3), recipe, key=jax.random.key(0))
    policy = mpx.get_policy(recipe)

    def step(params, state, inputs, targets):
        loss = mpx.autocast(functools.partial(loss_fn, m), policy)
        value, grads = mpx.value_and_grad(loss, mpx.get_loss_scale(state))(
            params, inputs, targets
        )
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params = jax.eval_shape(lambda: policy.cast_to_param(init(m)))
    rows = m.batch * max(1, len(devices))
    inputs = jax.ShapeDtypeStruct((rows, m.sequence), jnp.int32)
    batch = (
        (
            jax.ShapeDtypeStruct((rows, m.sequence, m.patch), jnp.float32)
            if m.patch
            else inputs
        ),
        inputs,
    )
    if not devices:
        return step, (params, jax.eval_shape(tx.init, params), *batch), tx
    mesh = Mesh(
        np.array(devices)[:, None], ("data", "none"), axis_types=(AxisType.Auto,) * 2
    )
    params = place(functools.partial(divided, len(devices)), params, mesh)
    state = jax.eval_shape(tx.init, params)
    specs = jax.tree.map(lambda p: p.sharding.spec, params)
    shardings = mpx.zero1_shardings(params, state, mesh, "none", param_specs=specs)
    state = jax.tree.map(lambda x, at: x.update(sharding=at), state, shardings)
    return step, (params, state, *place(lambda shape: P("data"), batch, mesh)), tx
