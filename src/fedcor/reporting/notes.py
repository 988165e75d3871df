"""How often the simulated byzantine of a run were chosen, from its record alone."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedcor.core.config import build_dataclass
from fedcor.core.errors import ConfigError, FedcorError
from fedcor.reporting.names import run_name
from fedcor.reporting.series import group_names, series_names
from fedcor.reporting.summary import ExperimentSummary
from fedcor.runs.record import RunRecord, client_names, differences
from fedcor.simulation.byzantine import Byzantine
from fedcor.simulation.experiment_files import load_experiment, preset_names


@dataclass(frozen=True)
class ByzantineShare:
    """The byzantine of a run.

    Attributes:
        kind: How they lie.
        byzantine: How many there are.
        clients: N.
        times_fair: Their share of all choices, relative to their share of the clients.
    """

    kind: str
    byzantine: int
    clients: int
    times_fair: float


def byzantine_share(run: RunRecord) -> ByzantineShare | None:
    """How often the byzantine of a run were chosen; None where there are none, or no round yet.

    The header says how many lie, and the seed says who.
    """
    config = run.header.get("config") or {}
    chosen = [client for entry in run.rounds for client in entry.get("selected") or ()]
    try:
        byzantine = build_dataclass(Byzantine, config.get("byzantine") or {})
        clients = int(config["partition"]["clients"]) if byzantine else 0
        who = byzantine.who(int(run.header["seed"]), clients)
        told = int(who[chosen].sum()) if byzantine and chosen else 0
    except (ConfigError, KeyError, TypeError, ValueError, IndexError, AttributeError):
        return None  # a damaged header; the rest of a report does not depend on it
    if not byzantine or not chosen:
        return None
    fair = who.sum() / clients
    return ByzantineShare(byzantine.kind, int(who.sum()), clients, told / len(chosen) / float(fair))


# What a reader must know beside the numbers: which seeds, what is unfinished, what is missing.


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


def byzantine_note(run: RunRecord) -> str:
    """How often the simulated byzantine of a run were chosen; empty where there are none.

    `5 of 50 clients lie (flip): chosen 2.31 times as often as is fair`, after the run's name.
    """
    share = byzantine_share(run)
    if share is None:
        return ""
    byzantine, clients = share.byzantine, share.clients
    text = (
        f"{byzantine} of {clients} clients lie ({share.kind}): chosen {share.times_fair:.2f} times "
    )
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


# The command that runs an experiment again, if one does.
#
# It is tried before it is given: the settings that it stands for are those of the records.


_KEPT = ("training.device",)  # of the machine, not of the experiment


def repeat_command(runs: Sequence[RunRecord]) -> str | None:
    """`fedcor compare ...` that makes these runs again; None where no single command does.

    Args:
        runs: of one experiment that can be compared. Those with parts of a user's own, made in
            Python or from a TOML file, or renamed, have no command
    """
    headers = [run.header for run in runs]
    if any(header.get("engine") for header in headers):
        return None
    try:
        configs = {str(h["selector"]): dict(h["config"]) for h in headers}
        name, rounds = str(headers[0]["experiment"]), max(_rounds(h) for h in headers)
        seeds = sorted({int(h["seed"]) for h in headers})
    except (KeyError, TypeError, ValueError):
        return None
    if name not in preset_names() or _names_code(configs):
        return None
    changes = _changes(name, configs, rounds)
    if changes is None:
        return None
    selectors = list(configs)
    words = ["fedcor", "run" if len(runs) == 1 else "compare", name]
    if len(runs) == 1:
        words += ["--selector", selectors[0], "--seed", str(seeds[0])]
    else:
        words += ["--selectors", ",".join(selectors), "--seeds", seeds_argument(seeds)]
    words += ["--rounds", str(rounds)]
    for change in changes:
        words += ["--set", change]
    return shlex.join(words)


def seeds_argument(seeds: Iterable[int]) -> str:
    """Sorted seeds as the command line takes them: `1-3`, `1,2,7`.

    Example:
        >>> seeds_argument([1, 2, 3]), seeds_argument([1, 2, 7])
        ('1-3', '1,2,7')
    """
    listed = list(seeds)
    if len(listed) > 2 and listed == list(range(listed[0], listed[-1] + 1)):
        return f"{listed[0]}-{listed[-1]}"
    return ",".join(map(str, listed))


def _rounds(header: Mapping[str, Any]) -> int:
    return int(header["config"]["training"]["rounds"])


def _names_code(value: Any) -> bool:
    """Whether settings name a `module:Class`. A record's code is not imported to read it."""
    if isinstance(value, Mapping):
        return any(_names_code(one) for pair in value.items() for one in pair)
    if isinstance(value, list | tuple):
        return any(map(_names_code, value))
    return isinstance(value, str) and ":" in value


def _changes(name: str, configs: Mapping[str, Mapping[str, Any]], rounds: int) -> list[str] | None:
    """What must be set beside the rounds, as `table.key=value`; None where that is not enough."""
    changes: dict[str, str] = {}
    for selector, config in configs.items():
        found = _differing(name, selector, config, rounds, [])
        if found is None:
            return None
        changes |= {key: f"{key}={json.dumps(value)}" for key, value in found.items()}
    wanted = list(changes.values())
    for selector, config in configs.items():
        if _differing(name, selector, config, rounds, wanted) != {}:
            return None
    return wanted


def _differing(
    name: str, selector: str, config: Mapping[str, Any], rounds: int, changes: list[str]
) -> dict[str, Any] | None:
    """Where the settings differ from those of the command: key -> the record's value."""
    try:
        made = load_experiment(name, [*changes, f"training.rounds={rounds}"], selector).describe()
    except FedcorError:
        return None
    made = json.loads(json.dumps(made, default=repr))  # as a record has it
    found = differences(made, config)
    return {
        key: old for key, (_, old) in found.items() if key not in _KEPT and key != "training.rounds"
    }
