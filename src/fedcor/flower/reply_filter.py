"""Updates of a usual length: longer ones are scaled down or refused before anyone sees them.

The rule is that of `fedcor.rounds.defence.update_norms`. The arrays that an optimiser works on are judged by one
length, all other float arrays (a running variance, say) by another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedcor.core import types
from fedcor.core.text import one_line
from fedcor.core.types import FloatArray, State
from fedcor.flower.client_registry import SIZE, cap_sizes
from fedcor.flower.exchange import Exchange
from fedcor.flower.logs import log_once
from fedcor.flower.optimiser_strategy import layout_of
from fedcor.flower.protocol import flower_round
from fedcor.flower.reply_validation import main_arrays, main_metrics, number
from fedcor.rounds.defence.update_norms import PARTS, NormLimits, judge, no_norms, remember

_RATES = ("lr", "learning-rate", "learning_rate")


def known_rate(config: ConfigRecord) -> float:
    """The learning rate in a train configuration, under its usual names; NaN without one."""
    given = [config.get(key) for key in _RATES]
    rates = [float(rate) for rate in given if isinstance(rate, int | float)]
    return rates[0] if rates else float("nan")


class JudgedReplies:
    """Judges the trained models of one attempt at a round, each once.

    Args:
        limits: How long an update may be.
        past: The lengths that earlier rounds accepted; empty before the first.
        model: w^t by the names of its arrays.
        plain: Patterns of the names of arrays that are no weights.

    Attributes:
        clipped: Client -> how many times the usual length its update had.
        refused: Client -> the same, of those that are not used.
        too_long: Client -> (PARTS,) the lengths of those.
    """

    def __init__(
        self,
        limits: NormLimits,
        past: State,
        model: Mapping[str, types.Array],
        plain: tuple[str, ...],
    ) -> None:
        self._limits, self._past, self._model = limits, past or no_norms(PARTS), model
        weights = {name for name, _, _ in layout_of(model, plain).parts}
        floats = [name for name, values in model.items() if values.dtype.kind == "f"]
        self._parts = (
            [name for name in floats if name in weights],
            [name for name in floats if name not in weights],
        )
        self._norms: dict[int, FloatArray] = {}
        self.too_long: dict[int, FloatArray] = {}
        self.clipped: dict[int, float] = {}
        self.refused: dict[int, float] = {}

    def add(self, contents: Mapping[int, RecordDict], rate: float) -> dict[int, RecordDict]:
        """Client -> its reply as it is used, of those that are; `rate` is the learning rate."""
        if not contents:
            return {}
        # A number that clients say, such as their steps, would let them say how long is usual.
        units = np.array([rate if rate > 0 and np.isfinite(rate) else 1.0, 1.0])
        norms = np.array([self._lengths(content) for content in contents.values()]) / units
        verdict = judge(self._limits, self._past, norms, self._accepted())
        used: dict[int, RecordDict] = {}
        for row, (client, content) in enumerate(contents.items()):
            ratio = float(verdict.ratios[row])
            if verdict.refused[row]:
                self.refused[client], self.too_long[client] = ratio, norms[row]
                continue
            if verdict.clipped[row]:
                self.clipped[client] = ratio
                content = self._scaled(content, verdict.factors[row].tolist())
            self._norms[client] = verdict.norms[row]
            used[client] = content
        return used

    def past(self, round: int) -> State:
        """What is known of usual lengths after the round."""
        return remember(self._past, self._accepted(), round, list(self._norms))

    def _accepted(self) -> FloatArray:
        return np.array(list(self._norms.values())).reshape(-1, PARTS)

    def _lengths(self, content: RecordDict) -> list[float]:
        """(PARTS) Lengths of the parts of an update; one array at a time is held."""
        record = main_arrays(content)
        return [
            float(np.sqrt(sum(self._square(name, record[name]) for name in names)))
            for names in self._parts
        ]

    def _square(self, name: str, array: Array) -> float:
        change = self._change(name, array).ravel()
        # Numbers are below 1e10 (screen.py), so float32 holds the sum of their squares.
        return float(np.dot(change, change))

    def _change(self, name: str, array: Array) -> types.Array:
        start = self._model[name]
        wide = np.result_type(np.float32, start.dtype)
        with np.errstate(invalid="ignore"):  # of infinite numbers that stay as they are
            change: types.Array = np.subtract(array.numpy(), start, dtype=wide)
        return change if np.isfinite(change).all() else np.where(np.isfinite(change), change, 0.0)

    def _scaled(self, content: RecordDict, factors: Sequence[float]) -> RecordDict:
        record = main_arrays(content)
        arrays = dict(record.items())
        for names, factor in zip(self._parts, factors, strict=True):
            for name in names if factor < 1.0 else ():
                start = self._model[name]
                made = start + factor * self._change(name, record[name])
                arrays[name] = Array(made.astype(start.dtype))
        key = next(iter(content.array_records))  # other records stay as they are, after it
        return RecordDict({**dict(content.items()), key: ArrayRecord(arrays)})


# Replies whose weight in the mean is not believed get the one that is; see `sizes.py`.


def cap_replies(exchange: Exchange, replies: Mapping[int, RecordDict], key: str) -> None:
    """Bound the weights of clients' trained models by the population's and by their own past.

    Args:
        exchange: Counts who is not believed.
        replies: Client -> its usable reply; its metric `key` is changed in place.
        key: The metric that holds the weight.
    """
    said = _said(replies, key)
    _use(exchange, replies, key, exchange.roster.believe(said, sizes=key == SIZE))


def cap_evaluations(exchange: Exchange, replies: Mapping[int, RecordDict], key: str) -> None:
    """As `cap_replies`, but by those of this round alone: a client may evaluate on other data."""
    said = _said(replies, key)
    capped = cap_sizes(np.array(list(said.values())))
    _use(exchange, replies, key, dict(zip(said, capped.tolist(), strict=True)))


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
        said = number(metrics, key)
        if weight >= said:
            continue
        metrics[key] = max(1, int(weight)) if isinstance(metrics[key], int) else weight
        exchange.capped.add(client)
        log_once(
            roster.not_believed,
            client,
            "round %d: client %d (%s) says %s = %g: %g is used, by what others say and what "
            "it said before (this is said once per client)",
            flower_round(exchange.round),
            client,
            one_line(roster.names[client], 40),
            one_line(key, 40),
            said,
            number(metrics, key),
        )
