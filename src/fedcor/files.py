"""Files that are replaced as a whole: a reader, or a crash, sees the old file or the new one."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fedcor.errors import RecordError
from fedcor.types import Array

__all__ = ["save_arrays", "write_whole"]


def write_whole(path: Path, content: bytes) -> None:
    """Replace `path` by `content` atomically. Missing folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def save_arrays(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write named arrays to an .npz file, as a whole and without pickle."""
    for name, array in arrays.items():
        if array.dtype.hasobject:
            raise RecordError(
                f"the array {name!r} holds Python objects; a file takes plain arrays only"
            )
    content = io.BytesIO()
    np.savez(content, **dict(arrays))  # type: ignore[arg-type]
    write_whole(path, content.getvalue())
