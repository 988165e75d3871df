"""The command line, called in this process: exit code, text, and whether it hung or wrote aside."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fedcor.cli import main
from fedcor.core.errors import FedcorError

HANG = 30  # seconds of this process that one input may take
SLEEP = 300  # seconds on the clock: a machine may be busy, but what waits for nothing ends
_WRITES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink", "os.link")
_allowed: Path | None = None
_written_aside: list[str] = []


@dataclass(frozen=True)
class Called:
    """How a call ended: its exit code (1 for a traceback) and all that it printed."""

    code: int
    text: str


class Hang(BaseException):
    """A call took too long. Nothing catches it but us."""


def call(*arguments: object) -> Called:
    """Call `fedcor ARGUMENTS`. An error that it does not expect has code 1, with its traceback."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logging.getLogger("fedcor").addHandler(handler)
    try:
        with (
            contextlib.redirect_stdout(stream),
            contextlib.redirect_stderr(stream),
            _time_limit(),
        ):
            code: object = main([str(argument) for argument in arguments])
    except SystemExit as exit:  # of argparse
        code = exit.code
    except (Exception, Hang):
        stream.write(traceback.format_exc())
        code = 1
    finally:
        logging.getLogger("fedcor").removeHandler(handler)
    return Called(code if isinstance(code, int) else 1, stream.getvalue())


def guarded(work: Callable[[], object]) -> str | None:
    """How `work` ended: "taken", "refused" (a FedcorError); None and a print for anything else.

    Raises:
        AssertionError: With the traceback, where an error came that nobody can read, or a hang.
    """
    try:
        with _time_limit():
            work()
        return "taken"
    except FedcorError as error:
        if len(str(error)) > 5000:
            raise AssertionError(f"a message of {len(str(error))} characters") from error
        return "refused"
    except (Exception, Hang) as error:
        raise AssertionError(traceback.format_exc()) from error


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Hang(f"took longer than {HANG} s, or waited for longer than {SLEEP} s")

    before = [signal.signal(one, stop) for one in (signal.SIGPROF, signal.SIGALRM)]
    signal.setitimer(signal.ITIMER_PROF, HANG)
    signal.alarm(SLEEP)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before[0])
        signal.signal(signal.SIGALRM, before[1])


def _watch(event: str, arguments: tuple[object, ...]) -> None:
    if _allowed is None:
        return
    if event == "open":
        path, mode, flags = arguments
        flags = flags if isinstance(flags, int) else 0
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) or set(str(mode)) & set("wax+")
        if not writes or not isinstance(path, str | bytes):
            return
    elif event not in _WRITES:
        return
    else:
        path = arguments[0]
    where = os.path.abspath(os.fsdecode(path)) if isinstance(path, str | bytes) else str(path)
    if not where.startswith((str(_allowed), "/dev/null")) and "__pycache__" not in where:
        _written_aside.append(f"{event} {where}")


@contextlib.contextmanager
def only_within(folder: Path) -> Iterator[list[str]]:
    """Within it, every file that is written, made, renamed or removed elsewhere is listed."""
    global _allowed
    if _watch not in _hooked:
        sys.addaudithook(_watch)
        _hooked.append(_watch)
    _written_aside.clear()
    _allowed = folder.resolve()
    try:
        yield _written_aside
    finally:
        _allowed = None


_hooked: list[object] = []
