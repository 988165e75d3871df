"""The command line: parses, calls, prints. Exit codes: 0 done, 2 something the user can mend, 130 interrupted."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from fedcor.errors import FedcorError
from fedcor.progress import refresh, show_download, show_rounds
from fedcor.record import count_rounds, read_run, read_runs

if TYPE_CHECKING:
    from fedcor.experiment import Experiment
    from fedcor.runner import Job

__all__ = ["main"]

PAPERS_FOUR = "random,afl,power_of_choice,fedcor"
EXPERIMENT = "a preset (digits, fmnist-2spc, fmnist-1spc, fmnist-dir, cifar10-2spc, cifar10-1spc, cifar10-dir) or a TOML file"
EXAMPLES = """examples:
  fedcor demo                                         FedCor beside its baselines, in under a minute
  fedcor data fetch fmnist                            get a data set, verified
  fedcor run fmnist-2spc --selector fedcor --seed 1   one run; add --resume to go on with it
  fedcor compare fmnist-2spc --seeds 1-5 --jobs 2     paired runs of the paper's four selectors
  fedcor report runs/fmnist-2spc                      their table, with intervals and bytes
"""
RUN_EXAMPLES = """examples:
  fedcor run digits
  fedcor run fmnist-1spc --selector power_of_choice --seed 3 --rounds 200
  fedcor run fmnist-2spc --set selectors.fedcor.beta=0.75 --out runs/beta-075
  fedcor run my.toml --selector my_module:MySelector --resume
"""
COMPARE_EXAMPLES = """examples:
  fedcor compare digits --seeds 1-3 --jobs 2
  fedcor compare fmnist-dir --selectors random,fedcor,my_module:MySelector --seeds 1,2,5 --out runs/mine
  fedcor compare fmnist-2spc --seeds 1-5 --jobs 2 --resume      goes on where it was interrupted
"""
REPRODUCE_EXAMPLES = """examples:
  fedcor reproduce all --quick                                   everything, as a rehearsal
  fedcor reproduce table1 --jobs 2                               60 runs of 500 rounds; interrupt it, run it again
  fedcor reproduce table1 --dataset cifar10 --settings 2spc --seeds 1 --rounds 600
  fedcor reproduce beyond --jobs 2                               complement: its gain, its parts, its limits
"""
REPRODUCE = [
    "table1",
    "convergence",
    "toy",
    "normality",
    "stationarity",
    "interval",
    "annealing",
    "embedding",
]
REPRODUCE += [
    f"beyond-{part}" for part in ("table", "ablation", "limits", "fairness", "confirmation")
]
REPRODUCE += ["paper", "beyond", "all"]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    for output in (
        sys.stdout,
        sys.stderr,
    ):  # a locale that lacks a character gets a mark for it, not an error
        if isinstance(output, io.TextIOWrapper):
            output.reconfigure(errors="replace")
    try:
        code: int = options.command(options)
        sys.stdout.flush()
        return code
    except FedcorError as error:
        print(f"fedcor: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        again = " with --resume" if hasattr(options, "resume") else ""
        print(f"fedcor: interrupted; the same command{again} goes on from here", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output (head, say) has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as if SIGPIPE had ended us: what was not done yet is not done
    except OSError as error:
        print(
            f"fedcor: {error}; what was recorded is kept, and can be gone on with", file=sys.stderr
        )
        return 2
    except MemoryError:
        print("fedcor: not enough memory for these settings", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="fedcor",
        description="Which clients train next in federated learning.",
        epilog=EXAMPLES,
        formatter_class=formatter,
    )
    parser.add_argument("--version", action="version", version=f"fedcor {version('fedcor')}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    demo = commands.add_parser(
        "demo", help="FedCor beside its baselines on embedded data, in under a minute"
    )
    demo.add_argument(
        "--out",
        type=_folder,
        default=Path("runs/demo"),
        help="folder for the runs (default: %(default)s)",
    )
    demo.add_argument(
        "--jobs", type=_whole, default=os.cpu_count() or 1, help="processes (default: all cores)"
    )
    demo.set_defaults(command=_demo)

    run = commands.add_parser(
        "run", help="one run of an experiment", epilog=RUN_EXAMPLES, formatter_class=formatter
    )
    _experiment_arguments(run)
    run.add_argument(
        "--selector",
        help="random, afl, power_of_choice, fedcor, complement, proxy, full, or module:Class",
    )
    run.add_argument(
        "--seed", type=_whole, default=1, help="fixes everything that is drawn (default: 1)"
    )
    run.add_argument(
        "--engine",
        choices=["simulator", "flower"],
        default="simulator",
        help="flower: the same on Flower's simulation, a process a node (default: %(default)s)",
    )
    run.set_defaults(command=_run)

    compare = commands.add_parser(
        "compare",
        help="paired runs of several selectors over several seeds",
        epilog=COMPARE_EXAMPLES,
        formatter_class=formatter,
    )
    _experiment_arguments(compare)
    compare.add_argument(
        "--selectors", type=_names, default=_names(PAPERS_FOUR), help=f"default: {PAPERS_FOUR}"
    )
    compare.add_argument(
        "--seeds", type=_seeds, default=[1, 2, 3], help="as 1-5 or 1,2,7 (default: 1-3)"
    )
    compare.add_argument(
        "--jobs", type=_whole, default=1, help="processes, one thread each (default: 1)"
    )
    compare.set_defaults(command=_compare)

    again = commands.add_parser(
        "reproduce",
        help="the paper's table and figures, and what goes beyond them, one command each",
        epilog=REPRODUCE_EXAMPLES,
        formatter_class=formatter,
    )
    again.add_argument("what", metavar="WHAT", choices=REPRODUCE, help=", ".join(REPRODUCE))
    again.add_argument(
        "--dataset", default="fmnist", help="fmnist, cifar10 or digits (default: fmnist)"
    )
    again.add_argument(
        "--settings", type=_names, default=["2spc", "1spc", "dir"], help="default: 2spc,1spc,dir"
    )
    again.add_argument("--seeds", type=_seeds, default=[1, 2, 3, 4, 5], help="default: 1-5")
    again.add_argument(
        "--rounds", type=_whole, help="instead of the paper's (500 for fmnist, 2000 for cifar10)"
    )
    again.add_argument(
        "--selections", type=_whole, default=1000, help="random selections measured in a round"
    )
    again.add_argument(
        "--jobs", type=_whole, default=1, help="processes, one thread each (default: 1)"
    )
    again.add_argument(
        "--device", help="cuda, mps, or auto for what there is (default: the processor)"
    )
    again.add_argument(
        "--quick",
        action="store_true",
        help="a rehearsal on the embedded digits: two seeds, 30 rounds at most",
    )
    again.add_argument(
        "--out",
        type=_folder,
        default=Path("runs/reproduce"),
        help="default: %(default)s; goes on there",
    )
    again.set_defaults(command=_reproduce)

    report = commands.add_parser("report", help="tables from finished or running runs")
    report.add_argument(
        "folder", type=_folder, metavar="DIR", help="a run's folder, or one with runs below it"
    )
    report.add_argument("--baseline", help="selector to compare with (default: random)")
    form = report.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="every number, as JSON")
    form.add_argument("--csv", action="store_true", help="every number, as CSV, a line a metric")
    report.set_defaults(command=_report)

    explain = commands.add_parser(
        "explain",
        help="why these clients: the selector's reasons in one round of a run",
        formatter_class=formatter,
    )
    explain.add_argument("folder", type=_folder, metavar="RUN", help="a run's folder")
    explain.add_argument(
        "--round", type=_whole, help="as numbered in the record, from 0 (default: the last)"
    )
    explain.add_argument("--json", action="store_true", help="as JSON")
    explain.set_defaults(command=_explain)

    data = commands.add_parser("data", help="what data is here, and how to get the rest")
    actions = data.add_subparsers(metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="the data sets, and whether they are here")
    listing.set_defaults(command=_data_list)
    fetch = actions.add_parser("fetch", help="get a data set and verify it by its content")
    fetch.add_argument("name", metavar="NAME", help="fmnist or cifar10")
    fetch.add_argument(
        "--from",
        dest="source",
        type=_folder,
        metavar="PATH",
        help="a local file or folder that holds it",
    )
    fetch.set_defaults(command=_data_fetch)
    return parser


def _experiment_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("experiment", metavar="EXPERIMENT", help=EXPERIMENT)
    parser.add_argument("--rounds", type=_whole, help="instead of the experiment's own number")
    parser.add_argument(
        "--set",
        dest="changes",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change any setting; repeatable",
    )
    parser.add_argument("--out", type=_folder, help="folder for the result (default: below runs/)")
    parser.add_argument(
        "--resume", action="store_true", help="go on with what is in the folder already"
    )


def _whole(text: str) -> int:
    if not text.isdecimal() or (value := int(text)) > 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 2147483648")
    return value


def _folder(text: str) -> Path:
    if not text.strip():
        raise argparse.ArgumentTypeError("the name of the folder is empty")
    return Path(text).expanduser()


def _seeds(text: str) -> list[int]:
    seeds: list[int] = []
    for part in text.split(","):
        low, dash, high = part.partition("-")
        first, last = _whole(low), _whole(high if dash else low)
        seeds += range(first, min(last, first + 10_000) + 1)
    if not seeds or len(seeds) > 10_000 or len(set(seeds)) < len(seeds):
        raise argparse.ArgumentTypeError(
            f"{text!r} names no seed, one twice, or too many; write 1-5 or 1,2,7"
        )
    return seeds


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(
            f"{text!r} has an empty name, or one twice; write different names with commas between"
        )
    return names


def _note_warmup(experiment: Experiment) -> None:
    warmup = getattr(experiment.build_selector(), "warmup", 0)
    if warmup >= experiment.training.rounds:
        told = f"{experiment.selector} chooses at random for {warmup} rounds before it begins"
        print(f"fedcor: {told}, and this run has {experiment.training.rounds}", file=sys.stderr)


def _changes(options: argparse.Namespace) -> list[str]:
    return [
        *options.changes,
        *([] if options.rounds is None else [f"training.rounds={options.rounds}"]),
    ]


def _run(options: argparse.Namespace) -> int:
    from fedcor.experiment import load_experiment
    from fedcor.runner import folder_name, run

    engine = run
    if options.engine == "flower":
        from fedcor.flower.bridge import run_on_flower as engine

    experiment = load_experiment(options.experiment, _changes(options), options.selector)
    folder = (
        experiment.name if options.engine == "simulator" else f"{experiment.name}-{options.engine}"
    )
    out = (
        options.out
        or Path("runs") / folder / folder_name(experiment.selector) / f"seed-{options.seed}"
    )
    _note_warmup(experiment)
    with show_rounds(
        f"{experiment.name} {experiment.selector}", experiment.training.rounds
    ) as update:
        engine(
            experiment,
            options.seed,
            out,
            resume=options.resume,
            on_round=lambda record: update(
                record.round + 1, f"accuracy {record.test_accuracy:.3f}"
            ),
        )
    _print_finished(out, sys.stdout.isatty())
    return 0


def _compare(options: argparse.Namespace) -> int:
    from fedcor.experiment import load_experiment
    from fedcor.runner import compare_jobs

    experiment = load_experiment(options.experiment, _changes(options), options.selectors[0])
    out = options.out or Path("runs") / experiment.name
    for name in options.selectors:
        _note_warmup(experiment.with_selector(name))
    _run_all(
        compare_jobs(experiment, options.selectors, options.seeds, out, resume=options.resume),
        options.jobs,
    )
    if sys.stdout.isatty():
        _print_tables(out)
    return 0


def _demo(options: argparse.Namespace) -> int:
    from fedcor.experiment import load_experiment
    from fedcor.runner import compare_jobs

    selectors = [*_names(PAPERS_FOUR), "complement"]
    jobs = compare_jobs(load_experiment("digits"), selectors, [1, 2, 3], options.out, resume=True)
    print(
        f"50 clients, one digit each, 10 train a round: 5 selectors on 3 paired seeds, in {options.out}",
        flush=True,
    )
    _run_all(jobs, options.jobs, quiet=True)
    _print_tables(options.out)
    print(
        f"\nThe records are in {options.out}; `fedcor report {options.out} --json` gives every number."
    )
    return 0


def _reproduce(options: argparse.Namespace) -> int:
    from fedcor.reproduce import Plan, reproduce

    plan = Plan(
        options.out,
        show_rounds,
        options.dataset,
        options.settings,
        options.seeds,
        options.rounds,
        options.jobs,
        options.selections,
        options.device,
    )
    for path in reproduce(options.what, plan.quick() if options.quick else plan):
        print(path)
        if path.suffix == ".md":
            print(path.read_text(encoding="utf-8"))
    return 0


def _run_all(jobs: Sequence[Job], processes: int, *, quiet: bool = False) -> None:
    from fedcor.runner import run_jobs

    terminal = sys.stdout.isatty()  # asked here: a live bar stands in for stdout
    finished: list[Job] = []
    with show_rounds("rounds", sum(job.experiment.training.rounds for job in jobs)) as update:

        def show() -> None:
            done = sum(count_rounds(job.out) for job in jobs)
            update(done, f"{len(finished)}/{len(jobs)} runs")

        with refresh(show):
            for job in run_jobs(jobs, processes):
                finished.append(job)
                if not quiet:
                    _print_finished(job.out, terminal)


def _print_finished(folder: Path, terminal: bool) -> None:
    """One JSON line a finished run, for whoever reads it; a sentence on a terminal."""
    run = read_run(folder)
    accuracies = [entry.get("test_accuracy") or 0.0 for entry in run.rounds]
    idle = sum(not entry.get("participated") for entry in run.rounds)
    if idle:
        print(
            f"fedcor: {folder}: in {idle} of {len(run.rounds)} rounds nobody delivered a usable update",
            file=sys.stderr,
        )
    if terminal:
        print(f"{folder}: {len(run.rounds)} rounds, test accuracy {accuracies[-1]:.3f}")
        return
    line = {
        "run": str(folder),
        "selector": run.header["selector"],
        "seed": run.header["seed"],
        "rounds": len(run.rounds),
        "mean_accuracy": sum(accuracies) / len(accuracies),
        "test_accuracy": accuracies[-1],
    }
    print(json.dumps(line), flush=True)


def _report(options: argparse.Namespace) -> int:
    from fedcor.report.summary import summarise
    from fedcor.report.tables import to_csv, to_json

    if not (options.json or options.csv):
        _print_tables(options.folder, options.baseline)
        return 0
    summary = summarise(read_runs(options.folder), options.baseline)
    sys.stdout.write(to_json(summary) if options.json else to_csv(summary))
    return 0


def _explain(options: argparse.Namespace) -> int:
    from fedcor.report.explain import explain, render_explanation

    explanation = explain(read_run(options.folder), options.round)
    if options.json:
        print(json.dumps(explanation))
    else:
        render_explanation(explanation, Console())
    return 0


def _print_tables(folder: Path, baseline: str | None = None) -> None:
    from fedcor.report.summary import summarise
    from fedcor.report.tables import render

    console = Console()
    console.width = max(console.width, 80)  # narrower than this, columns would be lost
    render(summarise(read_runs(folder), baseline), console)


def _data_list(options: argparse.Namespace) -> int:  # noqa: ARG001
    from rich.table import Table

    from fedcor.data import available, cache_dir

    table = Table(box=None, pad_edge=False)
    for title in ("name", "what", "here", "how"):
        table.add_column(title)
    for entry in available():
        table.add_row(
            entry.name,
            f"{entry.what} {entry.shape}, {entry.classes} classes",
            "yes" if entry.here else "no",
            entry.how,
        )
    Console().print(table)
    print(f"\ncache folder: {cache_dir()} (FEDCOR_DATA names another)")
    return 0


def _data_fetch(options: argparse.Namespace) -> int:
    from fedcor.data import fetch

    with show_download() as update:
        path = fetch(options.name, options.source, update)
    print(path)
    return 0
