"""The programme behind bounds on several tags at once.

Notation (see `groups.py`)
    x       (n,) further seats for the clients of each cell that has candidates
    s       (G,) by how many clients each minimum is missed

    counts_g + sum_k x_k  <= upper_g            over the cells k of group g
    counts_g + sum_k x_k + s_g >= lower_g
    0 <= x_k <= free_k,  sum x <= seats,  s >= 0

With two tags the corners of this polytope are whole numbers (two nested families of sets: the
matrix is totally unimodular), so a linear programme is exact. With three or more, x is declared to
be whole.

Only optimal values are used, and which x can be positive at the optimum. Both are unique, so the
result does not depend on the solver.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedcor.errors import FedcorError
from fedcor.rules.groups import UNLIMITED, Groups
from fedcor.types import Array, BoolArray, IntArray

__all__ = ["best_totals", "cells_in_best"]


def best_totals(groups: Groups, free: IntArray, counts: IntArray, seats: int) -> tuple[int, int]:
    """The smallest shortfall, and the most further clients that go with it."""
    programme = _Programme(groups, free, counts)
    n, g = programme.n, programme.g
    # A client less is better than a minimum missed by one more.
    goal = np.concatenate([-np.ones(n), np.full(g, seats + 1.0)])
    found = programme.solve(goal, most=seats, whole=groups.tags > 2)
    return round(float(found[n:].sum())), round(float(found[:n].sum()))


def cells_in_best(
    groups: Groups, free: IntArray, counts: IntArray, short: int, more: int, wanted: BoolArray
) -> BoolArray:
    """(K,) which of the wanted cells have a further seat in some best outcome.

    Args:
        groups: The bounds.
        free: (K,) Candidates in each cell.
        counts: (G + 1,) Seats that each group has.
        short: The shortfall of a best outcome.
        more: Its further clients.
        wanted: (K,) Cells to look at.
    """
    inside = np.zeros(groups.cells, dtype=bool)
    left = wanted & (free > 0)
    if not more or not left.any():
        return inside
    programme = _Programme(groups, free, counts)
    cells = programme.cells
    left[cells] &= programme.support(left[cells], short, more)
    if groups.tags <= 2:
        return left
    # A fraction of a client is not enough: look for whole ones, many cells at a time.
    while left.any():
        x = programme.with_cells(np.flatnonzero(left[cells]), short, more)
        new = cells[x > 0.5]
        if not left[new].any():
            break
        inside[new] = True
        left &= ~inside
    return inside & wanted


class _Programme:
    """The constraints, for the cells that have candidates."""

    def __init__(self, groups: Groups, free: IntArray, counts: IntArray) -> None:
        from scipy.sparse import csr_array

        self.cells = np.flatnonzero(free)
        self.n, self.g = len(self.cells), len(groups.labels)
        self.free = free[self.cells].astype(float)
        group = groups.groups_of[self.cells].ravel()
        cell = np.repeat(np.arange(self.n), groups.tags)
        real = group < self.g
        shape = (self.g, self.n)
        self.member = csr_array((np.ones(int(real.sum())), (group[real], cell[real])), shape=shape)
        self.lower = (groups.lower - counts)[:-1].astype(float)
        upper = np.where(groups.upper < UNLIMITED, groups.upper - counts, np.inf)[:-1]
        self.limited = np.flatnonzero(np.isfinite(upper))
        self.upper = upper[self.limited]

    def solve(self, goal: Array, most: int, *, whole: bool) -> Array:
        """x and s, with goal' (x, s) as small as possible."""
        matrix = _stack(
            [self.member, _eye(self.g)],
            [self.member[self.limited], None],
            [np.ones((1, self.n)), None],
        )
        low = [*self.lower, *np.full(len(self.upper) + 1, -np.inf)]
        high = [*np.full(self.g, np.inf), *self.upper, most]
        limits = [*self.free, *np.full(self.g, np.inf)]
        return _milp(goal, matrix, low, high, limits, np.full(len(goal), float(whole)))

    def support(self, wanted: BoolArray, short: int, more: int) -> BoolArray:
        """(n,) which of the wanted x can be positive in a best outcome, fractions allowed.

        All at once: best outcomes form a polytope, whose mean point has every x positive that can
        be. Scaled by t, each such x is at least 1, so that the sum of y <= min(x, 1) counts them.
        """
        n, g, asked = self.n, self.g, np.flatnonzero(wanted)
        m = len(asked)
        matrix = _stack(  # of (x, s, t, y)
            [self.member, _eye(g), -self.lower[:, None], None],
            [-self.member[self.limited], None, self.upper[:, None], None],
            [np.ones((1, n)), None, np.array([[-float(more)]]), None],
            [None, np.ones((1, g)), np.array([[-float(short)]]), None],
            [-_eye(n), None, self.free[:, None], None],
            [_eye(n)[asked], None, None, -_eye(m)],
        )
        low = np.zeros(matrix.shape[0])
        high = np.full(len(low), np.inf)
        exact = g + len(self.upper)
        high[exact : exact + 2] = 0.0
        goal = np.concatenate([np.zeros(n + g + 1), -np.ones(m)])
        limits = np.concatenate([np.full(n + g + 1, np.inf), np.ones(m)])
        found = _milp(goal, matrix, low, high, limits, np.zeros(len(goal)))
        inside = np.zeros(n, dtype=bool)
        inside[asked] = found[n + g + 1 :] > 0.5
        return inside

    def with_cells(self, asked: IntArray, short: int, more: int) -> Array:
        """The whole x of a best outcome that has as many of the asked cells as possible."""
        n, g, m = self.n, self.g, len(asked)
        matrix = _stack(  # of (x, s, an indicator of each asked x)
            [self.member, _eye(g), None],
            [self.member[self.limited], None, None],
            [np.ones((1, n)), None, None],
            [None, np.ones((1, g)), None],
            [_eye(n)[asked], None, -_eye(m)],
        )
        free = np.full(len(self.upper), -np.inf)
        low = [*self.lower, *free, more, short, *np.zeros(m)]
        high = [*np.full(g, np.inf), *self.upper, more, short, *np.full(m, np.inf)]
        goal = np.concatenate([np.zeros(n + g), -np.ones(m)])
        limits = [*self.free, *np.full(g, np.inf), *np.ones(m)]
        return _milp(goal, matrix, low, high, limits, np.ones(len(goal)))[:n]


def _eye(size: int) -> Any:
    from scipy.sparse import csr_array, identity

    return csr_array(identity(size))


def _stack(*rows: list[Any]) -> Any:
    from scipy.sparse import bmat, csr_array

    return csr_array(bmat(rows, format="csr"))


def _milp(goal: Any, matrix: Any, low: Any, high: Any, limits: Any, whole: Array) -> Array:
    """The solution, all of which is between 0 and `limits`."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    result = milp(
        goal,
        integrality=whole,
        bounds=Bounds(np.zeros(len(goal)), limits),
        constraints=LinearConstraint(matrix, low, high),
        options={"mip_rel_gap": 0.0},
    )
    if result.x is None:
        raise FedcorError(f"the rules could not be worked out: {result.message}")
    solution: Array = result.x
    return solution
