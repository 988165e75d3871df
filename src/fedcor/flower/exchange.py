"""The messages of one round: to some nodes, without models that they hold, within a deadline.

`SomeNodes` is a grid restricted to selected nodes, so that a strategy samples only them. `Holders`
says which clients hold which model, so that `slim` can leave it out of a message. `Exchange` sends
messages, matches replies to clients, and counts bytes and faults. The weights in replies are capped
here as well.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedcor.core.text import one_line
from fedcor.flower.client_registry import SIZE, Roster, Task, cap_sizes
from fedcor.flower.logs import FaultLog, log_once
from fedcor.flower.protocol import MISSING, NOTE, flower_round, model_note, payload_bytes
from fedcor.flower.reply_validation import UNREACHABLE, main_metrics, number, reply_fault
from fedcor.flower.strategy_memory import wrapped

if TYPE_CHECKING:
    from fedcor.flower.protocol import NodeInfo, Run

_MINIMA = ("min_train_nodes", "min_evaluate_nodes", "min_available_nodes")
_FIRST_WAIT, _LONGEST_WAIT = 0.02, 1.0  # seconds between looks for replies


class SomeNodes(Grid):
    """A grid on which only some nodes can be seen."""

    def __init__(self, grid: Grid, nodes: list[int]) -> None:
        self._grid, self._nodes = grid, nodes

    def get_node_ids(self) -> Iterable[int]:
        """The ids of these nodes."""
        return list(self._nodes)

    def get_nodes(self) -> Iterable[NodeInfo]:
        """What the grid knows of these nodes."""
        return [node for node in self._grid.get_nodes() if node.node_id in self._nodes]

    def set_run(self, run: Run) -> None:
        """As the whole grid."""
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        """As the whole grid."""
        return self._grid.run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """As the whole grid."""
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """As the whole grid."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """As the whole grid."""
        return self._grid.pull_messages(message_ids)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """As the whole grid."""
        return self._grid.send_and_receive(messages, timeout=timeout)


@contextmanager
def limited(strategy: Strategy, nodes: int, *, everyone: bool = False) -> Iterator[None]:
    """Within it, `strategy` waits for no more than `nodes` nodes: otherwise it would wait forever.

    With `everyone`, it also takes each node, whatever fraction it would sample.
    """
    changed = []
    for _, one in wrapped(strategy):
        for name in (*_MINIMA, "fraction_train"):
            if not hasattr(one, name) or (name == "fraction_train" and not everyone):
                continue
            value = getattr(one, name)
            changed.append((one, name, value))
            if name == "fraction_train":
                setattr(one, name, 1.0)
            else:
                setattr(one, name, nodes if everyone else min(value, nodes))
    try:
        yield
    finally:
        for one, name, value in changed:
            setattr(one, name, value)


class Holders:
    """Which clients hold which version of the model. Clients are asked to keep these versions."""

    def __init__(self, current: str, clients: Iterable[int]) -> None:
        self.current = current
        self._clients = {current: set(clients)}

    def __getitem__(self, version: str) -> set[int]:
        return self._clients[version]

    @property
    def versions(self) -> list[str]:
        """The versions that clients keep, sorted."""
        return sorted(self._clients)

    def try_candidate(self, version: str) -> None:
        """Keep the current model and this candidate, which nobody holds yet; forget others."""
        self._clients = {self.current: self._clients[self.current], version: set()}

    def of(self, version: str) -> frozenset[int]:
        """Who holds `version`."""
        return frozenset(self._clients.get(version, ()))


def slim(
    message: Message,
    model: ArrayRecord,
    version: str,
    client: int,
    holders: Holders,
    *,
    remember: bool = False,
) -> Message:
    """The message without `model` for a client that holds it.

    With `remember`, a client that does not hold it is asked to keep it.
    """
    held = client in holders[version]
    keys = [key for key, record in message.content.array_records.items() if record is model]
    if len(keys) != 1 or not (held or remember):
        return message
    content = {key: record for key, record in message.content.items() if key != keys[0] or not held}
    note = model_note(keys[0], version, holders.versions)
    return renewed(message, RecordDict({**content, NOTE: note}))


def renewed(message: Message, content: RecordDict | None = None) -> Message:
    """A new message to the same node, with the same content unless another is given."""
    about = message.metadata
    content = RecordDict(dict(message.content.items())) if content is None else content
    return Message(
        content, about.dst_node_id, about.message_type, ttl=about.ttl, group_id=about.group_id
    )


def says_missing(sent: Message, reply: Message) -> bool:
    """Whether the client has lost a model that was left out; the note is removed from its reply.

    A client that was sent the model and still says so has not replied with what was asked for.
    """
    note = reply.content.config_records.get(NOTE)
    if note is None:
        return False
    del reply.content[NOTE]
    return note.get(MISSING) is True and NOTE in sent.content and not sent.content.array_records


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

    def log_once(self, key: str, message: str) -> None:
        """Log a warning, unless this start has logged it before."""
        log_once(self._fault_log.said, key, message)

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


def cap_replies(exchange: Exchange, replies: Mapping[int, RecordDict], key: str) -> None:
    """Bound the weights of clients' trained models by the population's and by their own past.

    Args:
        exchange: Counts who is not believed.
        replies: Client -> its usable reply; its metric `key` is changed in place.
        key: The metric that holds the weight.
    """
    reported = _said(replies, key)
    _use(exchange, replies, key, exchange.roster.believe(reported, sizes=key == SIZE))


def cap_evaluations(exchange: Exchange, replies: Mapping[int, RecordDict], key: str) -> None:
    """As `cap_replies`, but by those of this round alone: a client may evaluate on other data."""
    reported = _said(replies, key)
    capped = cap_sizes(np.array(list(reported.values())))
    _use(exchange, replies, key, dict(zip(reported, capped.tolist(), strict=True)))


def _said(replies: Mapping[int, RecordDict], key: str) -> dict[int, float]:
    return {client: number(main_metrics(content), key) for client, content in replies.items()}


def _use(
    exchange: Exchange,
    replies: Mapping[int, RecordDict],
    key: str,
    believed: Mapping[int, float],
) -> None:
    roster = exchange.roster
    for client, weight in believed.items():
        metrics = main_metrics(replies[client])
        reported = number(metrics, key)
        if weight >= reported:
            continue
        metrics[key] = max(1, int(weight)) if isinstance(metrics[key], int) else weight
        exchange.capped.add(client)
        name, metric = one_line(roster.names[client], 40), one_line(key, 40)
        log_once(
            roster.not_believed,
            client,
            f"round {flower_round(exchange.round)}: client {client} ({name}) reports "
            f"{metric} = {reported:g}: {number(metrics, key):g} is used, by what others report and "
            "what it reported before (this is said once per client)",
        )
