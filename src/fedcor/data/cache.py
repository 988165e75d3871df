"""The local cache of public data sets: one `.npz` per data set, which appears whole or not at all.

`SPECS` says what each array of a data set must be, to the byte. These checksums of the content
decide whether data is trusted, whatever its source and however it was packed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fedcor.core.config import expand_home
from fedcor.core.errors import DataError, FedcorError
from fedcor.core.text import one_line
from fedcor.core.types import Array

KEYS = ("x_train", "y_train", "x_test", "y_test")
# One array for each of KEYS.
RawArrays: TypeAlias = dict[str, npt.NDArray[np.uint8]]

SCRATCH_PREFIX = ".fedcor-fetch-"
# Seconds after which a scratch folder belongs to a fetch that was killed.
SCRATCH_AGE_LIMIT = 24 * 3600


@dataclass(frozen=True)
class ArraySpec:
    """What one array of a data set must be, to the byte.

    Attributes:
        key: Name of the array in the cache file.
        file: The file that holds it, as messages name it.
        shape: Shape of the uint8 array.
        sha256: SHA-256 of `header` followed by the array's bytes in C order.
        header: Bytes that precede the array in its file.
    """

    key: str
    file: str
    shape: tuple[int, ...]
    sha256: str
    header: bytes = b""

    def verified(self, content: bytes | memoryview) -> npt.NDArray[np.uint8]:
        """The array in `content` (header and bytes), once its checksum has been compared."""
        actual = hashlib.sha256(content).hexdigest()
        if actual != self.sha256:
            raise DataError(
                f"{self.file}: wrong content, SHA-256 is {actual} but should be {self.sha256}"
            )
        return np.frombuffer(content, np.uint8, offset=len(self.header)).reshape(self.shape)


def _idx(key: str, file: str, shape: tuple[int, ...], sha256: str) -> ArraySpec:
    """An array in an idx file, whose header states the number of axes and their lengths."""
    header = struct.pack(f">{1 + len(shape)}I", 0x800 + len(shape), *shape)
    return ArraySpec(key, file, shape, sha256, header)


# fmt: off
SPECS: dict[str, tuple[ArraySpec, ...]] = {
    "fmnist": (
        _idx("x_train", "train-images-idx3-ubyte", (60000, 28, 28),
             "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888"),
        _idx("y_train", "train-labels-idx1-ubyte", (60000,),
             "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9"),
        _idx("x_test", "t10k-images-idx3-ubyte", (10000, 28, 28),
             "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b"),
        _idx("y_test", "t10k-labels-idx1-ubyte", (10000,),
             "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"),
    ),
    "cifar10": (
        ArraySpec("x_train", "CIFAR-10 train images", (50000, 32, 32, 3),
                  "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a"),
        ArraySpec("y_train", "CIFAR-10 train labels", (50000,),
                  "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253"),
        ArraySpec("x_test", "CIFAR-10 test images", (10000, 32, 32, 3),
                  "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04"),
        ArraySpec("y_test", "CIFAR-10 test labels", (10000,),
                  "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5"),
    ),
}
# fmt: on


def cache_dir() -> Path:
    """The folder of fetched data: the one that `FEDCOR_DATA` names, else in the user's cache."""
    if chosen := os.environ.get("FEDCOR_DATA"):
        return expand_home("FEDCOR_DATA", chosen)
    import platformdirs

    return Path(platformdirs.user_cache_dir("fedcor")) / "data"


def cache_file(name: str) -> Path:
    """The cache file of the data set `name`, whether or not it exists."""
    return cache_dir() / f"{name}.npz"


@contextlib.contextmanager
def open_npz(path: Path, keys: Sequence[str]) -> Iterator[Any]:
    """An `.npz` file with the arrays `keys`. Raises DataError for what cannot be read of it."""
    try:
        # Opened here, since np.load does not close a file that turns out to be damaged.
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if isinstance(archive, np.ndarray):
                raise DataError(
                    f"{path}: a single array, but should be an .npz of {', '.join(keys)}"
                )
            if missing := [key for key in keys if key not in archive.files]:
                present = one_line(", ".join(archive.files)) or "nothing"
                raise DataError(f"{path}: has no {', '.join(missing)}, only {present}")
            yield archive
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except FedcorError:
        raise
    # A damaged archive fails in zipfile, zlib or numpy, each with its own errors.
    except Exception as error:
        raise DataError(f"{path}: cannot be read ({one_line(error)})") from error


def read_npz(path: Path) -> dict[str, Array]:
    """The four arrays of an `.npz` in fedcor's layout, checked against the archive's own CRC."""
    with open_npz(path, KEYS) as archive:
        return {key: archive[key] for key in KEYS}


def read_cache(name: str) -> RawArrays:
    """The raw arrays of a fetched data set."""
    path = cache_file(name)
    if not path.exists():
        missing = f"{name} has not been fetched ({path} does not exist)"
        raise DataError(f"{missing}: run `fedcor data fetch {name}`")
    advice = f"run `fedcor data fetch {name}` again"
    try:
        arrays = read_npz(path)
    except DataError as error:
        raise DataError(f"{error}: {advice}") from error
    for spec in SPECS[name]:
        if arrays[spec.key].dtype != np.uint8 or arrays[spec.key].shape != spec.shape:
            raise DataError(f"{path}: {spec.key} is not the array that was fetched: {advice}")
    return arrays


def is_intact(name: str) -> bool:
    """Whether the cache holds exactly this data set."""
    try:
        arrays = read_cache(name)
        for spec in SPECS[name]:
            spec.verified(spec.header + arrays[spec.key].tobytes())
    except DataError:
        return False
    return True


@contextlib.contextmanager
def _scratch_folder() -> Iterator[Path]:
    """A temporary folder beside the cache files, so that a finished file is moved by renaming."""
    home = cache_dir()
    home.mkdir(parents=True, exist_ok=True)
    for leftover in home.glob(f"{SCRATCH_PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):  # its own fetch has just removed it
            if time.time() - leftover.stat().st_mtime > SCRATCH_AGE_LIMIT:
                shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=SCRATCH_PREFIX, dir=home) as folder:
        yield Path(folder)


def store(name: str, obtain: Callable[[Path], RawArrays]) -> Path:
    """Puts a data set into the cache, whole or not at all.

    Args:
        name: The data set.
        obtain: Returns its verified arrays; it may use the scratch folder that it is given.

    Returns:
        The cache file.
    """
    target = cache_file(name)
    try:
        with _scratch_folder() as scratch:
            arrays: dict[str, Any] = {**obtain(scratch)}
            complete = scratch / "complete.npz"
            with complete.open("wb") as file:
                np.savez(file, **arrays)
                file.flush()
                os.fsync(file.fileno())
            os.replace(complete, target)
    except OSError as error:
        raise DataError(
            f"cannot write to {cache_dir()} ({error}): set FEDCOR_DATA to a folder with room"
        ) from error
    return target
