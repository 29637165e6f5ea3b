"""Vision: convolutions of many kinds, pooling, resizing, patches, windows, sampling."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.programs import integers, program, rows

C = 8  # channels


def conv(x, kernel, stride=1, padding="SAME", **options):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), padding, dimension_numbers=numbers, **options
    )


def batch_norm(x, scale, offset):
    mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
    return (x - mean) * lax.rsqrt(var + 1e-5) * (1 + scale) + offset


def softmax_loss(logits, label):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), label[:, None], 1).mean()


IMAGE, LABEL = {"x": rows(8, 8, C)}, {"label": integers(4)}


@program(
    {
        "a": (3, 3, C, C),
        "b": (3, 3, C, 2 * C),
        "skip": (1, 1, C, 2 * C),
        "n": (4, C),
        "m": (2, 2 * C),
        "w": (2 * C, 4),
    },
    **IMAGE,
    **LABEL,
)
def residual_block_with_batch_norm(p, x, label):
    h = jax.nn.relu(batch_norm(conv(x, p["a"]), *p["n"][:2]))
    h = batch_norm(conv(h, p["b"], stride=2), *p["m"])
    return softmax_loss(
        jax.nn.relu(h + conv(x, p["skip"], stride=2)).mean((1, 2)) @ p["w"], label
    )


@program(
    {
        "dw": (5, 5, 1, C),
        "up": (C, 4 * C),
        "b": (4 * C,),
        "down": (4 * C, C),
        "scale": (C,),
    },
    **IMAGE,
)
def convnext_block(p, x):
    h = conv(x, p["dw"], feature_group_count=C)
    h = (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-6)
    return jnp.square(
        x + jax.nn.gelu(h @ p["up"] + p["b"]) @ p["down"] * (p["scale"] + 0.1)
    ).mean()


@program(
    {
        "down": (3, 3, C, 2 * C),
        "mid": (3, 3, 2 * C, 2 * C),
        "up": (2, 2, 2 * C, C),
        "out": (1, 1, 2 * C, C),
    },
    **IMAGE,
)
def unet_with_transposed_convolution(p, x):
    h = jax.nn.silu(conv(x, p["down"], stride=2))
    h = jax.nn.silu(conv(h, p["mid"])) + h
    up = lax.conv_transpose(
        h, p["up"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jnp.square(conv(jnp.concatenate([up, x], -1), p["out"]) - x).mean()


@program({"k": (3, 3, C, C), "b": (C,), "out": (3, 3, C, C)}, **IMAGE)
def upsampling_by_resize(p, x):
    small = jax.nn.leaky_relu(conv(x, p["k"], stride=2) + p["b"])
    for method in ("bilinear", "nearest"):
        large = jax.image.resize(small, (x.shape[0], 8, 8, C), method)
        small = conv(large, p["out"], stride=2)
    return jnp.square(large - x).mean() + jnp.square(small).mean()


@program({"a": (3, 3, 2, C), "b": (3, 3, C, C), "c": (3, 1, C, C)}, **IMAGE)
def grouped_and_dilated_convolutions(p, x):
    h = jax.nn.elu(conv(x, p["a"], feature_group_count=4))
    h = jax.nn.elu(conv(h, p["b"], rhs_dilation=(2, 2)))
    return jnp.square(conv(h, p["c"], padding=((0, 2), (0, 0)))).mean()


@program({"k": (3, 3, C, C), "b": (C,), "w": (2 * 4 * 4 * C, 4)}, **IMAGE, **LABEL)
def maxima_and_means_of_windows(p, x, label):
    h = jax.nn.relu(conv(x, p["k"]) + p["b"])
    window = (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
    largest = lax.reduce_window(h, -jnp.inf, lax.max, *window)
    mean = lax.reduce_window(h, 0.0, lax.add, *window) / 4
    return softmax_loss(
        jnp.concatenate([largest, mean], -1).reshape(x.shape[0], -1) @ p["w"], label
    )


@program({"theta": (8 * 8 * C, 6), "k": (3, 3, C, C)}, **IMAGE)
def spatial_transformer(p, x):
    theta = (0.1 * x.reshape(x.shape[0], -1) @ p["theta"]).reshape(-1, 2, 3) + jnp.eye(
        2, 3
    )
    grid = jnp.stack(
        [
            *jnp.meshgrid(
                jnp.linspace(-1, 1, 8), jnp.linspace(-1, 1, 8), indexing="ij"
            ),
            jnp.ones((8, 8)),
        ],
        -1,
    )
    places = (jnp.einsum("hwk,bck->bchw", grid, theta) + 1) * 3.5
    sample = lambda image, place: jax.scipy.ndimage.map_coordinates(
        image, place, order=1, mode="nearest"
    )
    moved = jax.vmap(jax.vmap(sample, (2, None), 2))(x, places)
    return jnp.square(conv(moved, p["k"])).mean()


@program({"qkv": (C, 3 * C), "bias": (16, 16), "o": (C, C)}, **IMAGE)
def shifted_windows(p, x):
    n = x.shape[0]
    h = (
        jnp.roll(x, (-2, -2), (1, 2))
        .reshape(n, 2, 4, 2, 4, C)
        .swapaxes(2, 3)
        .reshape(n * 4, 16, C)
    )
    q, k, v = jnp.split(h @ p["qkv"], 3, -1)
    h = jax.nn.softmax(q @ k.swapaxes(1, 2) * C**-0.5 + p["bias"]) @ v @ p["o"]
    h = h.reshape(n, 2, 2, 4, 4, C).swapaxes(2, 3).reshape(n, 8, 8, C)
    return jnp.square(x + jnp.roll(h, (2, 2), (1, 2))).mean()


@program(
    {"k": (3, 3, 3, 2, C), "b": (C,), "w": (C, 4)},
    x=rows(4, 6, 6, 2),
    label=integers(4),
)
def video_convolution(p, x, label):
    h = lax.conv_general_dilated(
        x, p["k"], (1, 2, 2), "SAME", dimension_numbers=("NDHWC", "DHWIO", "NDHWC")
    )
    return softmax_loss(jax.nn.relu(h + p["b"]).mean((1, 2, 3)) @ p["w"], label)


@program({"w": (9 * C, 16), "b": (16,), "v": (16, C)}, **IMAGE)
def patches_of_a_convolution(p, x):
    patches = lax.conv_general_dilated_patches(
        x, (3, 3), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jnp.square(jnp.tanh(patches @ p["w"] + p["b"]) @ p["v"] - x).mean()
