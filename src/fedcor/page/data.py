"""What the page shows of a folder of runs, as plain values that JSON takes.

Every number comes from `report`; texts of numbers are those of the terminal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from fedcor.page.compact import compact_list
from fedcor.page.run_data import run_data
from fedcor.page.table_data import table_data
from fedcor.page.why_data import count_reasons
from fedcor.record import RunRecord
from fedcor.report.comparable import measured_in
from fedcor.report.groups import flat_settings, group_names, shared_settings
from fedcor.report.metrics import WINDOW
from fedcor.report.names import clean, run_name, short_names
from fedcor.report.notes import faults_note
from fedcor.report.numbers import percent
from fedcor.report.ranking import ranking
from fedcor.report.repeat import repeat_command, seeds_argument
from fedcor.report.screen import notes, title
from fedcor.report.seed_means import SeedMeans, seed_means
from fedcor.report.series import series_names
from fedcor.report.summary import ExperimentSummary, summarise
from fedcor.report.thinning import thinned
from fedcor.report.verdict import experiment_verdict

__all__ = ["page_data"]

NAME_WIDTH = 32
MOST_REASONS = (
    400_000  # numbers of a page; of longer runs, every second round has reasons, or fewer
)
# A selector has the same colour on every page; the others have what is left.
COLOURS = {
    "random": 0,
    "fedcor": 1,
    "power_of_choice": 2,
    "afl": 3,
    "complement": 4,
    "aligned": 5,
    "oort": 6,
}
PALETTE = 10


def page_data(
    runs: Sequence[RunRecord],
    baseline: str | None = None,
    measure: str | None = None,
    of_run: Callable[[RunRecord, int, int], dict[str, Any]] = run_data,
) -> dict[str, Any]:
    """Everything that the page shows.

    Args:
        runs: of one experiment or of several, finished or not
        baseline: the selector to compare with; None as in `summarise`
        measure: what to judge by; None as in `summarise`
        of_run: what is shown of one run; `run_data`, or one that remembers what it gave

    Example:
        page_data(read_runs(Path("runs/demo")))["experiments"][0]["verdict"]
    """
    summary = summarise(runs, baseline, measure)
    groups, names = group_names(runs), series_names(runs)
    stride = _stride(runs)
    experiments = []
    for experiment in summary.experiments:
        own = [
            (name, run)
            for group, name, run in zip(groups, names, runs, strict=True)
            if group == experiment.name
        ]
        experiments.append(_experiment(experiment, own, stride, of_run))
    return {
        "fedcor": version("fedcor"),
        "notes": [clean(note) for note in summary.notes],
        "experiments": experiments,
    }


def _stride(runs: Sequence[RunRecord]) -> int:
    """Of every how many rounds the reasons are shown, so that a page stays small."""
    return max(1, -(-sum(map(count_reasons, runs)) // MOST_REASONS))


def _experiment(
    experiment: ExperimentSummary,
    runs: Sequence[tuple[str, RunRecord]],
    stride: int,
    of_run: Callable[[RunRecord, int, int], dict[str, Any]],
) -> dict[str, Any]:
    order = ranking(experiment)
    looks = _looks([s.name for s in experiment.selectors])
    means = {name: _curves(experiment, name) for name in order}
    faults = [clean(note) for _, run in runs if (note := faults_note(run))]
    return {
        "name": clean(experiment.name),
        "title": _title(experiment),
        "verdict": experiment_verdict(experiment),
        "notes": [*notes(experiment), *faults],
        "measure": clean(experiment.measure),
        "target": experiment.target,
        "target_text": None if experiment.target is None else percent(experiment.target),
        "window": WINDOW,
        "smooth": _smoothing(experiment),
        "measures": [clean(one) for one in _measures(experiment)],
        "table": table_data(experiment),
        "series": [
            {
                "name": clean(name),
                "short": short_names(order, NAME_WIDTH)[name],
                "baseline": name == experiment.baseline,
                "look": looks[name],
                "seeds": len(experiment.curves[name]),
                **means[name],
            }
            for name in order
        ],
        "runs": [of_run(run, order.index(name), stride) for name, run in runs],
        "run_with": _run_with(experiment, [run for _, run in runs], order),
    }


def _title(experiment: ExperimentSummary) -> str:
    """Experiment, measure, rounds and seeds; the table of the page has the target in its head."""
    return title(dataclasses.replace(experiment, target=None))


# --- curves ---------------------------------------------------------------------------------------


def _measures(experiment: ExperimentSummary) -> list[str]:
    """What is drawn: the measure first, then accuracy, loss and the user's own that any run has."""
    found = measured_in(experiment.curves)
    wanted = [experiment.measure, "accuracy", "loss", *sorted(found)]
    return [name for name in dict.fromkeys(wanted) if name in found][:8]


def _smoothing(experiment: ExperimentSummary) -> int:
    """Rounds in a smoothed point: a twentieth of them, at most ten."""
    rounds = max(run.rounds_done for s in experiment.selectors for run in s.runs)
    return min(max(rounds // 20, 1), WINDOW)


def _curves(experiment: ExperimentSummary, name: str) -> dict[str, Any]:
    """A selector's curves: what was spent, and each measure raw and smoothed."""
    by_seed, window = experiment.curves[name], _smoothing(experiment)
    first = next(iter(by_seed.values())).first_round
    found: dict[str, Any] = {
        "rounds": [],
        "bytes": [],
        "seconds": [],
        "simulated": [],
        "measures": [],
    }
    for measure in _measures(experiment):
        rounds, raw = thinned(seed_means(by_seed, measure))
        smooth = thinned(seed_means(by_seed, measure, window))[1] if window > 1 else None
        found["rounds"] = rounds.tolist()
        found["bytes"] = compact_list(raw.bytes, 5)
        found["seconds"] = compact_list(raw.seconds, 5)
        found["simulated"] = compact_list(raw.time, 5)
        found["measures"].append(
            {"raw": _band(raw), "smooth": None if smooth is None else _band(smooth)}
        )
    return {**found, "first_round": first}


def _band(means: SeedMeans) -> list[list[float | int | None]]:
    """Mean, low and high; low and high only where they differ from the mean."""
    if means.seeds < 2:
        return [compact_list(means.mean)]
    return [compact_list(means.mean), compact_list(means.low), compact_list(means.high)]


def _looks(names: Sequence[str]) -> dict[str, int]:
    """The colour of each series, by its place in the palette; no two alike while there are any."""
    taken = {name: COLOURS[key] for name in names if (key := name.split(" + ")[0]) in COLOURS}
    used: set[int] = set()
    looks: dict[str, int] = {}
    for name in names:
        place = taken.get(name)
        if place is not None and place not in used:
            looks[name] = place
            used.add(place)
    free = [place for place in range(PALETTE) if place not in used]
    for number, name in enumerate(name for name in names if name not in looks):
        looks[name] = free[number % len(free)] if free else number % PALETTE
    return looks


# --- what was run ---------------------------------------------------------------------------------


def _run_with(
    experiment: ExperimentSummary, runs: Sequence[RunRecord], order: Sequence[str]
) -> dict[str, Any]:
    """Settings, seeds, versions, folders, and the command that repeats it."""
    first = runs[0]
    versions: dict[str, set[str]] = {}
    for run in runs:
        for name, number in (run.header.get("versions") or {}).items():
            versions.setdefault(str(name), set()).add(str(number))
    options = {}
    for name in order:
        curve = next(iter(experiment.curves[name].values()))
        own = curve.options.get(curve.selector)
        options[clean(name)] = {
            **(flat_settings(own) if isinstance(own, Mapping) else {}),
            **{f"optimiser.{key}": value for key, value in flat_settings(curve.optimiser).items()},
        }
    return {
        "command": repeat_command(runs),
        "settings": _pairs(flat_settings(shared_settings(first))),
        "options": {name: _pairs(own) for name, own in options.items()},
        "seeds": seeds_argument(sorted({int(run.header["seed"]) for run in runs})),
        "versions": [[clean(k), clean(", ".join(sorted(v)))] for k, v in versions.items()],
        "folders": [clean(run_name(run)) for run in runs if run.path is not None],
    }


def _pairs(settings: Mapping[str, Any]) -> list[list[str]]:
    return [[clean(str(key)), clean(str(value))[:300]] for key, value in settings.items()]
