"""A full disk, and folders that cannot be written: exit code 2, and nothing that was there is lost.

File systems of our own are mounted in a mount namespace of a child process; they end with it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from torture.calls import call
from torture.children import run_in_child
from torture.crashes import finished, load_before
from torture.damage import arguments
from torture.tally import Line, Tally

NEW_MOUNTS, NEW_USERS = 0x00020000, 0x10000000
READ_ONLY, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 32, 4096, 16384, 1 << 18
ROUNDS = 21
OPTION = os.fsencode


def _check(result: int, what: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _mount(source: str, target: Path, kind: str, flags: int, options: str = "") -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    paths = (OPTION(source), OPTION(target), OPTION(kind))
    _check(libc.mount(*paths, ctypes.c_ulong(flags), OPTION(options)), f"mount {target}")


def _own_mounts() -> None:
    """From here on, what this process mounts is seen by nobody else."""
    libc, user, group = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()
    _check(libc.unshare(NEW_MOUNTS | (NEW_USERS if user else 0)), "unshare")
    if user:  # root in a namespace of its own
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _mount("none", Path("/"), "", RECURSIVE | PRIVATE)


def _may_mount(scratch: Path) -> str:
    """Why this process may not mount; empty if it may."""

    def attempt() -> int:
        _own_mounts()
        _mount("none", scratch, "tmpfs", 0, "size=64k")
        return 0

    ended = run_in_child(attempt, scratch / "output")
    return ended.text.strip().splitlines()[-1] if ended.code else ""


def _run_ok(selector: str, folder: Path, wanted: object, what: str) -> str:
    """Resume a run to its end; what is wrong with it then, or nothing."""
    ended = call(*arguments(selector, ROUNDS, folder))
    if ended.code:
        return f"{what}: not resumed, code {ended.code}: {ended.text[-800:]}"
    return "" if finished(folder) == wanted else f"{what}: resumed to another record"


def _refused(ended_code: int, text: str, what: str) -> str:
    if ended_code != 2 or "Traceback" in text:
        return f"{what}: code {ended_code}: {text[-800:]}"
    return ""


def fill_disk(selector: str, size: int, folder: Path, wanted: object) -> str:
    """Run on a disk of `size` bytes until it is full; then make room and resume."""
    _own_mounts()
    folder.mkdir()
    _mount("none", folder, "tmpfs", 0, f"size={size}")
    run = folder / "run"
    ended = call(*arguments(selector, ROUNDS, run))
    if ended.code == 0:
        return "fits" if finished(run) == wanted else f"{size}: another record"
    problem = _refused(ended.code, ended.text, f"{size} bytes")
    left = [path.name for path in folder.rglob("*.tmp")]
    if left:
        problem = problem or f"{size} bytes: left {left}"
    _mount("none", folder, "tmpfs", REMOUNT, "size=64m")
    return problem or _run_ok(selector, run, wanted, f"{size} bytes") or "full"


def lock_disk(selector: str, folder: Path, stopped: Path, wanted: object) -> str:
    """Resume a run, or start one, on a read-only file system; then make it writable and resume."""
    _own_mounts()
    shutil.copytree(stopped, folder / "run")
    _mount(str(folder), folder, "", BIND)
    _mount(str(folder), folder, "", BIND | REMOUNT | READ_ONLY)
    for run in (folder / "run", folder / "new"):
        ended = call(*arguments(selector, ROUNDS, run))
        problem = _refused(ended.code, ended.text, f"read-only {run.name}")
        if problem:
            return problem
    _mount(str(folder), folder, "", BIND | REMOUNT)
    problem = _run_ok(selector, folder / "run", wanted, "read-only, then writable")
    return problem or "refused"


def _in_namespace(tally: Tally, output: Path, work: Callable[[], str]) -> None:
    """`work` in a child process; its text is an outcome, or has a colon if something is wrong."""

    def child() -> int:
        result = work()
        print(f"\nRESULT {result}")
        return 0

    ended = run_in_child(child, output)
    result = ended.text.rpartition("RESULT ")[2].strip()
    if ended.code or ":" in result:
        tally.lose(result if not ended.code else ended.text)
    else:
        tally.add(result)


# What stands where a run wants to write; each is put into the copy of a stopped run.
OBSTACLES: dict[str, tuple[str, str]] = {
    "a folder for the record": ("rounds.jsonl", "folder"),
    "a file for the folder of checkpoints": ("checkpoint", "file"),
    "a folder for the newest checkpoint": ("checkpoint/state.npz", "folder"),
    "a folder for both checkpoints": ("checkpoint/state.npz checkpoint/previous.npz", "folder"),
    "a folder for the lock": ("run.lock", "folder"),
    "a pipe for the record": ("rounds.jsonl", "fifo"),
    "a pipe for the newest checkpoint": ("checkpoint/state.npz", "fifo"),
}


def obstruct(tally: Tally, stopped: Path, scratch: Path, wanted: object) -> None:
    """Files where folders should be, and the other way round; and folders that cannot be made."""
    for number, (what, (names, kind)) in enumerate(OBSTACLES.items()):
        folder = scratch / f"obstacle-{number}"
        shutil.copytree(stopped, folder)
        for name in names.split():
            path = folder / name
            if path.is_dir():
                shutil.rmtree(path)
            path.unlink(missing_ok=True)
            if kind == "folder":
                (path / "precious").mkdir(parents=True)
            elif kind == "fifo":
                os.mkfifo(path)
            else:
                path.write_text("precious")
        ended = call(*arguments("afl", ROUNDS, folder))
        if ended.code == 0 and finished(folder) == wanted:
            tally.add("same result")
        elif problem := _refused(ended.code, ended.text, what):
            tally.lose(problem)
        else:
            tally.add("refused")
    (scratch / "file").write_text("precious")
    for path in (scratch / "file", scratch / "file" / "run", scratch / ("n" * 300), "/proc/x/y"):
        ended = call(*arguments("afl", ROUNDS, Path(path)))
        if problem := _refused(ended.code, ended.text, str(path)[-30:]):
            tally.lose(problem)
        else:
            tally.add("refused")
    if (scratch / "file").read_text() != "precious":
        tally.lose("a file was overwritten")


def torture_disk(quick: bool) -> list[Line]:
    """All of it."""
    full = Tally("disk", "a disk that is full after so many bytes, then larger, and resumed")
    locked = Tally("disk", "a read-only file system, then writable, and resumed")
    obstacles = Tally("disk", "files where folders should be, folders, pipes, impossible paths")
    with tempfile.TemporaryDirectory(prefix="torture-") as name:
        scratch = Path(name)
        runs = {}
        load_before("digits")
        for selector in ["afl"] if quick else ["afl", "fedcor", "aligned"]:
            for rounds in (20, ROUNDS):
                made = call(*arguments(selector, rounds, scratch / f"{selector}-{rounds}"))
                assert made.code == 0, made.text
            runs[selector] = finished(scratch / f"{selector}-{ROUNDS}")
        obstruct(obstacles, scratch / "afl-20", scratch, runs["afl"])
        why = _may_mount(scratch)
        if why:
            skipped = [Line("disk", one.what, 0, 0, skipped=why) for one in (full, locked)]
            return [obstacles.line(), *skipped]
        for selector, wanted in runs.items():
            # Full one page later each time, until a whole run fits.
            for pages in range(1, 500, 10 if quick else 1):
                fits = full.outcome("fits")
                folder = scratch / f"full-{selector}-{pages}"
                _in_namespace(
                    full,
                    scratch / "output",
                    partial(fill_disk, selector, 4096 * pages, folder, wanted),
                )
                if full.outcome("fits") > fits:
                    break
            (scratch / f"locked-{selector}").mkdir()
            _in_namespace(
                locked,
                scratch / "output",
                partial(
                    lock_disk,
                    selector,
                    scratch / f"locked-{selector}",
                    scratch / f"{selector}-20",
                    wanted,
                ),
            )
    return [one.line() for one in (full, locked, obstacles)]


PARTS: dict[str, Callable[[bool], list[Line]]] = {"disk": torture_disk}
