"""How far long work has come: a live line on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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

__all__ = ["show_download", "show_rounds"]


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:.1f} rounds/s")


def _console() -> Console:
    return Console(file=sys.stderr)


@contextmanager
def show_rounds(title: str, total: int) -> Iterator[Callable[[int, str], None]]:
    """Yields `update(rounds done, a note)`: a bar with rate and time left on a terminal, silent elsewhere."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn(), TextColumn("{task.fields[note]}"))  # fmt: skip  # noqa: E501
    console = _console()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=total, note="")
        yield lambda done, note: bar.update(task, completed=done, note=note)


@contextmanager
def show_download() -> Iterator[Callable[[str, int, int | None], None]]:
    """Yields `update(stage, bytes done, bytes in all)`: a bar a stage on a terminal, a line a stage elsewhere."""
    console = _console()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        tasks = {}

        def update(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
                if not console.is_terminal:
                    console.print(stage, highlight=False)
            bar.update(tasks[stage], completed=done, total=total)

        yield update
