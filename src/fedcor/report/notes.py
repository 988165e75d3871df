"""What a reader must know beside the numbers: which seeds, what is unfinished, what is missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from fedcor.record import RunRecord, client_names
from fedcor.report.groups import group_names
from fedcor.report.liars import liars_share
from fedcor.report.names import run_name
from fedcor.report.series import series_names
from fedcor.report.summary import ExperimentSummary

__all__ = [
    "all_notes",
    "caution_note",
    "faults_note",
    "liars_note",
    "missing_note",
    "missing_notes",
    "seeds_text",
    "span",
    "unfinished_note",
]

MOST_NAMED = 3  # runs, or clients


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


def all_notes(experiment: ExperimentSummary) -> list[str]:
    """Whatever of the notes below there is."""
    notes = (unfinished_note(experiment), missing_note(experiment), caution_note(experiment))
    return [note for note in notes if note]


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
    """Which runs never have the measure, in how many rounds the others do, and where a loss was not
    finite; empty where all is there."""
    measure = experiment.measure
    runs = {
        f"{name} seed {seed}": curve
        for name, by_seed in experiment.curves.items()
        for seed, curve in sorted(by_seed.items())
        if curve.done
    }
    counts = {name: int((~np.isnan(run.of(measure))).sum()) for name, run in runs.items()}
    without = [name for name, count in counts.items() if not count]
    notes = []
    if without:
        notes.append(f"Left out, as no round has a value of {measure}: {_listed(without)}.")
    gaps = {n: (k, runs[n].done) for n, k in counts.items() if 0 < k < runs[n].done}
    if gaps and len(gaps) + len(without) == len(runs) and len(set(gaps.values())) == 1:
        count, done = next(iter(gaps.values()))
        rest = " of the others; the rest is left out" if without else "; the others are left out"
        notes.append(f"{measure} is known in {count} of {done} rounds{rest}.")
    elif gaps:
        shown = [f"in {count} of {done} rounds of {name}" for name, (count, done) in gaps.items()]
        start = f"Rounds without a value of {measure} are left out; it is known"
        notes.append(f"{start} {_listed(shown)}.")
    diverged = [
        f"{name} ({count} of {run.done})"
        for name, run in runs.items()
        if (count := int(np.isinf(run.of(measure)).sum()))
    ]
    if diverged:
        notes.append(f"The model diverged, so there is no mean: {_listed(diverged)}.")
    return " ".join(notes)


def _listed(runs: list[str]) -> str:
    more = len(runs) - MOST_NAMED
    rest = f" and {more} {'run' if more == 1 else 'runs'} more" if more > 0 else ""
    return ", ".join(runs[:MOST_NAMED]) + rest


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
            first = curve.first_round + min(
                int(np.isinf(by_seed[seed].of("loss")).argmax()) for seed in diverged
            )
            notes.append(
                f"The model of {name} diverged (seeds {', '.join(map(str, sorted(diverged)))}; "
                f"its loss is not finite from round {first} on): lower the learning rate."
            )
    return " ".join(notes)


def liars_note(run: RunRecord) -> str:
    """How often the simulated liars of a run were chosen; empty where there are none.

    `5 of 50 clients lie (flip): chosen 2.31 times as often as is fair`, after the run's name.
    """
    share = liars_share(run)
    if share is None:
        return ""
    liars, clients = share.liars, share.clients
    text = f"{liars} of {clients} clients lie ({share.kind}): chosen {share.times_fair:.2f} times "
    return f"{run_name(run)}: {text}as often as is fair"


def missing_notes(runs: Sequence[RunRecord]) -> list[str]:
    """How many chosen clients did not take part in simulated runs, and why; a line per selector.

    `fmnist-2spc, random: of 7500 chosen 5250 took part; 2249 dropped, 1 refused`
    """
    chosen: Counter[str] = Counter()
    took_part: Counter[str] = Counter()
    kinds: dict[str, Counter[str]] = {}
    for group, name, run in zip(group_names(runs), series_names(runs), runs, strict=True):
        key = f"{group}, {name}"
        for entry in run.rounds:
            chosen[key] += len({*(entry.get("selected") or ())})
            took_part[key] += len(entry.get("participated") or ())
            missing = entry.get("missing") or {}
            kinds.setdefault(key, Counter()).update({k: len(v) for k, v in missing.items()})
    return [
        f"{key}: of {chosen[key]} chosen {took_part[key]} took part; "
        + ", ".join(f"{n} {kind}" for kind, n in counts.most_common())
        for key, counts in kinds.items()
        if counts.total()
    ]


def faults_note(run: RunRecord) -> str:
    """What went wrong with the clients of a run on Flower; empty where nothing did.

    `faults: 12 late, 3 error; left alone: client 7 (north) in 9 rounds`, after the run's name.
    """
    kinds: Counter[str] = Counter()
    for entry in run.rounds:
        kinds.update(entry.get("faults") or {})
    alone = Counter(client for entry in run.rounds for client in entry.get("quarantined") or ())
    parts = []
    if kinds:
        parts.append("faults: " + ", ".join(f"{n} {kind}" for kind, n in kinds.most_common()))
    if alone:
        names = client_names(run.path)
        shown = [
            f"client {client}"
            + (f" ({names[client]})" if client < len(names) else "")
            + f" in {rounds} round{'s' if rounds > 1 else ''}"
            for client, rounds in sorted(alone.items(), key=lambda item: (-item[1], item[0]))
        ]
        more = len(shown) - MOST_NAMED
        text = ", ".join(shown[:MOST_NAMED]) + (f" and {more} clients more" if more > 0 else "")
        parts.append(f"left alone: {text}")
    return f"{run_name(run)}: {'; '.join(parts)}" if parts else ""
