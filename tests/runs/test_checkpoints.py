"""Checkpoints: whatever happens to their files, a resumed run is the same run, or is refused."""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedcor.cli import main
from fedcor.core.errors import RecordError
from fedcor.core.files import open_whole, save_arrays
from fedcor.rounds.record_line import FORMAT
from fedcor.runs.checkpoints import (
    CHECKPOINT,
    load_checkpoint,
    load_marks,
    parse_checkpoint,
    save_checkpoint,
)
from fedcor.runs.record import RECORD, client_names, read_checkpoint, read_run
from fedcor.runs.resume import open_run
from fedcor.runs.runner import run
from fedcor.simulation.experiment_files import load_experiment

PREVIOUS = Path("checkpoint") / "previous.npz"
REFUSED = Path("checkpoint") / "refused.npz"
HEADER = {
    "format": FORMAT,
    "experiment": "e",
    "selector": "s",
    "seed": 1,
    "config": {"training": {"rounds": 5}, "target": 0.5},
}
ARRAYS = {
    "round": np.array(2),
    "model": np.linspace(-1, 1, 40, dtype=np.float32),
    "names": np.array(["a", "bc"]),
    "selector/none": np.zeros((0, 3)),
    "selector/known": np.array([[1.5, np.nan], [2.5, np.inf]]),
}


def same(one, other):
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype
        and one[name].shape == other[name].shape
        and one[name].tobytes() == other[name].tobytes()
        for name in one
    )


def damages(content):
    """(what was done, the bytes) for every byte flipped, every length, and blocks of zeros."""
    for place in range(len(content)):
        for mask in (1 << place % 8, 0xFF):
            flipped = bytearray(content)
            flipped[place] ^= mask
            yield f"byte {place} of {len(content)} xor {mask}", bytes(flipped)
        yield f"cut to {place} of {len(content)}", content[:place]
    for block in (16, 512):
        for place in range(0, len(content), block):
            zeros = bytes(len(content[place : place + block]))
            if zeros != content[place : place + block]:
                yield f"zeros from {place}", content[:place] + zeros + content[place + block :]


def undetected(content):
    """What can be done to the bytes of a checkpoint without its being refused: (what, arrays)."""
    for what, damaged in damages(content):
        try:
            yield what, parse_checkpoint(io.BytesIO(damaged)).arrays
        except RecordError:
            continue


def test_any_damaged_byte_is_found(tmp_path):
    save_checkpoint(tmp_path, ARRAYS, json.dumps(HEADER), rounds="")
    assert same(load_checkpoint(tmp_path / CHECKPOINT).arrays, ARRAYS)
    assert list(undetected((tmp_path / CHECKPOINT).read_bytes())) == []


DTYPES = st.one_of(
    hnp.floating_dtypes(endianness="="),
    hnp.integer_dtypes(endianness="="),
    hnp.boolean_dtypes(),
    hnp.unicode_string_dtypes(endianness="=", min_len=1, max_len=4),
)
STATES = st.dictionaries(
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8).map(
        "selector/{}".format
    ),
    hnp.arrays(DTYPES, hnp.array_shapes(min_dims=0, max_side=5)),
    max_size=4,
)


@given(STATES, st.data())
def test_any_state_comes_back_or_its_damage_is_found(tmp_path_factory, state, data):
    folder = tmp_path_factory.mktemp("state")
    arrays = {"round": np.array(3), **state}
    save_checkpoint(folder, arrays, json.dumps(HEADER), rounds="")
    path = folder / CHECKPOINT
    saved = load_checkpoint(path)
    assert same(saved.arrays, arrays)
    assert saved.header == HEADER
    content = path.read_bytes()
    damaged = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, max(0, len(damaged) - 1)))
        kind = data.draw(st.sampled_from(["flip", "cut", "zero", "insert", "remove", "move"]))
        end = min(len(damaged), place + data.draw(st.integers(1, 600)))
        if kind == "flip" and damaged:
            damaged[place] ^= data.draw(st.integers(1, 255))
        elif kind == "cut":
            del damaged[place:]
        elif kind == "zero":
            damaged[place:end] = bytes(end - place)
        elif kind == "insert":
            damaged[place:place] = data.draw(st.binary(max_size=40))
        elif kind == "remove":
            del damaged[place:end]
        else:
            damaged[place:end], damaged[:0] = b"", damaged[place:end]
    path.write_bytes(bytes(damaged))
    if bytes(damaged) != content:
        with pytest.raises(RecordError):
            load_checkpoint(path)


def write_run(folder, checkpoints=(2, 4), header=HEADER):
    with open_run(folder, header, resume=True) as writer:
        writer.begin()
        for t in range(5):
            writer.append({"round": t, "x": t / 3})
            if t + 1 in checkpoints:
                writer.save({**ARRAYS, "round": np.array(t + 1)})


def flip(path, place=700):
    content = bytearray(path.read_bytes())
    content[min(place, len(content) - 1)] ^= 1  # the one before may be shorter
    path.write_bytes(bytes(content))


def test_the_previous_checkpoint_is_used_where_the_newest_is_damaged(tmp_path, caplog):
    write_run(tmp_path)
    flip(tmp_path / CHECKPOINT)
    with open_run(tmp_path, HEADER, resume=True) as writer:
        assert writer.done == 2
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.getMessage() == (
        f"the checkpoint {tmp_path / CHECKPOINT} is damaged (its checksum does not match its "
        f"content); resuming from {tmp_path / PREVIOUS}, after 2 rounds"
    )


def test_a_good_checkpoint_is_there_at_every_moment(tmp_path, monkeypatch):
    """Also while a damaged newest one is replaced: it must not become the previous one."""
    write_run(tmp_path)
    flip(tmp_path / CHECKPOINT)
    replace, seen = os.replace, []

    def watch(source, target):
        replace(source, target)
        good = []
        for path in (CHECKPOINT, PREVIOUS):
            try:
                saved = load_checkpoint(tmp_path / path)
                good += [] if saved is None else [saved.round]
            except RecordError:
                pass
        seen.append(good)

    with open_run(tmp_path, HEADER, resume=True) as writer:
        writer.begin()
        monkeypatch.setattr(os, "replace", watch)
        for t in (2, 3, 4):
            writer.append({"round": t, "x": t / 3})
            writer.save({**ARRAYS, "round": np.array(t + 1)})
    assert seen == [[3, 2], [3], [4, 3], [4], [5, 4]]


def test_killed_between_the_two_renames(tmp_path, monkeypatch, caplog):
    write_run(tmp_path)
    replace = os.replace

    def die(source, target):
        if Path(target).name == "state.npz":
            raise KeyboardInterrupt
        replace(source, target)

    with (
        pytest.raises(KeyboardInterrupt),
        open_run(tmp_path, HEADER, resume=True) as writer,
    ):
        writer.begin()
        writer.append({"round": 4, "x": 4 / 3})
        monkeypatch.setattr(os, "replace", die)
        writer.save({**ARRAYS, "round": np.array(5)})
    monkeypatch.undo()
    with open_run(tmp_path, HEADER, resume=True) as writer:
        assert writer.done == 4
    assert "is missing; resuming from" in caplog.text


def test_a_record_that_is_older_than_the_newest_checkpoint_fits_the_previous_one(tmp_path, caplog):
    """As in a copy of the folder that was made while the run was written."""
    write_run(tmp_path)
    content = (tmp_path / "rounds.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "rounds.jsonl").write_text("".join(content[: 1 + 3]))
    with open_run(tmp_path, HEADER, resume=True) as writer:
        assert writer.done == 2
    assert "is of round 4, but rounds.jsonl ends with 3; resuming from" in caplog.text


@pytest.mark.parametrize("checkpoints", [(2,), (2, 4)])
def test_without_a_good_checkpoint_nothing_is_touched(tmp_path, checkpoints):
    write_run(tmp_path, checkpoints)
    for path in (tmp_path / "checkpoint").iterdir():
        flip(path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with (
        pytest.raises(RecordError, match=r"no checkpoint in .* delete it, the whole folder"),
        open_run(tmp_path, HEADER, resume=True),
    ):
        pass
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    shutil.rmtree(tmp_path / "checkpoint")  # as it says
    with open_run(tmp_path, HEADER, resume=True) as writer:
        assert writer.done == 0


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"seed": 2}, "is of another run: its seed is 2, not 1"),
        ({"selector": "other"}, "is of another run: its selector is 'other', not 's'"),
        (
            {"config": {"training": {"rounds": 5}, "target": 0.7}},
            r"is of a run with other settings \(target is 0.7 there, 0.5 here\)",
        ),
    ],
)
def test_a_checkpoint_of_another_run_is_not_used(tmp_path, change, why, caplog):
    ours, other = tmp_path / "ours", tmp_path / "other"
    write_run(ours)
    write_run(other, header={**HEADER, **change})
    shutil.copy(other / CHECKPOINT, ours / CHECKPOINT)
    with open_run(ours, HEADER, resume=True) as writer:
        assert writer.done == 2  # from the previous one
    (ours / PREVIOUS).unlink()
    with pytest.raises(RecordError, match=why), open_run(ours, HEADER, resume=True):
        pass


def test_a_run_that_got_more_rounds_uses_the_checkpoint_of_before(tmp_path):
    write_run(tmp_path)
    more = {**HEADER, "config": {"training": {"rounds": 9}, "target": 0.5}}
    for _ in range(2):  # the record then has the new header, its checkpoint still the old one
        with open_run(tmp_path, more, resume=True) as writer:
            assert writer.done == 4
            writer.begin()


def test_what_a_killed_writer_left_is_removed_and_nothing_else(tmp_path):
    write_run(tmp_path)
    left = [".rounds.jsonl.17.tmp", ".clients.tsv.3.tmp", "checkpoint/.state.npz.99.tmp"]
    kept = [".rounds.jsonl.x.tmp", ".other.17.tmp", "checkpoint/state.npz.99.tmp", "a.tmp"]
    for name in [*left, *kept]:
        (tmp_path / name).write_text("x")
    (tmp_path / ".clients.tsv.4.tmp").mkdir()
    with open_run(tmp_path, HEADER, resume=True):
        pass
    assert not any((tmp_path / name).exists() for name in left)
    assert all((tmp_path / name).exists() for name in [*kept, ".clients.tsv.4.tmp"])


def test_a_refused_folder_keeps_what_is_in_it(tmp_path):
    """Only who holds the lock may clean: another process may be writing."""
    write_run(tmp_path)
    with open_run(tmp_path, HEADER, resume=True):
        (tmp_path / ".rounds.jsonl.17.tmp").write_text("x")
        with pytest.raises(RecordError, match="in use"), open_run(tmp_path, HEADER, resume=True):
            pass
        assert (tmp_path / ".rounds.jsonl.17.tmp").exists()


@pytest.mark.parametrize(
    "name",
    ["checkpoint", str(CHECKPOINT), str(PREVIOUS), str(REFUSED), RECORD, "clients.tsv", "run.lock"],
)
def test_nothing_is_written_through_a_link(tmp_path, name):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    write_run(run)
    path = run / name
    if path.exists():
        shutil.move(path, elsewhere)
    else:
        elsewhere.write_text("precious")
    path.symlink_to(elsewhere)
    files = [elsewhere, *elsewhere.rglob("*")] if elsewhere.is_dir() else [elsewhere]
    before = {file: file.read_bytes() for file in files if file.is_file()}
    with pytest.raises(RecordError, match="is a symbolic link"), open_run(run, HEADER, resume=True):
        pass
    assert {file: file.read_bytes() for file in before} == before


def test_a_link_that_appears_while_a_run_is_written_is_refused(tmp_path):
    run = tmp_path / "run"
    (tmp_path / "elsewhere").mkdir()
    with (
        pytest.raises(RecordError, match="is a symbolic link"),
        open_run(run, HEADER, resume=True) as writer,
    ):
        writer.begin()
        (run / "checkpoint").symlink_to(tmp_path / "elsewhere")
        writer.append({"round": 0})
        writer.save({"round": np.array(1)})
    assert not list((tmp_path / "elsewhere").iterdir())


def test_the_folder_of_a_run_may_be_a_link(tmp_path):
    (tmp_path / "large-disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "large-disk")
    write_run(tmp_path / "run")
    assert read_checkpoint(tmp_path / "large-disk")["round"] == 4


def test_a_temporary_file_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / "precious").write_text("x")
    (tmp_path / f".a.{os.getpid()}.tmp").symlink_to(tmp_path / "precious")
    with open_whole(tmp_path / "a") as file:
        file.write(b"new")
    assert (tmp_path / "precious").read_text() == "x"
    assert (tmp_path / "a").read_bytes() == b"new"


@pytest.mark.parametrize("name", [RECORD, str(CHECKPOINT), "clients.tsv"])
def test_a_pipe_in_a_runs_folder_is_refused(tmp_path, name):
    """Nobody writes into it: to read it would take for ever."""
    write_run(tmp_path, (2,))
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    match = "not a plain file"
    if name == RECORD:
        with pytest.raises(RecordError, match=match):
            read_run(tmp_path)
    if name == "clients.tsv":
        with pytest.raises(OSError, match=match):
            client_names(tmp_path)
    else:
        with (
            pytest.raises((OSError, RecordError), match=match),
            open_run(tmp_path, HEADER, resume=True),
        ):
            pass


def test_a_damaged_checkpoint_is_named_where_it_is_only_read(tmp_path):
    write_run(tmp_path)
    flip(tmp_path / CHECKPOINT)
    with pytest.raises(RecordError, match=r"state\.npz is damaged: its checksum"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("count", [np.array(-1), np.array([1, 2]), np.array(1.5), np.array("a")])
def test_a_checkpoint_that_does_not_say_its_round_is_refused(tmp_path, count):
    save_checkpoint(tmp_path, {"round": count}, json.dumps(HEADER), rounds="")
    with pytest.raises(RecordError, match="after which round"):
        load_checkpoint(tmp_path / CHECKPOINT)


# --- the record, held against its checkpoint ------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('"x":0.3333333333333333', '"x":0.3333333333333334', "something in the first 4 rounds"),
        ('"x":0.0', '"y":0.0', "something in the first 4 rounds"),
        ('"fedcor":"1"', '"fedcor":"3"', "in the header, versions.fedcor is not as"),
    ],
)
def test_a_record_that_was_changed_is_neither_read_nor_resumed(tmp_path, old, new, why):
    header = {**HEADER, "versions": {"fedcor": "1"}}
    write_run(tmp_path, header=header)
    text = (tmp_path / RECORD).read_text()
    assert text.count(old) == 1
    (tmp_path / RECORD).write_text(text.replace(old, new))
    with pytest.raises(RecordError, match=why):
        read_run(tmp_path)
    with pytest.raises(RecordError, match=why), open_run(tmp_path, header, resume=True):
        pass
    shutil.rmtree(tmp_path / "checkpoint")  # as it says
    assert len(read_run(tmp_path).rounds) == 5


def test_lines_after_the_checkpoint_are_made_again_and_so_may_differ(tmp_path):
    write_run(tmp_path)
    text = (tmp_path / RECORD).read_text()
    (tmp_path / RECORD).write_text(text.replace('"x":1.3333333333333333', '"x":7'))
    with open_run(tmp_path, HEADER, resume=True) as writer:
        assert [entry["round"] for entry in writer.kept] == [0, 1, 2, 3]


def test_a_checkpoint_that_is_newer_than_the_lines_that_were_read_says_nothing(tmp_path):
    """Both may be written while a record is read."""
    write_run(tmp_path)
    lines = (tmp_path / RECORD).read_text().splitlines(keepends=True)
    (tmp_path / RECORD).write_text("".join(lines[:3]))
    assert len(read_run(tmp_path).rounds) == 2


def test_a_run_that_is_killed_and_resumed_keeps_its_marks(tmp_path):
    write_run(tmp_path, (2,))
    for rounds in (3, 5):
        with open_run(tmp_path, HEADER, resume=True) as writer:
            assert writer.done == rounds - (1 if rounds == 3 else 2)
            writer.begin()
            for t in range(writer.done, rounds):
                writer.append({"round": t, "x": t / 3, "y": None, "z": [1e-300, "é"]})
            writer.save({**ARRAYS, "round": np.array(rounds)})
    assert len(read_run(tmp_path).rounds) == 5


def damage_state(folder):
    """Flip a byte of the model; what the checkpoint says of the record stays readable."""
    model = ARRAYS["model"].tobytes()
    place = (folder / CHECKPOINT).read_bytes().index(model)
    flip(folder / CHECKPOINT, place)
    assert load_marks(folder / CHECKPOINT).round == 4


def test_rounds_that_are_run_again_are_not_held_against_a_damaged_checkpoint(tmp_path):
    write_run(tmp_path)
    damage_state(tmp_path)
    damaged = (tmp_path / CHECKPOINT).read_bytes()
    with open_run(tmp_path, HEADER, resume=True) as writer:
        writer.begin()
        assert len(read_run(tmp_path).rounds) == 2
        for t in (2, 3, 4):
            writer.append({"round": t, "x": t / 3, "seconds": 0.5})
            assert len(read_run(tmp_path).rounds) == t + 1
    assert (tmp_path / REFUSED).read_bytes() == damaged
    with open_run(tmp_path, HEADER, resume=True) as writer:
        assert writer.done == 2


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", [0, 1])
def test_killed_while_a_damaged_checkpoint_is_set_aside(tmp_path, monkeypatch, at, after):
    """Before and after each of the two renames: the checkpoint's, then the record's."""
    write_run(tmp_path)
    damage_state(tmp_path)
    replace, calls = os.replace, []

    def die(source, target):
        calls.append(Path(target).name)
        if len(calls) == at + 1:
            if after:
                replace(source, target)
            raise KeyboardInterrupt
        replace(source, target)

    with open_run(tmp_path, HEADER, resume=True) as writer:
        monkeypatch.setattr(os, "replace", die)
        with pytest.raises(KeyboardInterrupt):
            writer.begin()
    monkeypatch.undo()
    assert calls == ["refused.npz", RECORD][: at + 1]
    assert len(read_run(tmp_path).rounds) == (2 if at and after else 5)
    with open_run(tmp_path, HEADER, resume=True) as writer:
        assert writer.done == 2


# --- the command ----------------------------------------------------------------------------------


def fedcor(*arguments):
    return main([str(argument) for argument in arguments])


def lines_without_seconds(folder):
    entries = [json.loads(line) for line in (folder / RECORD).read_text().splitlines()]
    return [{key: value for key, value in entry.items() if key != "seconds"} for entry in entries]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, small_data):
    """A whole run of 24 rounds, and one that was stopped after its checkpoints of 10 and 20."""
    folder = tmp_path_factory.mktemp("runs")
    changes = ["--set", "partition.clients=20", "--set", "training.clients_per_round=4"]
    command = ["run", "digits", "--selector", "afl", *small_data.split(), *changes, "--out"]
    assert fedcor(*command, folder / "whole", "--rounds", "24") == 0
    assert fedcor(*command, folder / "stopped", "--rounds", "20") == 0
    return folder, command


def structural_places(path):
    """Places in every header and at the ends of every array of an .npz file."""
    content, places = path.read_bytes(), set()
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            start = info.header_offset
            data = start + 30 + len(info.filename.encode()) + 20
            header_length = data + 8
            places |= {start, start + 8, start + 26, start + 30, data, header_length}
            places |= {data + 20, data + 127, data + 128, data + info.file_size - 1}
        places |= {archive.start_dir, archive.start_dir + 10, archive.start_dir + 42}
    return sorted(place for place in {*places, len(content) - 1, len(content) - 70} if place > 0)


def resume_after(runs, tmp_path, damage):
    folder, command = runs
    shutil.copytree(folder / "stopped", tmp_path)
    damage(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    code = fedcor(*command, tmp_path, "--rounds", "24", "--resume")
    if code == 0:
        assert lines_without_seconds(tmp_path) == lines_without_seconds(folder / "whole")
    else:
        assert code == 2
        assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    return code


def test_a_resumed_run_is_the_same_whatever_was_damaged(runs, tmp_path, capsys):
    places = structural_places(runs[0] / "stopped" / CHECKPOINT)
    assert len(places) > 20
    rng = np.random.default_rng(0)
    size = (runs[0] / "stopped" / CHECKPOINT).stat().st_size
    chosen = [*places[:: len(places) // 12], *rng.integers(0, size, 3).tolist()]
    for number, place in enumerate(chosen):
        newest, both = tmp_path / f"newest-{number}", tmp_path / f"both-{number}"
        assert resume_after(runs, newest, lambda run, at=place: flip(run / CHECKPOINT, at)) == 0

        def damage_both(run, at=place):
            flip(run / CHECKPOINT, at)
            flip(run / PREVIOUS, at)

        assert resume_after(runs, both, damage_both) == 2
        assert "no checkpoint in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("holders", lambda a: a.astype(float)),
        ("known", lambda a: a[:3]),
        ("model", lambda a: np.full_like(a, np.nan)),
        ("model", lambda a: a.astype(np.float64)),
        ("selector/losses", lambda a: a.astype(str)),
        ("selector/losses", lambda a: a[0]),
    ],
)
def test_arrays_that_cannot_be_of_this_run_are_refused(runs, tmp_path, capsys, name, change):
    """Under a right checksum: somebody wrote them so."""

    def forge(run):
        saved = load_checkpoint(run / CHECKPOINT)
        arrays = {**saved.arrays, name: change(saved.arrays[name])}
        header = json.dumps(saved.header)
        save_checkpoint(run, arrays, header, keep=False, rounds=saved.rounds)

    assert resume_after(runs, tmp_path / "run", forge) == 2
    assert "does not fit this run" in capsys.readouterr().err


def test_another_seeds_checkpoint_is_not_resumed(runs, tmp_path, capsys):
    command = runs[1]
    assert fedcor(*command, tmp_path / "other", "--rounds", "20", "--seed", "2") == 0
    for only in (False, True):

        def swap(run, only=only):
            shutil.copy(tmp_path / "other" / CHECKPOINT, run / CHECKPOINT)
            if only:
                (run / PREVIOUS).unlink()

        assert resume_after(runs, tmp_path / f"run-{only}", swap) == (2 if only else 0)
    assert "its seed is 2, not 1" in capsys.readouterr().err


def test_a_checkpoint_without_a_checksum_or_with_another_format_is_refused(runs, tmp_path, capsys):
    def without_checksum(run):
        save_arrays(run / CHECKPOINT, read_checkpoint(run))
        (run / PREVIOUS).unlink()

    def other_format(run):
        saved = load_checkpoint(run / CHECKPOINT)
        header = json.dumps({**saved.header, "format": 2})
        save_checkpoint(run, saved.arrays, header, rounds=saved.rounds, keep=False)
        (run / PREVIOUS).unlink()

    assert resume_after(runs, tmp_path / "a", without_checksum) == 2
    assert "its end is missing" in capsys.readouterr().err
    assert resume_after(runs, tmp_path / "b", other_format) == 2
    assert "its format is 2, not 3" in capsys.readouterr().err


def test_the_command_says_what_it_resumes_from(runs, tmp_path):
    """In a process of its own: the warning goes to the terminal, and there is no traceback."""
    folder, command = runs
    shutil.copytree(folder / "stopped", tmp_path / "run")
    flip(tmp_path / "run" / CHECKPOINT)
    done = subprocess.run(
        [sys.executable, "-m", "fedcor", *command, "run", "--rounds", "24", "--resume"],
        **{"capture_output": True, "text": True, "cwd": tmp_path, "check": False},
    )
    assert done.returncode == 0, done.stderr
    assert "state.npz is damaged" in done.stderr
    assert "previous.npz, after 10 rounds" in done.stderr
    assert "Traceback" not in done.stderr
    assert lines_without_seconds(tmp_path / "run") == lines_without_seconds(folder / "whole")


def small(small_data, selector, rounds, *changes):
    settings = [small_data.removeprefix("--set "), "partition.clients=20"]
    settings += ["training.clients_per_round=4", f"training.rounds={rounds}", *changes]
    return load_experiment("digits", settings, selector)


def test_a_run_that_is_stopped_after_its_checkpoint_was_damaged_can_be_read(tmp_path, small_data):
    run(small(small_data, "afl", 15), 1, tmp_path)
    model = load_checkpoint(tmp_path / CHECKPOINT).arrays["model"].tobytes()
    flip(tmp_path / CHECKPOINT, (tmp_path / CHECKPOINT).read_bytes().index(model))

    def stop(record):
        if record.round == 15:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(small(small_data, "afl", 20), 1, tmp_path, resume=True, callbacks=[stop])
    assert len(read_run(tmp_path).rounds) == 16
    run(small(small_data, "afl", 20), 1, tmp_path, resume=True)
    assert len(read_run(tmp_path).rounds) == 20


def test_a_checkpoint_without_anything_that_its_selector_remembers_is_refused(tmp_path, small_data):
    run(small(small_data, "round_robin", 10), 1, tmp_path)
    saved = load_checkpoint(tmp_path / CHECKPOINT)
    other = {name.replace("selector/", "selector/other_"): a for name, a in saved.arrays.items()}
    save_checkpoint(tmp_path, other, json.dumps(saved.header), rounds=saved.rounds)
    with pytest.raises(RecordError, match="does not fit this run"):
        run(small(small_data, "round_robin", 15), 1, tmp_path, resume=True)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("norms/norms", np.array(["a", "b"])),
        ("norms/norms", np.array([[np.nan, 0.0]])),
        ("norms/norms", np.array([[-1.0, 0.0]])),
        ("norms/norms", np.zeros((3, 5))),
        ("norms/rounds", np.array([0.5])),
        ("norms/clients", np.zeros((2, 2), dtype=np.int64)),
        ("turns/clients", np.array([-1])),
        ("turns/rounds", np.array(["x"])),
        ("good", np.zeros(3, dtype=np.float32)),
    ],
    ids=str,
)
def test_what_a_defence_remembers_is_checked(name, wrong, tmp_path):
    """With a right checksum, and so not noticed by it."""
    changes = ["training.rounds=3", "defence.most_share=2.0"]
    run(load_experiment("digits", changes, "random"), 1, tmp_path)
    saved = load_checkpoint(tmp_path / CHECKPOINT)
    assert name in saved.arrays
    save_checkpoint(
        tmp_path,
        {**saved.arrays, name: wrong},
        json.dumps(saved.header),
        keep=False,
        rounds=saved.rounds,
    )
    longer = load_experiment("digits", ["training.rounds=5", changes[1]], "random")
    with pytest.raises(RecordError, match="does not fit this run"):
        run(longer, 1, tmp_path, resume=True)
