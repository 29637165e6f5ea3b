"""Set autocast beside casting everything by hand, and beside its peers, on the programs
of `tests/programs`.

    PYTHONPATH=. python -m benchmarks.autocast_programs

It needs `pip install -e ".[dev,peers]"`. Each row is a way to run all programs, with
their gradients, in bfloat16. It counts the programs that run and give finite numbers;
those whose values and gradients are each at most thrice as far from float32's as by
hand, in the measure of `tests/programs`; and those of whose traced products any is of
16-bit numbers, without which there is nothing to gain. What does not run says why.
"""

import collections
import contextlib
import importlib.metadata
import io
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer

import mpx
from benchmarks.report import Row, Sheet
from tests.autocast.helpers import contractions
from tests.programs import test_programs as judge

COLUMNS = {
    "way": "{way}",
    "version": "{version}",
    "run": "{run}",
    "within three times the error by hand": "{within}",
    "narrow anything": "{narrow}",
    "why most others fail": "{why}",
}


def scaled(value_and_grad: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with the scaled loss that the tests compare; gradients are
    scaled as they come.
    """

    def run(*args: Any) -> Any:
        value, grads = value_and_grad(*args)
        return value * judge.SCALE.loss_scale, grads

    return run


def ours(loss: Any) -> Any:
    """Return the value and the gradients by mpx."""
    return scaled(
        mpx.value_and_grad(mpx.autocast(loss, "bf16", reduce_dtype="f32"), judge.SCALE)
    )


def by_hand(loss: Any) -> Any:
    """Return the value and the gradients of what is cast as a whole."""
    return lambda p, batch: jax.value_and_grad(judge.scaled_loss(loss))(
        *judge.cast((p, batch), jnp.bfloat16)
    )


def with_jaxamp(loss: Any) -> Any:
    """Return the value and the gradients by jaxamp."""
    import jaxamp

    return jax.value_and_grad(
        jaxamp.amp(judge.scaled_loss(loss), compute_dtype=jnp.bfloat16)
    )


def with_grampax(loss: Any) -> Any:
    """Return the value and the gradients by grampax, which wraps the first argument:
    the parameters.
    """
    import grampax

    return jax.value_and_grad(
        grampax.autocast(judge.scaled_loss(loss), dtype=jnp.bfloat16)
    )


WAYS = {
    "casting by hand": ("jax", by_hand),
    "mpx": ("mpx-jax", ours),
    "jaxamp": ("jaxamp", with_jaxamp),
    "grampax": ("grampax", with_grampax),
}


def version_of(package: str) -> str:
    """Return the version of a package, or that there is none."""
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{package} is not installed"


def measure(way: str, names: list[str]) -> Row:
    """Return the row of a way."""
    package, make = WAYS[way]
    counts, failures = collections.Counter(), collections.Counter()
    for name in names:
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # grampax prints values
                function = make(judge.PROGRAMS[name].loss)
                found = judge.errors(judge.run(function, name), name)
                products = contractions(function, *judge.PROGRAMS[name].make(0))
        except Exception as error:  # whatever a library raises is its result
            failures[
                f"{type(error).__name__}:"
                f" {str(error).strip().partition(chr(10))[0][:80]}"
            ] += 1
            continue
        counts["run"] += bool(np.isfinite(found).all())
        counts["within"] += bool((found <= judge.allowed(name, "bf16")).all())
        counts["narrow"] += any(
            dtype.itemsize == 2 for c in products for dtype in (c.lhs, c.rhs)
        )
    why = "; ".join(f"{text} ({count})" for text, count in failures.most_common(1))
    return {"way": way, "version": version_of(package), "why": why} | {
        key: counts[key] for key in ("run", "within", "narrow")
    }


def main(
    ways: Annotated[str, typer.Option(help="Separated by commas.")] = ",".join(WAYS),
    programs: Annotated[int, typer.Option(min=0, help="How many; 0 for all.")] = 0,
) -> None:
    """Measure and print the table."""
    names = list(judge.PROGRAMS)[: programs or None]
    rows = [measure(way, names) for way in ways.split(",")]
    title = (
        f"{len(names)} programs, jax {jax.__version__}, on a"
        f" {jax.devices()[0].platform.upper()}"
    )
    print(Sheet(title, rows, COLUMNS).markdown())


app = typer.Typer(
    add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)
app.command()(main)

if __name__ == "__main__":
    app()
