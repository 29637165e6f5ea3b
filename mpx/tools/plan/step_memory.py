"""Memory of a compiled step while it runs, from XLA's own analysis."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax

from mpx import _tables


@dataclasses.dataclass(frozen=True)
class StepMemory(_tables.Result):
    """Bytes of a compiled program on one device; prints as a table, with `rich.print` too.

    Attributes:
        arguments: parameters, optimizer state and batch.
        outputs: everything that the step returns.
        aliased: the outputs that are written over donated arguments.
        temporaries: activations, gradients and buffers for communication.
        code: the program itself.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int

    @property
    def peak(self) -> int:
        """Memory that one run needs: arguments, outputs that are not aliased, temporaries and code.

        Anything else that lives on the device comes on top: a second batch that waits, or the last step's results.
        """
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code

    def _parts(self) -> Iterator[_tables.Table]:
        rows = [(name, f"{value:,}") for name, value in self.as_dict().items()]
        yield _tables.Table("", [("of the compiled step", "bytes"), *rows])


def step_memory(step: Callable[..., Any], *args: Any, **kwargs: Any) -> StepMemory:
    """Compile a step without running it, and return how many bytes XLA needs for it on each device.

    Args:
        step: a function, or one that `jax.jit` returned. Pass the latter, with `donate_argnums`, if the training run
            donates: without donation old and new parameters and states are held at the same time.
        args: the arguments of the step or their shapes (`jax.ShapeDtypeStruct`), which may have shardings.
        kwargs: the keyword arguments, likewise.

    Returns:
        A `StepMemory` of the backend that compiles: a GPU has other temporaries than a CPU.

    Raises:
        TypeError: if `step` is not a function.
        RuntimeError: if the backend has no such analysis.

    Example:
        >>> step = jax.jit(lambda w, x: w - 0.1 * jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w), donate_argnums=0)
        >>> shape = jax.ShapeDtypeStruct((256, 256), jnp.float32)
        >>> memory = step_memory(step, shape, shape)
        >>> memory.arguments, memory.outputs, memory.aliased
        (524288, 262144, 262144)
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
