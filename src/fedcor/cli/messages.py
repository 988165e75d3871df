"""What the command line says when a command cannot finish.

Errors of the library name parameters; here the flags of the command line are added.
"""

from __future__ import annotations

import argparse
import re
from importlib import metadata

from fedcor.errors import (
    ConfigError,
    FedcorError,
    MissingExtraError,
    NoSourceError,
    RunExistsError,
    WorkerDiedError,
)

__all__ = ["error_message", "interrupt_message", "missing_package"]

# Modules whose requirement has another name.
_REQUIREMENTS = {"sklearn": "scikit-learn", "PIL": "pillow", "ray": "flwr[simulation]"}


def interrupt_message(options: argparse.Namespace) -> str:
    """What to say after Ctrl-C."""
    if hasattr(options, "resume"):
        return "interrupted; add --resume to the same command to continue"
    if hasattr(options, "jobs"):  # commands that always resume
        return "interrupted; run the same command again to continue"
    return "interrupted"


def error_message(error: Exception, options: argparse.Namespace) -> str | None:
    """What was wrong and what to do about it; None for an error that is ours to fix."""
    if isinstance(error, ModuleNotFoundError) and not isinstance(error, FedcorError):
        missing = missing_package(error.name or "")
        return None if missing is None else str(missing)
    if isinstance(error, OSError):
        runs = hasattr(options, "resume") or hasattr(options, "jobs")
        return f"{error}; finished rounds are kept and can be resumed" if runs else str(error)
    if isinstance(error, MemoryError):
        return "not enough memory for these settings"
    return _with_flags(error, options) if isinstance(error, FedcorError) else None


def _with_flags(error: FedcorError, options: argparse.Namespace) -> str:
    if isinstance(error, RunExistsError):
        folder = f"{error.folder} already holds a run"
        return f"{folder}: add --resume to continue it, or choose another --out"
    if isinstance(error, WorkerDiedError):
        return f"{error}; if memory is short, choose fewer --jobs"
    if isinstance(error, ConfigError):
        return str(error.renamed(options.flags.get(error.key, error.key)))
    if isinstance(error, NoSourceError):
        return (
            f"{error.failures}\nif you have the files: fedcor data fetch {options.name} --from PATH"
        )
    return str(error)


def missing_package(module: str) -> FedcorError | None:
    """The error that says how to install `module`; None if fedcor does not require it."""
    package = module.partition(".")[0]
    wanted = _REQUIREMENTS.get(package, package)
    for requirement in metadata.requires("fedcor") or []:
        name, _, condition = requirement.partition(";")
        if re.split(r"[<>=!~ ]", name, maxsplit=1)[0] == wanted:
            extra = re.search(r"extra == ['\"]([\w-]+)['\"]", condition)
            if extra is not None:
                return MissingExtraError(package, extra[1])
            return FedcorError(
                f"this needs {package}, which is not installed: pip install {wanted}"
            )
    return None
