"""The command line: parses, calls, prints.

Exit codes: 0 done, 2 something the user can fix, 130 interrupted.
"""

from fedcor.cli.app import main

__all__ = ["main"]
