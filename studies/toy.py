"""Figure 1 of the paper: two of forty clients are chosen in three ways."""

from __future__ import annotations

from pathlib import Path

from fedcor.reporting.plots import save_figure
from studies.analysis.toy import play
from studies.measured_figures import toy_picture
from studies.plan import Plan


def toy(plan: Plan) -> list[Path]:
    """The toy experiment: the picture of one seed, the numbers of twenty. Whatever the plan says,
    it is the same."""
    games = {seed: play(seed) for seed in range(1, 21)}
    first = games[1]
    picture = {
        "samples": first.samples.round(4).tolist(),
        "labels": first.labels.tolist(),
        "start_loss": first.start_loss,
        "random_loss": first.random_loss,
        "choices": {
            name: {
                "clients": choice.clients.tolist(),
                "model": choice.model.tolist(),
                "global_loss": choice.global_loss,
            }
            for name, choice in first.choices.items()
        },
    }
    best = [game.choices["Opt"].global_loss for game in games.values()]
    losses = {
        "Ind": [game.choices["Ind"].global_loss for game in games.values()],
        "Cor": [game.choices["Cor"].global_loss for game in games.values()],
        "Random": [game.random_loss for game in games.values()],
    }
    ratios = {
        name: [round(loss / opt, 4) for loss, opt in zip(values, best, strict=True)]
        for name, values in losses.items()
    }
    saved = plan.save_plain(
        "toy", {"seed_1": picture, "loss_relative_to_opt_seeds_1_to_20": ratios}
    )
    before_and_mean = (
        f"global loss before {first.start_loss:.3f}, mean over all pairs {first.random_loss:.3f}"
    )
    caption = f"40 clients, one sample each, two train; {before_and_mean}"
    return [saved, *save_figure(toy_picture(picture, caption), plan.out / "toy")]
