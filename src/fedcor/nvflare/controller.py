"""A controller for NVFlare: `fedcor.Rounds` asks, and the sites' replies to NVFlare's tasks answer.

A question for losses is the task "validate", a question for training is the task "train". The names
of the sites are the clients. A site that does not reply before its task ends has not answered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nvflare.apis.fl_constant import FLMetaKey
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.workflows.model_controller import ModelController

from fedcor.runs.ask_tell import Question, Rounds

Replies = dict[str, FLModel]  # by the site's name
_STEPS = FLMetaKey.NUM_STEPS_CURRENT_ROUND


class FedcorController(ModelController):  # type: ignore[misc]  # nvflare has no types
    """Selects sites and steps the model as fedcor does, in an NVFlare job.

    NVFlare writes the settings into the job's configuration: numbers, texts, mappings, and objects
    whose attributes have the names of their parameters, as fedcor's selectors and optimisers have.

    Args:
        selector: A selector, or a name with `clients_per_round`; None: the default, `aligned`.
        num_rounds: Rounds of the whole run, including those before a restart.
        clients_per_round: Number of sites that train in a round, if `selector` is a name or None.
        sizes: Samples of each site, by its name. Only these sites take part. None: all sites that
            are connected when the job starts, with equal weights.
        optimiser: An optimiser or its name; None: the one that goes with the selector.
        seed: Random seed for selection.
        folder: Folder of the record and the checkpoint on the server; a job that is given the same
            folder resumes. None: `fedcor` in the job's results, which every job starts anew.
        attempts: Tries of a round in which no site delivers, each with other sites.
        over_selection: Asks this many times as many sites to train, and goes on when enough of them
            have replied. Late replies are dropped.
        defence: A `fedcor.Defence`, or None.
        record_losses: False keeps the losses of single sites out of the record.
        timeout: Seconds for the task "train"; 0: no limit, as in NVFlare.
        validate_timeout: Seconds for the task "validate"; 0: no limit.
        loss_key: Name of the loss in the metrics of a reply.
        score_key: Name of a metric, such as "accuracy". After each round, all sites are asked for it, and
            its mean, weighted by `sizes`, is the record's accuracy. None: no scores.
        persistor_id: Id of the job's persistor, which has the initial model and saves each round's.
        task_check_period: Seconds between two looks at the replies.
    """

    def __init__(
        self,
        selector: Any = None,
        *,
        num_rounds: int,
        clients_per_round: int | None = None,
        sizes: Mapping[str, int] | None = None,
        optimiser: Any = None,
        seed: int = 0,
        folder: str | None = None,
        attempts: int = 5,
        over_selection: float = 1.0,
        defence: Any = None,
        record_losses: bool = True,
        timeout: int = 0,
        validate_timeout: int = 0,
        loss_key: str = "loss",
        score_key: str | None = None,
        persistor_id: str = AppConstants.DEFAULT_PERSISTOR_ID,
        task_check_period: float = 0.5,
    ) -> None:
        # A site that fails is a site without an answer, never the end of the job.
        super().__init__(
            persistor_id=persistor_id,
            ignore_result_error=True,
            task_check_period=task_check_period,
        )
        # NVFlare reads each setting back from the attribute of its name.
        self.selector = selector
        self.num_rounds = num_rounds
        self.clients_per_round = clients_per_round
        self.sizes = None if sizes is None else dict(sizes)
        self.optimiser = optimiser
        self.seed = seed
        self.folder = None if folder is None else str(folder)
        self.attempts = attempts
        self.over_selection = over_selection
        self.defence = defence
        self.record_losses = record_losses
        self.timeout = timeout
        self.validate_timeout = validate_timeout
        self.loss_key = loss_key
        self.score_key = score_key

    def add_to_fed_job(self, job: Any, ctx: Any, **kwargs: Any) -> None:
        """Called by `job.to_server`. The server has fedcor installed: its code is not copied."""
        super().add_to_fed_job(job, ctx, **kwargs)
        job.set_app_packages([*job.job.app_packages, "fedcor"])

    def run(self) -> None:
        """Called by NVFlare: all rounds that are left, unless the job is aborted."""
        initial = self.load_model()
        if initial is None:  # NVFlare has already ended the job, with the reason
            return
        sizes = self.sizes or dict.fromkeys(sorted(self._connected()), 1)
        with self._open(initial.params, sizes) as rounds:
            while not self.abort_signal.triggered:
                self.save_model(FLModel(params=rounds.model))
                if rounds.number >= self.num_rounds:
                    break
                self._run_round(rounds, sizes)

    def _open(self, model: Any, sizes: Mapping[str, int]) -> Rounds:
        results = self.engine.get_workspace().get_result_root(self.fl_ctx.get_job_id())
        return Rounds(
            self.selector,
            model,
            sizes=sizes,
            clients_per_round=self.clients_per_round,
            optimiser=self.optimiser,
            seed=self.seed,
            folder=self.folder or Path(results) / "fedcor",
            name="nvflare",
            attempts=self.attempts,
            over_selection=self.over_selection,
            defence=self.defence,
            record_losses=self.record_losses,
            scores=self.score_key is not None,
            rounds=self.num_rounds,
        )

    def _run_round(self, rounds: Rounds, sizes: Mapping[str, int]) -> None:
        """Answers the questions of one round. What came of an aborted task is not told."""
        number = rounds.number
        while rounds.number == number:
            available = [site for site in self._connected() if site in sizes]
            question = rounds.ask(available=available)
            sites = available if question.kind == "test" else list(question.clients)
            replies = self._send(question, sites)
            if self.abort_signal.triggered:
                return
            if question.kind == "train":
                rounds.tell(question, **self._trained(replies))
            elif question.kind == "losses":
                rounds.tell(question, losses=_metric(replies, self.loss_key))
            else:
                losses, scores = (
                    _mean(_metric(replies, key), sizes)
                    for key in (self.loss_key, self.score_key)
                )
                rounds.tell(question, accuracy=scores, loss=losses)

    def _connected(self) -> list[str]:
        """The names of the job's sites, without those that NVFlare has found to be gone."""
        names = [client.name for client in self.engine.get_clients()]
        return [name for name in names if not self.get_client_disconnect_time(name)]

    def _send(self, question: Question, sites: list[str]) -> Replies:
        """The replies to a question by site, in the order of `sites`."""
        train = question.kind == "train"
        replies = self.broadcast_model(
            FLModel(
                params=question.model,
                current_round=question.round,
                total_rounds=self.num_rounds,
            ),
            task_name=AppConstants.TASK_TRAIN if train else AppConstants.TASK_VALIDATION,
            targets=sites,
            min_responses=question.enough if train else len(sites),
            timeout=self.timeout if train else self.validate_timeout,
        )
        by_site = {reply.meta["client_name"]: reply for reply in replies}
        return {site: by_site[site] for site in sites if site in by_site}

    def _trained(self, replies: Replies) -> dict[str, Any]:
        """The arguments of `Rounds.tell` for what sites sent after training."""
        steps = {site: reply.meta.get(_STEPS) for site, reply in replies.items()}
        empty = [site for site, reply in replies.items() if not reply.params]
        return {
            "models": _params(replies, ParamsType.FULL),
            "updates": _params(replies, ParamsType.DIFF),
            "losses": _metric(replies, self.loss_key),
            "steps": {site: number for site, number in steps.items() if number is not None},
            "failures": dict.fromkeys(empty, "the reply has no parameters"),
        }


def _params(replies: Replies, kind: ParamsType) -> dict[str, Any]:
    """The parameters of those replies that have them as whole models, or as differences."""
    return {
        site: reply.params
        for site, reply in replies.items()
        if reply.params and reply.params_type == kind
    }


def _metric(replies: Replies, key: str) -> dict[str, float]:
    """A metric of each reply; NaN where it is missing or no number."""
    values = {site: (reply.metrics or {}).get(key) for site, reply in replies.items()}
    return {
        site: float(value) if isinstance(value, int | float) else math.nan
        for site, value in values.items()
    }


def _mean(values: Mapping[str, float], sizes: Mapping[str, int]) -> float:
    """The mean over sites with a finite value, weighted by their samples; NaN without any."""
    known = {site: value for site, value in values.items() if math.isfinite(value)}
    total = sum(sizes[site] for site in known)
    return sum(sizes[site] * value for site, value in known.items()) / total if total else math.nan
