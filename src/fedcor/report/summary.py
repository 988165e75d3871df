"""Records to plain numbers: what each run reached, what a selector reaches over seeds, how far apart two selectors are.

A *run* gives one value a metric. A *selector* gives, over its seeds, a mean with its 95 % t-interval. A *difference*
pairs two selectors seed by seed, since one seed means the same partition, weights and shuffles for both; its interval
is that of the mean of the paired differences.

Two kinds of metric need different honesty:
    to the target    fixed once the target is reached, whatever comes later. Where a seed did not reach it there is no
                     value, and by the paper's rule no mean either (N/A): a mean over the lucky seeds would flatter.
    over all rounds  depend on how many rounds were done, so a pair is compared over the rounds both runs have.

Rounds are counted as communication rounds done: a target reached in the record's round 0 took 1 round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from scipy import stats

from fedcor.errors import RecordError, suggest
from fedcor.record import RunRecord, differences
from fedcor.types import FloatArray

__all__ = [
    "METRICS",
    "Curve",
    "Difference",
    "Estimate",
    "ExperimentSummary",
    "Metric",
    "RunSummary",
    "SelectorSummary",
    "Summary",
    "curve_of",
    "estimate_of",
    "ratio_of",
    "summarise",
]

WINDOW = 10  # rounds in the smoothed accuracy and in the mean of the last ones
TAIL = 50  # rounds in the spread
CONFIDENCE = 0.95
ROUNDING = 1e-7  # an accuracy is a count over a test size: what is closer than this is equal
DEFAULT_BASELINE = "random"


@dataclass(frozen=True, eq=False)
class Curve:
    """One run as arrays over its T rounds done. An accuracy that is not a number (diverged) counts as 0."""

    experiment: str
    selector: str
    seed: int
    planned: int  # rounds the run is meant to have
    target: float | None
    settings: Mapping[str, Any]  # what runs must share to be compared
    options: Mapping[str, Any]  # the selector's own, which its runs must share to be one selector
    accuracy: FloatArray  # (T,)
    down: FloatArray  # (T,) bytes of each round
    up: FloatArray  # (T,)

    @property
    def done(self) -> int:
        return len(self.accuracy)

    def first(self, rounds: int) -> Curve:
        return replace(
            self, accuracy=self.accuracy[:rounds], down=self.down[:rounds], up=self.up[:rounds]
        )


def curve_of(run: RunRecord) -> Curve:
    """The arrays of a run, checked."""
    header = run.header
    name = f"run {header.get('experiment')}, {header.get('selector')}, seed {header.get('seed')}"
    try:
        config, target = header["config"], header["config"].get("target_accuracy")
        curve = Curve(
            experiment=str(header["experiment"]),
            selector=str(header["selector"]),
            seed=int(header["seed"]),
            planned=int(config["training"]["rounds"]),
            target=None if target is None else float(target),
            settings=_settings(config),
            options=config.get("selectors") or {},
            accuracy=np.nan_to_num(_column(run, "test_accuracy"), nan=0.0, posinf=0.0, neginf=0.0),
            down=_column(run, "bytes_down"),
            up=_column(run, "bytes_up"),
        )
        order = [row["round"] for row in run.rounds]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RecordError(
            f"{name}: the record lacks or garbles {error}; run it again or leave it out"
        ) from error
    if order != list(range(curve.done)) or not np.isfinite([curve.down, curve.up]).all():
        raise RecordError(
            f"{name}: rounds are missing, out of order or without bytes; run it again or leave it out"
        )
    return curve


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """What two runs must share to be compared: all but who chooses, and for how long."""
    settings = {key: value for key, value in config.items() if key not in ("selector", "selectors")}
    return {
        **settings,
        "training": {key: value for key, value in config["training"].items() if key != "rounds"},
    }


def _column(run: RunRecord, key: str) -> FloatArray:
    return np.array(
        [np.nan if row[key] is None else row[key] for row in run.rounds], dtype=np.float64
    )


# --- one value a run -------------------------------------------------------------------------------------------------


def _first_reach(accuracy: FloatArray, target: float | None) -> int | None:
    if target is None:
        return None
    hits = np.flatnonzero(accuracy >= target - ROUNDING)
    return int(hits[0]) if hits.size else None


def _rounds_to_target(curve: Curve) -> float | None:
    index = _first_reach(curve.accuracy, curve.target)
    return None if index is None else float(index + 1)


def _smooth_rounds_to_target(curve: Curve) -> float | None:
    if curve.done < WINDOW:
        return None
    means = np.lib.stride_tricks.sliding_window_view(curve.accuracy, WINDOW).mean(
        axis=1
    )  # (T - WINDOW + 1,)
    index = _first_reach(means, curve.target)
    return None if index is None else float(index + WINDOW)


def _bytes_to_target(curve: Curve) -> float | None:
    index = _first_reach(curve.accuracy, curve.target)
    return None if index is None else float((curve.down + curve.up)[: index + 1].sum())


def _spread(curve: Curve) -> float | None:
    return float(curve.accuracy[-TAIL:].std(ddof=1)) if curve.done > 1 else None


def _mean(values: FloatArray) -> float | None:
    return float(values.mean()) if values.size else None


def _sum(values: FloatArray) -> float | None:
    return float(values.sum()) if values.size else None


@dataclass(frozen=True)
class Metric:
    """What is measured, how it is written, and which way is better. `METRICS` is the one list of them."""

    key: str
    title: str
    unit: Literal["rounds", "accuracy", "bytes"]
    better: Literal["lower", "higher"]
    of: Callable[[Curve], float | None]  # None: not reached, or too few rounds
    to_target: bool = False
    headline: bool = True  # stands in the table on the screen


METRICS: tuple[Metric, ...] = (
    Metric(
        "rounds_to_target", "rounds to target", "rounds", "lower", _rounds_to_target, to_target=True
    ),
    Metric(
        "smooth_rounds_to_target",
        f"{WINDOW}-round mean to target",
        "rounds",
        "lower",
        _smooth_rounds_to_target,
        True,
    ),
    Metric("mean_accuracy", "mean accuracy", "accuracy", "higher", lambda c: _mean(c.accuracy)),
    Metric(
        "final_accuracy",
        f"mean of the last {WINDOW}",
        "accuracy",
        "higher",
        lambda c: _mean(c.accuracy[-WINDOW:]),
    ),
    Metric("bytes_down", "bytes down", "bytes", "lower", lambda c: _sum(c.down)),
    Metric("bytes_up", "bytes up", "bytes", "lower", lambda c: _sum(c.up)),
    Metric(
        "bytes_to_target",
        "bytes to target",
        "bytes",
        "lower",
        _bytes_to_target,
        to_target=True,
        headline=False,
    ),
    Metric(
        "last_accuracy",
        "last accuracy",
        "accuracy",
        "higher",
        lambda c: _mean(c.accuracy[-1:]),
        headline=False,
    ),
    Metric("spread", f"spread of the last {TAIL}", "accuracy", "lower", _spread, headline=False),
)


# --- over seeds, and in pairs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunSummary:
    seed: int
    rounds_done: int
    rounds_planned: int
    finished: bool
    values: Mapping[str, float | None]  # by metric key


@dataclass(frozen=True)
class Estimate:
    """The mean of `n` values with its 95 % t-interval. One value has no spread and no interval.

    `of` runs or pairs were asked for a value and `n` had one.
    """

    mean: float | None
    std: float | None  # ddof = 1
    low: float | None
    high: float | None
    n: int
    of: int

    @property
    def half_width(self) -> float | None:
        return None if self.mean is None or self.high is None else self.high - self.mean


@dataclass(frozen=True)
class Difference:
    """A selector minus the baseline, seed by seed."""

    estimate: Estimate  # n and `of` count pairs
    rounds: (
        tuple[int, int] | None
    )  # fewest and most that a pair was compared over; None for a metric to the target
    verdict: (
        Literal["better", "worse", "unclear", "equal"] | None
    )  # unclear: the interval holds zero; None: there is none


@dataclass(frozen=True)
class SelectorSummary:
    name: str
    runs: tuple[RunSummary, ...]  # by seed
    estimates: Mapping[str, Estimate]  # by metric key
    differences: Mapping[str, Difference]  # by metric key; empty for the baseline itself

    @property
    def reached(self) -> tuple[int, int]:
        """(k, n): k of n runs reached the target."""
        estimate = self.estimates["rounds_to_target"]
        return estimate.n, estimate.of


@dataclass(frozen=True)
class ExperimentSummary:
    name: str
    target: float | None
    baseline: str
    selectors: tuple[SelectorSummary, ...]  # in the order in which they were met


@dataclass(frozen=True)
class Summary:
    experiments: tuple[ExperimentSummary, ...]


def summarise(runs: Sequence[RunRecord], baseline: str | None = None) -> Summary:
    """Everything a report shows, compared with the selector `baseline`: `random` if it is there, else the first."""
    if not runs:
        raise RecordError(
            "no runs to summarise: name a folder that `fedcor run` or `fedcor compare` wrote with --out"
        )
    experiments: dict[str, dict[str, dict[int, Curve]]] = {}
    for curve in map(curve_of, runs):
        seeds = experiments.setdefault(curve.experiment, {}).setdefault(curve.selector, {})
        if curve.seed in seeds:
            twice = f"{curve.experiment}, {curve.selector}, seed {curve.seed}"
            raise RecordError(f"two runs of {twice}: report their folders one at a time")
        seeds[curve.seed] = curve
    return Summary(tuple(_experiment(name, found, baseline) for name, found in experiments.items()))


def _experiment(
    name: str, found: Mapping[str, Mapping[int, Curve]], baseline: str | None
) -> ExperimentSummary:
    if baseline is None:
        baseline = DEFAULT_BASELINE if DEFAULT_BASELINE in found else next(iter(found))
    elif baseline not in found:
        hint = suggest(baseline, found) or f"there is {', '.join(found)}"
        raise RecordError(f'{name} has no run of the baseline "{baseline}": {hint}')
    first, *others = (curve for curves in found.values() for curve in curves.values())
    for other in others:  # runs are compared only when all but the choice is the same
        _refuse_different(name, first.settings, other.settings)
    for curves in found.values():  # and are one selector's only when its hyper-parameters are
        first, *others = curves.values()
        for other in others:
            _refuse_different(f"{name} with {first.selector}", first.options, other.options)
    selectors = tuple(
        _selector(key, found[key], None if key == baseline else found[baseline]) for key in found
    )
    return ExperimentSummary(name, first.target, baseline, selectors)


def _refuse_different(what: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    for key, (here, there) in differences(one, other).items():
        told = f"{key} is {_told(here)} in one and {_told(there)} in another"
        raise RecordError(
            f"runs of {what} have different settings ({told}): report their folders one at a time"
        )


def _told(value: Any) -> str:
    return "not set" if value is None else repr(value)


def _selector(
    name: str, curves: Mapping[int, Curve], baseline: Mapping[int, Curve] | None
) -> SelectorSummary:
    runs = tuple(_run(curves[seed]) for seed in sorted(curves))
    estimates = {
        m.key: estimate_of((run.values[m.key] for run in runs), m.to_target) for m in METRICS
    }
    if baseline is None:
        return SelectorSummary(name, runs, estimates, {})
    pairs = [(curves[seed], baseline[seed]) for seed in sorted(curves.keys() & baseline.keys())]
    return SelectorSummary(name, runs, estimates, {m.key: _difference(m, pairs) for m in METRICS})


def _run(curve: Curve) -> RunSummary:
    values = {m.key: m.of(curve) for m in METRICS}
    return RunSummary(curve.seed, curve.done, curve.planned, curve.done >= curve.planned, values)


def _difference(metric: Metric, pairs: Sequence[tuple[Curve, Curve]]) -> Difference:
    rounds = None
    if pairs and not metric.to_target:
        common = [min(ours.done, theirs.done) for ours, theirs in pairs]
        pairs = [
            (ours.first(t), theirs.first(t))
            for (ours, theirs), t in zip(pairs, common, strict=True)
        ]
        some = [t for t in common if t > 0]  # a pair without rounds is not compared at all
        rounds = (min(some), max(some)) if some else None
    values = [(metric.of(ours), metric.of(theirs)) for ours, theirs in pairs]
    estimate = estimate_of(
        (None if a is None or b is None else a - b for a, b in values), metric.to_target
    )
    if estimate.low is None or estimate.high is None:
        return Difference(estimate, rounds, None)
    if max(abs(estimate.low), abs(estimate.high)) <= ROUNDING:
        return Difference(estimate, rounds, "equal")
    if estimate.low <= ROUNDING and estimate.high >= -ROUNDING:
        return Difference(estimate, rounds, "unclear")
    improves = (estimate.low > 0) == (metric.better == "higher")
    return Difference(estimate, rounds, "better" if improves else "worse")


def estimate_of(values: Iterable[float | None], all_needed: bool = False) -> Estimate:
    """The mean over seeds; where `all_needed`, none unless every seed has a value."""
    asked = list(values)
    known = [value for value in asked if value is not None]
    n, of = len(known), len(asked)
    if n == 0 or (all_needed and n < of):  # the paper's N/A
        return Estimate(None, None, None, None, n, of)
    mean = float(np.mean(known))
    if n == 1:
        return Estimate(mean, None, None, None, n, of)
    std = float(np.std(known, ddof=1))
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, n - 1)) * std / n**0.5
    return Estimate(mean, std, mean - half, mean + half, n, of)


def ratio_of(parts: Sequence[float], wholes: Sequence[float]) -> Estimate:
    """The mean of `parts` over the mean of `wholes`, in pairs, with Fieller's 95 % interval.

    The interval holds every R for which the paired differences parts - R wholes do not differ from zero. Where the wholes
    themselves do not, no ratio can be told, and there is none.
    """
    d, g = np.asarray(parts, dtype=np.float64), np.asarray(wholes, dtype=np.float64)
    n = len(d)
    if n == 0 or g.mean() == 0:
        return Estimate(None, None, None, None, 0, n)
    ratio = float(d.mean() / g.mean())
    if n == 1:
        return Estimate(ratio, None, None, None, n, n)
    q = float(stats.t.ppf((1 + CONFIDENCE) / 2, n - 1)) ** 2 / n
    spread = np.cov(d, g)
    a, b, c = (
        float(one.mean() * other.mean() - q * covariance)
        for one, other, covariance in (
            (g, g, spread[1, 1]),
            (d, g, spread[0, 1]),
            (d, d, spread[0, 0]),
        )
    )
    if a <= 0:
        return Estimate(None, None, None, None, 0, n)
    root = max(b * b - a * c, 0.0) ** 0.5
    return Estimate(ratio, None, (b - root) / a, (b + root) / a, n, n)
