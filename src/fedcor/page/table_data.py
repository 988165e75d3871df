"""The table of the page: that of the terminal, with bytes to the target, and numbers that sort."""

from __future__ import annotations

from typing import Any

from fedcor.page.compact import compact
from fedcor.report.compact import compact_table
from fedcor.report.estimates import Estimate
from fedcor.report.metrics import WINDOW
from fedcor.report.names import clean
from fedcor.report.numbers import bytes_text, percent, rounds_text, seconds_text
from fedcor.report.ranking import ranking
from fedcor.report.summary import ExperimentSummary, SelectorSummary

__all__ = ["table_data"]

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
