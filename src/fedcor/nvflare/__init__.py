"""The same selectors and optimisers in an NVFlare federation. The only room that imports nvflare.

In the job, a controller in the place of NVFlare's own:

    job.to_server(FedcorController("fedcor", clients_per_round=5, num_rounds=50))

The sites' scripts use NVFlare's client API: they answer the tasks "train" and "validate".
"""

from __future__ import annotations

from importlib.util import find_spec

from fedcor.core.errors import MissingExtraError

if find_spec("nvflare") is None:
    raise MissingExtraError("nvflare", "nvflare")

from fedcor.nvflare.controller import FedcorController

__all__ = ["FedcorController"]
