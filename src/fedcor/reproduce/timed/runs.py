"""The runs: who is compared, and on which devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fedcor.record import RunRecord
from fedcor.reproduce.plan import Plan, Scenario
from fedcor.reproduce.variants import FEDCOR, RANDOM, Runs, Variant

__all__ = ["INDEPENDENT", "ROUNDS", "TIED", "VARIANTS", "scenarios_of", "with_target"]

ROUNDS = 150
OVER_SELECTION = 1.3
# FedScale's model of a mini-batch of 64 samples (docs/how-to/faults.md).
DEVICES = "seconds_per_step=0.87, speed_spread=0.6, bandwidth_spread=0.5"
INDEPENDENT, TIED = "time-independent", "time-tied"
OORT = Variant("oort", "oort", "oort")
# Without its system utility: nobody is too slow.
STATISTICAL = Variant("oort, blind to time", "oort", "oort-blind", {"penalty": 0.0})
ALIGNED = Variant("aligned", "aligned", "aligned")
VARIANTS: Sequence[Variant] = (RANDOM, OORT, STATISTICAL, FEDCOR, ALIGNED)


def scenarios_of(plan: Plan) -> list[Scenario]:
    """The same devices twice: dealt out at random, and by the clients' labels.

    Of the paper's settings it is the one with two shards per client.
    """
    rounds = () if plan.rounds else (f"training.rounds={ROUNDS}",)
    devices = {INDEPENDENT: DEVICES, TIED: f'{DEVICES}, tied_to="labels"'}
    titles = {
        INDEPENDENT: "speed independent of the data",
        TIED: "speed tied to the labels",
    }
    return [
        Scenario(
            name,
            "2spc",
            (*rounds, f"faults.over_selection={OVER_SELECTION}", f"faults.devices={{{table}}}"),
            titles[name],
        )
        for name, table in devices.items()
    ]


def with_target(runs: Runs, target: float) -> Runs:
    """The same runs, judged by another target accuracy."""

    def aimed(run: RunRecord) -> RunRecord:
        config: Mapping[str, object] = {**run.header["config"], "target_accuracy": target}
        return replace(run, header={**run.header, "config": config})

    return {
        scenario: {label: [aimed(run) for run in of_label] for label, of_label in by_label.items()}
        for scenario, by_label in runs.items()
    }
