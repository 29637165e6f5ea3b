"""How near Muon in few bits ends to Muon in float32: the small GPT of
`examples.gpt.compare`.

    PYTHONPATH=. python -m benchmarks.muon
    PYTHONPATH=. python -m benchmarks.muon --steps 1000 --seeds 3

The model computes in float32 but in the cases of recipes, which compute in bfloat16. A
gap is the validation loss minus that of float32 Muon with the same seed, in spreads:
the standard deviation of float32 Muon over the seeds. Muon has a peak rate of 0.01,
AdamW, which also updates embeddings, norms and biases beside it, one of 3e-4. On one
device nothing is sent, but `sent` rounds all the same.
"""

import statistics
from typing import Annotated, Any

import jax
import numpy as np
import optax
import typer

import mpx
from benchmarks.report import Row, Sheet
from examples.gpt import compare, training
from examples.gpt.recipes import get_recipe

RATE, ADAM_RATE = 0.01, 3e-4
REFERENCE = "float32"
IN_8_BITS = {"first moment": mpx.Blockwise8bit(), "second moment": mpx.Blockwise8bit()}
# What stands around the products, and the recipe around all of it.
CASES: dict[str, tuple[dict[str, Any], str]] = {
    REFERENCE: ({}, "f32"),
    'products="bf16"': ({"products": "bf16"}, "f32"),
    'products="f16"': ({"products": "f16"}, "f32"),
    'sent="bf16"': ({"sent": "bf16"}, "f32"),
    'products="f16", sent="bf16"': ({"products": "f16", "sent": "bf16"}, "f32"),
    "8-bit moments": ({}, "8-bit"),
    "`bf16-split`": ({}, "bf16-split"),
    "`bf16-split24-8bit`, both": (
        {"products": "f16", "sent": "bf16"},
        "bf16-split24-8bit",
    ),
    "AdamW": ({}, "adamw"),
}
COLUMNS = {
    "what": "{what}",
    "loss": "{loss:.4f}",
    "gap, spreads": "{gap:+.2f}",
    "largest": "{largest:+.2f}",
}


def is_matrix(path: Any, p: Any) -> bool:
    """Return whether Muon updates a parameter: a matrix of a layer."""
    return p.ndim == 2 and "embedding" not in jax.tree_util.keystr(path)


def by_shape(update: jax.Array) -> jax.Array:
    """Scale a matrix's update as Muon does: by the root of outputs over inputs."""
    inputs, outputs = update.shape[-2:]
    return max(1.0, outputs / inputs) ** 0.5 * update


def make_tx(
    hyperparameters: training.Hyperparameters, options: dict[str, Any], how: str
) -> Any:
    """Return Muon with a schedule, and what a case puts around it."""
    schedule = hyperparameters.schedule()
    muon = optax.chain(
        optax.trace(0.95, nesterov=True),
        mpx.each_matrix(mpx.newton_schulz, **options),
        optax.stateless(lambda updates, _: jax.tree.map(by_shape, updates)),
        optax.add_decayed_weights(hyperparameters.weight_decay),
        optax.scale_by_learning_rate(lambda step: schedule(step) * (RATE / ADAM_RATE)),
    )
    adam = optax.adamw(schedule, b2=hyperparameters.b2, weight_decay=0.0)
    tx = optax.chain(
        optax.clip_by_global_norm(hyperparameters.clip_norm),
        optax.partition(
            {"muon": muon, "adam": adam},
            lambda params: jax.tree.map_with_path(
                lambda path, p: "muon" if is_matrix(path, p) else "adam", params
            ),
        ),
    )
    if how == "8-bit":
        return mpx.low_precision_state(tx, IN_8_BITS)
    return tx if how == "f32" else mpx.mixed_precision(tx, how)


def losses(options: dict[str, Any], how: str, steps: int, seeds: int) -> list[float]:
    """Return the validation losses of a case, one a seed."""
    hyperparameters = training.Hyperparameters(steps, ADAM_RATE)
    recipe = get_recipe(how if how.startswith("bf16") else "f32")
    tx = None if how == "adamw" else make_tx(hyperparameters, options, how)
    parts = compare.split(compare.read_text(None))
    return [
        run.validation_losses[-1]
        for run in compare.train_recipe(
            recipe, range(seeds), hyperparameters, *parts, tx
        )
    ]


def main(
    steps: Annotated[int, typer.Option(min=1, help="Of each run.")] = 300,
    seeds: Annotated[int, typer.Option(min=2, help="Runs of each case.")] = 5,
) -> None:
    """Train and print the table."""
    rows: list[Row] = []
    reference: list[float] = []
    for what, (options, how) in CASES.items():
        found = losses(options, how, steps, seeds)
        reference = reference or found
        gaps = (np.array(found) - reference) / statistics.stdev(reference)
        row = {
            "what": what,
            "loss": statistics.fmean(found),
            "gap": gaps.mean(),
            "largest": max(gaps, key=abs),
        }
        rows.append(row)
        print(COLUMNS["loss"].format(**row), what, flush=True)
    title = (
        f"Muon on the small GPT, {steps} steps, {seeds} seeds, jax {jax.__version__}"
    )
    print(Sheet(title, rows, COLUMNS).markdown())


if __name__ == "__main__":
    typer.run(main)
