"""The recipes by name: a policy, and what is put around the optimizer under it."""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from mpx._tables import Result, Table

_BF16 = "params=bf16,compute=bf16,output=f32"


class Recipe(NamedTuple):
    """Says what a recipe chooses.

    Attributes:
        policy: the string of its policy.
        purpose: what to take it for.
        bytes: of AdamW, a parameter, in one jitted step that donates, without
            activations.
        follows: how its weights follow those of a float32 training run with the same
            gradients.
        weights: what is kept of the weights that parameters cannot hold: masters in a
            `Storage`, the compensation of `kahan_summation`, nothing but a key
            (`"stochastic"`), or None for parameters in float32.
        moments: the format of the rule's moments: None is float32.
    """

    policy: str
    purpose: str
    bytes: float
    follows: Literal["exactly", "closely"] = "exactly"
    weights: Literal["full", "split", "split24", "kahan", "stochastic"] | None = None
    moments: Literal["bf16", "8bit", "4bit"] | None = None


RECIPES: Mapping[str, Recipe] = {
    "bf16-split": Recipe(_BF16, "train in bfloat16: start here", 14, weights="split"),
    "bf16-split-8bit": Recipe(
        _BF16, "fit a larger model", 8.03, "closely", "split", "8bit"
    ),
    "bf16-split24-8bit": Recipe(
        _BF16, "fit more still", 7.03, "closely", "split24", "8bit"
    ),
    "bf16-split24-4bit": Recipe(
        _BF16, "hold the fewest bytes", 6.55, "closely", "split24", "4bit"
    ),
    "bf16-kahan": Recipe(
        _BF16, "train without masters", 10, "closely", "kahan", "bf16"
    ),
    "bf16-stochastic": Recipe(
        _BF16, "keep nothing of a weight but its parameter", 12, "closely", "stochastic"
    ),
    "bf16-masters": Recipe(
        _BF16, "let other code read float32 masters", 16, weights="full"
    ),
    "bf16-autocast": Recipe(
        "params=f32,compute=bf16,output=f32", "keep float32 parameters", 14
    ),
    "f16-scaled": Recipe(
        "params=f32,compute=f16,output=f32", "use a GPU without bfloat16 (V100, T4)", 14
    ),
    "fp8": Recipe(
        "params=bf16,compute=fp8,output=f32",
        "multiply matrices in 8 bits (H100)",
        14,
        weights="split",
    ),
    "f32": Recipe(
        "params=f32,compute=f32,output=f32", "compare, or train on a CPU", 16
    ),
}


@dataclasses.dataclass(frozen=True, repr=False)
class Recipes(Result):
    """Hold the recipes by their names; prints as a table."""

    recipes: Mapping[str, Recipe]

    def _parts(self) -> Iterable[Table]:
        header = ("recipe", "take it to", "bytes a parameter", "follows float32")
        rows = [
            (name, x.purpose, f"{x.bytes:g}", x.follows)
            for name, x in self.recipes.items()
        ]
        title = (
            "follows float32: whether masters are those of a float32 run with the same"
            " gradients"
        )
        yield Table(title, [header, *rows], (2,))

    def __repr__(self) -> str:
        return str(self)


def recipes() -> Recipes:
    """Return the table of recipes. The name of one stands wherever a policy does.

    Bytes are those of AdamW in one jitted step that donates parameters and state:
    parameters, gradients and state, without activations. A recipe follows float32
    exactly if its weights are those of a float32 training run with the same gradients.

    Example:
        >>> print(recipes())
        follows float32: whether masters are those of a float32 run with the same gradients
        recipe             take it to                                  bytes a parameter  follows float32
        bf16-split         train in bfloat16: start here                              14  exactly
        bf16-split-8bit    fit a larger model                                       8.03  closely
        bf16-split24-8bit  fit more still                                           7.03  closely
        bf16-split24-4bit  hold the fewest bytes                                    6.55  closely
        bf16-kahan         train without masters                                      10  closely
        bf16-stochastic    keep nothing of a weight but its parameter                 12  closely
        bf16-masters       let other code read float32 masters                        16  exactly
        bf16-autocast      keep float32 parameters                                    14  exactly
        f16-scaled         use a GPU without bfloat16 (V100, T4)                      14  exactly
        fp8                multiply matrices in 8 bits (H100)                         14  exactly
        f32                compare, or train on a CPU                                 16  exactly
    """
    return Recipes(RECIPES)


def nearest(name: str) -> str:
    """Return a sentence with the recipes whose names are near to a wrong one, or with
    all of them.
    """
    found = difflib.get_close_matches(name, RECIPES, n=2)
    if found:
        return f"Did you mean {' or '.join(map(repr, found))}?"
    return f"The recipes are {', '.join(RECIPES)}."
