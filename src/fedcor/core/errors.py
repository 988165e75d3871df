"""The errors that a user can fix: each message says what was wrong and what to do.

Library messages name parameters, never flags of the command line. The command line prints them
without a traceback, adds its flags, and ends with exit code 2.
"""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedcor.core.text import one_line

_LONGEST_VALUE = 120  # characters of a message


class FedcorError(Exception):
    """The root of every error that fedcor raises on purpose."""


class ConfigError(FedcorError, ValueError):
    """A setting that cannot work.

    Attributes:
        key: name of the setting, with its table: `training.rounds`.
        given: the value that was given; None where it is missing.
        allowed: what is allowed, as a phrase: `must be a whole number of at least 1`.
        hint: a suggestion, or an empty text.
    """

    def __init__(self, key: str, given: object, allowed: str, hint: str = "") -> None:
        self.key, self.given, self.allowed, self.hint = key, given, allowed, hint
        what = f"{one_line(key)} = {_shown(given)}: {one_line(allowed, 2000)}"
        super().__init__(what + (f" ({one_line(hint)})" if hint else ""))

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors are pickled on their way from a worker process to its parent.
        return type(self), (self.key, self.given, self.allowed, self.hint)

    def under(self, table: str) -> ConfigError:
        """The same error, with `key` inside `table`."""
        return self.renamed(f"{table}.{self.key}")

    def renamed(self, key: str) -> ConfigError:
        """The same error about `key`."""
        return ConfigError(key, self.given, self.allowed, self.hint)


@contextmanager
def errors_under(table: str) -> Iterator[None]:
    """A ConfigError raised within names its key inside `table`."""
    try:
        yield
    except ConfigError as error:
        raise error.under(table) from error.__cause__


class DataError(FedcorError):
    """Data that is missing, damaged, or inconsistent."""


class RecordError(FedcorError):
    """A run folder that cannot be used: in use, locked, damaged, or of another experiment."""


class RunExistsError(RecordError):
    """A folder that already holds a run, where a new one was asked for.

    Attributes:
        folder: The folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        super().__init__(
            f"{folder} already holds a run: resume it (resume=True), or choose another folder"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.folder,)


class WorkerDiedError(FedcorError):
    """A worker process ended without a result: killed, or out of memory."""


class MissingExtraError(FedcorError, ImportError):
    """A package that is part of an optional extra of fedcor is not installed.

    Attributes:
        package: the package that is missing.
        extra: the extra that installs it.
    """

    def __init__(self, package: str, extra: str) -> None:
        self.package, self.extra = package, extra
        super().__init__(
            f"this needs {package}, which is not installed: pip install 'fedcor[{extra}]' "
            f"(from a clone: pip install '.[{extra}]')"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.package, self.extra)


def _shown(given: object) -> str:
    """As Python writes it, but not at length."""
    try:
        return one_line(repr(given), _LONGEST_VALUE)
    except (ValueError, RecursionError):  # thousands of digits, or of tables within tables
        return f"a {type(given).__name__} that is too long to show"


def suggest(word: str, options: Iterable[str]) -> str:
    """`did you mean "rounds"?` if one of `options` is similar to `word`, else an empty text."""
    near = difflib.get_close_matches(word, list(options), n=1, cutoff=0.6)
    return f'did you mean "{near[0]}"?' if near else ""


@contextmanager
def blame(what: str) -> Iterator[None]:
    """Report an error in a user's code with the method and the line where it happened."""
    try:
        yield
    except FedcorError:
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        cause = f"{type(error).__name__}: {error} ({last.filename}, line {last.lineno})"
        raise FedcorError(f"{what}: {cause}") from error
