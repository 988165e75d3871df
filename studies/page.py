"""The report page of what was reproduced: every run side by side, variants by their names."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from fedcor.core.files import write_whole
from fedcor.reporting.page.data import page_data
from fedcor.reporting.page.render import render_page
from fedcor.runs.record import RunRecord, read_runs


def write_page(out: Path, file: Path) -> Path | None:
    """Write the page of all runs below `out`; None where there are none, as of the toy experiment.

    Args:
        out: where results were written
        file: of the page
    """
    folder = out / "runs"
    if not folder.is_dir():
        return None
    write_whole(file, render_page(page_data(_labelled(read_runs(folder)))))
    return file


def _labelled(runs: list[RunRecord]) -> list[RunRecord]:
    """The runs; variants of one selector are called by their folder, which says what differs."""
    variants: dict[tuple[str, str], set[str]] = defaultdict(set)
    for run in runs:
        assert run.path is not None
        variants[run.header["experiment"], run.header["selector"]].add(run.path.parent.name)
    return [
        RunRecord(run.path, {**run.header, "selector": run.path.parent.name}, run.rounds)
        if run.path is not None
        and len(variants[run.header["experiment"], run.header["selector"]]) > 1
        else run
        for run in runs
    ]
