"""Wait for nodes, ask unknown ones for their identity, and say which clients may be chosen."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, MutableSet, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version

from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from fedcor.core.text import listed, one_line
from fedcor.core.types import IntArray, selector_traits
from fedcor.flower.client_registry import Claim
from fedcor.flower.exchange import Exchange, send_and_receive
from fedcor.flower.federation_state import FederationState, eligible_clients, wanted_tags
from fedcor.flower.logs import counted, log_once
from fedcor.flower.protocol import (
    LOG,
    NOTE,
    PROTOCOL,
    SAYS_KEYS,
    ErrorCode,
    flower_round,
    identity_note,
    payload_bytes,
    read_tags,
)
from fedcor.flower.reply_validation import UNREACHABLE, reply_fault
from fedcor.flower.settings import RoundSettings

_FIRST_PAUSE, _PAUSE = 0.2, 1.0  # seconds between looks, before the first round and later
_SAY_AGAIN = 10.0  # seconds after which it is said once more that we wait
_LONGEST_REASON = 200  # characters in the log


def reachable_clients(
    settings: RoundSettings, state: FederationState, exchange: Exchange, *, retry: bool = False
) -> IntArray:
    """Sorted clients that may be asked or chosen in this round.

    The first round waits for the wanted number of nodes, and a resumed run for as many as it knows
    (at most `probe_timeout` seconds). Later rounds wait for anyone.
    """
    roster = state.roster
    wanted = 1 if state.assembled else max(settings.wait_for, len(roster))
    waiting = _Waiting(settings, wanted)
    patience = settings.probe_timeout if len(roster) else float("inf")
    while True:
        nodes = list(exchange.grid.get_node_ids())
        if len(nodes) >= wanted or (nodes and waiting.seconds > patience):
            _enrol(settings, state, exchange, nodes)
            eligible = eligible_clients(settings.selection.rules, roster)
            available = roster.reachable(nodes, exchange.round, eligible)
            if len(available):
                state.assembled = True
                return available
            reachable = len(roster.reachable(nodes, 0))
            if reachable:
                waiting.nobody_eligible(reachable, flower_round(exchange.round))
            else:
                waiting.nobody_answers(len(nodes), flower_round(exchange.round))
            roster.forget_unidentified()
        else:
            waiting.too_few(len(nodes))
        time.sleep(_PAUSE if retry or state.assembled else _FIRST_PAUSE)


class _Waiting:
    """Logs that nodes are waited for: at once, when their number changes, and every ten seconds."""

    def __init__(self, settings: RoundSettings, wanted: int) -> None:
        self._settings, self._wanted = settings, wanted
        self._start = time.monotonic()
        self._connected = -1  # that was said last
        self._said = 0.0  # when, in seconds
        self._advised = False

    @property
    def seconds(self) -> float:
        """For which we have waited."""
        return time.monotonic() - self._start

    def too_few(self, connected: int) -> None:
        """Fewer nodes are connected than are needed."""
        if not self._due(connected):
            return
        advice = ""
        if self.seconds >= _SAY_AGAIN and connected and not self._advised:
            self._advised, advice = True, self._advice(connected)
        message = "waiting for nodes: %d connected, %d needed (%d s)%s"
        LOG.info(message, connected, self._wanted, self.seconds, advice)

    def nobody_answers(self, connected: int, number: int) -> None:
        """Enough nodes are connected, but none reports its identity."""
        if self._due(connected):
            message = "round %d: no answer to the question for the identity from %s (%d s)"
            LOG.error(message, number, counted(connected, "node"), self.seconds)

    def nobody_eligible(self, reachable: int, number: int) -> None:
        """Clients can be reached, but none is eligible by the rules."""
        if self._due(reachable):
            message = "round %d: no eligible client among %s that can be reached: waiting"
            LOG.error(message, number, counted(reachable, "client"))

    def _due(self, connected: int) -> bool:
        """Whether it is time to say something."""
        due = connected != self._connected or self.seconds - self._said >= _SAY_AGAIN
        if due:
            self._connected, self._said = connected, self.seconds
        return due

    def _advice(self, connected: int) -> str:
        """How to begin with those who are here."""
        chosen = selector_traits(self._settings.selector).clients_per_round
        if self._settings.selection.wait_for is None and chosen == self._wanted:
            return f": each round has {chosen} clients. wait_for={connected} begins with fewer"
        return f". wait_for={connected} begins with those who are here"


def _enrol(
    settings: RoundSettings, state: FederationState, exchange: Exchange, nodes: list[int]
) -> None:
    """Ask the unknown ones of `nodes` who they are, and take them in."""
    roster, number = state.roster, flower_round(exchange.round)
    unknown = roster.unknown(nodes, exchange.round)
    if not unknown:
        return
    if roster.names and state.assembled:
        LOG.info("round %d: %s", number, counted(len(unknown), "new node"))
    by_key = settings.selection.identity == "key"
    tags = wanted_tags(settings.selection.rules)
    answers = introduce(exchange, unknown, settings.probe_timeout, by_key=by_key, tags=tags)
    answers.log_doubts(state.said, by_key=by_key)
    roster.reachable(nodes, exchange.round)  # who has left is nobody's rival
    roster.enrol(answers.claims)
    silent = sorted(set(unknown) - answers.claims.keys())
    for node in silent:
        roster.unidentified(node, exchange.round)
    if silent:
        nodes_text = listed([str(node) for node in silent])
        message = "round %d: %d of %s did not answer the question for their identity: %s"
        LOG.warning(message, number, len(silent), counted(len(unknown), "new node"), nodes_text)


@dataclass
class Introductions:
    """What unknown nodes answered.

    Attributes:
        claims: Node -> who it is. A node that does not answer at all is left out.
        rejected: Node -> why a mod of its app rejected the question.
        not_understood: Node without our mod, or with another one before it -> what it replied.
        foreign: Node -> the version of fedcor on it, where it speaks another protocol.
    """

    claims: dict[int, Claim] = field(default_factory=dict)
    rejected: dict[int, str] = field(default_factory=dict)
    not_understood: dict[int, str] = field(default_factory=dict)
    foreign: dict[int, str] = field(default_factory=dict)

    def log_doubts(self, said: MutableSet[str], *, by_key: bool) -> None:
        """Log what should be changed in the ClientApp; each kind of doubt is in `said` after it."""
        met = len(self.claims)
        loss = "Every message to them carries the model"
        if not by_key:
            loss += ", and they are known by their nodes' names or keys, which a restart may change"
        advice = "ClientApp(mods=[answers_probes(), ...])"
        if self.rejected:
            log_once(
                said,
                "rejected",
                f"{len(self.rejected)} of {counted(met, 'node')}: a mod rejects the question for "
                f"the client's identity ({_any_of(self.rejected)}). {loss}. "
                f"Put answers_probes() first: {advice}",
            )
        if self.not_understood:
            log_once(
                said,
                "not understood",
                f"{len(self.not_understood)} of {counted(met, 'node')}: the app does not answer "
                f"the question for the client's identity ({_any_of(self.not_understood)}): it has "
                f"no mod answers_probes(), or another mod comes before it. {loss}. "
                f"Put it first: {advice}",
            )
        if self.foreign:
            log_once(
                said,
                "foreign",
                f"{len(self.foreign)} of {counted(met, 'node')} "
                f"({self.claims[next(iter(self.foreign))].name}): fedcor "
                f"{_any_of(self.foreign)} is installed, whose messages differ from those of fedcor "
                f"{version('fedcor')} on this server: install the same version on both sides",
            )


def introduce(
    exchange: Exchange,
    nodes: list[int],
    timeout: float,
    *,
    by_key: bool = False,
    tags: Sequence[str] = (),
) -> Introductions:
    """Who `nodes` are: as they say, or `by_key` as their SuperLink knows them.

    The question is a train message without a model. Our mod answers it before the app sees it. A
    node that does not understand it is known by its node's name or key. One that does not answer at
    all is left out. `tags` are those that they are asked for.
    """
    content = RecordDict({NOTE: identity_note(tags)})
    messages = [Message(content, node, MessageType.TRAIN, ttl=timeout) for node in nodes]
    exchange.count_sent(messages)
    replies = send_and_receive(exchange.grid, messages, timeout)
    asked = {
        message.metadata.message_id: node for message, node in zip(messages, nodes, strict=True)
    }
    answers = Introductions()
    for reply in replies:
        node = asked.get(reply.metadata.reply_to_message_id)
        fault = reply_fault(reply)
        if node is None or (fault is not None and fault[0] in UNREACHABLE):
            continue
        note = None if fault is not None else reply.content.config_records.get(NOTE)
        if fault is None:
            exchange.bytes_up += payload_bytes(reply.content)
        vouched = _vouched_name(exchange, node) if by_key or _nameless(note) else ""
        if note is not None:
            answers.claims[node] = _claim(note, vouched)
            if str(note.get("protocol", PROTOCOL)).split(".")[0] != PROTOCOL.split(".")[0]:
                answers.foreign[node] = _readable(str(note.get("fedcor", "of another version")))
            continue
        answers.claims[node] = Claim(vouched, mod=False)
        rejected = reply.has_error() and reply.error.code == ErrorCode.MOD_FAILED_PRECONDITION
        kind = answers.rejected if rejected else answers.not_understood
        kind[node] = _last_line("a reply without a note" if fault is None else fault[1])
    return answers


def _nameless(note: ConfigRecord | None) -> bool:
    """Whether the node does not say who it is. An id alone would be new after a restart."""
    return note is None or not (_own_name(note) or isinstance(note.get("partition"), int))


def _own_name(note: ConfigRecord) -> str:
    name = note.get("name")
    return _readable(name) if isinstance(name, str) else ""


def _claim(note: ConfigRecord, vouched: str) -> Claim:
    """What a node's note says, under its vouched name where that is to be used."""
    name, examples = vouched or _own_name(note), note.get("examples")
    name = name or f"partition-{note.get('partition')!r}"
    if not isinstance(examples, int) or isinstance(examples, bool):
        examples = None
    return Claim(name, examples, tags=read_tags(note))


def _vouched_name(exchange: Exchange, node: int) -> str:
    """The node's name or its key's fingerprint, which the SuperLink vouches for; else its id."""
    known = exchange.grid.get_nodes() if SAYS_KEYS else []
    info = next((info for info in known if info.node_id == node), None)
    name, key = getattr(info, "name", ""), bytes(getattr(info, "public_key", b""))
    fingerprint = f"key-{hashlib.sha256(key).hexdigest()[:32]}" if key else f"node-{node}"
    return _readable(name) or fingerprint


def _readable(name: str) -> str:
    """On one line, and not too long for a table. Names that differ in what is not seen still do."""
    return one_line(name.strip()[:200], None)[:200].strip()


def _any_of(said: Mapping[int, str]) -> str:
    """What one of several nodes said."""
    return next(iter(said.values()))


def _last_line(reason: str) -> str:
    """Of a traceback, what was raised."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    return one_line(lines[-1], _LONGEST_REASON) if lines else "no reason given"
