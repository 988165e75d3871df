"""Files that are replaced as a whole: a reader, or a crash, sees the old file or the new one."""

from __future__ import annotations

import errno
import os
import re
import stat
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from fedcor.core.errors import RecordError
from fedcor.core.types import Array


def open_plain(path: Path) -> IO[bytes]:
    """A plain file, to read. Raises OSError for anything else: reading a pipe would never end."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a plain file", str(path))
    return os.fdopen(descriptor, "rb")


def read_plain(path: Path) -> bytes:
    """The content of a plain file; see `open_plain`."""
    with open_plain(path) as file:
        return file.read()


@contextmanager
def open_whole(path: Path) -> Iterator[IO[bytes]]:
    """A new file, to write and read, that replaces `path` when the block ends without an error.

    Missing folders are made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # of a dead process that had our number
        with temporary.open("x+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes) -> None:
    """Replace `path` by `content` atomically. Missing folders are made."""
    with open_whole(path) as file:
        file.write(content)


def remove_leftovers(paths: Iterable[Path]) -> None:
    """Remove what processes that were killed while they wrote `paths` left beside them.

    Nobody else may be writing these paths meanwhile.
    """
    for path in paths:
        pattern = re.compile(rf"\.{re.escape(path.name)}\.\d+\.tmp")
        found = list(path.parent.iterdir()) if path.parent.is_dir() else []
        for one in found:
            if pattern.fullmatch(one.name) and (one.is_symlink() or one.is_file()):
                one.unlink(missing_ok=True)


def write_arrays(file: IO[bytes], arrays: Mapping[str, Array], comment: bytes = b"") -> None:
    """Write named arrays as .npz, without pickle; the file ends with `comment`."""
    for name, array in arrays.items():
        if array.dtype.hasobject:
            raise RecordError(
                f"the array {name!r} holds Python objects; a file takes plain arrays only"
            )
    with zipfile.ZipFile(file, "w") as archive:
        archive.comment = comment
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)


def save_arrays(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write named arrays to an .npz file, as a whole and without pickle."""
    with open_whole(path) as file:
        write_arrays(file, arrays)
