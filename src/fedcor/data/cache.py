"""The local cache of public data sets: what each array must be, to the byte, and one `.npz` a data set that appears whole."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fedcor.errors import DataError, FedcorError
from fedcor.types import Array

__all__ = ["PARTS", "Raw", "cache_dir", "cache_file", "intact", "keep", "read_cache", "read_npz"]

KEYS = ("x_train", "y_train", "x_test", "y_test")
Raw: TypeAlias = dict[str, npt.NDArray[np.uint8]]  # one array for each of KEYS

SCRATCH = ".fedcor-fetch-"
STALE = 24 * 3600  # seconds after which a scratch folder belongs to a fetch that was killed


@dataclass(frozen=True)
class _Part:
    """One array of a data set: what it must be, to the byte."""

    key: str
    file: str  # as messages name it
    shape: tuple[int, ...]
    sha256: str  # of header + bytes in C order
    header: bytes = b""

    def check(self, content: bytes | memoryview) -> npt.NDArray[np.uint8]:
        """The array in `content`, header and all."""
        got = _sha256(content)
        if got != self.sha256:
            raise DataError(
                f"{self.file}: wrong content, SHA-256 is {got} but should be {self.sha256}"
            )
        return np.frombuffer(content, np.uint8, offset=len(self.header)).reshape(self.shape)


def _sha256(*contents: bytes | memoryview) -> str:
    digest = hashlib.sha256()
    for content in contents:
        digest.update(content)
    return digest.hexdigest()


def _idx(key: str, file: str, shape: tuple[int, ...], sha256: str) -> _Part:
    return _Part(
        key, file, shape, sha256, struct.pack(f">{1 + len(shape)}I", 0x800 + len(shape), *shape)
    )


# fmt: off
PARTS: dict[str, tuple[_Part, ...]] = {
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
        _Part("x_train", "CIFAR-10 train images", (50000, 32, 32, 3),
              "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a"),
        _Part("y_train", "CIFAR-10 train labels", (50000,),
              "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253"),
        _Part("x_test", "CIFAR-10 test images", (10000, 32, 32, 3),
              "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04"),
        _Part("y_test", "CIFAR-10 test labels", (10000,),
              "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5"),
    ),
}
# fmt: on


def cache_dir() -> Path:
    """Where fetched data is kept: the folder that FEDCOR_DATA names, else the user's cache."""
    if chosen := os.environ.get("FEDCOR_DATA"):
        return Path(chosen).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("fedcor")) / "data"


def cache_file(name: str) -> Path:
    return cache_dir() / f"{name}.npz"


def read_npz(path: Path) -> dict[str, Array]:
    """The four arrays of an `.npz` in fedcor's layout, checked against the archive's own CRC on the way."""
    try:
        with path.open(
            "rb"
        ) as file:  # by us, since np.load forgets to close a file that turns out to be damaged
            archive = np.load(file, allow_pickle=False)
            if isinstance(archive, np.ndarray):
                raise DataError(
                    f"{path}: a single array, but should be an .npz of {', '.join(KEYS)}"
                )
            if missing := [key for key in KEYS if key not in archive.files]:
                raise DataError(
                    f"{path}: has no {', '.join(missing)}, only {', '.join(archive.files) or 'nothing'}"
                )
            return {key: archive[key] for key in KEYS}
    except FileNotFoundError:
        raise DataError(f"{path}: there is no such file") from None
    except FedcorError:
        raise
    except (
        Exception
    ) as error:  # a damaged archive fails in zipfile, zlib or numpy, each with errors of its own
        raise DataError(f"{path}: cannot be read ({error})") from error


def read_cache(name: str) -> Raw:
    """The raw arrays of a fetched data set."""
    path = cache_file(name)
    advice = f"run `fedcor data fetch {name}` again"
    try:
        arrays = read_npz(path)
    except DataError as error:
        raise DataError(f"{error}: {advice}") from error
    for part in PARTS[name]:
        if arrays[part.key].dtype != np.uint8 or arrays[part.key].shape != part.shape:
            raise DataError(f"{path}: {part.key} is not the array that was fetched: {advice}")
    return arrays


def intact(name: str) -> bool:
    """Whether the cache holds exactly this data set."""
    if not cache_file(name).exists():
        return False
    try:
        arrays = read_cache(name)
    except DataError:
        return False
    return all(_sha256(part.header, arrays[part.key].data) == part.sha256 for part in PARTS[name])


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """A folder beside the cache files, so that a finished file is moved by renaming; gone afterwards, come what may."""
    home = cache_dir()
    home.mkdir(parents=True, exist_ok=True)
    for left in home.glob(f"{SCRATCH}*"):
        if time.time() - left.stat().st_mtime > STALE:
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=home) as folder:
        yield Path(folder)


def keep(name: str, obtain: Callable[[Path], Raw]) -> Path:
    """Obtains a data set in a scratch folder and puts it into the cache, whole or not at all."""
    target = cache_file(name)
    try:
        with _scratch() as scratch:
            arrays: dict[str, Any] = {**obtain(scratch)}
            whole = scratch / "whole.npz"
            with whole.open("wb") as file:
                np.savez(file, **arrays)
                file.flush()
                os.fsync(file.fileno())
            os.replace(whole, target)
    except OSError as error:
        raise DataError(
            f"cannot write to {cache_dir()} ({error}): set FEDCOR_DATA to a folder with room"
        ) from error
    return target
