"""The commands: each calls the library with what was parsed, and prints.

What a command needs is imported when it runs, so that help and refusals come at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fedcor.cli.dry_run import check_dry_run, print_runs
from fedcor.cli.output import last_score, print_finished, print_who, warn_about_warmup
from fedcor.cli.reports import (
    DEFAULT_PAGE,
    check_plot,
    plot_aside,
    show_comparison,
    write_page,
)
from fedcor.cluster import check_place
from fedcor.errors import ConfigError, MissingExtraError
from fedcor.progress import refresh, show_download, show_rounds
from fedcor.record import RoundRecord, count_rounds
from fedcor.tracking import check_callbacks

if TYPE_CHECKING:
    from fedcor.experiments import Experiment
    from fedcor.runner import Job

__all__ = [
    "PAPER_SELECTORS",
    "compare",
    "data_fetch",
    "data_list",
    "demo",
    "reproduce",
    "run",
]

# What the demo takes on a laptop's core: to start processes, and for a round.
START_SECONDS, ROUND_SECONDS = 8.0, 0.008
PAPER_SELECTORS = ("random", "afl", "power_of_choice", "fedcor")  # those that the paper compares


def demo(options: argparse.Namespace) -> None:
    """Six selectors on the embedded digits, three seeds."""
    from fedcor.experiments import load_experiment
    from fedcor.runner import compare_jobs
    from fedcor.selectors import DEFAULT_SELECTOR

    check_plot(options.plot)
    selectors, seeds = [*PAPER_SELECTORS, "complement", DEFAULT_SELECTOR], [1, 2, 3]
    jobs = compare_jobs(load_experiment("digits"), selectors, seeds, options.out, resume=True)
    rounds = jobs[0].experiment.rounds
    plan = f"{len(selectors)} selectors on {len(seeds)} seeds, {rounds} rounds each"
    print(f"{plan}{_how_long(jobs, options.jobs)}.")
    print(
        f"50 clients have one digit each, 10 train per round. Records: {options.out}\n", flush=True
    )
    _run_all(jobs, options.jobs, quiet=True)
    show_comparison(options.out, options.plot, DEFAULT_PAGE)


def run(options: argparse.Namespace) -> None:
    """One run of an experiment."""
    from fedcor.experiments import load_experiment

    # Checked before torch is imported, so that a mistake is refused at once.
    experiment = load_experiment(options.experiment, _changes(options), options.selector)
    callbacks = check_callbacks(options.track, Path())
    run_engine = _engine(options.engine, options.address)
    warn_about_warmup(experiment)
    print_who(experiment)
    out = options.out or _default_folder(experiment, options.engine, options.seed)
    title, rounds = f"{experiment.name} {experiment.selector}", experiment.rounds
    with show_rounds(title, rounds) as update:

        def show(record: RoundRecord) -> None:
            update(record.round + 1, last_score(record.test_accuracy, record.test_loss))

        run_engine(
            experiment,
            options.seed,
            out,
            resume=options.resume,
            on_round=show,
            callbacks=callbacks,
        )
    print_finished(out, sys.stdout.isatty())


def compare(options: argparse.Namespace) -> None:
    """Several selectors on several seeds."""
    from fedcor.experiments import load_experiment

    experiment = load_experiment(options.experiment, _changes(options), options.selectors[0])
    variants = [experiment.with_selector(name) for name in options.selectors]
    check_plot(options.plot)
    check_dry_run(options)
    check_place(options.backend, options.address)
    callbacks = check_callbacks(options.track, Path())
    from fedcor.runner import compare_jobs  # imports torch: after the checks

    for variant in variants:
        warn_about_warmup(variant)
    out = options.out or Path("runs") / experiment.name
    jobs = compare_jobs(
        experiment,
        options.selectors,
        options.seeds,
        out,
        resume=options.resume or options.dry_run,
        callbacks=callbacks,
    )
    if options.dry_run:
        print_runs(options, jobs)
        return
    _run_all(jobs, options.jobs, options.backend, options.address)
    if sys.stdout.isatty():
        print()
        show_comparison(out, options.plot, options.html)
        return
    if options.plot is not None:
        plot_aside(out, options.plot)
    if options.html is not None:
        print(write_page(out, options.html), file=sys.stderr)


def reproduce(options: argparse.Namespace) -> None:
    """The paper's table and figures, and what goes beyond them."""
    from fedcor.reproduce import Plan
    from fedcor.reproduce import reproduce as reproduce_experiment

    given = {"settings": options.settings} if options.settings else {}
    check_place(options.backend, options.address)
    plan = Plan(
        options.out,
        show_rounds,
        dataset=options.dataset,
        seeds=options.seeds,
        rounds=options.rounds,
        jobs=options.jobs,
        backend=options.backend,
        address=options.address,
        selections=options.selections,
        device=options.device,
        track=check_callbacks(options.track, options.out),
        **given,
    )
    plan = plan.quick() if options.quick else plan
    for path in reproduce_experiment(options.what, plan):
        print(path)
        if path.suffix == ".md":
            print(path.read_text(encoding="utf-8"))
    if options.html is not None:
        from fedcor.reproduce.page import write_page as write_reproduced

        file = plan.out / DEFAULT_PAGE.name if options.html == DEFAULT_PAGE else options.html
        page = write_reproduced(plan.out, file)
        print(f"no page: {options.what} has no runs to show" if page is None else page)


def data_list(options: argparse.Namespace) -> None:  # noqa: ARG001
    """The data sets, and whether they are present."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from fedcor.data import available, cache_dir

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
    from fedcor.data import fetch

    with show_download() as update:
        path = fetch(options.name, options.source, update)
    print(path)


def _engine(name: str, address: str | None) -> Callable[..., None]:
    """The function that runs an experiment on the engine called `name`."""
    if name == "flower":
        try:
            from fedcor.flower.bridge import run_on_flower
        except (MissingExtraError, ModuleNotFoundError) as error:
            # One extra has all that it needs, whatever was missing first.
            package = error.package if isinstance(error, MissingExtraError) else error.name
            raise MissingExtraError(package or "flwr", "flower-sim") from error
        return partial(run_on_flower, address=address)
    if address is not None:
        allowed = "needs --engine flower; to run on a cluster, use fedcor compare --backend"
        raise ConfigError("address", address, allowed)
    from fedcor.runner import run as run_on_simulator

    return run_on_simulator


def _default_folder(experiment: Experiment, engine: str, seed: int) -> Path:
    from fedcor.runner import folder_name

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


def _run_all(
    jobs: Sequence[Job],
    wanted: int | None,
    backend: str = "loky",
    address: str | None = None,
    *,
    quiet: bool = False,
) -> None:
    from fedcor.process_count import count_processes
    from fedcor.runner import run_jobs

    processes = count_processes(wanted, backend)

    terminal = sys.stdout.isatty()  # asked here: a live bar replaces stdout
    finished: list[Job] = []
    with show_rounds("rounds", sum(job.experiment.rounds for job in jobs)) as update:

        def show() -> None:
            done = sum(min(count_rounds(job.out), job.experiment.rounds) for job in jobs)
            update(done, f"{len(finished)}/{len(jobs)} runs")

        with refresh(show):
            for job in run_jobs(jobs, processes, backend, address):
                finished.append(job)
                if not quiet:
                    print_finished(job.out, terminal)
