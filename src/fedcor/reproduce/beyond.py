"""Beyond the paper: what `complement`, which asks nothing, gains over it; what of it matters; where it fails; whom it serves."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedcor.build import LABEL_NOISE, build_simulation
from fedcor.data import noisy_clients
from fedcor.errors import ConfigError, RecordError
from fedcor.files import write_whole
from fedcor.record import RunRecord, read_checkpoint
from fedcor.report.summary import (
    METRICS,
    Estimate,
    ExperimentSummary,
    SelectorSummary,
    estimate_of,
    ratio_of,
)
from fedcor.report.tables import NAMES, difference_text, estimate_text, markdown
from fedcor.reproduce.comparison import as_numbers, compared, draw_curves, mean_std, times_chosen
from fedcor.reproduce.plan import FOUR, Plan, Runs, Scenario, Variant
from fedcor.rng import stream
from fedcor.types import FloatArray

__all__ = ["ablation", "confirmation", "fairness", "limits", "table"]

COMPLEMENT = Variant("complement", "complement", "complement")
FULL = Variant("full", "full", "full")
THREE = [FOUR[0], FOUR[3], COMPLEMENT]  # random, fedcor and it
_METRIC = {m.key: m for m in METRICS}
_ACCURACY = _METRIC["mean_accuracy"]


# --- every selector, and the bound -----------------------------------------------------------------------------------


def table(plan: Plan) -> list[Path]:
    """Every selector, and everyone training: rounds, bytes, accuracy, and the share of the gap that is closed."""
    # A round of everyone costs twenty of the others: for CIFAR-10's network that is days on a processor.
    affordable = plan.dataset != "cifar10" or plan.device not in (None, "cpu")
    return _table(plan, "beyond", plan.runs([*FOUR, COMPLEMENT, *([FULL] if affordable else [])]))


def confirmation(plan: Plan) -> list[Path]:
    """The same on seeds that no default was chosen on."""
    twice = sorted(set(plan.seeds) & set(plan.fresh_seeds))
    if twice:
        kept = ", ".join(map(str, plan.fresh_seeds))
        raise ConfigError(
            "--seeds",
            list(plan.seeds),
            f"seeds {kept} are kept for the confirmation: leave them out",
        )
    fresh = dataclasses.replace(plan, seeds=plan.fresh_seeds)
    return _table(fresh, "beyond-confirmation", fresh.runs(THREE))


def _table(plan: Plan, what: str, runs: Runs) -> list[Path]:
    summaries, to_fedcor = compared(runs, "random"), compared(runs, "fedcor")
    closed = {name: _gap_closed(summary) for name, summary in summaries.items()}
    bounded = any(closed.values())
    head = [
        "",
        "mean accuracy",
        "− Rand",
        "− FedCor",
        *(["of the gap to everyone"] if bounded else []),
    ]
    head += [
        "rounds to target",
        "ten-round mean",
        "bytes to target",
        "bytes in all",
        "spread of the last 50",
    ]
    tables = []
    for name, summary in summaries.items():
        rows = []
        for s, other in zip(summary.selectors, to_fedcor[name].selectors, strict=True):
            share = closed[name].get(s.name)
            rows.append(
                [
                    NAMES.get(s.name, s.name),
                    estimate_text(_ACCURACY, s.estimates["mean_accuracy"]),
                    _paired_text(s),
                    _paired_text(other),
                    *([_share_text(share) if share else "–"] if bounded else []),
                    *(
                        mean_std(s.estimates[key])
                        for key in ("rounds_to_target", "smooth_rounds_to_target")
                    ),
                    estimate_text(_METRIC["bytes_to_target"], s.estimates["bytes_to_target"]),
                    estimate_text(_METRIC["bytes_down"], estimate_of([_bytes(s)])),
                    "–"
                    if s.estimates["spread"].mean is None
                    else f"{s.estimates['spread'].mean:.3f}",
                ]
            )
        done = summary.selectors[0].runs[0].rounds_done
        title = f"{plan.dataset} {name.upper()}, {plan.of_seeds}, {done} rounds"
        tables.append(markdown(title, head, rows))
    gaps = {name: {k: dataclasses.asdict(e) for k, e in of.items()} for name, of in closed.items()}
    further = {
        "gap_closed": gaps,
        "mean_accuracy_paired_to_fedcor": _accuracy_differences(to_fedcor),
    }
    return [*draw_curves(plan, what, runs, further), _write(plan, what, tables)]


def _gap_closed(summary: ExperimentSummary) -> dict[str, Estimate]:
    """How far each selector gets from random choice (0) to everyone training (1); nothing where one of them is missing."""
    by_name = {
        s.name: {run.seed: run.values["mean_accuracy"] or 0.0 for run in s.runs}
        for s in summary.selectors
    }
    if "full" not in by_name:
        return {}
    random, full = by_name["random"], by_name["full"]
    return {
        name: ratio_of(
            [values[k] - random[k] for k in values], [full[k] - random[k] for k in values]
        )
        for name, values in by_name.items()
        if name not in ("random", "full")
    }


def _paired_text(s: SelectorSummary) -> str:
    """The difference of its mean accuracy to the baseline."""
    paired = s.differences.get("mean_accuracy")
    return difference_text(_ACCURACY, paired.estimate) if paired else "–"


def _bytes(s: SelectorSummary) -> float:
    """All bytes that a run moves, mean over seeds."""
    return sum(s.estimates[key].mean or 0.0 for key in ("bytes_down", "bytes_up"))


def _share_text(share: Estimate) -> str:
    if share.mean is None:
        return "N/A"
    interval = (
        ""
        if share.low is None or share.high is None
        else f" [{_percent(share.low)}, {_percent(share.high)}]"
    )
    return _percent(share.mean) + interval


def _percent(share: float) -> str:
    return f"{round(share, 2) + 0.0:.0%}"  # + 0.0: no minus before a zero


# --- what matters, and where it fails --------------------------------------------------------------------------------


def _changed(label: str, **options: Any) -> Variant:
    folder = "-".join(["complement", *(f"{key}-{value}" for key, value in options.items())])
    return Variant(label, "complement", folder, options)


def _greedy(label: str, **options: Any) -> Variant:
    """Without the swaps, which would hide what the greedy choice is made of."""
    return _changed(label, swaps=0, **options)


def _relative(label: str, name: str, **options: Any) -> Variant:
    return Variant(label, f"fedcor.selectors.relatives:{name}", name.lower(), options)


GREEDY = _greedy("without swaps")


def _variants(plan: Plan) -> list[Variant]:
    """The greedy choice alone; with swaps, as it is; with one other thing changed; and relatives, which differ in more."""
    # FedCor's hyper-parameters on this data set, for the relatives that share them.
    fedcor = plan.experiment(plan.settings[0]).describe()["selectors"]["fedcor"]
    annealed = {key: fedcor[key] for key in ("beta", "interval")}
    learnt = {k: value for k, value in fedcor.items() if k not in ("beta", "clients_per_round")}
    return [
        GREEDY,
        COMPLEMENT,
        _greedy("start: longest unseen", start="oldest"),
        _greedy("sketch: 8 numbers", sketch=8),
        _greedy("sketch: 16 numbers", sketch=16),
        _greedy("sketch: 64 numbers", sketch=64),
        _greedy("sketch: whole update", sketch="full"),
        _greedy("directions of length one", normalised=True),
        _greedy("ageing .98 a round", ageing=0.98),
        _greedy("ageing .9 a round", ageing=0.9),
        _relative("target: plain mean", "EqualTarget", swaps=0),
        _relative("herding over rounds", "Herding", swaps=0),
        _relative("posterior on the updates", "UpdateProcess", swaps=0, **annealed),
        _relative("with FedCor's process", "Combined", **learnt),
    ]


def _scenarios(plan: Plan) -> dict[Scenario, list[Variant]]:
    """Where it may fail, and who is tried there."""
    many = 100 if plan.dataset == "digits" else 1000
    dead = ("faults.availability=0.5", "faults.dropout=0.3")
    crowd = (f"partition.clients={many}", "training.clients_per_round=10")
    return {
        Scenario("iid", "2spc", ("partition.kind=iid",), "iid"): THREE,
        Scenario("unequal", "2spc", ("partition.size_skew=1.5",), "very unequal sizes"): THREE,
        Scenario(
            "weighted", "dir", ("optimiser.weighted=true",), "Dir, mean weighted by data"
        ): THREE,
        Scenario(
            "noise", "2spc", ("data.noisy_clients=0.3333",), "a third with random labels"
        ): THREE,
        Scenario("dropouts", "2spc", dead, "half away, 30 % of the chosen die"): THREE,
        Scenario("many", "2spc", crowd, f"{many} clients, 10 a round"): [
            *THREE,
            _changed("sweep mixed in", sweep=0.5),
            _changed("sweep and oldest mixed in", sweep=0.5, explore=0.2),
        ],
    }


def ablation(plan: Plan) -> list[Path]:
    """One thing changed at a time, and relatives; in pairs with the greedy choice alone."""
    summaries = compared(plan.runs(_variants(plan)), GREEDY.label)
    head = ["", *(f"{name.upper()}, − without swaps" for name in summaries), "bytes / complement's"]
    title = f"{plan.dataset}, mean accuracy, {plan.of_seeds}"
    page = markdown(title, head, _differences(summaries, GREEDY.label))
    return [
        *_forest(plan, "beyond-ablation", summaries, "the greedy choice", {}, {}),
        _write(plan, "beyond-ablation", [page]),
    ]


def limits(plan: Plan) -> list[Path]:
    """Where it may fail, in pairs with random choice. The scenarios are the same whatever settings the plan names."""
    scenarios = _scenarios(plan)
    summaries: dict[str, ExperimentSummary] = {}
    to_complement: dict[str, ExperimentSummary] = {}
    tables = []
    further: dict[str, Any] = {"scenarios": {s.name: [s.setting, *s.changes] for s in scenarios}}
    for scenario, variants in scenarios.items():
        runs = plan.runs(variants, [scenario])
        summaries |= compared(runs, "random")
        to_complement |= compared(runs, COMPLEMENT.label)
        head = ["", "mean accuracy, − Rand", "− complement", "bytes / Rand's"]
        rows = _differences({scenario.name: summaries[scenario.name]}, "random")
        for row, s in zip(rows, to_complement[scenario.name].selectors, strict=True):
            row.insert(2, _paired_text(s))
        share = plan.experiment(scenario).data.noisy_clients
        if share:
            picks = {
                label: _picks_of_noisy(of_one, share)
                for label, of_one in runs[scenario.name].items()
            }
            further["picks_of_noisy_clients"] = picks
            head.append("picks of noisy clients")
            rows = [
                [*row, f"{picked:.1%}"] for row, picked in zip(rows, picks.values(), strict=True)
            ]
        tables.append(markdown(f"{plan.dataset}, {scenario.title}, {plan.of_seeds}", head, rows))
    further["mean_accuracy_paired_to_complement"] = _accuracy_differences(to_complement)
    titles = {scenario.name: scenario.title for scenario in scenarios}
    return [
        *_forest(plan, "beyond-limits", summaries, "Rand", titles, further),
        _write(plan, "beyond-limits", tables),
    ]


def _picks_of_noisy(runs: Sequence[RunRecord], share: float) -> float:
    """The share of all picks that went to clients with random labels."""
    hits = picks = 0
    for run in runs:
        clients = run.header["config"]["partition"]["clients"]
        noisy = noisy_clients(clients, share, stream(run.header["seed"], LABEL_NOISE))
        chosen = np.concatenate(
            [np.asarray(entry["selected"], dtype=np.int64) for entry in run.rounds]
        )
        hits, picks = hits + int(np.isin(chosen, noisy).sum()), picks + len(chosen)
    return hits / max(picks, 1)


def _differences(summaries: Mapping[str, ExperimentSummary], baseline: str) -> list[list[str]]:
    """A row a variant: its mean accuracy and the paired difference to the baseline, a cell a scenario; then its bytes."""
    rows: dict[str, list[str]] = {}
    moved: dict[str, float] = {}
    for summary in summaries.values():
        for s in summary.selectors:
            mean = s.estimates["mean_accuracy"].mean
            cell = "–" if mean is None else f"{mean:.3f}"
            if s.differences:
                cell += ", " + _paired_text(s)
            rows.setdefault(s.name, [NAMES.get(s.name, s.name)]).append(cell)
            moved[s.name] = moved.get(s.name, 0.0) + _bytes(s)
    return [[*row, f"{moved[name] / moved[baseline]:.2f}"] for name, row in rows.items()]


def _accuracy_differences(
    summaries: Mapping[str, ExperimentSummary],
) -> dict[str, dict[str, dict[str, Any]]]:
    """scenario -> variant -> the difference of its mean accuracy to the baseline, in pairs."""
    return {
        name: {
            s.name: dataclasses.asdict(s.differences["mean_accuracy"].estimate)
            for s in summary.selectors
            if s.differences
        }
        for name, summary in summaries.items()
    }


def _forest(
    plan: Plan,
    what: str,
    summaries: Mapping[str, ExperimentSummary],
    baseline: str,
    titles: Mapping[str, str],
    further: Mapping[str, Any],
) -> list[Path]:
    """Paired differences of mean accuracy with their intervals: saved, then drawn."""
    from fedcor.report.figures import differences, save_figure

    made_by = {**plan.describe(), "settings": list(summaries)}  # what was really run
    saved = plan.save(what, {"plan": made_by, "summary": as_numbers(summaries), **further})
    panels = {
        titles.get(name, name): shown for name, shown in _accuracy_differences(summaries).items()
    }
    rounds = next(iter(summaries.values())).selectors[0].runs[0].rounds_done
    caption = f"{plan.dataset}, {plan.of_seeds}, {rounds} rounds; paired over seeds, bars: 95 % intervals, each by itself"
    figure = differences(panels, f"mean accuracy, difference to {baseline}", caption)
    return [saved, *save_figure(figure, plan.out / f"{what}-{plan.dataset}")]


# --- whom it serves --------------------------------------------------------------------------------------------------


def fairness(plan: Plan) -> list[Path]:
    """How often each client is chosen, and how well the last model does on each client's own training data."""
    from fedcor.report.figures import frequencies, save_figure

    runs = plan.runs(THREE)
    counts = {
        name: {label: times_chosen(of_one) for label, of_one in by.items()}
        for name, by in runs.items()
    }
    numbers: dict[str, Any] = {}
    tables = []
    for name, by_label in _accuracy_by_client(plan, runs).items():
        numbers[name], rows = {}, []
        worst = {label: [_worst_tenth(a) for a in of_one] for label, of_one in by_label.items()}
        for label, accuracies in by_label.items():
            level, mean = (
                estimate_of(worst[label]),
                estimate_of(float(a.mean()) for a in accuracies),
            )
            paired = estimate_of(a - b for a, b in zip(worst[label], worst["random"], strict=True))
            chosen = counts[name][label]
            numbers[name][label] = {
                "worst_tenth": dataclasses.asdict(level),
                "worst_tenth_paired_to_random": dataclasses.asdict(paired),
                "all_clients": dataclasses.asdict(mean),
                "times_chosen": chosen.round(2).tolist(),
            }
            rows.append(
                [
                    NAMES.get(label, label),
                    estimate_text(_ACCURACY, level),
                    "–" if label == "random" else difference_text(_ACCURACY, paired),
                    estimate_text(_ACCURACY, mean),
                    f"{chosen[0]:.0f} / {chosen.mean():.0f} / {chosen[-1]:.0f}",
                ]
            )
        head = [
            "accuracy on own training data",
            "worst tenth of the clients",
            "− Rand",
            "all clients",
        ]
        head += ["chosen: most / mean / least often"]
        tables.append(
            markdown(f"{plan.dataset} {name.upper()}, last model, {plan.of_seeds}", head, rows)
        )
    saved = plan.save("beyond-fairness", {"settings": numbers})
    ordered = "clients ordered within each run by how often they were chosen, mean over seeds"
    shown = {name: {label: c.tolist() for label, c in by.items()} for name, by in counts.items()}
    picture = frequencies(shown, f"{plan.dataset}, {plan.of_seeds}; {ordered}")
    paths = save_figure(picture, plan.out / f"beyond-fairness-{plan.dataset}")
    return [saved, *paths, _write(plan, "beyond-fairness", tables)]


def _accuracy_by_client(plan: Plan, runs: Runs) -> dict[str, dict[str, list[FloatArray]]]:
    """scenario -> variant -> one array a seed: the last model's accuracy on each client's own data."""
    served: dict[str, dict[str, list[FloatArray]]] = {
        name: {label: [] for label in by} for name, by in runs.items()
    }
    with plan.progress("models measured", len(runs) * len(plan.seeds)) as update:
        done = 0
        for name, by_label in runs.items():
            for i, seed in enumerate(plan.seeds):
                engine = build_simulation(plan.experiment(name), seed).engine
                everyone = np.arange(engine.population.count)
                for label, of_one in by_label.items():
                    model = _last_model(of_one[i]).to(engine.device)
                    served[name][label].append(engine.accuracies(model, everyone))
                update(done := done + 1, "")
    return served


def _last_model(run: RunRecord) -> torch.Tensor:
    """The model after the run's last round; refused where an earlier command ran it further than this one reads it."""
    checkpoint = read_checkpoint(run.path)
    reached = 0 if checkpoint is None else int(checkpoint["round"])
    if checkpoint is None or reached != len(run.rounds):
        told = f"its model is that of {reached} rounds, but {len(run.rounds)} are to be compared"
        raise RecordError(f"{run.path}: {told}; ask for as many --rounds, or choose another --out")
    return torch.from_numpy(checkpoint["model"])


def _worst_tenth(accuracies: FloatArray) -> float:
    """Mean over the tenth of the clients that are served worst."""
    return float(np.sort(accuracies)[: max(1, len(accuracies) // 10)].mean())


def _write(plan: Plan, what: str, tables: Sequence[str]) -> Path:
    page = plan.out / f"{what}-{plan.dataset}.md"
    write_whole(page, "".join(tables).encode())
    return page
