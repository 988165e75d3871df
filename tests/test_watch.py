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

from fedcor.cli import main
from fedcor.errors import RecordError
from fedcor.page.watch import Follower, PageServer
from fedcor.record import RECORD, read_run
from page_runs import add_round, write_run


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
    return len(data["experiments"][0]["runs"][0]["there"]["selected"])


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

    monkeypatch.setattr("fedcor.page.watch.read_run", reading)
    add_round(run)
    follower.data()
    assert read == [run]


def test_the_data_is_that_of_the_page(tmp_path, run):
    from fedcor.page import page_data
    from fedcor.record import read_runs

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
