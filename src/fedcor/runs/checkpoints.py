"""The file of a checkpoint: named arrays, the run they belong to, and a checksum of every byte.

It is an .npz file. The comment at the end of the archive is the checksum of all bytes before it, so
damage is found before anything else is read. Two more arrays say which run it belongs to: the
record's header, and a checksum of the rounds in the record that lead to the checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

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
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Saved:
    """The content of a checkpoint's file.

    Attributes:
        arrays: The named arrays, `round` among them.
        header: The header of the run that wrote it.
        rounds: Checksum of the record's rounds up to it.
    """

    arrays: dict[str, Array]
    header: Mapping[str, Any]
    rounds: str

    @property
    def round(self) -> int:
        """How many rounds were finished."""
        return int(self.arrays["round"])


def save_checkpoint(
    folder: Path, arrays: Mapping[str, Array], header: str, *, rounds: str, keep: bool = True
) -> None:
    """Write a checkpoint of the run in `folder`, as a whole.

    Args:
        folder: The run's folder.
        arrays: Named arrays, `round` among them.
        header: The run's header, as JSON.
        rounds: Checksum of the record's rounds that lead to it.
        keep: Whether the newest checkpoint becomes the previous one. A damaged one must not: the
            previous one is then the only good one until the new one is in place.
    """
    newest = folder / CHECKPOINT
    marks = {
        name: np.frombuffer(text.encode(), dtype=np.uint8)
        for name, text in ((_HEADER, header), (_ROUNDS, rounds))
    }
    with open_whole(newest) as file:
        write_arrays(file, {**arrays, **marks}, _SEAL + b"0" * _DIGITS)
        file.flush()
        size = file.seek(0, os.SEEK_END)
        digest = _digest(file, size - _DIGITS)
        file.seek(size - _DIGITS)
        file.write(digest)
        file.flush()
        os.fsync(file.fileno())
        if keep and newest.exists():
            # The new file is complete. Until it is renamed, the previous one can be used.
            os.replace(newest, folder / PREVIOUS)


def load_checkpoint(path: Path) -> Saved | None:
    """The content of the file; None if there is no such file.

    Raises:
        RecordError: The file is damaged; the message says in which way.
    """
    try:
        with open_plain(path) as file:
            return parse_checkpoint(file)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RecordError(f"it cannot be read: {error.strerror or error}") from error


def load_marks(path: Path) -> Saved | None:
    """Which record the checkpoint in a file belongs to, without its other arrays.

    None if there is no file, or a damaged one.
    """
    try:
        with open_plain(path) as file:
            return _parse(file, ("round", _HEADER, _ROUNDS))
    except (OSError, RecordError):
        return None


def parse_checkpoint(file: IO[bytes]) -> Saved:
    """The content of an open file; see `load_checkpoint`."""
    _check_seal(file)
    return _parse(file)


def _check_seal(file: IO[bytes]) -> None:
    """Refuse a file whose checksum is missing or wrong."""
    size, length = file.seek(0, os.SEEK_END), len(_SEAL) + _DIGITS
    file.seek(max(0, size - length))
    end = file.read(length)
    if not end.startswith(_SEAL):
        raise RecordError("its end is missing, or was overwritten")
    if _digest(file, size - _DIGITS) != end[-_DIGITS:]:
        raise RecordError("its checksum does not match its content")


def _digest(file: IO[bytes], size: int) -> bytes:
    """The checksum of the first `size` bytes, as hexadecimal digits."""
    digest = hashlib.sha256()
    file.seek(0)
    while size > 0 and (block := file.read(min(size, _BLOCK))):
        digest.update(block)
        size -= len(block)
    return digest.hexdigest().encode()


def _parse(file: IO[bytes], names: Sequence[str] = ()) -> Saved:
    """The content of an open file, or its small arrays of these names alone."""
    try:
        file.seek(0)
        with np.load(file, allow_pickle=False) as loaded:
            if any(loaded.zip.getinfo(f"{name}.npy").file_size > _LARGEST_MARK for name in names):
                raise RecordError("it does not say which run it belongs to")
            arrays = {name: loaded[name] for name in names or loaded.files}
        if not all(isinstance(array, np.ndarray) for array in arrays.values()):
            raise RecordError("it holds something else than arrays")  # NumPy returns its bytes
        count = arrays.get("round")
        if count is None or count.shape != () or count.dtype.kind not in "iu" or count < 0:
            raise RecordError("it does not say after which round it was made")
        if not {_HEADER, _ROUNDS} <= arrays.keys():
            raise RecordError("it does not say which run it belongs to")
        header = json.loads(arrays.pop(_HEADER).tobytes())
        if not isinstance(header, dict):
            raise RecordError("it does not say which run it belongs to")
        return Saved(arrays, header, arrays.pop(_ROUNDS).tobytes().decode())
    except RecordError:
        raise
    except Exception as error:  # whatever zipfile and NumPy make of damaged bytes
        raise RecordError(f"its content cannot be read ({type(error).__name__})") from error
