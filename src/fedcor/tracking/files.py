"""The files of trackers in a run's folder: what they remember, and what they attach."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from fedcor.errors import MissingExtraError, RecordError
from fedcor.files import write_whole
from fedcor.record import CLIENT_NAMES, RECORD

__all__ = ["check_installed", "copy_attachments", "no_link", "recall", "remember"]

REPORT = "report.html"


def check_installed(package: str, extra: str) -> None:
    """Raise MissingExtraError if `package` is not there; it is not imported."""
    from importlib.util import find_spec

    found = find_spec(package)
    # A folder that is called so, as `wandb` makes one, passes for a package without an origin.
    if found is None or found.origin is None:
        raise MissingExtraError(package, extra)


def no_link(path: Path) -> Path:
    """`path`; nothing is written through a symbolic link in a run's folder."""
    if path.is_symlink():
        raise RecordError(f"{path} is a symbolic link: replace it by what it points to")
    return path


def remember(folder: Path, name: str, values: Mapping[str, str]) -> None:
    """Write what a tracker needs to go on, to `NAME.json`."""
    write_whole(no_link(folder / f"{name}.json"), (json.dumps(dict(values)) + "\n").encode())


def recall(folder: Path, name: str) -> dict[str, str]:
    """What was written by `remember`; empty if there is nothing that can be read."""
    try:
        found = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {key: value for key, value in found.items() if isinstance(value, str)}


def copy_attachments(folder: Path, to: Path) -> list[Path]:
    """Copy what is attached at the end: the record, the clients' names, the page; if they exist.

    The copy of the record has another name: below the folder of a comparison, it would be read as
    one more run.
    """
    names = {RECORD: "record.jsonl", CLIENT_NAMES: CLIENT_NAMES, REPORT: REPORT}
    found = {name: to / copied for name, copied in names.items() if (folder / name).is_file()}
    for name, path in found.items():
        shutil.copyfile(folder / name, path)
    return list(found.values())
