"""Hold what `advise` found: the ranked leaves, the errors, and which leaves to keep in float32."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from jax.typing import DTypeLike

from mpx._policy import Policy
from mpx._tables import Result, Table


@dataclasses.dataclass(frozen=True)
class PrecisionErrors:
    """Relative errors against float32, means over the batches: |x - reference| / |reference|, with Euclidean norms.

    An error is infinite where `x` is infinite or NaN, and where only the reference is 0.

    Attributes:
        loss: the error of the loss.
        gradient: the error of the gradient, all leaves as one vector.
    """

    loss: float
    gradient: float

    @property
    def worst(self) -> float:
        """Return the larger one, which a bound limits."""
        return max(self.loss, self.gradient)


@dataclasses.dataclass(frozen=True)
class AdviceRow:
    """Leaves that one override can keep in float32, and the errors when only they are narrowed.

    Attributes:
        name: the path of a leaf, or of several leaves with `*` for numbers.
        pattern: the regular expression of the override.
        bytes: how many bytes more the leaves take in float32 than as the policy stores them.
        flops: the FLOPs of the contractions that the override keeps in float32, in a call of the loss; the gradient has
            about twice as many more.
        loss_error: the relative error of the loss if all other leaves are kept in float32.
        gradient_error: the relative error of the gradient if all other leaves are kept in float32.
        is_kept: whether the advice is to keep these leaves in float32.
    """

    name: str
    pattern: str
    bytes: int
    flops: int
    loss_error: float
    gradient_error: float
    is_kept: bool = False

    @property
    def error(self) -> float:
        """Return the larger of the two errors, which ranks the rows."""
        return max(self.loss_error, self.gradient_error)


@dataclasses.dataclass(frozen=True)
class Advice(Result):
    """The result of `advise`; prints as a table, with `rich.print` too.

    Attributes:
        rows: what an override can keep in float32, largest error first.
        overrides: pairs (pattern, float32) for the leaves to keep, for `Policy.overrides`.
        policy: the given policy with the overrides in front of its own.
        bound: the bound that was given.
        before: the errors of the given policy.
        after: the errors of `policy`.
        rest: the errors with all leaves in float32. Contractions of activations cause them, such as the logits of
            attention, which no override reaches: put `mpx.full_precision` around those.
    """

    rows: tuple[AdviceRow, ...]
    overrides: tuple[tuple[str, DTypeLike], ...]
    policy: Policy
    bound: float
    before: PrecisionErrors
    after: PrecisionErrors
    rest: PrecisionErrors

    @property
    def met(self) -> bool:
        """Return whether `policy` keeps the errors of the loss and the gradient at or under the bound."""
        return self.after.worst <= self.bound

    def as_dict(self) -> dict[str, Any]:
        """Return everything for JSON; the policy as its string."""
        return super().as_dict() | {"policy": str(self.policy)}

    def _parts(self) -> Iterator[Table | str]:
        measured = {"the given policy": self.before, "the overrides": self.after, "all leaves in float32": self.rest}
        yield "\n".join(
            f"Relative errors with {name}: loss {e.loss:.2e}, gradient {e.gradient:.2e}" for name, e in measured.items()
        )
        header = ("what", "loss", "gradient", "bytes", "FLOPs", "keep by")
        yield Table("Errors if one alone is narrowed", [header, *map(_line, self.rows)], range(1, 5))
        verdict = f"The bound {self.bound:g} is met."
        if not self.met:
            verdict = (
                f"The bound {self.bound:g} is not met, even with all of these leaves in float32. `mpx.explain` lists "
                "the contractions that no override reaches, for `mpx.full_precision`."
            )
        yield "\n".join([*(f"override ({pattern!r}, 'f32')" for pattern, _ in self.overrides), verdict])


def _line(row: AdviceRow) -> tuple[str, ...]:
    errors = (f"{row.loss_error:.1e}", f"{row.gradient_error:.1e}")
    return (row.name, *errors, f"{row.bytes:,}", f"{row.flops:,}", "override" if row.is_kept else "")
