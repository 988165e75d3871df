"""A comparison as lines for a shell, one per run: what a job array needs."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedcor.errors import ConfigError

if TYPE_CHECKING:
    from fedcor.runner import Job

__all__ = ["check_dry_run", "print_runs"]


def check_dry_run(options: argparse.Namespace) -> None:
    """Refuse what needs the results of the runs."""
    for flag in ("plot", "html"):
        given = getattr(options, flag)
        if options.dry_run and given is not None:
            allowed = "cannot be made before the runs; use fedcor report when they are done"
            raise ConfigError(flag, str(given), allowed)


def print_runs(options: argparse.Namespace, jobs: Sequence[Job]) -> None:
    """Print the command of each run: with the settings, the folder and the seed of `jobs`.

    `--jobs`, `--backend` and `--address` are left out: they say where runs go, which is left to
    whoever runs the lines. `--resume` is added, so that a line can be run again.
    """
    shared = [word for change in options.changes for word in ("--set", change)]
    if options.rounds is not None:
        shared += ["--rounds", str(options.rounds)]
    shared += [word for tracker in options.track for word in ("--track", tracker)]
    for job in jobs:
        own = ["--selector", job.experiment.selector, "--seed", str(job.seed)]
        words = ["fedcor", "run", options.experiment, *own, *shared, "--resume"]
        print(shlex.join([*words, "--out", str(job.out)]))
