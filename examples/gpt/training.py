"""Make a recipe, a model and a schedule into the functions that a training loop calls.

Nothing is compiled here: the loops call `jax.jit` on these functions, under
`jax.set_mesh` for several devices.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import mpx
from examples.gpt import devices
from examples.gpt.loss import mean_loss, token_losses
from examples.gpt.model import GPT, Config
from examples.gpt.recipes import Recipe


@dataclasses.dataclass(frozen=True)
class Hyperparameters:
    """AdamW and its schedule; the defaults are from GPT-3 (Brown et al., 2020)."""

    steps: int  # updates, after which the learning rate is at its end
    learning_rate: float  # peak of the schedule
    # part of all steps in which the learning rate rises from 0, its value at the first
    # update
    warmup: float = 0.1
    final_learning_rate: float = (
        0.1  # part of the peak to which it then falls along a cosine
    )
    b1: float = 0.9
    b2: float = 0.95
    weight_decay: float = (
        0.1  # of tensors with two and more dimensions, so not of biases and norms
    )
    clip_norm: float = 1.0  # bound on the norm of all gradients

    def __post_init__(self) -> None:
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise ValueError(
                f"--learning-rate must be positive, but is {self.learning_rate}."
            )

    def schedule(self) -> optax.Schedule:
        """Return the learning rate as a function of the number of updates done."""
        return optax.warmup_cosine_decay_schedule(
            init_value=0.0,
            peak_value=self.learning_rate,
            warmup_steps=int(self.warmup * self.steps),
            decay_steps=self.steps,
            end_value=self.final_learning_rate * self.learning_rate,
        )


class Metrics(NamedTuple):
    """Measurements of a step, float32 scalars."""

    loss: jax.Array  # mean over all tokens of the step, before the update
    gradient_norm: jax.Array  # of the mean gradient, unscaled and before clipping


class Program:
    """A recipe, a model and a schedule, as the functions that a training loop calls.

    Sequences have T + 1 tokens: the targets are the inputs, one token later. Beside the
    methods there are functions of parameters and tokens: `loss` and `token_losses`,
    from (B, T + 1) to a mean and to losses (B, T), and `logits`, from (B, T) to (B, T,
    V).
    """

    def __init__(
        self,
        recipe: Recipe,
        config: Config,
        hyperparameters: Hyperparameters,
        *,
        loss_chunks: int = 1,
    ) -> None:
        """Build model, optimizer and training step. The loss cuts the positions into
        `loss_chunks` parts.
        """
        self.recipe, self.config = recipe, config
        self.tx = make_optimizer(recipe, config, hyperparameters)
        self._graphdef = nnx.graphdef(nnx.eval_shape(self._new_model))
        self.loss = self._in_precision(self._of_features(mean_loss, loss_chunks))
        self.token_losses = self._in_precision(
            self._of_features(token_losses, loss_chunks)
        )
        logits = self._in_precision(lambda model, tokens: model(tokens))
        self.logits = lambda params, tokens: devices.in_auto(logits)(params, tokens)

    def init(self, seed: int | jax.Array) -> tuple[Any, optax.OptState]:
        """Return parameters and optimizer state: the same float32 weights for every
        recipe, rounded once.
        """
        params = devices.divide(
            self.recipe.policy.cast_to_param(
                nnx.state(self._new_model(seed), nnx.Param)
            )
        )
        return params, self.tx.init(params)

    def gradients(
        self, params: Any, opt_state: optax.OptState, tokens: jax.Array
    ) -> tuple[jax.Array, Any]:
        """Return loss and gradients for tokens (B, T + 1), still scaled if the recipe
        scales the loss.
        """
        if self.recipe.compute == "plain":
            return jax.value_and_grad(self.loss)(params, tokens)
        # A kernel reads gradients once: 16 bits where they hold the float32 gradient
        # exactly.
        grad_dtype = "as_computed" if self.recipe.fused else "f32"
        return mpx.value_and_grad(
            self.loss, mpx.get_loss_scale(opt_state), grad_dtype=grad_dtype
        )(params, tokens)

    def update(
        self, grads: Any, opt_state: optax.OptState, params: Any
    ) -> tuple[Any, optax.OptState]:
        """Return new parameters and optimizer state."""
        if self.recipe.fused:
            return mpx.fused_update(self.tx)(grads, opt_state, params)
        updates, opt_state = self.tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def train_step(
        self, params: Any, opt_state: optax.OptState, microbatches: jax.Array
    ) -> tuple[Any, optax.OptState, Metrics]:
        """Return both after one update; tokens (A, B, T + 1) are A microbatches,
        computed one after another.
        """

        def mean(
            params: Any, opt_state: optax.OptState, microbatches: jax.Array
        ) -> tuple[jax.Array, Any]:
            return mean_over_microbatches(
                lambda tokens: self.gradients(params, opt_state, tokens), microbatches
            )

        places = (devices.REPEATED, jax.tree.map_with_path(devices.spec_of, params))
        loss, grads = devices.in_auto(mean, out=places)(params, opt_state, microbatches)
        # Plain Optax expects gradients in the dtype of the parameters.
        if self.recipe.compute == "plain":
            grads = optax.tree.cast_like(grads, params)
        norm = optax.tree.norm(
            mpx.get_loss_scale(opt_state).unscale(mpx.cast(grads, "f32"))
        )
        params, opt_state = self.update(grads, opt_state, params)
        return params, opt_state, Metrics(loss, norm)

    def evaluate(self, params: Any, batches: jax.Array) -> jax.Array:
        """Return the mean loss of tokens (N, B, T + 1), with the parameters as stored:
        what would be deployed.
        """

        def mean(params: Any, batches: jax.Array) -> jax.Array:
            return jax.lax.map(
                lambda batch: self.token_losses(params, batch).mean(), batches
            ).mean()

        return devices.in_auto(mean)(params, batches)

    def _new_model(self, seed: int | jax.Array = 0) -> GPT:
        return GPT(self.config, nnx.Rngs(jax.random.key(seed)))

    def _in_precision(
        self, of_model: Callable[[GPT, jax.Array], jax.Array]
    ) -> Callable[[Any, jax.Array], jax.Array]:
        """Return a function of parameters and tokens that runs in the precision of the
        recipe.
        """
        policy = self.recipe.policy

        def run(params: Any, tokens: jax.Array) -> jax.Array:
            with jax.default_matmul_precision(self.recipe.matmul_precision):
                return of_model(
                    nnx.merge(self._graphdef, params), tokens.astype(jnp.int32)
                )

        if self.recipe.compute == "autocast":
            return mpx.autocast(run, policy)
        return lambda params, tokens: run(policy.cast_to_compute(params), tokens)

    def _of_features(
        self, losses: Callable[..., jax.Array], chunks: int
    ) -> Callable[[GPT, jax.Array], jax.Array]:
        """Return losses of the model and tokens."""
        losses = functools.partial(
            losses, vocabulary=self.config.vocabulary, chunks=chunks
        )
        # The head stays in 16 bits: a chunked loss differentiates it inside.
        if self.recipe.policy.fp8 is not None:
            losses = mpx.autocast(losses, self.recipe.compute_dtype)
        return lambda model, tokens: losses(
            model.features(tokens[:, :-1]), model.head(), tokens[:, 1:]
        )


def make_optimizer(
    recipe: Recipe, config: Config, hyperparameters: Hyperparameters
) -> optax.GradientTransformation:
    """Return clipping and AdamW inside the recipe's wrapper, so that gradients are
    unscaled before they are clipped.
    """
    adamw = optax.adamw(
        hyperparameters.schedule(),
        b1=hyperparameters.b1,
        b2=hyperparameters.b2,
        weight_decay=hyperparameters.weight_decay,
        mask=lambda params: decayed(params, config),
    )
    tx = recipe.optimizer(
        optax.chain(optax.clip_by_global_norm(hyperparameters.clip_norm), adamw)
    )
    mpx.check_chain(tx)
    return tx


def decayed(params: Any, config: Config) -> Any:
    """Mark the weights that decay: all with two or more dimensions, without the one
    that stacks blocks.
    """

    def is_matrix(path: tuple[Any, ...], leaf: Any) -> bool:
        is_stacked = (
            config.layers != "unrolled" and getattr(path[0], "key", None) == "blocks"
        )
        return leaf.ndim - is_stacked >= 2

    return jax.tree.map_with_path(is_matrix, params)


def mean_over_microbatches(
    gradients: Callable[[jax.Array], tuple[jax.Array, Any]], microbatches: jax.Array
) -> tuple[jax.Array, Any]:
    """Return the mean loss and gradients over microbatches (A, ...), computed one after
    another, summed in float32.

    Both have the dtypes that `gradients` returns: 16-bit gradients are rounded once
    more, at the end.
    """
    if len(microbatches) == 1:
        return gradients(microbatches[0])
    shapes = jax.eval_shape(gradients, microbatches[0])

    def add(sums: Any, microbatch: jax.Array) -> tuple[Any, None]:
        return (
            jax.tree.map(
                lambda total, x: total + x.astype(jnp.float32),
                sums,
                gradients(microbatch),
            ),
            None,
        )

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), shapes)
    sums, _ = jax.lax.scan(add, zeros, microbatches)
    return jax.tree.map(
        lambda total, leaf: (total / len(microbatches)).astype(leaf.dtype), sums, shapes
    )
