"""Tables of results: one model of an experiment's table, and its forms.

`results_table` has a row per selector, best first, and a column per number that people compare;
each cell is a number and its text. The terminal, notebooks (HTML), papers (LaTeX; all three in
`fedcor.reporting.screen`) and the report page are forms of it. The full tables, JSON and CSV hold
every metric of a summary instead. Nothing is computed here.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial

from rich import box
from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from fedcor.core.text import bytes_text, for_csv, one_line, seconds_text
from fedcor.reporting.metrics import (
    WINDOW,
    Difference,
    Estimate,
    Metric,
    numbers,
    numbers_with_unit,
    percent,
    with_interval,
)
from fedcor.reporting.notes import all_notes, seeds_text
from fedcor.reporting.series import NAME_WIDTH, clean, short_names
from fedcor.reporting.summary import ExperimentSummary, SelectorSummary, Summary, ranking

WIDTH = 80
NARROWEST_NAME = 8
VERDICT_STYLES = {"better": "green", "worse": "red"}

# --- the model ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """A number, and how it is written; `-` where there is none."""

    value: float | None
    text: str


@dataclass(frozen=True)
class Column:
    """A column of the table.

    Attributes:
        key: mean, final, rounds, bytes_to, time_to, bytes, time, or gap (the paired difference of
            the mean from the baseline)
        head: its title in a narrow table; empty if it is left out there
        title: its title where there is room
        cell: what it shows of a selector
    """

    key: str
    head: str
    title: str
    cell: Callable[[SelectorSummary], Cell]


@dataclass(frozen=True)
class Row:
    """One selector.

    Attributes:
        selector: its whole name
        cells: by the key of the column
        difference: from the baseline, in the mean of the measure; None for the baseline
    """

    selector: str
    cells: Mapping[str, Cell]
    difference: Difference | None

    @property
    def verdict(self) -> str:
        """What the interval of the difference says; empty without one."""
        return "" if self.difference is None else self.difference.verdict or ""


@dataclass(frozen=True)
class ResultsTable:
    """The table of an experiment; its rows are the selectors, best first."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]

    def narrow(self) -> list[list[str]]:
        """The head and the rows as text, at most 80 wide."""
        table = [
            [column.head, *(row.cells[column.key].text for row in self.rows)]
            for column in self.columns
            if column.head
        ]
        used = sum(2 + max(map(cell_len, column)) for column in table)
        width = min(max(WIDTH - used, NARROWEST_NAME), NAME_WIDTH)
        names = short_names((row.selector for row in self.rows), width)
        return [list(row) for row in zip(["selector", *names.values()], *table, strict=True)]


def results_table(experiment: ExperimentSummary) -> ResultsTable:
    """The table of an experiment.

    Args:
        experiment: as `summarise` gives it
    """
    columns = tuple(_columns(experiment))
    rows = [
        Row(
            selector=name,
            cells={column.key: column.cell(selector) for column in columns},
            difference=selector.differences.get(experiment.headline.key),
        )
        for name in ranking(experiment)
        for selector in [experiment.selector(name)]
    ]
    return ResultsTable(columns, tuple(rows))


def _columns(experiment: ExperimentSummary) -> Iterator[Column]:
    measure, target, clock = clean(experiment.measure), experiment.target, experiment.has_clock

    def column(key: str, head: str, title: str, metric: str) -> Column:
        return Column(key, head, title, partial(_cell, experiment.metric(metric)))

    yield column("mean", "mean", f"{measure}, mean of all rounds", experiment.headline.key)
    last = f"last {WINDOW}"
    yield column("final", last, f"{measure}, {last} rounds", f"final_{experiment.measure}")
    if target is not None:
        goal = percent(target)
        yield column("rounds", f"to {goal}", f"first round at {goal}", "rounds_to_target")
        yield column("bytes_to", "", "bytes to then", "bytes_to_target")
        if clock:
            yield column("time_to", "time", "simulated time to then", "seconds_to_target")
    if clock:
        head = "time" if target is None else ""
        yield column("time", head, "simulated time in all", "simulated_seconds")
    yield Column("bytes", "bytes", "bytes in all", _bytes)
    if len(experiment.selectors) > 1:
        baseline = short_names([experiment.baseline], NARROWEST_NAME + 2)[experiment.baseline]
        gap = partial(_gap, experiment.headline)
        interval = any("[" in gap(selector).text for selector in experiment.selectors)
        head = f"vs {baseline} [95 %]" if interval else f"vs {baseline}"
        yield Column("gap", head, f"mean {measure} minus {clean(experiment.baseline)}’s", gap)


def _cell(metric: Metric, selector: SelectorSummary) -> Cell:
    mean = selector.estimates[metric.key].mean
    if mean is None and metric.key == "rounds_to_target" and selector.reached[0]:
        return Cell(None, "{}/{}".format(*selector.reached))
    if mean is None:
        return Cell(None, "-")
    texts = {"bytes": bytes_text, "seconds": seconds_text}
    return Cell(
        mean, texts[metric.unit](mean) if metric.unit in texts else numbers(metric, [mean])[0]
    )


def _bytes(selector: SelectorSummary) -> Cell:
    down, up = (selector.estimates[key].mean for key in ("bytes_down", "bytes_up"))
    return Cell(None, "-") if down is None or up is None else Cell(down + up, bytes_text(down + up))


def _gap(metric: Metric, selector: SelectorSummary) -> Cell:
    """The paired difference from the baseline."""
    if not selector.differences:
        return Cell(0.0, "baseline")
    estimate = selector.differences[metric.key].estimate
    if estimate.mean is None:
        return Cell(None, "-" if estimate.of else "no common seed")
    return Cell(estimate.mean, with_interval(numbers(metric, estimate.known, signed=True)))


def title(experiment: ExperimentSummary, *, target: bool = True) -> str:
    """What the table is about: experiment, measure, rounds and seeds; and the target, if there is
    one and `target` says so."""
    first, last = experiment.rounds_done
    rounds = f"{last} rounds" if first == last else f"{first}-{last} rounds"
    to = ""
    if target and experiment.target is not None:
        to = f"; to {100 * experiment.target:g} %: in rounds"
        to += " and simulated time" if experiment.has_clock else ""
    elif experiment.has_clock:
        to = "; time: simulated"
    about = f"{experiment.name}: {experiment.measure_title}"
    return clean(f"{about} over {rounds}, {seeds_text(experiment)}{to}")


# --- wide forms: every headline metric, with intervals --------------------------------------------

# A line below the head and nothing else, in characters that every file and pipe takes.
PLAIN = box.Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)


def estimate_text(metric: Metric, estimate: Estimate) -> str:
    """`0.680 ± 0.012`; `0.680` without an interval; `N/A (2/3)` without a mean; `-` where no run
    was ever measured."""
    if estimate.n == 0 and not metric.to_target:
        return "-"
    if estimate.mean is None:
        return f"N/A ({estimate.n}/{estimate.of})"
    half = [] if estimate.half_width is None else [estimate.half_width]
    numbers, unit = numbers_with_unit(metric, [estimate.mean, *half])
    return f"{' ± '.join(numbers)} {unit}".strip()


def difference_text(metric: Metric, estimate: Estimate) -> str:
    """`+0.052 [+0.041, +0.063]`; without the bracket where there is no interval."""
    if estimate.mean is None:
        return f"N/A ({estimate.n}/{estimate.of})" if estimate.of else "no common seed"
    texts, unit = numbers_with_unit(metric, estimate.known, "+")
    return f"{with_interval(texts)} {unit}".strip()


def render(summary: Summary, console: Console) -> None:
    """Print a table per experiment: by metric, each selector over its seeds, and its paired
    difference from the baseline.

    A terminal gets colour; a file or a pipe gets plain text.
    """

    def say(line: str, style: str = "") -> None:
        console.print(Text(_ascii(console, clean(line)), style=style))

    for experiment in summary.experiments:
        console.print()
        say(title(experiment), "bold")
        if len(experiment.selectors) > 1:
            say(f"difference: paired difference from {experiment.baseline} [95 % interval]")
        console.print(_full_table(experiment, console))
        console.print()
        for line in (*_legend(experiment), *all_notes(experiment)):
            say(line)
    for note in summary.notes:
        console.print()
        say(note)
    further = ", ".join(metric.title for metric in _metrics(summary) if not metric.headline)
    console.print()
    say(f"In the JSON and CSV as well: {further}.")


def _metrics(summary: Summary) -> list[Metric]:
    """Every metric of every experiment, each once."""
    return list({m.key: m for e in summary.experiments for m in e.metrics}.values())


def _ascii(console: Console, text: str) -> str:
    return text.replace("±", "+/-") if console.options.ascii_only else text


def _full_table(experiment: ExperimentSummary, console: Console) -> Table:
    """One row per metric and selector."""
    table = Table(box=PLAIN, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    paired = ("difference", "", "pairs") if len(experiment.selectors) > 1 else ()
    for column in ("selector", "mean", *paired):
        justify: JustifyMethod = "right" if column == "pairs" else "left"
        table.add_column(column, overflow="fold", justify=justify)
    for metric in experiment.metrics:
        if not metric.headline or (metric.to_target and experiment.target is None):
            continue
        table.add_row(Text(one_line(metric.title), style="bold"))
        for selector in experiment.selectors:
            mean = estimate_text(metric, selector.estimates[metric.key])
            cells = [Text(f"  {one_line(selector.name)}"), Text(_ascii(console, mean))]
            if selector.differences:
                difference = selector.differences[metric.key]
                verdict = difference.verdict or "-"
                cells.append(Text(difference_text(metric, difference.estimate)))
                cells.append(Text(verdict, style=VERDICT_STYLES.get(verdict, "")))
                cells.append(Text(str(difference.estimate.n)))
            table.add_row(*cells)
    return table


def _legend(experiment: ExperimentSummary) -> Iterator[str]:
    yield "± half the 95 % interval of the mean over seeds; one seed alone has none."
    if experiment.target is not None:
        yield "N/A (k/n): only k of n seeds reached the target, so there is no mean."
    if len(experiment.selectors) > 1:
        yield "better, worse: the interval excludes zero; unclear: it does not; -: there is none."
        yield "pairs: seeds on which both have a value, over the rounds that both runs have."


# --- files: every metric --------------------------------------------------------------------------


def to_json(summary: Summary) -> str:
    """The summary and the list of metrics as JSON; keys in the order of the records, null where
    there is no number."""
    metrics = [
        {"key": m.key, "title": m.title, "unit": m.unit, "better": m.better}
        for m in _metrics(summary)
    ]
    experiments = [
        {
            "name": experiment.name,
            "target": experiment.target,
            "baseline": experiment.baseline,
            "selectors": [asdict(selector) for selector in experiment.selectors],
            "notes": all_notes(experiment),
        }
        for experiment in summary.experiments
    ]
    content = {"metrics": metrics, "experiments": experiments, "notes": summary.notes}
    return json.dumps(content, indent=2, allow_nan=False, ensure_ascii=True) + "\n"


def to_csv(summary: Summary) -> str:
    """One line per experiment, selector and metric; empty where there is no number.

    A name that a spreadsheet would read as a formula begins with an apostrophe; see
    `fedcor.core.text.for_csv`. The JSON has names as they are.
    """
    rows = [
        _csv_row(experiment, selector, metric.key)
        for experiment in summary.experiments
        for selector in experiment.selectors
        for metric in experiment.metrics
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _csv_row(
    experiment: ExperimentSummary, selector: SelectorSummary, key: str
) -> dict[str, object]:
    level = selector.estimates[key]
    paired = selector.differences[key].estimate if selector.differences else None
    pairs = {"paired_difference": "mean", "paired_low": "low", "paired_high": "high", "pairs": "n"}
    return {
        "experiment": for_csv(experiment.name),
        "selector": for_csv(selector.name),
        "metric": for_csv(key),
        **{part: getattr(level, part) for part in ("mean", "std", "n", "low", "high")},
        "baseline": for_csv(experiment.baseline),
        **{column: paired and getattr(paired, part) for column, part in pairs.items()},
    }
