"""A recipe, a model and a schedule, made into the functions that a training loop calls.

Nothing here is compiled: the loop wraps these functions in `jax.jit`, with the shardings that it wants.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

import mpx
from examples.gpt import devices
from examples.gpt.loss import mean_loss, token_losses
from examples.gpt.model import GPT, Config
from examples.gpt.recipes import Recipe


@dataclasses.dataclass(frozen=True)
class Hyperparameters:
    """AdamW and its schedule; the defaults are those of GPT-3 (Brown et al., 2020), as all who rebuilt GPT-2 take them.

    Attributes:
        steps: of the optimizer, after which the learning rate is at its end.
        learning_rate: its peak.
        warmup: the part of all steps in which it rises from 0, which is that of the first update ...
        final_learning_rate: ... before it falls along a cosine to this part of its peak.
        b1: decay of the first moment.
        b2: decay of the second moment.
        weight_decay: of tensors with two and more dimensions: not of biases and norms.
        clip_norm: bound on the norm of all gradients.
    """

    steps: int
    learning_rate: float
    warmup: float = 0.1
    final_learning_rate: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    weight_decay: float = 0.1
    clip_norm: float = 1.0

    def schedule(self) -> optax.Schedule:
        """The learning rate after so many updates."""
        return optax.warmup_cosine_decay_schedule(
            init_value=0.0,
            peak_value=self.learning_rate,
            warmup_steps=int(self.warmup * self.steps),
            decay_steps=self.steps,
            end_value=self.final_learning_rate * self.learning_rate,
        )


class Metrics(NamedTuple):
    """What a step tells of itself.

    Attributes:
        loss: before the update, the mean over all tokens of the step; float32, scalar.
        gradient_norm: of the mean gradient, unscaled, before clipping; float32, scalar.
    """

    loss: jax.Array
    gradient_norm: jax.Array


@dataclasses.dataclass(frozen=True)
class Program:
    """The functions of one recipe. Tokens are integers, T + 1 of them: targets are the inputs, one token later.

    Attributes:
        recipe: which.
        config: of the model.
        tx: the optimizer.
        init: from a seed to parameters and optimizer state.
        gradients: from parameters, optimizer state and tokens (B, T + 1) to the loss and the gradients, which are still
            scaled if the recipe scales the loss.
        train_step: from parameters, optimizer state and tokens (A, B, T + 1) to both after one update, and `Metrics`.
            The gradient is the mean over A microbatches, one after another.
        token_losses: from parameters and tokens (B, T + 1) to losses (B, T).
        evaluate: from parameters and tokens (N, B, T + 1) to the mean loss.
        logits: from parameters and tokens (B, T) to logits (B, T, V).
    """

    recipe: Recipe
    config: Config
    tx: optax.GradientTransformation
    init: Callable[[int | jax.Array], tuple[Any, optax.OptState]]
    gradients: Callable[[Any, optax.OptState, jax.Array], tuple[jax.Array, Any]]
    train_step: Callable[[Any, optax.OptState, jax.Array], tuple[Any, optax.OptState, Metrics]]
    token_losses: Callable[[Any, jax.Array], jax.Array]
    evaluate: Callable[[Any, jax.Array], jax.Array]
    logits: Callable[[Any, jax.Array], jax.Array]


def make_program(
    recipe: Recipe,
    config: Config,
    hyperparameters: Hyperparameters,
    *,
    loss_chunks: int = 1,
    rules: Any = mpx.DEFAULT_RULES,
    mesh: Mesh | None = None,
    parallel: devices.Parallel = "replicated",
) -> Program:
    """Builds model, optimizer and training step.

    Args:
        recipe: the precision.
        config: the model.
        hyperparameters: of the optimizer.
        loss_chunks: into how many parts the loss cuts the positions.
        rules: of `mpx.autocast`, for recipes that use it.
        mesh: the devices that share the work of a training step; one if None.
        parallel: whether each of them keeps all of the optimizer state.
    """
    policy = mpx.get_policy(recipe.policy)
    tx = devices.divided(make_optimizer(recipe, config, hyperparameters), mesh, parallel)
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: GPT(config, nnx.Rngs(0))))

    def init(seed: int | jax.Array) -> tuple[Any, optax.OptState]:
        # Every recipe starts from the same float32 weights, rounded to what it stores.
        params = policy.cast_to_param(nnx.state(GPT(config, nnx.Rngs(jax.random.key(seed))), nnx.Param))
        return params, tx.init(params)

    def computed(of_model: Callable[[GPT, jax.Array], jax.Array]) -> Callable[[Any, jax.Array], jax.Array]:
        """A function of parameters and tokens that runs in the precision of the recipe."""

        def run(params: Any, tokens: jax.Array) -> jax.Array:
            with jax.default_matmul_precision(recipe.matmul_precision):
                return of_model(nnx.merge(graphdef, params), tokens.astype(jnp.int32))

        if recipe.compute == "autocast":
            return mpx.autocast(run, policy, rules=rules)
        # Parameters in one dtype, and all that the model computes follows it.
        return lambda params, tokens: run(policy.cast_to_compute(params), tokens)

    def loss_of(losses: Callable[..., jax.Array]) -> Callable[[GPT, jax.Array], jax.Array]:
        options = {"vocabulary": config.vocabulary, "chunks": loss_chunks}
        return lambda model, tokens: losses(
            model.features(tokens[:, :-1]), model.token_embedding[...], tokens[:, 1:], **options
        )

    loss_fn, losses_fn = computed(loss_of(mean_loss)), computed(loss_of(token_losses))

    def gradients(params: Any, opt_state: optax.OptState, tokens: jax.Array) -> tuple[jax.Array, Any]:
        if recipe.compute == "plain":
            return jax.value_and_grad(loss_fn)(params, tokens)
        return mpx.value_and_grad(loss_fn, mpx.get_loss_scale(opt_state))(params, tokens)

    def train_step(
        params: Any, opt_state: optax.OptState, microbatches: jax.Array
    ) -> tuple[Any, optax.OptState, Metrics]:
        def on_one_device(params: Any, microbatches: jax.Array) -> tuple[jax.Array, Any]:
            return mean_over_microbatches(lambda tokens: gradients(params, opt_state, tokens), microbatches)

        loss, grads = devices.averaged(on_one_device, mesh, parallel)(params, microbatches)
        if recipe.compute == "plain":  # whose optimizer knows no other dtype than that of the parameters
            grads = optax.tree.cast_like(grads, params)
        norm = optax.tree.norm(mpx.get_loss_scale(opt_state).unscale(mpx.cast(grads, "f32")))
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, Metrics(loss, norm)

    return Program(
        recipe=recipe,
        config=config,
        tx=tx,
        init=init,
        gradients=gradients,
        train_step=train_step,
        token_losses=losses_fn,
        # The parameters as they are stored: what one would deploy, without masters or compensations.
        evaluate=lambda params, batches: jax.lax.map(lambda batch: losses_fn(params, batch).mean(), batches).mean(),
        logits=computed(lambda model, tokens: model(tokens)),
    )


def make_optimizer(
    recipe: Recipe, config: Config, hyperparameters: Hyperparameters
) -> optax.GradientTransformationExtraArgs:
    """AdamW behind clipping, with the recipe around both, so that a gradient is clipped after it is unscaled."""
    adamw = recipe.adamw(
        hyperparameters.schedule(),
        b1=hyperparameters.b1,
        b2=hyperparameters.b2,
        weight_decay=hyperparameters.weight_decay,
        mask=lambda params: decayed(params, config),
    )
    tx = recipe.optimizer(optax.chain(optax.clip_by_global_norm(hyperparameters.clip_norm), adamw))
    mpx.check_chain(tx)
    return optax.with_extra_args_support(tx)


def decayed(params: Any, config: Config) -> Any:
    """Which weights decay: those with two dimensions or more, not counting the one along which scanned blocks stack."""

    def is_matrix(path: tuple[Any, ...], leaf: Any) -> bool:
        is_stacked = config.layers == "scanned" and getattr(path[0], "key", None) == "blocks"
        return leaf.ndim - is_stacked >= 2

    return jax.tree.map_with_path(is_matrix, params)


def mean_over_microbatches(
    gradients: Callable[[jax.Array], tuple[jax.Array, Any]], microbatches: jax.Array
) -> tuple[jax.Array, Any]:
    """The mean loss and gradients over the leading axis, one microbatch after another, added up in float32.

    Args:
        gradients: from one microbatch to its mean loss and gradients.
        microbatches: of shape (A, ...), each with as many tokens.

    Returns:
        Both as `gradients` returns them, in its dtypes: 16-bit gradients are rounded once more, at the end.
    """
    if len(microbatches) == 1:
        return gradients(microbatches[0])
    shapes = jax.eval_shape(gradients, microbatches[0])

    def add(sums: Any, microbatch: jax.Array) -> tuple[Any, None]:
        return jax.tree.map(lambda total, x: total + x.astype(jnp.float32), sums, gradients(microbatch)), None

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), shapes)
    sums, _ = jax.lax.scan(add, zeros, microbatches)
    return jax.tree.map(lambda total, leaf: (total / len(microbatches)).astype(leaf.dtype), sums, shapes)
