"""What the record knows of clients' losses over the rounds, and how they changed.

A loss is known where a selector asked for it (`known` and `losses` of a line's details), and where
it came with an update (`told`). The two are kept apart: on Flower, an app may measure them in
different ways.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["LossHistory"]


class LossHistory:
    """The known losses of every client, each of the model before some round.

    Args:
        rounds: The lines of a record.
    """

    def __init__(self, rounds: Sequence[Mapping[str, Any]]) -> None:
        # source -> client -> rounds, and the loss in each
        self._known: dict[str, dict[int, tuple[list[int], list[float]]]] = {
            source: defaultdict(lambda: ([], [])) for source in ("asked", "told")
        }
        for number, entry in enumerate(rounds):
            details = entry.get("details") or {}
            self._add("asked", number, details.get("known"), details.get("losses"))
            self._add("told", number, entry.get("participated"), details.get("told"))

    def _add(self, source: str, number: int, clients: Any, losses: Any) -> None:
        for client, loss in zip(clients or (), losses or (), strict=False):
            if loss is not None and client is not None:
                rounds, values = self._known[source][int(client)]
                rounds.append(number)
                values.append(float(loss))

    def at(self, client: int, round: int) -> float | None:
        """The client's loss of the model before `round`, if it was asked for; else None."""
        rounds, values = self._known["asked"].get(client, ([], []))
        place = bisect_right(rounds, round) - 1
        return values[place] if place >= 0 and rounds[place] == round else None

    def change(self, client: int, round: int) -> dict[str, Any] | None:
        """How the client's loss changed from before `round` to after it; None if that is unknown.

        Where the loss just before or just after is not known, the nearest known ones are taken; the
        change is then that of several rounds, of which `round` is one.

        Returns:
            `change`; `from_round` and `to_round`, the rounds before which the two losses were
            measured: (t, t + 1) for the change of round t alone; and `source`, "asked" or "told".
        """
        found: list[dict[str, Any]] = []
        for source, clients in self._known.items():
            rounds, values = clients.get(client, ([], []))
            after = bisect_right(rounds, round)
            if 0 < after < len(rounds):
                change = values[after] - values[after - 1]
                found.append(
                    {
                        "change": change,
                        "from_round": rounds[after - 1],
                        "to_round": rounds[after],
                        "source": source,
                    }
                )
        return min(found, key=lambda one: one["to_round"] - one["from_round"], default=None)
