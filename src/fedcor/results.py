"""Interim: what runs give back, until there is a result that shows itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedcor.record import RunRecord

__all__ = ["Result"]


@dataclass(frozen=True)
class Result:
    """Some runs."""

    runs: Sequence[RunRecord]
    baseline: str | None = None
