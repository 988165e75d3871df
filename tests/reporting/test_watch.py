"""The page of running experiments: served to this machine alone, and never old."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from page_runs import add_round, write_run

from fedcor.cli import main
from fedcor.core.errors import RecordError
from fedcor.reporting.page.watch import Follower, PageServer
from fedcor.runs.checkpoints import CHECKPOINT, save_checkpoint
from fedcor.runs.record import RECORD, json_line, read_checkpoint, read_run, rounds_digest


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path, rounds=3, planned=9)


@pytest.fixture
def server(tmp_path, run):
    with PageServer(Follower(tmp_path)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server, path="/", method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer, content


def rounds(data):
    return len(data["experiments"][0]["runs"][0]["attendance"]["selected"])


def test_the_page_and_its_data_are_served(server):
    answer, page = ask(server)
    assert answer.status == 200
    assert b'data-live="yes"' in page
    assert answer.headers["X-Frame-Options"] == "DENY"
    answer, content = ask(server, "/data.json?after=")
    assert rounds(json.loads(content)) == 3


def test_a_new_round_is_answered_within_two_seconds(server, run):
    version = json.loads(ask(server, "/data.json?after=")[1])["version"]
    answers = []

    def wait():
        answers.append(json.loads(ask(server, f"/data.json?after={version}")[1]))

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.5)
    assert not answers  # it waits for news
    add_round(run)
    start = time.monotonic()
    waiting.join(timeout=20)
    assert rounds(answers[0]) == 4
    assert time.monotonic() - start < 10  # two seconds, on a machine that has nothing else to do


def test_without_news_the_version_comes_alone(tmp_path, run):
    follower = Follower(tmp_path)
    version = follower.data()["version"]
    assert follower.news(version, patience=0.3) == {"version": version}


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1.evil.example:80", ""])
def test_another_host_is_refused(server, host):
    answer, content = ask(server, "/data.json?after=", Host=host)
    assert answer.status == 403
    assert b"toy" not in content


def test_nothing_else_is_served(server):
    for path in ("/report.html", "/../../etc/passwd", "/fedcor/seed-1/rounds.jsonl", "/data"):
        assert ask(server, path)[0].status == 404, path
    for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS"):
        assert ask(server, method=method)[0].status == 501, method


def test_it_listens_on_loopback_alone(server):
    assert server.server_address[0] == "127.0.0.1"


def test_what_did_not_change_is_not_read_again(tmp_path, run, monkeypatch):
    write_run(tmp_path, "random", rounds=3)
    follower = Follower(tmp_path)
    before = follower.data()
    assert follower.data() is before
    read = []

    def reading(folder):
        read.append(folder)
        return read_run(folder)

    monkeypatch.setattr("fedcor.reporting.page.watch.read_run", reading)
    add_round(run)
    follower.data()
    assert read == [run]


def test_the_data_is_that_of_the_page(tmp_path, run):
    from fedcor.reporting.page.data import page_data
    from fedcor.runs.record import read_runs

    follower = Follower(tmp_path)
    for _ in range(3):
        add_round(run)
        data = dict(follower.data())
        data.pop("version")
        assert data == page_data(read_runs(tmp_path))


def test_a_run_that_begins_is_taken_in(tmp_path, run):
    follower = Follower(tmp_path)
    before = follower.version()
    half = tmp_path / "random" / "seed-2"
    half.mkdir(parents=True)
    (half / RECORD).write_text('{"kind":"header"')  # torn
    assert follower.version() == before
    write_run(tmp_path, "random", 1, rounds=1)
    assert len(follower.news(before)["experiments"][0]["runs"]) == 2


def damage(folder):
    """Make a record one that is refused."""
    with (folder / RECORD).open("a") as file:
        file.write("<script>alert(1)</script>\x1b\n")


def test_an_unreadable_run_does_not_hide_the_others(tmp_path, server, run):
    other = write_run(tmp_path, "random", rounds=3)
    version = json.loads(ask(server, "/data.json?after=")[1])["version"]
    damage(other)
    fresh = json.loads(ask(server, f"/data.json?after={version}")[1])
    assert rounds(fresh) == 3
    (note,) = [note for note in fresh["notes"] if "not shown" in note]
    assert str(other / RECORD) in note
    assert "line 5" in note
    add_round(run)  # and the others are still followed
    fresh = json.loads(ask(server, f"/data.json?after={fresh['version']}")[1])
    assert rounds(fresh) == 4
    answer, page = ask(server)
    assert answer.status == 200
    assert b"A run is not shown." in page
    assert b"<script>alert" not in page


def test_a_record_that_is_no_file_does_not_hide_the_others(tmp_path, run):
    folder = tmp_path / "random" / "seed-1" / RECORD
    folder.mkdir(parents=True)
    data = Follower(tmp_path).data()
    assert rounds(data) == 3
    assert str(folder) in data["notes"][-1]


def test_the_note_goes_when_the_run_is_mended(tmp_path, run):
    other = write_run(tmp_path, "random", rounds=3)
    before = (other / RECORD).read_bytes()
    follower = Follower(tmp_path)
    damage(other)
    assert len(follower.data()["experiments"][0]["runs"]) == 1
    (other / RECORD).write_bytes(before)
    data = follower.data()
    assert len(data["experiments"][0]["runs"]) == 2
    assert not [note for note in data["notes"] if "not shown" in note]


def test_where_no_run_is_readable_it_says_why(tmp_path, server, run):
    version = server.follower.data()["version"]
    damage(run)
    answer, said = ask(server)
    assert answer.status == 503
    assert str(run / RECORD).encode() in said
    with pytest.raises(RecordError, match="line 5"):
        server.follower.news(version, patience=0.1)


def test_a_request_that_fails_does_not_end_the_server(server, monkeypatch):
    def fail():
        raise ZeroDivisionError("by <nothing>\n")

    monkeypatch.setattr(server.follower, "data", fail)
    answer, said = ask(server)
    assert (answer.status, said) == (500, b"ZeroDivisionError: by <nothing>\\n\n")
    assert answer.headers["Content-Type"].startswith("text/plain")
    monkeypatch.undo()
    assert ask(server)[0].status == 200


def test_a_new_checkpoint_is_news(tmp_path, run):
    """It is written after the line of its round, and the map comes from it."""
    follower = Follower(tmp_path)
    arrays = read_checkpoint(run)
    (run / CHECKPOINT).unlink()
    before = follower.data()
    shown = before["experiments"][0]["runs"][0]
    assert not shown["map"]
    record = read_run(run)
    digest = rounds_digest(record.rounds[: int(arrays["round"])]).hexdigest()
    save_checkpoint(run, arrays, json_line(record.header), rounds=digest)
    assert follower.version() != before["version"]
    assert follower.news(before["version"], patience=0.3)["experiments"][0]["runs"][0]["map"]


def test_no_run_is_an_error(tmp_path):
    with pytest.raises(RecordError):
        Follower(tmp_path).data()


def test_what_cannot_be_served_is_refused(tmp_path, run, capsys):
    assert main(["watch", str(tmp_path / "nowhere")]) == 2
    assert main(["watch", str(tmp_path), "--baseline", "nobody"]) == 2
    assert main(["watch", str(tmp_path), "--port", "70000"]) == 2
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["watch", str(tmp_path), "--port", str(port)]) == 2
    said = capsys.readouterr().err
    assert said.count("--port") == 2
    assert "Traceback" not in said


def test_watch_starts_beside_a_record_that_is_no_file(tmp_path, capsys):
    (tmp_path / "a" / RECORD).mkdir(parents=True)
    write_run(tmp_path, "random")
    with socket.create_server(("127.0.0.1", 0)) as taken:  # it comes as far as the port
        port = taken.getsockname()[1]
        assert main(["watch", str(tmp_path), "--port", str(port)]) == 2
    assert "--port" in capsys.readouterr().err


def test_watch_waits_for_a_run_and_ends_with_an_interrupt(tmp_path):
    command = [sys.executable, "-m", "fedcor", "watch", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert "waiting" in process.stdout.readline()
        write_run(tmp_path)
        said = process.stdout.readline()
        port = int(re.search(r"http://127\.0\.0\.1:(\d+)/", said)[1])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", "/")
        assert connection.getresponse().status == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
