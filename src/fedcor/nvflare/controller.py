"""A controller for NVFlare: `fedcor.Rounds` asks, and the sites' replies to NVFlare's tasks answer.

A question for losses is the task "validate", a question for training is the task "train". The names
of the sites are the clients. A site that does not reply before its task ends has not answered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from nvflare.apis.fl_constant import FLMetaKey
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.workflows.model_controller import ModelController

from fedcor.core.config import LARGEST_COUNT, check_at_least
from fedcor.core.errors import ConfigError
from fedcor.runs.answers import Question
from fedcor.runs.ask_tell import Rounds
from fedcor.runs.loop_settings import LoopSettings, as_clients, as_selector, loop_optimiser

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
        sizes: Samples of each site, by its name. Only these sites take part. None: all sites of the
            job take part, with equal weights, from when they are connected.
        optimiser: An optimiser or its name; None: the one that goes with the selector.
        seed: Random seed for selection.
        folder: Absolute path of a folder on the server, for the record and the checkpoint; a job
            with the same folder resumes. None: `fedcor` among the job's results, which no other job
            resumes.
        attempts: Tries of a round in which no site delivers, each with other sites.
        over_selection: Asks this many times as many sites to train, and goes on when enough of them
            have replied. Late replies are dropped.
        defence: A `fedcor.Defence`, or None.
        record_losses: False keeps the losses of single sites out of the record.
        timeout: Seconds for the task "train"; 0: no limit, as in NVFlare.
        validate_timeout: Seconds for the task "validate"; 0: no limit.
        loss_key: Name of the loss in the metrics of a reply.
        score_key: Name of a metric, such as "accuracy". After each round, all sites that replied to
            their last task are asked for it, and its mean, weighted by `sizes`, is the record's
            accuracy. None: no scores.
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
        if folder is not None and not Path(folder).is_absolute():
            hint = "NVFlare's server runs in its workspace, which the simulator empties"
            raise ConfigError("folder", folder, "must be an absolute path", hint)
        # A site that fails is a site without an answer, never the end of the job.
        super().__init__(
            persistor_id=persistor_id,
            ignore_result_error=True,
            task_check_period=task_check_period,
        )
        # Mistakes are found where the job is written, not on the server.
        if loop_optimiser(optimiser, as_selector(selector, clients_per_round)) is None:
            raise ConfigError("optimiser", optimiser, "must be one that fedcor has, or yours")
        if sizes is not None:
            as_clients(sizes)
        LoopSettings(seed=seed, attempts=attempts, over_selection=over_selection)
        check_at_least("num_rounds", num_rounds, 1)
        check_at_least("timeout", timeout, 0)
        check_at_least("validate_timeout", validate_timeout, 0)
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
        self._silent: set[str] = set()  # sites that did not reply to their last task

    def add_to_fed_job(self, job: Any, ctx: Any, **kwargs: Any) -> None:
        """Called by `job.to_server`. The server has fedcor installed: its code is not copied."""
        super().add_to_fed_job(job, ctx, **kwargs)
        job.set_app_packages([*job.job.app_packages, "fedcor"])

    def run(self) -> None:
        """Called by NVFlare: all rounds that are left, unless the job is aborted."""
        initial = self.load_model()
        if initial is None:  # NVFlare has already ended the job, with the reason
            return
        with self._open(initial.params) as rounds:
            while not self.abort_signal.triggered:
                self.save_model(FLModel(params=rounds.model))
                if rounds.number >= self.num_rounds:
                    break
                self._run_round(rounds)

    def _open(self, model: Any) -> Rounds:
        results = self.engine.get_workspace().get_result_root(self.fl_ctx.get_job_id())
        return Rounds(
            self.selector,
            model,
            sizes=self.sizes or dict.fromkeys(self._connected(), 1),
            clients_per_round=self.clients_per_round,
            optimiser=self.optimiser,
            rounds=self.num_rounds,
            folder=self.folder or Path(results) / "fedcor",
            seed=self.seed,
            name="nvflare",
            attempts=self.attempts,
            over_selection=self.over_selection,
            defence=self.defence,
            record_losses=self.record_losses,
            tests=self.score_key is not None,
        )

    def _run_round(self, rounds: Rounds) -> None:
        """Answers the questions of one round. What came of an aborted task is not told."""
        number = rounds.number
        new = [site for site in self._connected() if site not in rounds.clients]
        if new and self.sizes is None:
            rounds.join(dict.fromkeys(new, 1))
        while rounds.number == number:
            available = [site for site in self._connected() if site in rounds.clients]
            question = rounds.ask(available=available)
            scoring = [site for site in available if site not in self._silent]
            sites = scoring if question.kind == "test" else list(question.clients)
            replies = self._send(question, sites) if sites else {}
            if self.abort_signal.triggered:
                return
            rounds.tell(question, **self._answer(question, replies))

    def _connected(self) -> list[str]:
        """The sorted names of the job's sites, without those that NVFlare has found to be gone."""
        names = [client.name for client in self.engine.get_clients()]
        return sorted(name for name in names if not self.get_client_disconnect_time(name))

    def _send(self, question: Question, sites: list[str]) -> Replies:
        """The replies to a question, by site."""
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
        self._silent = self._silent.union(sites) - by_site.keys()
        return by_site

    def _answer(self, question: Question, replies: Replies) -> dict[str, Any]:
        """The replies as keywords of `Rounds.tell`."""
        losses = {site: _metric(reply, self.loss_key) for site, reply in replies.items()}
        if question.kind == "losses":
            return {"losses": losses}
        if question.kind == "test":
            scores = {site: _metric(reply, self.score_key) for site, reply in replies.items()}
            return {"accuracy": self._mean(scores), "loss": self._mean(losses)}
        steps = {site: _number(reply.meta.get(_STEPS)) for site, reply in replies.items()}
        sent = {site: reply for site, reply in replies.items() if isinstance(reply.params, dict)}
        start = question.model
        return {
            "models": {site: _whole_model(start, reply) for site, reply in sent.items()},
            "losses": losses,
            "steps": {site: n for site, n in steps.items() if 1 <= n <= LARGEST_COUNT},
            "failures": dict.fromkeys(replies.keys() - sent.keys(), "it sent no parameters"),
        }

    def _mean(self, values: Mapping[str, float]) -> float:
        """The mean over sites with a finite value, weighted by samples; NaN without any."""
        sizes = self.sizes or dict.fromkeys(values, 1)
        known = {site: sizes[site] for site, value in values.items() if math.isfinite(value)}
        total = sum(known.values())
        return sum(n * values[site] for site, n in known.items()) / total if known else math.nan


def _whole_model(start: Mapping[str, Any], reply: FLModel) -> Any:
    """The model that a site sent, whole or as its difference from `start`."""
    params = reply.params
    if reply.params_type != ParamsType.DIFF:
        return params
    shapes = {name: np.shape(value) for name, value in params.items()}
    if shapes != {name: np.shape(value) for name, value in start.items()}:
        return {}  # which Rounds refuses as malformed
    try:
        return {name: start[name] + params[name] for name in start}
    except TypeError:  # of numbers with other things
        return {}


def _metric(reply: FLModel, key: str | None) -> float:
    return _number((reply.metrics or {}).get(key))


def _number(value: Any) -> float:
    """A site's value as a number; NaN where it is none."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last one of torch
        return math.nan
