"""What to say where clients reply, and no reply has a usable loss: what came, and what to do."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from flwr.app import MetricRecord, RecordDict

from fedcor.core.errors import FedcorError, suggest
from fedcor.flower.reply_validation import (
    RATE,
    STEPS,
    main_metrics,
    metrics_of,
    number,
    shown_loss,
    unusable_loss,
)
from fedcor.flower.settings import RoundSettings

# Parts of the names of metrics that are losses, and of those that are none.
_LOSSES = ("xent", "entropy", "nll", "likelihood", "mse", "mae", "error", "perplexity", "cost")
_SCORES = ("acc", "auc", "f1", "precision", "recall", "score", "num", "count", "time", "seconds")
_LONGEST_REASON = 300  # characters
# What Flower's clipping mods say of a message that they were not made for.
_REJECTED = re.compile(r"\w*mod\b\S* (expects|requires)", re.IGNORECASE)
# Those that run without an evaluate function.
_ASK_NOTHING = "random, round_robin, full, complement and aligned"


def reason_of(error: str) -> str:
    """On one line, what an app raised. A simulation puts the traceback of its worker before it."""
    _, marker, raised = error.rpartition(" occurred. Message: ")
    reason = " ".join((raised.removesuffix("'>") if marker else error).split())
    cut = reason if len(reason) <= _LONGEST_REASON else f"{reason[:_LONGEST_REASON]}..."
    return cut or "no reason given"


def likely_losses(names: Iterable[str], weight_key: str) -> list[str]:
    """Those of `names` that may hold a loss, the likeliest first.

    >>> likely_losses(["accuracy", "my_loss", "num-examples", "step", "xent"], "num-examples")
    ['my_loss', 'xent', 'step']
    """

    def rank(name: str) -> int:
        parts = ("loss",), _LOSSES, _SCORES
        groups = [i for i, words in enumerate(parts) if any(word in name.lower() for word in words)]
        # A name that says nothing comes after the losses.
        return {0: 0, 1: 1, 2: 3}[groups[0]] if groups else 2

    ranked = sorted((rank(name), name) for name in set(names) - {weight_key, STEPS, RATE})
    return [name for place, name in ranked if place < 3]


def no_loss_answered(
    settings: RoundSettings,
    round: int,
    asked: int,
    replies: Sequence[RecordDict],
    errors: Sequence[str],
) -> FedcorError:
    """The error of a run in which no question for a loss was ever answered with one.

    Args:
        settings: Of the run.
        round: Flower's number of the round.
        asked: How many clients were asked.
        replies: What those replied who replied with content.
        errors: What those said who replied with an error.
    """
    keys, metrics = settings.loss_keys, [metrics_of(content) for content in replies]
    unusable = [record for record in metrics if any(key in record for key in keys)]
    if len(errors) > len(replies):
        return _only_errors(settings, round, asked, errors)
    if 2 * len(unusable) <= len(replies):
        return _no_such_metric(settings, f"round {round}: the clients' evaluate", replies)
    whose = f"round {round}: {len(unusable)} of the {asked} clients that were asked for a loss"
    return _unusable(settings, f"{whose} sent an unusable one", unusable)


def no_loss_reported(
    settings: RoundSettings, round: int, replies: Sequence[RecordDict]
) -> FedcorError:
    """The error of a run in which no client ever sent a usable loss with its trained model.

    Args:
        settings: Of the run.
        round: Flower's number of the round.
        replies: Those of the clients that delivered.
    """
    metrics = [main_metrics(content) for content in replies]
    unusable = [record for record in metrics if unusable_loss(record, settings.loss_keys)]
    if 2 * len(unusable) > len(replies):
        whose = f"round {round}: {len(unusable)} of the {len(replies)} clients that trained"
        return _unusable(settings, f"{whose} sent an unusable loss", unusable)
    needs = f", which {type(settings.selector).__name__} needs"
    return _no_such_metric(settings, f"round {round}: the clients' train", replies, needs)


def _unusable(
    settings: RoundSettings, summary: str, unusable: Sequence[MetricRecord]
) -> FedcorError:
    keys = [key for key in settings.loss_keys if any(key in one for one in unusable)]
    return FedcorError(
        f"{summary} (for example {keys[0]} = {shown_loss(unusable[0], keys)}): the model has "
        "diverged, or cannot be evaluated yet, or this metric is not the loss; if so, set loss_key"
    )


def _no_such_metric(
    settings: RoundSettings, whose: str, replies: Sequence[RecordDict], needs: str = ""
) -> FedcorError:
    counts = {len(content.metric_records) for content in replies} - {1}
    if counts:
        summary = f"{whose} replies have {max(counts)} MetricRecords"
        return FedcorError(f"{summary}; exactly one is needed, with the loss in it{needs}")
    metrics = [metrics_of(content) for content in replies]
    names = sorted({name for one in metrics for name in one})
    single = {name for one in metrics for name in one if np.isfinite(number(one, name))}
    likely, key = likely_losses(single, settings.weight_key), settings.selection.loss_key
    add = 'return the loss as a metric, for instance "loss"'
    if key is None:
        wanted, advice = f"no loss among {', '.join(settings.loss_keys)}", ""
    else:
        wanted, advice = f'no "{key}" with a number, which loss_key names', suggest(key, likely)
    if not advice and likely:
        advice = f'say which one it is: loss_key="{likely[0]}"; if none is, {add}'
    return FedcorError(
        f"{whose} replies have the metrics {', '.join(names) or '(none)'}, and {wanted}{needs}; "
        f"{advice or add}"
    )


def _only_errors(
    settings: RoundSettings, round: int, asked: int, errors: Sequence[str]
) -> FedcorError:
    ((reason, times),) = Counter(map(reason_of, errors)).most_common(1)
    often = "" if times == len(errors) else f", most often ({times} times)"
    summary = (
        f"round {round}: {len(errors)} of the {asked} clients that were asked for a loss replied "
        f"with an error{often}: {reason}"
    )
    if _REJECTED.search(reason):
        return FedcorError(
            f"{summary}; a mod rejects evaluate messages: give it to the train function alone, "
            "@app.train(mods=[...])"
        )
    return FedcorError(
        f"{summary}; {type(settings.selector).__name__} needs an evaluate "
        "function in the ClientApp that returns the loss as a metric (the nodes' logs say more). "
        f"The selectors {_ASK_NOTHING} need none; afl and oort read the losses in train replies"
    )
