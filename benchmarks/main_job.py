"""The main job: the small GPT of `examples.gpt.compare`, trained from several seeds under one recipe after another."""

import dataclasses
import itertools
import statistics

import numpy as np
from rich.progress import Progress

from benchmarks.report import Sheet
from benchmarks.workers import Result
from examples.gpt import compare, text
from examples.gpt.recipes import get_recipe
from examples.gpt.report import Comparison, Run


def train(recipe: str, steps: int, seeds: int) -> list[Result]:
    """The runs of one recipe."""
    settings = compare.Settings(steps=steps, seeds=seeds, recipe_seeds=seeds)
    parts = text.split(np.frombuffer(text.read_text(None), np.uint8), compare.CONTEXT)
    runs = compare.train_all([get_recipe(recipe)], settings, *parts, Progress(disable=True))
    return [dataclasses.asdict(run) for run in runs]


def sheet(rows: list[Result]) -> Sheet:
    """The last loss of each run, and the gaps of recipes to float32 in spreads."""
    found = Comparison([Run(**row) for row in rows])
    by_recipe = itertools.groupby(found.runs, lambda run: run.recipe)
    return Sheet("the main job: validation loss", [cells(found, recipe, list(runs)) for recipe, runs in by_recipe])


def cells(found: Comparison, recipe: str, runs: list[Run]) -> dict[str, str]:
    """The cells of a recipe."""
    row = {"recipe": recipe} | {f"seed {run.seed}": f"{run.validation_loss:.4f}" for run in runs}
    gaps = [gap for gap in map(found.gap, runs) if gap is not None]
    if gaps:
        row["mean gap to f32"] = f"{statistics.fmean(gaps):+.4f}"
    if gaps and (spread := found.deviation()):
        row["in spreads"] = f"{statistics.fmean(gaps) / spread:+.2f}"
    seconds = [run.seconds_per_step for run in runs if run.seconds_per_step is not None]
    return row | ({"ms a step": f"{1e3 * statistics.median(seconds):.2f}"} if seconds else {})
