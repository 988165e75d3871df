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
from dataclasses import dataclass
from typing import Any

from fedcor.errors import RecordError, suggest
from fedcor.record import RunRecord, differences
from fedcor.report.estimates import Difference, Estimate, judge, mean_estimate
from fedcor.report.metrics import METRICS, ROUNDING, Curve, Metric, read_curve

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
        name: of the selector
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
        """(k, n): k of n runs reached the target."""
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
    """

    name: str
    target: float | None
    baseline: str
    selectors: tuple[SelectorSummary, ...]


@dataclass(frozen=True)
class Summary:
    """Everything that a report shows, by experiment."""

    experiments: tuple[ExperimentSummary, ...]


def summarise(runs: Sequence[RunRecord], baseline: str | None = None) -> Summary:
    """Everything that a report shows.

    Args:
        runs: of one or several experiments, finished or still running; within an experiment, all
            settings but the selector must agree
        baseline: the selector to compare with; None for `random` if it is there, else the first

    Example:
        summary = summarise(read_runs(Path("runs/demo")))
        summary.experiments[0].selectors[0].estimates["mean_accuracy"]
    """
    if not runs:
        raise RecordError(
            "no runs to summarise: name a folder that `fedcor run` or `fedcor compare` wrote"
        )
    experiments: dict[str, dict[str, dict[int, Curve]]] = {}
    for curve in map(read_curve, runs):
        seeds = experiments.setdefault(curve.experiment, {}).setdefault(curve.selector, {})
        if curve.seed in seeds:
            twice = f"{curve.experiment}, {curve.selector}, seed {curve.seed}"
            raise RecordError(f"two runs of {twice}: report their folders one at a time")
        seeds[curve.seed] = curve
    return Summary(
        tuple(_experiment(name, curves, baseline) for name, curves in experiments.items())
    )


def _experiment(
    name: str, curves: Mapping[str, Mapping[int, Curve]], baseline: str | None
) -> ExperimentSummary:
    if baseline is None:
        baseline = DEFAULT_BASELINE if DEFAULT_BASELINE in curves else next(iter(curves))
    elif baseline not in curves:
        hint = suggest(baseline, curves) or f"there is {', '.join(curves)}"
        raise RecordError(f'{name} has no run of the baseline "{baseline}": {hint}')
    _check_comparable(name, curves)
    selectors = tuple(
        _selector(key, curves[key], None if key == baseline else curves[baseline]) for key in curves
    )
    target = next(iter(curves[baseline].values())).target
    return ExperimentSummary(name, target, baseline, selectors)


def _check_comparable(name: str, curves: Mapping[str, Mapping[int, Curve]]) -> None:
    """Refuse runs whose settings differ in more than the selector, and runs of one selector whose
    own options differ."""
    first, *others = (curve for by_seed in curves.values() for curve in by_seed.values())
    for other in others:
        _check_equal(name, first.settings, other.settings)
    for by_seed in curves.values():
        first, *others = by_seed.values()
        for other in others:
            _check_equal(f"{name} with {first.selector}", first.options, other.options)


def _check_equal(what: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    for key, values in differences(one, other).items():
        here, there = ("not set" if value is None else repr(value) for value in values)
        raise RecordError(
            f"runs of {what} have different settings ({key} is {here} in one and {there} in "
            "another): report their folders one at a time"
        )


def _selector(
    name: str, curves: Mapping[int, Curve], baseline: Mapping[int, Curve] | None
) -> SelectorSummary:
    runs = tuple(_run(curves[seed]) for seed in sorted(curves))
    estimates = {
        m.key: mean_estimate((run.values[m.key] for run in runs), m.to_target) for m in METRICS
    }
    if baseline is None:
        return SelectorSummary(name, runs, estimates, {})
    pairs = [(curves[seed], baseline[seed]) for seed in sorted(curves.keys() & baseline.keys())]
    return SelectorSummary(name, runs, estimates, {m.key: _difference(m, pairs) for m in METRICS})


def _run(curve: Curve) -> RunSummary:
    values = {m.key: m.measure(curve) for m in METRICS}
    return RunSummary(curve.seed, curve.done, curve.planned, curve.done >= curve.planned, values)


def _difference(metric: Metric, pairs: Sequence[tuple[Curve, Curve]]) -> Difference:
    """The paired difference of one metric; over the rounds that both runs of a pair have."""
    rounds = None
    if pairs and not metric.to_target:
        common = [min(ours.done, theirs.done) for ours, theirs in pairs]
        pairs = [
            (ours.first(t), theirs.first(t))
            for (ours, theirs), t in zip(pairs, common, strict=True)
        ]
        compared = [t for t in common if t > 0]  # a pair without rounds is not compared
        rounds = (min(compared), max(compared)) if compared else None
    values = [(metric.measure(ours), metric.measure(theirs)) for ours, theirs in pairs]
    estimate = mean_estimate(
        (None if a is None or b is None else a - b for a, b in values), metric.to_target
    )
    return Difference(estimate, rounds, judge(estimate, metric.better, ROUNDING))
