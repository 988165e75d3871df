"""Downloads through pooch, which streams, tries again, and leaves no half file.

pooch is given no checksums: the same content is published in differently packed files, so what was
downloaded is verified by its content afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeAlias

from fedcor.data.formats import LARGEST
from fedcor.errors import DataError, MissingExtraError

__all__ = ["OnDownload", "download"]

# Called while data is fetched: the stage, bytes received, bytes in total (None: unknown).
OnDownload: TypeAlias = Callable[[str, int, int | None], None]

CONNECT_TIMEOUT = 5  # seconds per network address of the server
READ_TIMEOUT = 30  # seconds without a byte
RETRIES = 2
CHUNK = 1 << 16  # bytes


class _ProgressBar:
    """What pooch takes for a progress bar: passes the bytes received on, and bounds them."""

    def __init__(self, file: str, on_download: OnDownload) -> None:
        self.total = 0  # bytes, set by pooch; 0: unknown
        self.received = 0  # bytes; pooch counts whole chunks, so this may be a chunk too many
        self._file, self._on_download = file, on_download

    def update(self, count: int) -> None:
        """Counts `count` more bytes."""
        self.received += count
        if max(self.received, self.total) > LARGEST:
            raise DataError(f"{self._file}: longer than {LARGEST} bytes")
        known = self.total > 0
        received = min(self.received, self.total) if known else self.received
        self._on_download(f"downloading {self._file}", received, self.total if known else None)

    def reset(self) -> None:
        """Called by pooch at the end, before it counts all of `total` once more."""
        if self.total:
            self.received = 0

    def close(self) -> None:
        """Nothing to close: the caller's display is the caller's."""


def download(base_url: str, files: Collection[str], folder: Path, on_download: OnDownload) -> None:
    """Downloads `files` from below `base_url` (which ends in a slash) into `folder`.

    Where a download breaks off or the server reports an error of its own (5xx), it is tried again.
    An address that refuses, cannot be resolved or lacks the file is given up at once.
    """
    try:
        import pooch
        from requests import exceptions
    except ImportError:
        raise MissingExtraError("pooch", "sim") from None

    def attempt(url: str, target: str, repository: Any) -> None:
        file = url.removeprefix(base_url)
        bar = _ProgressBar(file, on_download)
        get = pooch.HTTPDownloader(
            progressbar=bar,
            chunk_size=CHUNK,
            timeout=(CONNECT_TIMEOUT, READ_TIMEOUT),
            headers={"Accept-Encoding": "identity"},  # the files are compressed already
        )
        try:
            get(url, target, repository)
        except exceptions.RequestException as error:
            status = 0 if error.response is None else error.response.status_code
            broke_off = bar.received > 0 or isinstance(error, exceptions.ChunkedEncodingError)
            if broke_off or status >= 500:
                raise  # pooch catches this and tries again
            raise DataError(f"{file}: {_reason(error)}") from error

    repository = pooch.create(
        folder, base_url, registry=dict.fromkeys(files), retry_if_failed=RETRIES
    )
    logger = pooch.get_logger()
    level = logger.level
    logger.setLevel(logging.WARNING)  # its lines would tear the progress bar
    try:
        for file in files:
            try:
                repository.fetch(file, downloader=attempt)
            except (exceptions.RequestException, ValueError) as error:
                raise DataError(f"{file}: {_reason(error)}") from error
    finally:
        logger.setLevel(level)


def _reason(error: Exception) -> str:
    """The message without the wrapping that requests puts around urllib3's errors."""
    inner = error.args[0] if error.args else error
    return str(getattr(inner, "reason", inner))
