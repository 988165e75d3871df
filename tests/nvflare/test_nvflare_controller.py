"""The controller between faked replies of sites."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from nvflare_jobs import ROOT, FLModel, ParamsType, Signal

import fedcor
from fedcor.core.errors import ConfigError
from fedcor.nvflare import FedcorController
from fedcor.runs.record import read_run


class FakedController(FedcorController):
    """A controller without NVFlare's server: `reply(site, task, model)` answers for the sites."""

    def __init__(self, selector=None, *, reply, sites=("a", "b", "c"), **settings):
        super().__init__(selector, **settings)
        self.reply, self.tasks, self.saved = reply, [], []
        self.abort_signal, self.online = Signal(), list(sites)
        self.fl_ctx = SimpleNamespace(get_job_id=lambda: "job")
        workspace = SimpleNamespace(get_result_root=lambda job: f"results-of-{job}")
        self.engine = SimpleNamespace(
            get_clients=lambda: [SimpleNamespace(name=name) for name in self.online],
            get_workspace=lambda: workspace,
        )

    def get_client_disconnect_time(self, name):
        return None

    def load_model(self):
        return FLModel(params={"w": np.zeros(2), "b": np.zeros(1)})

    def save_model(self, model):
        self.saved.append(model.params)

    def broadcast_model(self, data, task_name, targets, **task):
        self.tasks.append((task_name, targets, task))
        replies = {name: self.reply(name, task_name, data.params) for name in targets}
        for name, reply in replies.items():
            if reply is not None:
                reply.meta["client_name"] = name
        return [reply for reply in replies.values() if reply is not None]


def trained(name, task, model):
    """A well-behaved site."""
    reply = FLModel(metrics={"loss": 1.0, "accuracy": 0.5}, params_type=None)
    if task == "train":
        reply.params_type = ParamsType.FULL
        reply.params = {key: value + 1.0 for key, value in model.items()}
    return reply


def run(tmp_path, reply=trained, **settings):
    defaults = {"selector": "full", "clients_per_round": 3, "num_rounds": 2}
    folder = str(tmp_path / "run")
    controller = FakedController(**{**defaults, "folder": folder, "reply": reply, **settings})
    controller.run()
    return controller, read_run(tmp_path / "run").rounds


def test_each_round_is_saved_and_its_tasks_are_those_of_the_client_api(tmp_path):
    controller, rounds = run(tmp_path, timeout=7, validate_timeout=5, score_key="accuracy")
    assert [task[0] for task in controller.tasks] == ["train", "validate"] * 2
    assert controller.tasks[0][2] == {"min_responses": 3, "timeout": 7}
    assert controller.tasks[1][2] == {"min_responses": 3, "timeout": 5}
    assert [float(model["w"][0]) for model in controller.saved] == [0.0, 1.0, 2.0]
    assert [line["test_accuracy"] for line in rounds] == [0.5, 0.5]
    controller, _ = run(tmp_path, score_key="accuracy")  # it is finished
    assert controller.tasks == []
    assert float(controller.saved[-1]["w"][0]) == 2.0


def test_differences_are_added_to_the_model(tmp_path):
    def reply(name, task, model):
        change = {key: np.ones_like(value) for key, value in model.items()}
        if name == "c":  # would be spread over all weights
            change["w"] = np.ones(1)
        if name == "d":
            change["w"] = np.array(["1", "1"])
        return FLModel(params=change, params_type=ParamsType.DIFF)

    controller, rounds = run(tmp_path, reply, sites="abcd", clients_per_round=4)
    np.testing.assert_array_equal(controller.saved[-1]["w"], [2.0, 2.0])
    assert rounds[0]["missing"] == {"refused": [2, 3]}


@pytest.mark.parametrize("steps", ["many", float("nan"), 1e300, 10**400, -1, None])
def test_numbers_that_cannot_be_used_do_not_end_the_job(tmp_path, steps):
    def reply(name, task, model):
        sent = trained(name, task, model)
        if name == "a":
            sent.meta["NUM_STEPS_CURRENT_ROUND"], sent.metrics = steps, {"loss": [1, 2]}
        if name == "b":
            sent.params, sent.metrics = None, None
        if name == "c":
            sent.params = np.zeros(3)
        return sent

    _, rounds = run(tmp_path, reply, optimiser="fednova", sites="abcd", clients_per_round=4)
    assert rounds[0]["participated"] == [0, 3]
    assert rounds[0]["missing"] == {"failed": [1, 2]}


def test_losses_are_asked_for_with_the_key_of_the_job(tmp_path):
    def reply(name, task, model):
        sent = trained(name, task, model)
        sent.metrics = {"val_loss": "abc".index(name)} if name != "b" else {"loss": 9.0}
        return sent

    settings = {"selector": fedcor.PowerOfChoice(1, candidates=3), "clients_per_round": None}
    controller, rounds = run(tmp_path, reply, loss_key="val_loss", **settings)
    assert controller.tasks[0][0] == "validate"
    assert rounds[0]["selected"] == [2]
    assert rounds[0]["refused"] == 1


def test_an_aborted_task_is_not_told(tmp_path):
    def reply(name, task, model):
        controller.abort_signal.trigger(True)

    folder = str(tmp_path / "run")
    controller = FakedController(
        "full", clients_per_round=3, num_rounds=2, folder=folder, reply=reply
    )
    controller.run()
    assert len(controller.tasks) == 1
    _, rounds = run(tmp_path)
    assert [line["participated"] for line in rounds] == [[0, 1, 2]] * 2


def test_sites_that_connect_later_join_unless_sizes_say_who_takes_part(tmp_path):
    def reply(name, task, model):
        controller.online = ["a", "b", "c"]
        return trained(name, task, model)

    for sizes, expected in ((None, [0, 1, 2]), ({"a": 1, "b": 3}, [0, 1])):
        folder = str(tmp_path / str(len(expected)))
        settings = {"clients_per_round": 3, "num_rounds": 2, "sites": ("a", "b"), "sizes": sizes}
        controller = FakedController("full", folder=folder, reply=reply, **settings)
        controller.run()
        first, second = read_run(Path(folder)).rounds
        assert first["participated"] == [0, 1]
        assert second["participated"] == expected


def test_enough_replies_end_a_round(tmp_path):
    def reply(name, task, model):
        return trained(name, task, model) if name != "c" else None

    settings = {"selector": "random", "clients_per_round": 2, "over_selection": 1.5}
    controller, rounds = run(tmp_path, reply, **settings)
    _, targets, task = controller.tasks[0]
    assert (sorted(targets), task["min_responses"]) == (["a", "b", "c"], 2)
    assert rounds[0]["missing"] == {"late": [2]}
    assert rounds[1]["selected"]


def test_silent_sites_are_not_asked_for_scores(tmp_path):
    def reply(name, task, model):
        return trained(name, task, model) if name != "b" else None

    controller, _ = run(tmp_path, reply, score_key="accuracy")
    assert [task[1] for task in controller.tasks[:2]] == [["a", "b", "c"], ["a", "c"]]


def test_without_a_folder_the_record_is_among_the_results_of_the_job():
    FakedController("full", clients_per_round=3, num_rounds=1, reply=trained).run()
    assert len(read_run(Path("results-of-job", "fedcor")).rounds) == 1


@pytest.mark.parametrize(
    "setting",
    [
        {"folder": "runs/mine"},  # in the server's workspace
        {"selector": "radnom"},
        {"optimiser": "own"},
        {"optimiser": "scaffold"},
        {"num_rounds": 0},
        {"timeout": 1.5},
        {"validate_timeout": -1},
        {"sizes": {"a": 0}},
        {"over_selection": 0.5},
    ],
)
def test_a_setting_that_cannot_work_is_refused_where_the_job_is_written(setting):
    working = {"selector": "random", "clients_per_round": 2, "num_rounds": 1}
    with pytest.raises(ConfigError, match=next(iter(setting))):
        FedcorController(**{**working, **setting})


def test_the_code_of_the_page_is_python():
    page = (ROOT / "docs" / "how-to" / "nvflare.md").read_text(encoding="utf-8")
    for block in page.split("```py\n")[1:]:
        compile(block.split("```")[0], "nvflare.md", "exec")
