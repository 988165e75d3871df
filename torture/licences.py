"""Name, version and licence of every installed package that fedcor needs, directly or not.

    python -m torture.licences

What a package's own metadata says is taken. It fails where a licence is unknown, or has none of the
names below: each of these lets everyone use, change and pass on the software for any purpose.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata

# How free licences are called; of one that needs several, each part must have one of these names.
FREE = (
    *("Apache", "MIT", "MIT-0", "MIT-CMU", "BSD", "0BSD", "ISC", "ISCL", "PSF", "Zlib", "CC0"),
    *("Python Software Foundation", "MPL", "Mozilla Public License", "Unlicense"),
    "BSL-1.0",  # Boost's, as SPDX calls it; the Business Source License is BUSL
)
_CLASSIFIER = "License :: OSI Approved :: "


def needed(package: str, extra: str) -> list[str]:
    """What `package` with an extra needs on this machine, all the way down; names, sorted."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    found, waiting = set[tuple[str, str]](), [(package, extra)]
    while waiting:
        name, wanted = waiting.pop()
        if (name, wanted) in found:
            continue
        found.add((name, wanted))
        try:
            lines = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # of another system, or another extra
            continue
        for line in lines:
            one = Requirement(line)
            if one.marker is None or one.marker.evaluate({"extra": wanted}):
                name_of = canonicalize_name(one.name)
                waiting.extend((name_of, more) for more in ("", *one.extras))
    return sorted({name for name, _ in found} - {package})


def licence_of(name: str) -> str:
    """What a package's metadata says: the expression, else classifiers, else its first line."""
    about = metadata.metadata(name)
    expression = about.get("License-Expression")
    if expression:
        return str(expression)
    classifiers = [one for one in about.get_all("Classifier") or [] if one.startswith("License ::")]
    named = [one.removeprefix(_CLASSIFIER) for one in classifiers if one.startswith(_CLASSIFIER)]
    if named:
        return ", ".join(named)
    text = str(about.get("License") or "").strip()
    return text.splitlines()[0][:60] if text else ""


def problem_of(licence: str) -> str:
    """Why a licence is not accepted; empty if it is."""
    if not licence.strip():
        return "unknown"
    # Of alternatives (OR), one is enough; of what holds together, each part counts.
    for part in re.split(r"\bAND\b|,", licence):
        if not re.search(rf"\b({'|'.join(map(re.escape, FREE))})\b", part, re.IGNORECASE):
            return f"not in the list: {part.strip()}"
    return ""


def main() -> int:
    """Print the table; 1 where a licence is unknown or not in the list."""
    problems = []
    for name in needed("fedcor", "dev"):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        licence = licence_of(name)
        print(f"{name:32} {version:16} {licence}")
        if problem := problem_of(licence):
            problems.append(f"{name} {version}: {problem}")
    for problem in problems:
        print(problem, file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
