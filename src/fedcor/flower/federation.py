"""The federation that a selector sees in one round of Flower: its questions become messages.

`read_outcome` is what the selector observes after the round: who delivered, with which weight,
losses and updates.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence

import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict

from fedcor.core.errors import FedcorError
from fedcor.core.rng import stream
from fedcor.core.types import Array, FloatArray, IntArray, Outcome, selector_traits
from fedcor.flower.exchange import slim
from fedcor.flower.federation_state import CurrentModel
from fedcor.flower.missing_loss import no_loss_answered, no_loss_reported
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
from fedcor.flower.training import Training
from fedcor.flower.updates import layout_of
from fedcor.rounds.defence.model_health import Signs
from fedcor.rounds.loss_screening import check_clients, screen_losses

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

    def losses(self, clients: IntArray) -> FloatArray:
        """(len(clients),) l_k(w^t) of each; NaN where no usable answer came."""
        clients = check_clients(clients, self.available, flower_round(self.round))
        known = self._losses[self._version]
        unasked = sorted(set(clients.tolist()) - known.keys() - self._silent)
        known |= self._probe(self._version, self._training.start.arrays, unasked)
        self._silent |= set(unasked) - known.keys()
        return np.array([known.get(client, np.nan) for client in clients.tolist()])

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
        """Client -> its loss of `model`, of all who gave a usable answer. All are asked at once.

        Raises FedcorError if this run has never seen a loss, and most replies came without one.
        """
        end, holders = time.monotonic() + self._settings.probe_timeout, self._training.holders
        asked = [client for client in clients if client not in self._exchange.gone]
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
            wrong = loss_fault(metrics, keys)
            if wrong:
                self._exchange.refuse(client, "unusable", wrong, task="probe")
                if version == self._version:
                    self._unusable.add(client)
            else:
                answers[client] = number(metrics, *keys)
        self._exchange.accept(answers, task="probe")
        seen = self._training.replies
        if answers:
            self._training.replies = dataclasses.replace(seen, answered=True)
        elif not seen.answered:
            self._check_replies(asked, replies)
        return answers

    def _check_replies(self, asked: list[int], replies: Mapping[int, Message]) -> None:
        """No loss was ever seen: go on if most could not be reached, since an outage may pass."""
        faults = self._exchange.last_fault
        errors = [
            faults[client][1]
            for client in asked
            if client not in replies and faults[client][0] not in UNREACHABLE
        ]
        heard = len(replies) + len(errors)
        # Who could not be reached before in this round was not asked again.
        if heard and 2 * heard >= len({*asked, *self._exchange.gone}):
            contents = [reply.content for reply in replies.values()]
            number = flower_round(self.round)
            raise no_loss_answered(self._settings, number, len(asked), contents, errors)


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
    if not all(loss_fault(main_metrics(content), settings.loss_keys) for content in contents):
        training.replies = dataclasses.replace(seen, reported=True)
        return
    silent = seen.silent | {*participated.tolist()}
    if len(silent) >= min(_FEW, len(training.exchange.roster)):
        raise no_loss_reported(settings, flower_round(training.exchange.round), contents)
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
