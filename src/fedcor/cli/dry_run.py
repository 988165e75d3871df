"""A comparison as lines for a shell, one per run: what a job array needs."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedcor.errors import ConfigError

if TYPE_CHECKING:
    from fedcor.runner import Job

__all__ = ["check_dry_run", "print_runs"]


# Trackers with one store for all runs -> a variable that names a store elsewhere, and its value.
_STORES = {
    "mlflow": ("MLFLOW_TRACKING_URI", "the store's address"),
    "wandb": ("WANDB_MODE", "online"),
}


def check_dry_run(options: argparse.Namespace) -> None:
    """Refuse what needs the results of the runs, or all runs in one command."""
    if not options.dry_run:
        return
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


def print_runs(options: argparse.Namespace, jobs: Sequence[Job]) -> None:
    """Print the command of each run: with the settings, the folder and the seed of `jobs`.

    `--jobs`, `--backend` and `--address` are left out: they say where runs go, which is left to
    whoever runs the lines. `--resume` is added, so that a line can be run again.
    """
    # Joined by `=`, a value may begin with a dash.
    shared = [f"--set={change}" for change in options.changes]
    if options.rounds is not None:
        shared += ["--rounds", str(options.rounds)]
    shared += [word for tracker in options.track for word in ("--track", tracker)]
    experiment = options.experiment
    if experiment.startswith("-"):
        experiment = f"./{experiment}"
    for job in jobs:
        own = ["--selector", job.experiment.selector, "--seed", str(job.seed)]
        words = ["fedcor", "run", experiment, *own, *shared, "--resume"]
        print(shlex.join([*words, f"--out={job.out}"]))
