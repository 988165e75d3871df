"""A server that asks remote workers over HTTP on 127.0.0.1. Killed and started again, it resumes.

python remote_workers.py server FOLDER
python remote_workers.py worker site-0 site-1 ...  # in other terminals: works for these clients
"""

import contextlib
import io
import os
import sys
import threading
import time
import urllib.request
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
from numpy_loop import evaluate, start, test, train

PORT = int(os.environ.get("PORT", "8765"))
DEADLINE = 30.0  # seconds until a client counts as one that did not reply


def to_bytes(arrays):
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def to_arrays(body):
    with np.load(io.BytesIO(body), allow_pickle=False) as file:
        return dict(file)


class Desk(BaseHTTPRequestHandler):
    """Where workers fetch the open question, GET /CLIENT, and leave answers, POST /CLIENT."""

    started = 0  # answers to a server that was killed before are not taken
    task, body = "", b""  # the open question: its name, and what is sent
    waiting, answers = set(), {}  # clients that have not answered, and answers by client
    changed = threading.Condition()

    def do_GET(self):
        with Desk.changed:
            task, body = Desk.task, Desk.body if self.path[1:] in Desk.waiting else b""
        self.send_response(200 if body else 204)
        self.send_header("Task", task)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        client, length = self.path[1:], int(self.headers["Content-Length"])
        answer = to_arrays(self.rfile.read(length))
        with Desk.changed:
            if self.headers["Task"] == Desk.task and client in Desk.waiting:
                Desk.waiting.remove(client)
                Desk.answers[client] = answer
                Desk.changed.notify()
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_):
        pass


def collect(question):
    """The answers of the clients that reply in time."""
    with Desk.changed:
        Desk.task = f"{Desk.started}-{question.number}"
        Desk.body = to_bytes({**question.model, "kind": np.array(question.kind)})
        Desk.waiting, Desk.answers = set(question.clients), {}
        Desk.changed.wait_for(lambda: not Desk.waiting, DEADLINE)
        Desk.waiting = set()
        return Desk.answers


def serve(folder, until=200):
    Desk.started = time.time_ns()
    server = ThreadingHTTPServer(("127.0.0.1", PORT), Desk)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with start(folder) as rounds:
        while rounds.number < until:
            question = rounds.ask()
            print(f"round {question.round}: {question.kind}", *question.clients, flush=True)
            if question.kind == "test":
                rounds.tell(question, **test(question.model))
                continue
            answers = collect(question)
            if question.kind == "losses":
                rounds.tell(question, losses={k: float(a["loss"]) for k, a in answers.items()})
            else:
                rounds.tell(question, models=answers)


def work(client):
    """Do the client's open task, if there is one."""
    address = f"http://127.0.0.1:{PORT}/{client}"
    with urllib.request.urlopen(address, timeout=DEADLINE) as reply:
        body, task = reply.read(), reply.headers["Task"]
    if body:
        model = to_arrays(body)
        asked_to_train = model.pop("kind") == "train"
        answer = train(model, client) if asked_to_train else {"loss": evaluate(model, client)}
        request = urllib.request.Request(address, to_bytes(answer), {"Task": task})
        urllib.request.urlopen(request, timeout=DEADLINE).close()


def work_for(clients):
    """Work until the process is ended, whether or not there is a server."""
    while True:
        for client in clients:
            with contextlib.suppress(OSError, HTTPException):  # no server: try again later
                work(client)
        time.sleep(0.02)


if __name__ == "__main__":
    if sys.argv[1] == "server":
        serve(sys.argv[2])
    else:
        work_for(sys.argv[2:])
