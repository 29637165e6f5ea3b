"""The command line: what each command says, in tables and JSON, and how each mistake ends in one line."""

import dataclasses
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
import typer
from typer.testing import CliRunner

import mpx
from examples.gpt.run_log import Record, RunLog
from mpx.doctor import Diagnosis
from mpx.tools.cli import doctor as doctor_command
from mpx.tools.cli import given
from mpx.tools.cli.app import app
from mpx.tools.cli.errors import CommandError

ROOT = pathlib.Path(__file__).parents[2]
COMMANDS = ("doctor", "plan", "explain", "report")

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

def arguments(): return jnp.ones((16, 4)), jnp.ones((8, 16))
def one_argument(): return jnp.ones((16, 4))
def square(w): return jnp.sum(w.T @ w)
def broken(): return {"w": jnp.zeros(3) + jnp.zeros(4)}
def leaves(): raise SystemExit("no GPU")
def no_step(batch): return batch

momentum = optax.sgd(0.1, momentum=0.9)
def adam(): return optax.adam(0.1)
lowered = mpx.autocast(loss, "bf16")
number = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A working folder with what the examples of the help texts name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("MPX_DEBUG", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "train.py").write_text(TRAIN)
    np.savez("gradients.npz", w=np.float32([2.0**-30, 2.0**-8]), b=np.float32([2.0**-20, 2.0**-10]))
    return tmp_path


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="mpx")


def succeeded(*arguments):
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result


def as_json(*arguments):
    """What a command says in JSON, which must be all that is on standard output, without NaN."""

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(succeeded(*arguments, "--json").stdout, parse_constant=refuse)


def error_of(*arguments):
    """The one line on standard error of a command that fails."""
    result = run(*arguments)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    (line,) = [line for line in result.stderr.splitlines() if not line.startswith("noise")]
    assert line.startswith("Error: ")
    return line


# --- help -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [(), *[(name,) for name in COMMANDS]], ids=" ".join)
def test_the_example_of_each_help_text_runs(command):
    text = " ".join(succeeded(*command, "--help").stdout.split())
    example = re.search(r"Example: mpx (.+)$", text)
    assert example is not None
    result = run(*shlex.split(example[1]))
    assert result.exit_code in ((0, 3) if command == ("doctor",) else (0,)), result.output
    assert result.stdout.strip()
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_json(command):
    assert "--json" in succeeded(command, "--help").stdout


def test_the_version_is_that_of_the_package():
    assert succeeded("--version").stdout == f"mpx {mpx.__version__}\n"


@pytest.mark.parametrize("arguments", [("nothing",), ("plan",), ("plan", "7B", "--batch", "0", "--hlo", "x.py:f")])
def test_wrong_usage_has_its_own_exit_code(arguments):
    assert run(*arguments).exit_code == 2


# --- in processes of their own ----------------------------------------------------------------------------------------


def process(*command):
    return subprocess.run([sys.executable, *command], capture_output=True, text=True)


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_typer_or_rich_it_says_in_one_line_how_to_get_them(package):
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.modules[{package!r}] = None"
    done = process("-c", f"{code}; from mpx.tools.cli import main as c; print('imported'); c.main()")
    assert (done.returncode, done.stdout) == (1, "imported\n")
    assert done.stderr == "Error: the command line needs Typer and Rich: pip install 'mpx-jax[cli]'\n"


def test_the_module_runs_and_writes_no_colours_into_a_pipe():
    done = process("-m", "mpx", "plan", "7B", "--recipe", "f32")
    assert (done.returncode, done.stderr) == (0, "")
    assert "7,000,000,000 parameters" in done.stdout
    assert "\x1b" not in done.stdout


# --- doctor -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [(), ("--quick",)], ids=["timed", "quick"])
@pytest.mark.parametrize("exit_code", [0, 1, 3])
def test_the_doctor_returns_the_exit_code_of_its_diagnosis(monkeypatch, flags, exit_code):
    def examine(*, quick, progress):
        progress("something")
        assert quick == bool(flags)
        kind = type("Diagnosed", (), {"exit_code": exit_code, "as_dict": lambda self: {"rate": math.inf}})
        return kind()

    monkeypatch.setattr(doctor_command, "examine", examine)
    result = run("doctor", *flags, "--json")
    assert result.exit_code == exit_code
    assert json.loads(result.stdout) == {"rate": None}


def test_the_json_of_the_doctor_has_what_a_diagnosis_has(monkeypatch):
    """A diagnosis of a machine without a device, which takes no time."""
    monkeypatch.setattr("mpx.tools.doctor.surroundings.look_at_devices", lambda: 1 / 0)
    result = run("doctor", "--json")
    assert result.exit_code == 1
    assert {field.name for field in dataclasses.fields(Diagnosis)} <= set(json.loads(result.stdout))


# --- plan: what is planned --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "number"),
    [("124M", 124_000_000), ("7B", 7_000_000_000), ("70e9", 70 * 10**9), ("1.3b", 1_300_000_000), ("1_000", 1000)],
)
def test_a_model_may_be_a_number_with_a_suffix(text, number):
    assert given.parameters(text) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [("80GB", 80 * 10**9), ("80GiB", 80 * 2**30), ("80e9", 80 * 10**9), ("1.5 MB", 1_500_000), ("512KiB", 2**19)],
)
def test_a_memory_has_units_of_a_thousand_or_of_1024(text, number):
    assert given.memory_bytes(text) == number


@pytest.mark.parametrize("text", ["", "B", "7Q", "1.5", "0", "-7B", "1e99", "9" * 40, "nan", "7 7"])
def test_what_is_no_number_of_parameters_is_refused(text):
    with pytest.raises(CommandError, match="is not a number of parameters such as 124M, 7B or 70e9"):
        given.parameters(text)


def test_all_standard_recipes_stand_side_by_side():
    text = succeeded("plan", "7B").stdout
    assert all(recipe in text for recipe in mpx.STANDARD_RECIPES)
    plans = as_json("plan", "7B")["plans"]
    assert {name: plan["bytes_a_parameter"] for name, plan in plans.items()} == pytest.approx(
        {name: plan.bytes_a_parameter for name, plan in mpx.compare_plans(7_000_000_000).plans.items()}
    )


def test_one_recipe_is_shown_in_full():
    text = succeeded("plan", "1M", "--recipe", "BF16, split masters").stdout
    assert all(part in text for part in ("low bits", "first moment", "second moment", "16,000,004"))


def test_several_recipes_are_compared():
    assert set(as_json("plan", "1M", "--recipe", "f32", "--recipe", "bf16, Kahan")["plans"]) == {"f32", "bf16, Kahan"}


@pytest.mark.parametrize(
    ("model", "parameters", "bytes_a_parameter"),
    [("train.py:init", 68, 8), ("train.py:Half.make", 64, 8), ("train:init", 68, 8)],
)
def test_a_model_may_be_a_function_in_a_file_or_a_module(model, parameters, bytes_a_parameter):
    """The f32 recipe: a weight, a gradient and no state, whatever the function makes in fewer bits."""
    plan = as_json("plan", model, "--rule", "sgd", "--recipe", "f32")["plans"]["f32"]
    assert (plan["parameters"], plan["bytes_a_parameter"]) == (parameters, bytes_a_parameter)


def test_a_model_of_any_size_is_planned_without_making_it(folder):
    (folder / "huge.py").write_text("import jax.numpy as jnp\ndef init(): return jnp.zeros((10**6, 10**6))")
    assert as_json("plan", "huge.py:init", "--recipe", "f32")["plans"]["f32"]["total_bytes"] > 15e12


@pytest.mark.parametrize(
    ("rule", "state"),
    [
        ("adamw", 8), ("sgd", 0), ("lion", 4), ("muon", None), ("train.py:momentum", 4), ("train.py:adam", 8),
    ],
)  # fmt: skip
def test_a_rule_may_be_any_of_optax_or_one_of_the_users(rule, state):
    """Bytes of state a parameter: a float32 number for each moment."""
    plan = as_json("plan", "1M", "--rule", rule, "--recipe", "f32")["plans"]["f32"]
    assert state is None or plan["state_bytes"] == pytest.approx(state * 1e6, abs=4)


def test_a_mesh_divides_the_optimizer_state_among_its_first_axis():
    """Two float32 moments a parameter, and a count of 4 bytes on each device."""
    sizes = {
        mesh: as_json("plan", "1024", "--recipe", "f32", "--mesh", mesh)["plans"]["f32"]["state_bytes_a_device"]
        for mesh in ("2", "data=4", "replica=8,model=2")
    }
    assert {mesh: size - 4 for mesh, size in sizes.items()} == {
        "2": 1024 * 8 // 2,
        "data=4": 1024 * 8 // 4,
        "replica=8,model=2": 4096 * 8 // 8,  # a number is rounded up to 256 for each of 16 devices
    }


@pytest.mark.parametrize(("dtype", "size"), [("f32", 4), ("bf16", 2), ("params", 2)])
def test_gradients_have_the_dtype_asked_for(dtype, size):
    plan = as_json("plan", "1000", "--recipe", "bf16, Kahan", "--gradient-dtype", dtype)["plans"]["bf16, Kahan"]
    (gradients,) = [row for row in plan["rows"] if row["name"] == "gradients"]
    assert gradients["bytes"] == 1000 * size


def test_a_memory_asks_for_the_largest_model_of_each_recipe():
    """AdamW in float32 is 16 bytes a parameter and a count of 4; in split masters 16 with float32 gradients."""
    found = as_json("plan", "7B", "--memory", "80GB")
    assert found["memory_bytes"] == 80_000_000_000
    assert found["largest_models"]["f32"] == (80_000_000_000 - 4) // 16
    assert set(found["largest_models"]) == set(mpx.STANDARD_RECIPES)
    assert "4,999,999,999" in succeeded("plan", "7B", "--memory", "80GB").stdout


def test_the_memory_of_a_step_is_that_of_xla():
    steps = as_json("plan", "train.py:init", "--hlo", "train.py:step", "--batch", 8, "--batch", 4)["steps"]
    assert [step["batch"] for step in steps] == [4, 8]
    assert [step["arguments"] for step in steps] == [4 * 16 * (4 + batch) for batch in (4, 8)]
    assert "temporaries" in succeeded("plan", "train.py:init", "--hlo", "train.py:step").stdout


def test_the_largest_batch_fits_and_one_more_does_not():
    found = as_json("plan", "train.py:init", "--hlo", "train.py:step", "--memory", "4KB")
    peaks = {
        batch: as_json("plan", "train.py:init", "--hlo", "train.py:step", "--batch", batch)["steps"][0]["peak"]
        for batch in (found["largest_batch"], found["largest_batch"] + 1)
    }
    assert peaks[found["largest_batch"]] <= 4000 < peaks[found["largest_batch"] + 1]


def test_the_keys_of_the_json_do_not_depend_on_the_options():
    assert set(as_json("plan", "1M")) == {
        "model", "rule", "plans", "memory_bytes", "largest_models", "steps", "largest_batch"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("7Q",), "'7Q' is not a number of parameters"),
        (("7B", "--memory", "80XB"), "'80XB' is not a memory such as 80GB"),
        (("7B", "--recipe", "fp8"), "there is no recipe 'fp8'. The standard recipes are: f32; f32, bf16 autocast;"),
        (("7B", "--rule", "adamwq"), "Optax has no rule 'adamwq'. Did you mean adamw"),
        (("7B", "--rule", "chain"), "`optax.chain` needs args"),
        (("7B", "--rule", "cosine_decay_schedule"), "`optax.cosine_decay_schedule` needs init_value, decay_steps"),
        (("7B", "--rule", "ema_of_nothing"), "Optax has no rule 'ema_of_nothing'."),
        (("7B", "--rule", "constant_schedule"), "`optax.constant_schedule` needs value"),
        (("7B", "--rule", "GradientTransformation"), "Optax has no rule 'GradientTransformation'"),
        (("7B", "--rule", "apply_if_finite"), "`optax.apply_if_finite` needs inner, max_consecutive_errors"),
        (("7B", "--rule", "train.py:number"), "needs an Optax gradient transformation, but got int"),
        (("7B", "--mesh", "8,2"), "'8,2' is not a mesh such as data=8,model=2"),
        (("7B", "--mesh", "data=0"), "'data=0' is not a mesh"),
        (("7B", "--gradient-dtype", "f17"), "`gradient_dtype` must be a floating-point dtype"),
        (("7B", "--batch", "8"), "--batch would do nothing without --hlo"),
        (("7B", "--hlo", "train.py:no_step"), "must return a pair of a step and a tuple of its arguments"),
        (("nofile.py:init",), "there is no file nofile.py"),
        (("nomodule.inside:init",), "No module named 'nomodule'"),
        (("train.py:",), "neither file.py:function nor module:function"),
        (("train.py:int",), "train.py has no 'int'. It has init"),
        (("train.py:number",), "'train.py:number' is no function, but int"),
        (("gradients.npz:init",), "No module named 'gradients'"),
    ],
    ids=" ".join,
)
def test_a_mistake_in_a_plan_is_one_line(arguments, message):
    assert message in error_of("plan", *arguments)


# --- the user's own code ----------------------------------------------------------------------------------------------


def test_an_error_in_the_users_function_names_its_line():
    line = next(number for number, text in enumerate(TRAIN.splitlines(), start=1) if "def broken" in text)
    error = error_of("plan", "train.py:broken")
    assert f"train.py:{line} (broken): `def broken(): return" in error
    assert "raised TypeError: add got incompatible shapes" in error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def init(:", "SyntaxError: "),
        ("import no_such_package", "given.py:1 (<module>): `import no_such_package` raised ModuleNotFoundError"),
        ("x = 1\nraise SystemExit('no GPU')", "given.py:2 (<module>): `raise SystemExit('no GPU')` raised SystemExit"),
        ("def init(): return {'w': 'text'}", "there are no floating-point numbers in the model"),
        ("def init(size): return size", "missing 1 required positional argument: 'size'"),
    ],
)
def test_an_error_in_the_users_file_names_its_line(folder, text, message):
    (folder / "given.py").write_text(text)
    assert message in error_of("plan", "given.py:init")


def test_a_function_that_ends_the_program_ends_in_an_error():
    assert "raised SystemExit: no GPU" in error_of("plan", "train.py:leaves")


def test_what_the_users_code_prints_is_not_on_standard_output():
    result = succeeded("plan", "train.py:init", "--json")
    assert "noise" not in result.stdout
    assert "noise while it is traced" in result.stderr


def test_files_beside_the_users_file_can_be_imported(folder):
    (folder / "inside").mkdir()
    (folder / "inside" / "sizes_of_model.py").write_text("width = 3")
    (folder / "inside" / "model.py").write_text(
        "import jax.numpy as jnp, sizes_of_model\ndef init(): return jnp.zeros(sizes_of_model.width)"
    )
    assert as_json("plan", "inside/model.py:init")["plans"]["f32"]["parameters"] == 3


def test_a_traceback_is_there_for_those_who_ask(monkeypatch):
    monkeypatch.setenv("MPX_DEBUG", "1")
    assert isinstance(run("plan", "train.py:broken").exception, TypeError)


# --- explain ----------------------------------------------------------------------------------------------------------

SHAPES = ("f32[16,4]", "f32[8,16]")
LOSS = ("explain", "train.py:loss", *SHAPES, "--policy")


@pytest.mark.parametrize(
    ("text", "shape", "dtype"),
    [
        ("bf16[768,3072]", (768, 3072), ml_dtypes.bfloat16),
        ("float32[3, 5]", (3, 5), np.float32),
        ("i32[8]", (8,), np.int32),
        ("u8[8]", (8,), np.uint8),
        ("bool[1]", (1,), np.bool_),
        ("f16[]", (), np.float16),
        ("f16", (), np.float16),
        ("float8_e4m3fn[2]", (2,), ml_dtypes.float8_e4m3fn),
    ],
)
def test_shapes_are_in_the_notation_that_mpx_prints(text, shape, dtype):
    found = given.shape(text)
    assert (found.shape, found.dtype) == (shape, np.dtype(dtype))


@pytest.mark.parametrize(
    "text", ["", "f17[3]", "f8[3]", "f32[a]", "f32[8", "[8]", "f32[8 8]", "f32[-1]", "object[3]", "S3[3]"]
)
def test_what_is_no_shape_is_refused(text):
    with pytest.raises(CommandError, match="is not a shape such as"):
        given.shape(text)


@pytest.mark.parametrize("policy", ["bf16", "params=f32,compute=bf16"])
def test_a_function_is_explained_by_its_lines(policy):
    """2 x 8 x 16 x 4 operations."""
    (row,) = as_json(*LOSS, policy)["contractions"]
    assert re.fullmatch(r"train\.py:\d+ \(loss\)", row["where"])
    assert (row["shapes"], row["runs_in"], row["flops"]) == ("f32[8,16] f32[16,4]", "bf16", 2 * 8 * 16 * 4)
    assert "100.0% of their FLOPs lowered" in succeeded(*LOSS, policy).stdout


def test_a_gradient_has_the_products_of_its_own():
    explained = as_json("explain", "train.py:square", "f32[16,4]", "--policy", "f16", "--grad")
    assert sum(row["count"] for row in explained["contractions"]) > 1
    assert explained["lowered_share"] == 1


@pytest.mark.parametrize(
    ("function", "arguments"), [("loss", "train.py:arguments"), ("square", "train.py:one_argument")]
)
def test_arguments_may_come_from_a_function(function, arguments):
    explained = as_json("explain", f"train.py:{function}", "--arguments", arguments, "--policy", "bf16")
    assert len(explained["contractions"]) == 1


def test_an_autocast_function_has_its_own_policy():
    assert as_json("explain", "train.py:lowered", *SHAPES)["lowered_share"] == 1


def test_a_share_of_nothing_is_null():
    assert as_json("explain", "train:jnp.sum", "f32[4]", "--policy", "bf16")["lowered_share"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train.py:loss", "--policy", "bf16"), "give either the shapes of the arguments, or --arguments"),
        (("train.py:loss", "f32[3]", "--arguments", "train.py:init"), "give either the shapes"),
        (("train.py:loss", "f33[3]", "--policy", "bf16"), "'f33[3]' is not a shape such as"),
        (("train.py:loss", *SHAPES), "`explain` needs a policy"),
        (("train.py:lowered", *SHAPES, "--policy", "bf16"), "`explain` needs a policy"),
        (("train.py:lowered", *SHAPES, "--grad"), "--grad needs --policy"),
        (("train.py:loss", *SHAPES, "--policy", "bf15"), "bf15"),
        (("train.py:loss", *SHAPES, "--policy", "params=bf15"), "Unknown dtype 'bf15' in policy"),
        (("train.py:loss", "f32[16,4]", "--policy", "bf16"), "missing 1 required positional argument: 'x'"),
        (("train.py:loss", "f32[16,4]", "f32[8,15]", "--policy", "bf16"), "(loss): `def loss(w, x)"),
    ],
    ids=" ".join,
)
def test_a_mistake_in_an_explanation_is_one_line(arguments, message):
    assert message in error_of("explain", *arguments)


# --- report: arrays ---------------------------------------------------------------------------------------------------

GRADIENTS = {"w": np.float32([2.0**-30, 2.0**-8]), "b": np.float32([2.0**-20, 2.0**-10])}


def write_safetensors(path, tensors):
    """Of (type, bytes, shape) by name, as the format's own page describes it."""
    header, body = {"__metadata__": {"format": "pt"}}, b""
    for name, (kind, content, shape) in tensors.items():
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [len(body), len(body) + len(content)]}
        body += content
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def test_arrays_are_reported_as_the_library_reports_them():
    expected = mpx.underflow_report(GRADIENTS, "f16", loss_scale=4.0).as_dict()
    found = as_json("report", "gradients.npz", "--loss-scale", "4", "--dtype", "f16")
    assert (found["kind"], found["notes"], found["report"]) == ("arrays", [], json.loads(json.dumps(expected)))
    assert expected["verdict"] in succeeded("report", "gradients.npz", "--loss-scale", 4).stdout


def test_the_format_may_be_another_one():
    assert as_json("report", "gradients.npz", "--dtype", "bf16")["report"]["recommended_scale"] == 1


def test_a_file_of_one_array_is_read(folder):
    np.save("layer.npy", GRADIENTS["w"])
    (leaf,) = as_json("report", "layer.npy")["report"]["leaves"]
    assert (leaf["path"], leaf["largest"], leaf["zero"]) == ("layer", 2.0**-8, 0.5)


@pytest.mark.parametrize("suffix", [".npz", ".npy"])
def test_bfloat16_arrays_that_numpy_has_forgotten_are_told(suffix):
    array = np.array([2.0**-30, 1.0], ml_dtypes.bfloat16)
    np.savez("x.npz", x=array)
    np.save("x.npy", array)
    assert np.load("x.npy").dtype == np.dtype("V2")  # what there is to see
    found = as_json("report", f"x{suffix}")
    assert found["report"]["smallest"] == 2.0**-30
    assert found["notes"] == ["NumPy has lost the type of x: taken for bfloat16."]
    assert "Note: NumPy has lost the type of x" in succeeded("report", f"x{suffix}").stderr


def test_numbers_below_the_range_of_float32_are_no_zeros():
    """Without 64-bit types jax would make 1e-50 zero, and nothing would seem to be lost."""
    np.savez("wide.npz", x=np.array([1e-50, 1.0]))
    mode = jax.config.read("jax_enable_x64")
    report = as_json("report", "wide.npz")["report"]
    assert (report["zeros"], report["smallest"]) == (0, 1e-50)
    assert jax.config.read("jax_enable_x64") == mode


def test_safetensors_are_read(folder):
    numbers = np.float32([2.0**-30, 2.0**-8])
    write_safetensors(
        folder / "x.safetensors",
        {
            "wide": ("F32", numbers.tobytes(), [2, 1]),
            # bfloat16 is the upper half of float32.
            "narrow": ("BF16", (numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes(), [2]),
            "ids": ("I64", np.arange(3).tobytes(), [3]),
        },
    )
    leaves = as_json("report", "x.safetensors")["report"]["leaves"]
    assert {leaf["path"]: (leaf["largest"], leaf["zero"]) for leaf in leaves} == {
        "wide": (2.0**-8, 0.5), "narrow": (2.0**-8, 0.5),
    }  # fmt: skip


def test_a_checkpoint_of_orbax_is_read(folder):
    tree = {"layer": {"w": jnp.asarray([2.0**-30, 1.0], jnp.bfloat16)}, "step": jnp.asarray(3)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "checkpoints" / "10" / "default", tree)
    for place in ("checkpoints", "checkpoints/10/default"):
        (leaf,) = as_json("report", place)["report"]["leaves"]
        assert (leaf["path"], leaf["zero"]) == ("layer/w", 0.5)


def test_of_several_checkpoints_one_must_be_named(folder):
    for step in (10, 20):
        (folder / "checkpoints" / str(step)).mkdir(parents=True)
        (folder / "checkpoints" / str(step) / "_METADATA").write_text("{}")
    message = error_of("report", "checkpoints")
    assert "several checkpoints; give one: checkpoints/10, checkpoints/20" in message
    assert "the checkpoint checkpoints/10 cannot be read" in error_of("report", "checkpoints/10")


def test_without_orbax_a_folder_is_refused(monkeypatch, folder):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    assert "need `pip install orbax-checkpoint`" in error_of("report", folder)


def safetensors_with(**changes):
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes
    text = json.dumps({"x": entry}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(8)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.npz", b"", "x.npz cannot be read as .npz: it does not begin as such a file does"),
        ("x.npz", b"PK\x03\x04 and no more", "x.npz cannot be read as .npz: BadZipFile"),
        ("x.npy", b"no array", "x.npy cannot be read as .npy: it does not begin as such a file does"),
        ("x.npy", b"\x93NUMPY\x01\x00\x10\x00{", "x.npy cannot be read as .npy"),
        ("x.safetensors", b"123", "its header is cut off"),
        ("x.safetensors", b"\xff" * 20, "its header is cut off"),
        ("x.safetensors", b"\x02" + bytes(7) + b"[]", "x.safetensors cannot be read"),
        ("x.safetensors", safetensors_with(dtype="F3"), "'x' is of the unknown type F3"),
        ("x.safetensors", safetensors_with(shape=[3]), "the bytes of 'x' are cut off"),
        ("x.safetensors", safetensors_with(data_offsets=[0, 80]), "the bytes of 'x' are cut off"),
        ("x.safetensors", safetensors_with(shape=None), "x.safetensors cannot be read"),
        ("x.bin", b"", "x.bin is of no kind that is known here: .npz, .npy, .safetensors, .jsonl"),
    ],
)
def test_a_damaged_file_is_one_line(folder, name, content, message):
    (folder / name).write_bytes(content)
    assert message in error_of("report", name)


def test_a_file_of_python_objects_is_not_run(folder):
    np.savez("x.npz", x=np.array([{}], object))
    assert "Object arrays cannot be loaded" in error_of("report", "x.npz")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing.npz",), "there is no file nothing.npz"),
        ((".",), "the folder . holds no Orbax checkpoint"),
        (("gradients.npz", "--dtype", "f17"), "`dtype` must be one of f16, bf16"),
        (("gradients.npz", "--loss-scale", "3"), "`loss_scale` must be a loss scale or a number"),
    ],
)
def test_a_mistake_in_a_report_is_one_line(arguments, message):
    assert message in error_of("report", *arguments)


def test_arrays_without_floating_numbers_are_refused():
    np.savez("x.npz", x=np.arange(3))
    assert "the tree has no floating array" in error_of("report", "x.npz")


# --- report: run logs -------------------------------------------------------------------------------------------------


def write_log(path, rows):
    """Of (step, loss, scale, skipped), by the example's own writer."""
    log = RunLog(path)
    for step, loss, scale, skipped in rows:
        log.write(Record(step, loss, 1e-3, 1.0, scale, skipped, None, None, None, None, None))


# 5 steps a line. The scale shrinks from step 15 on, comes to 1 at step 25, and no step is done after that.
STUCK = [
    (5, 4.0, 1024.0, 0), (10, 2.5, 1024.0, 1), (15, 3.0, 1024.0, 1), (20, math.nan, 32.0, 6),
    (25, math.nan, 1.0, 11), (30, math.inf, 1.0, 16), (35, math.nan, 1.0, 21),
]  # fmt: skip


def test_a_run_log_of_the_example_is_summed_up(folder):
    write_log(folder / "log.jsonl", STUCK)
    found = as_json("report", "log.jsonl")
    assert (found["kind"], found["notes"]) == ("run log", [])
    assert found["report"] == {
        "lines": 7,
        "first_step": 5,
        "last_step": 35,
        "first_loss": 4.0,
        "last_loss": None,
        "smallest_loss": 2.5,
        "smallest_loss_step": 10,
        "nonfinite_losses": [20, 25, 30, 35],
        "skipped_steps": 21,
        "loss_scales": [
            {"step": 5, "loss_scale": 1024.0},
            {"step": 20, "loss_scale": 32.0},
            {"step": 25, "loss_scale": 1.0},
        ],
        "stuck_since": 25,
    }
    text = succeeded("report", "log.jsonl").stdout
    assert all(part in text for part in ("since step 25", "2.5 at step 10", "Loss scale: 2 changes"))


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(STUCK[:6], id="five steps are not many"),
        pytest.param([*STUCK, (40, 2.0, 1.0, 25)], id="one step was good since"),
        pytest.param(STUCK[:5], id="the scale still shrinks"),
        pytest.param(STUCK[:1], id="one line"),
    ],
)
def test_a_run_that_may_go_on_is_not_stuck(folder, rows):
    write_log(folder / "log.jsonl", rows)
    assert as_json("report", "log.jsonl")["report"]["stuck_since"] is None
    assert re.search(r"stuck\W+no\b", succeeded("report", "log.jsonl").stdout)


def test_only_the_last_changes_of_a_scale_are_listed(folder):
    write_log(folder / "log.jsonl", [(step, 1.0, float(2 ** (step % 2)), 0) for step in range(1, 60)])
    assert len(as_json("report", "log.jsonl")["report"]["loss_scales"]) == 59
    text = succeeded("report", "log.jsonl").stdout
    assert len(re.findall(r"^\W*\d+\W+[12]\W*$", text, flags=re.MULTILINE)) == 20


def test_a_last_line_that_was_cut_off_is_left_out(folder):
    write_log(folder / "log.jsonl", STUCK)
    content = (folder / "log.jsonl").read_bytes()
    (folder / "log.jsonl").write_bytes(content[:-20])
    found = as_json("report", "log.jsonl")
    assert found["report"]["last_step"] == 30
    assert found["notes"] == ["The last line is cut off, and left out."]


GOOD = '{"step": 1, "loss": 2, "loss_scale": 1, "skipped_steps": 0, "other": []}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "log.jsonl is empty"),
        ("\x00\xff", "log.jsonl, line 1: this is no JSON"),
        (f"{GOOD}\n{{\n{GOOD}", "log.jsonl, line 2: this is no JSON"),
        ("[]", "log.jsonl, line 1: there is no step, loss, loss_scale, skipped_steps"),
        (GOOD.replace("loss_scale", "scale"), "log.jsonl, line 1: there is no loss_scale. Each line of a run log"),
        (GOOD.replace('"loss": 2', '"loss": "2"'), "loss and loss_scale must be numbers, but are '2' and 1"),
        (GOOD.replace('"step": 1', '"step": true'), "step and skipped_steps must be integers, but are True and 0"),
        (f"{GOOD}\n{GOOD}", "log.jsonl, line 2: step 1 comes after step 1. Are there several runs in it?"),
    ],
)
def test_what_is_no_run_log_is_refused(folder, text, message):
    (folder / "log.jsonl").write_text(text)
    assert message in error_of("report", "log.jsonl")


@pytest.mark.parametrize("option", [("--dtype", "f16"), ("--loss-scale", "2")])
def test_options_for_arrays_are_refused_for_a_run_log(folder, option):
    write_log(folder / "log.jsonl", STUCK)
    assert "would do nothing for a run log" in error_of("report", "log.jsonl", *option)


# --- all commands -----------------------------------------------------------------------------------------------------


def test_the_application_has_the_four_commands():
    group = typer.main.get_command(app)
    assert sorted(group.commands) == sorted(COMMANDS)
