"""The command `fedcor`, and `python -m fedcor`: nothing heavy is imported before an interrupt can be answered."""

import sys


def main() -> int:
    try:
        from fedcor.cli import main as run

        return run()
    except KeyboardInterrupt:
        sys.stderr.write("fedcor: interrupted before anything began\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
