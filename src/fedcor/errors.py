"""One tree of errors that a person can mend: each message says what was wrong and what to do.

The command line prints them without a traceback and ends with exit code 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = [
    "ConfigError",
    "DataError",
    "FedcorError",
    "MissingExtraError",
    "RecordError",
    "RunExistsError",
    "suggest",
]


class FedcorError(Exception):
    """The root of every error that fedcor raises on purpose."""


class ConfigError(FedcorError, ValueError):
    """A setting that cannot work: names the key, what was given and what is allowed."""

    def __init__(self, key: str, given: object, allowed: str, hint: str = "") -> None:
        self.key, self.given, self.allowed, self.hint = key, given, allowed, hint
        super().__init__(f"{key} = {given!r}: {allowed}" + (f" ({hint})" if hint else ""))

    def __reduce__(
        self,
    ) -> tuple[Any, ...]:  # an error may cross from a worker process to its parent
        return type(self), (self.key, self.given, self.allowed, self.hint)

    def under(self, table: str) -> ConfigError:
        """The same complaint, with the key as it stands inside `table`."""
        return ConfigError(f"{table}.{self.key}", self.given, self.allowed, self.hint)


class DataError(FedcorError):
    """Data that is missing, damaged, or does not fit together."""


class RecordError(FedcorError):
    """A run folder that cannot be used: taken, locked, damaged, or from another experiment."""


class RunExistsError(RecordError):
    """A folder that already holds this run, where a new one was asked for.

    Attributes:
        folder: The folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        super().__init__(f"{folder} already holds a run: resume it, or choose another folder")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.folder,)


class MissingExtraError(FedcorError, ImportError):
    """A part of fedcor that was not installed."""

    def __init__(self, package: str, extra: str) -> None:
        self.package, self.extra = package, extra
        super().__init__(
            f"this needs {package}, which is not installed: pip install 'fedcor[{extra}]'"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.package, self.extra)


def suggest(word: str, options: Iterable[str]) -> str:
    """`did you mean "rounds"?` for a near miss of one of `options`, else an empty text."""
    near = difflib.get_close_matches(word, list(options), n=1, cutoff=0.6)
    return f'did you mean "{near[0]}"?' if near else ""
