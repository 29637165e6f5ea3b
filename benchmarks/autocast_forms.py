"""List the forms in which a language model is measured: left to `mpx.autocast`, or cast by hand.

The model is that of `benchmarks.models_by_hand`, with attention that runs on every device (`implementation="xla"`). By
hand all of it has the 16-bit dtype but for statistics of norms, softmaxes and the loss; in one form the residual stream
and the results of norms are float32 too.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import mpx
from benchmarks.models_by_hand import GPT2, Dtypes, Size, language_model

Loss = Callable[[Any, jax.Array], jax.Array]  # of the parameters and of tokens

SIZES = {
    "tiny": Size(width=192, layers=4, heads=6, context=64, vocabulary=1024, batch=4),
    "small": Size(width=384, layers=6, heads=6, context=256, vocabulary=8192, batch=8),
    "gpt2": GPT2._replace(batch=8),
}
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}


def make_params(size: Size, dtype: Any, seed: int = 0) -> Any:
    """Return the initial parameters, which do not depend on the dtype in which a model computes."""
    module = language_model(size, Dtypes(), attention="xla").module
    init = lambda: module.init(jax.random.key(seed), jnp.zeros((1, size.context), jnp.int32))["params"]
    return jax.tree.map(lambda p: p.astype(dtype), jax.jit(init)())


def make_tokens(size: Size, seed: int = 0) -> jax.Array:
    """Return random sequences with one token more than the model reads."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.integers(size.vocabulary, size=(size.batch, size.context + 1)), jnp.int32)


def shapes(size: Size, dtype: Any) -> tuple[Any, Any]:
    """Return the shapes of the parameters and of the tokens."""
    tokens = jax.ShapeDtypeStruct((size.batch, size.context + 1), jnp.int32)
    return jax.eval_shape(lambda: make_params(size, dtype)), tokens


def make_loss(size: Size, dtypes: Dtypes) -> Loss:
    """Return the mean cross-entropy of a model; a new function each time."""
    model = language_model(size, dtypes, attention="xla")
    return lambda params, tokens: model.loss(params, {}, (tokens[:, :-1], tokens[:, 1:]))[0]


class Form(NamedTuple):
    """One way to run the model.

    Attributes:
        make: the loss, from the dtype in which matrices are multiplied, and a function that makes the model's loss for
            the dtypes that are written into its layers.
        beside: the form by hand with which it is compared, if any.
        has_step_target: whether the target of steps speaks of it.
        has_residual_target: whether the target of residuals does.
    """

    make: Callable[[Any, Callable[[Dtypes], Loss]], Loss]
    beside: str | None = None
    has_step_target: bool = False
    has_residual_target: bool = False


def autocast_form(beside: str, *, targets: tuple[bool, bool] = (False, False), **options: Any) -> Form:
    """Return the model without dtypes under `mpx.autocast`."""
    return Form(lambda half, model: mpx.autocast(model(Dtypes()), half, **options), beside, *targets)


dots = functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)

HAND, HAND_DOTS, HAND_STREAM = "by hand", "by hand, dots", "by hand, f32 stream"
FAST: dict[str, Any] = {"rules": mpx.FAST_RULES}
DOTS: dict[str, Any] = {"checkpoint": "dots"}
WIDE: dict[str, Any] = {"gradient_dtype": jnp.float32}
FORMS = {
    HAND: Form(lambda half, model: model(Dtypes(half, half))),
    HAND_DOTS: Form(lambda half, model: dots(model(Dtypes(half, half)))),
    HAND_STREAM: Form(lambda half, model: model(Dtypes(half, jnp.float32)), HAND),
    "f32": Form(lambda half, model: model(Dtypes()), HAND),
    "autocast": autocast_form(HAND),
    "autocast, FAST_RULES": autocast_form(HAND, targets=(True, False), **FAST),
    "autocast, gradients f32": autocast_form(HAND, **WIDE),
    "f32, dots": Form(lambda half, model: dots(model(Dtypes())), HAND_DOTS),
    "autocast, dots": autocast_form(HAND_DOTS, targets=(True, True), **DOTS),
    "autocast, dots, FAST_RULES": autocast_form(HAND_DOTS, **DOTS, **FAST),
    "autocast, dots, gradients f32": autocast_form(HAND_DOTS, **DOTS, **WIDE),
}


def make_form(name: str, size: Size, half: Any = jnp.bfloat16) -> Loss:
    """Return the loss in one of the forms, in functions that jax has not seen."""
    return FORMS[name].make(half, functools.partial(make_loss, size))
