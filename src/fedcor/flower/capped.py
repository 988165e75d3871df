"""Replies whose weight in the mean is not believed get the one that is; see `sizes.py`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from flwr.app import RecordDict

from fedcor.flower.exchange import Exchange
from fedcor.flower.numbering import flower_round
from fedcor.flower.screen import main_metrics, number
from fedcor.flower.sizes import SIZE, cap_sizes
from fedcor.flower.wire import LOG
from fedcor.foreign import one_line

__all__ = ["cap_evaluations", "cap_replies"]


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
        if client not in roster.not_believed:
            roster.not_believed.add(client)
            LOG.warning(
                "round %d: client %d (%s) says %s = %g: %g is used, by what others say and what "
                "it said before (this is said once per client)",
                flower_round(exchange.round),
                client,
                one_line(roster.names[client], 40),
                one_line(key, 40),
                said,
                number(metrics, key),
            )
