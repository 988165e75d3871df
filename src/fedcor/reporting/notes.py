"""What a reader must know beside the numbers: seeds, unfinished runs, missing values, faults.

Notes on an experiment are about its numbers; notes on runs are about their clients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedcor.core.config import build_dataclass
from fedcor.core.errors import ConfigError
from fedcor.core.text import listed
from fedcor.reporting.series import named_runs, run_name, selector_options
from fedcor.reporting.summary import ExperimentSummary
from fedcor.runs.record import RunRecord, client_names, first_round
from fedcor.simulation.byzantine import Byzantine

# --- notes on an experiment -----------------------------------------------------------------------


def seeds_text(experiment: ExperimentSummary) -> str:
    """`seeds 1, 2, 3` where all selectors have the same, else the seeds of each."""
    seeds = {s.name: ", ".join(str(run.seed) for run in s.runs) for s in experiment.selectors}
    first, *others = {*seeds.values()}
    if others:
        return "seeds " + ", ".join(f"{name} ({own})" for name, own in seeds.items())
    return f"seeds {first}" if "," in first else f"seed {first}"


def all_notes(experiment: ExperimentSummary) -> list[str]:
    """Every note on an experiment."""
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
    """Which runs never have the measure, and in how many rounds the others do; empty where all is
    there."""
    measure = experiment.measure
    counts = {  # known and finished rounds
        f"{name} seed {seed}": (int(curve.known(measure).sum()), curve.done)
        for name, by_seed in experiment.curves.items()
        for seed, curve in sorted(by_seed.items())
        if curve.done
    }
    without = [name for name, (known, _) in counts.items() if not known]
    gaps = {name: count for name, count in counts.items() if 0 < count[0] < count[1]}
    notes = []
    if without:
        notes.append(f"Left out, as no round has a value of {measure}: {listed(without, 3)}.")
    shown = [f"in {known} of {done} rounds" for known, done in gaps.values()]
    if gaps and len(gaps) + len(without) == len(counts) and len(set(shown)) == 1:
        rest = " of the others; the rest is left out" if without else "; the others are left out"
        notes.append(f"{measure} is known {shown[0]}{rest}.")
    elif gaps:
        each = [f"{rounds} of {name}" for rounds, name in zip(shown, gaps, strict=True)]
        start = f"Rounds without a value of {measure} are left out; it is known"
        notes.append(f"{start} {listed(each, 3)}.")
    return " ".join(notes)


def caution_note(experiment: ExperimentSummary) -> str:
    """What makes a comparison mean less than it seems; empty where nothing does."""
    notes = []
    for name, by_seed in experiment.curves.items():
        curve = next(iter(by_seed.values()))
        warmup = selector_options(curve.run).get("warmup")
        if isinstance(warmup, int) and 0 < curve.done <= warmup:
            notes.append(
                f"{name} chose uniformly in all rounds: its warm-up has {warmup}. Set a smaller "
                "warmup, or run more rounds."
            )
        diverged = {
            seed: int(np.isinf(run.of("loss")).argmax())
            for seed, run in sorted(by_seed.items())
            if np.isinf(run.of("loss")).any()
        }
        if diverged:
            first = first_round(curve.run) + min(diverged.values())
            notes.append(
                f"The model of {name} diverged (seeds {', '.join(map(str, diverged))}; "
                f"its loss is not finite from round {first} on): lower the learning rate."
            )
    return " ".join(notes)


# --- notes on runs --------------------------------------------------------------------------------


@dataclass(frozen=True)
class ByzantineShare:
    """The simulated Byzantine clients of a run.

    Attributes:
        kind: their attack
        byzantine: how many there are
        clients: N
        times_fair: their share of all choices, relative to their share of the clients
    """

    kind: str
    byzantine: int
    clients: int
    times_fair: float


def byzantine_share(run: RunRecord) -> ByzantineShare | None:
    """How often the Byzantine clients of a run were chosen; None if it has none, or no round yet.

    The header says how many there are, and the seed which they are.
    """
    config = run.header.get("config") or {}
    chosen = [client for entry in run.rounds for client in entry.get("selected") or ()]
    try:
        byzantine = build_dataclass(Byzantine, config.get("byzantine") or {})
        if not byzantine or not chosen:
            return None
        clients = int(config["partition"]["clients"])
        members = byzantine.who(int(run.header["seed"]), clients)
        share = float(members[chosen].mean()) / float(members.mean())
    except (ConfigError, KeyError, TypeError, ValueError, IndexError, AttributeError):
        return None  # a damaged header; the rest of a report does not depend on it
    return ByzantineShare(byzantine.kind, int(members.sum()), clients, share)


def byzantine_note(run: RunRecord) -> str:
    """How often the simulated Byzantine clients of a run were chosen; empty if it has none.

    `5 of 50 clients are Byzantine (flip): chosen 2.31 times as often as is fair`, after the run's
    name.
    """
    share = byzantine_share(run)
    if share is None:
        return ""
    return (
        f"{run_name(run)}: {share.byzantine} of {share.clients} clients are Byzantine "
        f"({share.kind}): chosen {share.times_fair:.2f} times as often as is fair"
    )


def missing_notes(runs: Sequence[RunRecord]) -> list[str]:
    """How many chosen clients did not take part in simulated runs, and why; a line per selector.

    `fmnist-2spc, random: of 7500 chosen 5250 took part; 2249 dropped, 1 refused`
    """
    chosen: Counter[str] = Counter()
    took_part: Counter[str] = Counter()
    kinds: dict[str, Counter[str]] = {}
    for group, name, run in named_runs(runs):
        key = f"{group}, {name}"
        for entry in run.rounds:
            chosen[key] += len({*(entry.get("selected") or ())})
            took_part[key] += len(entry.get("participated") or ())
            missing = entry.get("missing") or {}
            kinds.setdefault(key, Counter()).update({k: len(v) for k, v in missing.items()})
    return [
        f"{key}: of {chosen[key]} chosen {took_part[key]} took part; {_counted(counts)}"
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
    resting = Counter(client for entry in run.rounds for client in entry.get("quarantined") or ())
    names = dict(enumerate(client_names(run.path)))
    clients = [
        f"client {client}"
        + (f" ({names[client]})" if client in names else "")
        + f" in {rounds} round{'s' if rounds > 1 else ''}"
        for client, rounds in sorted(resting.items(), key=lambda item: (-item[1], item[0]))
    ]
    parts = [f"faults: {_counted(kinds)}"] if kinds else []
    parts += [f"left alone: {listed(clients, 3)}"] if clients else []
    return f"{run_name(run)}: {'; '.join(parts)}" if parts else ""


def _counted(kinds: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
