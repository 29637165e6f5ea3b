"""The command line: the tables and JSON of each command, and how each mistake ends in
one line.
"""

import json
import pathlib
import re
import shlex
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import mpx
import mpx_cli
from mpx.doctor import Check, Diagnosis
from mpx.tools import cli

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
def step(w, x): return w - jax.grad(loss)(w, x)
def make():
    shapes = jax.ShapeDtypeStruct((16, 4), jnp.float32), jax.ShapeDtypeStruct((8, 16), jnp.float32)
    return step, shapes, (0,)

def square(w): return jnp.sum(w.T @ w)
def huge(): return jnp.zeros((10**6, 10**6))

momentum = optax.sgd(0.1, momentum=0.9)
def adam(): return optax.adam(0.1)
lowered = mpx.autocast(loss, "bf16")
number = 3
"""
GRADIENTS = {
    "w": np.float32([2.0**-30, 2.0**-8]),
    "b": np.float32([2.0**-20, 2.0**-10]),
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Work in a folder with the files that the examples of the help texts name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("COLUMNS", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    for name in ("train", "given", "turtle"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "train.py").write_text(TRAIN)
    np.savez("gradients.npz", **GRADIENTS)
    return tmp_path


@pytest.fixture
def run(monkeypatch, capsys):
    """Return a function that runs a command and returns its exit code and what it
    writes.
    """

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["mpx", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            mpx_cli.main()
        return end.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def text_of(run):
    def text_of(*arguments):
        code, text, errors = run(*arguments)
        assert code == 0, errors
        return text

    return text_of


@pytest.fixture
def json_of(text_of):
    """Return a function that reads the JSON of a command: all that is on standard
    output, without NaN.
    """

    def refuse(name):
        raise AssertionError(f"{name} is not in JSON")

    return lambda *arguments: json.loads(
        text_of(*arguments, "--json"), parse_constant=refuse
    )


@pytest.fixture
def plan_of(json_of):
    return lambda recipe, *arguments: json_of("plan", *arguments, "--recipe", recipe)[
        "plans"
    ][recipe]


# The application.


@pytest.mark.parametrize("command", [(), *[(name,) for name in COMMANDS]], ids=" ".join)
def test_the_example_of_each_help_text_runs_and_every_command_has_json(
    command, run, text_of
):
    text = " ".join(text_of(*command, "--help").split())
    assert text == " ".join(text_of(*command, "-h").split())
    assert "--json" in text
    assert not re.search(r"--(?!help)[a-z]+ <bool>", text)  # a flag takes no value
    example = re.search(r"Example: mpx (.+)$", text)
    assert example is not None
    code, text, errors = run(*shlex.split(example[1]))
    assert code == 0, errors
    assert text.strip()
    assert "\x1b" not in text


def test_the_version_and_wrong_usage_have_codes_of_their_own(run, text_of):
    assert text_of("--version") == f"mpx {mpx.__version__}\n"
    for arguments in (
        ["nothing"],
        ["plan"],
        ["plan", "-7B"],
        ["report", "nothing.npz"],
    ):
        assert run(*arguments)[0] == 2


def process(code, *arguments):
    """Run a program that imports the command line of this checkout, in a new process."""
    command = f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}"
    return subprocess.run(
        [sys.executable, "-c", command, *arguments], capture_output=True, text=True
    )


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_typer_or_rich_it_says_in_one_line_how_to_get_them(package):
    done = process(f"sys.modules[{package!r}] = None; import mpx_cli")
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        done.stderr
        == "Error: the command line needs Typer and Rich: pip install typer rich\n"
    )


def test_help_is_shown_without_jax():
    """An import of JAX takes most of a second."""
    done = process(
        "sys.modules['jax'] = None; import mpx_cli; mpx_cli.main()", "plan", "-h"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage: mpx" in done.stdout


# Doctor.


@pytest.mark.parametrize("exit_code", [0, 1])
def test_the_doctor_says_what_it_found_and_exits_with_its_code(
    monkeypatch, run, exit_code
):
    diagnosis = Diagnosis(
        {"jax": "1"},
        "mpx",
        devices={"GPU": 1},
        checks=(Check("a claim", exit_code == 0),),
    )
    monkeypatch.setattr("mpx.doctor.examine", lambda: diagnosis)
    code, text, _ = run("doctor")
    assert (code, text.startswith(diagnosis.verdict), "1 x GPU" in text) == (
        exit_code,
        True,
        True,
    )
    assert json.loads(run("doctor", "--json")[1]) == diagnosis.as_dict()


# Plan.


def test_numbers_of_parameters_and_memories_have_units():
    counts = {
        "124M": 124 * 10**6,
        "7B": 7 * 10**9,
        "70e9": 70 * 10**9,
        "1.3b": 1_300_000_000,
        "1_000": 1000,
    }
    sizes = {
        "80GB": 80 * 10**9,
        "80GiB": 80 * 2**30,
        "80e9B": 80 * 10**9,
        "1.5 MB": 1_500_000,
        "512KiB": 2**19,
    }
    sizes |= {
        "h100": 80 * 2**30,
        "RTX4090": 24 * 2**30,
        "l40s": 48e9,
        "h100-nvl": 94e9,
        "gb200": 186e9,
    }
    assert {text: cli.parameters(text) for text in counts} == counts
    # JAX takes 75% of a GPU and all of a TPU.
    assert {text: cli.usable_bytes(text) for text in sizes} == {
        text: int(x * 0.75) for text, x in sizes.items()
    }
    assert cli.usable_bytes("v5e") == 16 * 2**30


def test_the_plans_are_those_of_the_library(json_of):
    expected = {
        name: plan.as_dict()
        for name, plan in mpx.compare_plans(7_000_000_000).plans.items()
    }
    assert json_of("plan", "7B") == {
        "plans": expected,
        "usable_bytes": None,
        "left": {},
    }
    chosen = ("f32", "bf16-kahan")
    assert json_of("plan", "7B", "--recipe", "f32", "--recipe", "bf16-kahan")[
        "plans"
    ] == {name: expected[name] for name in chosen}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # A function is not run. Parameters take 4 bytes each and so do gradients, in
        # whatever dtype it makes them.
        ("train.py:init --rule sgd", {"parameters": 68, "bytes_a_parameter": 8}),
        ("train.py:Half.make --rule sgd", {"parameters": 64, "bytes_a_parameter": 8}),
        ("train:init --rule sgd", {"parameters": 68, "bytes_a_parameter": 8}),
        ("train.py:huge --rule sgd", {"parameters": 10**12, "bytes_a_parameter": 8}),
        # Each moment is a float32 number a parameter, and each count 4 bytes.
        ("1000 --rule lion", {"state_bytes": 4004}),
        # A moment of the matrix, two of the vector, four scalars and a row of three.
        ("train.py:init --rule muon", {"state_bytes": 4 * (64 + 2 * 4 + 5)}),
        ("1000 --rule adamw", {"state_bytes": 8004}),
        ("1000 --rule train.py:momentum", {"state_bytes": 4000}),
        ("1000 --rule train.py:adam", {"state_bytes": 8004}),
        # Devices divide the state, and with --fsdp parameters and gradients too.
        (
            "1024 --devices 2",
            {
                "state_bytes_a_device": 1024 * 8 // 2 + 4,
                "total_bytes_a_device": 8192 + 4096 + 4,
            },
        ),
        ("1024 --devices 4 --fsdp", {"total_bytes_a_device": 1024 * 16 // 4 + 4}),
        (
            "train.py:huge --rule sgd --devices 4 --fsdp",
            {"total_bytes_a_device": 8 * 10**12 // 4},
        ),
    ],
)
def test_the_model_the_optimizer_and_the_devices_are_those_that_were_named(
    plan_of, arguments, expected
):
    plan = plan_of("f32", *arguments.split())
    assert {name: plan[name] for name in expected} == expected


def test_a_memory_says_what_is_left_for_activations_under_each_recipe(
    monkeypatch, json_of, text_of
):
    """AdamW in float32 holds 16 bytes a parameter and a count of 4; with bfloat16
    moments and Kahan summation 10. Of 80 GB JAX takes 60 by default.
    """
    found = json_of("plan", "7B", "--memory", "80GB")
    assert found["usable_bytes"] == 60_000_000_000
    lines = text_of("plan", "7B", "--memory", "80GB").splitlines()
    assert lines[1].split()[-3:] == ["a", "param", "left"]
    cells = [line.split() for line in lines]
    of = {row[0]: row[4:] for row in cells if len(row) >= 7}
    assert of["f32"] == ["112.0", "16.00", "no", "fit"]
    assert of["bf16-kahan"] == ["70.00", "10.00", "-10.000"]
    assert of["bf16-split-8bit"] == ["56.22", "8.031", "3.781"]
    assert any(line.startswith("Training may use 60 GB of a device.") for line in lines)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    assert json_of("plan", "7B", "--memory", "80GB")["usable_bytes"] == 72_000_000_000


def test_where_nothing_fits_it_says_what_holds_less(text_of):
    text = text_of("plan", "70B", "--memory", "80GB")
    assert "Nothing fits. Less is held with another --recipe" in text
    assert "tx = " not in text


def test_only_of_a_gpu_does_it_say_that_jax_takes_a_part(text_of):
    says = {
        name: "JAX takes 75%" in text_of("plan", "1B", "--memory", name)
        for name in ("v5e", "h100", "80GB")
    }
    assert says == {"v5e": False, "h100": True, "80GB": True}


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        ("train.py:init", "mpx program train.py:make --target h100"),
        ("7B --memory B200", "mpx program train.py:make --target b200"),
        # Nothing compiles for an L40S.
        (
            "7B --memory l40s",
            "mpx program train.py:make --target h100",
        ),
    ],
)
def test_a_plan_ends_with_the_command_that_compiles_a_program_of_ones_own(
    arguments, command, text_of
):
    assert text_of("plan", *arguments.split()).splitlines()[-1].endswith(command)


def test_plan_and_program_take_the_same_function(plan_of, run):
    """The parameters are the first argument of its step, arrays or shapes."""
    plan = plan_of("f32", "train.py:make", "--rule", "sgd")
    assert (plan["parameters"], plan["bytes_a_parameter"]) == (64, 8)
    assert run("program", "train.py:make")[0] == 0
    for command in ("plan", "program"):
        assert "file.py:make" in " ".join(run(command, "-h")[1].split())
    assert "returns (step, arguments, donated)" in " ".join(
        run("program", "-h")[1].split()
    )


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        # The first whose weights and state fit.
        (
            "--memory 60GB",
            'optax.adamw(1e-3), "bf16-split-8bit"',
        ),
        ("--memory 80GB --rule lion", 'optax.lion(1e-3), "bf16-split-8bit"'),
        ("--recipe f32 --rule ademamix", 'optax.contrib.ademamix(1e-3), "f32"'),
        ("--recipe bf16-split --rule train.py:momentum", 'momentum, "bf16-split"'),
        ("--recipe bf16-split --rule train.py:adam", 'adam(), "bf16-split"'),
        # A policy, which is no recipe.
        (
            "--recipe params=bf16",
            'optax.adamw(1e-3), "params=bf16"',
        ),
    ],
)
def test_the_printed_line_makes_the_optimizer_that_was_planned(
    arguments, code, text_of
):
    lines = text_of("plan", "7B", *arguments.split()).splitlines()
    assert [line for line in lines if "tx = " in line] == [
        f"tx = mpx.mixed_precision({code})"
    ]


# Explain.

SHAPES = ("f32[16,4]", "f32[8,16]")


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
    found = {text: cli.shape(text) for text in expected}
    assert {text: (x.shape, x.dtype.name) for text, x in found.items()} == expected
    for text in "|f17[3]|f8[3]|f4[3]|f32[a]|f32[8|[8]|f32[-1]|S3[3]".split("|"):
        with pytest.raises(ValueError, match="is not a shape such as"):
            cli.shape(text)


@pytest.mark.parametrize("policy", ["bf16", "params=f32,compute=bf16"])
def test_a_function_is_explained_by_its_lines(json_of, text_of, policy):
    """A product takes 2 x 8 x 16 x 4 operations."""
    command = ("explain", "train.py:loss", *SHAPES, "--policy", policy)
    (row,) = json_of(*command)["contractions"]
    assert re.fullmatch(r"train\.py:\d+ \(loss\)", row["where"])
    assert (row["shapes"], row["runs_in"], row["flops"]) == (
        "f32[8,16] f32[16,4]",
        "bf16",
        2 * 8 * 16 * 4,
    )
    assert "100.0% of their FLOPs narrowed" in text_of(*command)


# Report.


def test_arrays_are_reported_as_the_library_reports_them(json_of, text_of):
    expected = mpx.underflow_report(GRADIENTS, "f16", loss_scale=4.0).as_dict()
    assert json_of(
        "report", "gradients.npz", "--loss-scale", "4", "--dtype", "f16"
    ) == json.loads(json.dumps(expected))
    assert expected["verdict"] in text_of("report", "gradients.npz", "--loss-scale", 4)
    assert (
        json_of("report", "gradients.npz", "--dtype", "bf16")["recommended_scale"] == 1
    )


@pytest.mark.parametrize("suffix", [".npz", ".npy"])
def test_bfloat16_arrays_whose_dtype_numpy_has_lost_are_read(suffix, json_of):
    array = np.array([2.0**-30, 1.0], ml_dtypes.bfloat16)
    np.savez("x.npz", x=array)
    np.save("x.npy", array)
    assert np.load("x.npy").dtype == np.dtype("V2")  # what there is to see
    found = json_of("report", f"x{suffix}")
    (leaf,) = found["leaves"]
    assert (leaf["path"], leaf["zero"], found["histogram"]) == (
        "x",
        0.5,
        {"-30": 1, "0": 1},
    )


def test_safetensors_are_read(folder, json_of):
    """The two bytes of bfloat16 are the upper half of float32. Integers and 8-bit
    floats are left out.
    """
    numbers = np.float32([2.0**-30, 2.0**-8])
    tensors = {
        "wide": ("F32", [2, 1], numbers.tobytes()),
        "narrow": (
            "BF16",
            [2],
            (numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes(),
        ),
        "ids": ("I64", [3], np.arange(3).tobytes()),
        "codes": ("F8_E4M3", [2], bytes(2)),
    }
    header, body = {}, b""
    for name, (
        kind,
        shape,
        content,
    ) in tensors.items():  # as the page of the format describes them
        header[name] = {
            "dtype": kind,
            "shape": shape,
            "data_offsets": [len(body), len(body) + len(content)],
        }
        body += content
    head = json.dumps(header).encode()
    (folder / "x.safetensors").write_bytes(
        len(head).to_bytes(8, "little") + head + body
    )
    found = {
        leaf["path"]: (leaf["largest"], leaf["zero"])
        for leaf in json_of("report", "x.safetensors")["leaves"]
    }
    assert found == {"wide": (2.0**-8, 0.5), "narrow": (2.0**-8, 0.5)}


# Mistakes.


@pytest.fixture
def error_of(run):
    def error_of(*arguments):
        """Return the one line on standard error of a command that fails."""
        code, text, errors = run(*arguments)
        assert text == ""
        (line,) = [line for line in errors.splitlines() if not line.startswith("noise")]
        assert line.startswith("Error: ")
        assert code == (1 if re.search(r"\w+Error: ", line) else 2)
        # A line of the command line itself is not the user's.
        assert "mpx_cli" not in line
        return line

    return error_of


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("plan 7Q", "'7Q' is not a number of parameters such as 124M, 7B or 70e9"),
        ("plan 7B --recipe fp4", "Or is it to be a recipe? "),
        ("plan 7B --rule adamwq", "Optax has no rule 'adamwq'. Write a function"),
        (
            "plan 7B --rule chain",
            "TypeError: chain() got an unexpected keyword argument 'learning_rate'",
        ),
        ("plan nofile.py:init", "There is no file 'nofile.py'"),
        ("plan nofile:init", "ModuleNotFoundError: No module named 'nofile'"),
        (
            "plan train.py:",
            "'train.py:' is neither file.py:function nor module:function",
        ),
        ("plan train.py:int", "AttributeError: module 'train' has no attribute 'int'"),
        (
            "explain train.py:loss f32[16,4] --policy bf16",
            "missing 1 required positional argument: 'x'",
        ),
        (
            "explain train.py:loss f32[16,4] f32[8,15] --policy bf16",
            "train.py:13 (loss): TypeError: ",
        ),
        (
            "explain train.py:loss f64[16,4] f32[8,16] --policy bf16",
            "Set JAX_ENABLE_X64=1",
        ),
        (
            "program train.py:step",
            (
                "train.py:step must be a function without arguments that returns (step,"
                " arguments, "
            ),
        ),
        (
            "program train.py:step",
            (
                "missing a required argument: 'w'. If it is the step, write such a"
                " function"
            ),
        ),
        ("program train.py:init", "(step, arguments, donated), but it returns dict"),
        (
            "program train.py:number",
            "(step, arguments, donated): 3 is not a callable object",
        ),
        (
            "plan train.py",
            (
                "'train.py' is not a number of parameters such as 124M, 7B or 70e9, or"
                " file.py:function"
            ),
        ),
        (
            "report gradients.npz --loss-scale 3",
            "`loss_scale` must be a loss scale or a number",
        ),
        ("report train.py", "train.py is not a .npz, .npy or .safetensors file"),
    ],
)
def test_a_mistake_ends_in_one_line(command, message, error_of):
    assert message in error_of(*command.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("0", "'0' is not a number of parameters such as 124M"),
        ("0.4", "'0.4' is not a number of parameters"),
        ("nan", "'nan' is not a number of parameters"),
        ("1e19", "'1e19' is not a number of parameters"),
        ("7B --devices 0", "Invalid value for '--devices'"),
        ("7B --fsdp", "say over how many, as in --devices 64"),
        ("1000 --devices 5000", "--devices 5000: there is no parameter with an axis that so many devices can divide"),
        ("1000 --devices 5000 --fsdp", "--devices 5000: there is no parameter"),
        ("train.py:init --devices 3", "--devices 3: there is no parameter"),
        ("7B --memory 80", "'80' is not a memory with its unit, such as 80GB"),
        ("7B --memory 0GB", "'0GB' is not a memory"),
        ("7B --memory nanGB", "'nanGB' is not a memory"),
        ("7B --memory h999", "or one of rtx4090, l40s, a100, h100, h100-nvl, h200, b200, gb200, v5e, v6e."),
        ("7B --grad-dtype int8", "`gradient_dtype` must be a floating-point dtype, or None, but got 'int8'"),
    ],
)  # fmt: skip
def test_a_plan_of_what_cannot_be_is_wrong_usage(arguments, words, run):
    code, text, errors = run("plan", *arguments.split())
    assert (code, text) == (2, "")
    assert words in " ".join(errors.split())


@pytest.mark.parametrize("fraction", ["nan", "0", "-1", "most"])
def test_a_fraction_of_a_gpu_that_cannot_be_is_wrong_usage(
    fraction, monkeypatch, error_of
):
    monkeypatch.setenv(cli.FRACTION, fraction)
    assert f"must be a number such as 0.75, but is '{fraction}'" in error_of(
        "plan", "7B", "--memory", "h100"
    )


def test_a_single_recipe_is_shown_in_its_parts_and_with_what_is_left(text_of):
    assert text_of("plan", "1B", "--recipe", "f32").count("Memory to train") == 1
    for model, left in {"7B": "no fit", "1B": "46.00"}.items():
        options = "--recipe", "bf16-split", "--memory", "80GB"
        parts, table, *_ = text_of("plan", model, *options).split("\n\n")
        assert "low bits" in parts
        assert table.splitlines()[-1].endswith(left)


def test_muon_is_planned_for_matrices_and_says_what_it_is_for_a_number(text_of):
    says = "A number of parameters is one vector, for which Muon is AdamW."
    assert says in text_of("plan", "7B", "--rule", "muon")
    assert says not in text_of("plan", "train.py:init", "--rule", "muon")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def init(:", "SyntaxError: "),
        ("import no_such_package", "given.py:1 (<module>): ModuleNotFoundError: No module named 'no_such_package'"),
        ("import jax.numpy as jnp\ndef init():\n    return jnp.zeros(3) + jnp.zeros(4)",
         "given.py:3 (init): TypeError: add got incompatible shapes"),
        ("def helper():\n    return 1 / 0\ndef init():\n    return helper()", "given.py:2 (helper): ZeroDivisionError"),
        ("def init(): return {'w': 'text'}", "there are no floating-point numbers in the model"),
        ("def init(size): return size", "missing 1 required positional argument: 'size'"),
    ],
)  # fmt: skip
def test_an_error_in_the_users_file_names_its_line(folder, text, message, error_of):
    (folder / "given.py").write_text(text)
    assert message in error_of("plan", "given.py:init")


def test_files_beside_the_users_file_can_be_imported_whatever_is_installed_under_their_names(
    folder, plan_of
):
    (folder / "inside").mkdir()
    (folder / "inside" / "turtle.py").write_text("width = 3")
    (folder / "inside" / "a-model.py").write_text(
        "import jax.numpy as jnp, turtle\ndef init(): return jnp.zeros(turtle.width)"
    )
    assert plan_of("f32", "inside/a-model.py:init")["parameters"] == 3


def test_a_file_of_other_arrays_is_refused_and_objects_are_not_run(error_of):
    np.savez("objects.npz", x=np.array([{}], object))
    assert "Object arrays cannot be loaded" in error_of("report", "objects.npz")
    np.savez("integers.npz", x=np.arange(3))
    assert "the tree has no floating array" in error_of("report", "integers.npz")
