"""What crosses the seam is checked: bad numbers from a client are refused and counted, a selector's mistakes are named."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from fedcor.errors import FedcorError
from fedcor.types import Federation, FloatArray, IntArray, Reasons, Selector, State

__all__ = ["ABSURD", "check_clients", "check_state", "naming", "screen_losses", "written_reasons"]

# No loss of a model worth averaging is this large; one that claims to be would drag every fit and every ranking with it.
ABSURD = 1e6


def screen_losses(answers: FloatArray) -> tuple[FloatArray, int]:
    """The answers with NaN for every unusable one (not finite, or absurd), and how many were refused."""
    usable = np.isfinite(answers) & (np.abs(np.where(np.isfinite(answers), answers, 0.0)) <= ABSURD)
    return np.where(usable, answers, np.nan), int(np.count_nonzero(~usable))


def check_clients(clients: IntArray, available: IntArray, round: int) -> IntArray:
    """The ids that a selector named, as an array; refuses what is not an id, or not an available one."""
    clients = np.asarray(clients)
    if clients.ndim != 1 or (clients.size and clients.dtype.kind not in "iu"):
        raise FedcorError(
            f"round {round}: the selector named {clients!r}, which is not a list of client ids"
        )
    clients = clients.astype(np.int64)
    strangers = np.setdiff1d(clients, available)
    if len(strangers):
        raise FedcorError(
            f"round {round}: the selector named clients that are not available: {strangers}"
        )
    return clients


def check_state(state: State) -> None:
    """Refuse a state that no checkpoint could take."""
    if not isinstance(state, Mapping):
        raise FedcorError(
            f"a selector's state is a mapping of names to arrays, not a {type(state).__name__}"
        )
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, np.ndarray) or value.dtype.hasobject:
            raise FedcorError(
                f"the selector's state {name!r} is not a plain NumPy array, which every checkpoint needs"
            )


def written_reasons(
    selector: Selector, state: State, federation: Federation, chosen: IntArray
) -> dict[str, list[float | None]]:
    """The selector's reasons as a record takes them; empty where it gives none."""
    give = getattr(selector, "reasons", None)
    reasons: Reasons = {} if give is None else give(state, federation, chosen)
    return {
        name: [float(v) if np.isfinite(v) else None for v in np.asarray(values, dtype=np.float64)]
        for name, values in reasons.items()
    }


@contextmanager
def naming(stage: str) -> Iterator[None]:
    """An error in a selector (perhaps a user's own) is told with its round, its verb and its line, not as ours."""
    try:
        yield
    except FedcorError:
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise FedcorError(
            f"{stage}: {type(error).__name__}: {error} ({last.filename}, line {last.lineno})"
        ) from error
