"""Beyond the paper: what `complement`, which asks nothing, gains over it; what of it matters; where it fails; whom it serves."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedcor.record import Run, read_checkpoint, write_whole
from fedcor.report.summary import METRICS, Estimate, ExperimentSummary, estimate_of
from fedcor.report.tables import difference_text, estimate_text
from fedcor.reproduce.comparison import as_numbers, compared, draw_curves, mean_std, plain, times_chosen
from fedcor.reproduce.plan import FOUR, Plan, Runs, Scenario, Variant
from fedcor.runner import build_simulation
from fedcor.types import FloatArray

__all__ = ["ablation", "confirmation", "fairness", "limits", "table"]

COMPLEMENT = Variant("complement", "complement", "complement")
FULL = Variant("full", "full", "full")
THREE = [FOUR[0], FOUR[3], COMPLEMENT]  # random, fedcor and it
_METRIC = {m.key: m for m in METRICS}
_NAMES = {"random": "Rand", "afl": "AFL", "power_of_choice": "Pow-d", "fedcor": "FedCor", "full": "everyone trains"}


def _changed(label: str, **options: Any) -> Variant:
    folder = "-".join(["complement", *(f"{key}-{value}" for key, value in options.items())])
    return Variant(label, "complement", folder, options)


def _relative(label: str, name: str, **options: Any) -> Variant:
    return Variant(label, f"fedcor.selectors.relatives:{name}", name.lower(), options)


# What of the selector matters: one thing changed at a time.
ABLATION = [
    COMPLEMENT,
    _changed("start: longest unseen", start="oldest"),
    _changed("sketch: 8 numbers", sketch=8),
    _changed("sketch: 16 numbers", sketch=16),
    _changed("sketch: 64 numbers", sketch=64),
    _changed("sketch: whole update", sketch="full"),
    _changed("directions of length one", normalised=True),
    _changed("ageing .98 a round", ageing=0.98),
    _changed("ageing .9 a round", ageing=0.9),
    _changed("swaps after the greedy", swaps=20),
    _relative("herding over rounds", "Herding", carry=0.5),
    _relative("posterior on the updates", "UpdateProcess"),
    _relative("with FedCor's process", "Combined"),
]


def _scenarios(plan: Plan) -> dict[Scenario, list[Variant]]:
    """Where it may fail, and who is tried there."""
    many = 100 if plan.dataset == "digits" else 1000
    dead = ("faults.availability=0.5", "faults.dropout=0.3")
    crowd = (f"partition.clients={many}", "training.clients_per_round=10")
    return {
        Scenario("iid", "2spc", ("partition.kind=iid",), "iid"): THREE,
        Scenario("unequal", "2spc", ("partition.size_skew=1.5",), "unequal sizes"): THREE,
        Scenario("noise", "2spc", ("data.noisy_clients=0.3333",), "a third with random labels"): THREE,
        Scenario("dropouts", "2spc", dead, "half away, 30 % of the rest die"): THREE,
        Scenario("many", "2spc", crowd, f"{many} clients, 10 a round"): [
            *THREE,
            _changed("sweep mixed in", sweep=0.5),
            _changed("sweep and oldest mixed in", sweep=0.5, explore=0.2),
        ],
    }


def table(plan: Plan) -> list[Path]:
    """Every selector, and everyone training as the bound: rounds, bytes, accuracy, and the share of the gap that is closed."""
    # A round of everyone costs twenty of the others: for CIFAR-10's network that is days on a CPU.
    variants = [*FOUR, COMPLEMENT, *([] if plan.dataset == "cifar10" else [FULL])]
    return _table(plan, "beyond", plan.runs(variants))


def confirmation(plan: Plan) -> list[Path]:
    """The same on seeds that no default was chosen on."""
    fresh = dataclasses.replace(plan, seeds=plan.fresh_seeds)
    return _table(fresh, "beyond-confirmation", fresh.runs(THREE))


def _table(plan: Plan, what: str, runs: Runs) -> list[Path]:
    summaries = compared(runs, "random")
    closed = {name: _gap_closed(summary) for name, summary in summaries.items()}
    further = {"gap_closed": {name: {k: plain(e) for k, e in of.items()} for name, of in closed.items()}}
    lines: list[str] = []
    for name, summary in summaries.items():
        head = ["", "mean accuracy", "− Rand", "of the gap to everyone", "rounds to target", "ten-round mean"]
        head += ["bytes to target", "bytes in all", "spread of the last 50"]
        rows = []
        for s in summary.selectors:
            share, paired = closed[name].get(s.name), s.differences.get("mean_accuracy")
            moved = estimate_of([sum(s.estimates[key].mean or 0.0 for key in ("bytes_down", "bytes_up"))])
            rows.append(
                [
                    _NAMES.get(s.name, s.name),
                    estimate_text(_METRIC["mean_accuracy"], s.estimates["mean_accuracy"]),
                    difference_text(_METRIC["mean_accuracy"], paired.estimate) if paired else "–",
                    _share_text(share) if share else "–",
                    *(mean_std(plain(s.estimates[key])) for key in ("rounds_to_target", "smooth_rounds_to_target")),
                    estimate_text(_METRIC["bytes_to_target"], s.estimates["bytes_to_target"]),
                    estimate_text(_METRIC["bytes_down"], moved),
                    "–" if s.estimates["spread"].mean is None else f"{s.estimates['spread'].mean:.3f}",
                ]
            )
        done = summary.selectors[0].runs[0].rounds_done
        lines += _markdown(f"{plan.dataset} {name.upper()}, {_seeds(plan)}, {done} rounds", head, rows)
    page = _write(plan, what, lines)
    return [*draw_curves(plan, what, runs, further), page]


def _gap_closed(summary: ExperimentSummary) -> dict[str, Estimate]:
    """How far each selector gets from random choice (0) to everyone training (1), seed by seed; nothing where one is missing."""
    by_name = {s.name: {run.seed: run.values["mean_accuracy"] for run in s.runs} for s in summary.selectors}
    if "full" not in by_name:
        return {}
    shares: dict[str, Estimate] = {}
    for name, values in by_name.items():
        if name not in ("random", "full"):
            triples = [(values[seed], by_name["random"][seed], by_name["full"][seed]) for seed in values]
            shares[name] = estimate_of(
                (v - r) / (f - r) if None not in (v, r, f) and f != r else None  # type: ignore[operator]
                for v, r, f in triples
            )
    return shares


def ablation(plan: Plan) -> list[Path]:
    """One thing changed at a time, in pairs with the selector as it is."""
    summaries = compared(plan.runs(ABLATION), COMPLEMENT.label)
    rows = _differences(summaries)
    head = ["", *(f"{name.upper()}, − complement" for name in summaries)]
    lines = _markdown(f"{plan.dataset}, mean accuracy, {_seeds(plan)}", head, rows)
    return [*_forest(plan, "beyond-ablation", summaries, "complement", {}), _write(plan, "beyond-ablation", lines)]


def limits(plan: Plan) -> list[Path]:
    """Where it may fail, in pairs with random choice."""
    summaries: dict[str, ExperimentSummary] = {}
    lines: list[str] = []
    scenarios = _scenarios(plan)
    for scenario, variants in scenarios.items():
        summaries |= compared(plan.runs(variants, [scenario]), "random")
        rows = _differences({scenario.name: summaries[scenario.name]})
        head = ["", "mean accuracy, − Rand"]
        lines += _markdown(f"{plan.dataset}, {scenario.title}, {_seeds(plan)}", head, rows)
    titles = {scenario.name: scenario.title for scenario in scenarios}
    return [*_forest(plan, "beyond-limits", summaries, "Rand", titles), _write(plan, "beyond-limits", lines)]


def fairness(plan: Plan) -> list[Path]:
    """How often each client is chosen, and how well the last model does on each client's own data."""
    from fedcor.report.figures import frequencies, save_figure

    runs = plan.runs(THREE)
    counts = {name: {label: times_chosen(of_one) for label, of_one in by.items()} for name, by in runs.items()}
    served = _accuracy_by_client(plan, runs)
    lines: list[str] = []
    numbers: dict[str, Any] = {}
    for name, by_label in served.items():
        numbers[name], rows = {}, []
        worst = {label: [_worst_tenth(a) for a in of_one] for label, of_one in by_label.items()}
        for label, accuracies in by_label.items():
            level, mean = estimate_of(worst[label]), estimate_of(float(a.mean()) for a in accuracies)
            paired = estimate_of(a - b for a, b in zip(worst[label], worst["random"], strict=True))
            numbers[name][label] = {
                "worst_tenth": plain(level),
                "worst_tenth_paired_to_random": plain(paired),
                "all_clients": plain(mean),
                "times_chosen": counts[name][label].round(2).tolist(),
            }
            metric, chosen = _METRIC["mean_accuracy"], counts[name][label]
            rows.append(
                [
                    _NAMES.get(label, label),
                    estimate_text(metric, level),
                    "–" if label == "random" else difference_text(metric, paired),
                    estimate_text(metric, mean),
                    f"{chosen[0]:.0f} / {chosen.mean():.0f} / {chosen[-1]:.0f}",
                ]
            )
        head = ["", "worst tenth of the clients", "− Rand", "all clients", "chosen: most / mean / least often"]
        lines += _markdown(f"{plan.dataset} {name.upper()}, last model, {_seeds(plan)}", head, rows)
    saved = plan.save("beyond-fairness", {"settings": numbers})
    caption = f"{plan.dataset}, {_seeds(plan)}; clients ordered within each run by how often they were chosen, mean over seeds"
    picture = frequencies(
        {name: {k: c.tolist() for k, c in by.items()} for name, by in counts.items()},
        caption,
    )
    paths = save_figure(picture, plan.out / f"beyond-fairness-{plan.dataset}")
    return [saved, *paths, _write(plan, "beyond-fairness", lines)]


def _accuracy_by_client(plan: Plan, runs: Runs) -> dict[str, dict[str, list[FloatArray]]]:
    """scenario -> variant -> one array a seed: the last model's accuracy on each client's own data."""
    served: dict[str, dict[str, list[FloatArray]]] = {name: {label: [] for label in by} for name, by in runs.items()}
    with plan.progress("models measured", len(runs) * len(plan.seeds)) as update:
        done = 0
        for name, by_label in runs.items():
            for i, seed in enumerate(plan.seeds):
                engine = build_simulation(plan.experiment(name), seed).engine
                everyone = np.arange(engine.population.count)
                for label, of_one in by_label.items():
                    model = _last_model(of_one[i])
                    served[name][label].append(engine.accuracies(model.to(engine.device), everyone))
                update(done := done + 1, "")
    return served


def _last_model(run: Run) -> torch.Tensor:
    checkpoint = read_checkpoint(run.path)
    assert checkpoint is not None, "a finished run has a checkpoint"
    return torch.from_numpy(checkpoint["model"])


def _worst_tenth(accuracies: FloatArray) -> float:
    """Mean over the tenth of the clients that are served worst."""
    return float(np.sort(accuracies)[: max(1, len(accuracies) // 10)].mean())


# --- writing ---------------------------------------------------------------------------------------------------------


def _differences(summaries: Mapping[str, ExperimentSummary]) -> list[list[str]]:
    """A row a variant: its mean accuracy and the paired difference to the baseline, a cell a scenario."""
    rows: dict[str, list[str]] = {}
    for summary in summaries.values():
        for s in summary.selectors:
            mean, paired = s.estimates["mean_accuracy"].mean, s.differences.get("mean_accuracy")
            cell = "–" if mean is None else f"{mean:.3f}"
            if paired:
                cell += ", " + difference_text(_METRIC["mean_accuracy"], paired.estimate)
            rows.setdefault(s.name, [_NAMES.get(s.name, s.name)]).append(cell)
    return list(rows.values())


def _forest(
    plan: Plan, what: str, summaries: Mapping[str, ExperimentSummary], baseline: str, titles: Mapping[str, str]
) -> list[Path]:
    """Paired differences of mean accuracy with their intervals: saved, then drawn."""
    from fedcor.report.figures import differences, save_figure

    saved = plan.save(what, {"summary": as_numbers(summaries)})
    panels = {
        titles.get(name, name): {
            s.name: plain(s.differences["mean_accuracy"].estimate) for s in summary.selectors if s.differences
        }
        for name, summary in summaries.items()
    }
    rounds = next(iter(summaries.values())).selectors[0].runs[0].rounds_done
    caption = f"{plan.dataset}, {_seeds(plan)}, {rounds} rounds; paired over seeds, bars: 95 % intervals"
    figure = differences(panels, f"mean accuracy, difference to {baseline}", caption)
    return [saved, *save_figure(figure, plan.out / f"{what}-{plan.dataset}")]


def _seeds(plan: Plan) -> str:
    return f"seeds {', '.join(map(str, plan.seeds))}"


def _share_text(share: Estimate) -> str:
    if share.mean is None:
        return "N/A"
    interval = "" if share.low is None or share.high is None else f" [{share.low:.0%}, {share.high:.0%}]"
    return f"{share.mean:.0%}{interval}"


def _markdown(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"### {title}", "", "| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def _write(plan: Plan, what: str, lines: Sequence[str]) -> Path:
    page = plan.out / f"{what}-{plan.dataset}.md"
    write_whole(page, "\n".join(lines).encode())
    return page
