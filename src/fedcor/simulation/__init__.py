"""The simulated world: experiments, faults, clocks, Byzantine clients, local training, the round loop."""
