"""The simulator's rounds: the one place where selectors and the engine meet."""

from fedcor.simulate.loop import Simulation
from fedcor.simulate.round import SimulatedRound
from fedcor.simulate.schedule import LearningRate, Rate, Schedule, as_schedule
from fedcor.simulate.state import SimulationState

__all__ = [
    "LearningRate",
    "Rate",
    "Schedule",
    "SimulatedRound",
    "Simulation",
    "SimulationState",
    "as_schedule",
]
