"""Weights & Biases: an offline run beside the runs, which `wandb sync` can send later."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from fedcor.core.types import IntArray
from fedcor.runs.record import RunRecord
from fedcor.runs.tracking.callback import (
    HISTOGRAM_EVERY,
    RoundTracker,
    StartedRun,
    check_installed,
    copy_attachments,
    recall,
    remember,
)

_MOST_BARS = 512  # of a histogram of W&B
_OFFLINE = "offline-run-"


@dataclass
class WandB(RoundTracker):
    """Writes history, configuration, the selection histogram and files to a W&B run.

    It is offline unless WANDB_MODE says otherwise, in `wandb/` in the folder of the comparison, or
    of the run if it is a single one. A resumed run keeps its id (`wandb.json` in the run's folder).
    Offline, its folder is replaced by one that begins with the rounds that are not run again.
    Online, rounds that the server has are skipped.
    """

    def __post_init__(self) -> None:
        check_installed("wandb", "wandb")
        self._run: Any = None

    def open(self, run: StartedRun, folder: Path) -> None:
        """Open the run."""
        # Read when wandb is imported: it reports its errors to its vendor otherwise.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        mode: Any = os.environ.get("WANDB_MODE", "offline")
        before = recall(folder, "wandb") if run.resumed else {}
        place = (run.root or folder).resolve()
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "fedcor"),
            group=str(run.header.get("experiment")),
            name=run.name,
            id=before.get("id", uuid4().hex[:12]),
            resume="allow",
            config={key: value for key, value in run.header.items() if key != "kind"},
            dir=str(place),
            mode=mode,
            reinit="create_new",
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                save_code=False,
                x_disable_stats=True,
                x_disable_machine_info=True,
            ),
        )
        self._first = 0 if mode == "offline" else self._run.step  # earlier ones are on the server
        written = os.path.relpath(Path(self._run.dir).parent, folder.resolve())
        remember(folder, "wandb", {"id": self._run.id, "folder": written})
        # Only now that the new one is open: where W&B refuses it, the old one is kept.
        if mode == "offline" and before.get("folder") not in (None, written):
            _remove_offline(folder / before["folder"], before.get("id", ""))

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Write the round's numbers."""
        if step < self._first:
            return
        if (step + 1) % HISTOGRAM_EVERY == 0:
            values["selection"] = self._histogram()
        self._run.log(values, step=step)

    def flush(self) -> None:
        """Nothing: W&B has a process of its own that writes."""

    def on_end(self, run: RunRecord) -> None:
        """Write the last histogram and the files, and end the run."""
        assert run.path is not None
        folder = Path(self._run.dir)
        table = folder / "selection.csv"
        table.write_text(self.tally.table(self.clients), encoding="utf-8")
        for path in (*copy_attachments(run.path, folder), table):
            self._run.save(str(path), base_path=str(folder), policy="now")
        self._run.summary["selection"] = self._histogram()
        self._run.finish()
        self._run = None

    def close(self) -> None:
        """Say that the run was ended early, if it was."""
        if self._run is not None:
            run, self._run = self._run, None
            run.finish(exit_code=1)

    def _histogram(self) -> Any:
        import wandb

        counts, edges = bars(self.tally.counts(self.clients))
        return wandb.Histogram(np_histogram=(counts.tolist(), edges.tolist()))


def bars(counts: IntArray, most: int = _MOST_BARS) -> tuple[IntArray, IntArray]:
    """A bar per client, or per several neighbours if there are too many; and the bars' edges."""
    width = -(-len(counts) // most)
    edges = np.arange(0, len(counts) + width, width)
    padded = np.zeros((len(edges) - 1) * width, dtype=counts.dtype)
    padded[: len(counts)] = counts
    return padded.reshape(-1, width).sum(axis=1), edges


def _remove_offline(folder: Path, id: str) -> None:
    """Remove an offline run that is written anew; anything else is left alone."""
    ours = folder.name.startswith(_OFFLINE) and (folder / f"run-{id}.wandb").is_file()
    if ours and folder.parent.name == "wandb" and not folder.is_symlink():
        shutil.rmtree(folder)
