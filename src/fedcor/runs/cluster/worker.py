"""What a cluster can do for us, whichever it is."""

from __future__ import annotations

import importlib
import os
import pickle
import platform
import site
import socket
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from fedcor.core.errors import ConfigError, FedcorError, RecordError


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


# What happens on a worker: versions are compared, a call is made, its error is sent back.


DONE, FAILED, REFUSED = "done", "failed", "refused"
_COMPARED = ("fedcor", "numpy", "torch", "numba")  # all that computes; one may be missing on both
# A worker of Dask may have several threads, but a run sets what a whole process shares.
_ONE_AT_A_TIME = threading.Lock()


def pack(function: Callable[[], object]) -> bytes:
    """A call, with the classes that a script or a notebook defines."""
    import cloudpickle

    try:
        payload: bytes = cloudpickle.dumps(function)
    except Exception as error:
        raise FedcorError(f"a job cannot be sent to a worker: {error}") from error
    return payload


def entry() -> Callable[[bytes], tuple[str, Any]]:
    """The function that a worker is given.

    It travels as code, not as a name, because it is the one to say that a worker has no fedcor, or
    another one. So it uses nothing of this module.
    """
    own = {name: _version(name) for name in _COMPARED}
    own["Python"], folder = ".".join(platform.python_version_tuple()[:2]), os.getcwd()

    def enter(payload: bytes) -> tuple[str, Any]:
        import platform
        import socket
        from importlib import metadata

        wrong = []
        for name, wanted in own.items():
            try:
                if name == "Python":
                    found = ".".join(platform.python_version_tuple()[:2])
                else:
                    found = metadata.version(name).partition("+")[0]
            except metadata.PackageNotFoundError:
                found = "missing"
            if found != wanted:
                wrong.append(f"{name} is {found} there, {wanted} here")
        if wrong:
            return "refused", f"the worker on {socket.gethostname()}: {', '.join(wrong)}"

        return answer(folder, payload)

    return enter


def _version(name: str) -> str:
    """Without what tells builds apart: a laptop may have no accelerator."""
    try:
        return metadata.version(name).partition("+")[0]
    except metadata.PackageNotFoundError:
        return "missing"


def answer(folder: str, payload: bytes) -> tuple[str, Any]:
    """Make a call, in the folder of the caller where there is one of this name.

    Returns:
        `DONE` and the result, or `FAILED` and the error, pickled.
    """
    with _ONE_AT_A_TIME, _inside(folder), _forgetting():
        try:
            return DONE, pickle.loads(payload)()
        except ModuleNotFoundError as error:
            text = f"{_host()} lacks a module: {error}; install it there"
            return FAILED, pickle.dumps(FedcorError(text))
        except Exception as error:
            return FAILED, _portable(error)


@contextmanager
def _inside(folder: str) -> Iterator[None]:
    """Paths of data and modules of the user's may be relative."""
    if not os.path.isdir(folder):
        yield
        return
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextmanager
def _forgetting() -> Iterator[None]:
    """Forget the user's own modules afterwards: a worker lives on, and they may be edited."""
    modules, path = set(sys.modules), list(sys.path)
    try:
        yield
    finally:
        for name in set(sys.modules) - modules:
            if not _is_installed(getattr(sys.modules[name], "__file__", None)):
                del sys.modules[name]
        sys.path[:] = path
        importlib.invalidate_caches()


def _is_installed(file: str | None) -> bool:
    """Whether a module's file is Python's, of a package that was installed, or ours."""
    if file is None:  # built in
        return True
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = [*map(sysconfig.get_path, kinds), *site.getsitepackages()]
    folders += [site.getusersitepackages(), str(Path(__file__).parents[2])]
    return any(Path(file).is_relative_to(folder) for folder in folders)


def _portable(error: Exception) -> bytes:
    """An error as bytes, with the worker's name where it may be the worker's."""
    import cloudpickle

    if isinstance(error, ConfigError):
        error = ConfigError(error.key, error.given, f"{error.allowed}, on {_host()}", error.hint)
    elif isinstance(error, FedcorError) and not isinstance(error, RecordError):
        error = FedcorError(f"{_host()}: {error}")
    try:
        packed: bytes = cloudpickle.dumps(error)
        pickle.loads(packed)
    except Exception:
        return pickle.dumps(FedcorError(f"{type(error).__name__}: {error}"))
    return packed


def _host() -> str:
    return f"the worker on {socket.gethostname()}"
