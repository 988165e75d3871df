"""Back-off: a client that fails again and again is left alone, for longer each time.

A round counts once. A client fails in a round if it does anything in it that cannot be used: it
does not reply, or its reply is an error or unusable. A client that only sent usable replies starts
over at 0 faults.

    no reply        Left alone for 1, 2, 4, then 8 rounds. Connections come back by themselves, and
                    each try costs a deadline.
    a useless one   The first may be chance. From the second in a row on, 1, 2, 4, ... up to 64
                    rounds: most such clients stay broken until somebody repairs them.

A client that is left alone is neither chosen nor asked anything. Nobody is left alone where that
would leave no one.

The memory is two arrays: "faults" (N,), faults in a row, and "until" (N,), the round from which on
the client may be chosen again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from fedcor.core.types import Array, IntArray, State

# Rounds for which a client that does not reply, or replies uselessly, is left alone at most.
LONGEST_SILENT, LONGEST_USELESS = 8, 64


def no_faults(clients: int) -> State:
    """The memory before the first round, for N clients."""
    return {"faults": np.zeros(clients, np.int64), "until": np.zeros(clients, np.int64)}


def read_faults(arrays: Mapping[str, Array], clients: int) -> State:
    """The memory in a checkpoint. Raises KeyError or ValueError where the arrays are others."""
    state = {name: arrays[name] for name in ("faults", "until")}
    if any(array.shape != (clients,) or array.dtype.kind != "i" for array in state.values()):
        raise ValueError("the back-off is not of these clients")
    return state


def offered_clients(state: State, round: int, available: IntArray) -> IntArray:
    """Those of `available` that are not left alone in `round`; all, if that would be nobody."""
    kept = available[state["until"][available] <= round]
    return kept if len(kept) else available


def count_faults(
    state: State, round: int, faults: Mapping[int, bool], usable: Collection[int]
) -> State:
    """The memory after a round.

    Args:
        state: The memory before it.
        round: The number of the round.
        faults: Clients that failed -> whether they replied.
        usable: Clients that sent something usable.
    """
    counts, until = state["faults"].copy(), state["until"].copy()
    for client in usable:
        if client not in faults:
            counts[client] = until[client] = 0
    for client, replied in faults.items():
        counts[client] += 1
        until[client] = round + 1 + rounds_alone(int(counts[client]), replied=replied)
    return {"faults": counts, "until": until}


def grow(state: State, clients: int) -> State:
    """The memory for `clients` clients, of which the new ones have not failed."""
    more = clients - len(state["faults"])
    return {name: np.pad(array, (0, more)) for name, array in state.items()} if more else state


def rounds_alone(faults: int, *, replied: bool) -> int:
    """Rounds for which a client with so many faults in a row is left alone; 0 for not at all.

    Args:
        faults: In a row, the last one included; at least 1.
        replied: Whether the last one was a useless reply, and not a missing one.

    Example:
        >>> [rounds_alone(faults, replied=False) for faults in range(1, 7)]
        [1, 2, 4, 8, 8, 8]
        >>> [rounds_alone(faults, replied=True) for faults in range(1, 11)]
        [0, 1, 2, 4, 8, 16, 32, 64, 64, 64]
    """
    doublings = faults - 2 if replied else faults - 1
    longest = LONGEST_USELESS if replied else LONGEST_SILENT
    return 0 if doublings < 0 else min(longest, 1 << min(doublings, 30))
