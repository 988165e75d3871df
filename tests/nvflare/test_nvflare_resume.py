"""FedCor in NVFlare's simulator, with and without a server that is killed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from nvflare_jobs import saved_model, simulate
from nvflare_killed import KilledController

import fedcor
from fedcor.nvflare import FedcorController
from fedcor.runs.record import read_run


def test_fedcor_and_a_killed_server_that_resumes(tmp_path):
    """Warm-up, trials and choices by FedCor; a killed job ends with the record of a whole one."""
    selector = fedcor.FedCor(2, warmup=2, interval=2, dimension=2, warmup_steps=10, refit_steps=10)
    sizes = {f"site-{k}": 10 * k for k in range(1, 5)}
    settings = {"num_rounds": 5, "sizes": sizes, "timeout": 60, "validate_timeout": 60}

    def whole():
        controller = FedcorController(selector, folder=str(tmp_path / "whole" / "run"), **settings)
        return simulate(controller, tmp_path / "whole" / "workspace", sites=4)

    def killed_and_resumed():
        folder, workspace = tmp_path / "killed" / "run", tmp_path / "killed" / "workspace"
        killed = KilledController(selector, folder=str(folder), last=6, **settings)
        codes = [simulate(killed, workspace, sites=4)]
        before = len(read_run(folder).rounds)
        resumed = FedcorController(selector, folder=str(folder), **settings)
        return [*codes, simulate(resumed, workspace, sites=4)], before

    def record_of(name):
        """Without measured times."""
        rounds = read_run(tmp_path / name / "run").rounds
        left_out = ("seconds",)
        return [{key: line[key] for key in line if key not in left_out} for line in rounds]

    with ThreadPoolExecutor() as pool:
        both = [pool.submit(whole), pool.submit(killed_and_resumed)]
        assert both[0].result() == 0
        codes, before = both[1].result()
    assert codes[0] != 0
    assert codes[1] == 0
    assert 0 < before < 5
    assert record_of("killed") == record_of("whole")
    models = [saved_model(tmp_path / name / "workspace") for name in ("whole", "killed")]
    np.testing.assert_array_equal(*models)
    probed = [line["probed"] for line in read_run(tmp_path / "whole" / "run").rounds]
    assert probed == [8, 4, 4, 0, 8]  # both losses; those of the candidates; of no one; of a refit
    names = (tmp_path / "whole" / "run" / "clients.tsv").read_text()
    assert all(name in names for name in sizes)
