"""One message to each of several clients, and their replies within a deadline; all is counted."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from flwr.app import Message
from flwr.serverapp import Grid

from fedcor.flower.fault_log import FaultLog
from fedcor.flower.messages import says_missing
from fedcor.flower.quarantine import Task
from fedcor.flower.roster import Roster
from fedcor.flower.screen import UNREACHABLE, reply_fault
from fedcor.flower.wire import payload_bytes

__all__ = ["Exchange", "send_and_receive"]

_FIRST_WAIT, _LONGEST_WAIT = 0.02, 1.0  # seconds between looks for replies


class Exchange:
    """The traffic of one round, and what the record says of it."""

    def __init__(
        self, grid: Grid, roster: Roster, round: int, fault_log: FaultLog | None = None
    ) -> None:
        self.grid, self.roster, self.round = grid, roster, round
        self._fault_log = FaultLog() if fault_log is None else fault_log
        self.bytes_down = self.bytes_up = 0
        self.probed = 0  # losses that clients were asked for
        self.refused = 0  # answers and updates that came, but cannot be used
        self.refused_updates: dict[str, list[int]] = {}  # kind of fault -> clients
        self.clipped: set[int] = set()  # clients whose update was scaled down
        self.capped: set[int] = set()  # clients that were not believed how many samples they have
        self.rolled_back = 0
        self.faults: Counter[str] = Counter()
        self.last_fault: dict[int, tuple[str, str]] = {}  # client -> kind and reason
        # Clients that could not be reached in this round: nobody waits for them a second time.
        self.gone: set[int] = set()

    def ask(
        self, messages: Mapping[int, Message], timeout: float, *, task: Task
    ) -> dict[int, Message]:
        """Client -> reply, of all who replied with content in time."""
        messages = {
            client: message for client, message in messages.items() if client not in self.gone
        }
        if not messages:
            return {}
        self.count_sent(messages.values())
        replies = send_and_receive(self.grid, list(messages.values()), timeout)
        return self.match(messages, replies, task=task)

    def count_sent(self, messages: Iterable[Message]) -> None:
        """Count the bytes of messages that go out."""
        self.bytes_down += sum(payload_bytes(message.content) for message in messages)

    def match(
        self, messages: Mapping[int, Message], replies: Iterable[Message], *, task: Task
    ) -> dict[int, Message]:
        """The replies by client, sorted; a missing one is a fault.

        A dead node's error comes from the SuperLink: replies are matched by message, not by sender.
        """
        asked = {message.metadata.message_id: client for client, message in messages.items()}
        answers: dict[int, Message] = {}
        heard = set()
        for reply in replies:
            client = asked.get(reply.metadata.reply_to_message_id)
            if client is None or client in heard:
                continue
            heard.add(client)
            fault = reply_fault(reply)
            if fault is not None:
                self.count_fault(client, *fault, task=task)
            else:
                answers[client] = reply
                self.bytes_up += payload_bytes(reply.content)
        for client in sorted(messages.keys() - heard):
            self.count_fault(client, "late", "no reply within the deadline", task=task)
        return dict(sorted(answers.items()))

    def resend(
        self,
        sent: Mapping[int, Message],
        replies: Mapping[int, Message],
        with_model: Callable[[int], Message],
        end: float,
        *,
        task: Task,
    ) -> tuple[dict[int, Message], set[int]]:
        """The replies, after whoever lost a model that was left out got a message with it.

        Returns (client -> reply, the clients that had lost it). Replies are awaited until `end`.
        """
        lost = {client for client, reply in replies.items() if says_missing(sent[client], reply)}
        messages = {client: with_model(client) for client in sorted(lost)}
        late = self.ask(messages, max(0.0, end - time.monotonic()), task=task)
        kept = {client: reply for client, reply in replies.items() if client not in lost}
        return dict(sorted({**kept, **late}.items())), lost

    def accept(self, clients: Iterable[int], *, task: Task) -> None:
        """What these clients sent can be used: earlier faults at this task are forgotten."""
        for client in clients:
            self.roster.succeeded(client, task)

    def refuse(self, client: int, kind: str, why: str, *, task: Task) -> None:
        """A client's answer or update came, but cannot be used."""
        self.refused += 1
        if task == "train":
            clients = {*self.refused_updates.get(kind, []), client}
            self.refused_updates[kind] = sorted(clients)
        self.count_fault(client, kind, why, task=task)

    def count_fault(self, client: int, kind: str, why: str, *, task: Task) -> None:
        """Count a fault; a client with several in a row is left alone for a while."""
        self.faults[kind] += 1
        self.last_fault[client] = kind, why
        roster, name = self.roster, self.roster.names[client]
        self._fault_log.add(client, name, kind, why)
        if kind in UNREACHABLE:
            if client in self.gone:
                return
            self.gone.add(client)
        if roster.failed(client, self.round, task, replied=kind not in UNREACHABLE):
            faults, until = roster.quarantine.faults(client, task), roster.quarantine.until
            chosen = until(client) < until(client, task)  # it may be, all the same
            self._fault_log.add_alone(client, name, faults, until(client, task), chosen=chosen)

    def log_faults(self) -> None:
        """Log the faults that were counted since it was last called."""
        self._fault_log.write(self.round)


def send_and_receive(grid: Grid, messages: list[Message], timeout: float) -> list[Message]:
    """As Grid.send_and_receive, which looks for replies only every three seconds."""
    end = time.monotonic() + timeout
    pending = {identifier for identifier in grid.push_messages(messages) if identifier}
    replies: list[Message] = []
    wait = _FIRST_WAIT
    while pending:
        arrived = list(grid.pull_messages(sorted(pending)))
        replies += arrived
        pending -= {reply.metadata.reply_to_message_id for reply in arrived}
        left = end - time.monotonic()
        if not pending or left <= 0:
            break
        time.sleep(min(wait, left))
        wait = _FIRST_WAIT if arrived else min(2 * wait, _LONGEST_WAIT)
    return replies
