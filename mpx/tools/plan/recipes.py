"""The recipes by their names, the same in README, documentation, `mpx plan`, `mpx doctor` and the example."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import jax
import optax

from mpx._recipes import mixed_precision
from mpx._stored.blockwise import Blockwise4bit, Blockwise8bit
from mpx._stored.roles import Role
from mpx._stored.state_format import StateFormat
from mpx._transforms.kahan_summation import kahan_summation
from mpx._transforms.low_precision_state import low_precision_state
from mpx._transforms.stochastic_rounding import stochastic_rounding
from mpx._transforms.upcast import upcast

_F32, _BF16 = "params=f32,compute=f32,output=f32", "params=bf16,compute=bf16,output=f32"
_F32_BF16, _F32_F16 = "params=f32,compute=bf16,output=f32", "params=f32,compute=f16,output=f32"
_BF16_FP8 = "params=bf16,compute=fp8,output=f32"
MOMENTS = "mu|nu|trace|momentum|exp_avg|exp_avg_sq|sum_of_squares"  # as rules of Optax and others call them


@dataclasses.dataclass(frozen=True)
class PrecisionRecipe:
    """A way to train in some precision, with any rule.

    Attributes:
        policy: the string of a `Policy`.
        wrap: a function that puts wrappers around a rule.
        code: what `wrap` does to an `optimizer`, as one writes it for AdamW; empty if it has none.
        purpose: what to take it for; empty if nobody says.
        formats_moments: True if it stores the rule's moments in fewer bits, and so needs a rule that has moments.
    """

    policy: str
    wrap: Callable[[optax.GradientTransformation], optax.GradientTransformation]
    code: str = ""
    purpose: str = ""
    formats_moments: bool = False


class FirstMomentsIn4Bits(Blockwise4bit):
    """Keeps second moments in 8 bits, whatever a rule calls them."""

    def for_role(self, role: Role) -> StateFormat:
        """Return the format of a field of the optimizer's state."""
        return Blockwise8bit(signed=False) if role == "second moment" else Blockwise4bit()

    def refuses(self, role: Role, shape: tuple[int, ...]) -> None:
        """Refuse nothing."""


_8_bits = lambda rule: low_precision_state(rule, {MOMENTS: Blockwise8bit()})
_4_bits = lambda rule: low_precision_state(rule, {MOMENTS: FirstMomentsIn4Bits()}, key=jax.random.key(1))
_16_bits = lambda rule: low_precision_state(rule, {MOMENTS: "bf16"}, min_size=0)
_mixed = lambda policy: lambda rule: mixed_precision(rule, policy)
_split24 = lambda rule: mixed_precision(rule, _BF16, storage="split24", key=jax.random.key(0))

_MIXED = "mpx.mixed_precision(optimizer, policy)"
_8_BITS = 'mpx.low_precision_state(optimizer, {"mu|nu": mpx.Blockwise8bit()}), policy'
_SPLIT24_OF_4_BITS = """\
mpx.mixed_precision(
    mpx.low_precision_state(
        optimizer,
        {"mu": mpx.Blockwise4bit(), "nu": mpx.Blockwise8bit()},
        key=jax.random.key(1),
    ),
    policy, storage="split24", key=jax.random.key(0),
)"""
_KAHAN = """\
optax.chain(
    mpx.low_precision_state(optimizer, {"mu|nu": "bf16"}, min_size=0),
    mpx.kahan_summation(),
)"""

STANDARD_RECIPES: Mapping[str, PrecisionRecipe] = {
    "f32": PrecisionRecipe(_F32, lambda rule: rule, "optimizer", "compare, or train on a CPU"),
    "bf16-autocast": PrecisionRecipe(_F32_BF16, _mixed(_F32_BF16), _MIXED, "keep float32 parameters"),
    "bf16-split": PrecisionRecipe(_BF16, _mixed(_BF16), _MIXED, "train in bfloat16: start here"),
    "bf16-split-8bit": PrecisionRecipe(
        _BF16,
        lambda rule: mixed_precision(_8_bits(rule), _BF16),
        f"mpx.mixed_precision(\n    {_8_BITS}\n)",
        "fit a larger model",
        formats_moments=True,
    ),
    "bf16-split24-8bit": PrecisionRecipe(
        _BF16,
        lambda rule: _split24(_8_bits(rule)),
        f'mpx.mixed_precision(\n    {_8_BITS},\n    storage="split24", key=jax.random.key(0),\n)',
        "fit more still: masters of 24 bits",
        formats_moments=True,
    ),
    "bf16-split24-4bit": PrecisionRecipe(
        _BF16,
        lambda rule: _split24(_4_bits(rule)),
        _SPLIT24_OF_4_BITS,
        "hold the fewest bytes",
        formats_moments=True,
    ),
    "bf16-masters": PrecisionRecipe(
        _BF16,
        lambda rule: mixed_precision(rule, _BF16, storage="full"),
        'mpx.mixed_precision(optimizer, policy, storage="full")',
        "let other code read float32 masters",
    ),
    "bf16-kahan": PrecisionRecipe(
        _BF16,
        lambda rule: optax.chain(_16_bits(rule), kahan_summation()),
        _KAHAN,
        "train without masters",
        formats_moments=True,
    ),
    "bf16-stochastic": PrecisionRecipe(
        _BF16,
        lambda rule: optax.chain(upcast(rule), stochastic_rounding(jax.random.key(0))),
        "optax.chain(mpx.upcast(optimizer), mpx.stochastic_rounding(jax.random.key(0)))",
        "keep nothing for a parameter but a key",
    ),
    "f16-scaled": PrecisionRecipe(_F32_F16, _mixed(_F32_F16), _MIXED, "use a GPU without bfloat16 (V100, T4)"),
    "fp8": PrecisionRecipe(
        _BF16_FP8, _mixed(_BF16_FP8), _MIXED, "multiply large matrices in 8-bit floats (H100 and later)"
    ),
}

Library = Literal["linen", "nnx"]
_MODELS: Mapping[Library, str] = {"linen": "Flax Linen or any pytree", "nnx": "Flax NNX"}
Sharding = Literal["none", "zero1", "fsdp"]
_MESH_OF = """\
from jax.sharding import {}PartitionSpec as P

mesh = jax.make_mesh((jax.device_count(),), ("data",){})
jax.set_mesh(mesh)
"""
_GATHER = "\neverywhere = lambda w: jax.sharding.reshard(w, P())  # gather a weight\n"
_MESH = {"zero1": _MESH_OF.format("AxisType, ", ", (AxisType.Auto,)"), "fsdp": _MESH_OF.format("", "") + _GATHER}
_WHOLE = {
    "linen": """\
def whole_loss_fn(params, batch):
    return loss_fn(jax.tree.map(everywhere, params), batch)
""",
    "nnx": """\
def whole_loss_fn(model, batch):
    graph, params, others = nnx.split(model, nnx.Param, ...)
    whole = nnx.merge(graph, jax.tree.map(everywhere, params), others)
    loss = loss_fn(whole, batch)
    nnx.update(model, nnx.state(whole, nnx.Not(nnx.Param)))  # batch statistics
    return loss
""",
}
_PLACED = {
    "zero1": """\
params = jax.device_put(params, P())
tx = mpx.zero1(tx, mesh)  # a part of the optimizer state on each device""",
    "fsdp": """\
shardings = mpx.zero1_shardings(params, params, mesh)
params = jax.device_put(params, shardings)  # a part of each on each device""",
}
_STEP = {
    "linen": """\
opt_state = tx.init(params)

@jax.jit(donate_argnums=(0, 1))  # or old and new ones are held at once
def train_step(params, opt_state, batch):
    scale = mpx.get_loss_scale(opt_state)
    grad_fn = mpx.value_and_grad(mixed_loss_fn, scale)
    loss, grads = grad_fn(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss""",
    "nnx": """\
nnx.update(model, params)
trainer = nnx.Optimizer(model, tx, wrt=nnx.Param)

@nnx.jit(donate_argnums=(0, 1))  # or old and new ones are held at once
def train_step(model, trainer, batch):
    scale = mpx.get_loss_scale(trainer.opt_state)
    grad_fn = mpx.value_and_grad(
        mixed_loss_fn, scale, transform=nnx.value_and_grad
    )
    loss, grads = grad_fn(model, batch)
    trainer.update(model, grads)
    return loss""",
}


def training_texts(name: str, sharding: Sharding = "none") -> Iterator[str]:
    """Yield the training steps of a standard recipe, each under a line that says for which models it is."""
    recipe = STANDARD_RECIPES[name]
    for library, models in _MODELS.items():
        yield f"{name}: {recipe.purpose}. For AdamW, with {models}:\n\n{training_code(recipe, library, sharding)}"


def training_code(recipe: PrecisionRecipe, library: Library, sharding: Sharding = "none") -> str:
    """Return a training step under a recipe, for AdamW and a model of Flax Linen (or any pytree) or of Flax NNX.

    It starts from `loss_fn`, and from `params` or a `model`, in float32. Its mesh has all devices. `"fsdp"` shards
    everything over them and `"zero1"` the optimizer state alone; `"none"` has no mesh.
    """
    is_linen, is_fsdp = library == "linen", sharding == "fsdp"
    loss_fn = "whole_loss_fn" if is_fsdp else "loss_fn"
    step, grad_fn = _STEP[library], "    grad_fn = mpx.value_and_grad(mixed_loss_fn, scale)\n"
    if sharding == "zero1":  # under `nnx.jit` XLA finds the same reduce-scatter
        step = step.replace(grad_fn, f"{grad_fn}    grad_fn = mpx.data_parallel(grad_fn, mesh, scatter=True)\n")
    pieces = (
        _MESH.get(sharding),
        is_fsdp and _WHOLE[library],
        f'policy = mpx.get_policy("{recipe.policy}")',
        f"mixed_loss_fn = mpx.autocast({loss_fn}, policy)  # of {'params' if is_linen else 'model'} and batch",
        "optimizer = optax.adamw(3e-4)",
        f"tx = {recipe.code}",
        f"params = policy.cast_to_param({'params' if is_linen else 'nnx.state(model, nnx.Param)'})",
        _PLACED.get(sharding),
        step,
        sharding != "none" and '\n# Before each step: batch = jax.device_put(batch, P("data"))',
    )
    return "\n".join(piece for piece in pieces if piece)
