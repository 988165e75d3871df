"""The command `fedcor`, and `python -m fedcor`.

Nothing heavy is imported before an interrupt can be answered.
"""

import sys


def main() -> int:
    """Run the command line; returns its exit code."""
    try:
        from fedcor.cli import main as run

        return run()
    except KeyboardInterrupt:
        sys.stderr.write("fedcor: interrupted before anything started\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
