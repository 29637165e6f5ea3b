"""The program of a training step of GPT-2 for a GPU: 16 sequences of 1,024 tokens."""

import jax
import jax.numpy as jnp

import mpx
from examples.gpt.training import Hyperparameters, Program

BATCH = 16


def report_of_step(recipe, config):
    """Return the parameters and the report of a whole step."""
    program = Program(recipe, config, Hyperparameters(steps=1000, learning_rate=6e-4))
    params, state = jax.eval_shape(program.init, 0)
    tokens = jax.ShapeDtypeStruct((1, BATCH, config.context + 1), jnp.int32)
    report = mpx.step_report(
        program.train_step, params, state, tokens, target="h200", donate_argnums=(0, 1)
    )
    return params, report
