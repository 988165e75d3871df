"""Callbacks: what hears of a run while it goes on, and trackers that write it down elsewhere.

Nothing is sent over a network unless the environment says so, and records do not change.
"""

from fedcor.tracking.callback import Callback, GivenCallback, StartedRun, Tracker, as_callbacks
from fedcor.tracking.csv_files import CSV
from fedcor.tracking.mlflow_store import MLflow
from fedcor.tracking.registry import TRACKERS, build_callback, check_callbacks, tracker_names
from fedcor.tracking.session import Session, following
from fedcor.tracking.tensorboard_events import TensorBoard
from fedcor.tracking.wandb_run import WandB

__all__ = [
    "CSV",
    "TRACKERS",
    "Callback",
    "GivenCallback",
    "MLflow",
    "Session",
    "StartedRun",
    "TensorBoard",
    "Tracker",
    "WandB",
    "as_callbacks",
    "build_callback",
    "check_callbacks",
    "following",
    "tracker_names",
]
