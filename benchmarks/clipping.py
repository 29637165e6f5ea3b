"""Where training ends that clips by a predicted norm, beside the global norm.

    PYTHONPATH=. python -m benchmarks.clipping
    PYTHONPATH=. python -m benchmarks.clipping --steps 1000 --seeds 3

The tiny Llama of `examples.llama` in float32 on bytes, AdamW as in its `main`, batches
of 4 sequences of 64. In one step gradients may be 100 times larger: those of all
leaves, or of one layer alone, which the leaves that predict do not show. A loss is the
mean of the last 30 steps.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer

import mpx
from benchmarks.report import Row, Sheet
from examples import llama
from examples.gpt import compare, training
from examples.gpt.recipes import get_recipe

CONFIG = dataclasses.replace(llama.CONFIGS["tiny"], vocabulary=256)
SPIKE_STEP = 100


def by_last_norm(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    """Clip gradients by the norm of the last step."""
    clipped = jax.tree.map(lambda g: g / jnp.maximum(state, 1.0), updates)
    return clipped, optax.tree.norm(updates)


CLIPS: dict[str, Any] = {
    "the global norm": optax.clip_by_global_norm(1.0),
    "the predicted norm": mpx.clip_by_predicted_norm(1.0, "head|norm"),
    "the last step's norm": optax.GradientTransformation(
        lambda params: jnp.zeros(()), by_last_norm
    ),
    "nothing": optax.identity(),
}
SPIKES: dict[str, Callable[[Any, float], Any]] = {
    "none": lambda grads, k: grads,
    "of all leaves": lambda grads, k: jax.tree.map(lambda g: k * g, grads),
    "of one layer": lambda grads, k: (
        grads | {"layers": jax.tree.map(lambda g: g.at[1].multiply(k), grads["layers"])}
    ),
}
COLUMNS = {
    "clipped by": "{clip}",
    "larger gradients": "{spike}",
    "loss": "{loss[0]:.4f} ± {loss[1]:.4f}",
    "above the global norm's": "{gap[0]:+.4f} ± {gap[1]:.4f}",
    "norm, of what it should be: 1% to 99%": "{norms[0]:.2f} to {norms[1]:.2f}",
    "norm of the larger ones": "{at_spike:.2f}",
}


def trained(clip: str, spike: str, text: np.ndarray, steps: int, seeds: int) -> Any:
    """Return losses, norms, and norms after clipping, each (seeds, steps)."""
    first, rule = CLIPS[clip], optax.adamw(1e-3, weight_decay=0.1)
    loss_fn = functools.partial(llama.loss_fn, CONFIG)

    @jax.jit(donate_argnums=(0, 1))
    def step(params, state, factor, tokens):
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        grads = SPIKES[spike](grads, factor)
        clipped, of_first = first.update(grads, state[0], params)
        updates, of_rule = rule.update(clipped, state[1], params)
        found = jnp.stack([loss, optax.tree.norm(grads), optax.tree.norm(clipped)])
        return optax.apply_updates(params, updates), (of_first, of_rule), found

    def run(seed):
        params, found = llama.init_params(CONFIG, jax.random.key(seed)), []
        state = first.init(params), rule.init(params)
        batches = compare.random_batches(text, (4, 65), seed=seed, count=steps)
        for number, batch in enumerate(batches, 1):
            k = 100.0 if number == SPIKE_STEP else 1.0
            params, state, *measured = step(params, state, k, batch.astype(np.int32))
            found += measured
        return np.stack(found)

    return np.moveaxis(np.stack([run(seed) for seed in range(seeds)]), 2, 0)


def gpt_losses(clip: Any, steps: int, text: Any, held_out: Any) -> list[float]:
    """Return the validation losses of the small GPT, one a seed."""
    settings = training.Hyperparameters(steps, 3e-4, clip_norm=1e9)
    recipe, config = get_recipe("f32"), compare.PRESETS[compare.PRESET]
    tx = optax.chain(clip, training.make_optimizer(recipe, config, settings))
    runs = compare.train_recipe(recipe, range(3), settings, text, held_out, tx)
    return [round(run.validation_losses[-1], 4) for run in runs]


def spread(x: np.ndarray) -> tuple[Any, Any]:
    """Return the mean over seeds, and the standard deviation."""
    return x.mean(), x.std(ddof=1)


def main(
    steps: Annotated[int, typer.Option(min=SPIKE_STEP, help="Of each run.")] = 300,
    seeds: Annotated[int, typer.Option(min=2, help="Runs of each case.")] = 5,
) -> None:
    """Train and print the tables."""
    rows: list[Row] = []
    parts, by_global_norm = compare.split(compare.read_text(None)), {}
    for spike, clip in itertools.product(SPIKES, CLIPS):
        losses, norms, clipped = trained(clip, spike, parts[0], steps, seeds)
        last = losses[:, -30:].mean(1)
        gaps = last - by_global_norm.setdefault(spike, last)
        usual = np.delete(clipped / np.minimum(norms, 1.0), SPIKE_STEP - 1, axis=1)
        row: Row = {"clip": clip, "spike": spike, "loss": spread(last)}
        row |= {"gap": spread(gaps), "norms": np.percentile(usual, [1, 99])}
        rows.append(row | {"at_spike": clipped[:, SPIKE_STEP - 1].mean()})
        print(clip, spike, last.round(4), sep=" | ", flush=True)
    title = f"The tiny Llama, {steps} steps, {seeds} seeds, jax {jax.__version__}"
    print(Sheet(title, rows, COLUMNS).markdown())
    # The head of the small GPT is its embedding, so its last norm predicts.
    for clip in optax.clip_by_global_norm(1.0), mpx.clip_by_predicted_norm(1.0, "norm"):
        print("The small GPT:", gpt_losses(clip, steps, *parts), flush=True)


if __name__ == "__main__":
    typer.run(main)
