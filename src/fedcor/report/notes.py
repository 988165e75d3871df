"""What a reader must know beside the numbers: which seeds, what is unfinished, what is missing."""

from __future__ import annotations

import numpy as np

from fedcor.report.summary import ExperimentSummary

__all__ = ["caution_note", "missing_note", "seeds_text", "span", "unfinished_note"]

MOST_NAMED = 3  # runs


def span(bounds: tuple[int, int]) -> str:
    """`40`, or `7-40` where the bounds differ."""
    return str(bounds[0]) if bounds[0] == bounds[1] else f"{bounds[0]}-{bounds[1]}"


def seeds_text(experiment: ExperimentSummary) -> str:
    """`seeds 1, 2, 3` where all selectors have the same, else the seeds of each."""
    listed = {
        selector.name: ", ".join(str(run.seed) for run in selector.runs)
        for selector in experiment.selectors
    }
    if len(set(listed.values())) == 1:
        return f"seeds {listed.popitem()[1]}"
    return "seeds " + ", ".join(f"{name} ({seeds})" for name, seeds in listed.items())


def unfinished_note(experiment: ExperimentSummary) -> str:
    """Which runs are not finished, and how far they are; empty where all are."""
    unfinished = [
        f"{selector.name} seed {run.seed} ({run.rounds_done} of {run.rounds_planned} rounds)"
        for selector in experiment.selectors
        for run in selector.runs
        if not run.finished
    ]
    return f"Not finished, counted as far as it is: {', '.join(unfinished)}." if unfinished else ""


def missing_note(experiment: ExperimentSummary) -> str:
    """In which runs rounds lack the measure, or a loss was not finite; empty where all is there."""
    notes = []
    for what, test in (
        (f"Rounds without a value of {experiment.measure} are left out", np.isnan),
        ("The model diverged, so there is no mean", np.isinf),
    ):
        found = [
            f"{name} seed {seed} ({count} of {curve.done})"
            for name, by_seed in experiment.curves.items()
            for seed, curve in sorted(by_seed.items())
            if (count := int(test(curve.of(experiment.measure)).sum()))
        ]
        if found:
            more = len(found) - MOST_NAMED
            shown = ", ".join(found[:MOST_NAMED]) + (f" and {more} runs more" if more > 0 else "")
            notes.append(f"{what}: {shown}.")
    return " ".join(notes)


def caution_note(experiment: ExperimentSummary) -> str:
    """What makes a comparison mean less than it seems; empty where nothing does."""
    notes = []
    for name, by_seed in experiment.curves.items():
        curve = next(iter(by_seed.values()))
        warmup = (curve.options.get(curve.selector) or {}).get("warmup")
        if isinstance(warmup, int) and 0 < curve.done <= warmup:
            notes.append(
                f"{name} chose uniformly in all rounds: its warm-up has {warmup}. Set a smaller "
                "warmup, or run more rounds."
            )
        diverged = [seed for seed, one in by_seed.items() if np.isinf(one.of("loss")).any()]
        if diverged and experiment.measure != "loss":
            first = min(int(np.isinf(by_seed[seed].of("loss")).argmax()) for seed in diverged)
            notes.append(
                f"The model of {name} diverged (seeds {', '.join(map(str, sorted(diverged)))}; "
                f"its loss is not finite from round {first} on): lower the learning rate."
            )
    return " ".join(notes)
