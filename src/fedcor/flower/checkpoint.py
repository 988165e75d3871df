"""What a finished round leaves to the next, as named arrays for a checkpoint, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Strategy

from fedcor.errors import RecordError
from fedcor.flower.alike import Signature
from fedcor.flower.memory import pack, same, snapshot, unpack, wrapped, writable
from fedcor.flower.privacy import read_spent, restore_spent
from fedcor.flower.roster import Roster
from fedcor.flower.state import CurrentModel, FederationState, SeenReplies
from fedcor.flower.wire import LOG
from fedcor.health import Health
from fedcor.outliers import PARTS, read_norms
from fedcor.turns import read_turns
from fedcor.types import Array, Population

__all__ = ["Checkpoint", "StrategyMemory"]


@dataclass(frozen=True)
class Checkpoint:
    """A run after a finished round."""

    done: int  # rounds
    arrays: ArrayRecord  # the model
    state: FederationState
    strategy: Mapping[str, Any]  # what the strategy remembers
    config: Mapping[str, Any]  # what it changed in the train configuration

    def to_arrays(self) -> dict[str, Array]:
        """As named arrays, which a file takes without pickle."""
        state = self.state
        assert state.population is not None
        assert state.selector is not None
        known, replies = sorted(state.model.losses), state.model.replies
        built = {"trained": replies.trained, "evaluated": replies.evaluated}
        return {
            "round": np.array(self.done),
            "sizes": state.population.sizes,
            "version": np.array(state.model.version, dtype=np.str_),
            "known_clients": np.array(known, dtype=np.int64),
            "known_losses": np.array([state.model.losses[client] for client in known]),
            "replies/answered": np.array(replies.answered),
            "replies/reported": np.array(replies.reported),
            **{
                f"replies/{name}": np.array("" if one is None else one.to_text(), dtype=np.str_)
                for name, one in built.items()
            },
            **{f"roster/{name}": array for name, array in state.roster.to_arrays().items()},
            **{f"selector/{name}": array for name, array in state.selector.items()},
            **{f"norms/{name}": array for name, array in state.norms.items()},
            **{f"health/{name}": array for name, array in state.health.to_arrays().items()},
            **({} if state.good is None else pack({"arrays": state.good}, "good")),
            **{f"turns/{name}": array for name, array in state.turns.items() if len(array)},
            **pack({"arrays": self.arrays}, "model"),
            **pack(self.strategy, "strategy"),
            **pack(self.config, "config"),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array]) -> Checkpoint:
        """The checkpoint in `arrays`. Nobody is taken to hold the model: nodes may have restarted.

        Raises RecordError where the arrays are not a checkpoint of this room.
        """
        try:
            clients, known = arrays["known_clients"].tolist(), arrays["known_losses"].tolist()
            losses = dict(zip(clients, known, strict=True))
            state = FederationState(
                finished=int(arrays["round"]),
                roster=Roster.from_arrays(_below(arrays, "roster/")),
                model=CurrentModel(str(arrays["version"]), losses, replies=_replies(arrays)),
                selector=_below(arrays, "selector/"),
                population=Population(arrays["sizes"]),
                norms=read_norms(_below(arrays, "norms/"), PARTS),
                health=Health.from_arrays(_below(arrays, "health/")),
                good=unpack(arrays, "good")["arrays"] if "good" in arrays else None,
                turns=read_turns(_below(arrays, "turns/")),
            )
            return cls(
                done=state.finished,
                arrays=unpack(arrays, "model")["arrays"],
                state=state,
                strategy=unpack(arrays, "strategy"),
                config=unpack(arrays, "config"),
            )
        except (KeyError, ValueError, AttributeError) as error:
            raise RecordError(f"the checkpoint does not fit this run: {error!r}") from error


def _replies(arrays: Mapping[str, Array]) -> SeenReplies:
    """What the replies have been like; as far as it can be told, in an older checkpoint."""
    return SeenReplies(
        Signature.from_text(str(arrays.get("replies/trained", ""))),
        Signature.from_text(str(arrays.get("replies/evaluated", ""))),
        answered=bool(arrays.get("replies/answered", len(arrays["known_losses"]) > 0)),
        reported=bool(arrays.get("replies/reported", False)),
    )


def _below(arrays: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    """The arrays whose names start with `prefix`, without it."""
    return {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }


class StrategyMemory:
    """What the rounds change in a strategy. Its settings may be changed between two starts."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._initial = snapshot(strategy).values
        self._reported: set[str] = set()

    def read(self) -> dict[str, Any]:
        """By dotted attribute, all that changed and can be written; what cannot is logged once."""
        changed = {
            key: value
            for key, value in snapshot(self._strategy).values.items()
            if key not in self._initial or not same(value, self._initial[key])
        }
        lost = {key for key, value in changed.items() if not writable(value)}
        for key in sorted(lost - self._reported):
            LOG.warning(
                "the strategy's attribute %s (a %s) cannot be written to the checkpoint: "
                "if rounds depend on it, a resumed run will differ",
                key,
                type(changed[key]).__name__,
            )
        self._reported |= lost
        kept = {key: value for key, value in changed.items() if key not in lost}
        return {**kept, **read_spent(self._strategy)}

    def write(self, memory: Mapping[str, Any]) -> None:
        """Put back what `read` returned."""
        owners = dict(wrapped(self._strategy))
        for key, value in restore_spent(self._strategy, memory).items():
            path, dot, name = key.rpartition(".")
            setattr(owners[path + dot], name, value)
