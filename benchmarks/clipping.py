"""Where training ends that clips by a predicted norm, and where it ends by the true
one.

    PYTHONPATH=. python -m benchmarks.clipping
    PYTHONPATH=. python -m benchmarks.clipping --steps 1000 --seeds 3

The tiny Llama of `examples.llama` in float32 on the bytes of Python's standard library,
AdamW as in its `main`, batches of 4 sequences of 64. Gradients are as they are, or 100
times larger in one step: those of all leaves, or those of one layer alone, which the
leaves that predict do not show.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer

import mpx
from benchmarks.report import Row, Sheet, cell
from examples import llama
from examples.gpt import compare, training
from examples.gpt.recipes import get_recipe

CONFIG = dataclasses.replace(llama.CONFIGS["tiny"], vocabulary=256)
MAX_NORM, RATE = 1.0, 1e-3
SHAPE = (4, 64 + 1)
SPIKE_STEP, SPIKE = 100, 100.0
LAYER = 1  # of four
LAST = 30  # losses whose mean is taken


def clip_by_last_norm(max_norm: float) -> optax.GradientTransformation:
    """Take the norm of the last step for that of this one."""

    def update_fn(updates, state, params=None):
        scale = max_norm / jnp.maximum(state, max_norm)
        return jax.tree.map(lambda g: g * scale, updates), optax.tree.norm(updates)

    return optax.GradientTransformation(lambda params: jnp.zeros(()), update_fn)


CLIPS: dict[str, Callable[[], Any]] = {
    "the global norm": lambda: optax.clip_by_global_norm(MAX_NORM),
    "the predicted norm": lambda: mpx.clip_by_predicted_norm(MAX_NORM, "head|norm"),
    "the last step's norm": lambda: clip_by_last_norm(MAX_NORM),
    "nothing": optax.identity,
}
SPIKES: dict[str, Callable[[Any], Any]] = {
    "none": lambda grads: grads,
    "of all leaves": lambda grads: jax.tree.map(lambda g: g * SPIKE, grads),
    "of one layer": lambda grads: (
        grads
        | {
            "layers": jax.tree.map(
                lambda g: g.at[LAYER].multiply(SPIKE), grads["layers"]
            )
        }
    ),
}


COLUMNS = {
    "clipped by": "{clip}",
    "larger gradients": "{spike}",
    "loss": "{loss:.4f} ± {spread:.4f}",
    "less that of the global norm": "{gap:+.4f} ± {gap_spread:.4f}",
    "norm after clipping, of what it should be: 1% to 99%": "{least:.2f} to {most:.2f}",
    "norm after clipping the larger ones": "{at_spike:.2f}",
}


def trained(clip: str, spike: str, text: np.ndarray, steps: int, seeds: int) -> Row:
    """Return the mean of the last losses, and the norms after clipping, of each
    seed.
    """
    first, rule = CLIPS[clip](), optax.adamw(RATE, weight_decay=0.1)
    loss_fn = functools.partial(llama.loss_fn, CONFIG)

    @jax.jit(donate_argnums=(0, 1))
    def step(params, state, is_large, tokens):
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        grads = jax.lax.cond(is_large, SPIKES[spike], lambda grads: grads, grads)
        clipped, of_clip = first.update(grads, state[0], params)
        updates, of_rule = rule.update(clipped, state[1], params)
        params = optax.apply_updates(params, updates)
        norms = optax.tree.norm(grads), optax.tree.norm(clipped)
        return params, (of_clip, of_rule), jnp.stack([loss, *norms])

    def run(seed):
        params, found = llama.init_params(CONFIG, jax.random.key(seed)), []
        state = first.init(params), rule.init(params)
        batches = compare.random_batches(text, SHAPE, seed=seed, count=steps)
        for number, batch in enumerate(batches, 1):
            tokens, is_large = jnp.asarray(batch, jnp.int32), number == SPIKE_STEP
            params, state, measured = step(params, state, is_large, tokens)
            found.append(measured)
        return np.stack(found)

    losses, norms, clipped = np.moveaxis([run(seed) for seed in range(seeds)], 2, 0)
    parts = np.delete(clipped / np.minimum(norms, MAX_NORM), SPIKE_STEP - 1, axis=1)
    least, most = np.percentile(parts, [1, 99])
    found = {"losses": losses[:, -LAST:].mean(1), "least": least, "most": most}
    has_spike = spike != "none"
    return (
        found | {"at_spike": clipped[:, SPIKE_STEP - 1].mean()} if has_spike else found
    )


def gpt_losses(clip: Any, steps: int, seeds: int) -> np.ndarray:
    """Return the validation losses of the small GPT of `examples.gpt.compare`, one a
    seed. Its head is the embedding, so its last norm predicts.
    """
    hyperparameters = training.Hyperparameters(steps, 3e-4)
    recipe = get_recipe("f32")
    plain = training.make_optimizer(
        recipe,
        compare.PRESETS[compare.PRESET],
        dataclasses.replace(hyperparameters, clip_norm=float("inf")),
    )
    runs = compare.train_recipe(
        recipe,
        range(seeds),
        hyperparameters,
        *compare.split(compare.read_text(None)),
        optax.chain(clip, plain),
    )
    return np.array([run.validation_losses[-1] for run in runs])


def main(
    steps: Annotated[int, typer.Option(min=SPIKE_STEP, help="Of each run.")] = 300,
    seeds: Annotated[int, typer.Option(min=2, help="Runs of each case.")] = 5,
) -> None:
    """Train and print the table."""
    text, _ = compare.split(compare.read_text(None))
    rows: list[Row] = []
    for spike in SPIKES:
        reference: Any = None
        for clip in CLIPS:
            row = trained(clip, spike, text, steps, seeds)
            losses = row["losses"]
            reference = losses if reference is None else reference
            gaps = losses - reference
            row |= {"clip": clip, "spike": spike, "loss": losses.mean()}
            row |= {"spread": losses.std(ddof=1), "gap": gaps.mean()}
            row |= {"gap_spread": gaps.std(ddof=1)}
            rows.append(row)
            cells = [cell(form, row) for form in COLUMNS.values()]
            print(*cells, losses.round(4), sep=" | ", flush=True)
    title = f"The tiny Llama, {steps} steps, {seeds} seeds, jax {jax.__version__}"
    print(Sheet(title, rows, COLUMNS).markdown())
    for clip in (
        optax.clip_by_global_norm(1.0),
        mpx.clip_by_predicted_norm(1.0, "norm"),
    ):
        print("the small GPT:", gpt_losses(clip, steps, min(seeds, 3)), flush=True)


if __name__ == "__main__":
    typer.run(main)
