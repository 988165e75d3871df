"""Flower's own lines within our `start`, made true: its loop does not know what we know.

Its loop counts from 1 again in a resumed run, and a strategy counts the nodes and replies that we
show to it. A filter on Flower's logger corrects these lines, by their templates, while `start` runs
and in its thread only. Every other line passes as it is, and so do these if Flower changes them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from fedcor.flower.numbering import flower_round, own_round

__all__ = ["TEMPLATES", "private_call", "true_numbers", "true_rounds"]

_ROUND = "[ROUND %s/%s]"
_ROUNDS = "\t├── Number of rounds: %d"
_INITIAL = "Initial global evaluation results: %s"
_FINAL = "Final results:"
_FINAL_LINE = "\t%s"
_SAMPLED = "%s: Sampled %s nodes (out of %s)"
_RECEIVED = "%s: Received %s results and %s failures"
# What the filter looks for; a test looks for it in Flower's source.
TEMPLATES = (_ROUND, _ROUNDS, _INITIAL, _FINAL, _FINAL_LINE, _RECEIVED)
SAMPLED = tuple(_SAMPLED.replace("%s", f"configure_{task}", 1) for task in ("train", "evaluate"))
# A round's metrics in the final results: `{1: {...`, `{ 1: {...` or `  2: {...`.
_NUMBERED = re.compile(r"^(\{ ?| {2})(\d+)(?=: )")


@dataclass(frozen=True)
class _Call:
    """A call of the wrapped strategy."""

    private: bool = False  # it is shown only what we chose before
    failures: int | None = None  # replies that it is not shown
    left_alone: int = 0  # connected nodes that it is not shown


_RUN: ContextVar[_Rounds | None] = ContextVar("fedcor_run", default=None)
_CALL: ContextVar[_Call | None] = ContextVar("fedcor_call", default=None)


@contextmanager
def true_rounds(finished: int, total: int) -> Iterator[None]:
    """Within it, Flower's loop logs rounds as they are numbered over the whole run.

    Args:
        finished: Rounds that were finished before this start.
        total: Rounds of the whole run.
    """
    correct, logger = _Rounds(finished, total), logging.getLogger("flwr")
    before = _RUN.set(correct)
    logger.addFilter(correct)
    try:
        yield
    finally:
        logger.removeFilter(correct)
        _RUN.reset(before)


@contextmanager
def private_call() -> Iterator[None]:
    """Within it, a strategy does not log how many nodes it sampled or replies it received.

    It is shown the chosen nodes only, or a candidate's replies: its numbers would mislead.
    """
    with _calling(_Call(private=True)):
        yield


@contextmanager
def true_numbers(*, failures: int | None = None, left_alone: int = 0) -> Iterator[None]:
    """Within it, a strategy logs the numbers of failures and nodes as they are.

    Args:
        failures: Clients that were asked and did not deliver; a strategy is shown no such reply.
        left_alone: Connected clients that may not be sampled now, after faults.
    """
    with _calling(_Call(failures=failures, left_alone=left_alone)):
        yield


@contextmanager
def _calling(call: _Call) -> Iterator[None]:
    before = _CALL.set(call)
    try:
        yield
    finally:
        _CALL.reset(before)


class _Rounds(logging.Filter):
    """Corrects the lines of one start."""

    def __init__(self, finished: int, total: int) -> None:
        super().__init__()
        self._finished, self._total = finished, total
        self._ended = False  # the loop is over, the results follow

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is logged; it may be changed here."""
        # A context variable is a thread's own, so that other threads' lines pass.
        if _RUN.get() is not self or not isinstance(record.msg, str):
            return True
        return self._correct_round(record) and _correct_call(record)

    def _correct_round(self, record: logging.LogRecord) -> bool:
        finished, total = self._finished, self._total
        match (record.msg, record.args):
            case (message, (int(number), int())) if message == _ROUND:
                record.args = (self._whole_run(number), total)
            case (message, (int(),)) if message == _ROUNDS and finished:
                record.msg = f"{_ROUNDS} (%d finished before)"
                record.args = (total, finished)
            case (message, (None,)) if message == _INITIAL and finished:
                return False  # the model was evaluated when its round ended
            case (message, _) if message == _FINAL:
                self._ended = True
            case (message, (str(line),)) if message == _FINAL_LINE and self._ended:
                record.args = (
                    _NUMBERED.sub(lambda m: f"{m[1]}{self._whole_run(int(m[2]))}", line),
                )
        return True

    def _whole_run(self, number: int) -> int:
        """The round that the loop calls `number`; 0 is the initial model."""
        return flower_round(own_round(number, self._finished)) if number else 0


def _correct_call(record: logging.LogRecord) -> bool:
    """Correct what a strategy logs when we call it; False where it is not to be logged."""
    call = _CALL.get()
    if call is None:
        return True
    match (record.msg, record.args):
        case (message, (int() as sampled, int() as shown)) if message in SAMPLED:
            if call.left_alone:
                record.msg = f"{message[:-1]}; %s left alone after a fault)"
                record.args = (sampled, shown, call.left_alone)
            return not call.private
        case (message, (task, received, int())) if message == _RECEIVED:
            if call.failures is not None:
                record.args = (task, received, call.failures)
            return not call.private
    return True
