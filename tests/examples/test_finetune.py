"""The command `examples.finetune`: what it reads is what it trains, and what it writes
is what it trained.
"""

import json
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from orbax.checkpoint import v1 as ocp
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

import mpx
from examples import finetune

# Optax adds arrays of two dtypes, and Flax's norms arrays of two ranks.
pytestmark = [
    pytest.mark.optax_promotion,
    pytest.mark.slow,  # a real model is trained
    # A checkpoint is read without a model here, as nested dictionaries, where its own
    # files say.
    pytest.mark.filterwarnings(
        "ignore:Sharding info not provided when restoring:UserWarning"
    ),
]

WIDTH, SIZES = (
    64,
    {
        "vocab_size": 256,
        "n_positions": 16,
        "n_embd": 64,
        "n_layer": 1,
        "n_head": 2,
    },
)
CONFIG = {"model_type": "gpt2", "activation_function": "gelu_new"} | SIZES
BLOCK = {
    "attn.c_attn": (1, 3),
    "attn.c_proj": (1, 1),
    "mlp.c_fc": (1, 4),
    "mlp.c_proj": (4, 1),
}


def make_tensors():
    """Return weights of a GPT-2 of one block in float32, but for a norm in bfloat16,
    and a mask as in older files.
    """
    shapes = {"wte.weight": (256, WIDTH), "wpe.weight": (16, WIDTH)}
    for name in ("ln_f", "h.0.ln_1", "h.0.ln_2"):
        shapes |= {f"{name}.weight": (WIDTH,), f"{name}.bias": (WIDTH,)}
    for name, (inputs, outputs) in BLOCK.items():
        shapes |= {
            f"h.0.{name}.weight": (inputs * WIDTH, outputs * WIDTH),
            f"h.0.{name}.bias": (outputs * WIDTH,),
        }
    generator = np.random.default_rng(0)
    tensors = {
        name: generator.normal(scale=0.1, size=shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    tensors["ln_f.weight"] = tensors["ln_f.weight"].astype(ml_dtypes.bfloat16)
    return tensors | {"h.0.attn.bias": np.tril(np.ones((1, 1, 16, 16), np.float32))}


def write(folder, tensors, config=CONFIG):
    """Write a file of weights and what describes it, and a text; return the file."""
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "text.txt").write_text(
        "".join(f"line of a text {number}\n" for number in range(6000))
    )
    return folder / "model.safetensors"


def run(file, out, **options):
    options = {
        "text": file.parent / "text.txt",
        "tokenizer": "bytes",
        "context": 16,
        "out": out,
    } | options
    pairs = (
        (f"--{name.replace('_', '-')}", str(value)) for name, value in options.items()
    )
    return CliRunner().invoke(
        finetune.app, [str(file), *(part for pair in pairs for part in pair)]
    )


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """Return the folder of a run of four steps in 8 bits, whose file has a prefix, as
    one of the whole model has.
    """
    folder = tmp_path_factory.mktemp("finetune")
    file = write(
        folder / "gpt2",
        {f"transformer.{name}": x for name, x in make_tensors().items()},
    )
    result = run(
        file, folder / "out", recipe="bf16-split-8bit", steps=4, learning_rate=1e-3
    )
    assert result.exit_code == 0, result.output
    return folder / "out"


@pytest.fixture(scope="module")
def checkpoint(tuned):
    return ocp.load(tuned / "checkpoint")


def masters_of(checkpoint, *path):
    """Return the float32 weight that bfloat16 and the 16 low bits of a checkpoint make,
    by NumPy.
    """
    params, low = checkpoint["params"], checkpoint["opt_state"]["master"]
    for key in path:
        params, low = params[key], low[key]
    return np.asarray(mpx.formats.join_f32(jnp.asarray(params), jnp.asarray(low)))


def logits_of(tensors, tokens, parts=(0, 1, 2)):
    """Return GPT-2's logits of a sequence in float64; `parts` is the order of query,
    key and value.
    """
    w = {name: x.astype(np.float64) for name, x in tensors.items()}
    linear = lambda name, x: x @ w[f"h.0.{name}.weight"] + w[f"h.0.{name}.bias"]
    softmax = lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True)
    gelu = lambda x: x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2

    def norm(name, x):
        centered = x - x.mean(-1, keepdims=True)
        x = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-5)
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    x = w["wte.weight"][tokens] + w["wpe.weight"][: len(tokens)]
    read = np.split(linear("attn.c_attn", norm("h.0.ln_1", x)), 3, axis=-1)
    # Two heads.
    query, key, value = (np.stack(np.split(read[i], 2, axis=-1)) for i in parts)
    scores = query @ key.swapaxes(1, 2) / np.sqrt(WIDTH // 2)
    scores = np.where(np.tril(np.ones(scores.shape[1:])), scores, -np.inf)
    x = x + linear(
        "attn.c_proj", np.concatenate(list(softmax(scores) @ value), axis=-1)
    )
    x = x + linear("mlp.c_proj", gelu(linear("mlp.c_fc", norm("h.0.ln_2", x))))
    return norm("ln_f", x) @ w["wte.weight"].T


def test_the_model_is_gpt2(tmp_path):
    published = finetune.read(write(tmp_path / "gpt2", make_tensors()))
    weights = jax.tree.map(
        lambda name: jnp.asarray(published.tensors[name], "float32"), published.names
    )
    tokens = np.arange(16) * 7 % 256
    logits = np.asarray(
        nnx.merge(published.graphdef, weights)(jnp.asarray(tokens)[None])[0]
    )
    error = lambda **order: np.abs(
        logits - logits_of(make_tensors(), tokens, **order)
    ).max()
    assert error() < 1e-5
    assert error(parts=(0, 2, 1)) > 1e-3


def test_what_is_saved_is_what_was_trained_to_the_bit(tuned, checkpoint):
    before, after = make_tensors(), load_file(tuned / "model.safetensors")
    assert {
        name.removeprefix("transformer."): (x.shape, x.dtype)
        for name, x in after.items()
    } == {name: (x.shape, x.dtype) for name, x in before.items()}
    for name, last in {
        "wte": "embedding",
        "h.0.attn.c_attn": "kernel",
        "ln_f": "scale",
    }.items():
        saved, trained = (
            after[f"transformer.{name}.weight"],
            masters_of(checkpoint, *name.split("."), last),
        )
        assert saved.tobytes() == trained.astype(saved.dtype).tobytes(), name
        assert (saved != before[f"{name}.weight"]).any(), name
    assert (after["transformer.h.0.attn.bias"] == before["h.0.attn.bias"]).all()
    assert json.loads((tuned / "config.json").read_text()) == CONFIG


def test_the_state_of_the_recipe_is_in_the_checkpoint(checkpoint):
    dtypes = {
        jax.tree_util.keystr(path, simple=True, separator="/"): str(leaf.dtype)
        for path, leaf in jax.tree.leaves_with_path(checkpoint)
    }
    assert dtypes["params/wte/embedding"] == "bfloat16"
    assert dtypes["opt_state/master/wte/embedding"] == "uint16"
    of_mu = {
        name.split("/mu/")[1]: dtype for name, dtype in dtypes.items() if "/mu/" in name
    }
    assert of_mu["wte/embedding/codes"] == "int8"
    assert of_mu["ln_f/scale"] == "float32"
    assert [
        int(x) for name, x in optax.tree.get_all_with_path(checkpoint, "count")
    ] == [4, 4]


@pytest.mark.parametrize(
    ("change", "config", "said"),
    [
        (
            lambda x: {**x, "wte.weight": x["wte.weight"][:9]},
            CONFIG,
            "wte.weight is (9, 64), not (256, 64)",
        ),
        (
            lambda x: {k: v for k, v in x.items() if k != "ln_f.bias"},
            CONFIG,
            "ln_f.bias is missing, not (64,)",
        ),
        (
            lambda x: {**x, "lm_head.weight": x["ln_f.bias"]},
            CONFIG,
            "lm_head.weight is (64,), not in GPT-2",
        ),
        (
            lambda x: x,
            {**CONFIG, "model_type": "llama"},
            "does not give the sizes of a GPT-2",
        ),
        (
            lambda x: x,
            {**CONFIG, "n_layer": 2},
            "h.1.attn.c_attn.bias is missing, not (192,)",
        ),
    ],
    ids=[
        "another shape",
        "a tensor less",
        "a head of its own",
        "another model",
        "another depth",
    ],
)
def test_a_wrong_file_is_refused_in_words(tmp_path, change, config, said):
    result = run(
        write(tmp_path / "gpt2", change(make_tensors()), config), tmp_path / "out"
    )
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_cut_off_or_alone_is_refused_in_words(tmp_path):
    file = write(tmp_path / "gpt2", make_tensors())
    file.write_bytes(file.read_bytes()[:-100])
    assert "is not a whole file of safetensors" in " ".join(
        run(file, tmp_path / "out").output.split()
    )
    save_file(make_tensors(), file)
    (tmp_path / "gpt2" / "config.json").unlink()
    assert re.search(
        "no config.json beside .*model.safetensors",
        " ".join(run(file, tmp_path / "out").output.split()),
    )
