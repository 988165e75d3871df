"""What `fedcor.Rounds` costs: ask and tell, against the same rounds without it.

python -m benchmarks.run --only own_loop
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

import fedcor
from benchmarks.measure import DifferentResultsError, Result, best
from fedcor.core.types import Federation, IntArray, State
from fedcor.simulation.build import build_simulation
from fedcor.simulation.loop import Simulation
from fedcor.simulation.server_step import next_model

EARLY = {"warmup": 5, "interval": 5}


def results(quick: bool) -> list[Result]:
    """The rows."""
    rounds = 15 if quick else 60
    return [bare_round(rounds), *digits(rounds)]


def bare_round(rounds: int) -> Result:
    """A round of `random` in which training is one addition."""

    def train(model: Any, client: int) -> Any:
        return model + client

    def loop() -> None:
        rng, model = np.random.default_rng(0), np.zeros(1000, np.float32)
        for _ in range(rounds):
            chosen = rng.choice(100, 5, replace=False)
            model = np.mean([train(model, k) for k in chosen], axis=0)

    def ours() -> None:
        made = fedcor.Rounds(fedcor.Random(5), np.zeros(1000, np.float32), sizes=[10] * 100)
        for _ in range(rounds):
            ask = made.ask()
            made.tell(ask, models={k: train(ask.model, k) for k in ask.clients})

    plain, asked = best(5, loop, ours)
    added = 1e3 * (asked - plain) / rounds
    what = "milliseconds that Rounds adds to a round of random, 100 clients"
    return Result(what, added, "below 1", f"{1e3 * plain / rounds:.2f} ms without it")


class Timed(fedcor.FedCor):
    """FedCor with a clock around `select`."""

    seconds = 0.0
    calls = 0

    def select(self, state: State, federation: Federation) -> tuple[IntArray, State]:
        """As FedCor's."""
        started = time.process_time()
        Timed.calls += 1
        try:
            return super().select(state, federation)
        finally:
            Timed.seconds += time.process_time() - started


def digits(rounds: int) -> list[Result]:
    """FedCor on digits, in the simulator and with its clients in a loop of one's own."""
    simulation = build_simulation(
        fedcor.experiment("digits", selector="fedcor", rounds=rounds, selectors={"fedcor": EARLY}),
        seed=1,
    )
    chosen: dict[str, list[list[int]]] = {}

    def direct() -> None:
        chosen["direct"] = [record.selected for record, _ in simulation.run(rounds)]

    def asked() -> None:
        chosen["asked"] = ask_and_tell(simulation, rounds)

    plain, told = best(3, direct, asked)
    if chosen["direct"] != chosen["asked"]:
        raise DifferentResultsError("FedCor chose others through Rounds than in the simulator")
    detail = f"{1e3 * told / rounds:.1f} and {1e3 * plain / rounds:.1f} ms per round"
    what = "a FedCor round on digits through Rounds / in the simulator"
    return [Result(what, told / plain, "at most 1.02", detail), replays(simulation, rounds)]


def replays(simulation: Simulation, rounds: int) -> Result:
    """How much longer `select` takes, as it is called once more for each question."""
    spent = []
    for play in (lambda: list(simulation.run(rounds)), lambda: ask_and_tell(simulation, rounds)):
        original, simulation_selector = type(simulation.selector), simulation.selector
        timed = Timed(**{f: getattr(simulation_selector, f) for f in original.__match_args__})
        object.__setattr__(simulation, "selector", timed)
        Timed.seconds, Timed.calls = 0.0, 0
        try:
            play()
        finally:
            object.__setattr__(simulation, "selector", simulation_selector)
        spent.append((Timed.seconds, Timed.calls))
    (direct, once), (asked, often) = spent
    detail = f"{often / once:.1f} calls per round; the simulator's time has the answers in it"
    return Result("select of FedCor with replays / in the simulator", asked / direct, "", detail)


def ask_and_tell(simulation: Simulation, rounds: int) -> list[list[int]]:
    """The simulation's clients in a loop of one's own: who was chosen."""
    engine, steps = simulation.engine, simulation.engine.local_training.local_steps
    made = fedcor.Rounds(
        simulation.selector,
        engine.initial_model.numpy(),
        sizes=engine.population.sizes,
        optimiser="own",
        seed=simulation.seed,
        learning_rate=simulation.learning_rate.at,
    )
    sent: dict[int, torch.Tensor] = {}
    memory = simulation.optimiser_start
    while made.number < rounds:
        ask = made.ask()
        clients, model = list(ask.clients), torch.from_numpy(ask.model)
        rate = simulation.learning_rate.at(ask.round)
        if ask.kind == "losses":
            losses = engine.losses(model, np.array(clients))
            made.tell(ask, losses=dict(zip(clients, losses.tolist(), strict=True)))
        elif ask.kind == "train":
            sent |= dict(zip(clients, engine.train(model, clients, ask.round, rate), strict=True))
            made.tell(ask, models={k: sent[k].numpy() for k in clients})
        else:
            after, state = next_model(
                simulation.optimiser,
                memory,
                model,
                torch.stack([sent[k] for k in clients]),
                engine.vector.trained,
                round=ask.round,
                clients=np.array(clients),
                weights=np.array(list(ask.weights.values())),
                steps=np.full(len(clients), steps),
                learning_rate=rate,
            )
            memory = memory if ask.trial else state
            if not ask.trial:
                engine.test(after)  # as the simulator does after every round
            made.tell(ask, model=after.numpy())
    return [record.selected for record in made.record]
