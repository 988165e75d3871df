"""Which selector is best, and which are not clearly behind it."""

from __future__ import annotations

from fedcor.report.pairs import difference
from fedcor.report.summary import ExperimentSummary

__all__ = ["not_clearly_behind", "ranking"]


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
