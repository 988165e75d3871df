"""One table of a whole experiment, best first, narrow enough for 80 columns."""

from __future__ import annotations

from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size

from fedcor.report.estimates import Estimate
from fedcor.report.metrics import WINDOW, Metric
from fedcor.report.names import NAME_WIDTH, short_names
from fedcor.report.numbers import bytes_text, numbers, percent, rounds_text, seconds_text
from fedcor.report.ranking import ranking
from fedcor.report.summary import ExperimentSummary, SelectorSummary

__all__ = ["WIDTH", "CompactTable", "Row", "compact_table"]

WIDTH = 80
BETWEEN = "  "
NARROWEST_NAME = 8


@dataclass(frozen=True)
class Row:
    """One selector of the table.

    Attributes:
        selector: its whole name
        cells: one per column
        verdict: what the interval of its difference to the baseline says; None without one
    """

    selector: str
    cells: tuple[str, ...]
    verdict: str | None


@dataclass(frozen=True)
class CompactTable:
    """The table as text.

    Attributes:
        head: the titles of the columns
        rows: best selector first
    """

    head: tuple[str, ...]
    rows: tuple[Row, ...]

    def lines(self) -> list[str]:
        """The head and the rows, in columns; at most 80 wide."""
        table = [self.head, *(row.cells for row in self.rows)]
        widths = [max(map(cell_len, column)) for column in zip(*table, strict=True)]
        lines = []
        for cells in table:
            # The first and the last column begin at the left, numbers end at the right.
            padded = [
                set_cell_size(cell, width)
                if place in (0, len(cells) - 1)
                else " " * (width - cell_len(cell)) + cell
                for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
            ]
            lines.append(BETWEEN.join(padded).rstrip())
        return lines


def compact_table(experiment: ExperimentSummary) -> CompactTable:
    """The table of an experiment.

    Its columns: the mean of the measure over all rounds and over the last ten, rounds to the
    target, simulated time to the target (in all, without one) where there is a clock, bytes down
    and up, and the paired difference of the mean to the baseline with its 95 %
    interval.

    Args:
        experiment: as `summarise` gives it
    """
    selectors = [experiment.selector(name) for name in ranking(experiment)]
    mean, final = experiment.headline, _metric(experiment, f"final_{experiment.measure}")
    columns = [
        ["mean", *(_level(mean, s.estimates[mean.key]) for s in selectors)],
        [f"last {WINDOW}", *(_level(final, s.estimates[final.key]) for s in selectors)],
    ]
    if experiment.target is not None:
        columns.append([f"to {percent(experiment.target)}", *map(_to_target, selectors)])
    if experiment.has_clock:
        key = "seconds_to_target" if experiment.target is not None else "simulated_seconds"
        columns.append(["time", *(_time(key, s) for s in selectors)])
    columns.append(["bytes", *map(_bytes, selectors)])
    compared = len(selectors) > 1
    gaps = [_gap(mean, s) for s in selectors] if compared else []
    used = sum(2 + max(map(cell_len, column)) for column in columns)
    used += 2 + max(map(cell_len, gaps)) if compared else 0
    room = min(max(WIDTH - used, NARROWEST_NAME), NAME_WIDTH)
    names = short_names((s.name for s in selectors), room)
    if compared:
        interval = " [95 %]" if any("[" in gap for gap in gaps) else ""
        name = short_names([experiment.baseline], NARROWEST_NAME + 2)[experiment.baseline]
        columns.append([f"vs {name}{interval}", *gaps])
    head, *cells = zip(["selector", *(names[s.name] for s in selectors)], *columns, strict=True)
    verdicts = [s.differences[mean.key].verdict if s.differences else None for s in selectors]
    rows = [
        Row(s.name, row, verdict)
        for s, row, verdict in zip(selectors, cells, verdicts, strict=True)
    ]
    return CompactTable(head, tuple(rows))


def _metric(experiment: ExperimentSummary, key: str) -> Metric:
    return next(metric for metric in experiment.metrics if metric.key == key)


def _level(metric: Metric, estimate: Estimate) -> str:
    return "-" if estimate.mean is None else numbers(metric, [estimate.mean])[0]


def _to_target(selector: SelectorSummary) -> str:
    """Rounds; `2/3` where only two of three seeds reached it, `-` where none did."""
    mean = selector.estimates["rounds_to_target"].mean
    if mean is not None:
        return rounds_text(mean)
    reached, runs = selector.reached
    return f"{reached}/{runs}" if reached else "-"


def _time(key: str, selector: SelectorSummary) -> str:
    mean = selector.estimates[key].mean
    return "-" if mean is None else seconds_text(mean)


def _bytes(selector: SelectorSummary) -> str:
    down, up = (selector.estimates[key].mean for key in ("bytes_down", "bytes_up"))
    return "-" if down is None or up is None else bytes_text(down + up)


def _gap(metric: Metric, selector: SelectorSummary) -> str:
    """The paired difference to the baseline."""
    if not selector.differences:
        return "baseline"
    estimate = selector.differences[metric.key].estimate
    if estimate.mean is None:
        return "-" if estimate.of else "no common seed"
    if estimate.low is None or estimate.high is None:
        return numbers(metric, [estimate.mean], signed=True)[0]
    values = [estimate.mean, estimate.low, estimate.high]
    return "{} [{}, {}]".format(*numbers(metric, values, signed=True))
