"""How names and numbers are written: in tables on the screen, in Markdown and in figures."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedcor.core.text import for_csv, one_line
from fedcor.reporting.estimates import Difference, Estimate
from fedcor.reporting.metrics import TIME_UNITS, Metric
from fedcor.reporting.notes import all_notes, missing_note, seeds_text, span, unfinished_note
from fedcor.reporting.summary import ExperimentSummary, SelectorSummary, Summary

_DISPLAY_NAMES = {
    "fedcor": "FedCor",
    "random": "Rand",
    "afl": "AFL",
    "power_of_choice": "Pow-d",
    "oort": "Oort",
    "full": "everyone trains",
    "round_robin": "round-robin",
}
_BYTE_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def display_name(selector: str) -> str:
    """What a selector or variant is called in the paper's tables and figures; else its own name."""
    return _DISPLAY_NAMES.get(selector, selector)


def estimate_text(metric: Metric, estimate: Estimate, between: str = " ") -> str:
    """`0.680 ± 0.012`; `0.680` without an interval; `N/A (2/3)` without a mean; `-` where no run
    was ever measured.

    Args:
        metric: gives the unit and the number of digits
        estimate: what is written
        between: separates the mean from what follows; a newline makes a narrow cell
    """
    if estimate.n == 0 and not metric.to_target:
        return "-"
    if estimate.mean is None:
        return f"N/A{between}({estimate.n}/{estimate.of})"
    if estimate.half_width is None:
        return "{} {}".format(*_formatted(metric, "", estimate.mean)).strip()
    mean, half, unit = _formatted(metric, "", estimate.mean, estimate.half_width)
    return f"{mean}{between}± {half} {unit}".strip()


def difference_text(metric: Metric, estimate: Estimate) -> str:
    """`+0.052 [+0.041, +0.063]`; without the bracket where there is no interval."""
    if estimate.mean is None:
        return f"N/A ({estimate.n}/{estimate.of})" if estimate.of else "no common seed"
    if estimate.low is None or estimate.high is None:
        return "{} {}".format(*_formatted(metric, "+", estimate.mean)).strip()
    mean, low, high, unit = _formatted(metric, "+", estimate.mean, estimate.low, estimate.high)
    return f"{mean} [{low}, {high}] {unit}".strip()


def _formatted(metric: Metric, sign: str, *values: float) -> list[str]:
    """Each value in the metric's format, all in one unit, and then the unit; never a `-0.0`."""
    if metric.unit == "bytes":
        size = max(abs(value) for value in values)
        scale, unit = next((pair for pair in _BYTE_UNITS if size >= pair[0]), _BYTE_UNITS[-1])
        # Three significant digits: 1.23, 12.3, 123.
        digits = sum(size < bound * scale for bound in (10, 100)) if scale > 1 else 0
        return [f"{value / scale:{sign}z.{digits}f}" for value in values] + [unit]
    if metric.unit == "seconds":
        size = max(abs(value) for value in values)
        scale, unit = next((pair for pair in TIME_UNITS if size >= 2 * pair[0]), TIME_UNITS[-1])
        digits = sum(size < bound * scale for bound in (10, 100))
        return [f"{value / scale:{sign}z.{digits}f}" for value in values] + [unit]
    if metric.unit == "number":
        return [f"{value:{sign}.4g}" for value in values] + [""]
    digits = 1 if metric.unit == "rounds" else 3
    return [f"{value:{sign}z.{digits}f}" for value in values] + [""]


def markdown(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A heading with a table below it."""
    lines = [head, ["---"] * len(head), *rows]
    return f"### {title}\n\n" + "".join("| " + " | ".join(line) + " |\n" for line in lines) + "\n"


# A summary as tables on a screen, as JSON or as CSV. Nothing is computed here.


# A line below the head and nothing else, in characters that every file and pipe takes.
PLAIN = box.Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)
LEGEND = (
    "better, worse: the interval excludes zero; unclear: it does not; "
    "equal: to the last digit; -: no interval.",
    "pairs: seeds on which both have a value, N/A (k/n) where only k of n common seeds do.",
    "rounds: compared over as many as both runs have.",
)
VERDICT_STYLES = {"better": "green", "worse": "red"}


# --- the screen -----------------------------------------------------------------------------------


def render(summary: Summary, console: Console) -> None:
    """Print two tables per experiment: each selector over its seeds, and its paired differences to
    the baseline.

    A terminal gets colour; a file or a pipe gets plain text. Where a row would be too wide, `±`
    goes to a second line.
    """
    for experiment in summary.experiments:
        table = _levels(experiment, console, " ")
        unlimited = console.options.update(max_width=9999)
        if console.measure(table, options=unlimited).maximum > console.width:
            table = _levels(experiment, console, "\n")
        _print(console, f"\n{experiment.name}", "bold")
        console.print(table)
        console.print()
        for line in _caption(experiment):
            _print(console, line)
        if len(experiment.selectors) > 1:
            title = f"paired difference to {experiment.baseline}, mean [95 % interval]"
            _print(console, f"\n{experiment.name}: {title}", "bold")
            console.print(_differences(experiment, console))
            console.print()
            for line in LEGEND:
                _print(console, line)
    for note in summary.notes:
        _print(console, f"\n{note}")
    further = ", ".join(metric.title for metric in _metrics(summary) if not metric.headline)
    _print(console, f"\nIn the JSON and CSV as well: {further}.")


def _metrics(summary: Summary) -> list[Metric]:
    """Every metric of every experiment, each once."""
    found = {m.key: m for experiment in summary.experiments for m in experiment.metrics}
    return list(found.values())


def _print(console: Console, line: str, style: str = "") -> None:
    # A heading begins with an empty line of ours.
    heading = "\n" if line.startswith("\n") else ""
    text = heading + one_line(line.removeprefix(heading), None)
    console.print(Text(_ascii(console, text), style=style))


def _ascii(console: Console, text: str) -> str:
    return text.replace("±", "+/-") if console.options.ascii_only else text


def _table(console: Console) -> Table:
    lines = box.SIMPLE_HEAD if console.is_terminal else PLAIN
    return Table(box=lines, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)


def _headlines(experiment: ExperimentSummary) -> list[Metric]:
    return [
        m
        for m in experiment.metrics
        if m.headline and (experiment.target is not None or not m.to_target)
    ]


def _levels(experiment: ExperimentSummary, console: Console, between: str) -> Table:
    """One row per selector, one column per metric, each as narrow as its cells allow."""
    table = _table(console)
    table.add_column("selector", overflow="fold")
    columns = []
    for metric in _headlines(experiment):
        cells = [
            _ascii(console, estimate_text(metric, s.estimates[metric.key], between))
            for s in experiment.selectors
        ]
        columns.append(cells)
        title = one_line(metric.title)
        lines = [*title.split(), *(line for cell in cells for line in cell.splitlines())]
        table.add_column(Text(title), justify="right", width=max(map(cell_len, lines)))
    for selector, *cells in zip(experiment.selectors, *columns, strict=True):
        table.add_row(Text(one_line(selector.name)), *map(Text, cells))
    return table


def _differences(experiment: ExperimentSummary, console: Console) -> Table:
    """One row per metric and selector other than the baseline."""
    table = _table(console)
    for title in ("selector", "difference", ""):
        table.add_column(title, overflow="fold")
    for title in ("pairs", "rounds"):
        table.add_column(title, overflow="fold", justify="right")
    for metric in _headlines(experiment):
        table.add_row(Text(one_line(metric.title), style="bold"))
        for selector in experiment.selectors:
            if selector.name == experiment.baseline:
                continue
            difference = selector.differences[metric.key]
            verdict = difference.verdict or "-"
            table.add_row(
                Text(f"  {one_line(selector.name)}"),
                Text(difference_text(metric, difference.estimate)),
                Text(verdict, style=VERDICT_STYLES.get(verdict, "")),
                Text(str(difference.estimate.n)),
                Text(_rounds_compared(metric, difference)),
            )
    return table


def _rounds_compared(metric: Metric, difference: Difference) -> str:
    if metric.to_target:
        return "to target"
    return span(difference.rounds) if difference.rounds else "-"


def _caption(experiment: ExperimentSummary) -> Iterator[str]:
    runs = [run for selector in experiment.selectors for run in selector.runs]
    done = span((min(run.rounds_done for run in runs), max(run.rounds_done for run in runs)))
    if experiment.target is None:
        target = f"no target {experiment.measure}"
    else:
        target = f"target accuracy {experiment.target:g}"
    interval = "± half the 95 % interval of the mean over seeds"
    yield f"{seeds_text(experiment)}; {done} rounds; {target}; {interval}."
    hidden = [m.title for m in experiment.metrics if m.headline and m.to_target]
    if experiment.target is not None:
        yield "N/A (k/n): only k of n seeds reached the target, so there is no mean."
    elif hidden:
        yield f"Not shown, as there is no target: {', '.join(hidden)}."
    if any(len(selector.runs) == 1 for selector in experiment.selectors):
        yield "One seed alone has no interval."
    yield from filter(None, (unfinished_note(experiment), missing_note(experiment)))


# --- files ----------------------------------------------------------------------------------------


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
        _csv_row(experiment, selector, metric)
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
    experiment: ExperimentSummary, selector: SelectorSummary, metric: Metric
) -> dict[str, object]:
    level = selector.estimates[metric.key]
    paired = selector.differences[metric.key].estimate if selector.differences else None
    return {
        "experiment": for_csv(experiment.name),
        "selector": for_csv(selector.name),
        "metric": for_csv(metric.key),
        "mean": level.mean,
        "std": level.std,
        "n": level.n,
        "low": level.low,
        "high": level.high,
        "baseline": for_csv(experiment.baseline),
        "paired_difference": paired and paired.mean,
        "paired_low": paired and paired.low,
        "paired_high": paired and paired.high,
        "pairs": paired and paired.n,
    }
