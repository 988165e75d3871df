"""A site for NVFlare's client API, with a quadratic loss; arguments say which sites misbehave.

`site-3=dies` ends the process of site-3 when it is to train in the second round.
"""

from __future__ import annotations

import os
import signal
import sys

import numpy as np
import nvflare.client as flare

faults = dict(argument.split("=") for argument in sys.argv[1:])
flare.init()
site = flare.get_site_name()
best = np.zeros(8)
best[int(site.removeprefix("site-")) :] = 1.0  # where the loss of this site is 0
while flare.is_running():
    received = flare.receive()
    weights = received.params["numpy_key"]
    reply = flare.FLModel(metrics={"loss": float(((weights - best) ** 2).sum())})
    if flare.is_train():
        fault = faults.get(site) if received.current_round > 0 else None
        if fault == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "raises":
            raise OSError("disk full")
        reply.params = {"numpy_key": weights + 0.5 * (best - weights)}
        reply.meta["NUM_STEPS_CURRENT_ROUND"] = 1
        if fault == "short":
            reply.params = {"numpy_key": np.zeros(3)}
        if fault == "nan":
            reply.params, reply.metrics = {"numpy_key": weights * np.nan}, {"loss": "high"}
    flare.send(reply)
