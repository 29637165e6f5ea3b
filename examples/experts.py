"""Train a mixture of experts, from a tiny one to one of a trillion parameters, in any
recipe, on one device or on many.

Run it from the root of the repository. It trains on the bytes of Python's standard
library, and shows which part of the tokens found no place at their experts:

    python -m examples.experts
    python -m examples.experts --recipe bf16-split24-4bit --steps 300

What a large step would need is read off its program, on a machine without a GPU
(`step_and_arguments`).

Sizes are of Qwen3-30B-A3B and Qwen3-235B-A22B (arXiv 2505.09388), gpt-oss-120B (arXiv
2508.10925) and, as 1T, of Kimi K2 (arXiv 2507.20534). All but the experts is as in
`examples.llama`. So these are left out: K2's latent attention (its queries share 8 keys
here), its first layer, which has no experts, its scale of the experts' sum, and the
bias that balances them; biases, sinks, sliding windows and the clamped activation of
gpt-oss; norms of queries and keys of Qwen3.

- A router in float32 chooses some experts for each token, by a softmax or by sigmoids.
  Their weights add up to 1. A loss of its own keeps experts balanced.
- Each expert has as many places for the tokens of a sequence as `Config.capacity` says,
  and earlier tokens take them first. A token without a place goes past that expert. So
  what is dropped depends neither on later tokens nor on the number of devices.
- Experts are divided among devices, as tokens are: an `all_to_all` brings tokens to
  their experts, and another one brings results back. Other weights are gathered layer
  by layer.
- A token has k places, and a place has one token. So tokens move by look-ups in both
  passes: nothing is sorted or scattered in the backward pass.

Shapes: B sequences, T tokens each, N = B T, k experts a token, C = width, E experts,
H = hidden.
"""

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import mpx
from examples import llama
from examples.llama import DIVIDED, KEPT, is_divided, norm, on_mesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(llama.Config):
    """The sizes of a model and the layout of its program; `hidden` is an expert's."""

    head_size: int = 128
    experts: int = 128
    chosen: int = 8  # experts a token
    shared: int = 0  # hidden units of a perceptron that all tokens go through
    router: Literal["softmax", "sigmoid"] = "softmax"
    capacity: float = 1.25  # places, relative to tokens if all experts had as many
    balance: float = 1e-2  # the weight of the loss that keeps experts balanced
    loss_parts: int = 8


# Width, hidden, depth, heads, key heads, vocabulary.
CONFIGS = {
    # Bytes repeat, so many of a sequence choose the same experts: more places.
    "tiny": Config(
        128, 64, 3, 4, 2, 256, head_size=32, experts=32, chosen=2, shared=64, capacity=4
    ),
    "30B": Config(2048, 768, 48, 32, 4, 151_936),
    "120B": Config(2880, 2880, 36, 64, 8, 201_088, head_size=64, chosen=4),
    "235B": Config(4096, 1536, 94, 64, 4, 151_936),
    "1T": Config(
        7168, 2048, 60, 64, 8, 163_840, experts=384, shared=2048, router="sigmoid"
    ),
}
EXPERTS = ("gate", "up", "down")


# --- The model. ---
def init_params(config: Config, key: jax.Array) -> dict[str, Any]:
    """Return float32 weights; each device of the mesh that is set keeps a part."""
    width, hidden = config.width, config.hidden
    queries, keys = (n * config.head_size for n in (config.heads, config.key_heads))
    sizes = {
        "query": (width, queries),
        "key": (width, keys),
        "value": (width, keys),
        "out": (queries, width),
        "router": (width, config.experts),
        "gate": (config.experts, width, hidden),
        "up": (config.experts, width, hidden),
        "down": (config.experts, hidden, width),
    }
    if config.shared:
        sizes |= {f"shared_{name}": (width, config.shared) for name in ("gate", "up")}
        sizes["shared_down"] = (config.shared, width)
    return llama.random_params(config, sizes, key)


def layer(
    config: Config, x: jax.Array, w: dict[str, jax.Array]
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Return the residual stream (B, T, C) after a layer, which gathers its weights but
    for experts; the loss of its balance; and the share of tokens without a place.
    """
    w = w | on_mesh({name: leaf for name, leaf in w.items() if name not in EXPERTS})
    x = x + llama.attention(config, norm(x, w["attention_norm"]), w)
    h = norm(x, w["mlp_norm"])
    chosen, weights, balance = route(config, h, w["router"])
    run = functools.partial(mixed, config)
    if is_divided():
        run = jax.shard_map(run, in_specs=DIVIDED, out_specs=DIVIDED)
    results, dropped = run(h, chosen, weights, [w[name] for name in EXPERTS])
    x = x + results
    if config.shared:
        gate, up, down = (w[f"shared_{name}"] for name in EXPERTS)
        x = x + (jax.nn.silu(h @ gate) * (h @ up)) @ down
    return x, (balance, dropped.mean())


def route(
    config: Config, x: jax.Array, router: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return for x (B, T, C) the experts of each token, their weights (B, T, k), and a
    loss that is 1 if all experts are chosen alike.
    """
    logits = mpx.full_precision(jnp.matmul)(x, router)
    curve = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}[config.router]
    scores = curve(logits)  # (B, T, E)
    _, chosen = jax.lax.top_k(jax.lax.stop_gradient(scores), config.chosen)
    chosen = checkpoint_name(chosen, KEPT)
    # Not by a look-up, whose derivative is a scatter.
    is_chosen = jax.nn.one_hot(chosen, config.experts)  # (B, T, k, E)
    weights = (is_chosen * scores[:, :, None]).sum(-1)
    likely = scores / scores.sum(-1, keepdims=True)
    balance = (is_chosen.mean((0, 1, 2)) * likely.mean((0, 1))).sum() * config.experts
    return chosen, weights / weights.sum(-1, keepdims=True), balance


def mixed(
    config: Config,
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    experts: list[jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Return the weighted sum of what its experts make of each token of a device, and
    the share of each sequence that was dropped.

    From x (B, T, C), the chosen experts and their weights (B, T, k). Each device has
    some of the experts.
    """
    (batch, length, width), k = x.shape, config.chosen
    capacity = math.ceil(config.capacity * length * k / config.experts)
    capacity = min(length, capacity)  # places of a sequence at an expert
    slot_of, place_of = places(chosen, config.experts, capacity)
    by_token = slot_of // k, place_of.reshape(-1, k)
    by_slot = slot_of, place_of.reshape(-1, 1)

    def to_experts(x, by):
        there = moved(x, *by).reshape(config.experts, batch * capacity, -1)
        return exchanged(there, (0, 1))  # (E / devices, devices B capacity, ...)

    gate, up, down = experts
    rows = to_experts(x.reshape(-1, width), by_token)
    # Weighted before the last product, so that nothing behind it is computed again.
    share = to_experts(weights.reshape(-1, 1), by_slot)
    hidden = share * jax.nn.silu(rows @ gate) * (rows @ up)
    results = exchanged(hidden @ down, (1, 0)).reshape(-1, width)
    dropped = (place_of == slot_of.size).reshape(batch, -1).mean(1)
    return summed(results, *by_token).reshape(x.shape), dropped


def exchanged(x: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """Return an array of which each device gets a part along one axis, from each other
    along the other one.
    """
    return jax.lax.all_to_all(x, "data", *axes, tiled=True) if is_divided() else x


def places(
    chosen: jax.Array, experts: int, capacity: int
) -> tuple[jax.Array, jax.Array]:
    """Return the slot of each place (E B capacity,), and the place of each slot (N k,).

    A slot is one of the k choices of a token; a place is one of an expert's for a
    sequence. The number of slots stands for no slot, and that of places for no place.
    """
    batch = len(chosen)
    expert = chosen.reshape(batch, -1)  # (B, T k)
    is_expert = jax.nn.one_hot(expert, experts, dtype=jnp.int32)
    rank = (jnp.cumsum(is_expert, 1) * is_expert).sum(-1) - 1
    place = (expert * batch + jnp.arange(batch)[:, None]) * capacity + rank
    count = experts * batch * capacity
    place_of = jnp.where(rank < capacity, place, count).reshape(-1)
    slots = jnp.arange(place_of.size)
    slot_of = jnp.full(count, place_of.size).at[place_of].set(slots, mode="drop")
    return checkpoint_name(slot_of, KEPT), checkpoint_name(place_of, KEPT)


# autocast leaves both bodies in float32, but XLA fuses casts into the look-ups: what
# they write has 16 bits.
@jax.custom_vjp
def moved(x: jax.Array, source: jax.Array, targets: jax.Array) -> jax.Array:
    """Return rows of x (N, C) at `source` (P,), zeros where there is none.

    `targets` (N, k) has the places of each row of x, so that the gradient is a look-up
    too: `summed`.
    """
    del targets
    return x.at[source].get(mode="fill", fill_value=0)


@jax.custom_vjp
def summed(x: jax.Array, source: jax.Array, targets: jax.Array) -> jax.Array:
    """Return sums (N, C) of the rows of x (P, C) at `targets`: the transpose of
    `moved`.
    """
    del source
    return x.at[targets].get(mode="fill", fill_value=0).sum(1)


moved.defvjp(
    lambda x, *by: (moved(x, *by), by), lambda by, g: (summed(g, *by), None, None)
)
summed.defvjp(
    lambda x, *by: (summed(x, *by), by), lambda by, g: (moved(g, *by), None, None)
)


def loss_fn(
    config: Config, params: dict[str, Any], tokens: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the loss of tokens (B, T + 1), and the share of choices that were
    dropped.
    """
    x, (balance, dropped) = llama.through_layers(
        config, functools.partial(layer, config), params, tokens
    )
    loss = llama.next_token_loss(config, params, x, tokens)
    return loss + config.balance * balance.mean(), {"dropped": dropped.mean()}


MODEL = llama.Model(CONFIGS, init_params, loss_fn, has_aux=True)
make_step = functools.partial(llama.make_step, model=MODEL)
step_and_arguments = functools.partial(llama.step_and_arguments, model=MODEL)
app = llama.command(MODEL)

if __name__ == "__main__":
    app()
