"""Truncated and flipped files: never a silently wrong result.

A run is stopped, one of its files is damaged, and it is resumed and read. Right outcomes are:
refused with exit code 2 and nothing touched; the previous checkpoint used, which is said, and the
same record as without damage; the same record at once.
"""

from __future__ import annotations

import io
import re
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from fedcor.core.errors import RecordError
from fedcor.runs.checkpoints import CHECKPOINT, PREVIOUS, parse_checkpoint
from fedcor.runs.record import RECORD, read_run
from fedcor.selectors import selector_names
from torture.calls import call
from torture.crashes import finished, load_before
from torture.tally import Line, Tally

TINY = (
    *("partition.clients=12", "training.clients_per_round=3", "training.local_steps=1"),
    *("model.hidden=[2]", "selectors.fedcor.warmup=3", "selectors.proxy.warmup=3"),
)


def arguments(selector: str, rounds: int, folder: Path) -> list[object]:
    """The command that runs, or resumes, a tiny run."""
    changes = [text for change in TINY for text in ("--set", change)]
    command = ["run", "digits", "--selector", selector, *changes, "--resume"]
    return [*command, "--rounds", rounds, "--out", folder]


def structural(content: bytes) -> list[int]:
    """Every byte of an .npz that is no array's data, and the ends of each array's data."""
    data: set[int] = set()
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for info in archive.infolist():
            start = info.header_offset
            name, extra = content[start + 26 : start + 28], content[start + 28 : start + 30]
            start += 30 + int.from_bytes(name, "little") + int.from_bytes(extra, "little")
            header = 10 + int.from_bytes(content[start + 8 : start + 10], "little")
            data |= set(range(start + header + 1, start + info.file_size - 1))
    return [place for place in range(len(content)) if place not in data]


def flipped(content: bytes, place: int, mask: int) -> bytes:
    """`content` with some bits of one byte turned."""
    return content[:place] + bytes([content[place] ^ mask]) + content[place + 1 :]


def damage_checkpoints(quick: bool) -> list[Line]:
    """Every structural byte of every selector's checkpoint, flipped twice; and every length."""
    flips = Tally("files", "every structural byte of a checkpoint flipped, every selector")
    cuts = Tally("files", "a checkpoint cut short, at every length, every selector")
    names = ["fedcor"] if quick else selector_names()
    with tempfile.TemporaryDirectory(prefix="torture-") as scratch:
        for name in names:
            folder = Path(scratch, name)
            if (made := call(*arguments(name, 8, folder))).code:
                flips.lose(f"{name}: {made.text}")
                continue
            content = (folder / CHECKPOINT).read_bytes()
            places = structural(content)[:: 40 if quick else 1]
            for place in places:
                for mask in (1 << place % 8, 0xFF):
                    _must_refuse(flips, f"{name} {place} {mask}", flipped(content, place, mask))
            for size in range(0, len(content), 400 if quick else 2):
                _must_refuse(cuts, f"{name} cut to {size}", content[:size])
    return [flips.line(), cuts.line()]


def _must_refuse(tally: Tally, what: str, content: bytes) -> None:
    try:
        parse_checkpoint(io.BytesIO(content))
        tally.lose(f"{what}: not noticed")
    except RecordError:
        tally.add("refused")
    except Exception as error:
        tally.lose(f"{what}: {error!r}")


def damage_runs(quick: bool) -> list[Line]:
    """Whole runs, resumed with damaged files."""
    newest = Tally("files", "the newest checkpoint flipped or cut, and the run resumed")
    both = Tally("files", "both checkpoints flipped or cut, and the run resumed")
    records = Tally("files", "every byte of a record flipped, and the run resumed")
    cut = Tally("files", "a record cut short, at every length, and the run resumed")
    read = Tally("files", "every byte of a record flipped, and the run read")
    rng = np.random.default_rng(3)
    with tempfile.TemporaryDirectory(prefix="torture-") as scratch:
        load_before("digits")
        bench = _Bench(Path(scratch))
        content = (bench.stopped / CHECKPOINT).read_bytes()
        places = structural(content)
        chosen = rng.choice(places, 3 if quick else 150, replace=False).tolist()
        for place in chosen:
            damaged = [(flipped, place, 1 << place % 8)]
            damaged += [(lambda old, at, _: old[:at], place, 0)] if place % 3 == 0 else []
            for change, at, mask in damaged:
                for tally, paths in ((newest, [CHECKPOINT]), (both, [CHECKPOINT, PREVIOUS])):
                    files = {
                        # The one before may be shorter.
                        path: change(old, min(at, len(old) - 1), mask)
                        for path in paths
                        if (old := (bench.stopped / path).read_bytes())
                    }
                    bench.resume(tally, f"{change} {at}", files)
        record = (bench.stopped / RECORD).read_bytes()
        free = _free(record)
        for place in _spread(len(record), 20 if quick else len(record), rng):
            if place in free:
                continue
            changed = flipped(record, place, 1 << place % 8)
            bench.resume(records, f"record {place}", {Path(RECORD): changed}, same_rounds=True)
            bench.read(read, f"record {place}", changed)
        for size in _spread(len(record), 6 if quick else 150, rng):
            bench.resume(cut, f"record cut to {size}", {Path(RECORD): record[:size]})
    return [one.line() for one in (newest, both, records, cut, read)]


def _free(record: bytes) -> set[int]:
    """Bytes that may change without a word: the number of planned rounds, which a resumed run may
    change, and the last newline, without which a line is torn."""
    match = re.search(rb'"training":\{"rounds":(\d+)', record.split(b"\n", 1)[0])
    assert match is not None
    return {len(record) - 1, *range(*match.span(1))}


def _spread(size: int, count: int, rng: np.random.Generator) -> Iterator[int]:
    yield from range(size) if count >= size else sorted(rng.choice(size, count, replace=False))


class _Bench:
    """A whole run and one that was stopped, to be damaged in copies."""

    def __init__(self, scratch: Path) -> None:
        self.scratch, self.stopped = scratch, scratch / "stopped"
        for folder, rounds in ((self.stopped, 20), (scratch / "whole", 21)):
            made = call(*arguments("afl", rounds, folder))
            assert made.code == 0, made.text
        self._whole = finished(scratch / "whole")
        self._before = finished(self.stopped)
        self._read = read_run(self.stopped)

    def resume(
        self, tally: Tally, what: str, files: dict[Path, bytes], *, same_rounds: bool = False
    ) -> None:
        """Resume a copy in which `files` have another content; one round more, or none."""
        folder = self.scratch / "copy"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.stopped, folder)
        for path, content in files.items():
            (folder / path).write_bytes(content)
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        ended = call(*arguments("afl", 20 if same_rounds else 21, folder))
        if ended.code == 2:
            after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
            if after == before:
                tally.add("refused")
            else:
                tally.lose(f"{what}: refused, but files were changed")
            return
        wanted = self._before if same_rounds else self._whole
        try:
            same = ended.code == 0 and finished(folder) == wanted
        except (ValueError, AttributeError, RecordError):
            same = False
        if not same:
            tally.lose(f"{what}: code {ended.code}: {ended.text[-800:]}")
        elif "resuming from" in ended.text:
            tally.add("previous checkpoint used, and said")
        else:
            tally.add("same result")

    def read(self, tally: Tally, what: str, record: bytes) -> None:
        """Read a copy whose record has another content."""
        folder = self.scratch / "copy"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.stopped, folder)
        (folder / RECORD).write_bytes(record)
        try:
            run = read_run(folder)
        except RecordError:
            tally.add("refused")
            return
        except Exception as error:
            tally.lose(f"{what}: {error!r}")
            return
        same = (run.header, run.rounds) == (self._read.header, self._read.rounds)
        if same:
            tally.add("same result")
        else:
            tally.lose(f"{what}: read as something else")


PARTS: dict[str, Callable[[bool], list[Line]]] = {
    "files-checkpoints": damage_checkpoints,
    "files-runs": damage_runs,
}
