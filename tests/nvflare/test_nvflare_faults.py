"""Sites that fail, in NVFlare's simulator."""

from __future__ import annotations

import numpy as np
from nvflare_jobs import saved_model, simulate

from fedcor.nvflare import FedcorController
from fedcor.runs.record import read_run


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
    assert np.isfinite(saved_model(tmp_path / "workspace")).all()
