"""The words of the verdict: who is best, by how much and how surely, in a few sentences.

Nothing is called a win unless the 95 % interval of the paired difference excludes zero. The
interval is that of one comparison: it is not widened for the number of selectors among which the
best was found.

`_Pair` holds the facts about two selectors; the functions below it write one sentence each.
"""

from __future__ import annotations

import math

from fedcor.core.text import listed, seconds_text
from fedcor.reporting.metrics import (
    bytes_ratio,
    difference,
    drops_values,
    numbers,
    paired_values,
    percent,
    with_interval,
)
from fedcor.reporting.series import clean, short_names
from fedcor.reporting.summary import ExperimentSummary, SelectorSummary, Summary, ranking


def verdict(summary: Summary) -> str:
    """The verdict on every experiment; with the experiment's name where there are several."""
    several = len(summary.experiments) > 1
    return "\n".join(
        (f"{clean(experiment.name)}: " if several else "") + experiment_verdict(experiment)
        for experiment in summary.experiments
    )


def experiment_verdict(experiment: ExperimentSummary) -> str:
    """A few sentences on an experiment.

    They say how many rounds the best selector and the baseline need to the target, on how many
    seeds the best is ahead in the mean of the measure over rounds, the 95 % interval of the paired
    difference, and what it costs in bytes. Where the interval holds zero, or there is none, they
    say that the difference may be noise. For metrics without a declared direction, they give the
    differences from the baseline, and name no best.

    Example:
        experiment_verdict(summarise(read_runs(Path("runs/demo"))).experiments[0])
    """
    if not experiment.rounds_done[1]:
        return "No round is finished yet."
    best, *others = ranking(experiment)
    if not others:
        return _only_selector(experiment)
    if experiment.headline.better is None:
        return _without_direction(experiment)
    baseline_leads = best == experiment.baseline
    pair = _Pair(experiment, best, others[0] if baseline_leads else experiment.baseline)
    if pair.difference.estimate.mean is None:
        return _no_comparison(pair)
    lead = f"No selector is ahead of {pair.a}. " if baseline_leads else ""
    comparison = " ".join(filter(None, [_target(pair), _comparison(pair)]))
    return lead + _after(_so_far(pair), comparison) + _others(pair)


# --- facts ----------------------------------------------------------------------------------------


class _Pair:
    """The facts about two selectors of an experiment, the best and its rival.

    Attributes:
        a, b: how the best and the rival are shown
        what: what is compared: `mean accuracy`
        difference: the paired difference, best minus rival
    """

    def __init__(self, experiment: ExperimentSummary, best: str, rival: str) -> None:
        self.experiment, self.metric = experiment, experiment.headline
        self.best, self.rival = (experiment.selector(name) for name in (best, rival))
        self.a, self.b = (_shown(experiment, name) for name in (best, rival))
        self.what = f"mean {clean(experiment.measure)}"
        self.curves = experiment.curves[best], experiment.curves[rival]
        self.difference = difference(self.metric, *self.curves)
        self.finished = self.best.finished and self.rival.finished


def _shown(experiment: ExperimentSummary, name: str) -> str:
    return short_names(s.name for s in experiment.selectors)[name]


def _why_no_mean(experiment: ExperimentSummary, selector: SelectorSummary) -> str:
    """Why a selector has no mean of the measure; empty where it has one."""
    if selector.estimates[experiment.headline.key].mean is not None:
        return ""
    if not any(run.rounds_done for run in selector.runs):
        return "no round is finished yet"
    curves = experiment.curves[selector.name].values()
    if any(math.isinf(value) for curve in curves for value in curve.of(experiment.measure)):
        return "its model diverged"
    return f"no round has a value of {experiment.measure}"


# --- one sentence per case ------------------------------------------------------------------------


def _comparison(pair: _Pair) -> str:
    """Whether the best is ahead of its rival, with the difference and the bytes."""
    estimate, verdict = pair.difference.estimate, pair.difference.verdict
    cost = _bytes(pair)
    with_bytes, used = (f", with {cost}", f"; {pair.a} used {cost}") if cost else ("", "")
    if verdict == "equal":
        seeds = _seeds(pair, estimate.n, estimate.n)
        return f"{pair.a} and {pair.b} have the same {pair.what} on {seeds}{with_bytes}."
    noise = f"The difference between {pair.a} and {pair.b} may be noise"
    gap, *ends = numbers(pair.metric, estimate.known, signed=True)
    if not ends:
        return f"{noise} ({pair.what} {gap}; one seed has no interval){used}."
    interval = f"{pair.what} {gap}, 95 % interval {ends[0]} to {ends[1]}"
    sign = -1.0 if pair.metric.better == "lower" else 1.0
    gaps = paired_values(pair.metric, *pair.curves).values()
    ahead = sum(gap is not None and sign * gap > pair.metric.tolerance for gap in gaps)
    seeds = _seeds(pair, ahead, estimate.n)
    if verdict == "unclear":
        return f"{noise} ({interval}; ahead on {seeds}){used}."
    return f"{pair.a} is ahead of {pair.b} on {seeds} ({interval}){with_bytes}."


def _target(pair: _Pair) -> str:
    """Whether and when both reach the target; empty without one."""
    experiment = pair.experiment
    if experiment.target is None:
        return ""
    if not any(selector.reached[0] for selector in experiment.selectors):
        yet = "" if pair.finished else " yet"
        return f"No selector reaches {percent(experiment.target)}{yet}."
    best, rival = (_reaches(experiment, selector) for selector in (pair.best, pair.rival))
    return f"{pair.a} {best}; {pair.b} {rival}."


def _reaches(experiment: ExperimentSummary, selector: SelectorSummary) -> str:
    """`reaches 80 % after 17.3 rounds`."""
    target = percent(experiment.target or 0.0)
    (reached, runs), mean = selector.reached, selector.estimates["rounds_to_target"].mean
    if mean is not None:
        time = selector.estimates.get("seconds_to_target")
        (rounds,) = numbers(experiment.metric("rounds_to_target"), [mean])
        after = f"{rounds} {_rounds(mean)}"
        if time is not None and time.mean is not None:
            after += f" ({seconds_text(time.mean)} of simulated time)"
        return f"reaches {target} after {after}"
    if reached:
        return f"reaches {target} on {reached} of {runs} seeds"
    return f"does not reach {target}" if selector.finished else f"has not reached {target} yet"


def _so_far(pair: _Pair) -> str:
    """Whether runs go on, and over which rounds unequal runs are compared."""
    unequal = len({curve.done for curves in pair.curves for curve in curves.values()}) > 1
    first, last = pair.difference.rounds or (0, 0)
    rounds = f"{first}" if first == last else f"{first} to {last}"
    over = f"over the first {rounds} rounds, which both have" if unequal else ""
    if drops_values(pair.metric, *pair.curves):
        over = f"over the {rounds} {_rounds(last)} in which both have a value"
    if not pair.finished:
        return f"So far ({over}):" if over else "So far:"
    return f"O{over[1:]}:" if over else ""


def _others(pair: _Pair) -> str:
    """Who is clearly ahead of the baseline though the best is not, and who may be as good as it."""
    experiment, key = pair.experiment, pair.metric.key
    clear = []
    if pair.best.differences and pair.difference.verdict != "better":
        compared = [s for s in experiment.selectors if s.differences]
        clear = [s.name for s in compared if s.differences[key].verdict == "better"]
    near = [
        name
        for name in ranking(experiment)
        if name not in (pair.best.name, pair.rival.name, *clear)
        and difference(pair.metric, experiment.curves[name], pair.curves[0]).verdict
        in ("unclear", "equal")
    ]
    groups = {f"Clearly ahead of {pair.b}": clear, f"Not clearly behind {pair.a}": near}
    return "".join(
        f" {words}: {listed([_shown(experiment, name) for name in names], 3)}."
        for words, names in groups.items()
        if names
    )


def _no_comparison(pair: _Pair) -> str:
    """The two have no difference: no common seed, or no value."""
    experiment = pair.experiment
    ours, theirs = pair.curves
    without = [
        f"{_shown(experiment, selector.name)} has none: {why}"
        for selector in (pair.best, pair.rival)
        if (why := _why_no_mean(experiment, selector))
    ]
    why = "; ".join(without)
    if not ours.keys() & theirs.keys():
        why = f"{pair.a} and {pair.b} have no seed in common"
    elif not without:
        why = f"there is no round in which both have a value of {experiment.measure}"
    level = pair.best.estimates[pair.metric.key].mean
    if level is None:
        return f"No comparison of {pair.what}: {why}."
    (shown,) = numbers(pair.metric, [level])
    return f"{pair.a} has a {pair.what} of {shown}, but there is no comparison: {why}."


def _only_selector(experiment: ExperimentSummary) -> str:
    """One selector: what it reached."""
    (selector,) = experiment.selectors
    name, what = _shown(experiment, selector.name), f"mean {clean(experiment.measure)}"
    estimate = selector.estimates[experiment.headline.key]
    if estimate.mean is None:
        return f"{name} has no {what}: {_why_no_mean(experiment, selector)}."
    level, *ends = numbers(experiment.headline, estimate.known)
    seeds = f"{estimate.n} seeds" if estimate.n > 1 else "1 seed"
    interval = f", 95 % interval {ends[0]} to {ends[1]}" if ends else ""
    text = f"a {what} of {level} ({seeds}{interval})."
    alone = "There is no other selector to compare it with."
    reach = "has" if experiment.target is None else f"{_reaches(experiment, selector)}, with"
    return _after("" if selector.finished else "So far,", f"{name} {reach} {text} {alone}")


def _without_direction(experiment: ExperimentSummary) -> str:
    """The differences from the baseline, for a metric without a declared direction."""
    baseline, measure = experiment.baseline, experiment.measure
    pairs = [_Pair(experiment, s.name, baseline) for s in experiment.selectors if s.differences]
    compared = [pair for pair in pairs if pair.difference.estimate.mean is not None]
    if not compared:
        return _no_comparison(pairs[0])
    starts = {_so_far(pair) for pair in compared}
    mixed = "" if all(pair.finished for pair in compared) else "So far:"
    start = mixed if len(starts) > 1 else starts.pop()
    if len(compared) == 1 and compared[0].difference.verdict == "equal":
        return _after(start, _comparison(compared[0]))
    gaps = [_gap(pair) for pair in compared]
    what = f"The difference in {compared[0].what} from {compared[0].b}: {listed(gaps, 3)}"
    text = "No direction of this metric is declared to be better"
    if measure in next(iter(experiment.curves[baseline].values())).declared_metrics:
        name = measure if measure.isidentifier() else "function"
        text += f': give metrics={{"{clean(measure)}": ({name}, "lower")}} or "higher"'
    return _after(start, f"{what}. {text}.")


# --- parts of sentences ---------------------------------------------------------------------------


def _after(start: str, text: str) -> str:
    """`text` after the beginning of a sentence, if there is one."""
    if not start:
        return text
    return f"{start} {'the ' + text[4:] if text.startswith('The ') else text}"


def _gap(pair: _Pair) -> str:
    """`fedcor +.052 [+.041, +.063]`."""
    estimate = pair.difference.estimate
    without = " (one seed, no interval)" if estimate.low is None else ""
    gap = with_interval(numbers(pair.metric, estimate.known, signed=True))
    return f"{pair.a} {gap}{without}"


def _seeds(pair: _Pair, count: int, total: int) -> str:
    """`all 3 seeds`, `2 of 3 seeds`; says where they are not all that there are."""
    ours, theirs = pair.curves
    shared = "" if ours.keys() == theirs.keys() else " that both have"
    if count != total:
        return f"{count} of {total} seeds{shared}"
    return {1: "the one seed", 2: "both seeds"}.get(total, f"all {total} seeds") + shared


def _bytes(pair: _Pair) -> str:
    """`5 % more bytes`: the best relative to its rival; empty where no bytes were sent."""
    ratio = bytes_ratio(*pair.curves)
    if ratio is None:
        return ""
    if abs(ratio - 1) < 0.01:
        return "the same bytes" if ratio == 1 else "about the same bytes"
    if ratio < 1:
        return f"{100 * (1 - ratio):.0f} % fewer bytes"
    return f"{100 * (ratio - 1):.0f} % more bytes" if ratio < 2 else f"{ratio:.1f} times the bytes"


def _rounds(count: float) -> str:
    return "round" if count == 1 else "rounds"
