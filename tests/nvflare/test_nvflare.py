"""Jobs in NVFlare's real simulator, and the controller between faked replies.

`make test-nvflare` installs NVFlare and sets FEDCOR_NVFLARE; without NVFlare, all is skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import fedcor
from fedcor.cli import main
from fedcor.runs.record import read_run

if "FEDCOR_NVFLARE" not in os.environ:
    pytest.importorskip("nvflare", reason="make test-nvflare installs it")

from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.np.np_model_persistor import NPModelPersistor
from nvflare.job_config.api import FedJob
from nvflare.job_config.script_runner import FrameworkType, ScriptRunner
from nvflare_killed import KilledController

from fedcor.nvflare import FedcorController

ROOT = Path(__file__).parents[2]
SITE = ROOT / "tests" / "support" / "nvflare_site.py"


def simulate(controller, workspace, sites, faults=""):
    """The exit code of a job in NVFlare's simulator, with one process per site."""
    job = FedJob(name="job")
    job.to_server(controller)
    job.to_server(NPModelPersistor(model=[0.0] * 8), id="persistor")
    job.to_server({"server": {"task_request_interval": 0.1}})
    job.to_clients(ScriptRunner(str(SITE), script_args=faults, framework=FrameworkType.NUMPY))
    return job.simulator_run(str(workspace), n_clients=sites)


def saved_model(workspace):
    return np.load(workspace / "server" / "simulate_job" / "models" / "server.npy")


def record_of(folder):
    """The lines of a record, without those of its values that are measured times."""
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def test_the_example_learns_with_the_default_selector(tmp_path):
    job = ROOT / "examples" / "nvflare" / "job.py"
    subprocess.run([sys.executable, str(job)], cwd=tmp_path, check=True)
    folder = tmp_path / "runs" / "nvflare" / "aligned"
    rounds = read_run(folder).rounds
    assert len(rounds) == 10
    assert all(len(line["participated"]) == 3 for line in rounds)
    assert rounds[-1]["test_accuracy"] > 0.7
    assert main(["report", str(folder)]) == 0


def test_fedcor_and_a_killed_server_that_resumes(tmp_path):
    """Warm-up, trials and choices by FedCor; the record of a killed job is the same as without."""
    selector = fedcor.FedCor(2, warmup=2, interval=2, dimension=2, warmup_steps=10, refit_steps=10)
    settings = {
        "num_rounds": 5,
        "sizes": {f"site-{k}": 10 * k for k in range(1, 5)},
        "timeout": 60,
        "validate_timeout": 60,
    }

    def whole():
        controller = FedcorController(selector, folder=str(tmp_path / "whole"), **settings)
        return simulate(controller, tmp_path / "workspace-whole", sites=4)

    def killed_and_resumed():
        folder, workspace = str(tmp_path / "killed"), tmp_path / "workspace-killed"
        killed = KilledController(selector, folder=folder, last=6, **settings)
        code = simulate(killed, workspace, sites=4)
        before = len(record_of(tmp_path / "killed"))
        return (
            code,
            before,
            simulate(FedcorController(selector, folder=folder, **settings), workspace, sites=4),
        )

    with ThreadPoolExecutor() as pool:
        both = [pool.submit(whole), pool.submit(killed_and_resumed)]
        assert both[0].result() == 0
        code, before, resumed = both[1].result()
    assert code != 0
    assert 1 < before < 6  # the header, and some rounds
    assert resumed == 0
    assert record_of(tmp_path / "killed") == record_of(tmp_path / "whole")
    models = [saved_model(tmp_path / f"workspace-{name}") for name in ("whole", "killed")]
    np.testing.assert_array_equal(*models)
    assert len(read_run(tmp_path / "whole").rounds) == 5


def test_sites_that_die_raise_or_send_nonsense(tmp_path):
    faults = {"site-1": "dies", "site-2": "raises", "site-3": "short", "site-4": "nan"}
    controller = FedcorController(
        "full", clients_per_round=6, num_rounds=2, timeout=20, folder=str(tmp_path / "run")
    )
    arguments = " ".join(f"{site}={fault}" for site, fault in faults.items())
    assert simulate(controller, tmp_path / "workspace", sites=6, faults=arguments) == 0
    first, second = read_run(tmp_path / "run").rounds
    assert first["participated"] == [0, 1, 2, 3, 4, 5]
    assert second["participated"] == [4, 5]
    assert second["missing"] == {"dropped": [0, 1], "refused": [2, 3]}
    assert second["refused_updates"] == {"malformed": [2, 3]}
    assert np.isfinite(saved_model(tmp_path / "workspace")).all()
