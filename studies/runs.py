"""The runs of a study: every variant in every scenario on every seed; finished runs are kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from fedcor.core.errors import RecordError
from fedcor.runs.progress import refresh
from fedcor.runs.record import RunRecord, count_rounds, read_run
from fedcor.runs.runner import Job, run_jobs
from fedcor.selectors.fedcor import FedCor
from fedcor.simulation.experiment import Experiment
from fedcor.simulation.experiment_files import experiment as change_experiment
from fedcor.simulation.experiment_files import load_experiment
from studies.plan import Plan
from studies.scaffold import FEDCOR, Runs, Scenario, Variant, paper_scenario


def build_experiment(plan: Plan, scenario: Scenario, variant: Variant = FEDCOR) -> Experiment:
    """The scenario with a variant, with the plan's rounds and device."""
    if isinstance(scenario.source, str):
        source = load_experiment(scenario.source, scenario.changes, variant.selector)
    else:
        source = scenario.source()
    keywords: dict[str, Any] = {
        **scenario.keywords,
        "rounds": plan.rounds or scenario.rounds,
        "device": plan.device,
        "optimiser": variant.optimiser,
    }
    return change_experiment(
        source,
        name=scenario.folder,
        selector=variant.selector,
        selectors={variant.selector: variant.options},
        **{key: value for key, value in keywords.items() if value is not None},
    )


def preset_fedcor(plan: Plan, setting: str) -> FedCor:
    """FedCor with the hyper-parameters of the plan's data set in one of the paper's settings."""
    selector = build_experiment(plan, paper_scenario(plan, setting)).build_selector()
    assert isinstance(selector, FedCor)
    return selector


def run_all(plan: Plan, pairs: Sequence[tuple[Scenario, Variant]]) -> Runs:
    """Run every pair on every seed, resuming what is there; and read the runs."""
    experiments = [(s, v, build_experiment(plan, s, v)) for s, v in pairs]
    jobs = {
        (scenario.name, variant.label, seed): Job(
            experiment,
            seed,
            plan.out
            / "runs"
            / scenario.folder
            / (variant.folder or variant.selector)
            / f"seed-{seed}",
            resume=True,
            callbacks=tuple(plan.track),
            root=plan.out,
        )
        for place, seed in enumerate(plan.seeds)
        for scenario, variant, experiment in experiments
        if variant.seeds is None or place < variant.seeds
    }
    if jobs:
        run_shown(plan, list(jobs.values()))
    runs: dict[str, dict[str, list[RunRecord]]] = {}
    for scenario, variant in pairs:
        runs.setdefault(scenario.name, {})[variant.label] = [
            _read_finished(jobs[key])
            for seed in plan.seeds
            if (key := (scenario.name, variant.label, seed)) in jobs
        ]
    return runs


def run_shown(plan: Plan, jobs: Sequence[Job]) -> None:
    """Run all jobs with the plan's processes, and show how far they have come."""
    finished: list[Job] = []
    total = sum(job.experiment.rounds for job in jobs)
    with plan.progress(f"{plan.dataset} runs", total) as update:

        def show() -> None:
            done = sum(min(count_rounds(job.out), job.experiment.rounds) for job in jobs)
            update(done, f"{len(finished)}/{len(jobs)} runs")

        with refresh(show):
            finished.extend(run_jobs(jobs, plan.processes, plan.backend, plan.address))


def _read_finished(job: Job) -> RunRecord:
    """The run, cut to the wanted rounds: an earlier command may have run it further."""
    run, rounds = read_run(job.out), job.experiment.rounds
    if len(run.rounds) < rounds:
        raise RecordError(
            f"{run.path}: {len(run.rounds)} of {rounds} rounds are there; start the study again "
            "to finish it"
        )
    return dataclasses.replace(run, rounds=run.rounds[:rounds])
