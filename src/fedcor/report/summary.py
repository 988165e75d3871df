"""Records to plain numbers: what each run reached, what a selector reaches over seeds, and how far
apart two selectors are.

A *run* gives one value per metric (`metrics`). A *selector* gives, over its seeds, a mean with its
95 % t-interval (`estimates`). A *difference* pairs two selectors seed by seed, since one seed means
the same partition, weights and shuffles for both; its interval is that of the mean of the paired
differences.

Two kinds of metric are treated differently:
    to the target    fixed once the target is reached, whatever comes later. Where a seed did not
                     reach it there is no value, and by the paper's rule no mean either (N/A): a
                     mean over the lucky seeds would flatter.
    over all rounds  depend on how many rounds were done, so a pair is compared over the rounds that
                     both runs have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedcor.errors import RecordError, suggest
from fedcor.record import RunRecord, differences
from fedcor.report.curve import Curve, read_curve
from fedcor.report.estimates import Difference, Estimate, mean_estimate
from fedcor.report.metrics import METRICS, Metric, metrics_of
from fedcor.report.pairs import difference
from fedcor.report.series import series_names

__all__ = ["ExperimentSummary", "RunSummary", "SelectorSummary", "Summary", "summarise"]

DEFAULT_BASELINE = "random"


@dataclass(frozen=True)
class RunSummary:
    """One run: how far it is, and its value of each metric.

    Attributes:
        seed: of the run
        rounds_done: finished rounds
        rounds_planned: rounds that the run is meant to have
        finished: whether all of them are done
        values: by metric key; None where the run has no value
    """

    seed: int
    rounds_done: int
    rounds_planned: int
    finished: bool
    values: Mapping[str, float | None]


@dataclass(frozen=True)
class SelectorSummary:
    """One selector over its seeds.

    Attributes:
        name: of the selector; with its optimiser's where runs of the experiment differ in it
        runs: ordered by seed
        estimates: mean over seeds, by metric key
        differences: paired differences to the baseline, by metric key; empty for the baseline
    """

    name: str
    runs: tuple[RunSummary, ...]
    estimates: Mapping[str, Estimate]
    differences: Mapping[str, Difference]

    @property
    def reached(self) -> tuple[int, int]:
        """(k, n): k of n runs reached the target; only where accuracy is measured."""
        estimate = self.estimates["rounds_to_target"]
        return estimate.n, estimate.of


@dataclass(frozen=True)
class ExperimentSummary:
    """One experiment.

    Attributes:
        name: of the experiment
        target: accuracy to reach; None without one
        baseline: name of the selector that the others are compared with
        selectors: in the order in which the runs name them
        measure: what the selectors are judged by: `accuracy`, `loss` where there is no accuracy, or
            the metric that was asked for
        metrics: those that the estimates and differences hold
        curves: the runs themselves, by selector and seed
    """

    name: str
    target: float | None
    baseline: str
    selectors: tuple[SelectorSummary, ...]
    measure: str = "accuracy"
    metrics: tuple[Metric, ...] = field(default=METRICS, repr=False)
    curves: Mapping[str, Mapping[int, Curve]] = field(
        default_factory=dict, repr=False, compare=False
    )

    @property
    def headline(self) -> Metric:
        """The metric that selectors are ranked by: the mean of the measure over rounds."""
        return next(m for m in self.metrics if m.key == f"mean_{self.measure}")

    def selector(self, name: str) -> SelectorSummary:
        """One of the selectors, by its name."""
        return next(s for s in self.selectors if s.name == name)


@dataclass(frozen=True)
class Summary:
    """Everything that a report shows, by experiment."""

    experiments: tuple[ExperimentSummary, ...]


def summarise(
    runs: Sequence[RunRecord], baseline: str | None = None, measure: str | None = None
) -> Summary:
    """Everything that a report shows.

    Args:
        runs: of one or several experiments, finished or still running; within an experiment, all
            settings but the selector and the optimiser must agree
        baseline: the selector to compare with; None for `random` if it is there, else the first
        measure: what to judge by: `accuracy`, `loss`, or a metric of the user's that the records
            hold; None for accuracy, and for loss where no run has an accuracy

    Example:
        summary = summarise(read_runs(Path("runs/demo")))
        summary.experiments[0].selectors[0].estimates["mean_accuracy"]
    """
    if not runs:
        raise RecordError(
            "no runs to summarise: name a folder that `fedcor run` or `fedcor compare` wrote"
        )
    experiments: dict[str, dict[str, dict[int, Curve]]] = {}
    for name, curve in zip(series_names(runs), map(read_curve, runs), strict=True):
        seeds = experiments.setdefault(curve.experiment, {}).setdefault(name, {})
        if curve.seed in seeds:
            twice = f"{curve.experiment}, {name}, seed {curve.seed}"
            raise RecordError(f"two runs of {twice}: report their folders one at a time")
        seeds[curve.seed] = curve
    return Summary(
        tuple(_experiment(name, curves, baseline, measure) for name, curves in experiments.items())
    )


def _experiment(
    name: str,
    curves: Mapping[str, Mapping[int, Curve]],
    baseline: str | None,
    measure: str | None,
) -> ExperimentSummary:
    if baseline is None:
        baseline = _default_baseline(curves)
    else:
        from fedcor.report.names import find_name  # imports rich

        found = find_name(baseline, curves)
        if found is None:
            hint = suggest(baseline, curves) or f"there is {', '.join(curves)}"
            raise RecordError(f'{name} has no run of the baseline "{baseline}": {hint}')
        baseline = found
    _check_comparable(name, curves)
    measure = _measure(name, curves, measure)
    any_run = next(iter(curves[baseline].values()))  # they agree
    metrics = metrics_of(measure, any_run.better(measure))
    selectors = tuple(
        _selector(key, curves[key], None if key == baseline else curves[baseline], metrics)
        for key in curves
    )
    target = any_run.target if measure == "accuracy" else None
    return ExperimentSummary(name, target, baseline, selectors, measure, metrics, curves)


def _default_baseline(curves: Mapping[str, Mapping[int, Curve]]) -> str:
    """Random selection: with FedAvg, else with any optimiser; without it, the first."""
    if DEFAULT_BASELINE in curves:
        return DEFAULT_BASELINE
    for name, by_seed in curves.items():
        if any(curve.selector == DEFAULT_BASELINE for curve in by_seed.values()):
            return name
    return next(iter(curves))


def _measure(name: str, curves: Mapping[str, Mapping[int, Curve]], wanted: str | None) -> str:
    """What to judge by: what is wanted, if a run has it; else accuracy, else loss."""
    measured = dict.fromkeys(
        key
        for by_seed in curves.values()
        for curve in by_seed.values()
        for key, values in curve.measures.items()
        if not np.isnan(values).all()
    )
    if wanted is None:
        return "loss" if "loss" in measured and "accuracy" not in measured else "accuracy"
    if wanted not in measured:
        hint = suggest(wanted, measured) or f"there is {', '.join(measured) or 'nothing yet'}"
        raise RecordError(f'{name} has no metric "{wanted}": {hint}')
    return wanted


def _check_comparable(name: str, curves: Mapping[str, Mapping[int, Curve]]) -> None:
    """Refuse runs whose settings differ in more than the selector and the optimiser, and runs of
    one selector or of one optimiser whose own options differ."""
    first, *others = (curve for by_seed in curves.values() for curve in by_seed.values())
    for other in others:
        _check_equal(name, first.settings, other.settings)
    _check_optimisers(name, [curve for curve in (first, *others) if not curve.renamed])
    for series, by_seed in curves.items():
        first, *others = by_seed.values()
        for other in others:
            _check_equal(
                f"{name} with {series}",
                {**first.options, "optimiser": first.optimiser},
                {**other.options, "optimiser": other.optimiser},
            )


def _check_optimisers(name: str, curves: Sequence[Curve]) -> None:
    """Refuse what the names of the series do not tell: other options of an optimiser, or none."""
    first_with: dict[Any, Curve] = {}
    for curve in curves:
        own = curve.optimiser.get("name")
        rivals = [first_with.setdefault(own, curve), first_with.get(None, curve)]
        rivals += first_with.values() if own is None else []
        for rival in rivals:
            _check_equal(name, {"optimiser": rival.optimiser}, {"optimiser": curve.optimiser})


def _check_equal(what: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    for key, values in differences(one, other).items():
        here, there = ("not set" if value is None else repr(value) for value in values)
        raise RecordError(
            f"runs of {what} have different settings ({key} is {here} in one and {there} in "
            "another): report their folders one at a time"
        )


def _selector(
    name: str,
    curves: Mapping[int, Curve],
    baseline: Mapping[int, Curve] | None,
    metrics: Sequence[Metric],
) -> SelectorSummary:
    ordered = [curves[seed] for seed in sorted(curves)]
    values = {m.key: [m.measure(curve) for curve in ordered] for m in metrics}
    runs = tuple(
        RunSummary(
            curve.seed,
            curve.done,
            curve.planned,
            curve.done >= curve.planned,
            {key: _finite(of_runs[place]) for key, of_runs in values.items()},
        )
        for place, curve in enumerate(ordered)
    )
    estimates = {m.key: mean_estimate(values[m.key], m.to_target) for m in metrics}
    if baseline is None:
        return SelectorSummary(name, runs, estimates, {})
    differences = {m.key: difference(m, curves, baseline) for m in metrics}
    return SelectorSummary(name, runs, estimates, differences)


def _finite(value: float | None) -> float | None:
    return value if value is None or np.isfinite(value) else None
