"""The verdict: who is best, by how much and how surely, in one or two sentences.

Nothing is called a win unless the 95 % interval of the paired difference excludes zero.
"""

from __future__ import annotations

from fedcor.reporting.estimates import (
    Difference,
    bytes_ratio,
    difference,
    drops_values,
    paired_values,
)
from fedcor.reporting.metrics import numbers, percent, rounds_text, seconds_text
from fedcor.reporting.names import clean, short_names
from fedcor.reporting.summary import (
    ExperimentSummary,
    SelectorSummary,
    Summary,
    not_clearly_behind,
    ranking,
)

MOST_NAMED = 3


def verdict(summary: Summary) -> str:
    """The verdict on every experiment; with the experiment's name where there are several."""
    several = len(summary.experiments) > 1
    return "\n".join(
        (f"{clean(experiment.name)}: " if several else "") + experiment_verdict(experiment)
        for experiment in summary.experiments
    )


def experiment_verdict(experiment: ExperimentSummary) -> str:
    """One or two sentences on an experiment.

    They say who is best by the mean of the measure over rounds, how many rounds it and the baseline
    need to the target, on how many seeds it is ahead, the 95 % interval of the paired difference,
    and what it costs in bytes. Where the interval holds zero, or there is none, they say that the
    difference may be noise. Of a metric whose better direction nobody said, they give the
    differences to the baseline, and name no best. The interval is that of one comparison: it is
    not widened for the number of selectors among which the best was found.

    Example:
        experiment_verdict(summarise(read_runs(Path("runs/demo"))).experiments[0])
    """
    if not any(run.rounds_done for s in experiment.selectors for run in s.runs):
        return "No round is finished yet."
    order = ranking(experiment)
    if len(order) == 1:
        return _Duel(experiment, order[0], order[0]).alone()
    if experiment.headline.better is None:
        return _neutral(experiment)
    rival = experiment.baseline if order[0] != experiment.baseline else order[1]
    return _Duel(experiment, order[0], rival).text()


def _neutral(experiment: ExperimentSummary) -> str:
    """The differences to the baseline, where nobody said which direction is better."""
    baseline, measure = experiment.baseline, experiment.measure
    duels = [_Duel(experiment, s.name, baseline) for s in experiment.selectors if s.differences]
    compared = {duel: found for duel in duels if (found := duel.found()).estimate.mean is not None}
    if not compared:
        return duels[0].incomparable(duels[0].found())
    first, *others = compared
    so_far = {duel.so_far(found) for duel, found in compared.items()}
    before = so_far.pop() if len(so_far) == 1 else ""
    if not before and any(duel.unfinished() for duel in compared):
        before = "so far: "
    if not others and compared[first].verdict == "equal":
        return _sentence(before + first.comparison(compared[first], first.a, named=True))
    if not others:
        text = f"{first.what} of {first.a} is {first.gap(compared[first])} to {first.b}'s"
    else:
        gaps = [f"{duel.a} {duel.gap(found)}" for duel, found in compared.items()]
        more = f" and {len(gaps) - MOST_NAMED} more" if len(gaps) > MOST_NAMED else ""
        text = f"{first.what}, to {first.b}'s: {', '.join(gaps[:MOST_NAMED])}{more}"
    text += "; which direction is better was not said"
    if next(iter(experiment.curves[baseline].values())).can_say_better(measure):
        name = measure if measure.isidentifier() else "function"
        text += f': give metrics={{"{clean(measure)}": ({name}, "lower")}} or "higher"'
    return _sentence(f"{before}{text}.")


class _Duel:
    """The best selector beside the one that it is compared with: the baseline, or the next."""

    def __init__(self, experiment: ExperimentSummary, best: str, rival: str) -> None:
        self.experiment, self.metric = experiment, experiment.headline
        self.best, self.rival = experiment.selector(best), experiment.selector(rival)
        shown = short_names(s.name for s in experiment.selectors)
        self.shown, self.a, self.b = shown, shown[best], shown[rival]
        self.ours, self.theirs = experiment.curves[best], experiment.curves[rival]
        self.what = f"mean {clean(experiment.measure)}"

    def found(self) -> Difference:
        """The paired difference, ours minus theirs."""
        return difference(self.metric, self.ours, self.theirs)

    def gap(self, found: Difference) -> str:
        """The difference and its interval, which say nothing of ahead or behind."""
        estimate = found.estimate
        assert estimate.mean is not None
        if estimate.low is None or estimate.high is None:
            (gap,) = numbers(self.metric, [estimate.mean], signed=True)
            return f"{gap} (one seed, no interval)"
        values = [estimate.mean, estimate.low, estimate.high]
        return "{} [{}, {}]".format(*numbers(self.metric, values, signed=True))

    def alone(self) -> str:
        """One selector: what it reached."""
        estimate = self.best.estimates[self.metric.key]
        if estimate.mean is None:
            return f"{self.a} has no {self.what}: {self._why_none(self.best)}."
        level, *ends = numbers(
            self.metric, [v for v in (estimate.mean, estimate.low, estimate.high) if v is not None]
        )
        interval = f", 95 % interval {ends[0]} to {ends[1]}" if ends else ""
        seeds = f"{estimate.n} seeds" if estimate.n > 1 else "1 seed"
        reach = f"{self.a} {self._reach(self.best)}, with a" if self._target else f"{self.a} has a"
        so_far = "so far, " if self._unfinished(self.best) else ""
        text = f"{so_far}{reach} {self.what} of {level} ({seeds}{interval})"
        return f"{_sentence(text)}. There is no other selector to compare it with."

    def text(self) -> str:
        """Several selectors: the best beside its rival."""
        found = self.found()
        estimate = found.estimate
        if estimate.mean is None:
            return self.incomparable(found)
        reach = self._reaches()
        who = "it" if reach.startswith(f"{self.a} reaches") else self.a
        lead = ""
        if self.best.name == self.experiment.baseline:
            lead = f"No selector is ahead of {self.a}. "
        so_far = self.so_far(found)
        text = so_far + (f"{reach}; " if reach else "")
        named = not reach or reach.startswith("no selector")  # the rival is not named yet
        text += self.comparison(found, who, named=named)
        return lead + _sentence(text) + self._rest()

    def comparison(self, found: Difference, who: str, named: bool) -> str:
        """The difference, its interval, and the bytes."""
        estimate = found.estimate
        assert estimate.mean is not None
        if found.verdict == "equal":
            both = f"{self.a} and {self.b} have"
            return f"{both} the same {self.what} on {self._seeds(estimate.n)}{self._bytes(', ')}."
        to = f" to {self.b}" if named else ""
        if estimate.low is None or estimate.high is None:
            (gap,) = numbers(self.metric, [estimate.mean], signed=True)
            return (
                f"{self._its(who)} difference{to} may be noise ({self.what} {gap}): one seed has "
                f"no interval{self._bytes('; it took ')}."
            )
        gap, low, high = numbers(
            self.metric, [estimate.mean, estimate.low, estimate.high], signed=True
        )
        interval = f"{self.what} {gap}, 95 % interval {low} to {high}"
        seeds = self._seeds(estimate.n, self._count_ahead())
        if found.verdict == "unclear":
            return (
                f"{self._its(who)} difference{to} may be noise ({interval}; ahead on "
                f"{seeds}){self._bytes('; it took ')}."
            )
        of = f" of {self.b}" if named else ""
        return f"{who} is ahead{of} on {seeds} ({interval}){self._bytes(', ')}."

    def _its(self, who: str) -> str:
        return "the" if who == "it" else f"{self.a}'s"

    def _count_ahead(self) -> int:
        """On how many seeds the best is ahead of its rival."""
        sign = -1.0 if self.metric.better == "lower" else 1.0
        gaps = paired_values(self.metric, self.ours, self.theirs).values()
        return sum(gap is not None and sign * gap > self.metric.tolerance for gap in gaps)

    def _seeds(self, of: int, count: int | None = None) -> str:
        """`all 3 seeds`, `2 of 3 seeds`; says where they are not all that there are."""
        shared = "" if self.ours.keys() == self.theirs.keys() else " that both have"
        if count is None or count == of:
            how_many = {1: "the one seed", 2: "both seeds"}.get(of, f"all {of} seeds")
        else:
            how_many = f"{count} of {of} seeds"
        return how_many + shared

    # --- the target -------------------------------------------------------------------------------

    @property
    def _target(self) -> str:
        target = self.experiment.target
        return "" if target is None else percent(target)

    def _reach(self, selector: SelectorSummary) -> str:
        reached, runs = selector.reached
        mean = selector.estimates["rounds_to_target"].mean
        if mean is not None:
            rounds = f"{rounds_text(mean)} {_rounds(mean)}"
            return f"reaches {self._target} after {rounds}{self._time_to(selector)}"
        if reached:
            return f"reaches {self._target} on {reached} of {runs} seeds"
        if self._unfinished(selector):
            return f"has not reached {self._target} yet"
        return f"does not reach {self._target}"

    def _time_to(self, selector: SelectorSummary, before: str = "") -> str:
        """Simulated time to the target, in brackets, after `before`; empty without a clock."""
        found = selector.estimates.get("seconds_to_target")
        if found is None or found.mean is None:
            return ""
        of = "" if "simulated" in before else " of simulated time"
        return f" ({seconds_text(found.mean)}{of})"

    def _reaches(self) -> str:
        """Both and the target; empty without one."""
        if not self._target:
            return ""
        (ours, _), (theirs, runs) = self.best.reached, self.rival.reached
        mean = self.rival.estimates["rounds_to_target"].mean
        rival_unfinished = self._unfinished(self.rival)
        if not ours and not theirs:
            yet = " yet" if self._unfinished(self.best) or rival_unfinished else ""
            if not any(s.reached[0] for s in self.experiment.selectors):
                return f"no selector reaches {self._target}{yet}"
            return f"neither {self.a} nor {self.b} reaches {self._target}{yet}"
        text = f"{self.a} {self._reach(self.best)}, {self.b} "
        if not ours:
            text += "does "
        if mean is not None:
            unit = f" {_rounds(mean)}" if "after" not in text else ""
            return f"{text}after {rounds_text(mean)}{unit}{self._time_to(self.rival, text)}"
        if theirs:
            return f"{text}on {theirs} of {runs}" + (" seeds" if "seeds" not in text else "")
        return text + ("has not yet" if rival_unfinished else "does not")

    # --- what else must be said -------------------------------------------------------------------

    def _bytes(self, before: str) -> str:
        """The bytes of the best beside those of its rival, after `before`."""
        ratio = bytes_ratio(self.ours, self.theirs)
        if ratio is None:
            return ""
        if ratio == 1:
            text = "the same bytes"
        elif abs(ratio - 1) < 0.01:
            text = "about the same bytes"
        elif ratio < 1:
            text = f"{100 * (1 - ratio):.0f} % fewer bytes"
        elif ratio < 2:
            text = f"{100 * (ratio - 1):.0f} % more bytes"
        else:
            text = f"{ratio:.1f} times the bytes"
        if before == ", ":  # goes on about a win, or about no difference
            return f", but with {text}" if ratio >= 1.01 else f", with {text}"
        return before + text

    def so_far(self, found: Difference) -> str:
        """Whether runs go on, and over which rounds unequal runs are compared."""
        runs = [curves[s] for curves in (self.ours, self.theirs) for s in curves]
        unequal = len({curve.done for curve in runs}) > 1
        first, last = found.rounds or (0, 0)
        rounds = f"{first}" if first == last else f"{first} to {last}"
        over = f"over the first {rounds} rounds, which both have" if unequal else ""
        if drops_values(self.metric, self.ours, self.theirs):
            over = f"over the {rounds} {_rounds(last)} in which both have a value"
        if self.unfinished():
            return f"so far{f' ({over})' if over else ''}: "
        return f"{over}: " if over else ""

    def _rest(self) -> str:
        """Who is clearly ahead though the best is not, and who else may be as good as the best."""
        clear = self._clearly_ahead()
        others = [
            name
            for name in not_clearly_behind(self.experiment, self.best.name)
            if name != self.rival.name and name not in clear
        ]
        text = f" Clearly ahead of {self.b}: {self._list(clear)}" if clear else ""
        return text + (f" Not clearly behind {self.a}: {self._list(others)}" if others else "")

    def _clearly_ahead(self) -> list[str]:
        """Selectors whose interval excludes zero, where the best one's does not."""
        key = self.metric.key
        own = self.best.differences.get(key)
        if own is None or own.verdict == "better":
            return []
        return [
            s.name
            for s in self.experiment.selectors
            if key in s.differences and s.differences[key].verdict == "better"
        ]

    def _list(self, names: list[str]) -> str:
        shown = ", ".join(self.shown[name] for name in names[:MOST_NAMED])
        more = len(names) - MOST_NAMED
        return f"{shown} and {more} more." if more > 0 else f"{shown}."

    def incomparable(self, found: Difference) -> str:
        """The best and its rival have no difference: no common seed, or no value."""
        estimate = self.best.estimates[self.metric.key]
        if not self.ours.keys() & self.theirs.keys():
            why = f"{self.a} and {self.b} have no seed in common"
        else:
            without = [s for s in (self.best, self.rival) if self._why_none(s)]
            why = "; ".join(f"{self.shown[s.name]} has none: {self._why_none(s)}" for s in without)
            if not why and found.rounds is None:
                why = f"there is no round in which both have a value of {self.experiment.measure}"
            why = why or f"only {found.estimate.n} of {found.estimate.of} pairs have both values"
        if estimate.mean is None:
            return f"No comparison of {self.what}: {why}."
        (level,) = numbers(self.metric, [estimate.mean])
        return f"{self.a} has a {self.what} of {level}, but there is no comparison: {why}."

    def _why_none(self, selector: SelectorSummary) -> str:
        """Why a selector has no mean; empty where it has one."""
        estimate = selector.estimates[self.metric.key]
        if estimate.mean is not None:
            return ""
        if not any(run.rounds_done for run in selector.runs):
            return "no round is finished yet"
        if estimate.n < sum(run.rounds_done > 0 for run in selector.runs) and any(
            (curve.of(self.experiment.measure) == float("inf")).any()
            for curve in self.experiment.curves[selector.name].values()
        ):
            return "its model diverged"
        return f"no round has a value of {self.experiment.measure}"

    def unfinished(self) -> bool:
        """Whether runs of either go on."""
        return self._unfinished(self.best) or self._unfinished(self.rival)

    @staticmethod
    def _unfinished(selector: SelectorSummary) -> bool:
        return not all(run.finished for run in selector.runs)


def _sentence(text: str) -> str:
    """With a capital letter, unless it begins with the name of a selector."""
    begins = text.startswith(("no selector", "neither ", "so far", "over "))
    return text[0].upper() + text[1:] if begins else text


def _rounds(count: float) -> str:
    return "round" if count == 1 else "rounds"
