"""Progress of long work: a live bar on a terminal, nothing or a few lines elsewhere."""

from __future__ import annotations

import html
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from fedcor.core.text import one_line

NOTEBOOK_EVERY = 0.2  # seconds between two changes of a bar


class _RoundsPerSecond(ProgressColumn):
    """The column with the rate."""

    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:.1f} rounds/s")


def _console() -> Console:
    return Console(file=sys.stderr)


def _progress(console: Console, *numbers: ProgressColumn) -> Progress:
    """A title, a bar and numbers; shown on a terminal only."""
    title = TextColumn("{task.description}", markup=False)
    hidden = not console.is_terminal
    return Progress(title, BarColumn(), *numbers, console=console, disable=hidden)


@contextmanager
def show_rounds(title: str, total: int) -> Iterator[Callable[[int, str], None]]:
    """A bar with rate and time left on a terminal, a plain one in a notebook; nothing elsewhere.

    Args:
        title: What the bar is called.
        total: How many rounds there are.

    Yields:
        `update(done, note)`: shows the number of rounds that are done, and a note at the end.
    """
    console, title = _console(), one_line(title)
    if console.is_jupyter:
        with _show_in_notebook(title, total) as update:
            yield update
        return
    note_column = TextColumn("{task.fields[note]}", markup=False)
    numbers = MofNCompleteColumn(), _RoundsPerSecond(), TimeRemainingColumn(), note_column
    with _progress(console, *numbers) as bar:
        task = bar.add_task(title, total=total, note="")
        yield lambda done, note: bar.update(task, completed=done, note=note)


def score_note(accuracy: float | None, loss: float | None) -> str:
    """`accuracy 0.812`, or the loss if there is no accuracy."""
    for name, value, digits in (("accuracy", accuracy, ".3f"), ("loss", loss, ".4g")):
        if value is not None and math.isfinite(value):
            return f"{name} {value:{digits}}"
    return "loss not finite"


@contextmanager
def _show_in_notebook(title: str, total: int) -> Iterator[Callable[[int, str], None]]:
    """A bar of HTML, which needs no widgets."""
    from IPython.display import display

    show: Any = display
    shown, latest = 0.0, (0, "")

    def content() -> dict[str, str]:
        text = html.escape(f"{title} {latest[0]}/{total} {latest[1]}".strip())
        bar = f'<progress value="{latest[0]}" max="{total}"></progress>'
        return {"text/plain": html.unescape(text), "text/html": f"{bar} {text}"}

    handle = show(content(), raw=True, display_id=True)

    def update(done: int, note: str) -> None:
        nonlocal shown, latest
        latest = done, note
        if time.monotonic() - shown >= NOTEBOOK_EVERY:
            shown = time.monotonic()
            handle.update(content(), raw=True)

    try:
        yield update
    finally:
        handle.update(content(), raw=True)


@contextmanager
def refresh(show: Callable[[], None], seconds: float = 0.5) -> Iterator[None]:
    """Call `show` every few `seconds` in a thread while the block runs, and once when it is done.

    For work in other processes, whose progress is read from the files that they write.
    """
    finished = threading.Event()

    def repeat() -> None:
        while not finished.wait(seconds):
            with suppress(OSError):  # a disk that does not answer for a moment
                show()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()
    with suppress(OSError):
        show()


@contextmanager
def show_download() -> Iterator[Callable[[str, int, int | None], None]]:
    """One bar per stage of a download on a terminal; one line per stage elsewhere.

    Yields:
        `update(stage, done, total)`: shows the number of bytes that are done; `total` is None where
        it is unknown.
    """
    console = _console()
    numbers = DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with _progress(console, *numbers) as bar:
        tasks = {}

        def update(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
                if not console.is_terminal:
                    console.print(stage, highlight=False, markup=False)
            bar.update(tasks[stage], completed=done, total=total)

        yield update
