"""The runs: every pair of selector and optimiser in every scenario on every seed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedcor.core.errors import ConfigError
from fedcor.runs.runner import Job
from fedcor.simulation.experiment import Experiment
from studies.memory.scenarios import CIFAR10, DIGITS, FMNIST, TABLES, MemoryScenario
from studies.plan import Plan
from studies.variants import Runs, read_cut, run_shown


@dataclass(frozen=True)
class Pair:
    """A selector and an optimiser.

    Attributes:
        label: Its name in tables and figures.
        selector: Registered name.
        optimiser: Registered name.
        options: Settings of the optimiser that differ from its defaults.
    """

    label: str
    selector: str
    optimiser: str = "fedavg"
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        """Of its runs, below the scenario's folder."""
        name = self.selector if self.optimiser == "fedavg" else f"{self.selector}+{self.optimiser}"
        return "-".join([name, *(f"{key}-{value:g}" for key, value in self.options.items())])


RANDOM = Pair("random", "random")
OURS = Pair("aligned + FedRecall", "aligned", "fedrecall")
EVERYONE = Pair("everyone", "full")
EVERYONE_SEEDS = 3  # the first ones: everyone training takes ten times as long as any other pair
PAIRS = [
    RANDOM,
    Pair("power-of-choice", "power_of_choice"),
    Pair("FedCor", "fedcor"),
    Pair("complement", "complement"),
    Pair("random + FedVARP", "random", "fedvarp"),
    Pair("round-robin + FedVARP", "round_robin", "fedvarp"),
    OURS,
]


def scenarios_of(plan: Plan) -> list[MemoryScenario]:
    """All scenarios but CIFAR-10's, which are slow; those of the digits and tables are fast.

    The plan's settings say which of CIFAR-10's are run. All others are compared as a whole.
    """
    chosen = {"fmnist": [*FMNIST, *DIGITS, *TABLES], "digits": [*DIGITS, *TABLES]}
    slow = [s for s in CIFAR10 if s.name.removeprefix("cifar10-") in plan.settings]
    return chosen.get(plan.dataset, slow)


def run_pairs(plan: Plan, pairs: Sequence[Pair], scenarios: Sequence[MemoryScenario]) -> Runs:
    """Run every pair in every scenario on every seed, resuming what is there; and read the runs."""
    jobs = [
        Job(experiment_of(plan, scenario, pair), seed, _folder(plan, scenario, pair, seed), True)
        for seed in plan.seeds
        for scenario in scenarios
        for pair in _pairs(pairs, scenario)
        if seed in _seeds(plan, pair)
    ]
    run_shown(plan, jobs)
    return {
        scenario.name: {
            pair.label: [
                read_cut(_folder(plan, scenario, pair, seed), rounds_of(plan, scenario))
                for seed in _seeds(plan, pair)
            ]
            for pair in _pairs(pairs, scenario)
        }
        for scenario in scenarios
    }


def _seeds(plan: Plan, pair: Pair) -> Sequence[int]:
    return plan.seeds[:EVERYONE_SEEDS] if pair == EVERYONE else plan.seeds


def _pairs(pairs: Sequence[Pair], scenario: MemoryScenario) -> list[Pair]:
    return [pair for pair in pairs if scenario.everyone or pair != EVERYONE]


def rounds_of(plan: Plan, scenario: MemoryScenario) -> int:
    """Of each run: the scenario's, or fewer if the plan says so."""
    return min(plan.rounds or scenario.rounds, scenario.rounds)


def experiment_of(plan: Plan, scenario: MemoryScenario, pair: Pair) -> Experiment:
    """The scenario with the pair."""
    experiment = scenario.build()
    try:
        return dataclasses.replace(
            experiment,
            name=f"memory-{scenario.name}",
            rounds=rounds_of(plan, scenario),
            device=plan.device or experiment.device,
            selector=pair.selector,
            optimiser={"name": pair.optimiser, **pair.options},
        )
    except ConfigError as error:  # say which of many
        raise error.under(f"{scenario.name}, {pair.label}") from None


def _folder(plan: Plan, scenario: MemoryScenario, pair: Pair, seed: int) -> Path:
    return plan.out / "runs" / f"memory-{scenario.name}" / pair.folder / f"seed-{seed}"
