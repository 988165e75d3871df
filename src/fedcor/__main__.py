"""The command `fedcor`, and `python -m fedcor`: an interrupt is answered during imports too."""

import sys


def main() -> int:
    """Runs the command line and returns its exit code."""
    try:
        from fedcor.cli import main as run

        return run()
    except KeyboardInterrupt:
        sys.stderr.write("fedcor: interrupted before anything began\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
