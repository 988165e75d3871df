"""What a comparison must refuse, and what it then says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from fedcor.errors import RecordError, suggest
from fedcor.record import RunRecord, differences
from fedcor.report.curve import Curve

__all__ = [
    "Series",
    "check_comparable",
    "measured_in",
    "no_baseline",
    "no_metric",
    "two_runs",
]

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
