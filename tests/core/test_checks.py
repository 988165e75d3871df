"""Checks of parameters: what passes, and what a refusal says."""

from __future__ import annotations

import numpy as np
import pytest

from fedcor.core.config import (
    check_at_least,
    check_between,
    check_fraction,
    check_one_of,
    check_positive,
)
from fedcor.core.errors import ConfigError

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("check", "allowed", "refused"),
    [
        (lambda v: check_at_least("k", v, 2), [2, np.int64(3)], [1, 2.0, "3", True, None]),
        (lambda v: check_fraction("k", v), [0.5, np.float32(0.1)], [0, 1, NAN, "0.5", True]),
        (lambda v: check_fraction("k", v, closed=True), [0, 1, 0.5], [-0.1, 1.1, NAN, None]),
        (lambda v: check_positive("k", v), [1, 1e-9], [0, -1, NAN, INF, 10**400, "1"]),
        (lambda v: check_positive("k", v, zero=True), [0, 2.5], [-1, INF]),
        (lambda v: check_between("k", v, -1, 2), [-1, 0.5, 2], [-2, 3, NAN, False, "0"]),
        (lambda v: check_one_of("k", v, ("mean", "median")), ["mean"], ["sum", None, 3]),
    ],
    ids=["at least", "fraction", "closed fraction", "positive", "or zero", "between", "one of"],
)
def test_what_is_allowed_passes_and_the_rest_is_refused(check, allowed, refused):
    for value in allowed:
        check(value)
    for value in refused:
        with pytest.raises(ConfigError, match="^k = .*: must "):
            check(value)


def test_a_near_miss_gets_a_suggestion():
    with pytest.raises(ConfigError, match=r'must be one of mean, median \(did you mean "median"\?'):
        check_one_of("k", "medain", ("mean", "median"))
