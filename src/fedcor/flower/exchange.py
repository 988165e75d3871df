"""One message to each of several clients at once, and their replies within a deadline; bytes and faults are counted."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping

from flwr.app import Message
from flwr.serverapp import Grid

from fedcor.flower.roster import Roster
from fedcor.flower.screen import UNREACHABLE, fault
from fedcor.flower.wire import LOG, payload_bytes

__all__ = ["Exchange", "send_and_receive"]

_FIRST_WAIT, _LONGEST_WAIT = 0.02, 1.0  # seconds between looks for replies


class Exchange:
    """The traffic of one round."""

    def __init__(self, grid: Grid, roster: Roster, round: int) -> None:
        self.grid, self.roster, self.round = grid, roster, round
        self.bytes_down = self.bytes_up = 0
        self.faults: Counter[str] = Counter()
        self.gone: set[int] = (
            set()
        )  # clients that could not be reached in this round: they are not waited for again

    def ask(self, messages: Mapping[int, Message], timeout: float) -> dict[int, Message]:
        """Client -> reply, of all who replied with content in time."""
        messages = {
            client: message for client, message in messages.items() if client not in self.gone
        }
        if not messages:
            return {}
        self.sent(messages.values())
        return self.received(
            messages, send_and_receive(self.grid, list(messages.values()), timeout)
        )

    def sent(self, messages: Iterable[Message]) -> None:
        self.bytes_down += sum(payload_bytes(message.content) for message in messages)

    def received(
        self, messages: Mapping[int, Message], replies: Iterable[Message]
    ) -> dict[int, Message]:
        """The replies by client, sorted. A dead node's error comes from the SuperLink, so replies are matched by message."""
        asked = {message.metadata.message_id: client for client, message in messages.items()}
        answers: dict[int, Message] = {}
        heard = set()
        for reply in replies:
            client = asked.get(reply.metadata.reply_to_message_id)
            if client is None or client in heard:
                continue
            heard.add(client)
            found = fault(reply)
            if found is not None:
                self.refuse(client, *found)
            else:
                answers[client] = reply
                self.bytes_up += payload_bytes(reply.content)
                self.roster.answered(client)
        for client in messages.keys() - heard:
            self.refuse(client, "late", "no reply within the deadline")
        return dict(sorted(answers.items()))

    def refuse(self, client: int, kind: str, why: str) -> None:
        self.faults[kind] += 1
        why = why if len(why) < 300 else f"{why[:300]}..."
        LOG.warning(
            "round %d: client %d (%s): %s: %s",
            self.round + 1,
            client,
            self.roster.names[client],
            kind,
            why,
        )
        if kind in UNREACHABLE and client not in self.gone:
            self.gone.add(client)
            self.roster.failed(client, self.round)


def send_and_receive(grid: Grid, messages: list[Message], timeout: float) -> list[Message]:
    """As Grid.send_and_receive, which looks for replies every three seconds: a question should not wait so long."""
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
