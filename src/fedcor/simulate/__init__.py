"""The simulator's rounds: the one place where selectors and the engine meet."""

from fedcor.simulate.loop import LearningRate, Simulation
from fedcor.simulate.round import SimulatedRound
from fedcor.simulate.state import SimulationState

__all__ = ["LearningRate", "SimulatedRound", "Simulation", "SimulationState"]
