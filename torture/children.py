"""Child processes that are killed: forked, so that nothing is imported twice."""

from __future__ import annotations

import io
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

TIMEOUT = 300.0  # seconds: what takes longer hangs
_POLL = 0.0005


@dataclass(frozen=True)
class Ended:
    """How a child process ended.

    Attributes:
        code: Its exit code; minus the signal that ended it.
        text: What it printed.
        seconds: How long it ran.
    """

    code: int
    text: str
    seconds: float

    @property
    def killed(self) -> bool:
        """Whether `kill -9` ended it."""
        return self.code == -signal.SIGKILL

    @property
    def traceback(self) -> bool:
        """Whether it printed a traceback."""
        return "Traceback (most recent call last)" in self.text


def run_in_child(
    work: Callable[[], int], output: Path, *, kill_after: float | None = None
) -> Ended:
    """Run `work` in a forked process, and kill it after some seconds if it still runs.

    A process that takes longer than `TIMEOUT` is killed, too, and its text says so.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    started = time.perf_counter()
    child = os.fork()
    if not child:
        _be_child(work, output)
    limit = TIMEOUT if kill_after is None else kill_after
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.perf_counter() - started > limit:
            os.kill(child, signal.SIGKILL)
            ended = os.waitpid(child, 0)
            break
        time.sleep(_POLL)
    seconds = time.perf_counter() - started
    text = output.read_text(encoding="utf-8", errors="replace")
    hung = kill_after is None and seconds > TIMEOUT
    code = os.waitstatus_to_exitcode(ended[1])
    return Ended(1 if hung else code, f"{text}\n(hung)" if hung else text, seconds)


def _be_child(work: Callable[[], int], output: Path) -> NoReturn:
    code = 1
    try:
        target = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(target, 1)
        os.dup2(target, 2)
        sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", 0, closefd=False), write_through=True)
        sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", 0, closefd=False), write_through=True)
        code = work()
    except SystemExit as exit:  # of argparse
        code = exit.code if isinstance(exit.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def die() -> NoReturn:
    """End this process as `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def die_at_file_operation(folder: Path, number: int) -> None:
    """Kill this process just before its `number`-th operation on files in `folder`, from 1.

    Operations are opening, renaming, removing, and making folders.
    """
    left, within = number, str(folder)

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if event in ("open", "os.rename", "os.remove", "os.mkdir") and str(arguments[0]).startswith(
            within
        ):
            left -= 1
            if not left:
                die()

    sys.addaudithook(watch)


def die_while_writing(number: int, share: float) -> None:
    """Kill this process in its `number`-th checkpoint, when `share` of its bytes are written."""
    from fedcor.runs import checkpoints

    write, left = checkpoints.write_arrays, number

    def write_a_part(file, arrays, comment=b""):  # type: ignore[no-untyped-def]
        nonlocal left
        left -= 1
        if left:
            write(file, arrays, comment)
            return
        whole = io.BytesIO()
        write(whole, arrays, comment)
        file.write(whole.getvalue()[: int(share * len(whole.getvalue()))])
        file.flush()
        die()

    checkpoints.write_arrays = write_a_part
