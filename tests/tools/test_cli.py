"""The command line: the tables and JSON of each command, and how each mistake ends in one line."""

import json
import math
import pathlib
import re
import shlex
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from typer.testing import CliRunner

import mpx
from mpx.doctor import Diagnosis
from mpx.tools.cli import given
from mpx.tools.cli.errors import CommandError
from mpx.tools.doctor.environment import Environment
from mpx.tools.plan import STANDARD_RECIPES
from mpx_cli import app

ROOT = pathlib.Path(__file__).parents[2]
COMMANDS = ("doctor", "plan", "explain", "program", "report")

TRAIN = """
import jax, jax.numpy as jnp, optax
import mpx
print("noise on import")

class Half:
    def make(): return {"w": jnp.zeros((16, 4), jnp.bfloat16)}

def init():
    print("noise while it is traced")
    return {"w": jnp.zeros((16, 4)), "b": jnp.zeros(4)}

def loss(w, x): return jnp.sum(x @ w)

def step(batch):
    step = jax.jit(lambda w, x: w - jax.grad(loss)(w, x), donate_argnums=0)
    return step, (jax.ShapeDtypeStruct((16, 4), jnp.float32), jax.ShapeDtypeStruct((batch, 16), jnp.float32))

def arguments(): return jnp.ones((16, 4), jnp.float32), jnp.ones((8, 16), jnp.float32)
def one_argument(): return jnp.ones((16, 4), jnp.float32)
def square(w): return jnp.sum(w.T @ w)
def huge(): return jnp.zeros((10**6, 10**6))
def broken(): return {"w": jnp.zeros(3) + jnp.zeros(4)}
def leaves(): raise SystemExit("no GPU")
def no_step(batch): return batch

momentum = optax.sgd(0.1, momentum=0.9)
def adam(): return optax.adam(0.1)
lowered = mpx.autocast(loss, "bf16")
number = 3
"""
GRADIENTS = {"w": np.float32([2.0**-30, 2.0**-8]), "b": np.float32([2.0**-20, 2.0**-10])}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Work in a folder with the files that the examples of the help texts name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("MPX_DEBUG", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "train.py").write_text(TRAIN)
    np.savez("gradients.npz", **GRADIENTS)
    return tmp_path


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="mpx")


def succeeded(*arguments):
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result


def as_json(*arguments):
    """Return the JSON of a command, which must be all that is on standard output, without NaN."""

    def refuse(name):
        raise AssertionError(f"{name} is not in JSON")

    return json.loads(succeeded(*arguments, "--json").stdout, parse_constant=refuse)


def plan_of(recipe, *arguments):
    return as_json("plan", *arguments, "--recipe", recipe)["plans"][recipe]


def error_of(*arguments):
    """Return the one line on standard error of a command that fails."""
    result = run(*arguments)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    (line,) = [line for line in result.stderr.splitlines() if not line.startswith("noise")]
    assert line.startswith("Error: ")
    assert "mpx_cli" not in line  # a line of the command line itself is not the user's
    return line


# The application.


@pytest.mark.parametrize("command", [(), *[(name,) for name in COMMANDS]], ids=" ".join)
def test_the_example_of_each_help_text_runs_and_every_command_has_json(command):
    text = " ".join(succeeded(*command, "--help").stdout.split())
    assert text == " ".join(succeeded(*command, "-h").stdout.split())
    assert "--json" in text
    assert not re.search(r"--(?!help)[a-z]+ <bool>", text)  # a flag takes no value
    example = re.search(r"Example: mpx (.+)$", text)
    assert example is not None
    result = run(*shlex.split(example[1]))
    assert result.exit_code in ((0, 3) if command == ("doctor",) else (0,)), result.output
    assert result.stdout.strip()
    assert "\x1b" not in result.stdout


def test_the_version_and_wrong_usage_have_codes_of_their_own():
    assert succeeded("--version").stdout == f"mpx {mpx.__version__}\n"
    for arguments in (["nothing"], ["plan"], ["program", "x.py:f", "--batch", "0"]):
        assert run(*arguments).exit_code == 2


def process(code, *arguments):
    """Run a program that imports the command line of this checkout, in a new process."""
    command = f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}"
    return subprocess.run([sys.executable, "-c", command, *arguments], capture_output=True, text=True)


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_typer_or_rich_it_says_in_one_line_how_to_get_them(package):
    done = process(f"sys.modules[{package!r}] = None; import mpx_cli")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "Error: the command line needs Typer and Rich: pip install typer rich\n"


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "-h"]], ids=" ".join)
def test_help_is_shown_without_jax(arguments):
    """An import of JAX takes most of a second."""
    done = process("sys.modules['jax'] = None; import mpx_cli; mpx_cli.main()", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage: mpx" in done.stdout


def test_the_module_runs_and_writes_no_colours_into_a_pipe():
    done = process("import runpy; runpy.run_module('mpx', run_name='__main__')", "plan", "7B", "--recipe", "f32")
    assert (done.returncode, done.stderr) == (0, "")
    assert "7,000,000,000 parameters" in done.stdout
    assert "\x1b" not in done.stdout


# Doctor.


@pytest.mark.parametrize(
    ("changes", "exit_code"), [({}, 0), ({"failure": "no GPU"}, 1), ({"autocast_narrows": False}, 3)]
)
def test_the_doctor_says_its_verdict_or_all_of_it_and_exits_with_its_code(monkeypatch, changes, exit_code):
    given_flags = []
    diagnosis = Diagnosis(Environment({"jax": "1"}, False, "mpx"), devices={"GPU": 1}, seconds=math.inf, **changes)

    def examine(*, quick):
        given_flags.append(quick)
        return diagnosis

    monkeypatch.setattr("mpx.doctor.examine", examine)
    for flags, text in {(): diagnosis.verdict, ("--quick",): diagnosis.verdict, ("--full",): "System"}.items():
        result = run("doctor", *flags)
        assert result.exit_code == exit_code
        assert text.splitlines()[0] in result.stdout
        assert ("System" in result.stdout) == (flags == ("--full",))
    assert json.loads(run("doctor", "--json").stdout) == diagnosis.as_dict() | {"seconds": None}
    assert given_flags == [False, True, False, False]


# Plan.


def test_numbers_of_parameters_and_memories_have_units():
    counts = {"124M": 124 * 10**6, "7B": 7 * 10**9, "70e9": 70 * 10**9, "1.3b": 1_300_000_000, "1_000": 1000}
    sizes = {"80GB": 80 * 10**9, "80GiB": 80 * 2**30, "80e9B": 80 * 10**9, "1.5 MB": 1_500_000, "512KiB": 2**19}
    assert {text: given.parameters(text) for text in counts} == counts
    assert {text: given.memory_bytes(text) for text in sizes} == sizes
    for text in ("", "B", "7Q", "1500.5", "0", "-7B", "1e99", "9" * 40, "nan", "7 7"):
        with pytest.raises(CommandError, match="is not a number of parameters such as 124M, 7B or 70e9"):
            given.parameters(text)


def test_the_plans_are_those_of_the_library():
    expected = {name: plan.as_dict() for name, plan in mpx.compare_plans(7_000_000_000).plans.items()}
    found = as_json("plan", "7B")
    assert found["plans"] == expected
    keys = {"model", "rule", "plans", "usable_bytes", "fits", "largest_models"}
    assert set(found) == keys  # whatever the options are
    chosen = ("f32", "bf16-kahan")
    assert as_json("plan", "7B", "--recipe", "F32", "--recipe", "BF16-Kahan")["plans"] == {
        name: expected[name] for name in chosen
    }


@pytest.mark.parametrize(
    "options", ["", "--memory 80GB", "--devices 8", "--devices 8 --memory 1TB", "--devices 64 --fsdp --memory 80GB"]
)
def test_no_line_of_a_plan_is_folded_at_80_columns(monkeypatch, options):
    monkeypatch.setenv("COLUMNS", "80")
    title, header, *lines = succeeded("plan", "70B", *options.split()).stdout.splitlines()
    assert title.startswith("Memory to train 70,000,000,000 parameters, in GB")
    for name, line in zip(STANDARD_RECIPES, lines, strict=False):
        assert line.startswith(f"{name}  ")
        assert len(line.rstrip()) == len(header.rstrip()) <= 80
    text = succeeded("plan", "70B", "--recipe", "bf16-split-8bit", *options.split()).stdout
    assert "second moment" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # A function is not run. Parameters take 4 bytes each and so do gradients, in whatever dtype it makes them.
        ("train.py:init --rule sgd", {"parameters": 68, "bytes_a_parameter": 8}),
        ("train.py:Half.make --rule sgd", {"parameters": 64, "bytes_a_parameter": 8}),
        ("train:init --rule sgd", {"parameters": 68, "bytes_a_parameter": 8}),
        ("train.py:huge --rule sgd", {"parameters": 10**12, "bytes_a_parameter": 8}),
        # Each moment is a float32 number a parameter, and each count 4 bytes.
        ("1000 --rule lion", {"state_bytes": 4004}),
        ("1000 --rule adamw", {"state_bytes": 8004}),
        ("1000 --rule train.py:momentum", {"state_bytes": 4000}),
        ("1000 --rule train.py:adam", {"state_bytes": 8004}),
        # The first axis divides the state, of parameters rounded up to 256 for each of all devices.
        ("1024 --devices 2", {"state_bytes_a_device": 1024 * 8 // 2 + 4}),
        ("1024 --devices data=4", {"state_bytes_a_device": 1024 * 8 // 4 + 4}),
        ("1024 --devices replica=8,model=2", {"state_bytes_a_device": 4096 * 8 // 8 + 4}),
    ],
)
def test_the_model_the_optimizer_and_the_mesh_are_those_that_were_named(arguments, expected):
    plan = plan_of("f32", *arguments.split())
    assert {name: plan[name] for name in expected} == expected


def test_gradients_are_those_inside_of_a_step_unless_others_are_asked_for():
    gradients = lambda *options: [
        row["bytes"] for row in plan_of("bf16-kahan", "1000", *options)["rows"] if row["name"] == "gradients"
    ]
    assert (gradients(), gradients("--gradient-dtype", "f32")) == ([2000], [4000])
    assert "Gradients are those inside one jitted step" in succeeded("plan", "1000").stdout
    assert "inside" not in succeeded("plan", "1000", "--gradient-dtype", "f32").stdout


def test_a_memory_asks_what_fits_and_for_the_largest_model_of_each_recipe():
    """AdamW in float32 takes 16 bytes a parameter and a count of 4; with bfloat16 moments and Kahan summation 10.

    Of 80 GB JAX takes 60 by default: 7 billion parameters fit at 8 bytes and fewer.
    """
    found = as_json("plan", "7B", "--memory", "80GB")
    assert found["usable_bytes"] == 60_000_000_000
    assert found["largest_models"]["f32"] == (60_000_000_000 - 4) // 16
    assert found["fits"] == {name: "8bit" in name or "4bit" in name for name in STANDARD_RECIPES}
    text = succeeded("plan", "7B", "--memory", "80GB").stdout
    _, header, f32, *lines = map(str.split, text.splitlines())
    assert header == ["recipe", "total", "a", "param", "fits", "largest", "model"]
    assert f32 == ["f32", "112.0", "16.00", "no", "3.750B"]
    assert ["bf16-kahan", "70.00", "10.00", "no", "6.000B"] in lines
    assert "fits into 75% of the memory" in text
    more = as_json("plan", "7B", "--memory", "80GB", "--memory-fraction", "0.9")
    assert more["fits"]["bf16-kahan"]
    assert more["largest_models"]["f32"] == (72_000_000_000 - 4) // 16


def test_fsdp_divides_all_of_it_and_without_it_parameters_and_gradients_are_whole():
    """Float32 parameters, gradients and both moments, over 64 devices; 70 billion parameters then fit into 80 GB."""
    plan = as_json("plan", "70B", "--devices", "64", "--fsdp", "--memory", "80GB")
    assert plan["plans"]["f32"]["total_bytes_a_device"] == pytest.approx(16 * 70e9 / 64, rel=1e-6)
    assert all(plan["fits"].values())
    whole = as_json("plan", "70B", "--devices", "64", "--memory", "80GB")
    assert whole["plans"]["f32"]["total_bytes_a_device"] == pytest.approx((8 + 8 / 64) * 70e9, rel=1e-6)
    assert not any(whole["fits"].values())
    of_tree = plan_of("f32", "train.py:huge", "--rule", "sgd", "--devices", "4", "--fsdp")
    assert of_tree["total_bytes_a_device"] == 8 * 10**12 // 4
    assert "--devices 64" in error_of("plan", "70B", "--fsdp")


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ("--devices 8", ["mpx.zero1(tx, mesh)", "mpx.data_parallel(grad_fn, mesh, scatter=True)"]),
        ("--devices 8 --fsdp", ["everywhere = lambda w: jax.sharding.reshard(w, P())"]),
    ],
)
def test_several_devices_send_what_the_table_says_and_the_code_is_for_them(options, code):
    """Of weights or new parameters 4 or 2 bytes, and of gradients 4."""
    text = succeeded("plan", "7B", "--memory", "1TB", *options.split()).stdout
    _, header, *lines = map(str.split, text.splitlines())
    rows = {line[0]: line[3] for line in lines[: len(STANDARD_RECIPES)]}
    assert header[:5] == ["recipe", "total", "a", "param", "sends"]
    assert (rows["f32"], rows["bf16-split"]) == ("8.000", "6.000")
    assert all(line in text for line in code)
    assert ("rematerialised" in text) == ("--fsdp" in options)
    plan = plan_of("bf16-split", "7B", *options.split())
    assert plan["gathered_bytes_a_parameter"] == pytest.approx(2)
    assert plan["summed_bytes_a_parameter"] == pytest.approx(4)
    assert "make_mesh" not in succeeded("plan", "7B", "--memory", "1TB").stdout
    assert "gathers 2.000 bytes a parameter, and adds up 4.000" in " ".join(
        succeeded("plan", "7B", "--recipe", "bf16-split", *options.split()).stdout.split()
    )


def test_a_step_is_reported_with_shapes_or_for_batch_sizes_with_the_largest_that_fits():
    command = ("program", "train.py:step", "--memory", "4KB")
    found = as_json(*command, "--batch", 8, "--batch", 4)
    assert [report["argument_bytes"] for report in found["reports"].values()] == [4 * 16 * (4 + n) for n in (4, 8)]
    largest = found["largest_batch"]
    fits, too_large = as_json(*command, "--batch", largest, "--batch", largest + 1)["reports"].values()
    assert fits["peak_bytes"] <= 4000 < too_large["peak_bytes"]
    assert "The largest batch that fits" in succeeded(*command, "--batch", 4).stdout
    one = as_json("program", "train.py:loss", "f32[16,4]", "f32[8,16]")
    assert one["flops"] == {"f32": 2 * 8 * 16 * 4}


# The user's own code.


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def init(:", "SyntaxError: "),
        ("import no_such_package", "given.py:1 (<module>): `import no_such_package` raised ModuleNotFoundError"),
        ("x = 1\nraise SystemExit('no GPU')", "given.py:2 (<module>): `raise SystemExit('no GPU')` raised SystemExit"),
        ("import jax.numpy as jnp\ndef init():\n    return jnp.zeros(3) + jnp.zeros(4)",
         "given.py:3 (init): `return jnp.zeros(3) + jnp.zeros(4)` raised TypeError: add got incompatible shapes"),
        ("def init(): return {'w': 'text'}", "there are no floating-point numbers in the model"),
        ("def init(size): return size", "missing 1 required positional argument: 'size'"),
    ],
)  # fmt: skip
def test_an_error_in_the_users_file_names_its_line(folder, text, message):
    (folder / "given.py").write_text(text)
    assert message in error_of("plan", "given.py:init")


def test_a_traceback_is_there_for_those_who_ask_and_prints_are_not_on_standard_output(monkeypatch):
    result = succeeded("plan", "train.py:init", "--json")
    assert "noise" not in result.stdout
    assert "noise while it is traced" in result.stderr
    monkeypatch.setenv("MPX_DEBUG", "1")
    assert isinstance(run("plan", "train.py:broken").exception, TypeError)


def test_files_beside_the_users_file_can_be_imported(folder):
    (folder / "inside").mkdir()
    (folder / "inside" / "sizes_of_model.py").write_text("width = 3")
    (folder / "inside" / "a-model.py").write_text(
        "import jax.numpy as jnp, sizes_of_model\ndef init(): return jnp.zeros(sizes_of_model.width)"
    )
    assert plan_of("f32", "inside/a-model.py:init")["parameters"] == 3


# Explain.

SHAPES = ("f32[16,4]", "f32[8,16]")
LOSS = ("explain", "train.py:loss", *SHAPES, "--policy")


def test_shapes_are_in_the_notation_that_mpx_prints_and_not_in_that_of_numpy():
    """NumPy reads `f8` as float64 and `f4` as float32."""
    expected = {
        "bf16[768,3072]": ((768, 3072), "bfloat16"),
        "float32[3, 5]": ((3, 5), "float32"),
        "i32[8]": ((8,), "int32"),
        "u8[8]": ((8,), "uint8"),
        "bool[1]": ((1,), "bool"),
        "f16[]": ((), "float16"),
        "f16": ((), "float16"),
        "float8_e4m3fn[2]": ((2,), "float8_e4m3fn"),
    }
    found = {text: given.shape(text) for text in expected}
    assert {text: (x.shape, x.dtype.name) for text, x in found.items()} == expected
    for text in "|f17[3]|f8[3]|f4[3]|f32[a]|f32[8|[8]|f32[8 8]|f32[-1]|object[3]|S3[3]".split("|"):
        with pytest.raises(CommandError, match="is not a shape such as"):
            given.shape(text)


def test_shapes_of_64_bits_need_64_bit_types():
    """Without them jax would trace float32, and the explanation would be of another program."""
    with (
        jax.enable_x64(False),
        pytest.raises(CommandError, match=r"'f64\[2\]' needs 64-bit types; set the env.* JAX_EN"),
    ):
        given.shape("f64[2]")
    with jax.enable_x64(True):
        assert given.shape("f64[16,4]").dtype == np.float64


@pytest.mark.parametrize("policy", ["bf16", "params=f32,compute=bf16"])
def test_a_function_is_explained_by_its_lines(policy):
    """A product takes 2 x 8 x 16 x 4 operations."""
    (row,) = as_json(*LOSS, policy)["contractions"]
    assert re.fullmatch(r"train\.py:\d+ \(loss\)", row["where"])
    assert (row["shapes"], row["runs_in"], row["flops"]) == ("f32[8,16] f32[16,4]", "bf16", 2 * 8 * 16 * 4)
    assert "100.0% of their FLOPs narrowed" in succeeded(*LOSS, policy).stdout


@pytest.mark.parametrize(
    ("arguments", "contractions", "share"),
    [
        (("square", "f32[16,4]", "--policy", "f16", "--grad"), range(2, 9), 1),  # a gradient has products of its own
        (("loss", "--arguments", "train.py:arguments", "--policy", "bf16"), [1], 1),
        (("square", "--arguments", "train.py:one_argument", "--policy", "bf16"), [1], 1),
        (("lowered", *SHAPES), [1], 1),  # an autocast function has its own policy
        (("jnp.sum", "f32[4]", "--policy", "bf16"), [0], None),
    ],
    ids=lambda given: given[0] if isinstance(given, tuple) else None,
)
def test_arguments_may_come_from_a_function_and_the_policy_from_autocast(arguments, contractions, share):
    function, *rest = arguments
    explained = as_json("explain", f"train.py:{function}", *rest)
    assert sum(row["count"] for row in explained["contractions"]) in contractions
    assert explained["narrowed_share"] == share


# Report.


def test_arrays_are_reported_as_the_library_reports_them():
    expected = mpx.underflow_report(GRADIENTS, "f16", loss_scale=4.0).as_dict()
    found = as_json("report", "gradients.npz", "--loss-scale", "4", "--dtype", "f16")
    assert found == {"file": "gradients.npz", "notes": [], "report": json.loads(json.dumps(expected))}
    assert expected["verdict"] in succeeded("report", "gradients.npz", "--loss-scale", 4).stdout
    assert as_json("report", "gradients.npz", "--dtype", "bf16")["report"]["recommended_scale"] == 1


@pytest.mark.parametrize("suffix", [".npz", ".npy"])
def test_bfloat16_arrays_whose_dtype_numpy_has_lost_are_read_with_a_note(suffix):
    array = np.array([2.0**-30, 1.0], ml_dtypes.bfloat16)
    np.savez("x.npz", x=array)
    np.save("x.npy", array)
    assert np.load("x.npy").dtype == np.dtype("V2")  # what there is to see
    found = as_json("report", f"x{suffix}")
    (leaf,) = found["report"]["leaves"]
    assert (leaf["path"], leaf["zero"], found["report"]["histogram"]) == ("x", 0.5, {"-30": 1, "0": 1})
    assert found["notes"] == ["NumPy has lost the dtype of x: read as bfloat16."]
    assert "Note: NumPy has lost the dtype of x" in succeeded("report", f"x{suffix}").stderr


def safetensors_of(**tensors):
    """Return the bytes of a type, a shape and a content by name, as the page of the format describes them."""
    header, body = {}, b""
    for name, (kind, shape, content) in tensors.items():
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [len(body), len(body) + len(content)]}
        body += content
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def test_safetensors_are_read(folder):
    """The two bytes of bfloat16 are the upper half of float32. Integers and 8-bit floats are left out."""
    numbers = np.float32([2.0**-30, 2.0**-8])
    narrow = (numbers.view(np.uint32) >> 16).astype(np.uint16)
    tensors = {"wide": ("F32", [2, 1], numbers.tobytes()), "narrow": ("BF16", [2], narrow.tobytes())}
    others = {"ids": ("I64", [3], np.arange(3).tobytes()), "codes": ("F8_E4M3", [2], bytes(2))}
    (folder / "x.safetensors").write_bytes(safetensors_of(**tensors, **others))
    leaves = as_json("report", "x.safetensors")["report"]["leaves"]
    found = {leaf["path"]: (leaf["largest"], leaf["zero"]) for leaf in leaves}
    assert found == {"wide": (2.0**-8, 0.5), "narrow": (2.0**-8, 0.5)}


def test_a_checkpoint_of_orbax_is_read_and_one_of_several_must_be_named(folder, monkeypatch):
    tree = {"layer": {"w": jnp.asarray([2.0**-30, 1.0], jnp.bfloat16)}, "step": jnp.asarray(3)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "checkpoints" / "10" / "default", tree)
    for place in ("checkpoints", "checkpoints/10/default"):
        (leaf,) = as_json("report", place)["report"]["leaves"]
        assert (leaf["path"], leaf["zero"]) == ("layer/w", 0.5)
    (folder / "checkpoints" / "20").mkdir()
    (folder / "checkpoints" / "20" / "_METADATA").write_text("{}")
    message = error_of("report", "checkpoints")
    assert "several checkpoints; give one: checkpoints/10/default, checkpoints/20" in message
    assert "the checkpoint checkpoints/20 cannot be read" in error_of("report", "checkpoints/20")
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    assert "need `pip install orbax-checkpoint`" in error_of("report", folder)


PAIR = safetensors_of(x=("F32", [2], bytes(8)))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.npz", b"", "x.npz cannot be read as .npz: BadZipFile: File is not a zip file"),
        ("x.npz", b"PK\x03\x04 and no more", "x.npz cannot be read as .npz: BadZipFile"),
        ("x.npy", b"no array", "x.npy cannot be read as .npy: the magic string is not correct"),
        ("x.npy", b"\x93NUMPY\x01\x00\x10\x00{", "x.npy cannot be read as .npy"),
        ("x.safetensors", b"123", "x.safetensors cannot be read as .safetensors: SafetensorError: "),
        ("x.safetensors", b"\x02" + bytes(7) + b"[]", "x.safetensors cannot be read"),
        ("x.safetensors", PAIR.replace(b'"F32"', b'"F3" '), "unknown variant `F3`"),
        ("x.safetensors", PAIR.replace(b"[2]", b"[3]"), "x.safetensors cannot be read"),
        ("x.bin", b"", "x.bin is not a .npz, .npy or .safetensors file"),
    ],
)
def test_a_damaged_file_is_one_line(folder, name, content, message):
    (folder / name).write_bytes(content)
    assert message in error_of("report", name)


def test_a_file_of_other_arrays_is_refused_and_objects_are_not_run():
    np.savez("objects.npz", x=np.array([{}], object))
    assert "Object arrays cannot be loaded" in error_of("report", "objects.npz")
    np.savez("integers.npz", x=np.arange(3))
    assert "the tree has no floating array" in error_of("report", "integers.npz")


# Mistakes.


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("plan 7Q", "'7Q' is not a number of parameters"),
        ("plan 7", "'7' would be 7 parameters. Did you mean 7B (10^9) or 7M (10^6)?"),
        ("plan 0.5", "Did you mean 0.5B (10^9)"),
        ("plan 7B --memory 80", "'80' is not a memory with its unit, such as 80GB"),
        ("plan 7B --devices 9999999999", "the mesh '9999999999' has more than 1,048,576 devices"),
        ("plan 7B --recipe fp4", "there is no recipe 'fp4'. The standard recipes are: f32; bf16-autocast; bf16-split;"),
        ("plan 7B --rule adamwq", "Optax has no rule 'adamwq' that needs at most a learning rate. Write a function"),
        ("plan 7B --rule GradientTransformation", "Optax has no rule 'GradientTransformation' that needs"),
        ("plan 7B --rule chain", "Optax has no rule 'chain' that needs at most a learning rate"),
        ("plan 7B --rule cosine_decay_schedule", "Optax has no rule 'cosine_decay_schedule' that needs"),
        ("plan 7B --rule train.py:number", "needs an Optax gradient transformation, but got int"),
        ("plan 7B --devices 8,2", "'8,2' is not a mesh such as data=8,model=2"),
        ("program train.py:no_step --batch 8", "must return the step, a tuple of its arguments"),
        ("program train.py:loss f32[16,4] --batch 8", "give either shapes or --batch"),
        ("program train.py:one_argument --donate 0", "--donate does nothing without shapes"),
        ("program train.py:loss --target h300", "must be one of a100, h100, h200, b200, v5e, v6e"),
        ("plan nofile.py:init", "there is no file nofile.py"),
        ("plan nomodule.inside:init", "No module named 'nomodule'"),
        ("plan ..train:init", "neither file.py:function nor module:function"),
        ("plan train.py:", "'train.py:' is not a function, but module"),
        ("plan train.py:int", "train.py has no 'int'. It has Half, init"),
        ("plan train.py:leaves", "raised SystemExit: no GPU"),
        ("explain train.py:loss --policy bf16", "give either the shapes of the arguments, or --arguments"),
        ("explain train.py:loss f32[3] --arguments train.py:init", "give either the shapes"),
        ("explain train.py:loss f32[16,4] f32[8,16]", "`explain` needs a policy"),
        (
            "explain train.py:lowered f32[16,4] f32[8,16] --policy bf16",
            "`explain` takes no policy or rules for a function",
        ),
        ("explain train.py:lowered f32[16,4] f32[8,16] --grad", "`explain` needs a policy"),
        ("explain train.py:loss f32[16,4] f32[8,16] --policy params=bf15", "Unknown dtype 'bf15' in policy"),
        ("explain train.py:loss f32[16,4] --policy bf16", "missing 1 required positional argument: 'x'"),
        ("explain train.py:loss f32[16,4] f32[8,15] --policy bf16", "(loss): `def loss(w, x)"),
        ("report nothing.npz", "there is no file nothing.npz"),
        ("report .", "the folder . holds no Orbax checkpoint"),
        ("report gradients.npz --loss-scale 3", "`loss_scale` must be a loss scale or a number"),
    ],
)
def test_a_mistake_ends_in_one_line(command, message):
    assert message in error_of(*command.split())


def test_a_number_that_looks_like_an_option_is_asked_about():
    result = process("import mpx_cli; sys.argv = ['mpx', 'plan', '-7B']; mpx_cli.main()")
    assert result.returncode == 2
    assert "-7B looks like an option. Did you mean 7B?" in result.stderr


def test_a_fraction_of_no_memory_is_refused_and_what_does_not_fit_is_said_of_the_recipes_asked_about():
    assert "--memory-fraction does nothing without --memory" in error_of("plan", "7B", "--memory-fraction", "0.9")
    one = succeeded("plan", "7B", "--recipe", "f32", "--memory", "80GB").stdout
    assert "It does not fit: try another recipe, or shard parameters too" in " ".join(one.split())
    sharded = succeeded("plan", "7000B", "--devices", "8", "--fsdp", "--memory", "80GB").stdout
    assert "No recipe fits: take more devices." in " ".join(sharded.split())
