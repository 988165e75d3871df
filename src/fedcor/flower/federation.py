"""The federation that a selector sees in one round of Flower: its questions become messages.

`read_outcome` is what the selector observes after the round: who delivered, with which weight,
losses and updates.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Sequence

import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict

from fedcor.core.errors import FedcorError
from fedcor.core.rng import stream
from fedcor.core.types import Array, FloatArray, IntArray, Outcome, selector_traits
from fedcor.flower.client_registry import Task
from fedcor.flower.exchange import slim
from fedcor.flower.federation_state import CurrentModel
from fedcor.flower.logs import brief, counted
from fedcor.flower.protocol import RMS_LOSS, SECONDS, flower_round, version_of
from fedcor.flower.reply_validation import (
    UNREACHABLE,
    LocalTraining,
    loss_fault,
    main_arrays,
    main_metrics,
    metrics_of,
    number,
)
from fedcor.flower.settings import RoundSettings
from fedcor.flower.training import Training
from fedcor.flower.updates import layout_of
from fedcor.rounds.defence.model_health import Signs
from fedcor.rounds.loss_screening import screen_losses
from fedcor.rounds.selection import check_clients

# The selectors that run without an evaluate function.
_ASK_NOTHING = "random, round_robin, full, complement and aligned"
_FEW = 3  # clients without a loss in their replies that end a run which needs it


class FlowerFederation:
    """Answers a selector's questions in one round, or in one more attempt at it."""

    def __init__(
        self, training: Training, model: CurrentModel, available: IntArray, attempt: int
    ) -> None:
        self._training, self._settings = training, training.settings
        self._exchange, self._roster = training.exchange, training.exchange.roster
        self.round = self._exchange.round
        self.weights = self._roster.population().weights
        self.available = available
        self.available.flags.writeable = self.weights.flags.writeable = False
        # The first attempt draws as the simulator does; a later one may choose differently.
        key = (self.round, attempt) if attempt else (self.round,)
        self.rng = stream(self._settings.selection.seed, "select", *key)
        self._version = model.version
        self._losses = {model.version: dict(model.losses)}  # version -> client -> loss
        self._told: set[int] = set()  # who was asked for the loss of the last candidate
        # Asked for l_k(w^t) in this round, without an answer; or not asked, after faults at that.
        self._silent = self._not_asked()
        self._unusable: set[int] = set()  # of them, those whose answer was no usable number
        self._asked: set[int] = set()  # for any loss, unless they were known to be unreachable

    def losses(self, clients: IntArray) -> FloatArray:
        """(len(clients),) l_k(w^t) of each; NaN where no usable answer came."""
        clients = check_clients(clients, self.available, flower_round(self.round))
        known = self._ask_losses(clients)
        self._refuse_silence()
        return np.array([known.get(client, np.nan) for client in clients.tolist()])

    def check_answers(self, few: IntArray, others: IntArray) -> list[int]:
        """Ask `few` clients for l_k(w^t), and `others` if some reply and none has a usable loss.

        Returns who answered. Raises FedcorError if nobody did, and most could be reached.
        """
        known = self._ask_losses(few)
        if not known and self._faults_heard():
            known = self._ask_losses(others)
        self._refuse_silence()
        return sorted(known)

    def _ask_losses(self, clients: IntArray) -> dict[int, float]:
        """Ask those for l_k(w^t) who were not asked yet; all losses that are known then."""
        known = self._losses[self._version]
        unasked = sorted(set(clients.tolist()) - known.keys() - self._silent)
        known |= self._probe(self._version, self._training.start.arrays, unasked)
        self._silent |= set(unasked) - known.keys()
        return known

    def _not_asked(self) -> set[int]:
        """Who may be chosen but not asked, since its evaluation fails; nobody, if all are such."""
        clients, until = self.available.tolist(), self._roster.quarantine.until
        barred = {client for client in clients if until(client, "probe") > self.round}
        return barred if len(barred) < len(clients) else set()

    def known_losses(self) -> FloatArray:
        """(N,) l_k(w^t) of all who have reported it; NaN where it is unknown. It asks nothing."""
        losses = np.full(len(self.weights), np.nan)
        for client, loss in self._losses[self._version].items():
            losses[client] = loss
        return losses

    def loss_changes(self, selection: IntArray, clients: IntArray | None = None) -> FloatArray:
        """(N,) change of each client's loss if `selection` trained now; NaN where unknown."""
        changes = np.full(len(self.weights), np.nan)
        asked = self.available if clients is None else np.unique(clients)
        before = self.losses(asked)
        selection = check_clients(selection, self.available, flower_round(self.round))
        self._training.train(selection)
        candidate = self._training.candidate(selection)
        if candidate is None:
            return changes
        version = version_of(candidate)
        if version not in self._losses:
            # Clients are asked to keep two models, this one and the current one.
            self._training.holders.try_candidate(version)
            self._losses = {self._version: self._losses[self._version], version: {}}
            self._told = set()
        after = self._losses[version]
        # Without a loss before, a loss after says nothing about the change.
        comparable = asked[np.isfinite(before)].tolist()
        unasked = [client for client in comparable if client not in self._told]
        if unasked and version != self._version:  # a candidate may be what the model is already
            after |= self._probe(version, candidate, unasked)
            self._told |= {*unasked}
        changes[asked] = [after.get(client, np.nan) for client in asked.tolist()] - before
        return changes

    def signs(self, delivered: IntArray, reachable: int) -> Signs:
        """What clients made of the current model in this round.

        Args:
            delivered: Who trained usably.
            reachable: How many clients there are, of whom `available` may be a part.
        """
        training, keys = self._training, self._settings.loss_keys
        reported = [
            client
            for client in delivered.tolist()
            if not loss_fault(main_metrics(training.results[client].content), keys)
        ]
        usable = {*self._losses[self._version], *reported}
        return Signs(delivered.tolist(), training.doubters, usable, self._unusable, reachable)

    def facts(self, version: str) -> CurrentModel:
        """What is known of the model `version`, which the next round starts from."""
        training = self._training
        losses = self._losses.get(version, {})
        return CurrentModel(version, losses, training.holders.of(version), training.replies)

    def _probe(self, version: str, model: ArrayRecord, clients: list[int]) -> dict[int, float]:
        """Client -> its loss of `model`, of all who gave a usable answer. All are asked at once."""
        end, holders = time.monotonic() + self._settings.probe_timeout, self._training.holders
        self._asked |= {*clients} - self._exchange.gone
        self._exchange.probed += len(clients)

        def message(client: int) -> Message:
            node = self._roster.node(client)
            plain = self._settings.probe_message(self.round, node, model)
            if not self._roster.has_mod(client):
                return plain
            return slim(plain, model, version, client, holders, remember=True)

        def whole_message(client: int) -> Message:
            holders[version].discard(client)
            return message(client)

        sent = {client: message(client) for client in clients}
        replies = self._exchange.ask(sent, self._settings.probe_timeout, task="probe")
        replies, _ = self._exchange.resend(sent, replies, whole_message, end, task="probe")
        answers: dict[int, float] = {}
        for client, reply in replies.items():
            if self._roster.has_mod(client):
                holders[version].add(client)
            metrics, keys = metrics_of(reply.content), self._settings.loss_keys
            records = len(reply.content.metric_records)
            wrong = loss_fault(metrics, keys) if records == 1 else f"{records} MetricRecords, not 1"
            if wrong:
                self._exchange.refuse(client, "unusable", wrong, task="probe")
                if version == self._version:
                    self._unusable.add(client)
            else:
                answers[client] = number(metrics, *keys)
        self._exchange.accept(answers, task="probe")
        if answers:
            self._training.replies = dataclasses.replace(self._training.replies, answered=True)
        return answers

    def _faults_heard(self) -> list[str]:
        """Why those sent no usable loss who were asked and could be reached."""
        faults = self._exchange.last_fault
        return [
            brief(faults[client][1])
            for client in sorted(self._asked & faults.keys())
            if faults[client][0] not in UNREACHABLE
        ]

    def _refuse_silence(self) -> None:
        """Refuse to go on if this run has never seen a loss, and most replies came without one.

        If most clients could not be reached, it may be an outage, which may pass.
        """
        faults, asked = self._faults_heard(), len(self._asked)
        reached = 2 * len(faults) >= len(self._asked | self._exchange.gone)
        if faults and reached and not self._training.replies.answered:
            summary = f"{len(faults)} of the {asked} clients that were asked for a loss"
            raise no_loss(self._settings, self.round, summary, faults, task="evaluate")


def no_loss(
    settings: RoundSettings, round: int, summary: str, faults: Sequence[str], *, task: Task
) -> FedcorError:
    """The error of a run whose selector needs losses, and in which no client has ever sent one.

    Args:
        settings: Of the run.
        round: Its number, from 0.
        summary: How many clients sent none.
        faults: Why, for each of them.
        task: Of the function that should return the loss.
    """
    ((fault, times),) = Counter(faults).most_common(1)
    often = "" if times == len(faults) else f" ({times} times)"
    key, advice = settings.selection.loss_key, ""
    if key is None:
        names = f"{', '.join(settings.loss_keys)}; name another one with loss_key"
    else:
        names = f"loss_key = {key!r}"
    if task == "evaluate":
        advice = (
            "; a mod that rejects evaluate messages belongs to the train function, "
            "@app.train(mods=[...])"
        )
    return FedcorError(
        f"round {flower_round(round)}: {summary} sent no usable one{often}: {fault}. "
        f"{type(settings.selector).__name__} needs losses: the {task} function of the ClientApp "
        f"must return the loss as a metric ({names}){advice}. The selectors {_ASK_NOTHING} need "
        "none; afl and oort read the losses in train replies"
    )


def check_losses(training: Training, participated: IntArray) -> None:
    """Refuse to go on if the selector needs the losses in replies, and no reply has ever had one.

    It takes a few clients to say so: one alone may err, where few train in a round.

    Args:
        training: The replies.
        participated: (m,) Who delivered.
    """
    settings, seen = training.settings, training.replies
    if seen.reported or not selector_traits(settings.selector).needs_losses:
        return
    contents = [training.results[client].content for client in participated.tolist()]
    faults = [loss_fault(main_metrics(content), settings.loss_keys) for content in contents]
    if not all(faults):
        training.replies = dataclasses.replace(seen, reported=True)
        return
    silent = seen.silent | {*participated.tolist()}
    if len(silent) >= min(_FEW, len(training.exchange.roster)):
        summary = f"the {counted(len(faults), 'client')} that trained and should report a loss"
        raise no_loss(settings, training.exchange.round, summary, faults, task="train")
    training.replies = dataclasses.replace(seen, silent=silent)


def read_outcome(
    training: Training, selected: IntArray, participated: IntArray, trained: LocalTraining
) -> Outcome:
    """The outcome of a round; losses and updates are read from the replies when they are needed.

    Args:
        training: The replies.
        selected: (C,) As chosen.
        participated: (m,) Who delivered.
        trained: How far each of them trained.
    """
    clients = participated.tolist()
    contents = [training.results[client].content for client in clients]
    settings = training.settings
    # A counter of batches grows alike for everyone, and would drown what tells clients apart.
    layout = layout_of(training.model, settings.plain)

    def losses() -> FloatArray:  # (m,)
        reported = [number(main_metrics(content), *settings.loss_keys) for content in contents]
        return screen_losses(np.array(reported))[0]

    def rms_losses() -> FloatArray:  # (m,) the mean loss of who does not send it
        reported = [
            number(main_metrics(content), RMS_LOSS, *settings.loss_keys) for content in contents
        ]
        return screen_losses(np.array(reported))[0]

    def updates() -> FloatArray:  # (m, P)
        if settings.selection.secure_aggregation:
            raise FedcorError(
                "single updates are hidden by secure aggregation: this selector cannot be used"
            )
        if settings.grows_trees:
            raise FedcorError(
                "clients that grow trees send no updates of a model: this selector cannot be used"
            )
        start = layout.flatten(training.model).astype(np.float64)
        rows = [layout.flatten(_arrays(content)) for content in contents]
        return np.array(rows, dtype=np.float64).reshape(len(rows), len(start)) - start

    # A strategy that is not known to weight replies is taken to weight them alike.
    weights = np.ones(len(clients))
    if settings.weighted:
        given = [number(main_metrics(content), settings.weight_key) for content in contents]
        weights = np.array(given, dtype=np.float64)
    return Outcome(
        training.exchange.round,
        selected,
        participated,
        step_sizes=trained.step_sizes,
        aggregation_weights=weights,
        read_losses=losses,
        read_updates=updates,
        head=_head([shape for _, shape, _ in layout.parts]),
        durations=_durations([number(main_metrics(content), SECONDS) for content in contents]),
        read_rms_losses=rms_losses,
    )


def _durations(reported: Sequence[float]) -> FloatArray | None:
    """(m,) seconds as clients measured them, NaN where one does not say; None if nobody does."""
    seconds = np.array(reported, dtype=np.float64)
    usable = np.isfinite(seconds) & (seconds > 0.0)
    return np.where(usable, seconds, np.nan) if usable.any() else None


def _head(shapes: Sequence[tuple[int, ...]]) -> slice:
    """Where the output layer is in a flat model: its last matrix, and the bias after it if any."""
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    matrices = [i for i, shape in enumerate(shapes) if len(shape) >= 2]
    if not matrices:
        return slice(None)
    last = matrices[-1]
    biases = ((shapes[last][0],), (shapes[last][-1],))
    follows = last + 1 < len(shapes) and shapes[last + 1] in biases
    return slice(int(ends[last]) - math.prod(shapes[last]), int(ends[last + follows]))


def _arrays(content: RecordDict) -> dict[str, Array]:
    """The arrays of a reply, by name."""
    return {name: array.numpy() for name, array in main_arrays(content).items()}
