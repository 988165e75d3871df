"""Bad input: settings, records, checkpoints and data, from a seeded generator.

Each is taken or refused, with a message that one can read: no traceback, no hang, and no file
outside its folder is written.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fedcor.data.cache import SPECS
from fedcor.data.datasets import load
from fedcor.data.downloads import READERS
from fedcor.runs.checkpoints import CHECKPOINT, parse_checkpoint, save_checkpoint
from fedcor.runs.record import RECORD
from fedcor.simulation.experiment_files import load_experiment
from torture.calls import call, guarded, only_within
from torture.crashes import load_before
from torture.damage import arguments
from torture.making import Maker
from torture.tally import Line, Tally


def try_all(tally: Tally, count: int, folder: Path, attempt: Callable[[int], str | None]) -> None:
    """Call `attempt` so many times; it says how it went, and raises AssertionError if it is wrong.

    What is written outside `folder` is lost, too.
    """
    before = sorted(path for path in folder.parent.iterdir())
    home = Path.cwd()
    os.chdir(folder)
    try:
        with only_within(folder) as aside:
            for number in range(count):
                try:
                    tally.add(attempt(number) or "taken")
                except AssertionError as error:
                    tally.lose(str(error)[-1800:])
                if aside:
                    tally.lose(f"written outside the folder: {aside[0]}", counted=True)
                    aside.clear()
    finally:
        os.chdir(home)
    if sorted(path for path in folder.parent.iterdir()) != before:
        tally.lose("there is something new beside the folder", counted=True)


def _in_scratch(work: Callable[[Path], list[Line]]) -> list[Line]:
    with tempfile.TemporaryDirectory(prefix="torture-") as scratch:
        folder = Path(scratch).resolve() / "run"
        folder.mkdir()
        return work(folder)


def _refused_or_ok(*command: object) -> str:
    ended = call(*command)
    if ended.code not in (0, 2) or "Traceback" in ended.text or len(ended.text) > 200_000:
        raise AssertionError(f"{[str(one)[:200] for one in command]}: {ended.text[-1500:]}")
    return "refused" if ended.code else "taken"


def fuzz_settings(quick: bool) -> list[Line]:
    """`--set`, and TOML files."""
    changes = Tally("input", "`--set`, one to three at once")
    files = Tally("input", "experiments as TOML files")
    make = Maker(10)
    presets = Path(load_experiment.__code__.co_filename).parent / "presets"
    contents = [path.read_text(encoding="utf-8") for path in sorted(presets.glob("*.toml"))]

    def change(_: int) -> str | None:
        given = [make.change() for _ in range(int(make.rng.integers(1, 4)))]

        def load_it() -> None:
            experiment = load_experiment("digits", given, None)
            json.dumps(experiment.describe(), default=repr)

        try:
            return guarded(load_it)
        except AssertionError as error:
            raise AssertionError(f"{[one[:300] for one in given]}: {str(error)[-1200:]}") from None

    def work(folder: Path) -> list[Line]:
        def file(number: int) -> str | None:
            path, text = folder / "a.toml", make.pick(contents)
            if number % 2:
                lines = text.splitlines()
                lines.insert(int(make.rng.integers(len(lines) + 1)), make.change())
                content = "\n".join(lines).encode("utf-8", "replace")
            else:
                content = make.spoil(text.encode(), 300)
            path.write_bytes(content)

            def load_it() -> None:
                json.dumps(load_experiment(str(path)).describe(), default=repr)

            try:
                return guarded(load_it)
            except AssertionError as error:
                raise AssertionError(f"{content[:900]!r}: {str(error)[-1200:]}") from None

        try_all(changes, 60 if quick else 40_000, folder, change)
        try_all(files, 40 if quick else 25_000, folder, file)
        return [changes.line(), files.line()]

    return _in_scratch(work)


def fuzz_records(quick: bool) -> list[Line]:
    """Records that are read, explained, reported and resumed."""
    records = Tally("input", "records: explained, reported, resumed")
    make = Maker(11)

    def work(folder: Path) -> list[Line]:
        load_before("digits")
        made = call(*arguments("fedcor", 6, folder / "a"))
        assert made.code == 0, made.text
        path = folder / "a" / RECORD
        text = path.read_bytes()
        lines = [json.loads(line) for line in text.splitlines()]
        checkpoint = folder / "a" / CHECKPOINT
        saved = checkpoint.read_bytes()
        commands: list[list[object]] = [
            ["explain", folder / "a"],
            ["report", folder / "a"],
            ["report", folder / "a", "--json"],
            ["report", folder / "a", "--full"],
            ["report", folder / "a", "--csv"],
            ["explain", folder / "a", "--json"],
            ["report", folder / "a", "--latex"],
        ]

        def attempt(number: int) -> str:
            # Without a checkpoint: with it, all but the right record is refused at once.
            checkpoint.unlink(missing_ok=True)
            if number % 3:
                spoiled = list(lines)
                place = int(make.rng.integers(len(lines)))
                spoiled[place] = make.spoil_json(lines[place])
                content = "".join(json.dumps(line) + "\n" for line in spoiled).encode()
            else:
                content = make.spoil(text, 1500)
            path.write_bytes(content)
            if number % 10 == 9:
                checkpoint.write_bytes(saved)
                return _refused_or_ok(*arguments("fedcor", 6, folder / "a"))
            return _refused_or_ok(*commands[number % len(commands)])

        try_all(records, 60 if quick else 5_000, folder, attempt)
        return [records.line()]

    return _in_scratch(work)


def fuzz_checkpoints(quick: bool) -> list[Line]:
    """Checkpoints: spoiled bytes; and spoiled arrays under a right checksum, resumed."""
    spoiled = Tally("input", "checkpoints, bytes spoiled")
    forged = Tally("input", "checkpoints with a right checksum and other arrays, resumed")
    make = Maker(12)

    def work(folder: Path) -> list[Line]:
        load_before("digits")
        made = call(*arguments("fedcor", 8, folder / "a"))
        assert made.code == 0, made.text
        content = (folder / "a" / CHECKPOINT).read_bytes()
        saved = parse_checkpoint(io.BytesIO(content))

        def spoil(_: int) -> str | None:
            bad = make.spoil(content, 2000)
            ended = guarded(lambda: parse_checkpoint(io.BytesIO(bad)))
            assert ended == "refused" or bad == content, "damage was not noticed"
            return "refused" if ended == "refused" else "not changed by chance"

        def forge(_: int) -> str:
            arrays = dict(saved.arrays)
            for _ in range(int(make.rng.integers(1, 3))):
                name = make.pick(list(arrays))
                arrays[name] = _other_array(make, arrays[name])
                if make.rng.random() < 0.2:
                    del arrays[name]
                if make.rng.random() < 0.1 or not arrays:
                    arrays[f"selector/{make.pick('abc')}"] = np.zeros(3)
            header = json.dumps(saved.header)
            save_checkpoint(folder / "a", arrays, header, keep=False, rounds=saved.rounds)
            return _refused_or_ok(*arguments("fedcor", 9, folder / "a"))

        try_all(spoiled, 40 if quick else 16_000, folder, spoil)
        record = (folder / "a" / RECORD).read_bytes()

        def forge_and_put_back(number: int) -> str:
            (folder / "a" / RECORD).write_bytes(record)
            return forge(number)

        try_all(forged, 30 if quick else 1_000, folder, forge_and_put_back)
        return [spoiled.line(), forged.line()]

    return _in_scratch(work)


def _other_array(make: Maker, array: np.ndarray) -> np.ndarray:
    match int(make.rng.integers(8)):
        case 0:
            return array[..., None]
        case 1:
            with np.errstate(all="ignore"):
                return array.astype(make.pick(["f2", "c16", "U9", "i1", "u8", "?", "M8[s]", "S3"]))
        case 2:
            return array.ravel()[: len(array.ravel()) // 2]
        case 3:
            return np.zeros((0, *array.shape[1:]), array.dtype)
        case 4:
            return np.full_like(array, make.pick([0, 1, -1]) if array.dtype.kind != "U" else "x")
        case 5:
            whole = array.astype(float) if array.dtype.kind in "fiub" else array
            return np.full_like(whole, make.pick([np.nan, np.inf, -np.inf, 1e300]))
        case 6:
            return np.concatenate([np.atleast_1d(array)] * 3)
        case _:
            return np.array(make.pick([-(2**63), 2**63 - 1, 0, 99, 3]))


def fuzz_data(quick: bool) -> list[Line]:
    """Data: .npz files of users; idx, gzip, tar, PNG and JSON files of public data sets."""
    own = Tally("input", "data: .npz files of users")
    public = Tally("input", "data: idx, gzip, tar, binary, PNG and JSON files of data sets")
    make = Maker(13)

    def work(folder: Path) -> list[Line]:
        x, y = make.rng.standard_normal((30, 4)), np.arange(30) % 3
        arrays = {"x_train": x, "y_train": y, "x_test": x[:9], "y_test": y[:9]}
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)
        path = folder / "own.npz"

        def own_data(number: int) -> str | None:
            if number % 2:
                path.write_bytes(make.spoil(buffer.getvalue()))
            else:
                other = dict(arrays)
                name = make.pick(list(other))
                other[name] = _other_array(make, other[name])
                np.savez(path, **other)
            return guarded(lambda: load(str(path)))

        def public_data(number: int) -> str | None:
            source = folder / "source"
            source.mkdir(exist_ok=True)
            for old in source.iterdir():
                old.unlink()
            name = "cifar10" if number % 2 else "fmnist"
            for file, content in _public_files(name, make).items():
                (source / file).write_bytes(content)
            given = source
            if number % 5 == 4:
                given = folder / "a.tar"
                with tarfile.open(given, "w:gz" if number % 2 else "w") as archive:
                    archive.add(source, arcname=make.pick(["x", "../x", "/x", "a/b"]))
                given.write_bytes(make.spoil(given.read_bytes()))
            return guarded(lambda: READERS[name](given))

        try_all(own, 40 if quick else 8_000, folder, own_data)
        try_all(public, 20 if quick else 5_000, folder, public_data)
        return [own.line(), public.line()]

    return _in_scratch(work)


def _public_files(name: str, make: Maker) -> dict[str, bytes]:
    """Files as a data set has them, all of them short or spoiled."""
    if name == "fmnist":
        files = {}
        for spec in SPECS["fmnist"]:
            content = make.spoil(spec.header + bytes(400), 20)
            packed = make.rng.random() < 0.5
            files[f"{spec.file}.gz" if packed else spec.file] = (
                make.spoil(gzip.compress(content, 1), 40) if packed else content
            )
        return files
    if make.rng.random() < 0.3:
        names = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
        return {one: make.spoil(bytes(300)) for one in names}
    start = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\4\0\0\0\x27\x10\x08\x02\0\0\0"
    chunks = b"\0\0\0\x0cIDAT" + bytes(24) + b"\0\0\0\0IEND\xaeB`\x82"
    strips = [*(f"data_batch_{i}.png" for i in range(1, 6)), "test_batch.png"]
    files = {one: start + make.spoil(bytes(4) + chunks, 60) for one in strips}
    labels = ["train_lables.json", "test_lables.json"]
    return files | {one: json.dumps(make.json()).encode() for one in labels}


PARTS: dict[str, Callable[[bool], list[Line]]] = {
    "input-settings": fuzz_settings,
    "input-records": fuzz_records,
    "input-checkpoints": fuzz_checkpoints,
    "input-data": fuzz_data,
}
