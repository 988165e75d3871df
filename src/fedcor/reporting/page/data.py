"""The table of the page: that of the terminal, with bytes to the target, and numbers that sort."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from fedcor.reporting.clients import (
    Attendance,
    ClientMap,
    Clients,
    Distribution,
    attendance,
    checkpoint_of,
    client_map,
    clients_of,
    distribution,
    label_mix,
)
from fedcor.reporting.compact import SeedMeans, compact_table, seed_means, thinned
from fedcor.reporting.estimates import Estimate
from fedcor.reporting.metrics import WINDOW, bytes_text, percent, rounds_text, seconds_text
from fedcor.reporting.names import clean, run_name, short_names
from fedcor.reporting.notes import faults_note, repeat_command, seeds_argument
from fedcor.reporting.page.why import compact, compact_list, count_reasons, health_data, why_data
from fedcor.reporting.screen import notes, title
from fedcor.reporting.series import flat_settings, group_names, series_names, shared_settings
from fedcor.reporting.summary import (
    ExperimentSummary,
    SelectorSummary,
    measured_in,
    ranking,
    summarise,
)
from fedcor.reporting.verdict import experiment_verdict
from fedcor.runs.record import RunRecord, first_round

VERDICTS = {
    "better": "better",
    "worse": "worse",
    "higher": "higher",
    "lower": "lower",
    "unclear": "may be noise",
    "equal": "equal",
}


def table_data(experiment: ExperimentSummary) -> dict[str, Any]:
    """Columns and rows, best selector first; a cell is a number that sorts, and its text.

    Args:
        experiment: as `summarise` gives it
    """
    texts = {row.selector: row.cells for row in compact_table(experiment).rows}
    measure = clean(experiment.measure)
    columns = [
        {"key": "mean", "title": f"{measure}, mean of all rounds"},
        {"key": "final", "title": f"{measure}, last {WINDOW} rounds"},
    ]
    if experiment.target is not None:
        columns += [
            {"key": "rounds", "title": f"first round at {percent(experiment.target)}"},
            {"key": "bytes_to", "title": "bytes to then"},
        ]
    if experiment.target is not None and experiment.has_clock:
        columns.append({"key": "time_to", "title": "simulated time to then"})
    columns.append({"key": "bytes", "title": "bytes in all"})
    if experiment.has_clock:
        columns.append({"key": "time", "title": "simulated time in all"})
    if len(experiment.selectors) > 1:
        title = f"mean {measure} minus {clean(experiment.baseline)}’s"
        columns.append({"key": "gap", "title": title})
    rows = []
    for name in ranking(experiment):
        selector, cells = experiment.selector(name), texts[name]
        row = {
            "mean": [_mean(selector, experiment.headline.key), cells[1]],
            "final": [_mean(selector, f"final_{experiment.measure}"), cells[2]],
            "bytes": _bytes(_spent(selector)),
        }
        if experiment.target is not None:
            row["rounds"] = _reached(selector)
            row["bytes_to"] = _bytes(_mean(selector, "bytes_to_target"))
        if experiment.has_clock:
            row["time_to"] = _seconds(selector, "seconds_to_target")
            row["time"] = _seconds(selector, "simulated_seconds")
        if len(experiment.selectors) > 1:
            row["gap"] = _gap(experiment, selector, cells[-1])
        rows.append(row)
    return {"columns": columns, "rows": rows, "better": experiment.headline.better}


def _mean(selector: SelectorSummary, key: str) -> float | int | None:
    return compact(selector.estimates[key].mean, 6)


def _reached(selector: SelectorSummary) -> list[Any]:
    """Rounds to the target; how many seeds reached it where not all did."""
    mean = _mean(selector, "rounds_to_target")
    if mean is not None:
        return [mean, rounds_text(mean)]
    reached, runs = selector.reached
    return [None, f"{reached} of {runs} seeds" if reached else "-"]


def _spent(selector: SelectorSummary) -> float | int | None:
    down, up = (selector.estimates[key].mean for key in ("bytes_down", "bytes_up"))
    return None if down is None or up is None else compact(down + up, 6)


def _bytes(count: float | int | None) -> list[Any]:
    return [count, "-" if count is None else bytes_text(count)]


def _seconds(selector: SelectorSummary, key: str) -> list[Any]:
    mean = compact(selector.estimates[key].mean, 6) if key in selector.estimates else None
    return [mean, "-" if mean is None else seconds_text(mean)]


def _gap(experiment: ExperimentSummary, selector: SelectorSummary, text: str) -> list[Any]:
    """The paired difference: mean, text, low, high, verdict in words, and its kind."""
    if not selector.differences:
        return [0, text, None, None, "baseline", "baseline"]
    found = selector.differences[experiment.headline.key]
    estimate: Estimate = found.estimate
    verdict = found.verdict or ""
    words = VERDICTS.get(verdict, "one seed, no interval" if estimate.n == 1 else "not compared")
    ends = (compact(estimate.low, 6), compact(estimate.high, 6))
    return [compact(estimate.mean, 6), text, *ends, words, verdict]


# What the page shows of one run: its clients, who was chosen in each round, and why.


def run_data(run: RunRecord, series: int, stride: int = 1) -> dict[str, Any]:
    """One run.

    Args:
        run: as `read_run` gives it
        series: the place of its selector in the table
        stride: of every how many rounds the reasons are there; of the last one always
    """
    there, checkpoint = attendance(run), checkpoint_of(run)
    places = client_map(checkpoint)
    clients = clients_of(run, there, checkpoint, label_mix(run))
    planned = run.header["config"]["training"]["rounds"]
    return {
        "series": series,
        "seed": int(run.header["seed"]),
        "path": clean(run_name(run)),
        "planned": int(planned),
        "first_round": first_round(run),
        "there": _attendance(there),
        "clients": _clients(clients, mapped=places is not None),
        "losses": _distribution(distribution(clients.losses), clients.losses_are),
        "map": _map(places),
        "why": why_data(run, stride),
        "health": health_data(run),
    }


def _attendance(there: Attendance) -> dict[str, Any]:
    """Rounds in which everyone delivered, nobody was left alone and nothing failed say no more."""
    return {
        "clients": there.clients,
        "selected": [list(clients) for clients in there.selected],
        "failed": _sparse(there.failed),
        "reasons": {str(t): dict(whys) for t, whys in enumerate(there.reasons) if whys},
        "alone": _sparse(there.alone),
        "faults": {str(t): dict(kinds) for t, kinds in enumerate(there.faults) if kinds},
        "refused": {str(t): count for t, count in enumerate(there.refused) if count},
    }


def _sparse(rounds: tuple[tuple[int, ...], ...]) -> dict[str, list[int]]:
    return {str(t): list(clients) for t, clients in enumerate(rounds) if clients}


def _clients(clients: Clients, mapped: bool) -> dict[str, Any]:
    """Labels are shown on the map; without one, they would only fill the page."""
    labels = clients.labels if mapped else None
    return {
        "names": list(clients.names),
        "sizes": None if clients.sizes is None else clients.sizes.tolist(),
        "labels": None if labels is None else labels.tolist(),
        "chosen": clients.chosen.tolist(),
        "failed": clients.failed.tolist() if clients.failed.any() else None,
        "losses": compact_list(clients.losses) if clients.losses_are else None,
    }


def _distribution(found: Distribution | None, what: str) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "what": what,
        "edges": compact_list(found.edges),
        "counts": list(found.counts),
        "median": compact(found.median),
        "worst": compact(found.worst),
        "known": found.known,
    }


def _map(found: ClientMap | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "what": found.what,
        "round": found.round,
        "clients": list(found.clients),
        "x": compact_list(found.points[:, 0]),
        "y": compact_list(found.points[:, 1]),
        "explained": compact_list(found.explained, 3),
    }


# What the page shows of a folder of runs, as plain values that JSON takes.
#
# Every number comes from `report`; texts of numbers are those of the terminal.


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
