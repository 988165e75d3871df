"""`Result`: one or many runs, finished or not, as a verdict, pandas frames, plots and a page."""

from __future__ import annotations

import html
import tempfile
import webbrowser
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcor.core.errors import FedcorError, MissingExtraError, RecordError, suggest
from fedcor.core.files import write_whole
from fedcor.reporting.metrics import Estimate, difference
from fedcor.reporting.series import find_name, group_names, named_runs, series_names
from fedcor.reporting.summary import ExperimentSummary, Summary, ranking, summarise
from fedcor.reporting.verdict import verdict
from fedcor.runs.record import RunRecord

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


class Result:
    """Runs, and what they say: shows itself as a verdict and a table.

    Runs may be finished or still running, on disk or in memory, of one experiment or of several.

    Attributes:
        runs: The records, in the order given.
        baseline: The selector that the others are compared with; None for `random` if it is there,
            else the first.

    Example:
        result = Result(read_runs(Path("runs/demo")))
        result                                    # verdict and table, in a notebook too
        result.to_frame().groupby("selector")["accuracy"].max()
        result.difference("fedcor", "random")
        result.plot(x="bytes").savefig("bytes.png")
        result.to_html("report.html")             # all of it, as a page for a browser
    """

    def __init__(self, runs: Sequence[RunRecord], baseline: str | None = None) -> None:
        self.runs = tuple(runs)
        self.baseline = baseline
        if not self.runs:
            raise RecordError("there are no runs: name a folder that holds some, or run some first")
        if baseline is not None:
            self.baseline = self._selector("baseline", baseline)

    # --- what there is ----------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.runs)

    def __iter__(self) -> Iterator[RunRecord]:
        return iter(self.runs)

    @property
    def experiments(self) -> tuple[str, ...]:
        """Names of the experiments, in the order of the runs.

        Runs of one experiment whose settings differ in more than the selector and who aggregates
        cannot be compared; they are several, named by what differs: `toy (data.name=fmnist)`.
        """
        return tuple(dict.fromkeys(self._groups))

    @property
    def selectors(self) -> tuple[str, ...]:
        """Names of the selectors, in the order of the runs.

        Where runs of an experiment differ in their optimiser or Flower strategy as well, the names
        say so, here and in all frames and tables: `aligned + FedRecall`.
        """
        return tuple(dict.fromkeys(series_names(self.runs)))

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds, sorted."""
        return tuple(sorted({int(run.header["seed"]) for run in self.runs}))

    @property
    def finished(self) -> bool:
        """Whether every run has all its rounds."""
        return all(
            len(run.rounds) >= int(run.header["config"]["training"]["rounds"]) for run in self.runs
        )

    def only(self, experiment: str) -> Result:
        """The runs of one of several experiments.

        Args:
            experiment: Its name.
        """
        if experiment not in self.experiments:
            known = ", ".join(self.experiments)
            hint = suggest(experiment, self.experiments) or f"there is {known}"
            raise RecordError(f'no run of the experiment "{experiment}": {hint}')
        named = zip(self._groups, self.runs, strict=True)
        return Result([run for name, run in named if name == experiment], self.baseline)

    # --- what it says -----------------------------------------------------------------------------

    @property
    def verdict(self) -> str:
        """Who is best, by how much and how surely, in one or two sentences."""
        return verdict(self._summary)

    @property
    def best(self) -> str:
        """The selector with the best mean accuracy over rounds; without accuracy, loss.

        It need not be clearly better than the others: `verdict` tells.
        """
        return ranking(self._experiment())[0]

    def __repr__(self) -> str:
        from fedcor.reporting.screen import screen_text

        try:
            return screen_text(self._summary, curve=False)
        except FedcorError as error:
            return self._unusable(error)

    def _repr_html_(self) -> str:
        from fedcor.reporting.screen import to_html

        try:
            return to_html(self._summary)
        except FedcorError as error:
            return f"<p>{html.escape(self._unusable(error))}</p>"

    # --- frames -----------------------------------------------------------------------------------

    def to_frame(self) -> pd.DataFrame:
        """Every round of every run as a row of a tidy pandas frame.

        Its columns: experiment, selector, seed, round (from 0), accuracy, loss, learning_rate,
        bytes_down, bytes_up, bytes (down and up, of all rounds so far), probed, refused, selected
        and participated (tuples of clients), seconds, server_round (Flower's number of the round)
        where there are runs on Flower, duration and clock (simulated seconds, of the round and
        until then) where time was simulated, clipped, refused_updates, capped and rolled_back where
        there are any, and one for each further metric. NaN where a round has no value; a tuple
        where it is a list of numbers.
        """
        return _rounds_frame(self.runs)

    def summary(self, metric: str | None = None) -> pd.DataFrame:
        """Each selector over its seeds: a row per selector, best first. For metrics without a
        declared direction, they keep the order of the runs.

        Its columns have two levels: the metric (`mean_accuracy`, `rounds_to_target`, ...), and
        `mean`, `low` and `high` (its 95 % interval) and `n` (seeds with a value). With several
        experiments, rows are named by experiment and selector.

        Args:
            metric: What to judge by: `accuracy`, `loss`, or a further metric of the runs; None for
                accuracy, or loss without it.

        Example:
            result.summary()["mean_accuracy"]
            result.summary().loc["fedcor", ("mean_accuracy", "low")]
        """
        return _summary_frame(self._summarise(metric))

    def difference(self, a: str, b: str | None = None, metric: str | None = None) -> pd.DataFrame:
        """`a` minus `b`, paired seed by seed: a row per metric.

        Its columns: `mean`, `low` and `high` (its 95 % interval), `n` (seeds that both have), and
        `verdict`: whether `a` is better, worse, unclear (the interval holds zero) or equal;
        higher or lower for metrics without a declared direction.

        Args:
            a: Name of a selector. For `module:Class` the class is enough; for `aligned + FedRecall`
                the selector is, if it was run with one optimiser only.
            b: Name of another; None for the baseline.
            metric: As in `summary`.
        """
        experiment = self._experiment(metric)
        b = experiment.baseline if b is None else b
        a, b = (self._selector(key, name) for key, name in (("a", a), ("b", b)))
        return _difference_frame(experiment, a, b)

    # --- plots ------------------------------------------------------------------------------------

    def plot(
        self, x: str = "rounds", metric: str | None = None, smooth: int | None = None
    ) -> Figure:
        """A matplotlib figure: one curve per selector, with a band from the lowest to the highest
        seed. A notebook shows it; `plot().savefig("curves.png")` writes it.

        Args:
            x: What to draw against: `rounds`, `bytes` (down and up), `seconds` (that the run took),
                or `time` (simulated; runs with `faults.devices` have it).
            metric: What to draw, as in `summary`.
            smooth: Rounds in each point, itself and those before it; None for a twentieth of the
                rounds, at most 10.
        """
        from fedcor.reporting.plots import plot_experiment

        return plot_experiment(self._experiment(metric), [x], smooth)

    # --- the page ---------------------------------------------------------------------------------

    def to_html(self, path: str | Path | None = None) -> str:
        """The report as one page of HTML that needs nothing else: verdict, curves, clients, why
        they were chosen, and what was run.

        Args:
            path: Where to write it; None to write nothing.

        Returns:
            The page.

        Example:
            result.to_html("report.html")
        """
        from fedcor.reporting.page import render_page
        from fedcor.reporting.page.data import page_data

        page = render_page(page_data(self.runs, self.baseline))
        if path is not None:
            write_whole(Path(path), page)
        return page.decode()

    def show(self) -> Path:
        """Open the page of `to_html` in the web browser.

        Returns:
            The page's file, in a temporary folder.
        """
        folder = Path(tempfile.mkdtemp(prefix="fedcor-"))
        path = folder / "report.html"
        self.to_html(path)
        webbrowser.open(path.as_uri())
        return path

    # --- within -----------------------------------------------------------------------------------

    @cached_property
    def _groups(self) -> list[str]:
        """The name of each run's experiment."""
        return group_names(self.runs)

    @cached_property
    def _summary(self) -> Summary:
        return self._summarise(None)

    def _summarise(self, metric: str | None) -> Summary:
        return summarise(self.runs, self.baseline, metric)

    def _experiment(self, metric: str | None = None) -> ExperimentSummary:
        """The summary of the only experiment."""
        if len(self.experiments) > 1:
            known = ", ".join(self.experiments)
            raise RecordError(f"there are several experiments: choose one of {known} with `only`")
        summary = self._summary if metric is None else self._summarise(metric)
        return summary.experiments[0]

    def _selector(self, parameter: str, name: str) -> str:
        selector = find_name(name, self.selectors)
        if selector is None:
            hint = suggest(name, self.selectors) or f"there is {', '.join(self.selectors)}"
            raise RecordError(f'{parameter} = "{name}": no run has this selector ({hint})')
        return selector

    def _unusable(self, error: FedcorError) -> str:
        """What there is, and why it cannot be shown."""
        runs = "1 run" if len(self) == 1 else f"{len(self)} runs"
        names = f"{', '.join(self.experiments)} with {', '.join(self.selectors)}"
        why = str(error)
        return f"{runs} of {names}. {why[0].upper()}{why[1:]}."


# --- pandas frames --------------------------------------------------------------------------------

_COLUMNS = (
    "experiment", "selector", "seed", "round", "accuracy", "loss", "learning_rate", "bytes_down",
    "bytes_up", "bytes", "probed", "refused", "selected", "participated", "seconds",
)  # fmt: skip
_TEXTS = ("experiment", "selector", "selected", "participated")
_COUNTS = ("seed", "round", "bytes_down", "bytes_up", "bytes", "probed", "refused")
# Columns of runs that have them: on Flower, with simulated time, with clients that were defended
# against.
_SOME = (
    "server_round", "duration", "clock", "clipped", "refused_updates", "capped", "rolled_back",
)  # fmt: skip


def _rounds_frame(runs: Sequence[RunRecord]) -> pd.DataFrame:
    """A row per round; see `Result.to_frame`."""
    rows = [row for group, name, run in named_runs(runs) for row in _rows(group, name, run)]
    columns = dict.fromkeys([*_COLUMNS, *(key for row in rows for key in row)])
    frame = _pandas().DataFrame(rows, columns=list(columns))
    no_numbers = {
        key for row in rows for key, value in row.items() if isinstance(value, tuple | Mapping)
    }
    other = {*_TEXTS, *_COUNTS, *no_numbers, "server_round"}
    frame = frame.astype({column: float for column in columns if column not in other})
    return frame.astype({"server_round": "Int64"}) if "server_round" in frame else frame


def _summary_frame(summary: Summary) -> pd.DataFrame:
    """A row per selector, best first; see `Result.summary`."""
    pandas = _pandas()
    rows = {
        (experiment.name, name): {
            (key, part): value
            for key, estimate in experiment.selector(name).estimates.items()
            for part, value in _parts(estimate).items()
        }
        for experiment in summary.experiments
        for name in ranking(experiment)
    }
    frame = pandas.DataFrame.from_dict(rows, orient="index", dtype=float)
    counts = [column for column in frame.columns if column[1] == "n"]
    frame[counts] = frame[counts].fillna(0)  # a metric that another experiment has
    frame = frame.astype(dict.fromkeys(counts, int))
    frame.columns = pandas.MultiIndex.from_tuples(frame.columns, names=["metric", ""])
    frame.index = pandas.MultiIndex.from_tuples(list(rows), names=["experiment", "selector"])
    return frame if len(summary.experiments) > 1 else frame.droplevel("experiment")


def _difference_frame(experiment: ExperimentSummary, a: str, b: str) -> pd.DataFrame:
    """`a` minus `b`, a row per metric; see `Result.difference`."""
    rows = {}
    for metric in experiment.metrics:
        gap = difference(metric, experiment.curves[a], experiment.curves[b])
        rows[metric.key] = {**_parts(gap.estimate), "verdict": gap.verdict}
    frame = _pandas().DataFrame.from_dict(rows, orient="index")
    frame.index.name = "metric"
    return frame.astype(dict.fromkeys(("mean", "low", "high"), float))


def _rows(group: str, name: str, run: RunRecord) -> Iterator[dict[str, Any]]:
    """A run's rounds as rows of a frame; `group` and `name` are what it is called there."""
    total = 0
    for entry in run.rounds:
        total += entry["bytes_down"] + entry["bytes_up"]
        row = {
            **{key: entry.get(key) for key in _COLUMNS},
            **{key: entry[key] for key in _SOME if key in entry},
            "experiment": group,
            "selector": name,
            "seed": int(run.header["seed"]),
            "accuracy": entry.get("test_accuracy"),
            "loss": entry.get("test_loss"),
            "bytes": total,
        }
        for key, value in (entry.get("metrics") or {}).items():
            # A metric that is named as a column gets another name.
            row[f"metric_{key}" if key in (*_COLUMNS, *_SOME) else key] = value
        yield {key: tuple(v) if isinstance(v, list) else v for key, v in row.items()}


def _parts(estimate: Estimate) -> dict[str, Any]:
    return {name: getattr(estimate, name) for name in ("mean", "low", "high", "n")}


def _pandas() -> Any:
    try:
        import pandas
    except ImportError as error:
        raise MissingExtraError("pandas", "plot") from error
    return pandas
