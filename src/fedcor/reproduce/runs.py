"""The experiments that compare whole runs: Table 1, the convergence curves, and the ablations of interval and annealing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedcor.files import write_whole
from fedcor.report.summary import METRICS, Estimate, summarise
from fedcor.report.tables import NAMES, difference_text, estimate_text, markdown
from fedcor.reproduce.comparison import draw_curves, mean_std, times_chosen
from fedcor.reproduce.paper import TABLE_1
from fedcor.reproduce.plan import FOUR, Plan, Variant

__all__ = ["annealing", "convergence", "interval", "table1"]


def table1(plan: Plan) -> list[Path]:
    """Rounds to the target accuracy, and the steadier numbers beside them."""
    runs = plan.runs(FOUR)
    numbers: dict[str, Any] = {}
    for setting, by_selector in runs.items():
        every = [run for of_one in by_selector.values() for run in of_one]
        rand, pow_d = (
            summarise(every, baseline).experiments[0] for baseline in ("random", "power_of_choice")
        )
        numbers[setting] = {"target": rand.target, "selectors": {}}
        for one, other in zip(rand.selectors, pow_d.selectors, strict=True):
            numbers[setting]["selectors"][one.name] = {
                "paper": TABLE_1.get(plan.dataset, {}).get(setting, {}).get(one.name),
                "rounds_done": [run.rounds_done for run in one.runs],
                "values": {
                    key: [run.values[key] for run in one.runs] for key in one.runs[0].values
                },
                "estimates": {
                    key: dataclasses.asdict(estimate) for key, estimate in one.estimates.items()
                },
                "paired": {
                    "random": {
                        key: dataclasses.asdict(difference.estimate)
                        for key, difference in one.differences.items()
                    },
                    "power_of_choice": {
                        key: dataclasses.asdict(d.estimate) for key, d in other.differences.items()
                    },
                },
            }
    saved = plan.save("table1", {"settings": numbers})
    page = plan.out / f"table1-{plan.dataset}.md"
    write_whole(page, _markdown(plan, numbers).encode())
    return [saved, page]


def _markdown(plan: Plan, numbers: Mapping[str, Any]) -> str:
    """One table a setting; the paper's number stands beside ours."""
    metric = {m.key: m for m in METRICS}
    head = [
        "",
        "paper: rounds",
        "rounds (mean ± std)",
        "ten-round mean",
        "mean accuracy",
        "bytes to target",
    ]
    head += ["− Pow-d, mean accuracy", "− Rand, mean accuracy"]
    tables = []
    for setting, numbers_here in numbers.items():
        done = sorted({r for s in numbers_here["selectors"].values() for r in s["rounds_done"]})
        span = "–".join(map(str, dict.fromkeys((done[0], done[-1]))))
        rows = []
        for name, s in numbers_here["selectors"].items():
            estimates = {key: Estimate(**values) for key, values in s["estimates"].items()}
            cells = [NAMES[name], s["paper"] or "–"]
            cells += [
                mean_std(estimates[key]) for key in ("rounds_to_target", "smooth_rounds_to_target")
            ]
            cells += [
                estimate_text(metric[key], estimates[key])
                for key in ("mean_accuracy", "bytes_to_target")
            ]
            for baseline in ("power_of_choice", "random"):
                paired = s["paired"][baseline].get("mean_accuracy")
                cells.append(
                    difference_text(metric["mean_accuracy"], Estimate(**paired))
                    if paired and name != baseline
                    else "–"
                )
            rows.append(cells)
        title = f"{plan.dataset} {setting.upper()}, target {numbers_here['target']:.0%}, {plan.of_seeds}, {span} rounds"
        tables.append(markdown(title, head, rows))
    return "".join(tables)


def convergence(plan: Plan) -> list[Path]:
    """Accuracy curves of the four selectors."""
    return draw_curves(plan, "convergence", plan.runs(FOUR))


def interval(plan: Plan) -> list[Path]:
    """The refit interval: how rarely may the process be trained? Δt with the paper's β, beside random selection."""
    table = {
        "fmnist": [(10, 0.95), (20, 0.95), (500, 0.99)],
        "cifar10": [(50, 0.97), (100, 0.97), (2000, 0.999)],
        "digits": [(5, 0.95), (10, 0.95), (500, 0.99)],
    }
    variants = [
        _fedcor(plan, f"Δt = {dt}", interval=dt, beta=beta) for dt, beta in table[plan.dataset]
    ]
    return draw_curves(plan, "interval", plan.runs([*variants, FOUR[0]]))


def annealing(plan: Plan) -> list[Path]:
    """The annealing coefficient: accuracy hardly moves, the choice becomes more even."""
    from fedcor.report.figures import frequencies, save_figure

    table = {"fmnist": (0.5, 0.75, 0.95), "cifar10": (0.9, 0.95, 0.97), "digits": (0.5, 0.75, 0.95)}
    variants = [_fedcor(plan, f"β = {beta}", beta=beta) for beta in table[plan.dataset]]
    runs = plan.runs([*variants, FOUR[0]])
    paths = draw_curves(plan, "annealing", runs)
    counts = {
        setting: {
            label: times_chosen(of_one).round(2).tolist() for label, of_one in by_label.items()
        }
        for setting, by_label in runs.items()
    }
    saved = plan.save("annealing-frequencies", {"times_chosen": counts})
    caption = f"{plan.dataset}, {plan.of_seeds}; clients ordered within each run by how often they were chosen, mean over seeds"
    return [
        *paths,
        saved,
        *save_figure(
            frequencies(counts, caption), plan.out / f"annealing-frequencies-{plan.dataset}"
        ),
    ]


def _fedcor(plan: Plan, label: str, **options: float) -> Variant:
    """A FedCor variant; the one with the preset's own options shares the folder of Table 1's runs."""
    preset = plan.experiment(plan.settings[0]).build_selector()
    if all(getattr(preset, key) == value for key, value in options.items()):
        return Variant(label, "fedcor", "fedcor")
    folder = "-".join(["fedcor", *(f"{key}-{value}" for key, value in options.items())])
    return Variant(label, "fedcor", folder, options)
