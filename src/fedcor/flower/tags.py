"""A client's tags on their way to the server: the entries of its node's configuration.

The server asks for those that its rules name, or for all where a function decides who is eligible;
without rules it asks for none. What a node says of itself is its own claim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias, cast

from flwr.app import ConfigRecord

__all__ = ["EVERY_TAG", "Tag", "read_tags", "write_tags"]

Tag: TypeAlias = bool | int | float | str

EVERY_TAG = "*"
_ASKED, _SAID, _PREFIX = "tags", "tags", "tag."
_MOST, _LONGEST = 32, 200  # tags of a client; characters of a name or a value


def write_tags(answer: ConfigRecord, question: ConfigRecord, tags: Mapping[str, Any]) -> None:
    """Put those of `tags` into the answer that the question asks for."""
    given = question.get(_ASKED)
    if not isinstance(given, list):
        return
    answer[_SAID] = True  # a client that has none of them also says so
    asked = [str(name) for name in given]
    wanted = list(tags) if EVERY_TAG in asked else [name for name in asked if name in tags]
    for name in wanted[:_MOST]:
        if _fits(name, tags[name]):
            answer[f"{_PREFIX}{name}"] = tags[name]


def read_tags(note: ConfigRecord) -> dict[str, Tag] | None:
    """The tags in a client's answer; None if its mod is too old to say any."""
    if note.get(_SAID) is not True:
        return None
    found: dict[str, Tag] = {}
    for key in sorted(key for key in note if key.startswith(_PREFIX))[:_MOST]:
        name, value = key.removeprefix(_PREFIX), note[key]
        if _fits(name, value):
            found[name] = cast(Tag, value)
    return found


def _fits(name: Any, value: Any) -> bool:
    """Whether it is a short name with a short or finite value."""
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST:
        return False
    if isinstance(value, str):
        return len(value) <= _LONGEST
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) < 2**63
    return isinstance(value, bool) or (isinstance(value, float) and math.isfinite(value))
