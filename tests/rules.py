"""Every optimizer that Optax and `optax.contrib` export, as a table to run the wrappers
around.

`test_every_rule.py` checks that the table is complete, so that a new release of Optax
fails a test and not a user.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

import mpx
from mpx import _trees


@dataclasses.dataclass(frozen=True)
class Rule:
    """An optimizer with settings that make its arithmetic matter within a few steps."""

    make: Callable[[], optax.GradientTransformation]
    extra_args: Callable[..., dict[str, Any]] = lambda params, grads, loss=None: {}
    per_example: bool = False  # whether gradients have a leading axis of examples


def loss(params):
    """A smooth loss of a tree of parameters, in float32."""
    return sum(
        jnp.sum((p.astype(jnp.float32) - 0.5) ** 2) for p in jax.tree.leaves(params)
    )


def _value(params, grads, loss=loss):
    return {"value": loss(params)}


def _line_search(params, grads, loss=loss):
    return {"value": loss(params), "grad": grads, "value_fn": loss}


RULES = {
    "adabelief": Rule(lambda: optax.adabelief(1e-2)),
    "adadelta": Rule(lambda: optax.adadelta(1e-1)),
    "adafactor": Rule(lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4)),
    "adagrad": Rule(lambda: optax.adagrad(1e-2)),
    "adam": Rule(lambda: optax.adam(1e-2)),
    "adamax": Rule(lambda: optax.adamax(1e-2)),
    "adamaxw": Rule(lambda: optax.adamaxw(1e-2)),
    "adamw": Rule(lambda: optax.adamw(1e-2, weight_decay=0.1)),
    "adan": Rule(lambda: optax.adan(1e-2)),
    "amsgrad": Rule(lambda: optax.amsgrad(1e-2)),
    "fromage": Rule(lambda: optax.fromage(1e-2)),
    "lamb": Rule(lambda: optax.lamb(1e-2)),
    "lars": Rule(lambda: optax.lars(1e-2)),
    "lbfgs": Rule(optax.lbfgs, _line_search),
    "lion": Rule(lambda: optax.lion(1e-3)),
    "nadam": Rule(lambda: optax.nadam(1e-2)),
    "nadamw": Rule(lambda: optax.nadamw(1e-2)),
    "noisy_sgd": Rule(lambda: optax.noisy_sgd(1e-2, key=0)),
    "novograd": Rule(lambda: optax.novograd(1e-2)),
    "optimistic_adam_v2": Rule(lambda: optax.optimistic_adam_v2(1e-2)),
    "optimistic_gradient_descent": Rule(
        lambda: optax.optimistic_gradient_descent(1e-2)
    ),
    "polyak_sgd": Rule(lambda: optax.polyak_sgd(1e-2), _value),
    "radam": Rule(lambda: optax.radam(1e-2)),
    "rmsprop": Rule(lambda: optax.rmsprop(1e-2, momentum=0.9)),
    "rprop": Rule(lambda: optax.rprop(1e-2)),
    "sgd": Rule(lambda: optax.sgd(1e-2, momentum=0.9, nesterov=True)),
    "sign_sgd": Rule(lambda: optax.sign_sgd(1e-3)),
    "signum": Rule(lambda: optax.signum(1e-3)),
    "sm3": Rule(lambda: optax.sm3(1e-2)),
    "yogi": Rule(lambda: optax.yogi(1e-2)),
    "contrib.acprop": Rule(lambda: optax.contrib.acprop(1e-2)),
    "contrib.ademamix": Rule(lambda: optax.contrib.ademamix(1e-2)),
    "contrib.adopt": Rule(lambda: optax.contrib.adopt(1e-2)),
    "contrib.cocob": Rule(optax.contrib.cocob),
    "contrib.dadapt_adamw": Rule(optax.contrib.dadapt_adamw),
    "contrib.dpsgd": Rule(
        # What `dpsgd` is made of: its own `seed` argument is deprecated and warns.
        lambda: optax.chain(
            optax.contrib.differentially_private_aggregate(1.0, 0.1, key=0),
            optax.sgd(1e-2),
        ),
        per_example=True,
    ),
    "contrib.galore": Rule(lambda: optax.contrib.galore(1e-2)),
    "contrib.madgrad": Rule(lambda: optax.contrib.madgrad(1e-2)),
    "contrib.mechanize": Rule(lambda: optax.contrib.mechanize(optax.adamw(1e-2))),
    "contrib.momo": Rule(optax.contrib.momo, _value),
    "contrib.momo_adam": Rule(optax.contrib.momo_adam, _value),
    "contrib.muon": Rule(lambda: optax.contrib.muon(1e-2)),
    "contrib.prodigy": Rule(lambda: optax.contrib.prodigy(1.0)),
    "contrib.sam": Rule(
        lambda: optax.contrib.sam(optax.sgd(1e-2), optax.sgd(1e-1), sync_period=2)
    ),
    "contrib.schedule_free": Rule(
        lambda: optax.contrib.schedule_free(optax.adamw(1e-2), 1e-2, b1=0.9)
    ),
    "contrib.schedule_free_adamw": Rule(
        lambda: optax.contrib.schedule_free_adamw(1e-2)
    ),
    "contrib.schedule_free_sgd": Rule(lambda: optax.contrib.schedule_free_sgd(1e-2)),
    "contrib.simplified_ademamix": Rule(
        lambda: optax.contrib.simplified_ademamix(1e-3)
    ),
    "contrib.sophia": Rule(
        lambda: optax.contrib.sophia(1e-2),
        lambda params, grads, loss=loss: {"obj_fn": loss},
    ),
}

# Cannot run, and why.
EXCLUDED = {
    "optimistic_adam": (
        "deprecated: calling it warns to use optimistic_adam_v2, which is in the table"
    )
}

# What else returns a transformation: parts that the optimizers above are made of, and
# wrappers, which need another.
PARTS = {
    "adaptive_grad_clip", "add_decayed_weights", "add_noise", "apply_every", "apply_if_finite", "centralize", "chain",
    "clip", "clip_by_block_rms", "clip_by_global_norm", "conditionally_mask", "conditionally_transform", "ema",
    "flatten", "freeze", "identity", "inject_hyperparams", "inject_stateful_hyperparams", "keep_params_nonnegative",
    "lookahead", "masked", "measure_with_ema", "multi_transform", "named_chain", "normalize_by_update_norm",
    "partition", "scale", "selective_transform", "set_to_zero", "snapshot", "stateless", "stateless_with_tree_map",
    "trace", "with_extra_args_support", "zero_nans", "contrib.differentially_private_aggregate", "contrib.normalize",
    "contrib.reduce_on_plateau", "contrib.split_real_and_imaginary",
}  # fmt: skip


def exported_transformations():
    """Names of all functions of Optax and `optax.contrib` that return a transformation,
    but `scale_by_*`.
    """
    found = set()
    for module, prefix in ((optax, ""), (optax.contrib, "contrib.")):
        for name, function in vars(module).items():
            if name.startswith(("_", "scale_by_")) or not (
                inspect.isfunction(function) or callable(function)
            ):
                continue
            try:
                returned = str(inspect.signature(function).return_annotation)
            except (TypeError, ValueError):
                continue
            if "GradientTransformation" in returned:
                found.add(prefix + name)
    return found


def bfloat16_params():
    """Small bfloat16 parameters of two ranks, as float32 numbers that bfloat16 holds."""
    rng = np.random.default_rng(0)
    return {
        "kernel": jnp.asarray(rng.normal(size=(8, 16)), jnp.bfloat16),
        "bias": jnp.asarray(rng.normal(size=(16,)), jnp.bfloat16),
    }


def gradients(rule, steps):
    """float32 gradients for each step, stacked on a leading axis."""
    rng = np.random.default_rng(1)
    examples = (4,) if rule.per_example else ()
    return {
        "kernel": jnp.asarray(
            rng.normal(size=(steps, *examples, 8, 16)) * 0.1, jnp.float32
        ),
        "bias": jnp.asarray(rng.normal(size=(steps, *examples, 16)) * 0.1, jnp.float32),
    }


# Ways to keep parameters.
WRITE_BACKS = {
    "full": mpx.master_weights,
    "split": lambda tx: mpx.master_weights(tx, storage="split"),
    "split24": lambda tx: mpx.master_weights(
        tx, storage="split24", key=jax.random.key(3)
    ),
    "Kahan": lambda tx: optax.chain(mpx.upcast(tx), mpx.kahan_summation()),
    "stochastic": lambda tx: optax.chain(
        mpx.upcast(tx), mpx.stochastic_rounding(jax.random.key(1))
    ),
}
# Fields that hold weights, or tools of the rule, and no averages.
NO_MOMENTS = {
    "params", "params0", "x0", "z", "init_particles", "cache", "projector", "ns_coeffs", "updates", "grad",
    "weights_memory",
}  # fmt: skip
MIN_SIZE = (
    64  # what is stored in few bits; numbers that steer a rule, a handful, are not
)
SIZES = {"w1": (16, 64), "b1": (64,), "w2": (64, 4), "b2": (4,)}


@functools.cache
def moment_fields(name):
    """The fields of a rule's state that hold arrays of averages, as one pattern; None
    if there are none.
    """
    params = {
        path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in SIZES.items()
    }
    state = jax.eval_shape(RULES[name].make().init, params)
    fields = set()
    for path, leaf in _trees.leaves_by_path(state).items():
        names = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
        field = next(
            (name for name in names if not name.endswith(("state", "states"))), None
        )
        if (
            field
            and field not in NO_MOMENTS
            and _trees.is_floating(leaf)
            and leaf.size >= MIN_SIZE
        ):
            fields.add(field)
    return "|".join(sorted(fields)) or None
