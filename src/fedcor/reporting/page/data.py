"""What the page shows of a folder of runs, as plain values that JSON takes.

Every number comes from the other modules of `fedcor.reporting`; texts are those of the terminal.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from fedcor.core.errors import FedcorError
from fedcor.reporting.curves import SeedMeans, downsample, seed_means
from fedcor.reporting.metrics import WINDOW, percent
from fedcor.reporting.notes import all_notes, faults_note
from fedcor.reporting.page.run_data import count_reasons, rounded, run_data
from fedcor.reporting.series import (
    clean,
    flat_settings,
    named_runs,
    optimiser_settings,
    run_name,
    selector_options,
    shared_settings,
    short_names,
)
from fedcor.reporting.summary import (
    ExperimentSummary,
    every_curve,
    measured_in,
    ranking,
    summarise,
)
from fedcor.reporting.tables import Row, results_table, title
from fedcor.reporting.verdict import experiment_verdict
from fedcor.runs.record import RunRecord, differences, first_round
from fedcor.simulation.experiment_files import load_experiment, preset_names

NAME_WIDTH = 32
MOST_MEASURES = 8
MOST_REASONS = 400_000  # numbers; a page of longer runs explains every second round, or fewer
# A selector has the same colour on every page; the others have what is left.
COLOURS = ("random", "fedcor", "power_of_choice", "afl", "complement", "aligned", "oort")
PALETTE = 10
VERDICTS = {"unclear": "may be noise"}

RunData = Callable[[RunRecord, int, int], dict[str, Any]]


def page_data(
    runs: Sequence[RunRecord],
    baseline: str | None = None,
    measure: str | None = None,
    of_run: RunData = run_data,
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
    named = named_runs(runs)
    stride = max(1, -(-sum(map(count_reasons, runs)) // MOST_REASONS))
    experiments = []
    for experiment in summary.experiments:
        order = ranking(experiment)
        members = [(name, run) for group, name, run in named if group == experiment.name]
        shown = [of_run(run, order.index(name), stride) for name, run in members]
        about = _experiment(experiment, [run for _, run in members])
        experiments.append({**about, "runs": shown})
    return {
        "fedcor": version("fedcor"),
        "notes": [clean(note) for note in summary.notes],
        "experiments": experiments,
    }


def _experiment(experiment: ExperimentSummary, runs: Sequence[RunRecord]) -> dict[str, Any]:
    order = ranking(experiment)
    short = short_names(order, NAME_WIDTH)
    colours = _colours([s.name for s in experiment.selectors])
    faults = [note for run in runs if (note := faults_note(run))]
    measured = measured_in(every_curve(experiment.curves))
    drawn = dict.fromkeys([experiment.measure, "accuracy", "loss", *sorted(measured)])
    measures = [name for name in drawn if name in measured][:MOST_MEASURES]
    return {
        "name": clean(experiment.name),
        "title": title(experiment, target=False),
        "verdict": experiment_verdict(experiment),
        "notes": [clean(note) for note in (*all_notes(experiment), *faults)],
        "measure": clean(experiment.measure),
        "target": experiment.target,
        "target_text": None if experiment.target is None else percent(experiment.target),
        "window": WINDOW,
        "smooth": experiment.smoothing,
        "measures": [clean(name) for name in measures],
        "table": _table(experiment),
        "series": [
            {
                "name": clean(name),
                "short": short[name],
                "baseline": name == experiment.baseline,
                "look": colours[name],
                "seeds": len(experiment.curves[name]),
                **_curves(experiment, name, measures),
            }
            for name in order
        ],
        "run_with": _run_with(experiment, runs),
    }


def _table(experiment: ExperimentSummary) -> dict[str, Any]:
    """The table of the terminal, with more columns; a cell is a number that sorts, and its text."""
    table = results_table(experiment)
    return {
        "columns": [{"key": column.key, "title": column.title} for column in table.columns],
        "rows": [_row(row) for row in table.rows],
        "better": experiment.headline.better,
    }


def _row(row: Row) -> dict[str, list[Any]]:
    cells = {key: [rounded(cell.value, 6), cell.text] for key, cell in row.cells.items()}
    if "rounds" in cells and "/" in cells["rounds"][1]:
        cells["rounds"][1] = cells["rounds"][1].replace("/", " of ") + " seeds"
    if "gap" in cells and row.difference is None:
        cells["gap"] += [None, None, "baseline", "baseline"]
    elif "gap" in cells and row.difference is not None:
        estimate = row.difference.estimate
        words = VERDICTS.get(row.verdict, row.verdict)
        words = words or ("one seed, no interval" if estimate.n == 1 else "not compared")
        cells["gap"] += [*rounded([estimate.low, estimate.high], 6), words, row.verdict]
    return cells


def _curves(experiment: ExperimentSummary, name: str, measures: Sequence[str]) -> dict[str, Any]:
    """A selector's curves: what was spent, and each measure raw and smoothed."""
    by_seed, window = experiment.curves[name], experiment.smoothing
    rounds, spent = downsample(seed_means(by_seed, experiment.measure))
    bands = []
    for measure in measures:
        raw, smooth = (downsample(seed_means(by_seed, measure, w))[1] for w in (1, window))
        bands.append({"raw": _band(raw), "smooth": _band(smooth) if window > 1 else None})
    return {
        "rounds": rounds.tolist(),
        "bytes": rounded(spent.bytes, 5),
        "seconds": rounded(spent.seconds, 5),
        "simulated": rounded(spent.time, 5),
        "measures": bands,
        "first_round": first_round(next(iter(by_seed.values())).run),
    }


def _band(means: SeedMeans) -> list[Any]:
    """Mean, low and high; of one seed the mean alone."""
    lines = [means.mean, means.low, means.high] if means.seeds > 1 else [means.mean]
    return [rounded(line) for line in lines]


def _colours(names: Sequence[str]) -> dict[str, int]:
    """The place of each series in the palette; all different while there are any left."""
    places: dict[str, int] = {}
    for name in names:
        selector = name.split(" + ")[0]
        if selector in COLOURS and COLOURS.index(selector) not in places.values():
            places[name] = COLOURS.index(selector)
    free = [place for place in range(PALETTE) if place not in places.values()]
    others = [name for name in names if name not in places]
    for number, name in enumerate(others):
        places[name] = free[number % len(free)] if free else number % PALETTE
    return places


# --- what was run ---------------------------------------------------------------------------------


def _run_with(experiment: ExperimentSummary, runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Settings, seeds, versions, folders, and the command that repeats it."""
    versions: dict[str, set[str]] = {}
    for run in runs:
        for name, number in (run.header.get("versions") or {}).items():
            versions.setdefault(str(name), set()).add(str(number))
    options = {}
    for name in ranking(experiment):
        run = next(iter(experiment.curves[name].values())).run
        settings = {**selector_options(run), "optimiser": optimiser_settings(run)}
        options[clean(name)] = _pairs(settings)
    return {
        "command": repeat_command(runs),
        "settings": _pairs(shared_settings(runs[0])),
        "options": options,
        "seeds": seeds_argument(sorted({int(run.header["seed"]) for run in runs})),
        "versions": [[clean(k), clean(", ".join(sorted(v)))] for k, v in versions.items()],
        "folders": [clean(run_name(run)) for run in runs if run.path is not None],
    }


def _pairs(settings: Mapping[str, Any]) -> list[list[str]]:
    flat = flat_settings(settings).items()
    return [[clean(key), clean(str(value))[:300]] for key, value in flat if value != {}]


def repeat_command(runs: Sequence[RunRecord]) -> str | None:
    """`fedcor compare ...` that makes these runs again; None where no single command does.

    The command is tried before it is given: its settings are those of the records.

    Args:
        runs: of one experiment that can be compared. Those with parts of a user's own, made in
            Python or from a TOML file, or renamed, have no command
    """
    headers = [run.header for run in runs]
    configs = {str(header["selector"]): header["config"] for header in headers}
    name = str(headers[0]["experiment"])
    if any(header.get("engine") for header in headers) or name not in preset_names():
        return None
    if any(map(_names_code, configs.values())):
        return None
    rounds = max(int(header["config"]["training"]["rounds"]) for header in headers)
    seeds = sorted({int(header["seed"]) for header in headers})
    settings = [f"training.rounds={rounds}"]
    changes: dict[str, Any] = {}
    for selector, config in configs.items():
        changes |= _changes(name, selector, config, settings) or {}
    wanted = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    settings += wanted
    if any(_changes(name, *item, settings) != {} for item in configs.items()):
        return None
    selectors = ",".join(configs)
    words = ["fedcor", "compare", name, "--selectors", selectors, "--seeds", seeds_argument(seeds)]
    if len(runs) == 1:
        words = ["fedcor", "run", name, "--selector", selectors, "--seed", str(seeds[0])]
    words += ["--rounds", str(rounds)]
    return shlex.join([*words, *(word for change in wanted for word in ("--set", change))])


def seeds_argument(seeds: Sequence[int]) -> str:
    """Sorted seeds as the command line takes them: `1-3`, `1,2,7`.

    Example:
        >>> seeds_argument([1, 2, 3]), seeds_argument([1, 2, 7])
        ('1-3', '1,2,7')
    """
    if len(seeds) > 2 and list(seeds) == list(range(seeds[0], seeds[-1] + 1)):
        return f"{seeds[0]}-{seeds[-1]}"
    return ",".join(map(str, seeds))


def _names_code(config: Mapping[str, Any]) -> bool:
    """Whether settings name a `module:Class`. A record's code is not imported to read it."""
    return any(":" in f"{key} {value}" for key, value in flat_settings(config).items())


def _changes(
    name: str, selector: str, config: Mapping[str, Any], settings: Sequence[str]
) -> dict[str, Any] | None:
    """The settings of a record that differ from those of the preset; None if it cannot be made."""
    try:
        preset = load_experiment(name, settings, selector).describe()
    except FedcorError:
        return None
    preset = json.loads(json.dumps(preset, default=repr))  # as a record has it
    machine = ("training.device", "training.rounds")  # given otherwise, or not of the experiment
    changed = differences(preset, config).items()
    return {key: recorded for key, (_, recorded) in changed if key not in machine}
