"""`python -m studies NAME` runs a study, or resumes it. The exit codes are those of `fedcor`."""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import studies
from fedcor.cli import call
from fedcor.cli.parser import (
    DEFAULT_PAGE,
    add_backend,
    add_html,
    add_jobs,
    add_seeds,
    add_track,
    parse_count,
    parse_folder,
    parse_names,
)
from fedcor.core.files import write_whole
from fedcor.runs.cluster.address import check_place
from fedcor.runs.progress import show_rounds
from fedcor.runs.record import RunRecord, read_runs
from fedcor.runs.tracking.session import check_callbacks
from studies.plan import DATASETS, SETTINGS, Plan

EXAMPLES = """examples:
  python -m studies table1 --jobs 2     60 runs of 500 rounds; can be interrupted and run again
  python -m studies all --quick         everything, as a rehearsal
  python -m studies beyond --jobs 2     the selector `complement`: its gain, its parts, its limits
  python -m studies memory --seeds 31-35 --jobs 2
                                        `aligned` with FedRecall, on held-out seeds
  python -m studies table1 --dataset cifar10 --settings 2spc --seeds 1 --rounds 600
"""
FLAGS = {
    **{key: f"--{key}" for key in ("dataset", "settings", "seeds", "jobs", "address")},
    **{key: f"--{key}" for key in ("rounds", "device")},
    **{"callbacks": "--track", "what": "NAME"},
}


def build_parser() -> argparse.ArgumentParser:
    """The parser of `python -m studies`."""
    listing = "".join(
        f"  {name:21}{entry.description}\n" for name, entry in studies.STUDIES.items()
    )
    parser = argparse.ArgumentParser(
        prog="python -m studies",
        description="Reproduce the paper's table and figures, and the results that go beyond it.",
        epilog=f"studies:\n{listing}\ngroups: {', '.join(studies.GROUPS)}\n\n{EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", metavar="NAME", help="a study or a group, see below")
    parser.add_argument(
        "--dataset", default="fmnist", help=f"{', '.join(DATASETS)} (default: %(default)s)"
    )
    parser.add_argument(
        "--settings",
        type=parse_names,
        default=SETTINGS,
        help=f"some of {','.join(SETTINGS)}: two shards per client, one, or Dirichlet "
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
        "--device", help="cpu, cuda or mps; auto uses an accelerator if there is one (default: cpu)"
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
        help="folder for the results; finished runs in it are kept (default: %(default)s)",
    )
    add_html(parser, "OUT")
    parser.set_defaults(command=run_command, flags=FLAGS)
    return parser


def run_command(options: argparse.Namespace) -> None:
    """Run a study, and print the files and tables that it wrote."""
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
    for path in studies.run(options.what, plan):
        print(path)
        if path.suffix == ".md":
            print(path.read_text(encoding="utf-8"))
    if options.html is not None:
        file = plan.out / DEFAULT_PAGE.name if options.html == DEFAULT_PAGE else options.html
        written = write_page(plan.out / "runs", file)
        print(file if written else f"no page: {options.what} has no runs to show")


def write_page(folder: Path, file: Path) -> bool:
    """Write the report page of all runs in `folder`; False where there are none."""
    from fedcor.reporting.page import render_page
    from fedcor.reporting.page.data import page_data

    if not folder.is_dir():
        return False
    write_whole(file, render_page(page_data(_labelled(read_runs(folder)))))
    return True


def _labelled(runs: list[RunRecord]) -> list[RunRecord]:
    """The runs, with variants of one selector named by their folder, which says what differs."""
    folders: dict[tuple[str, str], set[str]] = defaultdict(set)
    for run in runs:
        assert run.path is not None
        folders[run.header["experiment"], run.header["selector"]].add(run.path.parent.name)
    return [
        RunRecord(run.path, {**run.header, "selector": run.path.parent.name}, run.rounds)
        if run.path is not None
        and len(folders[run.header["experiment"], run.header["selector"]]) > 1
        else run
        for run in runs
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one study and return the exit code."""
    return call(build_parser().parse_args(arguments), "studies")


if __name__ == "__main__":
    sys.exit(main())
