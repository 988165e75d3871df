"""The log: clients' faults without repetition, and Flower's own lines with the right numbers.

`FaultLog` writes a line per client, or one line for many, and each traceback once.

Flower's loop counts rounds from 1 again in a resumed run, and a strategy counts only the nodes and
replies that it is shown. While `start` runs, a filter on Flower's logger corrects these lines by
their templates, in its own thread only. Every other line passes unchanged, and so do these if
Flower changes them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Hashable, Iterator, MutableSet, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from fedcor.core.text import lines, one_line
from fedcor.flower.protocol import LOG, flower_round, own_round

_MOST_LINES = 5  # clients with the same fault that have a line each
# Characters of a name, of a reason in a line, of a reason in full.
_LONGEST_NAME, _LONGEST_LINE, _LONGEST_TEXT = 40, 300, 4000
# Flower's form of an exception: its type and its text.
_WRAPPED = re.compile(r"^<class '([^']*)'>:<'(.*)'>$", re.DOTALL)
_CAUSE = "The above exception was the direct cause of the following exception:"
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
_RUN: ContextVar[_Rounds | None] = ContextVar("fedcor_run", default=None)
_CALL: ContextVar[_Call | None] = ContextVar("fedcor_call", default=None)


def listed(names: Sequence[str], most: int = 5) -> str:
    """A list of names that stays short.

    Example:
        >>> listed(["a", "b", "c", "d"], most=2)
        'a, b and 2 more'
    """
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def counted(count: int, noun: str) -> str:
    """A number of things.

    Example:
        >>> counted(1, "node"), counted(2, "node")
        ('1 node', '2 nodes')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def log_once(said: MutableSet[Any], key: Hashable, message: str) -> None:
    """Log a warning unless `key` is in `said`, which has it from then on."""
    if key not in said:
        said.add(key)
        LOG.warning("%s", message)


@dataclass(frozen=True, order=True)
class _Client:
    number: int
    name: str


@dataclass
class FaultLog:
    """What is to be said of clients' faults, and what was said before. It lives for one start."""

    _faults: list[tuple[_Client, str, str]] = field(default_factory=list)  # who, kind, why
    # Who -> (faults in a row, the round before which it is left alone, as the log says it).
    _alone: dict[_Client, tuple[int, int, str]] = field(default_factory=dict)
    _said: set[tuple[int, int, str, str]] = field(default_factory=set)  # round, client, kind, why
    _known: set[tuple[str, str]] = field(default_factory=set)  # kinds and reasons shown in full

    def add(self, client: int, name: str, kind: str, why: str) -> None:
        """A client failed; the next `write` logs it."""
        self._faults.append((_Client(client, one_line(name)), kind, why))

    def add_alone(
        self, client: int, name: str, faults: int, until: int, *, chosen: bool = False
    ) -> None:
        """A client is left alone before the round `until`, after so many faults in a row.

        If it may be `chosen` all the same, it is only not evaluated.
        """
        what = "not evaluated" if chosen else "left alone"
        self._alone[_Client(client, one_line(name))] = faults, until, what

    def write(self, round: int) -> None:
        """Log what came together in `round`. What was said in this round is not said again."""
        number = flower_round(round)
        self._said = {said for said in self._said if said[0] == round}
        groups: dict[tuple[str, str], list[tuple[_Client, str]]] = {}
        for client, kind, why in sorted(self._faults):
            said = (round, client.number, kind, brief(why))
            if said not in self._said:
                self._said.add(said)
                groups.setdefault((kind, _alike(why)), []).append((client, why))
        for (kind, alike), members in groups.items():
            whys = dict(members)
            for who, first in _who([client for client, _ in members]):
                self._log(f"round {number}: {who}: {kind}", (kind, alike), whys[first])
        alone: dict[tuple[int, int, str], list[_Client]] = {}
        for client, sentence in sorted(self._alone.items()):
            alone.setdefault(sentence, []).append(client)
        for (faults, until, what), clients in alone.items():
            times = "once" if faults == 1 else f"{faults} times in a row"
            for who, _ in _who(clients):
                message = "round %d: %s failed %s: %s until round %d"
                LOG.warning(message, number, who, times, what, flower_round(until))
        self._faults, self._alone = [], {}

    def _log(self, start: str, reason: tuple[str, str], why: str) -> None:
        """One warning; a reason of several lines is shown in full where it is a new one."""
        if "\n" not in why.strip():
            LOG.warning("%s: %s", start, brief(why))
        elif reason in self._known:
            LOG.warning("%s, as before: %s", start, brief(why))
        else:
            self._known.add(reason)
            # Marked, so that no line of a client's text passes for a line of the log.
            text = "\n".join(
                f"    | {line}" for line in lines(why.strip()[-_LONGEST_TEXT:]).split("\n")
            )
            LOG.warning("%s: %s. In full:\n%s", start, brief(why), text)


def brief(why: str) -> str:
    """A reason in one line: of a traceback, the exception that it began with.

    Example:
        >>> brief("<class 'ZeroDivisionError'>:<'division by zero'>")
        'ZeroDivisionError: division by zero'
    """
    wrapped = _WRAPPED.match(why.strip())
    kind, text = wrapped.groups() if wrapped else ("", why)
    written = [line.strip() for line in text.split(_CAUSE)[0].splitlines() if line.strip()]
    short = written[-1] if written else ""
    if kind and len(written) < 2:
        name = kind.rpartition(".")[2]
        short = f"{name}: {short}" if short else name
    return one_line(short or "no reason given", _LONGEST_LINE)


def _alike(why: str) -> str:
    """Equal for reasons that differ in numbers only: a client's, a process's, a path's."""
    return re.sub(r"\d+", "0", brief(why))


def _who(clients: Sequence[_Client]) -> list[tuple[str, _Client]]:
    """Each client as the log calls it; where they are many, all of them, with the first."""
    names = [
        one.name if len(one.name) <= _LONGEST_NAME else f"{one.name[:_LONGEST_NAME]}..."
        for one in clients
    ]
    if len(clients) > _MOST_LINES:
        return [(f"{len(clients)} clients ({listed(names, _MOST_LINES)})", clients[0])]
    return [
        (f"client {one.number} ({name})", one) for one, name in zip(clients, names, strict=True)
    ]


@dataclass(frozen=True)
class _Call:
    """A call of the wrapped strategy."""

    private: bool = False  # it is shown only what we chose before
    failures: int | None = None  # replies that it is not shown
    left_alone: int = 0  # connected nodes that it is not shown


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
