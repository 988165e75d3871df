"""What every test shares: one thread for torch, a profile for hypothesis, an empty folder."""

from __future__ import annotations

import fcntl
import signal
from collections.abc import Iterator

import hypothesis
import numpy as np
import pytest
import torch

hypothesis.settings.register_profile("fedcor", deadline=None, max_examples=50, derandomize=True)
hypothesis.settings.load_profile("fedcor")
torch.set_num_threads(1)
# In the background of a shell, interrupts are ignored, and our children would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No test writes into the project."""
    monkeypatch.chdir(tmp_path_factory.mktemp("cwd"))


@pytest.fixture(scope="module")
def only_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps Flower simulations of other test processes waiting.

    Ray does not always start beside another Ray that starts or ends on the same machine.
    """
    shared = tmp_path_factory.getbasetemp().parent / "ray.lock"
    with shared.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Arguments for a small data set; processes that use it need not import scikit-learn."""
    path = tmp_path_factory.mktemp("data") / "small.npz"
    x, y = np.random.default_rng(0).standard_normal((250, 6)), np.arange(250) % 5
    np.savez(path, x_train=x[:200], y_train=y[:200], x_test=x[200:], y_test=y[200:])
    return f"--set data.name={path}"
