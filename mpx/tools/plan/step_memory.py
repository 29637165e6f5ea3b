"""What a compiled step holds while it runs, from XLA's own analysis."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from mpx import _tables


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """Bytes of a compiled program on one device; prints as a table, with `rich.print` too.

    Attributes:
        arguments: what goes in: parameters, optimizer state, batch.
        outputs: what comes out.
        aliased: of the outputs, what takes the place of donated arguments.
        temporaries: what is neither: activations, gradients, buffers for communication.
        code: the program itself.

    Example:
        >>> memory = step_memory(lambda x: x + 1, jax.ShapeDtypeStruct((1024,), jnp.float32))
        >>> memory.arguments, memory.outputs, memory.aliased
        (4096, 4096, 0)
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int

    @property
    def peak(self) -> int:
        """What must be free for one run: arguments, outputs that take nobody's place, temporaries and code.

        Nothing else must live on the device: a second batch that waits, or the last step's results, come on top.
        """
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code

    def as_dict(self) -> dict[str, int]:
        """All numbers, for JSON."""
        return dataclasses.asdict(self) | {"peak": self.peak}

    def __str__(self) -> str:
        """The numbers as a table."""
        return _tables.text_table(
            [("of the compiled step", "bytes"), *((k, f"{v:,}") for k, v in self.as_dict().items())]
        )

    def __rich__(self) -> Any:
        """The table as Rich shows it; only Rich calls this, so it is there."""
        from rich.text import Text

        return Text(str(self))  # not markup


def step_memory(step: Callable[..., Any], *args: Any, **kwargs: Any) -> StepMemory:
    """Compiles a step, without running it, and says how many bytes XLA will need for it on each device.

    To find the largest batch that fits, ask for one batch after another: see `largest_that_fits`.

    Args:
        step: a function, or one that `jax.jit` returned. Give the latter, with `donate_argnums`, if the training has
            it: without donation old and new parameters and states are held at the same time.
        args: the arguments of the step or their shapes (`jax.ShapeDtypeStruct`). Shapes with shardings give the bytes
            of one of the devices.
        kwargs: likewise.

    Returns:
        A `StepMemory`. The numbers are those of the backend that compiles: a GPU has other temporaries than a CPU.

    Raises:
        TypeError: if `step` is no function.
        RuntimeError: if the backend has no such analysis.

    Example:
        >>> step = jax.jit(lambda w, x: w - 0.1 * jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w), donate_argnums=0)
        >>> w = jax.ShapeDtypeStruct((256, 256), jnp.float32)
        >>> memory = step_memory(step, w, jax.ShapeDtypeStruct((64, 256), jnp.float32))
        >>> memory.arguments, memory.outputs, memory.aliased
        (327680, 262144, 262144)
        >>> of_batch = lambda n: step_memory(step, w, jax.ShapeDtypeStruct((n, 256), jnp.float32)).peak
        >>> largest_that_fits(of_batch, 2e6) > 64
        True
    """
    if not callable(step):
        raise TypeError(f"`step_memory` needs a function, but got {type(step).__name__}.")
    lowerable: Any = step if hasattr(step, "lower") else jax.jit(step)
    found = lowerable.lower(*args, **kwargs).compile().memory_analysis()
    if found is None:
        raise RuntimeError(
            f"`step_memory`: the backend {jax.default_backend()!r} gives no memory analysis of a compiled program. "
            "`memory_plan` counts what lives between steps without it."
        )
    return StepMemory(
        arguments=found.argument_size_in_bytes,
        outputs=found.output_size_in_bytes,
        aliased=found.alias_size_in_bytes,
        temporaries=found.temp_size_in_bytes,
        code=found.generated_code_size_in_bytes,
    )
