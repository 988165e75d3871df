"""The commands that read runs (report, watch, explain), and what all commands print."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from fedcor.cli.parser import DEFAULT_PAGE, DEFAULT_PLOT
from fedcor.core.errors import ConfigError, RecordError
from fedcor.core.text import one_line
from fedcor.core.types import selector_traits
from fedcor.runs.progress import score_note
from fedcor.runs.record import RunRecord, read_run, read_runs

if TYPE_CHECKING:
    from fedcor.reporting.page.watch import Follower
    from fedcor.reporting.summary import Summary
    from fedcor.simulation.experiment import Experiment


class _Console(Console):
    """A console that leaves it to `main` to end when whoever reads the output has ended."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def print_who(experiment: Experiment) -> None:
    """Who selects and who aggregates; on a terminal, as other programs read it in the result."""
    if sys.stdout.isatty():
        from fedcor.reporting.series import optimiser_title

        aggregating = optimiser_title(experiment.describe()["optimiser"]["name"])
        print(
            one_line(f"{experiment.name}: {experiment.selector} selects, {aggregating} aggregates")
        )


def print_finished(run: RunRecord, terminal: bool) -> None:
    """A finished run as one line: JSON for other programs, a sentence on a terminal."""
    folder = run.path
    idle = sum(not entry.get("participated") for entry in run.rounds)
    if idle:
        where = f"in {idle} of {len(run.rounds)} rounds"
        _warn(f"{folder}: {where} nobody delivered a usable update")
    if terminal:
        last = run.rounds[-1]
        score = score_note(last.get("test_accuracy"), last.get("test_loss"))
        print(f"{folder}: {len(run.rounds)} rounds, test {score}")
        return
    line = {
        "run": str(folder),
        "selector": run.header["selector"],
        "optimiser": (run.header["config"].get("optimiser") or {}).get("name"),
        "seed": run.header["seed"],
        "rounds": len(run.rounds),
        **_scores(run),
    }
    print(json.dumps(line), flush=True)


def _scores(run: RunRecord) -> dict[str, float | None]:
    """Mean over rounds and last value of the accuracy; of the loss where there is no accuracy."""
    for name in ("accuracy", "loss"):
        values = [entry.get(f"test_{name}") for entry in run.rounds]
        known = [value for value in values if value is not None]
        if known or name == "loss":
            mean = sum(known) / len(known) if known else None
            return {f"mean_{name}": mean, f"test_{name}": values[-1]}
    return {}


def print_screen(summary: Summary, *, curve: bool = True) -> None:
    """Verdict, one table and a small curve for each experiment; in colour on a terminal."""
    from fedcor.reporting.screen import screen

    console = _Console()
    shown = screen(summary, ascii=console.options.ascii_only, curve=curve)
    console.print(shown, soft_wrap=True)


def print_full(summary: Summary) -> None:
    """Every headline metric, with its intervals and paired differences."""
    from fedcor.reporting.tables import render

    console = _Console()
    console.width = max(console.width, 80)  # columns would be lost in less
    render(summary, console)


def warn_about_warmup(experiment: Experiment) -> None:
    """Warns if the run ends before the selector's own rule begins."""
    warmup = selector_traits(experiment.build_selector()).warmup
    rounds = experiment.rounds
    if warmup >= rounds:
        _warn(
            f"warning: {experiment.selector} chooses at random in its first {warmup} rounds, "
            f"but this run has only {rounds}: set a shorter warmup, or run more rounds"
        )


def _warn(message: str) -> None:
    print(f"fedcor: {one_line(message, None)}", file=sys.stderr)


def report(options: argparse.Namespace) -> None:
    """The verdict on runs, and what it rests on."""
    from fedcor.reporting.screen import to_latex
    from fedcor.reporting.tables import to_csv, to_json

    summary = _summary(options.folder, options.baseline, options.metric)
    pictures = [] if options.plot is None else _plot(summary, options.folder, options.plot)
    if options.html is not None:
        page = write_page(options.folder, options.html, options.baseline, options.metric)
        pictures.append(page)
    forms = {"json": to_json, "csv": to_csv, "latex": to_latex}
    for form, text_of in forms.items():
        if getattr(options, form):
            sys.stdout.write(text_of(summary))
            for path in pictures:  # the output is for another program
                print(path, file=sys.stderr)
            return
    if options.full:
        print_full(summary)
    else:
        print_screen(summary, curve=options.plot is None)
    _print_faults(options.folder)
    if pictures:
        print("\n" + "\n".join(map(str, pictures)))


def _print_faults(folder: Path) -> None:
    """What went wrong with clients, and who lied: a line for each run or simulated selector."""
    from fedcor.reporting.notes import byzantine_note, faults_note, missing_notes
    from fedcor.reporting.series import clean

    runs = read_runs(folder)
    found = [note for run in runs for say in (faults_note, byzantine_note) if (note := say(run))]
    found += missing_notes(runs)
    if found:
        print("\n" + "\n".join(map(clean, found)))


def show_comparison(folder: Path, plot: Path | None, page: Path | None = None) -> None:
    """What a comparison ends with."""
    summary = _summary(folder)
    pictures = [] if plot is None else _plot(summary, folder, plot)
    print_screen(summary, curve=plot is None)
    if pictures:
        print("\n" + "\n".join(map(str, pictures)))
    if page is not None:
        print(f"\nThe page, for a browser: {write_page(folder, page)}")
    html = "--html, " if page is None else ""
    print(f"\nMore: fedcor report {folder} --plot, {html}--full, --json, --csv or --latex")


def write_page(
    folder: Path, file: Path, baseline: str | None = None, measure: str | None = None
) -> Path:
    """Write the page of the runs in `folder`; returns its file."""
    from fedcor.core.files import write_whole
    from fedcor.reporting.page import render_page
    from fedcor.reporting.page.data import page_data

    path = folder / DEFAULT_PAGE.name if file == DEFAULT_PAGE else file
    write_whole(path, render_page(page_data(read_runs(folder), baseline, measure)))
    return path


def watch(options: argparse.Namespace) -> None:
    """Serve the page of a folder on this machine, until Ctrl-C."""
    from fedcor.reporting.page.watch import Follower, PageServer

    follower = Follower(options.folder, options.baseline, options.metric)
    if not options.folder.is_dir():
        raise RecordError(f"there is no folder {options.folder}")
    try:
        _wait_for_run(follower, options.folder)
        follower.data()  # refuses here what cannot be shown
        try:
            made = PageServer(follower, options.port)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or "there are ports up to 65535"
            raise ConfigError("port", options.port, f"cannot be used: {why}") from None
        with made as server:
            print(f"{options.folder} is shown at {server.url}; Ctrl-C to stop", flush=True)
            server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        print()  # after the ^C that the terminal shows


def _wait_for_run(follower: Follower, folder: Path) -> None:
    if not follower.is_empty():
        return
    print(f"there is no run in {folder} yet; waiting for one", flush=True)
    while follower.is_empty():
        time.sleep(0.5)


def check_plot(plot: Path | None) -> None:
    """Refuse a picture that cannot be drawn before anything is run."""
    if plot is not None:
        from fedcor.reporting.plots import check_format

        check_format(plot)


def _summary(folder: Path, baseline: str | None = None, measure: str | None = None) -> Summary:
    from fedcor.reporting.summary import summarise

    return summarise(read_runs(folder), baseline, measure)


def _plot(summary: Summary, folder: Path, file: Path) -> list[Path]:
    """Draw every experiment; returns the files. Several experiments get a file each.

    One without anything to draw is left out, and said.
    """
    from fedcor.reporting.plots import cannot_draw, plot_experiment, save_plot

    path = folder / "curves.png" if file == DEFAULT_PLOT else file
    written = []
    for experiment in summary.experiments:
        if why := cannot_draw(experiment):
            print(f"fedcor: {why}", file=sys.stderr)
            continue
        name = re.sub(r"[^\w.-]", "_", experiment.name)
        several = len(summary.experiments) > 1
        target = path.with_name(f"{path.stem}-{name}{path.suffix}") if several else path
        save_plot(plot_experiment(experiment), target)
        written.append(target)
    return written


def plot_aside(folder: Path, plot: Path) -> None:
    """Draw, where the output is for another program: the paths go to the other stream."""
    for path in _plot(_summary(folder), folder, plot):
        print(path, file=sys.stderr)


def explain(options: argparse.Namespace) -> None:
    """A selector's reasons in one round."""
    from fedcor.reporting.explanations import explanation
    from fedcor.reporting.reason_texts import render_explanation

    found = explanation(read_run(options.folder), options.round)
    if options.json:
        print(json.dumps(found))
    else:
        render_explanation(found, Console())
