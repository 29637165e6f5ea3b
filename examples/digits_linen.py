"""Classify handwritten digits with Flax Linen: float32, float16 with loss scaling,
bfloat16 with split masters.

    python -m examples.digits_linen

Each recipe is the same model and training loop under another policy. Four marked lines
make a float32 loop a mixed-precision one: (1) the optimizer is wrapped, (2) the
parameters are cast, (3) the loss function runs under autocast, and (4) the loss is
scaled by the optimizer's loss scale. After 15 epochs (9 seconds on two cores of an
Intel Xeon, jax 0.10.2) float32 has 98.0% of scikit-learn's digits right, float16 and
bfloat16 97.7%, one image less; float16 skipped 2 of 315 steps while its loss scale grew
to 524,288.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from rich.live import Live
from rich.table import Table
from sklearn.datasets import load_digits

import mpx

EPOCHS = 15
BATCH_SIZE = 64
LEARNING_RATE = 2e-3
WIDTH = 128
# good steps until the loss scale doubles; short, so that it moves in the 315 steps of a
# run
PERIOD = 50
RECIPES: dict[
    str, tuple[str, dict[str, Any]]
] = {  # name: (policy, options of `mpx.mixed_precision`)
    "f32": ("params=f32,compute=f32,output=f32", {}),
    "f16-scaled": (
        "params=f32,compute=f16,output=f32",
        {"loss_scale": mpx.DynamicLossScale(period=PERIOD)},
    ),
    "bf16-split": ("params=bf16,compute=bf16,output=f32", {"storage": "split"}),
}

Data = tuple[np.ndarray, np.ndarray]  # images (n, 64) in [0, 1], labels (n,)


def load_data() -> tuple[Data, Data]:
    """Return 1,400 images for training and the rest for testing."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(1).permutation(len(labels))
    images, labels = (
        (images / 16).astype(np.float32)[order],
        labels.astype(np.int32)[order],
    )
    return (images[:1400], labels[:1400]), (images[1400:], labels[1400:])


class Classifier(nn.Module):
    """A perceptron with two hidden layers, without dtypes."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the logits (n, 10) of images (n, 64)."""
        for _ in range(2):
            x = nn.relu(nn.Dense(WIDTH)(x))
        return nn.Dense(10)(x)


def make_state(recipe: str) -> tuple[mpx.Policy, TrainState]:
    """Return the policy and the first training state of a recipe."""
    text, options = RECIPES[recipe]
    policy = mpx.get_policy(text)
    model = Classifier()
    tx = mpx.mixed_precision(optax.adamw(LEARNING_RATE), policy, **options)  # (1)
    params = policy.cast_to_param(
        model.init(jax.random.key(0), jnp.zeros((1, 64)))
    )  # (2)
    return policy, TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def train_step(
    policy: mpx.Policy, state: TrainState, images: jax.Array, labels: jax.Array
) -> TrainState:
    """Take one step; if its gradients overflow, it changes the loss scale only."""

    def loss_fn(params, images, labels):
        logits = state.apply_fn(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss_fn = mpx.autocast(loss_fn, policy)  # (3)
    value_and_grad = mpx.value_and_grad(
        loss_fn, mpx.get_loss_scale(state.opt_state)
    )  # (4)
    _, grads = value_and_grad(state.params, images, labels)
    return state.apply_gradients(grads=grads)


def predict(policy: mpx.Policy, state: TrainState, images: jax.Array) -> jax.Array:
    """Return the digits (n,) in images (n, 64)."""
    return mpx.autocast(state.apply_fn, policy)(state.params, images).argmax(-1)


def main(epochs: int = EPOCHS) -> dict[str, float]:
    """Train every recipe, print the accuracies, and return the last ones."""
    (images, labels), (test_images, test_labels) = load_data()
    table = Table(
        "epoch",
        *RECIPES,
        title="test accuracy in %",
        caption="last rows: end of training",
    )
    step = jax.jit(train_step, static_argnums=0, donate_argnums=1)
    guess = jax.jit(predict, static_argnums=0)
    runs = {recipe: make_state(recipe) for recipe in RECIPES}
    accuracies: dict[str, float] = {}
    with Live(table):
        for epoch in range(1, epochs + 1):
            order = np.random.default_rng(epoch).permutation(len(labels))
            for recipe, (policy, state) in runs.items():
                # Whole batches only.
                for batch in np.split(order, range(BATCH_SIZE, len(order), BATCH_SIZE))[
                    :-1
                ]:
                    state = step(policy, state, images[batch], labels[batch])
                runs[recipe] = policy, state
                accuracies[recipe] = 100 * float(
                    (guess(policy, state, test_images) == test_labels).mean()
                )
            table.add_row(
                str(epoch), *(f"{accuracy:.1f}" for accuracy in accuracies.values())
            )
        table.add_section()
        states = [state.opt_state for _, state in runs.values()]
        table.add_row(
            "loss scale",
            *(
                f"{float(mpx.get_loss_scale(state).loss_scale):,.0f}"
                for state in states
            ),
        )
        table.add_row(
            "skipped steps", *(str(mpx.skipped_steps(state)) for state in states)
        )
    return accuracies


if __name__ == "__main__":
    main()
