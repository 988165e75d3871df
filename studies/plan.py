"""What is reproduced, how much of it, and where to: shared by every experiment. Without PyTorch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcor.core.config import check_one_of
from fedcor.core.errors import ConfigError
from fedcor.core.files import write_whole
from fedcor.runs.processes import count_processes
from fedcor.runs.tracking.callback import GivenCallback

if TYPE_CHECKING:
    from fedcor.simulation.experiment import Experiment


SETTINGS = ("2spc", "1spc", "dir")
DATASETS = ("fmnist", "cifar10", "digits")
# The three settings on the embedded digits: small enough to try every experiment in seconds.
_DIGITS = {
    "2spc": ["partition.shards_per_client=2", "training.clients_per_round=5"],
    "1spc": ["partition.shards_per_client=1", "training.clients_per_round=10"],
    "dir": ["partition.kind=dirichlet", "partition.minimum_size=3", "training.clients_per_round=5"],
}
# Takes a title and the total, and gives `update(done, note)` for as long as the work lasts; for
# example `fedcor.runs.progress.show_rounds`.
ShowProgress = Callable[[str, int], AbstractContextManager[Callable[[int, str], None]]]


@dataclass(frozen=True)
class Scenario:
    """One of the paper's settings with something changed; runs are compared within it.

    Attributes:
        name: part of the folder's name
        setting: one of `SETTINGS`
        changes: settings of the experiment, as `key=value`
        title: in tables and figures
    """

    name: str
    setting: str
    changes: tuple[str, ...] = ()
    title: str = ""


@dataclass(frozen=True)
class Plan:
    """How much of an experiment to run, and where to.

    Args:
        out: folder for runs, numbers and figures; what is there already is not run again
        progress: shows how far the work has come
        dataset: one of `DATASETS`
        settings: some of `SETTINGS`, the paper's partitions
        seeds: of the runs, each for every selector
        rounds: of each run; None for the paper's number
        jobs: processes, -1 for one per processor; None for one, and on a cluster for all that it
            can run
        backend: where they are: loky for this machine; ray or dask for a cluster that runs
        address: of the cluster; None for the one of the environment
        selections: random selections measured per round
        device: where to train: cuda, mps or auto; None for the processor
        track: trackers of each run, by name
        fresh_seeds: kept for the confirmation: nothing may be chosen by looking at them
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
        _ = self.processes  # refuses numbers that cannot be

    @property
    def processes(self) -> int | None:
        """How many processes work at once; None for all that a cluster can run."""
        return count_processes(self.jobs, self.backend)

    def check_fresh_seeds(self) -> None:
        """Refuse seeds that are kept for the confirmation."""
        if set(self.seeds) & set(self.fresh_seeds):
            kept = ", ".join(map(str, self.fresh_seeds))
            allowed = f"seeds {kept} are kept for the confirmation: leave them out"
            raise ConfigError("seeds", list(self.seeds), allowed)

    def quick(self) -> Plan:
        """A version that takes minutes for everything: embedded digits, few rounds, two seeds."""
        return dataclasses.replace(
            self,
            dataset="digits",
            seeds=tuple(self.seeds)[:2],
            rounds=min(self.rounds or 30, 30),
            selections=min(self.selections, 60),
            fresh_seeds=tuple(self.fresh_seeds)[:2],
        )

    @property
    def seeds_text(self) -> str:
        """`seed 1`, or `seeds 1, 2`."""
        return f"seed{'s' if len(self.seeds) > 1 else ''} {', '.join(map(str, self.seeds))}"

    @property
    def scenarios(self) -> list[Scenario]:
        """The paper's settings, unchanged."""
        return [Scenario(setting, setting) for setting in self.settings]

    def experiment(
        self,
        where: str | Scenario,
        selector: str = "fedcor",
        options: Mapping[str, Any] | None = None,
    ) -> Experiment:
        """The experiment in one of the paper's settings or in a scenario.

        Args:
            where: one of `SETTINGS`, or a scenario
            selector: registered name, or module:Class
            options: of the selector, in place of the preset's
        """
        from fedcor.simulation.experiment_files import experiment as change
        from fedcor.simulation.experiment_files import load_experiment

        scenario = Scenario(where, where) if isinstance(where, str) else where
        given = {"training.rounds": self.rounds, "training.device": self.device}
        changes = [f"{key}={value}" for key, value in given.items() if value is not None]
        changes += scenario.changes
        if self.dataset == "digits":
            experiment = load_experiment("digits", [*_DIGITS[scenario.setting], *changes], selector)
        else:
            experiment = load_experiment(f"{self.dataset}-{scenario.setting}", changes, selector)
        name = f"{self.dataset}-{scenario.name}"
        return change(experiment, name=name, selectors={selector: options or {}})

    def describe(self) -> dict[str, Any]:
        """What a saved result says about how it was made."""
        return {
            "dataset": self.dataset,
            "settings": list(self.settings),
            "seeds": list(self.seeds),
            "rounds": self.rounds,
        }

    def save(self, what: str, numbers: Mapping[str, Any]) -> Path:
        """Write `<what>-<dataset>.json`: the plan, then the numbers."""
        return self.save_plain(f"{what}-{self.dataset}", {"plan": self.describe(), **numbers})

    def save_plain(self, name: str, numbers: Mapping[str, Any]) -> Path:
        """Write `<name>.json`: the numbers alone, where they do not depend on the plan."""
        path = self.out / f"{name}.json"
        write_whole(path, (json.dumps(numbers) + "\n").encode())
        return path

    def save_page(self, what: str, tables: Sequence[str]) -> Path:
        """Write `<what>-<dataset>.md`: the tables, one below the other."""
        path = self.out / f"{what}-{self.dataset}.md"
        write_whole(path, "".join(tables).encode())
        return path
