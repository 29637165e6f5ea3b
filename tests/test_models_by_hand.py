"""Check the models that autocast is held against, in small, and the table of their programs. Nothing is timed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import mpx
from benchmarks import autocast, autocast_programs, models_by_hand
from benchmarks.autocast_programs import AUTOCAST, FORMS, NARROW, STREAM, WIDE
from benchmarks.models_by_hand import Dtypes, Size
from tests.autocast.helpers import contractions
from tests.helpers import cases

pytestmark = pytest.mark.optax_promotion

SIZE = Size(width=16, layers=2, heads=2, context=8, vocabulary=32, batch=2)
SMALL = {
    "transformer": lambda dtypes: models_by_hand.language_model(SIZE, dtypes, attention="xla"),
    "experts": lambda dtypes: models_by_hand.language_model(SIZE, dtypes, attention="xla", experts=2),
    "ViT": lambda dtypes: models_by_hand.of_images(
        models_by_hand.Transformer(16, 1, 2, 8, dtypes, patch=4, attention="xla"), 2, 8
    ),
    "ConvNet": lambda dtypes: models_by_hand.of_images(models_by_hand.ConvNet((4, 8), 1, 8, dtypes), 2, 16),
    "LSTM": lambda dtypes: models_by_hand.of_tokens(models_by_hand.Lstm(16, 1, 32, dtypes), 2, 8),
    "LSTM, checkpointed": lambda dtypes: models_by_hand.of_tokens(
        models_by_hand.Lstm(16, 1, 32, dtypes, checkpoint=True), 2, 8
    ),
}


def start(model):
    """Return parameters, what else the model keeps, and a batch."""
    rng = np.random.default_rng(0)
    _, _, (inputs, labels) = model.shapes()
    of_tokens = jnp.issubdtype(inputs.dtype, jnp.integer)
    x = rng.integers(32, size=inputs.shape) if of_tokens else rng.normal(size=inputs.shape)
    x = jnp.asarray(x, inputs.dtype)
    kept = dict(jax.jit(model.module.init)(jax.random.key(0), x))
    return kept.pop("params"), kept, (x, jnp.asarray(rng.integers(8, size=labels.shape), jnp.int32))


def loss_of(name, form):
    model = SMALL[name](FORMS[form])
    return mpx.autocast(model.loss, "bf16") if form == AUTOCAST else model.loss


@pytest.mark.parametrize("name", cases(SMALL, {"transformer", "ConvNet"}))
def test_all_forms_of_a_model_are_the_same_function(name):
    """A relative error of 2**-8 in each of some operations; other weights give another loss.

    The running means of batch norms are float32 in every form.
    """
    params, kept, batch = start(SMALL[name](Dtypes()))
    found = {form: jax.jit(loss_of(name, form))(params, kept, batch) for form in FORMS}
    for leaves in zip(*map(jax.tree.leaves, found.values()), strict=True):
        assert {leaf.dtype for leaf in leaves} == {jnp.dtype("float32")}
        for leaf in leaves:
            np.testing.assert_allclose(leaf, leaves[-1], rtol=0.02, atol=0.01)
    other = jax.tree.map(lambda p: p + 0.5 * jax.random.normal(jax.random.key(1), p.shape), params)
    assert abs(jax.jit(loss_of(name, WIDE))(other, kept, batch)[0] / found[WIDE][0] - 1) > 0.02


@pytest.mark.parametrize("name", SMALL)
def test_every_product_of_each_form_is_in_16_bits_but_for_float32(name):
    """By hand, attention's logits are float32, and so are their cotangents, of which two products are made."""
    shapes = SMALL[name](Dtypes()).shapes()
    layers = {"LSTM": 0, "LSTM, checkpointed": 0, "ConvNet": 0, "ViT": 1}.get(name, SIZE.layers)
    for form in FORMS:
        found = contractions(jax.grad(loss_of(name, form), has_aux=True), *shapes)
        wide = [c for c in found if jnp.float32 in (c.lhs, c.rhs)]
        assert len(wide) == {AUTOCAST: 0, STREAM: 2 * layers, NARROW: 2 * layers, WIDE: len(found)}[form]


@pytest.mark.parametrize(("form", "dtype"), {STREAM: "float32", NARROW: "bfloat16", WIDE: "float32"}.items())
def test_the_residual_stream_has_its_dtype(form, dtype):
    model = SMALL["transformer"](FORMS[form])
    params, _, batch = model.shapes()
    apply = lambda params: model.module.apply(
        {"params": params}, jnp.zeros(batch[0].shape, jnp.int32), capture_intermediates=True
    )
    _, seen = jax.eval_shape(apply, params)
    (normed,) = seen["intermediates"]["norm"]["__call__"]
    assert normed.dtype == dtype


def test_an_expert_takes_the_tokens_that_are_sent_to_it_while_it_has_room():
    """Of 8 equal tokens all go to one of two experts, which has room for 8 / 2 * 1.25 = 5; the others get nothing."""
    module = models_by_hand.Experts(2, Dtypes())
    x = jnp.ones((1, 8, 4))
    out, _ = jax.jit(lambda key: module.init_with_output(key, x))(jax.random.key(0))
    assert jnp.any(out[0, :5] != 0, axis=-1).all()
    assert (out[0, 5:] == 0).all()


# ---- the table ------------------------------------------------------------------------------------------------------

FIGURES = {"reached ms": 10.0, "outside bytes": 10**10, "peak bytes": 10**10, "temporary bytes": 0, "kernels": 9}
FIGURES |= {"compile s": 1.0}


def read(model, form, target):
    """Answer as the compiler would: by hand in bfloat16 a tenth less, and float32 does not compile."""
    if form == WIDE:
        return {"failed": "out of memory"}
    return FIGURES | ({"reached ms": 9.0, "outside bytes": 9 * 10**9} if form == NARROW else {})


def test_the_command_holds_autocast_against_each_form_by_hand(monkeypatch, tmp_path):
    """10 ms beside 10 and 9: 1 and 1.111 times as long, of which GPT-2 may have 1.06."""
    monkeypatch.setattr(autocast_programs, "read_form", read)
    monkeypatch.setattr(autocast_programs, "start_compiler", lambda target: {"compiled for": target, "jax": "0.10"})
    path = tmp_path / "found.json"
    asked = ["--target", "h200", "--models", "GPT-2,ViT", "--json", str(path)]
    printed = CliRunner().invoke(autocast.app, asked, catch_exceptions=False).output
    assert "compiled for one h200, jax 0.10" in printed
    assert f"| GPT-2 | {NARROW} | 9.00 | 1.111 | 9.00 | 1.111 |" in printed
    assert f"| GPT-2: bound, autocast / {NARROW} | 1.111 | at most 1.06 | missed |" in printed
    assert f"| ViT: bound, autocast / {STREAM} | 1 | at most 1.03 | met |" in printed
    assert f"ViT: bound, autocast / {NARROW}" not in printed
    assert printed.count("out of memory") == 2
    assert path.read_text().count('"form"') == 2 * len(FORMS)
