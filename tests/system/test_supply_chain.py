"""What we install: pinned, free, and data over TLS where an address allows it."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest
from torture.licences import licence_of, main, needed, problem_of

from fedcor.data.downloads import ADDRESSES

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"


def installed():
    """Name -> version of all that the extra `dev` needs and that is there."""
    found = {}
    for name in needed("fedcor", "dev"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # for another system
            continue
    return found


def test_every_package_is_pinned():
    lines = [line for line in CONSTRAINTS.read_text().splitlines() if not line.startswith("#")]
    pins = dict(line.split("==") for line in lines if line)
    pins = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins.items()}
    found = installed()
    assert len(found) > 100
    # What follows a plus is the build of the same version.
    wrong = {
        name: (version, pins.get(name))
        for name, version in found.items()
        if version.partition("+")[0] != pins.get(name)
    }
    assert wrong == {}


def test_every_licence_is_known_and_free(capsys):
    assert main() == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert len(out.splitlines()) == len(installed())
    assert re.search(r"^numpy +\S+ +BSD-3-Clause", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("licence", "problem"),
    [
        ("MIT", ""),
        ("Apache-2.0 OR GPL-3.0", ""),
        ("BSD-3-Clause AND BSL-1.0", ""),
        ("", "unknown"),
        ("GPL-3.0", "not in the list: GPL-3.0"),
        ("MIT AND Proprietary", "not in the list: Proprietary"),
        ("Limited use", "not in the list: Limited use"),
        ("BUSL-1.1", "not in the list: BUSL-1.1"),
    ],
)
def test_what_is_free(licence, problem):
    assert problem_of(licence) == problem


def test_licences_are_read_from_the_metadata():
    assert licence_of("numpy").startswith("BSD-3-Clause")


@pytest.mark.parametrize("name", ADDRESSES)
def test_data_is_asked_for_over_tls_first(name):
    encrypted = [address.startswith("https://") for address in ADDRESSES[name]]
    assert encrypted[0]
    assert encrypted == sorted(encrypted, reverse=True)
