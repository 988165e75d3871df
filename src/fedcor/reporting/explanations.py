"""Why these clients were chosen in a round: the selector's reasons in the record, as numbers.

The words are in `fedcor.reporting.reason_texts`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from fedcor.core.errors import RecordError
from fedcor.reporting.reason_texts import MEANINGS, PICK_DETAILS, pick_sentence, round_note
from fedcor.reporting.series import run_name
from fedcor.runs.record import RunRecord, client_names, first_round


class LossHistory:
    """The known losses of every client, each of the model before some round, and their changes.

    A loss is known where a selector asked for it (`known` and `losses` of a line's details), and
    where it came with an update (`told`). The two are kept apart: on Flower, an app may measure
    them in different ways.

    Args:
        rounds: The lines of a record.
    """

    def __init__(self, rounds: Sequence[Mapping[str, Any]]) -> None:
        # (source, client) -> rounds, and the loss in each
        self._known: dict[tuple[str, int], tuple[list[int], list[float]]] = {}
        for number, entry in enumerate(rounds):
            details = entry.get("details") or {}
            self._add("asked", number, details.get("known"), details.get("losses"))
            self._add("told", number, entry.get("participated"), details.get("told"))

    def _add(self, source: str, number: int, clients: Any, losses: Any) -> None:
        for client, loss in zip(clients or (), losses or (), strict=False):
            if loss is not None and client is not None:
                rounds, values = self._known.setdefault((source, int(client)), ([], []))
                rounds.append(number)
                values.append(float(loss))

    def change(self, client: int, round: int) -> dict[str, Any] | None:
        """How the client's loss changed from before `round` to after it; None if that is unknown.

        Where the loss just before or just after is not known, the nearest known ones are taken; the
        change is then that of several rounds, of which `round` is one.

        Returns:
            `change`; `from_round` and `to_round`, the rounds before which the two losses were
            measured: (t, t + 1) for the change of round t alone; and `source`, "asked" or "told".
        """
        changes: list[dict[str, Any]] = []
        for source in ("asked", "told"):
            rounds, values = self._known.get((source, client), ([], []))
            after = bisect_right(rounds, round)
            if 0 < after < len(rounds):
                change = values[after] - values[after - 1]
                ends = {"from_round": rounds[after - 1], "to_round": rounds[after]}
                changes.append({"change": change, **ends, "source": source})
        return min(changes, key=lambda row: row["to_round"] - row["from_round"], default=None)


# --- a round -------------------------------------------------------------------------------------


def explanation(run: RunRecord, round: int | None = None) -> dict[str, Any]:
    """The choice of one round as plain values, which `json.dumps` takes.

    Args:
        run: as `read_run` gives it
        round: from 0, as in the record; of a run on Flower as Flower counts, from 1, where the
            record says Flower's numbers; None for the last

    Returns:
        run, selector: What was run. Texts of a record are as they are there: not safe to show.
        round: As numbered in the record, from 0.
        server_round: Flower's number, from 1; only where the record says it.
        probed: Number of losses that clients were asked for.
        reasons: Name of each reason in the rows of `chosen` -> what it means.
        note: One sentence on how this round was chosen; may be empty.
        predicted_change: FedCor: predicted change of the weighted mean loss of all clients, minus
            the sum of the gains; None where there is none.
        chosen: One row per chosen client, in the order of choice:
            place: From 1.
            client: Its number.
            name: Its name; only where clients have names.
            delivered: Whether its update was aggregated.
            why_not: Why it did not: `dropped`, `late` or `refused`; empty if it did, or if that is
                not known.
            (reasons): Each of `reasons` -> a number, or None.
            parts: Signed parts that add up to `gain`: `others`, `own`, `annealed`, `redundant`.
                Empty for other selectors than FedCor.
            runner_up: {"client", "name"?, "by"}: the best other client for this place, and by how
                much it was worse, in the units of `by_what`; None where there was none or it is
                not known.
            came: The change of the client's loss that came, {"change", "from_round", "to_round",
                "source"} as in `LossHistory.change`, rounds counted from 0; None if it is unknown.
            sentence: All of it in words. Plain text, made safe to show on a terminal; a page has
                to escape it.
        by_what: What `runner_up["by"]` is a difference of: "gain", "distance", "cosine", "loss" or
            "".
        candidates: Power-of-choice: rows {"client", "name"?, "loss", "chosen"}, the largest loss
            first; else empty.
        before_rules: The clients that the selector named before rules changed its choice, if they
            did; else empty.
        unmet: Rules that could not be met -> how many clients were missing.
        left_alone: Clients that were there but were not asked, after faults.
        unreachable: How many clients could not be reached.
        duration, clock: Simulated seconds of this round, and of all so far; only where time was
            simulated.
    """
    where = run_name(run)
    if not run.rounds:
        raise RecordError(f"{where} has no finished round yet")
    first = first_round(run)
    last = first + len(run.rounds) - 1
    number = last - first if round is None else round - first
    if not 0 <= number < len(run.rounds):
        counted = ", numbered as in Flower" if first else ""
        raise RecordError(
            f"{where} has the rounds {first} to {last}{counted}; there is no round {round}"
        )
    return _Explainer(run).at(number)


def explanations(run: RunRecord) -> list[dict[str, Any]]:
    """The `explanation` of every round of the record; empty if there is none yet."""
    explainer = _Explainer(run)
    return [explainer.at(number) for number in range(len(run.rounds))]


class _Explainer:
    """What all rounds of a run share."""

    def __init__(self, run: RunRecord) -> None:
        self.run, self.where, self.first = run, run_name(run), first_round(run)
        self.names = client_names(run.path)
        self.history = LossHistory(run.rounds)

    def at(self, number: int) -> dict[str, Any]:
        entry = self.run.rounds[number]
        why, selected = entry.get("why") or {}, entry.get("selected")
        if selected is None or any(len(values) != len(selected) for values in why.values()):
            raise RecordError(
                f"{self.where}, round {number}: the record does not say who was chosen, or gives "
                "other reasons than clients; it was edited or damaged"
            )
        details = entry.get("details") or {}
        further = {name: details[name] for name in PICK_DETAILS if name in details}
        # Each reason has one number per pick.
        reasons = {k: v for k, v in {**why, **further}.items() if len(v) == len(selected)}
        candidates = self._candidates(details, selected)
        loser = next((c for c in candidates if not c["chosen"] and c["loss"] is not None), None)
        rows = [
            self._row(number, place, {name: v[place] for name, v in reasons.items()}, loser)
            for place in range(len(selected))
        ]
        by_what = next((name for name in ("gain", "distance", "cosine") if name in why), "")
        gains = why.get("gain")
        explained = {
            "run": self.where,
            "selector": self.run.header.get("selector"),
            "round": number,
            **({"server_round": number + self.first} if self.first else {}),
            "probed": entry.get("probed"),
            "reasons": {name: MEANINGS.get(name, "") for name in reasons if name not in _APART},
            "note": round_note(self.run, entry),
            "predicted_change": None if not gains or None in gains else -float(sum(gains)),
            "chosen": rows,
            "by_what": "loss" if candidates else by_what,
            "candidates": candidates,
            "before_rules": [c for c in details.get("before_rules") or () if c is not None],
            "unmet": or_empty(entry.get("unmet"), dict),
            "left_alone": or_empty(entry.get("quarantined"), list),
            "unreachable": entry.get("unreachable") or 0,
            **{key: entry[key] for key in ("duration", "clock") if entry.get(key) is not None},
        }
        for row in rows:
            row["sentence"] = pick_sentence(row, explained, self.first)
        return explained

    def _row(
        self,
        number: int,
        place: int,
        reasons: Mapping[str, Any],
        loser: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        """One pick; `loser` is the best candidate that was left out, where there are candidates."""
        entry = self.run.rounds[number]
        client, missing = entry["selected"][place], entry.get("missing") or {}
        rival, by = reasons.get("runner_up"), reasons.get("margin")
        if loser is not None and reasons.get("loss") is not None:
            rival, by = loser["client"], reasons["loss"] - loser["loss"]
        return {
            # First, as a reason of a user's own selector may have any name.
            **{name: value for name, value in reasons.items() if name not in _APART},
            "place": place + 1,
            **self._named(client),
            "delivered": client in (entry.get("participated") or ()),
            "why_not": next((str(why) for why, ids in missing.items() if client in ids), ""),
            "parts": _parts(reasons),
            "runner_up": None if rival is None else {**self._named(int(rival)), "by": by},
            "came": self.history.change(client, number),
        }

    def _named(self, client: int) -> dict[str, Any]:
        name = {"name": self.names[client]} if 0 <= client < len(self.names) else {}
        return {"client": client, **name}

    def _candidates(
        self, details: Mapping[str, Any], selected: Sequence[int]
    ) -> list[dict[str, Any]]:
        pairs = zip(details.get("known") or (), details.get("losses") or (), strict=False)
        losses = dict(pairs)
        return [
            {**self._named(int(c)), "loss": losses.get(c), "chosen": c in selected}
            for c in details.get("candidates") or ()
            if c is not None
        ]


_APART = ("runner_up", "margin")  # shown in a form of their own


def or_empty(value: Any, kind: type) -> Any:
    """`value`, if it is what a whole record holds; else an empty one of its kind."""
    return value if isinstance(value, kind) else kind()


def _parts(values: Mapping[str, Any]) -> dict[str, float]:
    """The signed parts of FedCor's gain, named as in `PARTS`; empty for other selectors."""
    needed = ("others", "own", "annealing", "redundancy", "gain")
    if any(not isinstance(values.get(name), int | float) for name in needed):
        return {}
    whole = values["others"] + values["own"]
    return {
        "others": values["others"],
        "own": values["own"],
        "annealed": values["annealing"] * whole - whole,
        "redundant": -values["redundancy"],
    }
