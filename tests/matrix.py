"""Rules, wrappers of mpx, and what stands inside and around them: the cases that
`test_every_rule.py` runs.
"""

import functools
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import mpx
from tests.rules import RULES, bfloat16_params, moment_fields

# `optax.lookahead` logs a warning when it is traced with parameters of another kind, as
# `check_chain` may do.
logging.getLogger("absl").setLevel(logging.ERROR)


def in_8_bits(rule: str, tx: Any) -> Any:
    """Keep the averages of the rule in 8 bits, around float32 parameters."""
    return mpx.low_precision_state(
        tx, {moment_fields(rule): mpx.Blockwise8bit()}, min_size=64
    )


WRAPPERS = {
    "full": lambda rule, tx: mpx.master_weights(tx),
    "split": lambda rule, tx: mpx.master_weights(tx, storage="split"),
    "split24": lambda rule, tx: mpx.master_weights(tx, storage="split24"),
    "8-bit": in_8_bits,
    "scaled": lambda rule, tx: mpx.loss_scaling(mpx.master_weights(tx)),
    "Kahan": lambda rule, tx: optax.chain(mpx.upcast(tx), mpx.kahan_summation()),
}
MASKS = {"kernel": True, "bias": False}
LABELS = {"kernel": "fast", "bias": "slow"}
IN_FRONT = {  # they change gradients, or which of them arrive
    "clipping before": lambda tx: optax.chain(optax.clip(0.1), tx),
    "partition": lambda tx: optax.partition(
        {"fast": tx, "slow": optax.set_to_zero()}, LABELS
    ),
    "masked": lambda tx: optax.chain(
        optax.masked(tx, MASKS), optax.freeze({"kernel": False, "bias": True})
    ),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2),
    "injected": lambda tx: optax.inject_hyperparams(
        lambda rate: optax.chain(optax.scale(rate), tx), hyperparam_dtype=jnp.float32
    )(rate=1.0),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
}
BEHIND = {  # they change updates
    "clipping after": lambda tx: optax.chain(tx, optax.clip(1e-3)),
    "injected rate": lambda tx: optax.inject_hyperparams(
        lambda rate: optax.chain(tx, optax.scale(rate))
    )(0.5),
    "schedule_free": lambda tx: optax.contrib.schedule_free(tx, 1e-2),
    "lookahead": lambda tx: optax.lookahead(tx, 2, 0.5),
}
AROUND = IN_FRONT | BEHIND
SIDES = ("inside", "outside")  # of the wrapper

_CHANGED = (
    "was final when `(master_weights|kahan_summation)` had rounded it, but `\\w+`"
    " changes it after that"
)
_SCALED = (
    "gradients reach `loss_scaling` scaled, but `\\w+` in front of it is not linear in"
    " them"
)
REFUSED = {
    (around, wrapper): _CHANGED
    for around in BEHIND
    for wrapper in WRAPPERS
    if wrapper != "8-bit"
}
REFUSED |= {(around, "scaled"): _SCALED for around in ("clipping before", "MultiSteps")}


class Case(NamedTuple):
    """A rule in a wrapper, and perhaps something inside or around of that."""

    rule: str
    wrapper: str
    around: str = ""
    side: str = ""

    def __str__(self) -> str:
        return ", ".join(
            filter(
                None, (self.rule, self.wrapper, f"{self.around} {self.side}".strip())
            )
        )

    def plain(self, rate: Any = None) -> Any:
        """Return the rule and what stands around it, without mpx; with a rate, its
        updates are multiplied by that.
        """
        return AROUND.get(self.around, lambda tx: tx)(self._rule(rate))

    def wrapped(self, rate: Any = None) -> Any:
        wrap = functools.partial(WRAPPERS[self.wrapper], self.rule)
        return (
            AROUND[self.around](wrap(self._rule(rate)))
            if self.side == "outside"
            else wrap(self.plain(rate))
        )

    def _rule(self, rate: Any) -> Any:
        rule = RULES[self.rule].make()
        return rule if rate is None else optax.chain(rule, optax.scale(rate))

    def params(self) -> Any:
        """Return parameters that it trains; what keeps 8 bits does not care for those."""
        dtype = jnp.float32 if self.wrapper == "8-bit" else jnp.bfloat16
        params = jax.tree.map(lambda p: p.astype(dtype), bfloat16_params())
        slow = jax.tree.map(lambda p: jnp.array(p, copy=True), params)
        return (
            optax.LookaheadParams(params, slow)
            if self.around == "lookahead"
            else params
        )

    @property
    def scale(self) -> float:
        """What the gradients that it takes are multiplied by."""
        return 2.0**15 if self.wrapper == "scaled" else 1.0


def _can_optax(rule: str, around: str) -> bool:
    """Leave out what no extra arguments reach, a line search on parts of a tree, and
    gradients that examples have.
    """
    if RULES[rule].per_example:
        return around not in ("partition", "masked", "MultiSteps")
    return rule != "lbfgs" and not (
        around == "lookahead" and RULES[rule].extra_args({}, {})
    )


def _cases() -> Iterator[Case]:
    for i, rule in enumerate(RULES):
        wrappers = [name for name in WRAPPERS if name != "8-bit" or moment_fields(rule)]
        yield from (Case(rule, wrapper) for wrapper in wrappers)
        for j, around in enumerate(AROUND):
            side = SIDES[(i + i // 6 + j) % 2]
            allowed = [
                name
                for name in wrappers
                if side == "inside" or (around, name) not in REFUSED
            ]
            if allowed and _can_optax(rule, around):
                yield Case(rule, allowed[(i + j) % len(allowed)], around, side)


CASES = list(_cases())
_OF_RULES = [[case for case in CASES if case.rule == rule] for rule in RULES]
# For every third rule one of its cases, each of another kind.
QUICK = {cases[i % len(cases)] for i, cases in enumerate(_OF_RULES) if i % 3 == 0}
# What is composed with each of JAX's transformations: each rule in a wrapper, or with
# something inside or around it; but for the line search, whose loop has no derivative.
COMPOSED = [
    cases[-1 - i // 2 % 10 if i % 2 and len(cases) > 10 else i % 5]
    for i, cases in enumerate(_OF_RULES)
    if cases[0].rule != "lbfgs"
]
