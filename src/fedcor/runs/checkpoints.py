"""The file of a checkpoint: named arrays, the run that they are of, and a checksum of all bytes.

It is an .npz file whose last bytes, the comment of the archive, are the checksum of all bytes
before it. So damage is found before anything else of the file is read. The header of the run is
one more array, and so is a checksum of the record's rounds that lead to it.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from fedcor.core.errors import RecordError
from fedcor.core.files import open_plain, open_whole, write_arrays
from fedcor.core.types import Array

CHECKPOINT = Path("checkpoint") / "state.npz"
PREVIOUS = Path("checkpoint") / "previous.npz"
REFUSED = Path("checkpoint") / "refused.npz"
_HEADER = "header"  # name of the array with the run's header
_ROUNDS = "record_sha256"  # name of the array with the checksum of the record's rounds
_LARGEST_MARK = 1 << 24  # bytes: no header is larger
_SEAL = b"fedcor checkpoint 1 sha256 "
_DIGITS = 64
_END = 22  # bytes of the record that ends an archive without a comment
_BLOCK = 1 << 20


class Marks(NamedTuple):
    """Of which record a checkpoint is: its header, how many rounds, and their checksum."""

    header: Mapping[str, Any]
    round: int
    rounds: str


@dataclass(frozen=True)
class Saved:
    """What a checkpoint's file holds.

    Attributes:
        arrays: The named arrays, `round` among them.
        header: The header of the run that wrote it; None in files of version 0.2 and before.
        rounds: Checksum of the record's rounds up to it; None in files of version 0.2 and before.
    """

    arrays: dict[str, Array]
    header: Mapping[str, Any] | None
    rounds: str | None = None

    @property
    def round(self) -> int:
        """How many rounds were finished."""
        return int(self.arrays["round"])

    @property
    def marks(self) -> Marks | None:
        """Of which record it is; None in files of version 0.2 and before."""
        if self.header is None or self.rounds is None:
            return None
        return Marks(self.header, self.round, self.rounds)


def save_checkpoint(
    folder: Path,
    arrays: Mapping[str, Array],
    header: str,
    *,
    keep: bool = True,
    rounds: str | None = None,
) -> None:
    """Write a checkpoint of the run in `folder`, as a whole.

    Args:
        folder: The run's folder.
        arrays: Named arrays, `round` among them.
        header: The run's header, as JSON.
        keep: Whether the newest checkpoint becomes the previous one. Where it is damaged, it must
            not: then the previous one is the only good one until the new one is in place.
        rounds: Checksum of the record's rounds that lead to it.
    """
    newest = folder / CHECKPOINT
    texts = {_HEADER: header} if rounds is None else {_HEADER: header, _ROUNDS: rounds}
    own = {name: np.frombuffer(text.encode(), dtype=np.uint8) for name, text in texts.items()}
    with open_whole(newest) as file:
        write_arrays(file, {**arrays, **own}, _SEAL + b"0" * _DIGITS)
        file.flush()
        size = file.seek(0, os.SEEK_END)
        digest = _digest(file, size - _DIGITS)
        file.seek(size - _DIGITS)
        file.write(digest)
        file.flush()
        os.fsync(file.fileno())
        if keep and newest.exists():
            # The new file is complete. Between here and its renaming, the previous one is there.
            os.replace(newest, folder / PREVIOUS)


def load_checkpoint(path: Path) -> Saved | None:
    """What the file holds; None where there is none.

    Raises:
        RecordError: The file is damaged; the message says how one sees that.
    """
    try:
        with open_plain(path) as file:
            return parse_checkpoint(file)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RecordError(f"it cannot be read: {error.strerror or error}") from error


def load_marks(path: Path) -> Marks | None:
    """Of which record the checkpoint in a file is, without reading its large arrays.

    None where it cannot be said: there is no file, or it is damaged, or of an earlier version.
    """
    try:
        with open_plain(path) as file, np.load(file, allow_pickle=False) as loaded:
            names = ("round", _HEADER, _ROUNDS)
            sizes = (loaded.zip.getinfo(f"{name}.npy").file_size for name in names)
            if max(sizes) > _LARGEST_MARK:
                return None
            count, header, rounds = (loaded[name] for name in names)
        return Marks(json.loads(header.tobytes()), int(count), rounds.tobytes().decode())
    except Exception:  # whatever zipfile and NumPy make of damaged bytes
        return None


def parse_checkpoint(file: IO[bytes]) -> Saved:
    """What an open file holds; see `load_checkpoint`."""
    sealed = _check_seal(file)
    saved = _parse(file, sealed)
    count = saved.arrays.get("round")
    if count is None or count.shape != () or count.dtype.kind not in "iu" or saved.round < 0:
        raise RecordError("it does not say after which round it was made")
    return saved


def _check_seal(file: IO[bytes]) -> bool:
    """Whether the file has a checksum, which is then right; refuses one that is damaged.

    Files of earlier versions have none. They end with the end of an archive that has no comment,
    which no piece of a file with a checksum does.
    """
    size, length = file.seek(0, os.SEEK_END), len(_SEAL) + _DIGITS
    file.seek(max(0, size - length))
    end = file.read(length)
    if end.startswith(_SEAL):
        if _digest(file, size - _DIGITS) != end[-_DIGITS:]:
            raise RecordError("its checksum does not match its content")
        return True
    if end[-_END:].startswith(b"PK\5\6") and end.endswith(b"\0\0"):
        return False
    raise RecordError("its end is missing, or was overwritten")


def _digest(file: IO[bytes], size: int) -> bytes:
    """The checksum of the first `size` bytes, as hexadecimal digits."""
    digest = hashlib.sha256()
    file.seek(0)
    while size > 0 and (block := file.read(min(size, _BLOCK))):
        digest.update(block)
        size -= len(block)
    return digest.hexdigest().encode()


def _parse(file: IO[bytes], sealed: bool) -> Saved:
    """The content of a file; one without a checksum is held against those of its parts."""
    try:
        file.seek(0)
        if not sealed:
            with zipfile.ZipFile(file) as archive:
                # NumPy reads no further than an array's header says, and so compares nothing.
                # zipfile does not compare how many parts it finds with how many there were.
                file.seek(-12, os.SEEK_END)
                count = int.from_bytes(file.read(2), "little")
                if archive.testzip() is not None or len(archive.infolist()) != count:
                    raise RecordError("its checksums do not match its content")
            file.seek(0)
        with np.load(file, allow_pickle=False) as loaded:
            arrays = {name: loaded[name] for name in loaded.files}
        if not all(isinstance(array, np.ndarray) for array in arrays.values()):
            raise RecordError("it holds something else than arrays")  # NumPy returns its bytes
        header = json.loads(arrays.pop(_HEADER).tobytes()) if _HEADER in arrays else None
        if header is not None and not isinstance(header, dict):
            raise RecordError("it does not say of which run it is")
        rounds = arrays.pop(_ROUNDS).tobytes().decode() if _ROUNDS in arrays else None
        return Saved(arrays, header, rounds)
    except RecordError:
        raise
    except Exception as error:  # whatever zipfile and NumPy make of damaged bytes
        raise RecordError(f"its content cannot be read ({type(error).__name__})") from error
