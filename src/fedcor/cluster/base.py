"""What a cluster can do for us, whichever it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

__all__ = ["Cluster", "LostError"]


class LostError(Exception):
    """A call whose worker was lost; the same call may be made again."""


class Cluster(Protocol):
    """A connection to a cluster."""

    def slots(self) -> int:
        """How many calls can run at once now; workers may come and go."""
        ...

    def submit(self, payload: bytes) -> Any:
        """Call `there.answer(payload)` on some worker. Returns a key of the call."""
        ...

    def wait(self, calls: Sequence[Any]) -> list[Any]:
        """Those of `calls` that are done, after a second or as soon as there is one."""
        ...

    def result(self, call: Any) -> tuple[str, Any]:
        """What a call that is done has returned.

        Raises:
            LostError: Its worker was lost.
            WorkerDiedError: So were those who took it up.
            FedcorError: It could not be called at all.
        """
        ...

    def cancel(self, calls: Sequence[Any]) -> None:
        """End these calls, as far as the cluster can."""
        ...

    def close(self) -> None:
        """End the connection, if it is ours."""
        ...
