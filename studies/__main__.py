"""`python -m studies NAME`: run a study, or continue it. Exit codes as of `fedcor`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fedcor.cli import call
from fedcor.cli.parser import (
    add_backend,
    add_html,
    add_jobs,
    add_seeds,
    add_track,
    parse_count,
    parse_folder,
    parse_names,
)
from fedcor.cli.reports import DEFAULT_PAGE
from fedcor.runs.cluster.address import check_place
from fedcor.runs.progress import show_rounds
from fedcor.runs.tracking.session import check_callbacks
from studies import EXPERIMENTS, GROUPS, NAMES, reproduce
from studies.plan import DATASETS, SETTINGS, Plan

EXAMPLES = """examples:
  python -m studies table1 --jobs 2     60 runs of 500 rounds; can be interrupted and run again
  python -m studies all --quick         everything, as a rehearsal
  python -m studies beyond --jobs 2     the selector `complement`: its gain, its parts, its limits
  python -m studies memory --seeds 31-35 --jobs 2
                                        `aligned` with FedRecall, on held-out seeds
  python -m studies table1 --dataset cifar10 --settings 2spc --seeds 1 --rounds 600
"""
FLAGS = {key: f"--{key}" for key in ("dataset", "settings", "seeds", "jobs", "address")}
FLAGS |= {"training.rounds": "--rounds", "training.device": "--device", "callbacks": "--track"}


def build_parser() -> argparse.ArgumentParser:
    """The parser of `python -m studies`."""
    listing = "".join(f"  {name:21}{entry.description}\n" for name, entry in EXPERIMENTS.items())
    parser = argparse.ArgumentParser(
        prog="python -m studies",
        description="Reproduce the paper's table and figures, and the results beyond the paper.",
        epilog=f"studies:\n{listing}\ngroups: {', '.join(GROUPS)}\n\n{EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", metavar="NAME", choices=NAMES, help="a study or a group, see below")
    parser.add_argument(
        "--dataset", default="fmnist", help=f"{', '.join(DATASETS)} (default: %(default)s)"
    )
    parser.add_argument(
        "--settings",
        type=parse_names,
        default=SETTINGS,
        help=f"some of {','.join(SETTINGS)}: two shards or one per client, or Dirichlet "
        "(default: all)",
    )
    add_seeds(parser, 5)
    parser.add_argument(
        "--rounds", type=parse_count, help="number of rounds (default: the study's own)"
    )
    parser.add_argument(
        "--selections",
        type=parse_count,
        default=1000,
        help="random selections to measure per round (default: %(default)s)",
    )
    add_jobs(parser)
    add_backend(parser)
    add_track(parser)
    parser.add_argument(
        "--device", help="cpu, cuda, mps, or auto for what the machine has (default: cpu)"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a rehearsal on the built-in digits: two seeds, at most 30 rounds",
    )
    parser.add_argument(
        "--out",
        type=parse_folder,
        default=Path("runs/studies"),
        help="folder for the results, where earlier work is resumed (default: %(default)s)",
    )
    add_html(parser, "OUT")
    parser.set_defaults(command=run, flags=FLAGS)
    return parser


def run(options: argparse.Namespace) -> None:
    """Run a study and print what it wrote."""
    check_place(options.backend, options.address)
    plan = Plan(
        options.out,
        show_rounds,
        dataset=options.dataset,
        settings=options.settings,
        seeds=options.seeds,
        rounds=options.rounds,
        jobs=options.jobs,
        backend=options.backend,
        address=options.address,
        selections=options.selections,
        device=options.device,
        track=check_callbacks(options.track, options.out),
    )
    plan = plan.quick() if options.quick else plan
    for path in reproduce(options.what, plan):
        print(path)
        if path.suffix == ".md":
            print(path.read_text(encoding="utf-8"))
    if options.html is not None:
        from studies.page import write_page

        file = plan.out / DEFAULT_PAGE.name if options.html == DEFAULT_PAGE else options.html
        page = write_page(plan.out, file)
        print(f"no page: {options.what} has no runs to show" if page is None else page)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one study and return the exit code."""
    return call(build_parser().parse_args(arguments), "studies")


if __name__ == "__main__":
    sys.exit(main())
