"""What is to be reproduced, how much of it, and where: shared by every experiment of the paper."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcor.errors import ConfigError, suggest
from fedcor.experiment import Experiment, load_experiment
from fedcor.files import write_whole
from fedcor.progress import refresh
from fedcor.record import RunRecord, count_rounds, read_run
from fedcor.runner import Job, run_jobs

__all__ = ["FOUR", "SETTINGS", "Plan", "Runs", "Scenario", "Variant"]

SETTINGS = ("2spc", "1spc", "dir")
DATASETS = ("fmnist", "cifar10", "digits")
# The three settings on the embedded digits: small enough to try every experiment in seconds.
_DIGITS = {
    "2spc": ["partition.shards_per_client=2", "training.clients_per_round=5"],
    "1spc": ["partition.shards_per_client=1", "training.clients_per_round=10"],
    "dir": ["partition.kind=dirichlet", "partition.minimum_size=3", "training.clients_per_round=5"],
}
# setting -> label -> the runs of all seeds
Runs = Mapping[str, Mapping[str, list[RunRecord]]]
Progress = Callable[[str, int], AbstractContextManager[Callable[[int, str], None]]]


@dataclass(frozen=True)
class Variant:
    """A selector with some of its hyper-parameters changed: the name of its curve, and of its folder."""

    label: str
    selector: str
    folder: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


FOUR = [
    Variant(name, name, name) for name in ("random", "afl", "power_of_choice", "fedcor")
]  # the paper's


@dataclass(frozen=True)
class Scenario:
    """One of the paper's settings with something changed: what its runs are compared within."""

    name: str
    setting: str
    changes: tuple[str, ...] = ()
    title: str = ""


@dataclass(frozen=True)
class Plan:
    """How much of an experiment to run."""

    out: Path
    progress: Progress
    dataset: str = "fmnist"
    settings: Sequence[str] = SETTINGS
    seeds: Sequence[int] = (1, 2, 3, 4, 5)
    rounds: int | None = None  # instead of the paper's
    jobs: int = 1
    selections: int = 1000  # random selections measured in a round
    device: str | None = None  # instead of the processor: cuda, mps or auto
    fresh_seeds: Sequence[int] = (
        6,
        7,
        8,
    )  # on which nothing was chosen: a choice is confirmed there

    def __post_init__(self) -> None:
        if self.dataset not in DATASETS:
            allowed = f"must be one of {', '.join(DATASETS)}"
            raise ConfigError("--dataset", self.dataset, allowed, suggest(self.dataset, DATASETS))
        for setting in self.settings:
            if setting not in SETTINGS:
                allowed = f"must be one of {', '.join(SETTINGS)}"
                raise ConfigError("--settings", setting, allowed, suggest(setting, SETTINGS))

    def quick(self) -> Plan:
        """A version of a few minutes for everything: the embedded digits, few rounds, two seeds."""
        return dataclasses.replace(
            self,
            dataset="digits",
            seeds=tuple(self.seeds)[:2],
            rounds=min(self.rounds or 30, 30),
            selections=60,
            fresh_seeds=tuple(self.fresh_seeds)[:2],
        )

    @property
    def of_seeds(self) -> str:
        return f"seed{'s' if len(self.seeds) > 1 else ''} {', '.join(map(str, self.seeds))}"

    @property
    def scenarios(self) -> list[Scenario]:
        """The paper's settings, as they are."""
        return [Scenario(setting, setting) for setting in self.settings]

    def experiment(
        self,
        where: str | Scenario,
        selector: str = "fedcor",
        options: Mapping[str, Any] | None = None,
    ) -> Experiment:
        """The paper's settings for a data set and a setting, with this plan's number of rounds and a scenario's changes."""
        scenario = Scenario(where, where) if isinstance(where, str) else where
        narrowed = {"training.rounds": self.rounds, "training.device": self.device}
        changes = [
            *(f"{key}={value}" for key, value in narrowed.items() if value is not None),
            *scenario.changes,
        ]
        if self.dataset == "digits":
            experiment = load_experiment("digits", [*_DIGITS[scenario.setting], *changes], selector)
        else:
            experiment = load_experiment(f"{self.dataset}-{scenario.setting}", changes, selector)
        merged = {**experiment.selectors.get(selector, {}), **(options or {})}
        return dataclasses.replace(
            experiment,
            name=f"{self.dataset}-{scenario.name}",
            selectors={**experiment.selectors, selector: merged},
        ).check()

    def runs(
        self, variants: Sequence[Variant], scenarios: Sequence[Scenario] | None = None
    ) -> Runs:
        """Every variant in every scenario on every seed, run as far as it is not done yet."""
        scenarios = self.scenarios if scenarios is None else scenarios
        jobs = [
            Job(
                self.experiment(scenario, variant.selector, variant.options),
                seed,
                self._folder(scenario, variant, seed),
                resume=True,
            )
            for seed in self.seeds
            for scenario in scenarios
            for variant in variants
        ]
        finished: list[Job] = []
        with self.progress(
            f"{self.dataset} runs", sum(job.experiment.training.rounds for job in jobs)
        ) as update:

            def show() -> None:
                done = sum(min(count_rounds(j.out), j.experiment.training.rounds) for j in jobs)
                update(done, f"{len(finished)}/{len(jobs)} runs")

            with refresh(show):
                finished.extend(run_jobs(jobs, self.jobs))
        return {
            scenario.name: {
                variant.label: [self._read(scenario, variant, seed) for seed in self.seeds]
                for variant in variants
            }
            for scenario in scenarios
        }

    def _folder(self, scenario: Scenario, variant: Variant, seed: int) -> Path:
        return (
            self.out / "runs" / f"{self.dataset}-{scenario.name}" / variant.folder / f"seed-{seed}"
        )

    def _read(self, scenario: Scenario, variant: Variant, seed: int) -> RunRecord:
        """The run, cut to this plan's rounds: an earlier command may have run it further."""
        run = read_run(self._folder(scenario, variant, seed))
        return dataclasses.replace(
            run, rounds=run.rounds[: self.experiment(scenario).training.rounds]
        )

    def describe(self) -> dict[str, Any]:
        """What a saved result says of how it was made."""
        return {
            "dataset": self.dataset,
            "settings": list(self.settings),
            "seeds": list(self.seeds),
            "rounds": self.rounds,
        }

    def save(self, what: str, numbers: Mapping[str, Any], *, of_dataset: bool = True) -> Path:
        path = self.out / (f"{what}-{self.dataset}.json" if of_dataset else f"{what}.json")
        made_by = {"plan": self.describe()} if of_dataset else {}
        write_whole(path, (json.dumps({**made_by, **numbers}) + "\n").encode())
        return path
