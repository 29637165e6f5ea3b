"""Whether a mixture of experts trains in few bits as in float32.

    PYTHONPATH=. python -m benchmarks.experts_training
    PYTHONPATH=. python -m benchmarks.experts_training --seeds 3

The tiny model of `examples.experts` on bytes: 32 experts, 2 a token, batches of 8
sequences of 64. On a CPU in an hour and a half.

- Where training ends, beside float32 from the same seed. A loss is the mean of the last
  30 steps. For scale the weights of one run start a millionth larger.
- How many tokens have the same set of experts in a layer as in float32, before the
  first step.
- How far weights of experts go that get no tokens for 100 steps, in the last 50 steps.
"""

import functools
import itertools
import unittest.mock
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer

import mpx
from benchmarks.report import Row, Sheet
from examples import experts, llama
from examples.gpt import compare

CONFIG = experts.CONFIGS["tiny"]
SHAPE = (8, 65)
RATE = 1e-3
FEW_BITS = "bf16-split24-4bit"
ASLEEP = 8  # experts that get no tokens: one in four
STEPS_AWAKE, STEPS_ASLEEP, LAST = 50, 100, 50


class Case(NamedTuple):
    """How a model is trained."""

    recipe: str
    rule: str
    larger: float = 1.0  # what the first weights are multiplied by


CASES = (
    Case("f32", "adamw"),
    Case("f32", "adamw", 1 + 1e-6),
    Case("bf16-split24-4bit", "adamw"),
    Case("f32", "muon"),
    Case("bf16-split24-8bit", "muon"),
)
PARITY_COLUMNS = {
    "recipe": "{recipe}",
    "rule": "{rule}",
    "loss": "{loss:.4f}",
    "spread": "{spread:.4f}",
    "mean gap, spreads": "{gap:+.2f}",
    "largest": "{largest:+.2f}",
    "dropped": "{dropped:.1%}",
}
CHOICE_COLUMNS = {
    "computed": "{way}",
    "same sets, weights rounded alike": "{same:.2%}",
    "beside float32's own weights": "{own:.2%}",
    "same single choices": "{single:.2%}",
    "scores apart where sets differ": "{differing:.4f}",
    "everywhere": "{all:.4f}",
}
SLEEP_COLUMNS = {
    "recipe": "{recipe}",
    "weights": "{weights}",
    "mean way, asleep": "{asleep:.1e}",
    "largest": "{largest:.1e}",
    "mean way of the others": "{awake:.1e}",
}


def batches(text: np.ndarray, seed: int, count: int) -> Iterator[np.ndarray]:
    """Yield tokens to train on."""
    for batch in compare.random_batches(text, SHAPE, seed=seed, count=count):
        yield batch.astype(np.int32)


# --- Where training ends. ---
@functools.cache
def steps_of(recipe: str, rule: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the function that makes weights and state of a key, and the step."""
    start, step = experts.make_step(CONFIG, recipe, rule=rule, learning_rate=RATE)
    return jax.jit(start), step


def trained(case: Case, text: np.ndarray, seed: int, steps: int) -> tuple[float, float]:
    """Return the mean over the last 30 steps of the loss, and of what is dropped."""
    start, step = steps_of(case.recipe, case.rule)
    params, opt_state = start(jax.random.key(seed))
    params = jax.tree.map(lambda w: w * jnp.asarray(case.larger, w.dtype), params)
    found = []
    for tokens in batches(text, seed, steps):
        params, opt_state, loss, aux = step(params, opt_state, tokens)
        found.append((float(loss), float(aux["dropped"])))
    loss, dropped = np.mean(found[-30:], 0)
    return float(loss), float(dropped)


def parity(text: np.ndarray, seeds: int, steps: int) -> Iterator[Row]:
    """Yield where each case ends, beside float32 by the same rule."""
    found: dict[Case, list[tuple[float, float]]] = {case: [] for case in CASES}
    for seed in range(seeds):
        for case, results in found.items():
            results.append(trained(case, text, seed, steps))
            print(*case, seed, *results[-1], flush=True)
    for case, results in found.items():
        losses, dropped = np.array(results).T
        wide = np.array(found[Case("f32", case.rule)])[:, 0]
        gaps = (losses - wide) / wide.std(ddof=1)
        recipe = case.recipe if case.larger == 1 else f"{case.recipe}, larger weights"
        yield {
            "recipe": recipe,
            "rule": case.rule,
            "loss": losses.mean(),
            "spread": losses.std(ddof=1),
            "gap": gaps.mean(),
            "largest": gaps[np.abs(gaps).argmax()],
            "dropped": dropped.mean(),
        }


# --- What routers choose. ---
real_route, real_rotated = experts.route, llama.rotated


def showing(route: Callable[..., Any]) -> Callable[..., Any]:
    """Let a router return, in the place of the loss that balances them, its choices,
    and how far the last score that is chosen lies above the next one.
    """

    def shown(config, x, router):
        chosen, weights, _ = route(config, x, router)
        scores, _ = jax.lax.top_k(x.astype("float32") @ router, config.chosen + 1)
        return chosen, weights.astype(x.dtype), (chosen, -jnp.diff(scores)[..., -1])

    return shown


def route_in_float32(config: Any, x: jax.Array, router: jax.Array) -> Any:
    """Choose experts in float32, in a model that is cast by hand."""
    return real_route(config, x.astype("float32"), router.astype("float32"))


def chosen_by(recipe: str | None, route: Any, params: Any, tokens: Any) -> Any:
    """Return the experts (layers, B, T, k) of each token, in order, and how far scores
    are apart; without a recipe all is computed in the dtype of the weights.
    """

    def chosen(params, tokens):
        run = functools.partial(experts.layer, CONFIG)
        return llama.through_layers(CONFIG, run, params, tokens)[1][0]

    rotated = lambda x: real_rotated(x).astype(x.dtype)
    patch = unittest.mock.patch.object
    with (
        patch(experts, "route", showing(route)),
        patch(llama, "rotated", real_rotated if recipe else rotated),
    ):
        run = mpx.autocast(chosen, recipe) if recipe else chosen
        found, apart = jax.jit(run)(params, tokens)
    return np.sort(found, -1), np.asarray(apart)


WAYS: Mapping[str, tuple[str | None, Any]] = {
    f"`{FEW_BITS}`": (FEW_BITS, real_route),
    "bfloat16 by hand": (None, real_route),
    "bfloat16 by hand, router in float32": (None, route_in_float32),
}


def choices(text: np.ndarray, seeds: int) -> Iterator[Row]:
    """Yield what has the same experts as float32, before the first step."""
    found: dict[str, list[Any]] = {way: [] for way in WAYS}
    for seed in range(seeds):
        init = functools.partial(experts.init_params, CONFIG)
        params = jax.jit(init)(jax.random.key(seed))
        rounded = mpx.get_policy(FEW_BITS).cast_to_param(params)
        tokens = next(batches(text, seed, 1))
        same, apart = chosen_by("f32", real_route, mpx.cast_to_full(rounded), tokens)
        own, _ = chosen_by("f32", real_route, params, tokens)
        for way, (recipe, route) in WAYS.items():
            sets, _ = chosen_by(recipe, route, rounded, tokens)
            differs = (sets != same).any(-1)
            is_shared = (sets[..., None] == same[..., None, :]).any(-1)
            shares = ~differs, (sets == own).all(-1), is_shared
            gaps = np.median(apart[differs]), np.median(apart)
            found[way].append([*map(np.mean, shares), *gaps])
    for way, of_way in found.items():
        names = "same", "own", "single", "differing", "all"
        yield {"way": way} | dict(zip(names, np.mean(of_way, 0), strict=True))


# --- Experts that get no tokens. ---
def route_past_some(config: Any, x: jax.Array, router: jax.Array) -> Any:
    """Choose none of the first experts."""
    row = jnp.where(jnp.arange(config.experts) < ASLEEP, -1e4, 0.0)[None]
    x = jnp.concatenate([x, jnp.ones_like(x[..., :1])], -1)
    return real_route(config, x, jnp.concatenate([router, row.astype(router.dtype)]))


def ways_asleep(recipe: str, text: np.ndarray) -> Iterator[Row]:
    """Yield how far weights go in the last steps of a run whose last 100 steps give
    some experts no tokens, by AdamW without decay.
    """
    clip = mpx.clip_by_predicted_norm(1.0, by="head|norm")
    rule = optax.chain(clip, optax.adamw(RATE, weight_decay=0.0))
    tx = mpx.mixed_precision(rule, recipe)
    tokens = batches(text, 0, STEPS_AWAKE + STEPS_ASLEEP)

    def make_step():
        loss = mpx.autocast(functools.partial(experts.loss_fn, CONFIG), recipe)
        return jax.jit(mpx.train_step(loss, tx, has_aux=True))

    def go_on(step, state, count):
        for batch in itertools.islice(tokens, count):
            *state, _, _ = step(*state, batch)
        return state

    params = experts.init_params(CONFIG, jax.random.key(0))
    params = mpx.get_policy(recipe).cast_to_param(params)
    state = go_on(make_step(), (params, tx.init(params)), STEPS_AWAKE)
    with unittest.mock.patch.object(experts, "route", route_past_some):
        step = make_step()
        state = go_on(step, state, STEPS_ASLEEP - LAST)
        before: Any = mpx.master_params(*state)
        after: Any = mpx.master_params(*go_on(step, state, LAST))
    # The axis of experts is the second one of their weights, the last of the router's.
    for name, axis in {"gate": 1, "up": 1, "down": 1, "router": 2}.items():
        way = np.abs(after["layers"][name] - before["layers"][name])
        asleep, awake = np.split(np.moveaxis(way, axis, 0), [ASLEEP])
        row = {"asleep": asleep.mean(), "largest": asleep.max(), "awake": awake.mean()}
        yield {"recipe": recipe, "weights": name} | row


def main(
    steps: Annotated[int, typer.Option(min=30, help="Of each run.")] = 300,
    seeds: Annotated[int, typer.Option(min=2, help="Of weights and batches.")] = 5,
) -> None:
    """Train and print the tables."""
    text, _ = compare.split(compare.read_text(None))
    recipes = ("f32", "bf16-split24-8bit", FEW_BITS)
    asleep = [row for recipe in recipes for row in ways_asleep(recipe, text)]
    tables = (
        ("Experts without tokens, one seed", asleep, SLEEP_COLUMNS),
        (f"What routers choose, {seeds} seeds", choices(text, seeds), CHOICE_COLUMNS),
        (
            f"Where training ends, {steps} steps, {seeds} seeds",
            parity(text, seeds, steps),
            PARITY_COLUMNS,
        ),
    )
    for title, rows, columns in tables:
        print(Sheet(title, list(rows), columns).markdown(), end="\n\n", flush=True)


if __name__ == "__main__":
    typer.run(main)
