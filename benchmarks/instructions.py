"""Count the instructions of the fused step of a recipe, on a machine without a GPU.

    pip install -e ".[instructions]"
    PYTHONPATH=. python -m benchmarks.instructions
    PYTHONPATH=. python -m benchmarks.instructions --recipes bf16-split24-4bit

XLA compiles the step for an H200, NVIDIA's assembler makes machine code of the largest
kernel, and its disassembler lists that. Bytes and instructions of a kernel go on at
once, so it takes the longer of the two times. Nothing is run.
"""

import collections
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import optax
import typer

import mpx
from benchmarks.report import Row, table

RECIPES = "bf16-split-8bit,bf16-split24-8bit,bf16-split24-4bit"
SIDE = 4096  # of the matrix whose step is compiled
OF_A_THREAD = 8  # elements: see `mpx/_fused/kernels.py`

# H200 SXM: its multiprocessors, each of which issues four instructions of 32 threads in
# a cycle, and half as many of those below; the clock under load; the memory.
MULTIPROCESSORS, CLOCK, BANDWIDTH = 132, 1.755e9, 4.8e12
HALF_RATE = {
    *("FSET", "FSETP", "FSEL", "FMNMX", "ISETP", "SEL", "IMNMX", "VIMNMX", "VIMNMX3"),
    *("LOP3", "PLOP3", "SHF", "PRMT", "LEA", "IADD3", "VIADD", "I2FP", "F2FP", "SGXT"),
    *("IABS", "POPC", "P2R", "R2P", "IMAD"),
}
# Roots, inverses, and conversions that are no plain move of bits: a quarter of that.
EIGHTH_RATE = {"MUFU", "F2I", "I2F", "F2F", "FRND"}


def tool(name: str, package: str) -> str:
    """Return the path of one of NVIDIA's tools.

    Raises:
        FileNotFoundError: if its package is not installed.
    """
    found = importlib.util.find_spec("nvidia")
    places = (found and found.submodule_search_locations) or ()
    for place in places:
        for file in sorted(Path(place).rglob(name)):
            if file.is_file():
                file.chmod(0o755)
                return str(file)
    raise FileNotFoundError(f"{name} is missing: pip install {package}")


def compile_step(recipe: str) -> None:
    """Compile the fused step of a recipe for an H200."""
    params = {"w": jax.ShapeDtypeStruct((SIDE, SIDE), jnp.bfloat16)}
    tx = mpx.mixed_precision(optax.adamw(1e-3), recipe)
    state = jax.eval_shape(tx.init, params)
    step = jax.jit(mpx.fused_update(tx), donate_argnums=(1, 2))
    report = mpx.step_report(step, params, state, params, target="h200")
    print(report.moved_bytes / SIDE**2)


def machine_code(recipe: str, folder: Path) -> tuple[float, str]:
    """Return the bytes that a step moves, a parameter, and the instructions of its
    largest kernel.
    """
    # XLA reads its flags once in a process.
    command = f"from benchmarks import instructions as i; i.compile_step({recipe!r})"
    flags = os.environ | {"XLA_FLAGS": f"--xla_dump_to={folder}"}
    done = subprocess.run(
        [sys.executable, "-c", command], env=flags, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    kernel = max(folder.glob("*.ptx"), key=lambda file: file.stat().st_size)
    code = folder / "kernel.cubin"
    ptxas = tool("ptxas", "nvidia-cuda-nvcc")
    nvdisasm = tool("nvdisasm", "nvidia-cuda-nvdisasm")
    subprocess.run([ptxas, "-arch=sm_90a", str(kernel), "-o", str(code)], check=True)
    listed = subprocess.run(
        [nvdisasm, "-c", str(code)], check=True, capture_output=True, text=True
    )
    return float(done.stdout.split()[-1]), listed.stdout


def counted(listing: str) -> collections.Counter[str]:
    """Return how often each operation stands in a listing, without what fills it up."""
    pattern = r"^\s+(?:/\*\w+\*/\s+)?(?:\{\s*)?(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]+)[.\s;]"
    found = collections.Counter(re.findall(pattern, listing, re.MULTILINE))
    del found["NOP"]
    return found


def seconds(found: Mapping[str, int], size: int) -> tuple[float, float]:
    """Return the time to issue the instructions of all threads, and that of the slower
    of the two narrow pipes.
    """

    def of(operations: Iterable[str], lanes: float) -> float:
        count = sum(found[x] for x in operations)
        return count * size / OF_A_THREAD / (MULTIPROCESSORS * lanes * CLOCK)

    narrow = (of(found.keys() & HALF_RATE, 64), of(found.keys() & EIGHTH_RATE, 16))
    return of(found, 128), max(narrow)


def measured(recipe: str, size: int = 134_217_728) -> Row:
    """Return a row of the table: instructions an element, and times of a step."""
    with tempfile.TemporaryDirectory() as folder:
        bytes_moved, listing = machine_code(recipe, Path(folder))
    found = counted(listing)
    issue, narrow = seconds(found, size)
    return {
        "recipe": recipe,
        "all": found.total() / OF_A_THREAD,
        "half": sum(found[x] for x in HALF_RATE) / OF_A_THREAD,
        "eighth": sum(found[x] for x in EIGHTH_RATE) / OF_A_THREAD,
        "issue": 1e3 * issue,
        "narrow": 1e3 * narrow,
        "bytes": 1e3 * bytes_moved * size / BANDWIDTH,
    }


COLUMNS = {
    "fused step": "{recipe}",
    "instructions an element": "{all:.0f}",
    "of half rate": "{half:.0f}",
    "of an eighth": "{eighth:.0f}",
    "134 million: to issue, ms": "{issue:.2f}",
    "in the narrow pipe, ms": "{narrow:.2f}",
    "bytes, ms": "{bytes:.2f}",
}


def main(
    recipes: Annotated[str, typer.Option(help="Names, separated by commas.")] = RECIPES,
) -> None:
    """Print a table of the fused steps of some recipes."""
    print(table([measured(recipe) for recipe in recipes.split(",")], COLUMNS))


if __name__ == "__main__":
    typer.run(main)
