"""Jobs in NVFlare's simulator. Without NVFlare, the tests that import this are skipped.

`make test-nvflare` installs NVFlare and sets FEDCOR_NVFLARE.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

if "FEDCOR_NVFLARE" not in os.environ:
    # Not of `nvflare` alone: a folder of tests has this name.
    pytest.importorskip("nvflare.apis", reason="make test-nvflare installs it")

from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.np.np_model_persistor import NPModelPersistor
from nvflare.job_config.api import FedJob
from nvflare.job_config.script_runner import FrameworkType, ScriptRunner

__all__ = ["ROOT", "FLModel", "ParamsType", "Signal", "saved_model", "simulate"]
ROOT = Path(__file__).parents[2]
SITE = Path(__file__).with_name("nvflare_site.py")


def simulate(controller, workspace, sites, faults=""):
    """The exit code of a job in NVFlare's simulator, with one process per site.

    The simulator sometimes loses a site while it starts, when another program takes the site's
    port. Such a job is started again; it would go on without that site.
    """
    folder = Path(controller.folder)
    kept = folder.with_name("kept")
    if folder.exists():
        shutil.copytree(folder, kept)
    for _ in range(3):
        job = FedJob(name="job")
        job.to_server(controller)
        job.to_server(NPModelPersistor(model=[0.0] * 8), id="persistor")
        job.to_server({"server": {"task_request_interval": 0.1}})
        job.to_clients(ScriptRunner(str(SITE), script_args=faults, framework=FrameworkType.NUMPY))
        code = job.simulator_run(str(workspace), n_clients=sites)
        if all((workspace / f"site-{k + 1}" / "log.txt").exists() for k in range(sites)):
            return code
        shutil.rmtree(folder)
        if kept.exists():
            shutil.copytree(kept, folder)
    raise AssertionError("the simulator did not start all sites")


def saved_model(workspace):
    return np.load(workspace / "server" / "simulate_job" / "models" / "server.npy")
