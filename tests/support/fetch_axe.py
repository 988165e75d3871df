"""Fetches axe-core, which the browser tests run: python tests/support/fetch_axe.py VERSION FILE.

It is not in the repository, as it is large. npm's registry is asked, or the one that the variable
NPM_CONFIG_REGISTRY names. Its checksum is compared.
"""

from __future__ import annotations

import hashlib
import io
import os
import sys
import tarfile
import urllib.request
from pathlib import Path

REGISTRY = "https://registry.npmjs.org"
CHECKSUMS = {
    "4.14.0": "20c09fe157a8a34a30e241aaa1fcdade657734f08ab379ecfbeb7d45cc46e878"
}  # of axe.min.js


def main(version: str, file: str) -> None:
    registry = os.environ.get("NPM_CONFIG_REGISTRY", REGISTRY).rstrip("/")
    address = f"{registry}/axe-core/-/axe-core-{version}.tgz"
    with urllib.request.urlopen(address, timeout=60) as answer:
        packed = io.BytesIO(answer.read())
    with tarfile.open(fileobj=packed) as archive:
        member = archive.extractfile("package/axe.min.js")
        assert member is not None
        content = member.read()
    if hashlib.sha256(content).hexdigest() != CHECKSUMS[version]:
        sys.exit(f"{address} has another axe.min.js than expected")
    Path(file).write_bytes(content)


if __name__ == "__main__":
    main(*sys.argv[1:])
