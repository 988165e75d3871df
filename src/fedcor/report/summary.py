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
Either is about the rounds with a value: of a run, those that were measured; of a pair, those that
were measured in both runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fedcor.errors import RecordError
from fedcor.record import RunRecord
from fedcor.report.comparable import (
    Series,
    check_comparable,
    measured_in,
    no_baseline,
    no_metric,
    two_runs,
)
from fedcor.report.curve import Curve, read_curve
from fedcor.report.estimates import Difference, Estimate, mean_estimate
from fedcor.report.groups import group_names, group_notes
from fedcor.report.metrics import METRICS, TIME, Metric, metrics_of
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

    @property
    def has_clock(self) -> bool:
        """Whether the runs have a simulated clock."""
        return TIME in self.metrics

    def selector(self, name: str) -> SelectorSummary:
        """One of the selectors, by its name."""
        return next(s for s in self.selectors if s.name == name)


@dataclass(frozen=True)
class Summary:
    """Everything that a report shows.

    Attributes:
        experiments: those that can be shown. Runs of one experiment whose settings differ in more
            than the selector and who aggregates are several, named by what differs
        notes: what was left out, and what was not compared, and why
    """

    experiments: tuple[ExperimentSummary, ...]
    notes: tuple[str, ...] = ()


def summarise(
    runs: Sequence[RunRecord], baseline: str | None = None, measure: str | None = None
) -> Summary:
    """Everything that a report shows.

    Args:
        runs: of one or several experiments, finished or still running. Those of an experiment are
            compared if all settings but the selector and the optimiser agree
        baseline: the selector to compare with; None for `random` if it is there and has values,
            else the first that has. An experiment that does not have it is left out
        measure: what to judge by: `accuracy`, `loss`, or a metric of the user's that the records
            hold; None for accuracy, and for loss where no run has an accuracy. An experiment that
            does not have it is left out

    Example:
        summary = summarise(read_runs(Path("runs/demo")))
        summary.experiments[0].selectors[0].estimates["mean_accuracy"]
    """
    if not runs:
        raise RecordError(
            "no runs to summarise: name a folder that `fedcor run` or `fedcor compare` wrote"
        )
    curves = _curves(runs)
    measures = {name: _measure(series, measure) for name, series in curves.items()}
    baselines = {
        name: _baseline(series, baseline, measures[name]) for name, series in curves.items()
    }
    if all(found is None for found in baselines.values()):
        raise no_baseline(curves, str(baseline))
    if all(found is None for found in measures.values()):
        raise no_metric(curves, str(measure))
    notes, shown = group_notes(runs), []
    for name, series in curves.items():
        judged_by, compared_with = measures[name], baselines[name]
        if compared_with is None:
            notes.append(f'Left out, without a run of the baseline "{baseline}": {name}.')
        elif judged_by is None:
            notes.append(f'Left out, without a metric "{measure}": {name}.')
        else:
            check_comparable(name, series)
            shown.append(_experiment(name, series, compared_with, judged_by))
    if not shown:  # each lacks one of both
        raise no_metric(curves, str(measure))
    return Summary(tuple(shown), tuple(notes))


def _curves(runs: Sequence[RunRecord]) -> dict[str, dict[str, dict[int, Curve]]]:
    """The runs by experiment, series and seed; two of one kind are refused."""
    found: dict[str, dict[str, dict[int, Curve]]] = {}
    places: dict[tuple[str, str, int], RunRecord] = {}
    for group, name, run in zip(group_names(runs), series_names(runs), runs, strict=True):
        curve = read_curve(run)
        place = group, name, curve.seed
        if place in places:
            raise two_runs(f"{group}, {name}, seed {curve.seed}", places[place], run)
        places[place] = run
        found.setdefault(group, {}).setdefault(name, {})[curve.seed] = curve
    return found


def _experiment(name: str, curves: Series, baseline: str, measure: str) -> ExperimentSummary:
    any_run = next(iter(curves[baseline].values()))  # they agree
    begun = [curve for by_seed in curves.values() for curve in by_seed.values() if curve.done]
    clock = bool(begun) and all(curve.has_clock for curve in begun)
    metrics = metrics_of(measure, any_run.better(measure), clock=clock)
    selectors = tuple(
        _selector(key, curves[key], None if key == baseline else curves[baseline], metrics)
        for key in curves
    )
    target = any_run.target if measure == "accuracy" else None
    return ExperimentSummary(name, target, baseline, selectors, measure, metrics, curves)


def _baseline(curves: Series, wanted: str | None, measure: str | None) -> str | None:
    """What is wanted, None if it is not there; else random selection: with FedAvg, else with any
    optimiser; without it, the first. One that was run and never measured is passed over."""
    if wanted is not None:
        from fedcor.report.names import find_name  # imports rich

        return find_name(wanted, curves)
    curves = {
        name: by_seed
        for name, by_seed in curves.items()
        if not any(curve.done for curve in by_seed.values())
        or measure in measured_in({name: by_seed})
    } or curves
    if DEFAULT_BASELINE in curves:
        return DEFAULT_BASELINE
    for name, by_seed in curves.items():
        if any(curve.selector == DEFAULT_BASELINE for curve in by_seed.values()):
            return name
    return next(iter(curves))


def _measure(curves: Series, wanted: str | None) -> str | None:
    """What to judge by: what is wanted, None if no run has it; else accuracy, else loss."""
    measured = measured_in(curves)
    if wanted is None:
        return "loss" if "loss" in measured and "accuracy" not in measured else "accuracy"
    return wanted if wanted in measured else None


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
