"""The command line: one call, from its arguments to its exit code and its error message.

Errors of the library name parameters; the messages here name the flags of the command line.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
from collections.abc import Sequence
from importlib import metadata

from fedcor.cli import commands
from fedcor.cli.parser import build_parser
from fedcor.core.errors import (
    ConfigError,
    FedcorError,
    MissingExtraError,
    RunExistsError,
    WorkerDiedError,
)
from fedcor.core.text import lines

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
    if isinstance(error, RunExistsError):
        folder = f"{error.folder} already holds a run"
        return f"{folder}: add --resume to continue it, or choose another --out"
    if isinstance(error, WorkerDiedError):
        return f"{error}; if memory is short, choose fewer --jobs"
    if isinstance(error, ConfigError):
        return str(error.renamed(options.flags.get(error.key, error.key)))
    if isinstance(error, FedcorError):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        missing = missing_package(error.name or "")
        return None if missing is None else str(missing)
    if isinstance(error, OSError):
        runs = hasattr(options, "resume") or hasattr(options, "jobs")
        return f"{error}; finished rounds are kept and can be resumed" if runs else str(error)
    return "not enough memory for these settings" if isinstance(error, MemoryError) else None


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    Args:
        arguments: as typed after `fedcor`; None for those of this process.
    """
    options = build_parser().parse_args(arguments)
    options.command = getattr(commands, options.command)
    return call(options)


def call(options: argparse.Namespace, program: str = "fedcor") -> int:
    """Run the command of parsed arguments; returns its exit code.

    Args:
        options: With `command`, a function that takes them, and `flags`, what was typed for the
            parameters that errors name.
        program: Its name, in messages.
    """
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, io.TextIOWrapper):
            # Characters that the locale lacks are replaced; they are no error.
            output.reconfigure(errors="replace")
    try:
        options.command(options)
        sys.stdout.flush()
        return 0
    except KeyboardInterrupt:
        print(f"{program}: {interrupt_message(options)}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read our output has ended, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as if SIGPIPE had ended this process
    except Exception as error:
        message = error_message(error, options)
        if message is None:
            raise
        print(f"{program}: {lines(message)}", file=sys.stderr)
        return 2
