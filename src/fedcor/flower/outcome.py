"""What a round's replies tell a selector: who delivered, with which weight, losses and updates."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from flwr.app import RecordDict

from fedcor.errors import FedcorError
from fedcor.flower.layout import layout_of
from fedcor.flower.local_training import LocalTraining
from fedcor.flower.missing_loss import loss_fault, no_loss_reported
from fedcor.flower.numbering import flower_round
from fedcor.flower.screen import main_arrays, main_metrics, number
from fedcor.flower.training import Training
from fedcor.flower.wire import RMS_LOSS, SECONDS
from fedcor.guard import screen_losses
from fedcor.types import Array, FloatArray, IntArray, Outcome, selector_traits

__all__ = ["check_losses", "read_outcome"]

_FEW = 3  # clients without a loss in their replies that end a run which needs it


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
        said = [
            number(main_metrics(content), RMS_LOSS, *settings.loss_keys) for content in contents
        ]
        return screen_losses(np.array(said))[0]

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


def _durations(said: Sequence[float]) -> FloatArray | None:
    """(m,) seconds as clients measured them, NaN where one does not say; None if nobody does."""
    seconds = np.array(said, dtype=np.float64)
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
