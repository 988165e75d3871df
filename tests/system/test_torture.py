"""The trials of `make torture`, in a short version: nothing is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("crashes-digits", "crashes-optimisers", "crashes-flower", "disk", "files", "input")


@pytest.mark.parametrize("part", PARTS)
def test_nothing_is_lost(part):
    """In processes of their own: they fork, and are killed."""
    command = [sys.executable, "-m", "torture", "--quick", "--json", "--jobs", "1", "--only", part]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = json.loads(done.stdout)["lines"]
    assert lines
    assert sum(line["lost"] for line in lines) == 0
    assert all(line["tried"] or line["skipped"] for line in lines)
