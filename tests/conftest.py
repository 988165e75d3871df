"""What every test shares: one thread for torch, a profile for hypothesis, an empty folder."""

from __future__ import annotations

import signal

import hypothesis
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
