"""The simulator's rounds: the one place where selectors and the engine meet."""

from fedcor.simulation.loop import LearningRate, Simulation
from fedcor.simulation.round import SimulatedRound
from fedcor.simulation.state import SimulationState

__all__ = ["LearningRate", "SimulatedRound", "Simulation", "SimulationState"]
