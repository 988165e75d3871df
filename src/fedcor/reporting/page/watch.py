"""The page served on this machine alone, following runs that go on.

The server answers GET for two things: the page, and its data. A browser that shows the page asks
for data that is newer than what it has; the answer waits until there is some. Requests that name
another host than this machine are refused: else a web site whose name resolves to this machine
could read the records (DNS rebinding).
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fedcor.core.errors import RecordError
from fedcor.reporting.page import escaped_json, render_page
from fedcor.reporting.page.data import page_data
from fedcor.reporting.page.run_data import run_data
from fedcor.reporting.series import clean
from fedcor.runs.checkpoints import CHECKPOINT
from fedcor.runs.record import RECORD, RunRecord, has_run, read_run

LOG = logging.getLogger("fedcor")
LOOPBACK = "127.0.0.1"
PATIENCE = 20.0  # seconds that an answer waits for news
BETWEEN = 0.25  # seconds between looks at the folder

Stamp = tuple[int, int]  # when a file was written, and its size


class Follower:
    """The data of a folder's page, as new as its records.

    What has not changed since the last look is not read again.

    Args:
        folder: with runs, in it or below
        baseline: as in `page_data`
        measure: as in `page_data`
    """

    def __init__(self, folder: Path, baseline: str | None = None, measure: str | None = None):
        self.folder, self.baseline, self.measure = folder, baseline, measure
        self._lock = threading.Lock()
        self._made: dict[Any, tuple[Any, Any]] = {}  # what `_once` gave

    def version(self) -> str:
        """Names what the runs hold now; another one when anything was added.

        A checkpoint is written after the line of its round, and the page shows what is in it.
        """
        stamps = {str(folder): _stamps(folder) for folder in self._folders()}
        return hashlib.sha256(json.dumps(stamps).encode()).hexdigest()[:16]

    def is_empty(self) -> bool:
        """Whether no run has started there yet."""
        return not self._folders()

    def data(self) -> dict[str, Any]:
        """What the page shows now, with its `version`. A note names each run that is unreadable.

        Raises:
            RecordError: There is no run yet, or none can be shown.
        """
        with self._lock:
            version = self.version()
            data: dict[str, Any] = self._once("data", version, lambda: self._page(version))
            return data

    def _page(self, version: str) -> dict[str, Any]:
        runs, unreadable = self._readable()
        if unreadable and not runs:
            raise RecordError("; ".join(unreadable))
        shown = page_data(runs, self.baseline, self.measure, self._run_data)
        notes = [*shown["notes"], *(f"A run is not shown. {why}" for why in unreadable)]
        return {**shown, "notes": notes, "version": version}

    def news(self, after: str, patience: float = PATIENCE) -> dict[str, Any]:
        """The data as soon as it is another than `after`; after a while, only the version.

        Raises:
            RecordError: All that while, there was other data that cannot be shown.
        """
        end = time.monotonic() + patience
        wrong: RecordError | None = None
        while time.monotonic() < end:
            wrong = None
            if self.version() != after:
                try:
                    return self.data()
                except RecordError as error:  # a run is being replaced; the next look tells
                    wrong = error
            time.sleep(BETWEEN)
        if wrong is not None:
            raise wrong
        return {"version": after}

    def _folders(self) -> list[Path]:
        folders = sorted(path.parent for path in self.folder.rglob(RECORD))
        return [folder for folder in folders if _may_have_run(folder)]

    def _readable(self) -> tuple[list[RunRecord], list[str]]:
        """The runs that can be read, and what is wrong with the others."""
        runs, wrong = [], []
        for folder in self._folders():
            try:
                runs.append(self._once(folder, _stamp(folder / RECORD), partial(read_run, folder)))
            except RecordError as error:
                wrong.append(clean(str(error)))
        return runs, wrong

    def _run_data(self, run: RunRecord, series: int, stride: int) -> dict[str, Any]:
        assert run.path is not None
        data: dict[str, Any] = self._once(
            (run.path, series, stride), _stamps(run.path), lambda: run_data(run, series, stride)
        )
        return data

    def _once(self, key: Any, state: Any, make: Callable[[], Any]) -> Any:
        """What `make` gives; it is called again only if the state of its files is another."""
        if key not in self._made or self._made[key][0] != state:
            self._made[key] = state, make()
        return self._made[key][1]


def _may_have_run(folder: Path) -> bool:
    try:
        return has_run(folder)
    except OSError:  # reading it says what is wrong
        return True


def _stamp(path: Path) -> Stamp:
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size


def _stamps(folder: Path) -> tuple[Stamp, Stamp]:
    return _stamp(folder / RECORD), _stamp(folder / CHECKPOINT)


class PageServer(ThreadingHTTPServer):
    """Serves one page and its data on this machine alone.

    Args:
        follower: whose data
        port: 0 for any that is free
    """

    daemon_threads = True

    def __init__(self, follower: Follower, port: int = 0) -> None:
        super().__init__((LOOPBACK, port), _Handler)
        self.follower = follower

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{LOOPBACK}:{self.server_port}/"

    @property
    def hosts(self) -> tuple[str, ...]:
        """What a browser on this machine calls this server."""
        return f"{LOOPBACK}:{self.server_port}", f"localhost:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version = "fedcor", ""
    timeout = 60

    def do_GET(self) -> None:
        try:
            status, kind, content = self._content()
        except RecordError as error:
            status, kind, content = 503, "text/plain", _line(str(error))
        except Exception as error:  # one request must not end the others
            LOG.exception("the page could not be made")
            status, kind, content = 500, "text/plain", _line(f"{type(error).__name__}: {error}")
        self._answer(status, kind, content)

    def _content(self) -> tuple[int, str, bytes]:
        """The status, the kind of content, and the content."""
        if self.headers.get("Host") not in self.server.hosts:
            return 403, "text/plain", b"this server answers to its own name only\n"
        wanted, follower = urlsplit(self.path), self.server.follower
        if wanted.path == "/":
            return 200, "text/html", render_page(follower.data(), live=True)
        if wanted.path == "/data.json":
            after = parse_qs(wanted.query).get("after", [""])[0]
            return 200, "application/json", escaped_json(follower.news(after)).encode()
        return 404, "text/plain", b"there is nothing here\n"

    def _answer(self, status: int, kind: str, content: bytes) -> None:
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
        }
        try:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)
        except (ConnectionError, TimeoutError):  # the browser has left, or takes nothing
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a page asks every few seconds."""


def _line(text: str) -> bytes:
    return f"{clean(text)}\n".encode(errors="replace")
