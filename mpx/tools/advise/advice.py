"""Hold what `advise` found: the ranked leaves, the errors, and which leaves to keep in float32."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from jax.typing import DTypeLike

from mpx._policy import Policy
from mpx._tables import Result, Table


@dataclasses.dataclass(frozen=True)
class PrecisionErrors:
    """Relative errors against float32: |x - reference| / |reference|, with Euclidean norms.

    An error is infinite where `x` is infinite or NaN, and where only the reference is 0.

    Attributes:
        loss: the error of the loss.
        gradient: the error of the gradient, all leaves as one vector.
    """

    loss: float
    gradient: float

    @property
    def worst(self) -> float:
        """Return the larger one, which a bound limits, and which ranks rows."""
        return max(self.loss, self.gradient)


@dataclasses.dataclass(frozen=True)
class AdviceRow:
    """Leaves that one override can keep in float32, and the errors when only they are narrowed.

    Attributes:
        name: the path of a leaf, or of several leaves with `*` for numbers.
        pattern: the regular expression of the override.
        bytes: how many bytes more the leaves take in float32 than as the policy stores them.
        errors: the errors if all other leaves are kept in float32.
        is_kept: whether the advice is to keep these leaves in float32.
    """

    name: str
    pattern: str
    bytes: int
    errors: PrecisionErrors
    is_kept: bool = False


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
        lines = [("what", "loss", "gradient", "bytes", "keep by")]
        for row in self.rows:
            errors = f"{row.errors.loss:.1e}", f"{row.errors.gradient:.1e}"
            lines.append((row.name, *errors, f"{row.bytes:,}", "override" if row.is_kept else ""))
        yield Table("Errors if one alone is narrowed", lines, range(1, 4))
        verdict = f"The bound {self.bound:g} is met."
        if not self.met:
            verdict = (
                f"The bound {self.bound:g} is not met, even with all of these leaves in float32. `mpx.explain` lists "
                "the contractions that no override reaches, for `mpx.full_precision`."
            )
        yield "\n".join([*(f"override ({pattern!r}, 'f32')" for pattern, _ in self.overrides), verdict])
