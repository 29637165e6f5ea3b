"""`chain`: write optimizers as the gradient flows. A wrapper without its inner rule is
an element of it.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, overload

import optax

from mpx._errors import hint_to_call, is_transformation

P = ParamSpec("P")


class Element:
    """A wrapper that waits for its inner rule: what stands behind it in `mpx.chain`."""

    def __init__(
        self, name: str, wrap: Callable[[Any], optax.GradientTransformationExtraArgs]
    ) -> None:
        wrap(optax.identity())  # so that wrong settings raise here
        self.name = name
        self.wrap = wrap

    def __repr__(self) -> str:
        return f"mpx.{self.name}(...), an element of mpx.chain"

    @property
    def init(self) -> Any:
        """Raise: there is no rule yet."""
        raise TypeError(
            f"`{self.name}` has no rule to wrap. Put it into `mpx.chain` (not"
            " `optax.chain`), where it wraps what stands behind it, or give it the"
            f" rule: `mpx.{self.name}(optax.adamw(1e-3), ...)`."
        )

    @property
    def update(self) -> Any:
        """Raise: there is no rule yet."""
        return self.init


class FinalUpdates(optax.GradientTransformationExtraArgs):
    """A transformation that chooses the final updates: nothing may follow it."""

    name: str = ""

    @classmethod
    def of(cls, tx: tuple[Any, Any], name: str) -> Any:
        """Return a transformation, its `init` and `update`, as one that stands last,
        under the name of the function that made it.
        """
        last = cls(*tx)
        last.name = name
        return last


class Wrapper(Protocol[P]):
    """A wrapper, called with its inner rule or without."""

    @overload
    def __call__(
        self, inner: optax.GradientTransformation, *args: P.args, **kwargs: P.kwargs
    ) -> optax.GradientTransformationExtraArgs: ...
    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Element: ...


def element(
    wrapper: Callable[
        Concatenate[optax.GradientTransformation, P],
        optax.GradientTransformationExtraArgs,
    ],
) -> Wrapper[P]:
    """Let a wrapper be called without its inner rule, for an element of `chain`."""

    @functools.wraps(wrapper)
    def called(*args, **kwargs):
        first = args[0] if args else ""
        # A function is a rule that was not called, and a number its learning rate: the
        # wrapper refuses both in words.
        is_meant = inspect.isroutine(first) or isinstance(first, float | None)
        if is_meant or is_transformation(first) or "inner" in kwargs:
            return wrapper(*args, **kwargs)
        if any(map(is_transformation, args)):
            raise TypeError(
                f"`{wrapper.__name__}` takes the rule first:"
                f" `mpx.{wrapper.__name__}(rule, ...)`."
            )
        return Element(wrapper.__name__, lambda inner: wrapper(inner, *args, **kwargs))

    return called  # type: ignore[return-value]


def chain(
    *elements: optax.GradientTransformation | Element,
) -> optax.GradientTransformationExtraArgs:
    """Chain transformations as `optax.chain` does, with wrappers of mpx that wrap what
    stands behind them.

    The chain reads as the gradient flows, and has the states and the bits of the nested
    form. These two are the same:

        clip, adamw = optax.clip_by_global_norm(1.0), optax.adamw(1e-3)
        chain(loss_scaling(), master_weights("split"), clip, adamw)
        loss_scaling(master_weights(optax.chain(clip, adamw), "split"))

    `kahan_summation` and `stochastic_rounding` stand last. They see the 16-bit
    parameters, so `upcast` and `low_precision_state` wrap what stands between
    themselves and these; `loss_scaling` and `zero1` wrap them too.

    Args:
        *elements: Optax transformations, and `zero1(mesh)`, `loss_scaling()`,
            `mixed_precision(recipe)`, `master_weights(storage="split")`, `upcast()`,
            `low_precision_state(formats)`, `kahan_summation()`,
            `stochastic_rounding(key)`. `zero1` stands first, then `loss_scaling`, then
            `master_weights`, so that clipping and every other rule sees gradients that
            are unscaled and in float32.

    Returns:
        A transformation.

    Raises:
        TypeError: if an element is neither.
        ValueError: if the order cannot work.

    Example:
        >>> tx = chain(
        ...     low_precision_state({"mu|nu": "bf16"}, min_size=0),
        ...     optax.adamw(1e-3),
        ...     kahan_summation(),
        ... )
        >>> params = {"w": jnp.ones(4, jnp.bfloat16)}
        >>> [type(state).__name__ for state in tx.init(params)]
        ['LowPrecisionState', 'KahanSummationState']
    """
    if not elements:
        raise ValueError("`mpx.chain` needs an element, such as `optax.adamw(1e-3)`.")
    _require_order(elements)
    rules: list[Any] = []  # what the next element wraps
    # What stays outside of an element that gives its rules float32 parameters.
    last: list[Any] = []
    for x in reversed(elements):
        if isinstance(x, FinalUpdates):
            last = [x]
        elif not isinstance(x, Element):
            rules = [x, *rules]
        elif x.name in _AROUND_FINAL_UPDATES:
            rules, last = [x.wrap(_joined([*rules, *last]))], []
        else:
            rules = [x.wrap(_joined(rules))]
    return optax.with_extra_args_support(_joined([*rules, *last]))


# What these wrap keeps its 16-bit parameters.
_AROUND_FINAL_UPDATES = ("zero1", "loss_scaling")
# A chain has at most one element of each group.
_EXCLUSIVE = (
    ("mixed_precision", "master_weights", "kahan_summation", "stochastic_rounding"),
    ("mixed_precision", "loss_scaling"),
    ("zero1",),
)
# Why it stands in front of others, from the first to stand in a chain to the last.
_WHY = {
    "zero1": "which shards the state of everything else",
    "loss_scaling": (
        "which unscales the gradients: in front of it they are still multiplied by the"
        " loss scale"
    ),
    "mixed_precision": "which gives rules float32 gradients without a loss scale",
    "master_weights": (
        "which gives rules float32 parameters and gradients, and chooses the final"
        " updates"
    ),
}


def _joined(elements: Sequence[Any]) -> Any:
    """Return a chain of transformations, or the only one itself: a chain of one would
    nest its state in a tuple.
    """
    return elements[0] if len(elements) == 1 else optax.chain(*elements)


def _require_order(elements: Sequence[Any]) -> None:
    """Raise if the order cannot work, or if what stands at the end has nothing to
    wrap.
    """
    names = [_named(x, i, len(elements)) for i, x in enumerate(elements)]
    own_names = [getattr(x, "name", "") for x in elements]
    for x, name in zip(elements[:-1], names, strict=False):
        if isinstance(x, FinalUpdates):
            raise ValueError(
                f"`mpx.chain`: {name} must stand last: it chooses the final"
                " updates, and nothing may change them. Put what stands behind it in"
                " front of it or inside."
            )
    for group in _EXCLUSIVE:
        found = [f"`{name}`" for name in own_names if name in group]
        if len(found) > 1:
            raise ValueError(
                f"`mpx.chain`: {found[0]} and {found[1]} exclude each other; keep one"
                " of them."
            )
    ranks = [[*_WHY, name].index(name) for name in own_names]
    for i, x in enumerate(elements):
        if not isinstance(x, Element):
            continue
        behind = elements[i + 1 :]
        if not behind or (
            isinstance(behind[0], FinalUpdates) and x.name not in _AROUND_FINAL_UPDATES
        ):
            raise ValueError(
                f"`mpx.chain`: {names[i]} wraps the rules behind it, but none stands"
                " there."
            )
        for rank, name in zip(ranks[:i], names, strict=False):
            if rank > ranks[i]:
                raise ValueError(
                    f"`mpx.chain`: {name} must stand behind {names[i]}, {_WHY[x.name]}."
                )


def _named(x: Any, i: int, count: int) -> str:
    """Return how an error names an element."""
    if isinstance(x, (Element, FinalUpdates)):
        return f"`{x.name}`"
    place = f"element {i + 1} of {count}"
    if not is_transformation(x):
        raise TypeError(
            "`mpx.chain` needs Optax transformations and elements of mpx, but got"
            f" {type(x).__name__} as {place}.{hint_to_call(x)}"
        )
    return place
