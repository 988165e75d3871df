"""The simulator: experiments, and a federation in one process that runs them.

experiment.py, experiment_files.py, coerce.py   settings: the dataclass, files, forms of input
tasks.py, schedules.py                          loss and metrics, learning rates
faults.py, clock.py, traces.py, byzantine.py    simulated faults, time and attacks
engine/                                         models and local training, with torch
build.py, loop.py, round.py, state.py           from an experiment to a run, round by round
server_step.py                                  from the clients' results to the next model
"""
