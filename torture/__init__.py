"""Counted trials: crashes, disks, damaged files and bad input. `make torture` runs them all.

    python -m torture            all trials; about ten minutes on two cores
    python -m torture --quick    the same code with few trials; part of `make test`
    python -m torture --json     the table as JSON

Each module has `PARTS`: names of functions that try something many times and return lines of the
table. Each part runs in a process of its own.
"""
