"""Training loops of MaxText, Tunix and Levanter on eight devices: what recipes need of
their users, keep, and reach.
"""

import functools
import json
import pathlib
import tempfile

import equinox as eqx
import haliax
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from flax import nnx
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmExample
from levanter.tracker import current_tracker
from levanter.tracker.tracker import NoopTracker
from levanter.trainer import Trainer, TrainerConfig
from maxtext.configs import pyconfig
from maxtext.optimizers import optimizers
from maxtext.trainers.pre_train import train
from tunix.models.llama3.model import Llama3, ModelConfig
from tunix.sft import peft_trainer

import mpx
from tests.helpers import assert_same_bits

STEPS = 20
# Bytes a parameter of parameters and AdamW's state. Scales of blocks take 0.03 in 8
# bits, more where rows are short.
BYTES = {
    "bf16-autocast": (12, 12.01),
    "bf16-autocast, 8-bit state": (6.03, 6.08),
    "bf16-masters": (14, 14.01),
    "bf16-split": (12, 12.01),
    "bf16-split-8bit": (6.03, 6.08),
    "bf16-split24-4bit": (4.53, 4.6),
    "f16-scaled": (12, 12.01),
}


def tx_of(tx, recipe, **options):
    loss_scale = mpx.NoOpLossScale() if recipe == "f16-scaled" else None
    return mpx.mixed_precision(tx, recipe, loss_scale=loss_scale, **options)


def loss_of(loss_fn, recipe):
    return mpx.autocast(
        loss_fn,
        recipe,
        loss_scale=mpx.StaticLossScale(2.0**12) if recipe == "f16-scaled" else None,
    )


TINY = {
    "run_name": "tiny", "hardware": "cpu", "skip_jax_distributed_system": True, "dataset_type": "synthetic",
    "enable_checkpointing": False, "attention": "dot_product", "base_emb_dim": 512, "base_num_query_heads": 4,
    "base_num_kv_heads": 2, "head_dim": 64, "base_mlp_dim": 256, "base_num_decoder_layers": 2, "vocab_size": 256,
    "max_target_length": 32, "per_device_batch_size": 1, "learning_rate": 2e-4, "learning_rate_schedule_steps": STEPS,
}  # fmt: skip


def maxtext(recipe, folder, *, dtype="float32", steps=STEPS, **settings):
    """Return parameters, the optimizer's state and losses of `train_loop`.

    A recipe takes a line at the end of `get_optimizer`. With `dtype=float32` a second
    one lets autocast narrow the loss; else MaxText casts to `dtype` itself.
    """
    metrics = folder / "metrics.json"
    folders = {"base_output_directory": folder, "metrics_file": metrics}
    settings = TINY | folders | {"dtype": dtype, "steps": steps} | settings
    base = str(pathlib.Path(pyconfig.__file__).with_name("base.yml"))
    config = pyconfig.initialize(
        ["train", base, *(f"{name}={value}" for name, value in settings.items())]
    )
    get_optimizer, loss_fn = optimizers.get_optimizer, train.loss_fn
    with pytest.MonkeyPatch.context() as patch:
        if recipe is not None:
            patch.setattr(
                optimizers,
                "get_optimizer",
                lambda *args, **kw: tx_of(get_optimizer(*args, **kw), recipe),
            )
        if recipe is not None and dtype == "float32":
            patch.setattr(train, "loss_fn", loss_of(loss_fn, recipe))
        state = train.train_loop(config, None)
    losses = [
        json.loads(line)["learning/loss"] for line in metrics.read_text().splitlines()
    ]
    return (
        nnx.as_pure(state["model"]),
        nnx.as_pure(state["optimizer"]["opt_state"]),
        losses,
    )


def tunix(recipe, folder):
    """Return the same of `PeftTrainer`: its optimizer and its loss are a line each."""
    config = ModelConfig(
        num_layers=2, vocab_size=256, embed_dim=512, hidden_dim=256, num_heads=4, head_dim=64, num_kv_heads=2,
        rope_theta=10_000, norm_eps=1e-5,
    )  # fmt: skip
    tokens, rows = (
        np.random.default_rng(0).integers(0, 256, (8, 32)),
        np.ones((8, 1), int),
    )
    batch = {
        "input_tokens": tokens,
        "input_mask": np.ones(tokens.shape),
        "positions": rows * np.arange(32),
        "attention_mask": rows[:, None] * np.tril(np.ones((32, 32), int)) > 0,
    }
    tx, loss_fn = optax.adamw(1e-3), peft_trainer._default_loss_fn
    if recipe is not None:
        tx, loss_fn = tx_of(tx, recipe), loss_of(loss_fn, recipe)
    with jax.sharding.Mesh(np.reshape(jax.devices(), (8, 1)), ("fsdp", "tp")):
        model = Llama3(config, rngs=nnx.Rngs(0))
        state = nnx.state(model)
        nnx.update(
            model,
            jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)),
        )
        settings = peft_trainer.TrainingConfig(eval_every_n_steps=1000, max_steps=STEPS)
        trainer = peft_trainer.PeftTrainer(model, tx, settings).with_loss_fn(loss_fn)
        trainer.train([batch] * STEPS)
    losses = trainer.metrics_logger.get_metric_history("", "loss", "train")
    return (
        nnx.as_pure(nnx.state(model, nnx.Param)),
        nnx.as_pure(trainer.optimizer.opt_state),
        losses,
    )


def levanter(recipe, folder):
    """Return the same of Levanter's `Trainer`, which adds updates as p + u."""
    config = LlamaConfig(
        max_seq_len=32, hidden_dim=512, intermediate_dim=256, num_layers=2, num_heads=4, num_kv_heads=2
    )  # fmt: skip
    tx, mp, losses = optax.adamw(1e-3), "f32", []
    loss_fn = lambda model, example, *, key=None: model.compute_next_token_loss(
        example, key=key
    )
    if recipe == "bf16-autocast, 8-bit state":
        recipe, tx = (
            "bf16-autocast",
            mpx.low_precision_state(tx, {"mu|nu": mpx.Blockwise8bit()}),
        )
    elif recipe == "bf16-masters":
        mp, tx = "p=bf16,c=bf16", tx_of(tx, recipe, updates_in_param_dtype=True)
    elif recipe is not None:
        tx = tx_of(tx, recipe)
    settings = TrainerConfig(
        mp=jmp.get_policy(mp), id="tiny", train_batch_size=8, num_train_steps=STEPS, load_checkpoint=False,
        log_jaxprs=False, log_xla_hlo=False,
    )  # fmt: skip
    axes = haliax.Axis("batch", 8), config.max_Pos
    tokens = haliax.named(
        np.random.default_rng(0).integers(0, 256, (8, 32), np.int32), axes
    )
    with current_tracker(NoopTracker()):
        loss_fn = loss_fn if recipe is None else loss_of(loss_fn, recipe)
        with Trainer(settings, tx, loss_fn, add_default_hooks=False) as trainer:
            make = lambda: config.build(
                haliax.Axis("vocab", 256), key=jax.random.key(1)
            )
            state = trainer.initial_state(jax.random.key(0), model_init=make)
            batch = haliax.shard(
                haliax.vmap(LmExample.causal, axes[0])(tokens),
                trainer.compute_axis_mapping,
            )
            for step in trainer.training_steps(state, [batch] * STEPS):
                losses.append(step.loss)
    return (
        eqx.filter(step.state.model, eqx.is_inexact_array),
        step.state.opt_state,
        losses,
    )


@functools.cache
def losses_in_float32(train_by):
    with tempfile.TemporaryDirectory() as folder:
        return train_by(None, pathlib.Path(folder))[-1]


def require_near(losses, exact):
    """Raise unless losses differ by a twentieth of what training gains."""
    assert len(losses) == len(exact) == STEPS
    np.testing.assert_allclose(
        losses, exact, rtol=0, atol=0.05 * (exact[0] - exact[-1])
    )


def numbers(tree):
    return [
        x
        for x in jax.tree.leaves(tree)
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    ]


RECIPES = {
    maxtext: ("bf16-autocast", "bf16-split24-4bit", "f16-scaled"),
    tunix: ("bf16-split", "bf16-split-8bit", "f16-scaled"),
    levanter: ("bf16-autocast, 8-bit state", "bf16-masters", "f16-scaled"),
}


@pytest.mark.parametrize(
    ("train_by", "recipe"),
    [(f, recipe) for f, recipes in RECIPES.items() for recipe in recipes],
)
def test_a_trainer_that_makes_its_model_trains_as_in_float32_with_all_state_divided(
    train_by, recipe, tmp_path
):
    params, state, losses = train_by(recipe, tmp_path)
    require_near(losses, losses_in_float32(train_by))
    params = [x for x in numbers(params) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert {x.dtype for x in params} == {
        jnp.dtype(mpx.get_policy(recipe.partition(",")[0]).param_dtype)
    }
    arrays = params + numbers(state)
    total = sum(x.nbytes for x in arrays)
    least, most = BYTES[recipe]
    assert least < total / sum(x.size for x in params) < most
    assert sum(x.addressable_shards[0].data.nbytes for x in arrays) < 1.06 * total / 8


def test_split_masters_in_levanter_are_refused_with_what_to_do(tmp_path):
    with pytest.raises(ValueError, match="stores parameters below float32"):
        levanter("bf16-split", tmp_path)


def test_maxtext_needs_one_line_where_it_casts_itself(tmp_path):
    params, _, losses = maxtext("bf16-split-8bit", tmp_path, dtype="bfloat16")
    require_near(losses, losses_in_float32(maxtext))
    assert params["decoder"]["logits_dense"]["kernel"].dtype == jnp.bfloat16


def test_a_run_of_maxtext_goes_on_from_its_own_checkpoint_to_the_bit(tmp_path):
    kept = {
        "enable_checkpointing": True,
        "async_checkpointing": False,
        "save_checkpoint_on_completion": True,
    }
    for folder in ("cut", "whole"):
        (tmp_path / folder).mkdir()
    maxtext("bf16-split24-4bit", tmp_path / "cut", steps=2, **kept)
    params, state, _ = maxtext("bf16-split24-4bit", tmp_path / "cut", steps=4, **kept)
    assert_same_bits(
        (params, state), maxtext("bf16-split24-4bit", tmp_path / "whole", steps=4)[:2]
    )


def test_a_scale_of_the_optimizer_beside_that_of_autocast_divides_gradients_twice(
    tmp_path,
):
    """Negative control for float16: AdamW's `eps` outweighs gradients that are 2^15
    times too small.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mpx, "NoOpLossScale", mpx.DynamicLossScale)
        *_, losses = tunix("f16-scaled", tmp_path)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        require_near(losses, losses_in_float32(tunix))
