"""The goals of `aligned` with FedRecall: whether each was met, and the figures behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedcor.reporting.metrics import ROUNDING, Estimate, judge, percent
from studies.memory_comparison import ACCURACIES, Comparison, average_difference
from studies.memory_scenarios import EVERYONE, EVERYONE_SCENARIOS, OURS, RANDOM

NEGLIGIBLE = 0.005  # difference of accuracy
MOST_SPREAD = 1.5  # times everyone's
MOST_TURNS = 4  # of N / C rounds
LEAST_SHARE = 0.9  # of the best rival's gain
COMPLEMENT = "complement"


@dataclass(frozen=True)
class Goal:
    """A goal, and whether it was met.

    Attributes:
        title: The goal.
        met: None where the runs do not tell.
        figures: The numbers behind it, in words.
    """

    title: str
    met: bool | None
    figures: str

    @property
    def verdict(self) -> str:
        """`met`, `not met`, or `not measured`."""
        return {True: "met", False: "not met", None: "not measured"}[self.met]


@dataclass(frozen=True)
class Share:
    """Our gain over random relative to the best rival's, in one scenario.

    Attributes:
        rival: The rival with the largest gain.
        share: Our gain divided by the rival's; None where the rival's is negligible.
        difference: Our mean accuracy minus the rival's, paired over seeds.
    """

    rival: str
    share: float | None
    difference: Estimate

    @property
    def enough(self) -> bool:
        """Nearly all of the gain; where there is none to share, not less than the rival has."""
        if self.share is not None:
            return self.share >= LEAST_SHARE
        return self.difference.mean is not None and self.difference.mean >= -NEGLIGIBLE

    @property
    def text(self) -> str:
        """`112 % of FedCor's`, or that there is none to share."""
        if self.share is not None:
            return f"{percent(round(self.share, 2))} of {self.rival}'s"
        return f"no gain to share, {paired_text(self.difference)} to {self.rival}"


def share_of_gain(comparison: Comparison) -> Share:
    """Our gain over random relative to the best rival's."""
    rival = comparison.best_rival
    possible = comparison.gain(rival)
    share = None if possible <= NEGLIGIBLE else comparison.gain(OURS.label) / possible
    return Share(rival, share, comparison.difference(OURS.label, rival))


def is_below(difference: Estimate) -> bool:
    """Whether it is significantly negative, or negative by more than can be neglected."""
    if difference.mean is None or difference.mean < -NEGLIGIBLE:
        return True
    return judge(difference, "higher", ROUNDING) == "worse"


def goals(comparisons: Sequence[Comparison]) -> list[Goal]:
    """All goals, in their order."""
    return [
        _never_below_random(comparisons),
        *_like_everyone(comparisons),
        _share_of_best(comparisons),
        _ahead_on_average(comparisons),
        _no_more_bytes(comparisons),
    ]


def _never_below_random(comparisons: Sequence[Comparison]) -> Goal:
    below, lowest = [], []
    for key, name in zip(ACCURACIES, ("mean accuracy", "last tenth"), strict=True):
        gains = {c.title: c.difference(OURS.label, RANDOM.label, key) for c in comparisons}
        below += [f"{title} ({name})" for title, gain in gains.items() if is_below(gain)]
        where = min(gains, key=lambda title: gains[title].mean or 0.0)
        lowest.append(f"{name} {paired_text(gains[where])} ({where})")
    # Titles have commas in them.
    figures = f"Lowest: {'; '.join(lowest)}. Below random: {'; '.join(below) or 'nowhere'}"
    return Goal("(1) never below random", not below, figures)


def _like_everyone(comparisons: Sequence[Comparison]) -> list[Goal]:
    by_name = {c.name: c for c in comparisons if EVERYONE.label in c.runs}
    measured = [by_name[name] for name in EVERYONE_SCENARIOS if name in by_name]
    if not measured:
        return [Goal("(2) like everyone training", None, "Everyone was not run here")]
    return [_like_everyone_in(comparison) for comparison in measured]


def _like_everyone_in(comparison: Comparison) -> Goal:
    """Of one scenario: accuracy, spread, against complement, and waits."""
    to_everyone = comparison.difference(OURS.label, EVERYONE.label)
    to_complement = comparison.difference(OURS.label, COMPLEMENT)
    seeds = comparison.common_seeds(OURS.label, EVERYONE.label)
    spread, of_everyone = (
        comparison.estimate(label, "spread", seeds).mean for label in (OURS.label, EVERYONE.label)
    )
    ratio = spread / of_everyone if spread is not None and of_everyone else None
    shown = "–" if ratio is None else f"{ratio:.2f}"
    turns = comparison.turns_waited(OURS.label)
    parts = [
        (
            to_everyone.mean is not None and to_everyone.mean >= 0,
            f"Minus everyone {paired_text(to_everyone)}, at least 0",
        ),
        (
            ratio is not None and ratio <= MOST_SPREAD,
            f"spread {shown} of everyone's, at most {MOST_SPREAD}",
        ),
        (
            not is_below(to_complement),
            f"minus complement {paired_text(to_complement)}, not below",
        ),
        (turns <= MOST_TURNS, f"longest wait {turns:.2f} N/C, at most {MOST_TURNS}"),
    ]
    figures = "; ".join(text + ("" if reached else " (not met)") for reached, text in parts)
    title = f"(2) like everyone training, {comparison.title}"
    return Goal(title, all(reached for reached, _ in parts), figures)


def _share_of_best(comparisons: Sequence[Comparison]) -> Goal:
    shares = {c.title: share_of_gain(c) for c in comparisons}
    short = [f"{title} ({s.text})" for title, s in shares.items() if not s.enough]
    shared = {title: s.share for title, s in shares.items() if s.share is not None}
    figures = [f"Too little: {'; '.join(short) or 'nowhere'}"]
    if shared:
        where = min(shared, key=lambda title: shared[title])
        figures.insert(0, f"Lowest: {shares[where].text} ({where})")
    none = len(shares) - len(shared)
    if none:
        figures.append(f"No gain to share in {none} of {len(shares)}, compared by difference")
    title = f"(3) at least {percent(LEAST_SHARE)} of the best rival's gain in each scenario"
    return Goal(title, not short, ". ".join(figures))


def _ahead_on_average(comparisons: Sequence[Comparison]) -> Goal:
    ahead = {
        rival: average_difference(comparisons, OURS.label, rival) for rival in comparisons[0].rivals
    }
    figures = [f"Minus {rival} {paired_text(paired)}" for rival, paired in ahead.items()]
    met = all(paired.mean is not None and paired.mean > 0 for paired in ahead.values())
    return Goal("(3) ahead of every rival on average", met, "; ".join(figures))


def _no_more_bytes(comparisons: Sequence[Comparison]) -> Goal:
    # Where clients die, chance decides how many come back.
    ratios = {c.title: c.bytes_ratio(OURS.label) for c in comparisons if c.reliable}
    if not ratios:
        return Goal("the bytes of random", None, "Clients fail in every scenario")
    where = max(ratios, key=lambda title: ratios[title])
    figures = f"At most {ratios[where]:.2f} of random's ({where})"
    return Goal("the bytes of random", round(ratios[where], 2) <= 1, figures)


def accuracy_text(value: float, sign: str = "") -> str:
    """`.701`: three digits, however small it is, so that a column is easy to read."""
    return f"{value:{sign}.3f}".replace("0.", ".", 1)


def paired_text(estimate: Estimate, interval: bool = True) -> str:
    """`+.080 [+.071, +.089]`; without the bracket where there is no interval or none is wanted."""
    if estimate.mean is None:
        return "N/A"
    mean = accuracy_text(estimate.mean, "+")
    if not interval or estimate.low is None or estimate.high is None:
        return mean
    return f"{mean} [{accuracy_text(estimate.low, '+')}, {accuracy_text(estimate.high, '+')}]"
