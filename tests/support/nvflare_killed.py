"""A controller whose server is killed; NVFlare copies this module into the job."""

from __future__ import annotations

import os
import signal

from fedcor.nvflare import FedcorController


class KilledController(FedcorController):
    """The process of the server is killed when the replies to its `last`-th task are back."""

    def __init__(self, *args, last, **kwargs):  # NVFlare follows these two names to the base class
        super().__init__(*args, **kwargs)
        self.last, self._sent = last, 0

    def broadcast_model(self, *args, **kwargs):
        replies = super().broadcast_model(*args, **kwargs)
        self._sent += 1
        if self._sent == self.last:
            os.kill(os.getpid(), signal.SIGKILL)
        return replies
