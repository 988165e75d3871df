"""The one place where rounds change their number.

This room counts rounds as the selectors and the record do: from 0, over the whole run. Flower
counts from 1, and its loop starts at 1 again when a run is resumed.

    round           0, 1, 2, ...           in this room, in the record, in `federation.round`
    Flower's round  round + 1              what strategies, clients (`server-round`), `evaluate_fn`
                                           and the result are given, and what messages say
    server_round    Flower's - `finished`  what Flower's loop passes to us; `finished` rounds were
                                           done before this start
"""

from __future__ import annotations

from flwr.serverapp.strategy import Result

__all__ = ["flower_round", "own_round", "renumber"]


def own_round(server_round: int, finished: int) -> int:
    """Our number of the round that Flower's loop calls `server_round`; -1 is before the first."""
    return server_round - 1 + finished


def flower_round(round: int) -> int:
    """Flower's number of our `round`, over the whole run."""
    return round + 1


def renumber(result: Result, finished: int) -> Result:
    """The result of Flower's loop, numbered over the whole run; 0 is the initial model."""
    for name, value in vars(result).items():
        if isinstance(value, dict):
            renumbered = {
                flower_round(own_round(key, finished)) if key else key: item
                for key, item in value.items()
            }
            setattr(result, name, renumbered)
    return result
