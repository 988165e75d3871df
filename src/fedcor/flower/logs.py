"""The log: each round in one line, and clients' faults without repetition.

`FaultLog` writes a line per client, or one line for many, and each traceback once.

Flower's loop counts the rounds of a resumed run from 1 again, and a strategy counts only the nodes
and replies that it is shown. `log_round` has the numbers of the whole run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, MutableSet, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedcor.core.text import lines, listed, one_line
from fedcor.flower.protocol import LOG, flower_round
from fedcor.rounds.record_line import RoundRecord

_MOST_LINES = 5  # clients with the same fault that have a line each
# Characters of a name, of a reason in a line, of a reason in full.
_LONGEST_NAME, _LONGEST_LINE, _LONGEST_TEXT = 40, 300, 4000
# Flower's form of an exception: its type and its text.
_WRAPPED = re.compile(r"^<class '([^']*)'>:<'(.*)'>$", re.DOTALL)
_CAUSE = "The above exception was the direct cause of the following exception:"


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


def log_round(record: RoundRecord, rounds: int, selector: str) -> None:
    """Log how a round ended.

    Args:
        record: Of the round.
        rounds: Of the whole run.
        selector: Its name.
    """
    chosen, delivered = len(set(record.selected)), len(set(record.participated))
    failed = f", {chosen - delivered} failed" if delivered < chosen else ""
    scores = {"test accuracy": record.test_accuracy, "test loss": record.test_loss}
    results = [f"{name} {value:.4g}" for name, value in scores.items() if math.isfinite(value)]
    LOG.info(
        f"fedcor round {flower_round(record.round)} of {rounds} ({selector}): "
        f"{delivered} of {counted(chosen, 'chosen client')} delivered{failed}"
        f"{'; ' if results else ''}{', '.join(results)}"
    )


@dataclass(frozen=True, order=True)
class _Client:
    number: int
    name: str


@dataclass
class FaultLog:
    """What is to be said of clients' faults, and what was said before. It lives for one start."""

    said: set[str] = field(default_factory=set)  # keys of other messages that were logged
    _faults: list[tuple[_Client, str, str]] = field(default_factory=list)  # who, kind, why
    # Who -> (faults in a row, the round before which it is left alone).
    _alone: dict[_Client, tuple[int, int]] = field(default_factory=dict)
    _said: set[tuple[int, int, str, str]] = field(default_factory=set)  # round, client, kind, why
    _known: set[tuple[str, str]] = field(default_factory=set)  # kinds and reasons shown in full

    def add(self, client: int, name: str, kind: str, why: str) -> None:
        """A client failed; the next `write` logs it."""
        self._faults.append((_Client(client, one_line(name)), kind, why))

    def add_alone(self, client: int, name: str, faults: int, until: int) -> None:
        """A client is left alone before the round `until`, after so many faults in a row."""
        self._alone[_Client(client, one_line(name))] = faults, until

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
        alone: dict[tuple[int, int], list[_Client]] = {}
        for client, sentence in sorted(self._alone.items()):
            alone.setdefault(sentence, []).append(client)
        for (faults, until), clients in alone.items():
            times = "once" if faults == 1 else f"{faults} times in a row"
            for who, _ in _who(clients):
                message = "round %d: %s failed %s: left alone until round %d"
                LOG.warning(message, number, who, times, flower_round(until))
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
