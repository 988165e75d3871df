"""Groups of clients with a least and a most number, in the form that counting needs.

Notation
    G       groups, one for each value of a tag that has a bound
    T       tags with bounds
    K       cells: clients with the same values of all these tags, which count alike
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedcor.errors import ConfigError
from fedcor.rules.settings import Rules
from fedcor.types import BoolArray, IntArray

__all__ = ["Groups", "make_groups"]

UNLIMITED = np.iinfo(np.int64).max // 4
_MOST_CELLS = {1: UNLIMITED, 2: 10_000}  # by number of tags: what a round can be worked out with
_MOST_CELLS_OF_MORE = 500


@dataclass(frozen=True, eq=False)
class Groups:
    """Which clients belong together, and how many of them a round may have.

    Attributes:
        labels: (G,) `tag=value` of each group.
        lower: (G + 1,) Least number of each; the last entry is that of "no group", 0.
        upper: (G + 1,) Most of each; `UNLIMITED` where there is no maximum.
        cell_of: (N,) The cell of each client.
        groups_of: (K, T) The group of each cell, by tag; G for none.
    """

    labels: tuple[str, ...]
    lower: IntArray
    upper: IntArray
    cell_of: IntArray
    groups_of: IntArray

    @property
    def cells(self) -> int:
        """K, the number of cells."""
        return len(self.groups_of)

    @property
    def tags(self) -> int:
        """T, the number of tags with bounds."""
        return int(self.groups_of.shape[1])

    def count(self, per_cell: IntArray) -> IntArray:
        """(G + 1,) clients in each group, of the number in each cell."""
        counts = np.zeros(len(self.lower), dtype=np.int64)
        for column in self.groups_of.T:
            np.add.at(counts, column, per_cell)
        counts[-1] = 0
        return counts

    def in_cells(self, clients: IntArray) -> IntArray:
        """(K,) how many of `clients` are in each cell."""
        return np.bincount(self.cell_of[clients], minlength=self.cells)

    def missing(self, clients: IntArray) -> dict[str, int]:
        """Label -> how many clients a group has too few, if `clients` are chosen."""
        short = np.maximum(self.lower - self.count(self.in_cells(clients)), 0)
        return {label: int(n) for label, n in zip(self.labels, short, strict=False) if n}


def make_groups(
    rules: Rules, columns: Mapping[str, Sequence[str | None]], eligible: BoolArray
) -> Groups | None:
    """The groups that the rules make; None where no group has a bound.

    Args:
        rules: With their bounds.
        columns: Tag -> (N,) the value of each client, as a text; None where it has none.
        eligible: (N,) Who may be chosen. The values that only others have make no group, unless a
            bound names them.
    """
    labels: list[str] = []
    lower: list[int] = []
    upper: list[int] = []
    rows: list[list[int]] = []
    for tag in rules.quota_tags:
        column = columns.get(tag) or [None] * len(eligible)
        found = {value for value, may in zip(column, eligible.tolist(), strict=True) if may}
        number_of: dict[str | None, int] = {}
        for value in sorted({v for v in found if v is not None} | rules.bounded_values(tag)):
            low, high = rules.bounds(tag, value)
            if low or high is not None:
                number_of[value] = len(labels)
                labels.append(f"{tag}={value}")
                lower.append(low)
                upper.append(UNLIMITED if high is None else high)
        if number_of:
            rows.append([number_of.get(value, -1) for value in column])
    if not labels:
        return None
    table = np.array(rows, dtype=np.int64).reshape(len(rows), len(eligible)).T
    table = np.where(table < 0, len(labels), table)
    groups_of, cell_of = np.unique(table, axis=0, return_inverse=True)
    most = _MOST_CELLS.get(len(rows), _MOST_CELLS_OF_MORE)
    if len(groups_of) > most:
        allowed = f"{len(rows)} tags have bounds, whose values make {len(groups_of)} combinations"
        key = "at_most" if rules.at_most else "at_least"
        hint = f"at most {most} are possible with so many tags; with one tag, any number is"
        raise ConfigError(key, getattr(rules, key), allowed, hint)
    return Groups(
        tuple(labels),
        np.array([*lower, 0], dtype=np.int64),
        np.array([*upper, UNLIMITED], dtype=np.int64),
        cell_of.reshape(-1),
        groups_of,
    )
