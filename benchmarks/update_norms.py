"""How long honest updates are, and what long ones do to a model.

    python benchmarks/update_norms.py                      digits: every selector, some optimisers
    python benchmarks/update_norms.py --preset fmnist-2spc --selectors random,aligned --rounds 100
    python benchmarks/update_norms.py --attack 30          a tenth of the clients sends 30 times as
                                                           much, under limits of several widths

Without an attack it prints the largest number of times that an update had the usual length, in the
words of `fedcor.rounds.defence.update_norms`. A limit above it changes nothing while nobody errs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

import numpy as np
import torch

import fedcor.rounds.update_filter
from fedcor import Defence
from fedcor.rounds.defence.update_norms import Verdict, judge
from fedcor.simulation.build import build_simulation, one_thread
from fedcor.simulation.experiment_files import load_experiment
from fedcor.simulation.loop import Simulation

SELECTORS = "random,fedcor,aligned,complement,afl,power_of_choice"
OPTIMISERS = "fedadam,fedyogi,fedavgm,scaffold,feddyn,fednova,fedexp,fedvarp,mifa,fedrecall"
CHANGES: dict[str, list[str]] = {
    "": [],
    "a third with random labels": ["data.noisy_clients=0.34"],
    "stragglers and drop-outs": ["faults.stragglers=0.5", "faults.dropout=0.2"],
}


def largest_ratio(simulation: Simulation, rounds: int) -> float:
    """The largest number of times that an update of a run had the usual length."""
    seen = [0.0]

    def watched(*args: Any) -> Verdict:
        verdict = judge(*args)
        seen.append(float(verdict.ratios.max(initial=0.0)))
        return verdict

    fedcor.rounds.update_filter.judge = watched  # type: ignore[attr-defined]
    try:
        for _ in simulation.run(rounds):
            pass
    finally:
        fedcor.rounds.update_filter.judge = judge  # type: ignore[attr-defined]
    return max(seen)


def attacked_accuracy(simulation: Simulation, times: float, rounds: int) -> float:
    """Mean accuracy of a run in which every tenth client sends `times` its update."""
    train = simulation.engine.train

    def longer(model: torch.Tensor, clients: list[int], *args: Any, **options: Any) -> torch.Tensor:
        results = train(model, clients, *args, **options)
        lying = torch.tensor([client % 10 == 0 for client in clients])[:, None]
        return torch.where(lying, model + times * (results - model), results)

    simulation.engine.train = longer  # type: ignore[method-assign]
    return float(np.mean([record.test_accuracy for record, _ in simulation.run(rounds)]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="digits")
    parser.add_argument("--selectors", default=SELECTORS)
    parser.add_argument("--optimisers", default=OPTIMISERS, help="beside FedAvg; with random")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=1, help="seeds 1, 2, ... up to this one")
    parser.add_argument("--attack", type=float, default=None, help="times the honest update")
    options = parser.parse_args()
    seeds = range(1, options.seeds + 1)

    def made(changes: list[str], selector: str, seed: int) -> Simulation:
        return build_simulation(load_experiment(options.preset, changes, selector), seed)

    result: dict[str, Any] = {}
    with one_thread():
        for selector in options.selectors.split(",") if options.attack is not None else ():
            for clip in (0.0, 30.0, 10.0, 3.0, 2.0):
                defence = Defence(clip, 1000.0 if clip else 0.0)
                found = [
                    attacked_accuracy(
                        dataclasses.replace(made([], selector, seed), defence=defence),
                        options.attack,
                        options.rounds,
                    )
                    for seed in seeds
                ]
                result[f"{selector}, clip_norms = {clip:g}"] = round(float(np.mean(found)), 3)
        if options.attack is None:
            cases = [
                (f"{selector} {name}".strip(), changes, selector)
                for selector in options.selectors.split(",")
                for name, changes in CHANGES.items()
            ]
            cases += [
                (f"random with {one}", [f"optimiser.name={one}"], "random")
                for one in filter(None, options.optimisers.split(","))
            ]
            for name, changes, selector in cases:
                found = [
                    largest_ratio(made(changes, selector, seed), options.rounds) for seed in seeds
                ]
                result[name] = round(max(found), 2)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
