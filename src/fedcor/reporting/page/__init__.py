"""The report as one self-contained HTML page: here, its template, style, scripts and policy.

data      what the page shows of all runs
run_data  what it shows of one run
watch     the page served on this machine, following runs that go on

The content security policy forbids the page to load anything. Its style and its script are named by
their hashes, so that no other runs, even if a record could smuggle one in.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any

STYLES = ("vendor/uPlot.min.css", "style.css")
SCRIPTS = (
    "vendor/uPlot.iife.min.js",
    "tools.js",
    "verdict.js",
    "curves.js",
    "heat.js",
    "map.js",
    "why.js",
    "health.js",
    "settings.js",
    "page.js",
)


def render_page(data: Mapping[str, Any], *, live: bool = False) -> bytes:
    """The page in UTF-8.

    Args:
        data: as `page_data` gives it
        live: whether it asks the server that it came from for new rounds; else it asks nobody
    """
    style, script = _joined(STYLES), _joined(SCRIPTS)
    connect = "connect-src 'self'; " if live else ""
    policy = (
        f"default-src 'none'; style-src {_source(style)}; script-src {_source(script)}; {connect}"
        "base-uri 'none'; form-action 'none'"
    )
    names = ", ".join(experiment["name"] for experiment in data["experiments"])
    parts = {
        "policy": html.escape(policy, quote=False),
        "title": html.escape(f"{names} · fedcor report"),
        "live": "yes" if live else "no",
        "style": style,
        "data": escaped_json(data),
        "script": script,
    }
    # In one pass: what is put in is not looked at again.
    page = re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _asset("page.html"))
    return page.encode()


def escaped_json(data: Any) -> str:
    """JSON that can stand within a script element: it holds no `<`, and no line separator that an
    older browser would take for the end of a line."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def _asset(name: str) -> str:
    return (files("fedcor.reporting.page") / "assets" / name).read_text(encoding="utf-8")


@cache
def _joined(names: tuple[str, ...]) -> str:
    """The files one after the other, with line breaks around, as they stand in their element."""
    return "\n" + "\n".join(_asset(name) for name in names) + "\n"


@lru_cache(maxsize=8)
def _source(content: str) -> str:
    """How the policy names a style or script: by the hash of all that its element holds."""
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
