"""Plain numbers to text: tables on a screen, JSON, CSV. Computes nothing; what is shown stands in the summary."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedcor.report.summary import (
    METRICS,
    Estimate,
    ExperimentSummary,
    Metric,
    SelectorSummary,
    Summary,
)

__all__ = ["NAMES", "difference_text", "estimate_text", "markdown", "render", "to_csv", "to_json"]

# What selectors are called in tables and figures.
NAMES = {
    "fedcor": "FedCor",
    "random": "Rand",
    "afl": "AFL",
    "power_of_choice": "Pow-d",
    "complement": "complement",
    "full": "everyone trains",
}

# A head line and nothing else, in characters that every file and pipe takes.
PLAIN = box.Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)
BYTE_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
LEGEND = (
    "better, worse: the interval excludes zero; unclear: it does not; equal: to the last digit; -: no interval.",
    "pairs: seeds on which both have a value, N/A (k/n) where only k of n common seeds do.",
    "rounds: compared over as many as both runs have.",
)


# --- one cell --------------------------------------------------------------------------------------------------------


def estimate_text(metric: Metric, estimate: Estimate, between: str = " ") -> str:
    """`0.680 ± 0.012`; without the second part where there is no interval; `N/A (2/3)` where there is no mean."""
    if estimate.mean is None:
        return f"N/A{between}({estimate.n}/{estimate.of})"
    if estimate.half_width is None:
        return "{} {}".format(*_written(metric, "", estimate.mean)).strip()
    mean, half, unit = _written(metric, "", estimate.mean, estimate.half_width)
    return f"{mean}{between}± {half} {unit}".strip()


def difference_text(metric: Metric, estimate: Estimate) -> str:
    """`+0.052 [+0.041, +0.063]`; without the bracket where there is no interval."""
    if estimate.mean is None:
        return f"N/A ({estimate.n}/{estimate.of})" if estimate.of else "no common seed"
    if estimate.low is None or estimate.high is None:
        return "{} {}".format(*_written(metric, "+", estimate.mean)).strip()
    mean, low, high, unit = _written(metric, "+", estimate.mean, estimate.low, estimate.high)
    return f"{mean} [{low}, {high}] {unit}".strip()


def _written(metric: Metric, sign: str, *values: float) -> list[str]:
    """Each value in the metric's format, all in one unit, and then the unit; never a `-0.0`."""
    if metric.unit == "bytes":
        size = max(abs(value) for value in values)
        scale, unit = next((pair for pair in BYTE_UNITS if size >= pair[0]), BYTE_UNITS[-1])
        digits = (
            sum(size < bound * scale for bound in (10, 100)) if scale > 1 else 0
        )  # three that count: 1.23, 12.3, 123
        return [f"{value / scale:{sign}z.{digits}f}" for value in values] + [unit]
    digits = 1 if metric.unit == "rounds" else 3
    return [f"{value:{sign}z.{digits}f}" for value in values] + [""]


def markdown(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A heading and a table below it."""
    lines = [head, ["---"] * len(head), *rows]
    return f"### {title}\n\n" + "".join("| " + " | ".join(line) + " |\n" for line in lines) + "\n"


# --- the screen ------------------------------------------------------------------------------------------------------


def render(summary: Summary, console: Console) -> None:
    """Two tables an experiment: each selector over its seeds, and its paired differences to the baseline.

    A terminal gets colour; a file or a pipe gets plain text. Where a row would be too wide, `±` goes to a second line.
    """
    for experiment in summary.experiments:
        table = _levels(experiment, console, " ")
        if (
            console.measure(table, options=console.options.update(max_width=9999)).maximum
            > console.width
        ):
            table = _levels(experiment, console, "\n")
        _print(console, f"\n{experiment.name}", "bold")
        console.print(table)
        console.print()
        for line in _caption(experiment):
            _print(console, line)
        if len(experiment.selectors) > 1:
            _print(
                console,
                f"\n{experiment.name}: paired difference to {experiment.baseline}, mean [95 % interval]",
                "bold",
            )
            console.print(_differences(experiment, console))
            console.print()
            for line in LEGEND:
                _print(console, line)
    further = ", ".join(metric.title for metric in METRICS if not metric.headline)
    _print(console, f"\nIn the JSON and CSV as well: {further}.")


def _print(console: Console, line: str, style: str = "") -> None:
    console.print(Text(_ascii(console, line), style=style))


def _ascii(console: Console, text: str) -> str:
    return text.replace("±", "+/-") if console.options.ascii_only else text


def _table(console: Console) -> Table:
    lines = box.SIMPLE_HEAD if console.is_terminal else PLAIN
    return Table(box=lines, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)


def _headlines(experiment: ExperimentSummary) -> list[Metric]:
    return [m for m in METRICS if m.headline and (experiment.target is not None or not m.to_target)]


def _levels(experiment: ExperimentSummary, console: Console, between: str) -> Table:
    table = _table(console)
    table.add_column("selector", overflow="fold")
    columns = []
    for metric in _headlines(experiment):
        cells = [
            _ascii(console, estimate_text(metric, s.estimates[metric.key], between))
            for s in experiment.selectors
        ]
        columns.append(cells)
        lines = [*metric.title.split(), *(line for cell in cells for line in cell.splitlines())]
        table.add_column(
            metric.title, justify="right", width=max(map(len, lines))
        )  # as narrow as its cells allow
    for selector, *cells in zip(experiment.selectors, *columns, strict=True):
        table.add_row(Text(selector.name), *map(Text, cells))
    return table


def _differences(experiment: ExperimentSummary, console: Console) -> Table:
    table = _table(console)
    for title in ("selector", "difference", "", "pairs", "rounds"):
        table.add_column(
            title, overflow="fold", justify="right" if title in ("pairs", "rounds") else "left"
        )
    styles = {"better": "green", "worse": "red"}
    for metric in _headlines(experiment):
        table.add_row(Text(metric.title, style="bold"))
        for selector in experiment.selectors:
            if selector.name == experiment.baseline:
                continue
            difference = selector.differences[metric.key]
            verdict = difference.verdict or "-"
            table.add_row(
                Text(f"  {selector.name}"),
                Text(difference_text(metric, difference.estimate)),
                Text(verdict, style=styles.get(verdict, "")),
                Text(str(difference.estimate.n)),
                Text(
                    "to target"
                    if metric.to_target
                    else _span(difference.rounds)
                    if difference.rounds
                    else "-"
                ),
            )
    return table


def _span(bounds: tuple[int, int]) -> str:
    return str(bounds[0]) if bounds[0] == bounds[1] else f"{bounds[0]}-{bounds[1]}"


def _caption(experiment: ExperimentSummary) -> Iterator[str]:
    runs = [run for selector in experiment.selectors for run in selector.runs]
    done = _span((min(run.rounds_done for run in runs), max(run.rounds_done for run in runs)))
    target = (
        "no target accuracy"
        if experiment.target is None
        else f"target accuracy {experiment.target:g}"
    )
    yield f"{_seeds(experiment.selectors)}; {done} rounds; {target}; ± half the 95 % interval of the mean over seeds."
    if experiment.target is None:
        yield f"Not shown, as there is no target: {', '.join(m.title for m in METRICS if m.headline and m.to_target)}."
    else:
        yield "N/A (k/n): only k of n seeds reached the target, so there is no mean."
    if any(len(selector.runs) == 1 for selector in experiment.selectors):
        yield "One seed alone has no interval."
    late = [
        f"{selector.name} seed {run.seed} ({run.rounds_done} of {run.rounds_planned} rounds)"
        for selector in experiment.selectors
        for run in selector.runs
        if not run.finished
    ]
    if late:
        yield f"Not finished, counted as far as it is: {', '.join(late)}."


def _seeds(selectors: Sequence[SelectorSummary]) -> str:
    listed = {
        selector.name: ", ".join(str(run.seed) for run in selector.runs) for selector in selectors
    }
    if len(set(listed.values())) == 1:
        return f"seeds {listed.popitem()[1]}"
    return "seeds " + ", ".join(f"{name} ({seeds})" for name, seeds in listed.items())


# --- files -----------------------------------------------------------------------------------------------------------


def to_json(summary: Summary) -> str:
    """The whole summary, with the list of metrics; keys in the order of the records, null where there is no number."""
    metrics = [
        {"key": m.key, "title": m.title, "unit": m.unit, "better": m.better} for m in METRICS
    ]
    return (
        json.dumps(
            {"metrics": metrics, **asdict(summary)}, indent=2, allow_nan=False, ensure_ascii=True
        )
        + "\n"
    )


def to_csv(summary: Summary) -> str:
    """One line for each experiment, selector and metric; empty where there is no number."""
    rows = [
        _csv_row(experiment, selector, metric)
        for experiment in summary.experiments
        for selector in experiment.selectors
        for metric in METRICS
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
        "experiment": experiment.name,
        "selector": selector.name,
        "metric": metric.key,
        "mean": level.mean,
        "std": level.std,
        "n": level.n,
        "low": level.low,
        "high": level.high,
        "baseline": experiment.baseline,
        "paired_difference": paired and paired.mean,
        "paired_low": paired and paired.low,
        "paired_high": paired and paired.high,
        "pairs": paired and paired.n,
    }
