"""Records and summaries as pandas frames."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fedcor.core.errors import MissingExtraError
from fedcor.reporting.estimates import Estimate, difference
from fedcor.reporting.series import group_names, series_names
from fedcor.reporting.summary import ExperimentSummary, Summary, ranking
from fedcor.runs.record import RunRecord

if TYPE_CHECKING:
    import pandas as pd

_TEXTS = ("experiment", "selector", "selected", "participated")
_COUNTS = ("seed", "round", "bytes_down", "bytes_up", "bytes", "probed", "refused")
_FLOWERS = "server_round"
_CLOCK = ("duration", "clock")
_COLUMNS = (
    "experiment", "selector", "seed", "round", "accuracy", "loss", "learning_rate", "bytes_down",
    "bytes_up", "bytes", "probed", "refused", "selected", "participated", "seconds",
)  # fmt: skip


def rounds_frame(runs: Sequence[RunRecord]) -> pd.DataFrame:
    """A row per round; see `fedcor.reporting.results.Result.to_frame`."""
    pandas = _pandas()
    named = zip(group_names(runs), series_names(runs), runs, strict=True)
    rows = [row for group, name, run in named for row in _rows(group, name, run)]
    columns = dict.fromkeys([*_COLUMNS, *(key for row in rows for key in row)])
    frame = pandas.DataFrame(rows, columns=list(columns))
    tuples = {key for row in rows for key, value in row.items() if isinstance(value, tuple)}
    numbers = [c for c in frame.columns if c not in {*_TEXTS, *_COUNTS, *tuples, _FLOWERS}]
    frame = frame.astype(dict.fromkeys(numbers, float))
    return frame.astype({_FLOWERS: "Int64"}) if _FLOWERS in frame else frame


def summary_frame(summary: Summary) -> pd.DataFrame:
    """A row per selector, best first; see `fedcor.reporting.results.Result.summary`."""
    pandas = _pandas()
    rows: dict[Any, dict[tuple[str, str], float]] = {}
    several = len(summary.experiments) > 1
    for experiment in summary.experiments:
        for name in ranking(experiment):
            rows[(experiment.name, name) if several else name] = {
                (key, part): value
                for key, estimate in experiment.selector(name).estimates.items()
                for part, value in _parts(estimate).items()
            }
    frame = pandas.DataFrame.from_dict(rows, orient="index", dtype=float)
    counts = [column for column in frame.columns if column[1] == "n"]
    frame[counts] = frame[counts].fillna(0)  # a metric that another experiment has
    frame = frame.astype(dict.fromkeys(counts, int))
    frame.columns = pandas.MultiIndex.from_tuples(frame.columns, names=["metric", ""])
    frame.index = (
        pandas.MultiIndex.from_tuples(list(rows), names=["experiment", "selector"])
        if several
        else pandas.Index(list(rows), name="selector")
    )
    return frame


def difference_frame(experiment: ExperimentSummary, a: str, b: str) -> pd.DataFrame:
    """`a` minus `b`, a row per metric; see `fedcor.reporting.results.Result.difference`."""
    rows = {}
    for metric in experiment.metrics:
        gap = difference(metric, experiment.curves[a], experiment.curves[b])
        rows[metric.key] = {**_parts(gap.estimate), "verdict": gap.verdict}
    frame = _pandas().DataFrame.from_dict(rows, orient="index")
    frame.index.name = "metric"
    return frame.astype(dict.fromkeys(("mean", "low", "high"), float))


def _rows(group: str, name: str, run: RunRecord) -> Iterator[dict[str, Any]]:
    """A run's rounds as rows of a frame; `group` and `name` are what it is called there."""
    header, total = run.header, 0
    for entry in run.rounds:
        total += entry["bytes_down"] + entry["bytes_up"]
        row = {
            "experiment": group,
            "selector": name,
            "seed": int(header["seed"]),
            "round": entry["round"],
            "accuracy": entry.get("test_accuracy"),
            "loss": entry.get("test_loss"),
            "learning_rate": entry.get("learning_rate"),
            "bytes_down": entry["bytes_down"],
            "bytes_up": entry["bytes_up"],
            "bytes": total,
            "probed": entry.get("probed", 0),
            "refused": entry.get("refused", 0),
            "selected": tuple(entry.get("selected", ())),
            "participated": tuple(entry.get("participated", ())),
            "seconds": entry.get("seconds"),
        }
        row |= {key: entry[key] for key in (_FLOWERS, *_CLOCK) if key in entry}
        taken = {*row, _FLOWERS, *_CLOCK}
        for key, value in (entry.get("metrics") or {}).items():
            # A metric that is named as a column gets another name.
            column = f"metric_{key}" if key in taken else key
            row[column] = tuple(value) if isinstance(value, list) else value
        yield row


def _parts(estimate: Estimate) -> dict[str, Any]:
    return {name: getattr(estimate, name) for name in ("mean", "low", "high", "n")}


def _pandas() -> Any:
    try:
        import pandas
    except ImportError as error:
        raise MissingExtraError("pandas", "plot") from error
    return pandas
