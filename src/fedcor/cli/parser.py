"""The arguments of every command: their help, their examples, and how they are parsed."""

from __future__ import annotations

import argparse
import os
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedcor.core.config import expand_home
from fedcor.core.errors import ConfigError
from fedcor.data.cache import SPECS
from fedcor.runs.cluster.address import CLUSTERS
from fedcor.runs.tracking.session import TRACKERS
from fedcor.selectors import DEFAULT_SELECTOR, selector_names
from fedcor.simulation.experiment_files import preset_names

EXAMPLES = """examples:
  fedcor demo                                         six selectors compared, in under a minute
  fedcor data fetch fmnist                            download a data set and verify it
  fedcor run fmnist-2spc --selector fedcor --seed 1   one run; add --resume to continue it
  fedcor compare fmnist-2spc --seeds 1-5 --jobs 2     paired runs of the paper's four selectors
  fedcor report runs/fmnist-2spc                      who is best, by how much, how surely
"""
RUN_EXAMPLES = """examples:
  fedcor run digits
  fedcor run fmnist-1spc --selector power_of_choice --seed 3 --rounds 200
  fedcor run fmnist-2spc --set selectors.fedcor.beta=0.75 --out runs/beta-075
  fedcor run my.toml --selector my_module:MySelector --resume
"""
COMPARE_EXAMPLES = """examples:
  fedcor compare digits --seeds 1-3 --jobs 2
  fedcor compare fmnist-dir --selectors random,my_module:MySelector --seeds 1,2,5 --out runs/mine
  fedcor compare fmnist-2spc --seeds 1-5 --jobs 2 --resume      continues after an interruption
  fedcor compare digits --backend dask --address 127.0.0.1:8786
"""
DEMO_EXAMPLES = """examples:
  fedcor demo
  fedcor demo --plot --jobs 1
"""
REPORT_EXAMPLES = """examples:
  fedcor report runs/demo                        the verdict, one table, a small curve
  fedcor report runs/demo --baseline fedcor      compared with fedcor
  fedcor report runs/demo --html                 a page for a browser: runs/demo/report.html
  fedcor report runs/demo --plot                 a picture: against rounds, and against bytes
  fedcor report runs/demo --plot paper/fig1.pdf --latex > paper/table.tex
  fedcor report runs/mine --metric f1            by a metric of your own
  fedcor report runs/demo --full                 every headline number; --json and --csv have all
"""
WATCH_EXAMPLES = """examples:
  fedcor watch runs/demo                         then open the address that it prints
  fedcor watch runs --port 8080
"""
EXPLAIN_EXAMPLES = """examples:
  fedcor explain runs/demo/fedcor/seed-1 --round 40
"""

PAPER_SELECTORS = ("random", "afl", "power_of_choice", "fedcor")  # those that the paper compares
DEFAULT_PLOT = Path("DIR/curves.png")  # in the folder of the runs
DEFAULT_PAGE = Path("DIR/report.html")
_LARGEST = 2**31
_MOST_SEEDS = 10_000


def parse_count(text: str, least: int = 0) -> int:
    """A whole number from `least` on."""
    if not text.isdecimal() or not least <= (value := int(text)) <= _LARGEST:
        allowed = f"is not a whole number from {least} to {_LARGEST}"
        raise argparse.ArgumentTypeError(f"{text!r} {allowed}")
    return value


def parse_folder(text: str) -> Path:
    """A path, with `~` for the home folder."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the name of the folder is empty")
    try:
        return expand_home("folder", text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error.allowed}") from None


def parse_seeds(text: str) -> list[int]:
    """`1-5` or `1,2,7` to the seeds, each once."""
    seeds: list[int] = []
    for part in text.split(","):
        low, dash, high = part.partition("-")
        first, last = parse_count(low), parse_count(high if dash else low)
        seeds += range(first, min(last, first + _MOST_SEEDS) + 1)
    if not seeds or len(seeds) > _MOST_SEEDS or len(set(seeds)) < len(seeds):
        raise argparse.ArgumentTypeError(
            f"{text!r} is empty, repeats a seed, or has over {_MOST_SEEDS} seeds; use 1-5 or 1,2,7"
        )
    return seeds


def parse_names(text: str) -> list[str]:
    """`a,b,c` to the names, each once."""
    names = [name.strip() for name in text.split(",")]
    if not all(names) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(
            f"{text!r} has an empty or repeated name; separate names by commas"
        )
    return names


# Parameters that errors of the library name -> what was typed.
FLAGS = {
    "experiment": "EXPERIMENT",
    "override": "--set",
    "training.rounds": "--rounds",
    "callbacks": "--track",
    **{name: f"--{name}" for name in ("address", "html", "jobs", "plot", "port")},
}


def build_parser() -> argparse.ArgumentParser:
    """The parser of `fedcor`. Its result has `command`, a function's name in `cli/commands.py`."""
    parser = argparse.ArgumentParser(
        prog="fedcor",
        description="Which clients train next in federated learning.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fedcor {version('fedcor')}")
    parser.set_defaults(flags=FLAGS)
    actions = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)
    _add_demo(actions)
    _add_run(actions)
    _add_compare(actions)
    _add_report(actions)
    _add_watch(actions)
    _add_explain(actions)
    _add_data(actions)
    return parser


def _add_command(actions: Any, name: str, help: str, epilog: str = "") -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name,
        help=help,
        description=f"{help[0].upper()}{help[1:]}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def _add_demo(actions: Any) -> None:
    help = "compare six selectors on built-in data, in under a minute"
    parser = _add_command(actions, "demo", help, DEMO_EXAMPLES)
    parser.add_argument(
        "--out",
        type=parse_folder,
        default=Path("runs/demo"),
        help="folder for the runs (default: %(default)s)",
    )
    add_jobs(parser, os.cpu_count() or 1, "all cores")
    _add_plot(parser, "OUT")


def _add_run(actions: Any) -> None:
    parser = _add_command(actions, "run", "run an experiment once", RUN_EXAMPLES)
    _add_experiment(parser)
    parser.add_argument(
        "--selector",
        help=f"{', '.join(selector_names())}, or module:Class "
        f"(default: the experiment's, else {DEFAULT_SELECTOR})",
    )
    parser.add_argument(
        "--seed", type=parse_count, default=1, help="random seed for everything (default: 1)"
    )
    parser.add_argument(
        "--engine",
        choices=["simulator", "flower"],
        default="simulator",
        help="flower: Flower's simulation, one virtual node per client (default: %(default)s)",
    )
    _add_address(
        parser,
        "address of a running Ray cluster, for --engine flower",
        "RAY_ADDRESS, else Ray is started on this machine",
    )


def _add_compare(actions: Any) -> None:
    help = "run several selectors on the same seeds, for a paired comparison"
    parser = _add_command(actions, "compare", help, COMPARE_EXAMPLES)
    _add_experiment(parser)
    papers = list(PAPER_SELECTORS)
    parser.add_argument(
        "--selectors",
        type=parse_names,
        default=papers,
        help=f"names separated by commas (default: {','.join(papers)})",
    )
    add_seeds(parser, 3)
    add_jobs(parser)
    add_backend(parser)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="run nothing, and print one `fedcor run` line per run, for a job array",
    )
    _add_plot(parser, "OUT")
    add_html(parser, "OUT")


def _add_experiment(parser: argparse.ArgumentParser) -> None:
    presets = ", ".join(preset_names())
    parser.add_argument(
        "experiment", metavar="EXPERIMENT", help=f"a preset ({presets}) or a TOML file"
    )
    parser.add_argument(
        "--rounds", type=parse_count, help="number of rounds (default: the experiment's own)"
    )
    parser.add_argument(
        "--set",
        dest="changes",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a setting; can be repeated",
    )
    parser.add_argument(
        "--out", type=parse_folder, help="folder for the result (default: a folder in runs/)"
    )
    parser.add_argument("--resume", action="store_true", help="resume the runs in the folder")
    add_track(parser)


def add_track(parser: argparse.ArgumentParser) -> None:
    """Add `--track`."""
    parser.add_argument(
        "--track",
        type=parse_names,
        action="extend",
        default=[],
        metavar="TRACKER",
        help=f"also log each round to {', '.join(TRACKERS.names())}, or module:Class; can be "
        "repeated",
    )


def add_seeds(parser: argparse.ArgumentParser, last: int) -> None:
    """Add `--seeds`, by default 1 to `last`."""
    parser.add_argument(
        "--seeds",
        type=parse_seeds,
        default=list(range(1, last + 1)),
        help=f"written as 1-5 or 1,2,7 (default: 1-{last})",
    )


def add_jobs(
    parser: argparse.ArgumentParser,
    default: int | None = None,
    default_name: str = "1; on a cluster, as many as it can run",
) -> None:
    """Add `--jobs`."""
    parser.add_argument(
        "--jobs",
        type=partial(parse_count, least=1),
        default=default,
        help=f"number of processes, one thread each (default: {default_name})",
    )


def add_backend(parser: argparse.ArgumentParser) -> None:
    """Add `--backend` and `--address`."""
    parser.add_argument(
        "--backend",
        choices=["loky", *CLUSTERS],
        default="loky",
        help="where to run: loky for processes on this machine; ray or dask for a running cluster "
        "(default: %(default)s)",
    )
    _add_address(parser, "address of the cluster", "RAY_ADDRESS or DASK_SCHEDULER_ADDRESS")


def _add_address(parser: argparse.ArgumentParser, whose: str, default: str) -> None:
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        help=f"{whose} (default: the environment variable {default})",
    )


def _add_report(actions: Any) -> None:
    help = "compare the runs in a folder, finished or not: verdict, table and curves"
    parser = _add_command(actions, "report", help, REPORT_EXAMPLES)
    parser.add_argument(
        "folder", type=parse_folder, metavar="DIR", help="folder of a run, or of several"
    )
    parser.add_argument("--baseline", help="selector to compare with (default: random)")
    parser.add_argument(
        "--metric",
        help="what to judge by: accuracy, loss, or a metric of your own, of a Flower app as "
        "train/NAME, evaluate/NAME or server/NAME (default: accuracy; loss where there is none)",
    )
    _add_plot(parser, "DIR")
    add_html(parser, "DIR")
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--full", action="store_true", help="print every headline number with its interval"
    )
    form.add_argument("--json", action="store_true", help="print every number as JSON")
    form.add_argument(
        "--csv", action="store_true", help="print every number as CSV, one line per metric"
    )
    form.add_argument("--latex", action="store_true", help="print the table for a paper (booktabs)")


def _add_plot(parser: argparse.ArgumentParser, folder: str) -> None:
    parser.add_argument(
        "--plot",
        nargs="?",
        type=Path,
        const=DEFAULT_PLOT,
        metavar="FILE",
        help="draw curves against rounds and against bytes, as .png, .svg or .pdf "
        f"(default: {folder}/curves.png)",
    )


def add_html(parser: argparse.ArgumentParser, folder: str) -> None:
    """Add `--html`."""
    parser.add_argument(
        "--html",
        nargs="?",
        type=Path,
        const=DEFAULT_PAGE,
        metavar="FILE",
        help="write the report as a page for a browser: verdict, curves, clients, why they were "
        f"chosen (default: {folder}/report.html)",
    )


def _add_watch(actions: Any) -> None:
    help = "serve a live report page for a folder of runs, also while they are running"
    parser = _add_command(actions, "watch", help, WATCH_EXAMPLES)
    parser.add_argument(
        "folder", type=parse_folder, metavar="DIR", help="folder of a run, or of several"
    )
    parser.add_argument("--baseline", help="selector to compare with (default: random)")
    parser.add_argument("--metric", help="what to judge by, as in report")
    parser.add_argument(
        "--port",
        type=parse_count,
        default=0,
        help="port on 127.0.0.1, reachable from this machine only (default: any free port)",
    )


def _add_explain(actions: Any) -> None:
    help = "show why a selector chose its clients in one round of a run"
    parser = _add_command(actions, "explain", help, EXPLAIN_EXAMPLES)
    parser.add_argument("folder", type=parse_folder, metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--round",
        type=parse_count,
        help="round number (from 0; for Flower runs, Flower's number, from 1; default: the last)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_data(actions: Any) -> None:
    data = _add_command(actions, "data", "list the data sets, or download one")
    inner = data.add_subparsers(metavar="ACTION", required=True)
    listing = _add_command(inner, "list", "list the data sets, and whether they are present")
    listing.set_defaults(command="data_list")
    fetch = _add_command(inner, "fetch", "download a data set and verify its content")
    fetch.add_argument("name", metavar="NAME", help=" or ".join(SPECS))
    fetch.add_argument(
        "--from",
        dest="source",
        type=parse_folder,
        metavar="PATH",
        help="take it from this local file or folder instead",
    )
    fetch.set_defaults(command="data_fetch", flags={"data.name": "NAME"})
