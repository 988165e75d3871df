"""The commands that run experiments and fetch data: each calls the library and prints.

What a command needs is imported when it runs, so that help and refusals come at once.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedcor.cli.parser import DEFAULT_PAGE, PAPER_SELECTORS
from fedcor.cli.reports import (
    check_plot,
    plot_aside,
    print_finished,
    print_who,
    show_comparison,
    warn_about_warmup,
    write_page,
)
from fedcor.core.errors import ConfigError
from fedcor.runs.folder import folder_name
from fedcor.runs.progress import show_download
from fedcor.runs.record import count_rounds
from fedcor.runs.tracking.session import check_callbacks

if TYPE_CHECKING:
    from fedcor.runs.runner import Job
    from fedcor.simulation.experiment import Experiment

# Trackers with one store for all runs -> a variable that names a store elsewhere, and its value.
_STORES = {
    "mlflow": ("MLFLOW_TRACKING_URI", "the store's address"),
    "wandb": ("WANDB_MODE", "online"),
}


# What the demo takes on a laptop's core: to start processes, and for a round.
START_SECONDS, ROUND_SECONDS = 8.0, 0.008


def demo(options: argparse.Namespace) -> None:
    """Six selectors on the embedded digits, three seeds."""
    from fedcor import api
    from fedcor.runs.runner import compare_jobs
    from fedcor.selectors import DEFAULT_SELECTOR
    from fedcor.simulation.experiment_files import load_experiment

    check_plot(options.plot)
    selectors, seeds = [*PAPER_SELECTORS, "complement", DEFAULT_SELECTOR], [1, 2, 3]
    experiment = load_experiment("digits")
    jobs = compare_jobs(experiment, selectors, seeds, options.out, resume=True)
    rounds = jobs[0].experiment.rounds
    plan = f"{len(selectors)} selectors on {len(seeds)} seeds, {rounds} rounds each"
    print(f"{plan}{_how_long(jobs, options.jobs)}.")
    print(
        f"50 clients have one digit each, 10 train per round. Records: {options.out}\n", flush=True
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
    if options.plot is not None:
        plot_aside(out, options.plot)
    if options.html is not None:
        print(write_page(out, options.html), file=sys.stderr)


def data_list(options: argparse.Namespace) -> None:  # noqa: ARG001
    """The data sets, and whether they are present."""
    from rich.console import Console
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
    Console().print(table)
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


def _how_long(jobs: Sequence[Job], processes: int) -> str:
    """`, on 2 processes: about half a minute`: what is left of the demo."""
    left = [job.experiment.rounds - count_rounds(job.out) for job in jobs]
    left = [rounds for rounds in left if rounds > 0]
    if not left:
        return ": all done before"
    used = max(min(processes, len(left)), 1)
    seconds = START_SECONDS + ROUND_SECONDS * sum(left) / min(used, os.cpu_count() or 1)
    words = (
        (10, "a few seconds"),
        (25, "about 20 seconds"),
        (45, "about half a minute"),
        (90, "about a minute"),
    )
    time = next((word for most, word in words if seconds <= most), f"about {seconds / 60:.0f} min")
    return f", on {used} {'process' if used == 1 else 'processes'}: {time}"


def check_dry_run(options: argparse.Namespace) -> None:
    """Refuse options that need the results of the runs, or all runs in one command."""
    for flag in ("plot", "html"):
        given = getattr(options, flag)
        if given is not None:
            allowed = "cannot be made before the runs; use fedcor report when they are done"
            raise ConfigError(flag, str(given), allowed)
    for tracker in options.track:
        variable, value = _STORES.get(tracker, ("", ""))
        if variable and os.environ.get(variable, "offline") in ("", "offline"):
            allowed = (
                f"each line would make a store of its own: set {variable} to {value}, here and "
                "where the lines run; or leave it out, and when the runs are done, give this "
                "command with --resume in place of --dry-run"
            )
            raise ConfigError("callbacks", tracker, allowed)


def print_runs(options: argparse.Namespace, experiment: Experiment, out: Path) -> None:
    """Print the command of each run of a comparison, for a job array.

    `--jobs`, `--backend` and `--address` are left out: the job array decides where runs go.
    `--resume` is added, so that a line can be run again.
    """
    check_dry_run(options)
    check_callbacks(options.track, Path())
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
