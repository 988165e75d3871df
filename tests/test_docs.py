"""What the documents say is run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fedcor.cli import main
from fedcor.cli.parser import build_parser

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "examples" / "flower" / "README.md",
]


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(
        rf"```{language}\n(.*?)```", path.read_text(encoding="utf-8"), flags=re.DOTALL
    )


def test_the_readmes_python_runs(tmp_path):
    (example,) = blocks(ROOT / "README.md", "python")
    (tmp_path / "mine.py").write_text(example)
    subprocess.run([sys.executable, "mine.py"], cwd=tmp_path, check=True)


def test_the_lines_for_flower_run():
    for example in blocks(ROOT / "docs" / "flower.md", "python"):
        exec(example, {})


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_fedcor_command_in_a_document_parses(path):
    text = path.read_text(encoding="utf-8")
    commands = re.findall(
        r"(?:^|`|&& |do )(fedcor (?:demo|run|compare|reproduce|report|explain|data)\b[^`\n;#&]*)",
        text,
        flags=re.MULTILINE,
    )
    for command in commands:
        build_parser().parse_args(shlex.split(command)[1:])
    if path == ROOT / "README.md":
        assert len(commands) >= 6


def test_the_documented_experiment_runs(tmp_path):
    (file,) = blocks(ROOT / "docs" / "experiments.md", "toml")
    (tmp_path / "mine.toml").write_text(file)
    assert (
        main(["run", str(tmp_path / "mine.toml"), "--rounds", "3", "--out", str(tmp_path / "o")])
        == 0
    )


def test_the_documented_changes_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (commands,) = blocks(ROOT / "docs" / "experiments.md", "bash")
    for command in commands.splitlines():
        assert main([*shlex.split(command)[1:], "--rounds", "2"]) == 0


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_to_files_lead_somewhere(path):
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), target


def test_make_has_the_readmes_two_commands():
    targets = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in ("demo", "test"):
        assert f"make {command}" in (ROOT / "README.md").read_text(encoding="utf-8")
        assert f"\n{command}:" in targets
