"""Calls as futures of Dask. Its scheduler gives the call of a lost worker to another."""

from __future__ import annotations

import gc
import logging
import threading
import warnings
from collections.abc import Sequence
from concurrent.futures import CancelledError
from typing import Any

from fedcor.cluster.address import check_answer, say_missing
from fedcor.cluster.base import LostError
from fedcor.cluster.there import entry
from fedcor.errors import FedcorError, WorkerDiedError
from fedcor.foreign import one_line

__all__ = ["DaskCluster"]

CONNECT_WITHIN = 10  # seconds


class DaskCluster:
    """A connection to Dask: the client that this process has, or a new one.

    Args:
        address: Of the scheduler; None if this process must have a client already.
    """

    def __init__(self, address: str | None) -> None:
        import distributed

        self._dask: Any = distributed
        self._own = address is not None
        if address is None:
            try:
                self._client = self._dask.Client.current()
            except ValueError:
                raise say_missing("dask") from None
        else:
            check_answer("dask", address)
            # It reports each lost connection at length; what matters is said by us.
            for name in ("distributed", "distributed.client", "distributed.comm"):
                logging.getLogger(name).setLevel(logging.CRITICAL)
            self._client = self._connect(address)
        self._function, self._news = entry(), threading.Event()
        # A closed client raises a RuntimeError, or in newer versions an error of its own.
        closed = getattr(self._dask.client, "ClosedClientError", RuntimeError)
        self._gone: tuple[type[Exception], ...] = (OSError, RuntimeError, closed)

    def _connect(self, address: str) -> Any:
        try:
            return self._dask.Client(address, timeout=CONNECT_WITHIN, set_as_default=False)
        except Exception as error:
            why = one_line(str(error), 500)
            error.__traceback__ = error.__cause__ = error.__context__ = None
        # The client that failed closes itself when it is forgotten, at length: so do it now, and
        # raise an error that does not hold it.
        gc.collect()
        raise FedcorError(
            f"no Dask scheduler can be used at {address}: {why}; is this the address of the "
            "scheduler?"
        )

    def slots(self) -> int:
        """As many as there are workers: a run sets what the threads of a process share."""
        try:
            return len(self._client.nthreads())
        except self._gone as error:
            raise _disconnected() from error

    def submit(self, payload: bytes) -> Any:
        """Make a future."""
        try:
            with warnings.catch_warnings():
                # That the payload is large: the scheduler keeps it, for when a worker is lost.
                warnings.simplefilter("ignore")
                call = self._client.submit(self._function, payload, pure=False)
            call.add_done_callback(self._tell)
        except self._gone as error:
            raise _disconnected() from error
        return call

    def _tell(self, call: Any) -> None:  # noqa: ARG002
        self._news.set()

    def wait(self, calls: Sequence[Any]) -> list[Any]:
        """Those that are done."""
        self._news.wait(1.0)
        self._news.clear()
        return [call for call in calls if call.done()]

    def result(self, call: Any) -> tuple[str, Any]:
        """What a future holds."""
        try:
            result: tuple[str, Any] = call.result()
        except self._dask.KilledWorker as error:
            raise WorkerDiedError(
                "several workers died one after the other with the same part of a run: "
                f"{error}; what was recorded is kept, and can be resumed"
            ) from error
        except CancelledError as error:
            if self._client.status != "running":
                raise _disconnected() from error
            raise LostError(one_line(str(error), 300)) from error
        except Exception as error:
            raise FedcorError(f"Dask cannot compute a part of a run: {error}") from error
        return result

    def cancel(self, calls: Sequence[Any]) -> None:
        """Cancel those that wait; a thread that runs cannot be ended, and its result is dropped."""
        try:
            self._client.cancel(list(calls), force=True)
        except self._gone as error:
            raise _disconnected() from error

    def close(self) -> None:
        """Disconnect."""
        if self._own:
            self._client.close()


def _disconnected() -> FedcorError:
    return FedcorError(
        "the connection to Dask's scheduler was lost; what was recorded is kept, and can be resumed"
    )
