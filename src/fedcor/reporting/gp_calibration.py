"""How well FedCor's Gaussian process predicts clients' loss changes, over the rounds of a run.

In every round that measured loss changes (a probe round), and before the process learns from them,
it is asked to predict them: given the changes of the clients that trained, the changes of all
others (`fedcor.selectors.gp.forecast`). The record holds how that went.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from fedcor.reporting.series import run_name
from fedcor.runs.record import RunRecord
from fedcor.selectors.gp.forecast import BINS

FEWEST = 30  # predictions for clients; with fewer, nothing is said of the intervals
TOLERANCE = 0.1  # how far from the half an interval of 50 % may be and still be about right


def health(run: RunRecord) -> dict[str, Any]:
    """How well the process of a run predicts, as plain values that `json.dumps` takes.

    Args:
        run: as `read_run` gives it

    Returns:
        run, selector: What was run. Texts of a record are as they are there: not safe to show.
        note: Why there is nothing to show, in a sentence; empty if there is something.
        rounds: Columns over the probe rounds, as in `_row`: lists of one length; None where a value
            is not known (nothing is predicted before the first fit).
        calibration: `calibration` of all bins together; None if nothing was predicted.
        log_score, each, independent: Means over all predicted clients; None if there are none.
        forecasts: Rounds with a prediction.
        better, better_each: Those of them whose `log_score`, `each`, was above that of independent
            clients.
        refits: Fits of the process: rounds in which it learnt.
        probed, probe_rounds: Totals.
        usual_bytes: Median bytes of the rounds that asked nothing; None if there is none.
        probe_bytes: Sum of `extra_bytes`; None if it is unknown.
        bytes: Bytes of all rounds.
    """
    probes = [entry for entry in run.rounds if _has_probes(entry)]
    plain = [_bytes(entry) for entry in run.rounds if not _has_probes(entry)]
    usual = median(plain) if plain else None
    rows = [_row(entry, usual) for entry in probes]
    predicted = [row for row in rows if row["clients"]]
    bins = [row["bins"] for row in predicted if row["bins"]]
    refits = sum(_is_refit(entry) for entry in probes)
    note = "this selector learns no Gaussian process, or has not fitted it yet"
    if refits:
        note = "the Gaussian process has been fitted, but has not predicted anything yet"
    return {
        "run": run_name(run),
        "selector": run.header.get("selector"),
        "note": "" if predicted else note,
        "rounds": {name: [row[name] for row in rows] for name in _COLUMNS},
        "calibration": calibration([sum(column) for column in zip(*bins, strict=True)]),
        **{name: _weighted(predicted, name) for name in ("log_score", "each", "independent")},
        "forecasts": len(predicted),
        "better": _count_better(predicted, "log_score"),
        "better_each": _count_better(predicted, "each"),
        "refits": refits,
        "probed": sum(row["probed"] for row in rows),
        "probe_rounds": len(rows),
        "usual_bytes": usual,
        "probe_bytes": None if usual is None else sum(row["extra_bytes"] for row in rows),
        "bytes": sum(map(_bytes, run.rounds)),
    }


def calibration(bins: Sequence[int]) -> dict[str, Any] | None:
    """Observed coverage of the prediction intervals, beside their nominal coverage.

    Args:
        bins: Number of residuals in each of 2n bins of equal probability.

    Returns:
        bins: As given; `expected`, how many each should hold.
        levels: (n,) nominal coverage of intervals around the prediction, 1/n, 2/n, ... 1.
        coverage: (n,) the fraction of clients whose change was in each: equal to `levels` for a
            process that is right; below it where it is overconfident.
        clients: How many residuals there are.
        None if there are none.
    """
    total, half = sum(bins), len(bins) // 2
    if total <= 0:
        return None
    inner = [sum(bins[half - n : half + n]) for n in range(1, half + 1)]
    return {
        "bins": list(bins),
        "expected": total / len(bins),
        "levels": [n / half for n in range(1, half + 1)],
        "coverage": [count / total for count in inner],
        "clients": total,
    }


_COLUMNS = (
    "round", "probed", "bytes", "extra_bytes", "clients", "log_score", "each", "independent",
    "error", "zero_error", "agreement", "residual", "bins", "similarity",
)  # fmt: skip


def health_sentence(found: Mapping[str, Any]) -> str:
    """What the numbers of `health` come to; empty where nothing was predicted."""
    total = found["forecasts"]
    if not total:
        return ""
    parts = [
        f"Client by client, the Gaussian process beats independent clients in "
        f"{_of(found['better_each'], total)} prediction{'s' if total > 1 else ''}",
        _width(found["calibration"]),
        f"for all clients jointly, with their correlations, in {_of(found['better'], total)}",
    ]
    return "; ".join(filter(None, parts)) + "."


def _of(count: int, total: int) -> str:
    """`22 of 22`; `only 8 of 22` where it is less than half."""
    return f"{'only ' if 2 * count < total else ''}{count} of {total}"


def _width(fit: Mapping[str, Any] | None) -> str:
    """Whether intervals are as wide as they should be, by the one nearest to 50 %."""
    if fit is None or fit["clients"] < FEWEST:
        return ""
    pairs = zip(fit["levels"], fit["coverage"], strict=True)
    nominal, observed = min(pairs, key=lambda pair: abs(pair[0] - 0.5))
    width = "about as wide as they should be"
    if abs(observed - nominal) > TOLERANCE:
        width = "too wide" if observed > nominal else "too narrow"
    text = f"its intervals are {width} (a {nominal:.0%} interval holds {observed:.0%})"
    return text.replace("%", " %")


def _row(entry: Mapping[str, Any], usual: float | None) -> dict[str, Any]:
    """A probe round.

    Returns:
        round: From 0.
        probed: Losses that clients were asked for.
        bytes: Bytes of the round, down and up.
        extra_bytes: Those above the usual ones; None if they are unknown.
        clients: Clients whose change was predicted, of all selections measured in the round.
        log_score: Log density of the actual changes of all of them together, in nats per client;
            more is better.
        each: The same with each client predicted by itself, whatever came to the others.
        independent: The same for clients that are independent, with the same variances. `each` is
            above it where means are predicted better, and also where variances that are too large
            become smaller: see `agreement`, `error` and `residual`.
        error: Root mean square error of the prediction.
        zero_error: The same for the prediction that nothing changes.
        agreement: Cosine of the angle between the predicted and the actual changes: 1 if they are
            proportional, 0 if they have nothing in common.
        residual: Root mean square of the standardised residuals; 1 is right, above it the process
            is overconfident, below it underconfident.
        bins: Standardised residuals by bin, 20 bins that a right process fills evenly.
        similarity: Cosine similarity of the covariances before and after the refit.
    """
    given, spent = entry.get("details") or {}, _bytes(entry)
    # What holds a null says nothing.
    details = {name: values for name, values in given.items() if None not in values}
    counts = [int(count) for count in details.get("forecast_clients") or ()]
    clients, bins = sum(counts), details.get("residual_bins") or ()
    return {
        "round": entry["round"],
        "probed": entry["probed"],
        "bytes": spent,
        "extra_bytes": None if usual is None else max(spent - usual, 0),
        "clients": clients if clients > 0 else None,
        "log_score": _mean(details.get("log_score"), counts),
        "each": _mean(details.get("log_score_each"), counts),
        "independent": _mean(details.get("log_score_independent"), counts),
        "error": _root(details.get("squared_errors"), clients),
        "zero_error": _root(details.get("squared_changes"), clients),
        "agreement": _agreement(details),
        "residual": _root(details.get("residual_squares"), clients),
        "bins": bins if len(bins) == BINS else None,
        "similarity": (details.get("similarity") or [None])[0],
    }


def _has_probes(entry: Mapping[str, Any]) -> bool:
    probed = entry.get("probed")
    return isinstance(probed, int) and probed > 0


def _bytes(entry: Mapping[str, Any]) -> int:
    return int(entry.get("bytes_down") or 0) + int(entry.get("bytes_up") or 0)


def _mean(values: Any, counts: Sequence[int]) -> float | None:
    """The mean of one value per selection, each as often as it has clients."""
    if not values or len(values) != len(counts) or not sum(counts):
        return None
    return float(sum(v * n for v, n in zip(values, counts, strict=True)) / sum(counts))


def _root(values: Any, count: int) -> float | None:
    """The root of a sum over `count` clients, divided by their number."""
    if not values or values[0] < 0 or count <= 0:
        return None
    return float((values[0] / count) ** 0.5)


def _agreement(details: Mapping[str, Any]) -> float | None:
    """f'y / (|f| |y|) of the forecasts f and the changes y, from |f|^2, |y|^2 and |y - f|^2."""
    names = ("squared_forecasts", "squared_changes", "squared_errors")
    if not all(details.get(name) and details[name][0] >= 0 for name in names):
        return None
    forecasts, changes, errors = (details[name][0] for name in names)
    lengths = (forecasts * changes) ** 0.5
    return float((forecasts + changes - errors) / 2 / lengths) if lengths > 0 else None


def _weighted(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    known = [row for row in rows if row[name] is not None]
    return _mean([row[name] for row in known], [row["clients"] for row in known])


def _count_better(rows: Sequence[Mapping[str, Any]], name: str) -> int:
    scores = [(row[name], row["independent"]) for row in rows]
    return sum(None not in pair and pair[0] > pair[1] for pair in scores)


def _is_refit(entry: Mapping[str, Any]) -> bool:
    details = entry.get("details") or {}
    return bool(details.get("similarity") or details.get("fitted"))
