"""The messages of one round: to some nodes, without models that they hold, within a deadline.

`SomeNodes` is a grid restricted to selected nodes, so that a strategy samples only them. `Holders`
says which clients hold which model, so that `slim` can leave it out of a message. `Exchange` sends
messages, matches replies to clients, and counts bytes and faults.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from flwr.app import ArrayRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedcor.core.text import listed, one_line
from fedcor.core.types import FloatArray, State
from fedcor.flower.logs import FaultLog, log_once
from fedcor.flower.protocol import MISSING, NOTE, flower_round, model_note, payload_bytes
from fedcor.flower.replies import UNREACHABLE, Reply, Task, left_out, reply_fault
from fedcor.flower.strategy_memory import wrapped
from fedcor.rounds.backoff import count_faults

if TYPE_CHECKING:
    from fedcor.flower.protocol import NodeInfo, Run

_MINIMA = ("min_train_nodes", "min_evaluate_nodes", "min_available_nodes")
# A client's weight in the mean is at most so many times the lower median of all clients'.
MOST_MEDIANS = 1000.0
_FIRST_WAIT, _LONGEST_WAIT = 0.02, 1.0  # seconds between looks for replies


class SomeNodes(Grid):
    """A grid on which only some nodes can be seen; all, unless `nodes` are given."""

    def __init__(self, grid: Grid, nodes: list[int] | None = None) -> None:
        self._grid, self._nodes = grid, nodes

    def get_node_ids(self) -> Iterable[int]:
        """The ids of these nodes."""
        return list(self._grid.get_node_ids() if self._nodes is None else self._nodes)

    def get_nodes(self) -> Iterable[NodeInfo]:
        """What the grid knows of these nodes."""
        nodes = {*self.get_node_ids()}
        return [node for node in self._grid.get_nodes() if node.node_id in nodes]

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


class EnoughGrid(SomeNodes):
    """A grid on which Flower's loop waits for enough trainings, not for all.

    Attributes:
        enough: How many of the next train messages must have come back; None for all.
    """

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        self.enough: int | None = None

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """As the whole grid, until there are enough replies."""
        messages = list(messages)
        trains = [one.metadata.message_type == MessageType.TRAIN for one in messages]
        if self.enough is None or timeout is None or not any(trains):
            return super().send_and_receive(messages, timeout=timeout)
        return send_and_receive(self._grid, messages, timeout, self.enough)


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
        """The clients that hold `version`; a candidate that is new takes the place of others."""
        if version not in self._clients:
            self._clients = {self.current: self._clients[self.current], version: set()}
        return self._clients[version]

    @property
    def versions(self) -> list[str]:
        """The versions that clients keep, sorted."""
        return sorted(self._clients)

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
    """The traffic of one round, and what the record says of it.

    Args:
        grid: The nodes.
        names: Client -> its name.
        round: The number of the round, from 0.
        fault_log: Where faults are logged.
    """

    def __init__(
        self, grid: Grid, names: Sequence[str], round: int, fault_log: FaultLog | None = None
    ) -> None:
        self.grid, self.round, self._names = grid, round, names
        self._fault_log = FaultLog() if fault_log is None else fault_log
        self.bytes_down = self.bytes_up = 0
        self.probed = 0  # losses that clients were asked for
        self.refused = 0  # answers and updates that came, but cannot be used
        self.refused_updates: dict[str, list[int]] = {}  # kind of fault -> clients
        self.clipped: set[int] = set()  # clients whose update was scaled down
        self.capped: set[int] = set()  # clients whose weight was capped
        self.late: set[int] = set()  # clients whose training was not waited for
        self.faults: Counter[str] = Counter()
        self.last_fault: dict[int, tuple[str, str]] = {}  # client -> kind and reason
        self._failed: dict[int, bool] = {}  # client that failed -> whether it replied
        self._usable: set[int] = set()  # clients that sent something usable
        # Clients that could not be reached in this round: nobody waits for them a second time.
        self.gone: set[int] = set()

    def ask(
        self,
        messages: Mapping[int, Message],
        timeout: float,
        *,
        task: Task,
        enough: int | None = None,
    ) -> dict[int, Message]:
        """Client -> reply, of all who replied with content in time; or `enough` of them."""
        messages = {
            client: message for client, message in messages.items() if client not in self.gone
        }
        if not messages:
            return {}
        self.count_sent(messages.values())
        replies = send_and_receive(self.grid, list(messages.values()), timeout, enough)
        return self.match(messages, replies, task=task, enough=enough)

    def count_sent(self, messages: Iterable[Message]) -> None:
        """Count the bytes of messages that go out."""
        self.bytes_down += sum(payload_bytes(message.content) for message in messages)

    def match(
        self,
        messages: Mapping[int, Message],
        replies: Iterable[Message],
        *,
        task: Task,
        enough: int | None = None,
    ) -> dict[int, Message]:
        """The replies by client, sorted; a missing one is a fault, unless `enough` came.

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
        missing = sorted(messages.keys() - heard)
        if enough is not None and len(answers) >= enough:
            self.late.update(missing)
            missing = []
        for client in missing:
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

    def accept(self, clients: Iterable[int]) -> None:
        """These clients sent something usable."""
        self._usable.update(clients)

    def refuse(self, client: int, kind: str, why: str, *, task: Task) -> None:
        """A client's answer or update came, but cannot be used."""
        self.refused += 1
        if task == "train":
            clients = {*self.refused_updates.get(kind, []), client}
            self.refused_updates[kind] = sorted(clients)
        self.count_fault(client, kind, why, task=task)

    def count_fault(self, client: int, kind: str, why: str, *, task: Task) -> None:
        """Count a fault. At the strategy's own evaluation it does not lead to a back-off."""
        self.faults[kind] += 1
        self.last_fault[client] = kind, why
        self._fault_log.add(client, self._names[client], kind, why)
        replied = kind not in UNREACHABLE
        if not replied:
            self.gone.add(client)
        if task != "evaluate":
            self._failed[client] = replied and self._failed.get(client, True)

    def back_off(self, state: State) -> State:
        """The memory of clients that fail again and again, after the trainings of the round."""
        after = count_faults(state, self.round, self._failed, self._usable)
        for client in sorted(self._failed):
            faults, until = int(after["faults"][client]), int(after["until"][client])
            if until > self.round + 1:
                self._fault_log.add_alone(client, self._names[client], faults, until)
        self.log_faults()
        return after

    def cap(
        self, replies: Mapping[int, Reply], key: str, known: Mapping[int, float]
    ) -> dict[int, Reply]:
        """The replies, none with a weight far beyond the others'.

        Args:
            replies: Usable ones, by client.
            key: The metric that holds the weight.
            known: Client -> its size as far as it is known, of all clients to compare with.
        """
        said = {**known, **{client: reply.weight for client, reply in replies.items()}}
        capped = dict(zip(said, cap_sizes(np.array(list(said.values()))).tolist(), strict=True))
        used = dict(replies)
        for client, reply in replies.items():
            if capped[client] >= reply.weight:
                continue
            used[client] = reply.weighing(capped[client], key)
            self.capped.add(client)
            name, metric = one_line(self._names[client], 40), one_line(key, 40)
            self.log_once(
                f"capped {client}",
                f"round {flower_round(self.round)}: client {client} ({name}) reports "
                f"{metric} = {reply.weight:g}: {used[client].weight:g} is used, which is "
                f"{MOST_MEDIANS:g} times the median of all clients (this is said once per client)",
            )
        return used

    def log_left_out(
        self, replies: Mapping[int, Reply], loss_keys: tuple[str, ...], task: Task
    ) -> None:
        """Log what the strategy is not given of these replies, each metric and record once."""
        for part, (where, clients) in left_out(replies, loss_keys).items():
            who = listed([f"{k} ({one_line(self._names[k], 40)})" for k in clients])
            self.log_once(
                f"{task} {part}",
                f"round {flower_round(self.round)}: the {part} is not in all {task} replies "
                f"({where} in those of clients {who}): it is left out of what the strategy "
                "aggregates (this is logged once)",
            )

    def log_once(self, key: str, message: str) -> None:
        """Log a warning, unless this start has logged it before."""
        log_once(self._fault_log.said, key, message)

    def log_faults(self) -> None:
        """Log the faults that were counted since it was last called."""
        self._fault_log.write(self.round)


def send_and_receive(
    grid: Grid, messages: list[Message], timeout: float, enough: int | None = None
) -> list[Message]:
    """As Grid.send_and_receive, which looks for replies only every three seconds.

    With `enough`, it returns when so many replies with content have come.
    """
    end = time.monotonic() + timeout
    pending = {identifier for identifier in grid.push_messages(messages) if identifier}
    replies: list[Message] = []
    wait = _FIRST_WAIT
    while pending:
        arrived = list(grid.pull_messages(sorted(pending)))
        replies += arrived
        pending -= {reply.metadata.reply_to_message_id for reply in arrived}
        left = end - time.monotonic()
        came = sum(reply_fault(reply) is None for reply in replies) if enough else 0
        if not pending or left <= 0 or (enough and came >= enough):
            break
        time.sleep(min(wait, left))
        wait = _FIRST_WAIT if arrived else min(2 * wait, _LONGEST_WAIT)
    return replies


def cap_sizes(said: FloatArray) -> FloatArray:
    """(N,) what clients say, NaN where nothing is known, within the bound of the population."""
    known = np.sort(said[np.isfinite(said)])
    if not len(known):
        return said
    capped: FloatArray = np.minimum(said, MOST_MEDIANS * known[(len(known) - 1) // 2])
    return capped
