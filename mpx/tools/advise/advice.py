"""Hold what `advise` found: the ranked rows, the errors, and what to keep in float32."""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

from jax.typing import DTypeLike

from mpx._policy import Policy
from mpx._tables import Result, Table


@dataclasses.dataclass(frozen=True)
class PrecisionErrors:
    """Relative errors against float32, means over the batches: |x - reference| / |reference|, with Euclidean norms.

    An error is infinite where `x` is infinite or NaN, and where the reference alone is 0.

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
    """Something that can be kept in float32 by one step, and the error that narrowing it alone causes.

    Attributes:
        name: the path of a leaf, or that of several leaves with `*` for numbers; `file:line (function)` of a
            contraction.
        kind: `"leaf"`: leaves and the contractions with them, which an override keeps in float32; `"contraction"`: the
            contractions of a source line that no leaf reaches as it is, such as the logits of attention, which
            `full_precision` keeps.
        pattern: the regular expression of the override; empty for a contraction.
        bytes: the bytes that its leaves take more in float32 than as the policy stores them.
        flops: the FLOPs of its contractions in a call of the loss; the gradient has about twice as many more.
        loss_error: the relative error of the loss if this alone is narrowed.
        gradient_error: the relative error of the gradient if this alone is narrowed.
        share: the square of the error, divided by the sum of all rows' squares: independent roundings add up so.
        is_kept: whether the advice is to keep it in float32.
    """

    name: str
    kind: Literal["leaf", "contraction"]
    pattern: str
    bytes: int
    flops: int
    loss_error: float
    gradient_error: float
    share: float = 0.0
    is_kept: bool = False

    @property
    def error(self) -> float:
        """Return the larger one of the two errors, by which rows are ranked."""
        return max(self.loss_error, self.gradient_error)


@dataclasses.dataclass(frozen=True)
class Advice(Result):
    """The result of `advise`; prints as a table, with `rich.print` too.

    Attributes:
        rows: what can be kept in float32, largest error first.
        overrides: pairs (pattern, float32) for the leaves to keep, for `Policy.overrides`.
        lines: source lines whose contractions are to be wrapped in `mpx.full_precision`, because overrides alone do not
            meet the bound; empty where they do.
        policy: the given policy with the overrides in front of its own.
        bound: the bound that was given.
        before: the errors of the given policy.
        after: the errors of `policy`, measured with nothing wrapped.
        after_lines: the errors of `policy` with the lines wrapped as well; None without lines.
    """

    rows: tuple[AdviceRow, ...]
    overrides: tuple[tuple[str, DTypeLike], ...]
    lines: tuple[str, ...]
    policy: Policy
    bound: float
    before: PrecisionErrors
    after: PrecisionErrors
    after_lines: PrecisionErrors | None

    @property
    def met(self) -> bool:
        """Return whether `policy` alone keeps the errors of the loss and the gradient at or under the bound."""
        return self.after.worst <= self.bound

    def as_dict(self) -> dict[str, Any]:
        """Return everything for JSON; the policy as its string."""
        return super().as_dict() | {"policy": str(self.policy)}

    def _parts(self) -> Iterator[Table | str]:
        measured = {"the given policy": self.before, "the overrides": self.after}
        if self.after_lines is not None:
            measured["overrides and full_precision"] = self.after_lines
        yield "\n".join(
            f"Relative errors with {name}: loss {e.loss:.2e}, gradient {e.gradient:.2e}" for name, e in measured.items()
        )
        header = ("what", "loss", "gradient", "share", "bytes", "FLOPs", "keep by")
        yield Table("Errors if one alone is narrowed", [header, *map(_line, self.rows)], range(1, 6))
        steps = [f"override ({pattern!r}, 'f32')" for pattern, _ in self.overrides]
        steps += [f"mpx.full_precision around the contractions of {line}" for line in self.lines]
        best = (self.after_lines or self.after).worst
        by = "" if self.met else " with these lines in full_precision, not by overrides alone"
        verdict = f"The bound {self.bound:g} is met{by}."
        if best > self.bound:
            verdict = f"The bound {self.bound:g} is not met, even with all of this in float32: {best:.2e}."
        yield "\n".join([*steps, verdict])


def _line(row: AdviceRow) -> tuple[str, ...]:
    keep_by = {"leaf": "override", "contraction": "full_precision"}[row.kind] if row.is_kept else ""
    errors = (f"{row.loss_error:.1e}", f"{row.gradient_error:.1e}", f"{row.share:.1%}")
    return (row.name, *errors, f"{row.bytes:,}", f"{row.flops:,}", keep_by)
