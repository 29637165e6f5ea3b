"""Generative models: autoencoders, adversaries, diffusion, flows, energies, scores."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.programs import integers, key, positive, program, rows

D = 16
X = {"x": rows(D)}
MLP = {"a": (D, D), "b": (D,), "c": (D, D)}


def mlp(p, x):
    return jax.nn.silu(x @ p["a"] + p["b"]) @ p["c"]


@program(
    {"enc": (D, 2 * D), "b": (2 * D,), "dec": (D, D), "c": (D,), "out": (D, D)},
    **X,
    key=key,
)
def variational_autoencoder(p, x, key):
    mean, log_var = jnp.split(x @ p["enc"] + p["b"], 2, axis=-1)
    z = mean + jnp.exp(0.5 * log_var) * jax.random.normal(key, mean.shape)
    logits = jnp.tanh(z @ p["dec"] + p["c"]) @ p["out"]
    likelihood = x * jax.nn.log_sigmoid(logits) + (1 - x) * jax.nn.log_sigmoid(-logits)
    divergence = -0.5 * (1 + log_var - mean**2 - jnp.exp(log_var)).sum(-1)
    return (divergence - likelihood.sum(-1)).mean()


@program({"enc": (D, D), "b": (D,), "codes": (8, D), "dec": (D, D)}, **X)
def quantized_codes_straight_through(p, x):
    z = jnp.tanh(x @ p["enc"] + p["b"])
    distance = (
        jnp.sum(z**2, -1, keepdims=True)
        - 2 * z @ p["codes"].T
        + jnp.sum(p["codes"] ** 2, -1)
    )
    code = p["codes"][jnp.argmin(distance, -1)]
    through = z + lax.stop_gradient(code - z)
    commit = (
        jnp.square(lax.stop_gradient(z) - code).mean()
        + 0.25 * jnp.square(z - lax.stop_gradient(code)).mean()
    )
    return jnp.square(through @ p["dec"] - x).mean() + commit


@program({"g": MLP, "d": {**MLP, "v": (D, 1)}}, **X, z=rows(D), mix=positive())
def adversary_with_a_gradient_penalty(p, x, z, mix):
    critic = lambda x: (jnp.tanh(mlp(p["d"], x)) @ p["d"]["v"])[..., 0]
    fake = mlp(p["g"], z)
    between = mix[:, None] * x + (1 - mix[:, None]) * fake
    slope = jax.vmap(jax.grad(critic))(between)
    penalty = jnp.square(jnp.sqrt(jnp.sum(slope**2, -1) + 1e-6) - 1).mean()
    return (
        jax.nn.softplus(critic(fake)).mean()
        + jax.nn.softplus(-critic(x)).mean()
        + 0.1 * penalty
    )


@program(
    {"time": (D, 2 * D), "tb": (2 * D,), **MLP, "out": (D, D)},
    **X,
    noise=rows(D),
    step=integers(100),
)
def diffusion_with_scale_and_shift(p, x, noise, step):
    t = step / 100
    alpha = jnp.cos(t * jnp.pi / 2)[:, None]
    noisy = alpha * x + jnp.sqrt(1 - alpha**2) * noise
    angles = t[:, None] * jnp.exp(jnp.linspace(0, 3, D // 2))
    scale, shift = jnp.split(
        jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1) @ p["time"] + p["tb"],
        2,
        -1,
    )
    h = jax.nn.silu(noisy @ p["a"] + p["b"]) * (1 + scale) + shift
    return jnp.square(jax.nn.silu(h) @ p["out"] - noise).mean()


@program({"nets": {"a": (2, 8, D), "b": (2, D), "c": (2, D, D)}}, **X)
def affine_coupling_layers(p, x):
    log_det = 0.0
    for i in range(2):
        net = jax.tree.map(lambda w, i=i: w[i], p["nets"])
        left, right = jnp.split(x, 2, axis=-1)
        shift, log_scale = jnp.split(mlp(net, left), 2, axis=-1)
        log_scale = jnp.tanh(log_scale)
        x = jnp.concatenate([right * jnp.exp(log_scale) + shift, left], -1)
        log_det = log_det + log_scale.sum(-1)
    return (0.5 * jnp.sum(x**2, -1) - log_det).mean()


@program({"w": (D, D), "scale": (D,), **MLP}, **X)
def invertible_convolution_with_a_determinant(p, x):
    w = p["w"] + jnp.eye(D)
    h = jnp.exp(p["scale"]) * x @ w
    return (
        0.5 * jnp.square(h + mlp(p, h)).sum(-1)
        - jnp.linalg.slogdet(w)[1]
        - p["scale"].sum()
    ).mean()


@program({**MLP, "v": (D,)}, **X, start=rows(D))
def energy_with_steps_of_langevin(p, x, start):
    energy = lambda x: (
        jax.nn.softplus(mlp(p, x)) @ p["v"] + 0.1 * jnp.sum(x**2, -1)
    ).sum()
    z, _ = lax.scan(lambda z, _: (z - 0.1 * jax.grad(energy)(z), None), start, length=3)
    return (energy(x) - energy(lax.stop_gradient(z))) / x.shape[0] + 0.01 * jnp.square(
        z
    ).mean()


@program(MLP, **X, direction=rows(D))
def sliced_score_matching(p, x, direction):
    score, change = jax.jvp(lambda x: mlp(p, x) - x, (x,), (direction,))
    return (
        jnp.sum(direction * change, -1) + 0.5 * jnp.sum(direction * score, -1) ** 2
    ).mean()


@program({**MLP, "time": (D,)}, **X, probe=rows(D))
def continuous_flow_with_a_trace(p, x, probe):
    def step(carry, t):
        x, log_det = carry
        move, pull = jax.vjp(lambda x: jnp.tanh(mlp(p, x) + t * p["time"]), x)
        return (
            x + 0.25 * move,
            log_det + 0.25 * jnp.sum(pull(probe)[0] * probe, -1),
        ), None

    (x, log_det), _ = lax.scan(step, (x, jnp.zeros(x.shape[0])), jnp.linspace(0, 1, 4))
    return (0.5 * jnp.sum(x**2, -1) - log_det).mean()


@program(
    {"style": (D, 8), "b": (8,), "k": (3, 3, 8, 8), "noise": (8,)},
    x=rows(4, 4, 8),
    z=rows(D),
    grain=rows(4, 4, 1),
)
def modulated_convolution_of_each_image(p, x, z, grain):
    style = z @ p["style"] + p["b"] + 1
    kernels = p["k"] * style[:, None, None, :, None]
    kernels = kernels * lax.rsqrt(jnp.sum(kernels**2, (1, 2, 3), keepdims=True) + 1e-6)
    conv = lambda x, k: lax.conv_general_dilated(
        x[None], k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    h = jax.vmap(conv)(x, kernels)[:, 0] + grain * p["noise"]
    return jnp.square(jax.nn.leaky_relu(h, 0.2) * jnp.sqrt(2)).mean()
