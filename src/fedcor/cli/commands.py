"""The commands: each calls the library with what was parsed, and prints.

What a command needs is imported when it runs, so that help and refusals come at once.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from fedcor.cli.parser import DEFAULT_PAGE, DEFAULT_PLOT, PAPER_SELECTORS
from fedcor.core.errors import ConfigError, RecordError
from fedcor.core.text import one_line
from fedcor.core.types import selector_traits
from fedcor.runs.progress import score_note, show_download
from fedcor.runs.record import RunRecord, read_run, read_runs
from fedcor.runs.resume import folder_name
from fedcor.runs.tracking.session import check_callbacks

if TYPE_CHECKING:
    from fedcor.reporting.summary import Summary
    from fedcor.simulation.experiment import Experiment


def demo(options: argparse.Namespace) -> None:
    """Six selectors on the embedded digits, three seeds."""
    from fedcor import api
    from fedcor.selectors import DEFAULT_SELECTOR
    from fedcor.simulation.experiment_files import load_experiment

    check_plot(options.plot)
    selectors, seeds = [*PAPER_SELECTORS, "complement", DEFAULT_SELECTOR], [1, 2, 3]
    experiment = load_experiment("digits")
    print(
        f"{len(selectors)} selectors on {len(seeds)} seeds, {experiment.rounds} rounds each.\n"
        f"50 clients have one digit each, 10 train per round. Records: {options.out}\n",
        flush=True,
    )
    api.compare(experiment, selectors, seeds, out=options.out, resume=True, jobs=options.jobs)
    show_comparison(options.out, options.plot, DEFAULT_PAGE)


def run(options: argparse.Namespace) -> None:
    """One run of an experiment."""
    from fedcor import api
    from fedcor.simulation.experiment_files import load_experiment

    experiment = load_experiment(options.experiment, _changes(options), options.selector)
    warn_about_warmup(experiment)
    print_who(experiment)
    terminal = sys.stdout.isatty()  # asked here: a live bar replaces stdout
    result = api.run(
        experiment,
        seed=options.seed,
        out=options.out or _default_folder(experiment, options.engine, options.seed),
        resume=options.resume,
        engine=options.engine,
        address=options.address,
        callbacks=options.track,
    )
    print_finished(result.runs[0], terminal)


def compare(options: argparse.Namespace) -> None:
    """Several selectors on several seeds."""
    from fedcor import api
    from fedcor.simulation.experiment_files import load_experiment

    experiment = load_experiment(options.experiment, _changes(options), options.selectors[0])
    variants = [experiment.with_selector(name) for name in options.selectors]
    check_plot(options.plot)
    out = options.out or Path("runs") / experiment.name
    if options.dry_run:
        print_runs(options, experiment, out)
        return
    for variant in variants:
        warn_about_warmup(variant)
    terminal = sys.stdout.isatty()  # asked here: a live bar replaces stdout
    api.compare(
        experiment,
        options.selectors,
        options.seeds,
        out=out,
        resume=options.resume,
        jobs=options.jobs,
        backend=options.backend,
        address=options.address,
        on_run=lambda record: print_finished(record, terminal),
        callbacks=options.track,
    )
    if terminal:
        print()
        show_comparison(out, options.plot, options.html)
        return
    if options.plot is not None:  # the output is for another program: paths go to the other stream
        print(*_plot(_summary(out), out, options.plot), sep="\n", file=sys.stderr)
    if options.html is not None:
        print(write_page(out, options.html), file=sys.stderr)


def data_list(options: argparse.Namespace) -> None:  # noqa: ARG001
    """The data sets, and whether they are present."""
    from rich.table import Table
    from rich.text import Text

    from fedcor.data.cache import cache_dir
    from fedcor.data.datasets import available

    table = Table(box=None, pad_edge=False)
    for title in ("name", "what", "downloaded", "next step"):
        table.add_column(title)
    for entry in available():
        what = f"{entry.description} {entry.shape}, {entry.classes} classes"
        here = "yes" if entry.present else "no"
        # The next step may be to install `fedcor[sim]`, which is no markup.
        table.add_row(*map(Text, (entry.name, what, here, entry.next_step)))
    _Console().print(table)
    print(f"\ncache folder: {cache_dir()} (FEDCOR_DATA names another)")


def data_fetch(options: argparse.Namespace) -> None:
    """Download a data set."""
    from fedcor.data.downloads import fetch

    with show_download() as update:
        path = fetch(options.name, options.source, update)
    print(path)


def _default_folder(experiment: Experiment, engine: str, seed: int) -> Path:
    name = experiment.name if engine == "simulator" else f"{experiment.name}-{engine}"
    return Path("runs") / name / folder_name(experiment.selector_label) / f"seed-{seed}"


def _changes(options: argparse.Namespace) -> list[str]:
    rounds = [] if options.rounds is None else [f"training.rounds={options.rounds}"]
    return [*options.changes, *rounds]


def print_runs(options: argparse.Namespace, experiment: Experiment, out: Path) -> None:
    """Print the command of each run of a comparison, for a job array.

    `--jobs`, `--backend` and `--address` are left out: the job array decides where runs go.
    `--resume` is added, so that a line can be run again.
    """
    for flag, file in (("plot", options.plot), ("html", options.html)):
        if file is not None:
            allowed = "cannot be made before the runs; use fedcor report when they are done"
            raise ConfigError(flag, str(file), allowed)
    check_callbacks(options.track, out)
    from fedcor.runs.runner import compare_jobs

    # Joined by `=`, a value may begin with a dash.
    shared = [f"--set={change}" for change in options.changes]
    if options.rounds is not None:
        shared += ["--rounds", str(options.rounds)]
    shared += [word for tracker in options.track for word in ("--track", tracker)]
    name = options.experiment
    name = f"./{name}" if name.startswith("-") else name
    for job in compare_jobs(experiment, options.selectors, options.seeds, out, resume=True):
        choice = ["--selector", str(job.experiment.selector), "--seed", str(job.seed)]
        words = ["fedcor", "run", name, *choice, *shared, "--resume", f"--out={job.out}"]
        print(shlex.join(words))


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
    pictures = _plot(summary, options.folder, options.plot)
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
    pictures = _plot(summary, folder, plot)
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
        if follower.is_empty():
            print(f"there is no run in {options.folder} yet; waiting for one", flush=True)
        while follower.is_empty():
            time.sleep(0.5)
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


def check_plot(plot: Path | None) -> None:
    """Refuse a picture that cannot be drawn before anything is run."""
    if plot is not None:
        from fedcor.reporting.plots import check_format

        check_format(plot)


def _summary(folder: Path, baseline: str | None = None, measure: str | None = None) -> Summary:
    from fedcor.reporting.summary import summarise

    return summarise(read_runs(folder), baseline, measure)


def _plot(summary: Summary, folder: Path, file: Path | None) -> list[Path]:
    """Draw every experiment, if a file is given; returns the files, one for each experiment.

    One without anything to draw is left out, and said.
    """
    if file is None:
        return []
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


def explain(options: argparse.Namespace) -> None:
    """A selector's reasons in one round."""
    from fedcor.reporting.explanations import explanation
    from fedcor.reporting.reason_texts import render_explanation

    found = explanation(read_run(options.folder), options.round)
    if options.json:
        print(json.dumps(found))
    else:
        render_explanation(found, _Console())
