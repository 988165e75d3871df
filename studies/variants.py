"""Whole runs of several selectors over several seeds, as far as they are not done yet."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedcor.runs.progress import refresh
from fedcor.runs.record import RunRecord, count_rounds, read_run
from fedcor.runs.runner import Job, run_jobs
from fedcor.selectors.fedcor import FedCor
from studies.plan import Plan, Scenario

# Scenario -> variant's label -> one run per seed.
Runs = Mapping[str, Mapping[str, list[RunRecord]]]


@dataclass(frozen=True)
class Variant:
    """A selector, perhaps with some of its hyper-parameters changed.

    Attributes:
        label: its name in tables and figures
        selector: registered name, or module:Class
        folder: its name below a scenario's folder
        options: hyper-parameters that differ from the preset's
    """

    label: str
    selector: str
    folder: str
    options: Mapping[str, Any] = field(default_factory=dict)


RANDOM, AFL, POWER_OF_CHOICE, FEDCOR, COMPLEMENT, FULL = (
    Variant(name, name, name)
    for name in ("random", "afl", "power_of_choice", "fedcor", "complement", "full")
)
PAPER_SELECTORS = [RANDOM, AFL, POWER_OF_CHOICE, FEDCOR]


def preset_fedcor(plan: Plan, setting: str) -> FedCor:
    """FedCor with the hyper-parameters of the plan's data set in one of the paper's settings."""
    selector = plan.experiment(setting, "fedcor").build_selector()
    assert isinstance(selector, FedCor)
    return selector


def run_variants(
    plan: Plan, variants: Sequence[Variant], scenarios: Sequence[Scenario] | None = None
) -> Runs:
    """Run every variant in every scenario on every seed, resuming what is there; and read the runs.

    Args:
        plan: how much to run, and where to
        variants: with different labels and folders
        scenarios: None for the paper's settings
    """
    scenarios = plan.scenarios if scenarios is None else scenarios
    jobs = [
        Job(
            plan.experiment(scenario, variant.selector, variant.options),
            seed,
            _folder(plan, scenario, variant, seed),
            resume=True,
        )
        for seed in plan.seeds
        for scenario in scenarios
        for variant in variants
    ]
    run_shown(plan, jobs)
    return {
        scenario.name: {
            variant.label: [
                read_cut(_folder(plan, scenario, variant, seed), rounds) for seed in plan.seeds
            ]
            for variant in variants
        }
        for scenario in scenarios
        for rounds in [plan.experiment(scenario).rounds]
    }


def run_shown(plan: Plan, jobs: Sequence[Job]) -> None:
    """Run all jobs with the plan's processes, and show how far they have come."""
    track = tuple(plan.track)
    jobs = [dataclasses.replace(job, callbacks=track, root=plan.out) for job in jobs]
    finished: list[Job] = []
    total = sum(job.experiment.rounds for job in jobs)
    with plan.progress(f"{plan.dataset} runs", total) as update:

        def show() -> None:
            done = sum(min(count_rounds(j.out), j.experiment.rounds) for j in jobs)
            update(done, f"{len(finished)}/{len(jobs)} runs")

        with refresh(show):
            finished.extend(run_jobs(jobs, plan.processes, plan.backend, plan.address))


def _folder(plan: Plan, scenario: Scenario, variant: Variant, seed: int) -> Path:
    name = f"{plan.dataset}-{scenario.name}"
    return plan.out / "runs" / name / variant.folder / f"seed-{seed}"


def read_cut(folder: Path, rounds: int) -> RunRecord:
    """The run, cut to the plan's rounds: an earlier command may have run it further."""
    run = read_run(folder)
    return dataclasses.replace(run, rounds=run.rounds[:rounds])
