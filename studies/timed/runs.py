"""The runs: who is compared, and on which devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fedcor.runs.record import RunRecord
from studies.plan import Plan, Scenario
from studies.variants import FEDCOR, RANDOM, Runs, Variant

ROUNDS = 150
INDEPENDENT, TIED, UNEQUAL = "time-independent", "time-tied", "time-unequal"
# FedScale's model of a mini-batch of 64 samples (docs/how-to/faults.md).
_FEDSCALE = "seconds_per_step=0.87, speed_spread=0.6, bandwidth_spread=0.5"
# Scenario -> how fast clients are, and how many times as many are chosen as are needed.
DEVICES = {
    INDEPENDENT: (_FEDSCALE, 1.3),
    TIED: (f'{_FEDSCALE}, tied_to="labels"', 1.3),
    UNEQUAL: ("seconds_per_step=0.87, speed_spread=1.2, bandwidth_spread=0.5", 1.0),
}
TITLES = {
    INDEPENDENT: "speed independent of the data",
    TIED: "speed tied to the labels",
    UNEQUAL: "speeds far apart, nobody is left behind",
}
OORT = Variant("oort", "oort", "oort")
# Without its system utility: nobody is too slow.
STATISTICAL = Variant("Oort, blind to time", "oort", "oort-blind", {"penalty": 0.0})
ALIGNED = Variant("aligned", "aligned", "aligned")
VARIANTS: Sequence[Variant] = (RANDOM, OORT, STATISTICAL, FEDCOR, ALIGNED)


def scenarios_of(plan: Plan) -> list[Scenario]:
    """The same data on three kinds of devices.

    Of the paper's settings it is the one with two shards per client.
    """
    rounds = () if plan.rounds else (f"training.rounds={ROUNDS}",)
    return [
        Scenario(
            name,
            "2spc",
            (*rounds, f"faults.over_selection={more}", f"faults.devices={{{table}}}"),
            TITLES[name],
        )
        for name, (table, more) in DEVICES.items()
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
