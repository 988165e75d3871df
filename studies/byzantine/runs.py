"""The runs: every selector under every attack, with and without the defence, on every seed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from fedcor.core.errors import ConfigError, RecordError
from fedcor.reporting.estimates import Estimate, mean_estimate
from fedcor.reporting.notes import byzantine_share
from fedcor.rounds.defence.settings import Defence
from fedcor.runs.runner import Job
from fedcor.simulation.byzantine import Byzantine
from fedcor.simulation.experiment import Experiment
from fedcor.simulation.experiment_files import load_experiment
from studies.plan import Plan
from studies.variants import read_cut, run_shown

FRACTION = 0.1  # of the clients lie
NOBODY, OFF, ON = "nobody", "off", "on"
ATTACKS: dict[str, Byzantine] = {
    NOBODY: Byzantine(),
    "flip": Byzantine(FRACTION, "flip"),
    "scale": Byzantine(FRACTION, "scale"),
    "copy": Byzantine(FRACTION, "copy"),
    "inflate": Byzantine(FRACTION, "inflate"),
    "deflate": Byzantine(FRACTION, "deflate"),
}
# Chosen on the digits, seeds 1-3 (docs/results/byzantine.md).
DEFENCES: dict[str, Defence] = {
    OFF: Defence(),
    ON: Defence(clip_norms=2.0, clip_reports=2.0, most_share=1.25),
}
RANDOM = "random"
# Each with the optimiser that it goes with: FedRecall for aligned, FedAvg for the others.
SELECTORS = (RANDOM, "afl", "power_of_choice", "fedcor", "complement", "aligned")
PRICE_SETTINGS = {"2spc": "FMNIST, two shards", "1spc": "FMNIST, one shard"}
PRICE_ROUNDS = 200


@dataclass(frozen=True)
class Cell:
    """One cell of a table: what runs on every seed.

    Attributes:
        data: Name of a preset.
        attack: A key of `ATTACKS`.
        defence: A key of `DEFENCES`.
        selector: Registered name.
        optimiser: Registered name; None for the one that the selector goes with.
    """

    data: str
    attack: str
    defence: str
    selector: str
    optimiser: str | None = None

    def experiment(self, plan: Plan, rounds: int | None) -> Experiment:
        """What runs: the preset's rounds, or fewer if `rounds` or the plan says so."""
        preset = load_experiment(self.data, (), self.selector)
        limits = [limit for limit in (rounds, plan.rounds) if limit is not None]
        try:
            return dataclasses.replace(
                preset,
                name=f"byzantine-{self.data}",
                rounds=min([preset.rounds, *limits]),
                device=plan.device or preset.device,
                byzantine=ATTACKS[self.attack],
                defence=DEFENCES[self.defence],
                optimiser={"name": self.optimiser} if self.optimiser else preset.optimiser,
            )
        except ConfigError as error:  # say which of many
            raise error.under(f"{self.attack}, {self._label}") from None

    def folder(self, plan: Plan, seed: int) -> Path:
        """Of its run on a seed."""
        name = f"{self.attack}-defence-{self.defence}"
        out = plan.out / "runs" / f"byzantine-{self.data}" / name
        return out / self._label / f"seed-{seed}"

    @property
    def _label(self) -> str:
        return f"{self.selector}+{self.optimiser}" if self.optimiser else self.selector


@dataclass(frozen=True)
class Measured:
    """What the runs of a cell gave, seed by seed.

    Attributes:
        accuracies: Mean test accuracy over all rounds.
        times_fair: How often byzantine were chosen, relative to their fair share; empty where nobody
            lies.
    """

    accuracies: list[float]
    times_fair: list[float]

    def minus(self, other: Measured) -> Estimate:
        """The difference of mean accuracies, paired over seeds."""
        pairs = zip(self.accuracies, other.accuracies, strict=True)
        return mean_estimate([a - b for a, b in pairs])


def table_cells(attacks: Sequence[str] = tuple(ATTACKS)) -> list[Cell]:
    """Every selector under every attack, without and with the defence, on the digits."""
    return [
        Cell("digits", attack, defence, selector)
        for attack in attacks
        for defence in DEFENCES
        for selector in SELECTORS
    ]


def price_cells() -> list[Cell]:
    """Every selector on Fashion-MNIST, where nobody lies, without and with the defence."""
    return [
        Cell(f"fmnist-{setting}", NOBODY, defence, selector)
        for setting in PRICE_SETTINGS
        for defence in DEFENCES
        for selector in SELECTORS
    ]


def run_cells(plan: Plan, cells: Sequence[Cell], rounds: int | None = None) -> dict[Cell, Measured]:
    """Run all cells on every seed, resuming what is there; and read what they gave."""
    experiments = {cell: cell.experiment(plan, rounds) for cell in cells}
    jobs = [
        Job(experiment, seed, cell.folder(plan, seed), True)
        for seed in plan.seeds
        for cell, experiment in experiments.items()
    ]
    run_shown(plan, jobs)
    return {
        cell: _measured(plan, cell, experiment.rounds) for cell, experiment in experiments.items()
    }


def _measured(plan: Plan, cell: Cell, rounds: int) -> Measured:
    accuracies, shares = [], []
    for seed in plan.seeds:
        run = read_cut(cell.folder(plan, seed), rounds)
        if len(run.rounds) < rounds:
            raise RecordError(f"{run.path}: {len(run.rounds)} of {rounds} rounds are there")
        accuracies.append(fmean(entry["test_accuracy"] for entry in run.rounds))
        share = byzantine_share(run)
        shares += [] if share is None else [share.times_fair]
    return Measured(accuracies, shares)
