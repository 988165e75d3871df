"""Eight sites in NVFlare's simulator: python examples/nvflare/job.py [selector]"""

import sys
from pathlib import Path

from nvflare.app_common.np.np_model_persistor import NPModelPersistor
from nvflare.job_config.api import FedJob
from nvflare.job_config.script_runner import FrameworkType, ScriptRunner

from fedcor.nvflare import FedcorController

selector = sys.argv[1] if len(sys.argv) > 1 else "aligned"
folder = Path("runs", "nvflare", selector).absolute()
job = FedJob(name="digits")
job.to_server(
    FedcorController(
        selector, clients_per_round=3, num_rounds=8, score_key="accuracy", folder=str(folder)
    )
)
job.to_server({"server": {"task_request_interval": 0.5}})  # sites look for tasks; seconds
job.to_server(NPModelPersistor(model=[[0.0] * 10] * 65), id="persistor")
script = Path(__file__).parent / "client.py"
job.to_clients(ScriptRunner(str(script), framework=FrameworkType.NUMPY))
sys.exit(job.simulator_run("runs/nvflare-workspace", n_clients=8))
