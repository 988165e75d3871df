"""Records to plain numbers: what each run reached, each selector over its seeds, and their order.

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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from fedcor.core.errors import RecordError, suggest
from fedcor.reporting.curves import Curve, read_curve
from fedcor.reporting.metrics import (
    TIME,
    Difference,
    Estimate,
    Metric,
    difference,
    mean_estimate,
    metrics_of,
)
from fedcor.reporting.series import (
    find_name,
    group_notes,
    named_runs,
    optimiser_settings,
    was_renamed,
)
from fedcor.runs.record import RunRecord, differences

# The runs of an experiment, by series and seed.
Series: TypeAlias = Mapping[str, Mapping[int, Curve]]


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
        differences: paired differences from the baseline, by metric key; empty for the baseline
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

    @property
    def finished(self) -> bool:
        """Whether every run has all its rounds."""
        return all(run.finished for run in self.runs)


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
    measure: str
    metrics: tuple[Metric, ...] = field(repr=False)
    curves: Series = field(repr=False, compare=False)

    @property
    def headline(self) -> Metric:
        """The metric that selectors are ranked by: the mean of the measure over rounds."""
        return self.metric(f"mean_{self.measure}")

    @property
    def measure_title(self) -> str:
        """`test accuracy`, `test loss`, or the name of the user's metric."""
        known = self.measure in ("accuracy", "loss")
        return f"test {self.measure}" if known else self.measure

    @property
    def finished(self) -> bool:
        """Whether every run has all its rounds."""
        return all(selector.finished for selector in self.selectors)

    @property
    def has_clock(self) -> bool:
        """Whether the runs have a simulated clock."""
        return TIME in self.metrics

    @property
    def rounds_done(self) -> tuple[int, int]:
        """The fewest and the most finished rounds of a run."""
        done = [run.rounds_done for selector in self.selectors for run in selector.runs]
        return min(done), max(done)

    @property
    def smoothing(self) -> int:
        """Rounds in a point of a smoothed curve: a twentieth of them, at most ten."""
        return min(max(self.rounds_done[1] // 20, 1), 10)

    def metric(self, key: str) -> Metric:
        """One of the metrics, by its key."""
        return next(metric for metric in self.metrics if metric.key == key)

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
    notes: tuple[str, ...]


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
    experiments = _curves(runs)
    notes, shown, baselines = group_notes(runs), [], []
    for name, curves in experiments.items():
        judged_by = _measure(curves, measure)
        compared_with = _baseline(curves, baseline, judged_by)
        if compared_with is None:
            notes.append(f'Left out, without a run of the baseline "{baseline}": {name}.')
        elif judged_by is None:
            notes.append(f'Left out, without a metric "{measure}": {name}.')
        else:
            _check_comparable(name, curves)
            shown.append(_experiment(name, curves, compared_with, judged_by))
        baselines.append(compared_with)
    if not any(baselines):
        raise _no_baseline(experiments, str(baseline))
    if not shown:
        raise _no_metric(experiments, str(measure))
    return Summary(tuple(shown), tuple(notes))


def every_curve(curves: Series) -> list[Curve]:
    """The runs of all series."""
    return [curve for by_seed in curves.values() for curve in by_seed.values()]


def measured_in(curves: Iterable[Curve]) -> list[str]:
    """The measures of which any run has a value."""
    measured = {key: None for curve in curves for key in curve.measures if curve.known(key).any()}
    return list(measured)


def _curves(runs: Sequence[RunRecord]) -> dict[str, dict[str, dict[int, Curve]]]:
    """The runs by experiment, series and seed; two of one kind are refused."""
    experiments: dict[str, dict[str, dict[int, Curve]]] = {}
    for group, name, run in named_runs(runs):
        curve = read_curve(run)
        twin = experiments.setdefault(group, {}).setdefault(name, {}).setdefault(curve.seed, curve)
        if twin is not curve:
            where = f" ({twin.run.path} and {run.path})" if run.path and twin.run.path else ""
            raise RecordError(
                f"two runs of {group}, {name}, seed {curve.seed}{where}: "
                "report their folders one at a time"
            )
    return experiments


def _measure(curves: Series, wanted: str | None) -> str | None:
    """What to judge by: what is wanted, None if no run has it; else accuracy, else loss."""
    measured = measured_in(every_curve(curves))
    if wanted is None:
        return "loss" if "loss" in measured and "accuracy" not in measured else "accuracy"
    return wanted if wanted in measured else None


def _baseline(curves: Series, wanted: str | None, measure: str | None) -> str | None:
    """What is wanted, None if it is not there; else random selection: with FedAvg, else with any
    optimiser; without it, the first. One that was run and never measured is passed over."""
    if wanted is not None:
        return find_name(wanted, curves)
    usable = [
        name
        for name, by_seed in curves.items()
        if not any(curve.done for curve in by_seed.values())
        or measure in measured_in(by_seed.values())
    ] or list(curves)
    random = [n for n in usable if any(c.selector == "random" for c in curves[n].values())]
    return "random" if "random" in usable else (random or usable)[0]


def _experiment(name: str, curves: Series, baseline: str, measure: str) -> ExperimentSummary:
    any_run = next(iter(curves[baseline].values()))  # they agree
    begun = [curve for curve in every_curve(curves) if curve.done]
    clock = bool(begun) and all(curve.has_clock for curve in begun)
    metrics = metrics_of(measure, any_run.better(measure), clock=clock)
    return ExperimentSummary(
        name=name,
        target=any_run.target if measure == "accuracy" else None,
        baseline=baseline,
        selectors=tuple(_selector(key, curves, baseline, metrics) for key in curves),
        measure=measure,
        metrics=metrics,
        curves=curves,
    )


def _selector(
    name: str, curves: Series, baseline: str, metrics: Sequence[Metric]
) -> SelectorSummary:
    ordered = [curves[name][seed] for seed in sorted(curves[name])]
    values = {m.key: [m.measure(curve) for curve in ordered] for m in metrics}
    runs = tuple(
        RunSummary(
            seed=curve.seed,
            rounds_done=curve.done,
            rounds_planned=curve.planned,
            finished=curve.done >= curve.planned,
            values={key: _finite(of_runs[place]) for key, of_runs in values.items()},
        )
        for place, curve in enumerate(ordered)
    )
    estimates = {m.key: mean_estimate(values[m.key], m.to_target) for m in metrics}
    paired = () if name == baseline else metrics
    gaps = {m.key: difference(m, curves[name], curves[baseline]) for m in paired}
    return SelectorSummary(name, runs, estimates, gaps)


def _finite(value: float | None) -> float | None:
    return value if value is None or np.isfinite(value) else None


# --- what is refused ------------------------------------------------------------------------------


def _no_baseline(experiments: Mapping[str, Series], wanted: str) -> RecordError:
    """The error where no experiment has the selector `wanted`."""
    names = list(dict.fromkeys(name for curves in experiments.values() for name in curves))
    hint = suggest(wanted, names) or f"there is {', '.join(names)}"
    return RecordError(f'{_none_of(experiments)} run of the baseline "{wanted}": {hint}')


def _no_metric(experiments: Mapping[str, Series], wanted: str) -> RecordError:
    """The error where no run has a value of `wanted`."""
    every = [curve for curves in experiments.values() for curve in every_curve(curves)]
    measured = measured_in(every)
    rounds = [row.get("metrics") or {} for curve in every for row in curve.run.rounds]
    hint = suggest(wanted, measured)
    if any(isinstance(metrics.get(wanted), list) for metrics in rounds):
        hint = f"{wanted} is a list of numbers, which a report does not show;"
    known = f"there is {', '.join(measured) or 'nothing yet'}"
    return RecordError(f'{_none_of(experiments)} metric "{wanted}": {f"{hint} {known}".lstrip()}')


def _none_of(experiments: Mapping[str, Series]) -> str:
    names = ", ".join(experiments)
    return f"none of {names} has a" if len(experiments) > 1 else f"{names} has no"


def _check_comparable(name: str, curves: Series) -> None:
    """Refuse runs of one selector, or of one optimiser or strategy, whose own options differ."""
    _check_optimisers(name, [c.run for c in every_curve(curves) if not was_renamed(c.run)])
    for series, by_seed in curves.items():
        first, *others = (
            {**(run.header["config"].get("selectors") or {}), "optimiser": optimiser_settings(run)}
            for run in (curve.run for curve in by_seed.values())
        )
        for other in others:
            _check_equal(f"{name} with {series}", first, other)


def _check_optimisers(name: str, runs: Sequence[RunRecord]) -> None:
    """Refuse what the names of the series do not tell: other options of an optimiser, or none."""
    by_name: dict[Any, Mapping[str, Any]] = {}
    for run in runs:
        optimiser = optimiser_settings(run)
        # Within another strategy of Flower's, it is another one.
        key = optimiser.get("name"), optimiser.get("strategy")
        first = by_name.setdefault(key, optimiser)
        _check_equal(name, {"optimiser": first}, {"optimiser": optimiser})
    for other in by_name.values() if (None, None) in by_name else ():
        _check_equal(name, {"optimiser": other}, {"optimiser": by_name[None, None]})


def _check_equal(what: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    for key, values in differences(first, second).items():
        a, b = ("not set" if value is None else repr(value) for value in values)
        raise RecordError(
            f"runs of {what} have different settings ({key} is {a} in one and {b} in "
            "another): report their folders one at a time"
        )


# --- the order of the selectors -------------------------------------------------------------------


def ranking(experiment: ExperimentSummary) -> tuple[str, ...]:
    """The selectors, best first, by the mean of the measure over rounds.

    They are ordered by their paired difference from the baseline, so that runs which are still at
    their first rounds, or on other seeds, do not lose for that. Those that cannot be compared with
    the baseline come last. Of equals, the baseline comes first. If no direction of the metric was
    declared to be better, they keep their order.
    """
    metric = experiment.headline
    if metric.better is None:
        return tuple(s.name for s in experiment.selectors)
    sign = -1.0 if metric.better == "lower" else 1.0
    levels = {s.name: s.estimates[metric.key].mean for s in experiment.selectors}
    gains: dict[str, float | None] = {
        s.name: s.differences[metric.key].estimate.mean if s.differences else 0.0
        for s in experiment.selectors
    }
    if levels[experiment.baseline] is None:  # nothing to compare with
        gains = levels

    def place(name: str) -> tuple[bool, float, bool, float]:
        gain, level = gains[name], levels[name]
        near = 0.0 if gain is None or abs(gain) <= metric.tolerance else -sign * gain
        return gain is None, near, name != experiment.baseline, -sign * (level or 0.0)

    return tuple(sorted(levels, key=place))
