"""What a comparison must refuse, and what it then says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from fedcor.core.errors import RecordError, suggest
from fedcor.reporting.estimates import Difference, Estimate, difference, mean_estimate
from fedcor.reporting.metrics import METRICS, TIME, Metric, metrics_of
from fedcor.reporting.series import Curve, group_names, group_notes, read_curve, series_names
from fedcor.runs.record import RunRecord, differences

Series: TypeAlias = Mapping[str, Mapping[int, Curve]]  # the runs of an experiment, by name and seed


def measured_in(curves: Series) -> list[str]:
    """The measures of which any run has a value."""
    found = dict.fromkeys(
        key
        for by_seed in curves.values()
        for curve in by_seed.values()
        for key, values in curve.measures.items()
        if not np.isnan(values).all()
    )
    return list(found)


def no_baseline(experiments: Mapping[str, Series], wanted: str) -> RecordError:
    """The error where no experiment has the selector `wanted`."""
    there = list(dict.fromkeys(name for series in experiments.values() for name in series))
    hint = suggest(wanted, there) or f"there is {', '.join(there)}"
    return RecordError(f'{_none_of(experiments)} run of the baseline "{wanted}": {hint}')


def no_metric(experiments: Mapping[str, Series], wanted: str) -> RecordError:
    """The error where no run has a value of `wanted`."""
    every = list(experiments.values())
    lists = {
        name
        for series in every
        for by_seed in series.values()
        for curve in by_seed.values()
        for name in curve.lists
    }
    there = list(dict.fromkeys(name for series in every for name in measured_in(series)))
    hints = [
        f"{wanted} is a list of numbers, which a report does not show"
        if wanted in lists
        else suggest(wanted, there),
        f"there is {', '.join(there) or 'nothing yet'}",
    ]
    said = "; ".join(filter(None, hints)).replace("?;", "?")
    return RecordError(f'{_none_of(experiments)} metric "{wanted}": {said}')


def _none_of(experiments: Iterable[str]) -> str:
    first, *others = experiments
    return f"none of {', '.join([first, *others])} has a" if others else f"{first} has no"


def two_runs(what: str, one: RunRecord, other: RunRecord) -> RecordError:
    """The error where two runs are the same one by all that the record says of them."""
    folders = [getattr(run, "path", None) for run in (one, other)]
    where = "" if None in folders else f" ({folders[0]} and {folders[1]})"
    return RecordError(f"two runs of {what}{where}: report their folders one at a time")


def check_comparable(name: str, curves: Series) -> None:
    """Refuse runs of one selector, or of one optimiser or strategy, whose own options differ."""
    every = [curve for by_seed in curves.values() for curve in by_seed.values()]
    _check_optimisers(name, [curve for curve in every if not curve.renamed])
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
        # Within another strategy of Flower's, it is another one.
        key = own and (own, curve.optimiser.get("strategy"))
        rivals = [first_with.setdefault(key, curve), first_with.get(None, curve)]
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


# Records to plain numbers: what each run reached, what a selector reaches over seeds, and how far
# apart two selectors are.
#
# A *run* gives one value per metric (`metrics`). A *selector* gives, over its seeds, a mean with its
# 95 % t-interval (`estimates`). A *difference* pairs two selectors seed by seed, since one seed means
# the same partition, weights and shuffles for both; its interval is that of the mean of the paired
# differences.
#
# Two kinds of metric are treated differently:
#     to the target    fixed once the target is reached, whatever comes later. Where a seed did not
#                      reach it there is no value, and by the paper's rule no mean either (N/A): a
#                      mean over the lucky seeds would flatter.
#     over all rounds  depend on how many rounds were done, so a pair is compared over the rounds that
#                      both runs have.
# Either is about the rounds with a value: of a run, those that were measured; of a pair, those that
# were measured in both runs.


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
        from fedcor.reporting.names import find_name  # imports rich

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


# Which selector is best, and which are not clearly behind it.


def ranking(experiment: ExperimentSummary) -> tuple[str, ...]:
    """The selectors, best first, by the mean of the measure over rounds.

    They are ordered by their paired difference to the baseline, so that runs which are still at
    their first rounds, or on other seeds, do not lose for that. Those that cannot be compared with
    the baseline come last. Of equals, the baseline comes first. Where nobody said which direction
    is better, they keep their order.
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


def not_clearly_behind(experiment: ExperimentSummary, best: str) -> list[str]:
    """The selectors whose paired difference to `best` has an interval that holds zero."""
    curves = experiment.curves
    verdicts = {
        name: difference(experiment.headline, curves[name], curves[best]).verdict
        for name in ranking(experiment)
        if name != best
    }
    return [name for name, verdict in verdicts.items() if verdict in ("unclear", "equal")]
