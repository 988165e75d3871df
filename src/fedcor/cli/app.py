"""One call of the command line, from its arguments to its exit code."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

from fedcor.cli.messages import error_message, interrupt_message
from fedcor.cli.parser import build_parser
from fedcor.foreign import lines

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    Args:
        arguments: as typed after `fedcor`; None for those of this process.
    """
    options = build_parser().parse_args(arguments)
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, io.TextIOWrapper):
            # Characters that the locale lacks are replaced; they are no error.
            output.reconfigure(errors="replace")
    try:
        options.command(options)
        sys.stdout.flush()
        return 0
    except KeyboardInterrupt:
        print(f"fedcor: {interrupt_message(options)}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read our output has ended, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as if SIGPIPE had ended this process
    except Exception as error:
        message = error_message(error, options)
        if message is None:
            raise
        print(f"fedcor: {lines(message)}", file=sys.stderr)
        return 2
