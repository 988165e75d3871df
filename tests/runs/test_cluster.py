"""Runs on a cluster that is a fake: what comes back, what is retried, what is refused."""

from __future__ import annotations

import importlib.metadata
import json
import shlex
import shutil
import socket
import sys
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from distributed.client import ClosedClientError
from studies.plan import Plan

import fedcor
from fedcor.cli import main
from fedcor.core.errors import ConfigError, FedcorError, RecordError, WorkerDiedError
from fedcor.core.registry import load_object
from fedcor.runs import processes, runner
from fedcor.runs.cluster import retry
from fedcor.runs.cluster.address import check_answer, find_address
from fedcor.runs.cluster.retry import DaskCluster, connect
from fedcor.runs.processes import count_processes
from fedcor.runs.record import count_rounds
from fedcor.runs.resume import RunWriter, open_run
from fedcor.simulation.build import experiment_header
from fedcor.simulation.experiment_files import load_experiment
from studies import loss_changes

PRESET = Path(fedcor.__file__).parent / "simulation" / "presets" / "digits.toml"


class FakeCluster:
    """A cluster in this process. It runs the calls with these numbers twice, as after a loss."""

    def __init__(self, lost=()):
        self.lost, self.calls, self.cancelled, self.most = set(lost), 0, [], 0

    def slots(self):
        return 2

    def submit(self, payload):
        self.calls += 1
        return self.calls, payload

    def finished(self, tasks):
        self.most = max(self.most, len(tasks))
        return tasks[:1]

    def result(self, task):
        number, payload = task
        if number in self.lost:
            with stopped_after(7):
                assert retry.task_entry()(payload)[0] == "failed"
        return retry.task_entry()(payload)

    def cancel(self, tasks):
        self.cancelled += tasks


@contextmanager
def stopped_after(round):
    """Runs end in this round, after its line was written and before its checkpoint was."""
    append = RunWriter.append

    def append_and_stop(self, entry):
        append(self, entry)
        if entry["round"] == round:
            raise OSError("this worker is lost")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunWriter, "append", append_and_stop)
        yield


@pytest.fixture
def cluster(monkeypatch):
    fake = FakeCluster()
    monkeypatch.setattr(retry, "connect", lambda backend, address: nullcontext(fake))
    return fake


@pytest.fixture
def not_shared(monkeypatch):
    """Workers do not see the folder of the driver."""
    run_on_worker = runner._run_on_worker

    def elsewhere(lease, folder, job):
        return run_on_worker(Path("/nowhere/else"), folder, job)

    monkeypatch.setattr(runner, "_run_on_worker", elsewhere)


def call_all(function, items, at_once=None):
    return retry.run_with_retries(function, items, at_once, backend="ray", address="a:1")


def lines(folder):
    return {
        str(path.relative_to(folder)): [
            {key: value for key, value in json.loads(line).items() if key != "seconds"}
            for line in path.read_text().splitlines()
        ]
        for path in sorted(Path(folder).rglob("rounds.jsonl"))
    }


def compare(small_data, out, *more):
    command = f"compare digits --selectors random,fedcor --seeds 1,2 --rounds 12 {small_data}"
    return main([*command.split(), "--out", str(out), *more])


AWAY = ("--backend", "ray", "--address", "a:1")


def test_a_cluster_gives_the_records_of_one_process_whatever_is_lost(small_data, cluster, tmp_path):
    assert compare(small_data, tmp_path / "here") == 0
    cluster.lost = {1, 4}
    assert compare(small_data, tmp_path / "there", *AWAY) == 0
    assert lines(tmp_path / "there") == lines(tmp_path / "here")
    assert (cluster.calls, cluster.most) == (4, 2)
    assert not list((tmp_path / "there").rglob(".lease-*"))


def test_a_worker_that_does_not_see_the_folder_sends_the_files(
    small_data, cluster, not_shared, tmp_path
):
    assert compare(small_data, tmp_path / "here") == 0
    assert compare(small_data, tmp_path / "there", *AWAY) == 0
    assert lines(tmp_path / "there") == lines(tmp_path / "here")
    # What was begun here is finished there, and goes on here.
    shutil.rmtree(tmp_path / "there" / "fedcor")
    assert compare(small_data, tmp_path / "there", "--resume", *AWAY) == 0
    assert lines(tmp_path / "there") == lines(tmp_path / "here")
    files = {path.name for path in (tmp_path / "there" / "fedcor" / "seed-1").rglob("*")}
    assert {"rounds.jsonl", "checkpoint", "state.npz", "previous.npz"} <= files
    for folder in ("here", "there"):
        assert compare(small_data, tmp_path / folder, "--resume", "--rounds", "14") == 0
    assert lines(tmp_path / "there") == lines(tmp_path / "here")


def test_an_end_halfway_can_be_resumed_here_or_there(small_data, cluster, tmp_path, monkeypatch):
    assert compare(small_data, tmp_path / "here") == 0

    def die(task):
        raise WorkerDiedError("several workers died")

    with monkeypatch.context() as patch, stopped_after(11):
        patch.setattr(cluster, "result", lambda task: FakeCluster.result(cluster, task) and die(0))
        assert compare(small_data, tmp_path / "there", *AWAY) == 2
    assert cluster.cancelled
    assert len(lines(tmp_path / "there")) == 1
    assert compare(small_data, tmp_path / "there", *AWAY) == 2  # without --resume
    assert compare(small_data, tmp_path / "there", *AWAY, "--resume") == 0
    assert lines(tmp_path / "there") == lines(tmp_path / "here")
    assert compare(small_data, tmp_path / "there", "--resume") == 0


def test_a_worker_stops_when_nobody_waits_for_its_run(small_data, tmp_path):
    """Dask cannot end a task that runs, which would hold the lock of its run."""
    changes = [small_data.removeprefix("--set "), "training.rounds=12"]
    job = runner.Job(load_experiment("digits", changes, "random"), 1, tmp_path / "run", False)
    with runner._lease(tmp_path) as lease:
        write = RunWriter.append

        def end_lease(self, entry):
            write(self, entry)
            if entry["round"] == 3:
                lease.unlink()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RunWriter, "append", end_lease)
            with pytest.raises(FedcorError, match="stopped after round 3"):
                runner._run_on_worker(lease, tmp_path, job)
    assert count_rounds(tmp_path / "run") == 4


def test_a_retry_waits_for_the_lock_of_the_worker_that_was_lost(small_data, tmp_path):
    changes = [small_data.removeprefix("--set "), "training.rounds=2"]
    made = load_experiment("digits", changes, "random")
    with ThreadPoolExecutor() as threads:
        with open_run(tmp_path / "run", experiment_header(made, 1), resume=False) as writer:
            writer.begin()
            with pytest.raises(RecordError, match="in use"):
                runner.run(made, 1, tmp_path / "run")
            waiting = threads.submit(runner.run, made, 1, tmp_path / "run", resume=True, wait=60)
            time.sleep(0.3)
        waiting.result(timeout=60)
    assert count_rounds(tmp_path / "run") == 2


def test_callbacks_are_called_here_when_a_run_has_come_back(small_data, cluster, not_shared):
    records = []
    made = fedcor.experiment("digits", data=small_data.rpartition("=")[2], rounds=3)
    result = fedcor.compare(
        made, ["random"], [1], backend="ray", address="a:1", callbacks=[records.append]
    )
    assert [record.round for record in records] == [0, 1, 2]
    assert [record.selected for record in records] == [
        line["selected"] for line in result.runs[0].rounds
    ]
    assert [run.path for run in result.runs] == [None]


def test_callbacks_of_a_resumed_run_are_told_what_was_there(small_data, cluster, tmp_path):
    made = fedcor.experiment("digits", data=small_data.rpartition("=")[2], rounds=10)
    fedcor.compare(made, ["random"], [1], out=tmp_path)
    told = []

    class Told:
        def on_start(self, run):
            told.append((run.resumed, len(run.rounds)))

        def on_round(self, record):
            told.append(record.round)

    options = {"out": tmp_path, "resume": True, "backend": "ray", "address": "a:1"}
    fedcor.compare(made, ["random"], [1], rounds=12, callbacks=[Told()], **options)
    assert told == [(True, 10), 10, 11]


def test_clients_are_called_by_name_there_as_here(cluster, not_shared, tmp_path):
    rng = np.random.default_rng(1)
    arrays = rng.standard_normal((12, 3)), np.arange(12) % 2
    made = fedcor.Experiment(
        (*arrays, *arrays),
        [f"phone {k % 4}" for k in range(12)],
        "logistic",
        rounds=2,
        batch_size=2,
        local_steps=1,
        learning_rate=0.1,
        selector=fedcor.Random(2),
    )
    away = {"backend": "ray", "address": "a:1"}
    for out, options in (("here", {}), ("there", away)):
        fedcor.compare(made, ["random"], [1], out=tmp_path / out, progress=False, **options)
    written, expected = (tmp_path / out / "random/seed-1/clients.tsv" for out in ("there", "here"))
    assert written.read_text() == expected.read_text() != ""


def test_an_error_in_a_call_is_raised_as_it_is_and_not_retried(cluster):
    def work(number):
        if number == 1:
            raise ConfigError("rounds", -1, "must be at least 1")
        raise KeyError("what")

    for number, kind in ((1, ConfigError), (2, KeyError)):
        with pytest.raises(kind):
            list(call_all(work, [number]))
    assert cluster.calls == 2
    assert sorted(call_all(abs, [-1, 2])) == [(-1, 1), (2, 2)]


def test_an_error_of_a_users_selector_names_the_run_and_leaves_no_folder(cluster, tmp_path, capsys):
    refused = ["--set", "partition.clients=5", "--set", "training.clients_per_round=9"]
    given = ["compare", "digits", "--selectors=random", "--seeds=1", *refused, *AWAY]
    assert main([*given, "--out", str(tmp_path / "runs")]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert not list(tmp_path.rglob("*seed-1*"))


def test_other_versions_on_a_worker_are_refused(monkeypatch):
    enter = retry.task_entry()
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.0.1")
    status, said = enter(b"")
    assert status == "refused"
    assert "fedcor is 0.0.1 there" in said


@pytest.mark.parametrize("here", ["0.61.0", None])
@pytest.mark.parametrize("there_", ["0.61.0", "0.60.0", None])
def test_numba_is_the_same_on_a_worker_or_on_neither_side(here, there_, monkeypatch):
    versions, found = importlib.metadata.version, here

    def version(name):
        if name != "numba":
            return versions(name)
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr("importlib.metadata.version", version)
    enter, found = retry.task_entry(), there_
    status, said = enter(retry.pack(lambda: 7))
    if here == there_:
        assert (status, said) == ("done", 7)
    else:
        expected = f"numba is {there_ or 'missing'} there, {here or 'missing'} here"
        assert status == "refused"
        assert expected in said


def test_a_worker_takes_up_edits_of_a_users_module(tmp_path, monkeypatch):
    call = retry.pack(partial(load_object, "edited_module:VALUE", "selector"))
    for folder, value in (("a", 1), ("a", 22), ("b", 333)):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "edited_module.py").write_text(f"import fedcor\nVALUE = {value}\n")
        monkeypatch.chdir(tmp_path / folder)
        assert retry.task_entry()(call) == ("done", value)
    assert "edited_module" not in sys.modules


def test_a_worker_keeps_modules_that_are_installed(tmp_path):
    for file in (json.__file__, np.__file__, retry.__file__, None):
        assert retry._is_installed(file)
    assert not retry._is_installed(str(tmp_path / "mine.py"))


def test_an_address_beside_a_connection_to_ray_is_refused(monkeypatch):
    connected = SimpleNamespace(is_initialized=lambda: True, remote=lambda **_: lambda function: 0)
    monkeypatch.setitem(sys.modules, "ray", connected)
    monkeypatch.setattr("fedcor.runs.cluster.address.find_spec", lambda name: name)
    monkeypatch.setenv("RAY_ADDRESS", "a:1")
    with connect("ray", None):
        pass
    with pytest.raises(ConfigError, match="connected to Ray already"), connect("ray", "a:1"):
        pass


class Empty(FakeCluster):
    """A cluster whose first worker comes after some questions, or with the first call."""

    def __init__(self, questions):
        super().__init__()
        self.questions = questions

    def slots(self):
        self.questions -= 1
        return int(self.questions < 0 or self.calls > 0)


def test_a_cluster_without_workers_is_waited_for_and_then_refused(monkeypatch, caplog):
    def with_first_worker_after(questions):
        fake = Empty(questions)
        monkeypatch.setattr(retry, "connect", lambda backend, address: nullcontext(fake))

    with_first_worker_after(2)
    assert list(call_all(abs, [-1])) == [(-1, 1)]
    assert caplog.messages == ["the cluster has no workers yet; waiting for one"]
    monkeypatch.setattr(retry, "WAIT_FOR_WORKERS", 0.0)
    with_first_worker_after(99)
    with pytest.raises(FedcorError, match="no workers for 0 seconds: start some"):
        list(call_all(abs, [-1]))
    assert list(call_all(abs, [-1], 1)) == [(-1, 1)]  # an autoscaler sees the call


class DeadDask:
    """A client of Dask whose scheduler is gone."""

    def _refuse(self, *args, **options):
        raise ClosedClientError("Client is closed.")

    submit = cancel = nthreads = _refuse


class DeadFuture:
    def result(self):
        raise CancelledError("gone")


def test_a_dask_scheduler_that_is_gone_ends_with_one_message(monkeypatch):
    monkeypatch.setattr("distributed.Client.current", DeadDask)
    cluster = DaskCluster(None)
    for call in (
        cluster.slots,
        partial(cluster.submit, b""),
        partial(cluster.cancel, []),
        partial(cluster.result, DeadFuture()),
    ):
        with pytest.raises(FedcorError, match="connection to Dask's scheduler was lost"):
            call()


def test_an_address_that_is_not_the_schedulers_is_refused(monkeypatch):
    def refuse(*args, **options):
        raise RuntimeError("this is a worker")

    monkeypatch.setattr("distributed.Client", refuse)
    monkeypatch.setattr("fedcor.runs.cluster.retry.check_answer", lambda *_: None)
    with pytest.raises(FedcorError, match="this is a worker; is this the address of the sched"):
        DaskCluster("a:1")


@pytest.mark.parametrize(
    ("backend", "address"),
    [
        ("ray", "nonsense"),
        ("ray", "tcp://a:1"),
        ("ray", "a:99999"),
        ("dask", "ray://a:1"),
        ("dask", "auto"),
        ("dask", ""),
        ("dask", "a:\u0661"),
    ],
)
def test_what_is_no_address_is_refused(backend, address, tmp_path, capsys):
    given = ["--backend", backend, "--address", address]
    assert main(["compare", "digits", "--out", str(tmp_path / "x"), *given]) == 2
    assert "--address" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_the_environment_may_say_the_address(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert find_address("ray", None) is None
    monkeypatch.setenv("RAY_ADDRESS", "[::1]:6379")
    assert find_address("ray", None) == "[::1]:6379"
    assert find_address("ray", "auto") == "auto"


def test_a_wrong_address_is_named_by_where_it_was_said(monkeypatch, capsys):
    monkeypatch.setenv("RAY_ADDRESS", "foo")
    assert main(["compare", "digits", "--backend", "ray"]) == 2
    said = capsys.readouterr().err
    assert "RAY_ADDRESS = 'foo'" in said
    assert "--address" not in said
    for backend in ("ray", "dask"):
        with pytest.raises(ConfigError, match="address = 8786: must be a host and a port"):
            fedcor.compare("digits", ["random"], backend=backend, address=8786)


def test_a_name_that_no_host_can_have_is_refused():
    with pytest.raises(FedcorError, match=r"no cluster answers at a\.\.b:99"):
        check_answer("dask", "a..b:99")


def test_encryption_of_ray_is_none_of_dask(monkeypatch):
    monkeypatch.setenv("RAY_USE_TLS", "1")

    def answer(server):
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 200")

    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor() as threads:
        threads.submit(answer, server)
        with pytest.raises(FedcorError, match="is not a cluster of dask"):
            check_answer("dask", f"127.0.0.1:{server.getsockname()[1]}")


@pytest.mark.parametrize("backend", ["ray", "dask"])
def test_an_address_where_nobody_answers_is_refused(backend):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(FedcorError, match="no cluster answers"):
        check_answer(backend, f"127.0.0.1:{port}")


def test_jobs_on_a_cluster_are_as_many_as_it_runs():
    assert count_processes(None, "ray") is None
    assert count_processes(-1, "dask") is None
    assert count_processes(3, "ray") == 3
    assert count_processes(None) == 1
    with pytest.raises(ConfigError, match="jobs = -2: must be at least 1, or -1"):
        count_processes(-2, "dask")


@pytest.mark.parametrize("command", ["compare digits --dry-run", "demo"])
def test_the_command_line_takes_no_number_of_jobs_below_one(command, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([*command.split(), "--jobs", "0"])
    assert "argument --jobs: '0' is not a whole number from 1" in capsys.readouterr().err


def test_a_plan_refuses_numbers_of_jobs_that_cannot_be():
    for jobs, backend in ((0, "loky"), (0, "ray"), (-2, "ray")):
        with pytest.raises(ConfigError, match=f"jobs = {jobs}"):
            Plan(Path("x"), nullcontext, jobs=jobs, backend=backend)
    assert Plan(Path("x"), nullcontext, jobs=-1, backend="ray").processes is None
    assert Plan(Path("x"), nullcontext, jobs=-1).processes == count_processes(-1)


def test_the_lines_of_a_dry_run_give_the_records_of_the_comparison(small_data, tmp_path, capsys):
    out = tmp_path / "a folder"
    more = ["--set", "selectors.fedcor.warmup=3"]
    assert compare(small_data, out, *more, "--dry-run", "--jobs", "4") == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 4
    assert not out.exists()
    for line in printed:
        program, *words = shlex.split(line)
        assert program == "fedcor"
        assert main(words) == 0
    assert compare(small_data, tmp_path / "compared", *more) == 0
    assert lines(out) == lines(tmp_path / "compared")
    assert compare(small_data, out, *more, "--resume") == 0  # they are its own runs


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_unknown_backend_is_refused_with_the_choices(jobs):
    with pytest.raises(ConfigError, match=r'must be one of .*loky.*dask \(did you mean "dask"'):
        fedcor.compare("digits", ["random"], backend="Dask", jobs=jobs)
    with pytest.raises(ConfigError, match="backend = 'nope': must be one of"):
        fedcor.compare("digits", ["random"], backend="nope", jobs=jobs)
    with pytest.raises(ConfigError, match="backend = 'nope': must be one of"):
        list(processes.map_each(abs, [1, 2], jobs, "nope"))


def test_the_lines_of_a_dry_run_may_hold_dashes(small_data, capsys):
    Path("-mine.toml").write_text(PRESET.read_text())
    given = f"--selectors=random --seeds=1 --rounds=1 {small_data} --out=-x --dry-run -- -mine.toml"
    assert main(["compare", *given.split()]) == 0
    words = shlex.split(capsys.readouterr().out)[1:]
    assert main(words) == 0
    assert Path("-x/random/seed-1/rounds.jsonl").exists()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("compare", "(default: the environment variable RAY_ADDRESS or DASK_SCHEDULER_ADDRESS)"),
        ("compare", "fedcor compare digits --backend dask --address 127.0.0.1:8786"),
        (
            "run",
            "(default: the environment variable RAY_ADDRESS, else Ray is started on this machine)",
        ),
    ],
)
def test_the_help_says_what_is_taken_where_nothing_is_given(command, said, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert said in " ".join(capsys.readouterr().out.split())


def test_nothing_to_do_needs_no_connection():
    assert list(processes.map_each(abs, [], None, "ray", "127.0.0.1:1")) == []


@pytest.mark.parametrize("flag", ["--plot", "--html"])
def test_a_dry_run_refuses_what_needs_results(flag, tmp_path, capsys):
    assert main(["compare", "digits", "--dry-run", flag]) == 2
    assert flag in capsys.readouterr().err


def test_measurements_come_back_as_those_made_here(tmp_path, cluster):
    found = []
    for backend, address in (("loky", None), ("ray", "a:1")):
        plan = Plan(
            tmp_path / backend,
            lambda title, total: nullcontext(lambda done, note: None),
            dataset="digits",
            rounds=3,
            selections=4,
            backend=backend,
            address=address,
        )
        experiment = load_experiment("digits", ["training.rounds=3"], "random")
        measurement = loss_changes.plan_measurement(plan, "x", experiment, [0, 2])
        loss_changes.measure(plan, [measurement])
        found.append([measurement.read(round) for round in (0, 2)])
    assert np.array_equal(*found)
