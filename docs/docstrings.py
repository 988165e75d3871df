"""For the reference: docstrings of this package in the form that griffe, which parses them, knows.

- `Example:` is a section of examples. If it is no session (`>>>`), it is shown as code.
- One entry may explain several parameters, and their names may need more than one line.
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

EXAMPLE = re.compile(r"^( *)Example:\n((?:\1 +.*\n?|\n)+)", re.MULTILINE)
NAMES = re.compile(r"^( +)((?:\w+, )*\w+,)\n((?: +(?:\w+, )*\w+,\n)*) +((?:\w+, )*\w+:)", re.M)


class Docstrings(griffe.Extension):
    """Prepares docstrings before they are parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Changes the text of one docstring."""
        if obj.docstring:
            text = EXAMPLE.sub(examples, obj.docstring.value)
            obj.docstring.value = NAMES.sub(one_line, text)


def examples(found: re.Match[str]) -> str:
    """The section as griffe knows it."""
    indent, body = found.groups()
    if ">>>" in body:
        pass
    elif "::\n" in body:
        body = body.replace("::\n", ":\n")
    else:
        body = textwrap.indent(body, "    ")
    return f"{indent}Examples:\n{body}"


def one_line(found: re.Match[str]) -> str:
    """Names that stand on several lines, on one."""
    indent, first, middle, last = found.groups()
    return f"{indent}{' '.join([first, *middle.split(), last])}"
