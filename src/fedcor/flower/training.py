"""Training in one attempt at a round: who was asked, who delivered, and the strategy's aggregate.

The strategy's own configure_train and aggregate_train do all the configuring and averaging. They
may be called several times in a round, for candidates and for the choice; each call finds the
strategy as it was before. Nothing is aggregated twice: a candidate that is chosen becomes the model
as it is, since an aggregation that draws noise would make another one of the same results.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedcor.core.errors import FedcorError, blame
from fedcor.core.text import listed, one_line
from fedcor.core.types import FloatArray, IntArray, Population, State, selector_traits
from fedcor.flower.client_registry import Task
from fedcor.flower.exchange import Exchange, Holders, SomeNodes, cap_replies, limited, renewed, slim
from fedcor.flower.federation_state import CurrentModel, eligible_clients
from fedcor.flower.optimiser_strategy import Company, introduced
from fedcor.flower.protocol import LOG, flower_round
from fedcor.flower.reply_schema import log_left_out, refused_replies, with_common_parts
from fedcor.flower.reply_validation import (
    Unusable,
    clean_model,
    clean_trees,
    main_metrics,
    number,
    numbers_fault,
    trees_fault,
    trusted_model,
    unusable_loss,
    usual_bytes,
)
from fedcor.flower.settings import RoundSettings
from fedcor.flower.strategy_memory import Candidate, Memory, adopt, restore, snapshot, trial
from fedcor.flower.updates import JudgedReplies, known_rate
from fedcor.rounds.aggregation import members
from fedcor.rounds.defence.model_health import Condition, Signs
from fedcor.rounds.defence.update_norms import PARTS, NormLimits, judge, no_norms, remember

# The clients of a selection, sorted, and those of them whose results there are. One that was drawn
# twice is in both twice.
_Key: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
_ENOUGH = 2  # clients, to clear a model, or to say that the past is wrong


@dataclass(frozen=True)
class RoundStart:
    """What every attempt at a round starts from."""

    arrays: ArrayRecord  # the model w^t
    config: ConfigRecord  # Flower's train configuration
    memory: Memory  # the strategy, before it was asked to configure this round


class Training:
    """Asks clients to train, and keeps every usable result: whoever trained is not asked twice."""

    def __init__(
        self,
        settings: RoundSettings,
        exchange: Exchange,
        start: RoundStart,
        model: CurrentModel,
        *,
        norms: State,
        good: ArrayRecord | None = None,
    ) -> None:
        self.settings, self.exchange, self.start = settings, exchange, start
        self.model = {name: array.numpy() for name, array in start.arrays.items()}
        self._trusted = trusted_model(self.model, good)
        self.holders = Holders(model.version, model.holders)
        self.replies = model.replies
        self.config = start.config  # as the strategy left it after its last call
        self.results: dict[int, Message] = {}  # client -> its usable reply, as it is used
        limits = settings.selection.defence.norm_limits
        self.judged = JudgedReplies(limits, norms, self.model, settings.plain)
        self.doubters: set[int] = set()  # clients whose update was of unusable numbers
        self._candidates: dict[_Key, Candidate] = {}
        self._requests: dict[int, Message] = {}  # as the strategy made them, with the model
        self._sent: dict[int, Message] = {}  # by the caller of `request`
        self._sent_at = 0.0

    def train(self, selection: IntArray) -> None:
        """Have those of `selection` train who were not asked yet."""
        messages = self._configure(selection)
        end = time.monotonic() + self.settings.train_timeout
        replies = self.exchange.ask(messages, self.settings.train_timeout, task="train")
        self._take(messages, replies, end)

    def request(self, selection: IntArray) -> list[Message]:
        """As `train`, but the caller sends the messages, and brings the replies to `receive`."""
        # The candidate of this selection is there: everyone was asked, and configuring anew would
        # draw a second time in a strategy that draws.
        aggregated = self._key(selection) in self._candidates
        messages = {} if aggregated else self._configure(selection)
        gone = self.exchange.gone
        self._sent = {client: m for client, m in messages.items() if client not in gone}
        self._sent_at = time.monotonic()
        self.exchange.count_sent(self._sent.values())
        return list(self._sent.values())

    def receive(self, replies: Iterable[Message]) -> None:
        """Take the replies to `request`."""
        end = self._sent_at + self.settings.train_timeout
        self._take(self._sent, self.exchange.match(self._sent, replies, task="train"), end)

    def delivered(self, selection: IntArray) -> IntArray:
        """(m,) sorted clients of `selection` whose results can be averaged together."""
        wanted = sorted(set(selection.tolist()))
        results = {client: self.results[client] for client in wanted if client in self.results}
        contents = {client: reply.content for client, reply in results.items()}
        loss_keys, named = self.settings.loss_keys, self.settings.named_metrics
        for client, why in refused_replies(contents, needed=named, loss_keys=loss_keys).items():
            self.exchange.refuse(client, "malformed", why, task="train")
            del self.results[client], results[client], contents[client]
        log_left_out(self.exchange, contents, loss_keys)
        self.exchange.accept(results, task="train")
        return np.array(list(results), dtype=np.int64)

    def metrics(self, clients: IntArray) -> list[MetricRecord]:
        """What each of these clients, who delivered, says of its training."""
        return [main_metrics(self.results[client].content) for client in clients.tolist()]

    def candidate(self, selection: IntArray) -> ArrayRecord | None:
        """The model that `selection` would make; the strategy forgets that it was asked."""
        if not len(self.delivered(selection)):
            return None
        key, strategy = self._key(selection), self.settings.strategy
        if key not in self._candidates:
            with trial(strategy):
                arrays, metrics = self._aggregate(selection)
                candidate = Candidate(arrays, metrics, snapshot(strategy), self.config)
            self._candidates[key] = candidate
        return self._candidates[key].arrays

    def aggregate(self, selection: IntArray) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """What the strategy makes of the results of `selection`: the candidate, if there is one."""
        candidate = self._candidates.get(self._key(selection))
        self._candidates = {}
        round, strategy = flower_round(self.exchange.round), self.settings.strategy
        if candidate is None:
            arrays, metrics = self._aggregate(selection)
        else:
            adopt(strategy, candidate, round)
            self.config, arrays, metrics = candidate.config, candidate.arrays, candidate.metrics
        if arrays is None:
            message = "round %d: %s made no model of the replies: the model stays as it is"
            LOG.warning(message, round, type(strategy).__name__)
        return arrays, metrics

    def _key(self, selection: IntArray) -> _Key:
        """Whom the strategy is configured for, and whose results it is given."""
        wanted = tuple(np.sort(selection).tolist())
        return wanted, tuple(client for client in wanted if client in self.results)

    def _aggregate(self, selection: IntArray) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """What the strategy makes of the results of `selection`, in the order of the clients.

        A client that was drawn twice counts twice. With one order, sums are equal in every run.
        """
        replies, clients = [], {}
        for client in self._key(selection)[1]:
            # A copy, since a strategy may change the messages that it is given.
            reply = copy.copy(self.results[client])
            records = {key: record.copy() for key, record in reply.content.items()}
            reply.content = RecordDict(records)
            replies.append(reply)
            clients[reply.metadata.src_node_id] = client
        loss_keys = self.settings.loss_keys
        common = with_common_parts([reply.content for reply in replies], loss_keys)
        for reply, content in zip(replies, common, strict=True):
            reply.content = content
        round, strategy = flower_round(self.exchange.round), self.settings.strategy
        whole = {client: main_metrics(self.results[client].content) for client in clients.values()}
        company = Company(clients, self._members(whole), whole)
        failed = f"round {round}: {type(strategy).__name__} failed in aggregate_train"
        with introduced(strategy, company), blame(failed):
            arrays, metrics = strategy.aggregate_train(round, replies)
        if arrays is not None:
            self._check(arrays)
        return arrays, metrics

    def _members(self, delivered: Collection[int]) -> Population:
        """Who is in the federation: those who may be chosen, and who was, if that has changed."""
        roster, rules = self.exchange.roster, self.settings.selection.rules
        population, may = roster.population(), eligible_clients(rules, roster)
        if may is None:
            return population
        eligible = [client in delivered or may(client) for client in range(len(roster))]
        return members(population, np.array(eligible, dtype=bool))

    def _configure(self, selection: IntArray) -> dict[int, Message]:
        """Have the strategy configure `selection`; the messages to those who were not asked yet."""
        if not len(selection):
            return {}
        roster, strategy, start = self.exchange.roster, self.settings.strategy, self.start
        nodes = {roster.node(client): client for client in sorted(set(selection.tolist()))}
        grid, round = SomeNodes(self.exchange.grid, list(nodes)), flower_round(self.exchange.round)
        restore(strategy, start.memory)
        self.config = ConfigRecord(dict(start.config.items()))
        failed = f"round {round}: {type(strategy).__name__} failed in configure_train"
        with limited(strategy, len(nodes), everyone=True), blame(failed):
            messages = list(strategy.configure_train(round, start.arrays, self.config, grid))
        requests = {
            nodes[m.metadata.dst_node_id]: m for m in messages if m.metadata.dst_node_id in nodes
        }
        if len(requests) < len(nodes):
            LOG.warning(
                f"round {round}: {type(strategy).__name__} has no message for "
                f"{len(nodes) - len(requests)} of {len(nodes)} chosen clients: they do not train"
            )
        new = {
            client: requests[client] for client in sorted(requests.keys() - self._requests.keys())
        }
        self._requests |= new
        version = self.holders.current
        return {
            client: slim(message, start.arrays, version, client, self.holders)
            for client, message in new.items()
        }

    def _take(
        self, sent: Mapping[int, Message], replies: Mapping[int, Message], end: float
    ) -> None:
        """Keep the usable results; whoever lost the model is sent it, until the time `end`."""
        replies, lost = self.exchange.resend(
            sent, replies, lambda client: renewed(self._requests[client]), end, task="train"
        )
        self.holders[self.holders.current].difference_update(lost)
        terms = self.settings.train_terms
        contents = {client: one.content for client, one in {**self.results, **replies}.items()}
        usual = usual_bytes(contents) if self.settings.grows_trees else {}
        clean: dict[int, RecordDict] = {}
        for client, reply in replies.items():
            try:
                if self.settings.grows_trees:
                    clean[client] = clean_trees(reply.content, self.model, terms, usual[client])
                else:
                    clean[client] = clean_model(reply.content, self._trusted, terms)
            except Unusable as wrong:
                self._refuse(client, wrong)
        clean = self._judge(clean)
        cap_replies(self.exchange, clean, terms.weight_key)
        counts_losses = selector_traits(self.settings.selector).needs_losses
        for client, content in clean.items():
            self.results[client] = replies[client]
            self.results[client].content = content
            metrics = main_metrics(content)
            self.exchange.roster.learn_size(client, number(metrics, terms.weight_key))
            # The selector is told that there is no usable loss; the update is used.
            if counts_losses and unusable_loss(metrics, terms.loss_keys):
                self.exchange.refused += 1

    def _judge(self, clean: dict[int, RecordDict]) -> dict[int, RecordDict]:
        """The replies with updates of a usual length; others are counted."""
        if not self.settings.judges_updates:
            return clean
        used = self.judged.add(clean, known_rate(self.config))
        for client in sorted(clean.keys() - used.keys()):
            why = f"its update is {self.judged.refused[client]:.3g} times as long as usual"
            self._refuse(client, Unusable("outlier", why, doubts_model=True))
        new = sorted(self.judged.clipped.keys() & clean.keys())
        if new:
            names, ratios = self.exchange.roster.names, self.judged.clipped
            who = [f"client {k} ({one_line(names[k], 40)}), {ratios[k]:.3g} times" for k in new]
            limits = self.settings.selection.defence.norm_limits
            most = limits.clip or limits.refuse
            message = "round %d: updates longer than %g times the usual length were scaled down: %s"
            LOG.warning(message, flower_round(self.exchange.round), most, listed(who))
            self.exchange.clipped.update(new)
        return used

    def _refuse(self, client: int, wrong: Unusable) -> None:
        self.exchange.refuse(client, wrong.kind, wrong.why, task="train")
        if wrong.doubts_model:
            self.doubters.add(client)

    def _check(self, arrays: ArrayRecord) -> None:
        """Only usable numbers went in: stop a strategy that makes unusable ones of them."""
        for name, like in self.model.items():
            if name not in arrays:
                wrong = "is missing"
            elif self.settings.grows_trees:
                wrong = trees_fault(arrays[name])
            else:
                values = arrays[name].numpy()
                shaped = values.shape == like.shape
                wrong = numbers_fault(values, like) if shaped else "has another shape"
            if wrong:
                round, strategy = flower_round(self.exchange.round), self.settings.strategy
                raise FedcorError(
                    f"round {round}: the model that {type(strategy).__name__} made is unusable: "
                    f"{name} {wrong}"
                )


@dataclass(frozen=True)
class PutAway:
    """A model that was replaced by the last good one, and all that belongs to it."""

    start: RoundStart
    arrays: ArrayRecord
    model: CurrentModel
    failed: frozenset[int]  # who had tried it in vain
    forgiven: tuple[tuple[int, Task], ...]  # faults that were taken to be the model's
    too_long: Mapping[int, FloatArray]  # lengths that it may have caused


@dataclass
class Doubt:
    """Decide whether to roll back, retry with other clients, or reset the norm history.

    Two broken clients that are chosen together find every model unusable, and a selector that
    prefers clients which never delivered chooses them together again and again. So, within a round:

    1. Other clients are asked, who were not asked yet. The model is cleared where two of them
       deliver (one, if one is chosen), and more of them than are refused.
    2. Where they do not clear it, or nobody is left to ask, the last good model is put back. The
       clients that doubted train from it first.
    3. Where they refuse the good model as well, they were at fault: the model comes back, and so
       does the strategy's memory. No client has a model put away twice in a round.
    4. Where that happens to everyone who is asked, because their updates are far longer than usual,
       the norm history is wrong: these norms replace it. It takes two clients, and more than half
       of those asked.

    Attributes:
        doubters: Who found the model unusable that the round starts from now.
        witnesses: Who found the one unusable that was put away: they train first from the good one.
        refuted: Who found the good model unusable as well.
        too_long: Client -> lengths of its update, of those that were refused for them.
        put_away: The model in whose place the last good one is.
        asked_others: Whether the last attempt was of others, since those before them doubted.
    """

    doubters: set[int] = field(default_factory=set)
    witnesses: frozenset[int] = frozenset()
    refuted: set[int] = field(default_factory=set)
    too_long: dict[int, FloatArray] = field(default_factory=dict)
    put_away: PutAway | None = None
    asked_others: bool = False
    _needed: int = 0  # others that have to deliver; 0 where this attempt is not theirs
    _replaced: bool = False  # whether the past was replaced in this round

    def weigh(self, condition: Condition, signs: Signs) -> Condition:
        """The condition of the model, after an attempt of others also what they make of it."""
        needed, self._needed = self._needed, 0
        self.asked_others = needed > 0
        well, ill = len(set(signs.delivered)), len(set(signs.refused))
        if condition is Condition.BAD or not needed:
            return condition
        return condition if well >= needed and well > ill else Condition.BAD

    def ask_others(self, chosen: Collection[int]) -> None:
        """The next attempt is of clients that were not asked yet, since all `chosen` doubt."""
        self._needed = min(_ENOUGH, len(set(chosen)))

    def put_back(self, away: PutAway) -> None:
        """The last good model takes the place of the model."""
        self.put_away, self.witnesses = away, frozenset(self.doubters)
        self.doubters, self.too_long = set(), {}

    def take_back(self) -> PutAway:
        """The model that was put away comes back: the doubt was the clients' fault."""
        away = self.put_away
        assert away is not None, "put_back() comes first"
        self.refuted |= {*self.witnesses, *self.doubters}
        self.put_away, self.witnesses = None, frozenset()
        self.doubters, self.too_long = set(), {**away.too_long, **self.too_long}
        return away

    def witnesses_first(self, clients: IntArray) -> IntArray:
        """Those of `clients` who say whether the good model is better; all, if none of them can."""
        first = clients[np.isin(clients, sorted(self.witnesses))]
        return first if len(first) else clients

    def outvoted(self, past: State, round: int) -> State:
        """The past with the lengths that were refused: they count from now on."""
        return remember(past, self._lengths(), round, list(self.too_long))

    def replaced(self, asked: int, round: int) -> State | None:
        """A past of the refused lengths alone; None where too few of those `asked` speak for it.

        It is done once in a round, when there is nobody else to ask.
        """
        many = len(self.too_long)
        if self._replaced or many < _ENOUGH or 2 * many <= asked:
            return None
        self._replaced = True
        return self.outvoted(no_norms(PARTS), round)

    def usual_now(self, limits: NormLimits, past: State) -> list[int]:
        """Whose update was refused for its length, and would not be with this past."""
        refused = judge(limits, past, self._lengths()).refused
        return [client for client, wrong in zip(self.too_long, refused, strict=True) if not wrong]

    def _lengths(self) -> FloatArray:
        return np.array(list(self.too_long.values())).reshape(-1, PARTS)
