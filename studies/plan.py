"""How much of a study to run, and where to: the options of `python -m studies`, checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcor.core.config import check_one_of
from fedcor.runs.processes import count_processes
from fedcor.runs.tracking.callback import GivenCallback

SETTINGS = ("2spc", "1spc", "dir")
DATASETS = ("fmnist", "cifar10", "digits")
# Takes a title and the total; yields `update(done, note)`: see `fedcor.runs.progress.show_rounds`.
ShowProgress = Callable[[str, int], AbstractContextManager[Callable[[int, str], None]]]


@dataclass(frozen=True)
class Plan:
    """How much of a study to run, and where to.

    Args:
        out: Folder for runs, numbers and figures. Finished runs in it are not run again.
        progress: Shows how far the work has come.
        dataset: One of `DATASETS`.
        settings: Some of `SETTINGS`, the paper's partitions.
        seeds: Seeds that every variant is run on.
        rounds: Rounds of each run; None for the study's own number.
        jobs: Number of processes, -1 for one per processor; None for one, and on a cluster for as
            many as it can run.
        backend: Where the processes are: loky for this machine, ray or dask for a running cluster.
        address: Address of the cluster; None for the one that the environment names.
        selections: Random selections to measure per round.
        device: Where to train: cuda, mps or auto; None for the processor.
        fresh_seeds: Held-out seeds for the confirmation; no other study may use them with it.
        track: Trackers of each run, by name.
    """

    out: Path
    progress: ShowProgress
    dataset: str = "fmnist"
    settings: Sequence[str] = SETTINGS
    seeds: Sequence[int] = (1, 2, 3, 4, 5)
    rounds: int | None = None
    jobs: int | None = 1
    backend: str = "loky"
    address: str | None = None
    selections: int = 1000
    device: str | None = None
    fresh_seeds: Sequence[int] = (6, 7, 8)
    track: Sequence[GivenCallback] = ()

    def __post_init__(self) -> None:
        check_one_of("dataset", self.dataset, DATASETS)
        for setting in self.settings:
            check_one_of("settings", setting, SETTINGS)
        _ = self.processes  # refuses impossible numbers

    @property
    def processes(self) -> int | None:
        """How many processes work at once; None for all that a cluster can run."""
        return count_processes(self.jobs, self.backend)

    @property
    def seeds_text(self) -> str:
        """`seed 1`, or `seeds 1, 2`."""
        return f"seed{'s' if len(self.seeds) > 1 else ''} {', '.join(map(str, self.seeds))}"

    def quick(self) -> Plan:
        """A rehearsal that takes minutes: the built-in digits, few rounds, two seeds."""
        return dataclasses.replace(
            self,
            dataset="digits",
            seeds=tuple(self.seeds)[:2],
            rounds=min(self.rounds or 30, 30),
            selections=min(self.selections, 60),
            fresh_seeds=tuple(self.fresh_seeds)[:2],
        )

    def describe(self) -> dict[str, Any]:
        """The part of the plan that a saved result repeats."""
        return {
            "dataset": self.dataset,
            "settings": list(self.settings),
            "seeds": list(self.seeds),
            "rounds": self.rounds,
        }
