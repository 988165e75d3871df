"""What a model is trained for and measured by: the loss, the accuracy, a user's metrics.

Models that settings name are checked here as well: `check_model_options`, `load_model_factory`.

A *loss* gives one number per sample, so that the loss of every client can be read from one pass
over all data. It is named, or it is a function `loss(outputs, targets) -> (n,)` of torch tensors:

    cross_entropy   for labels 0 .. K-1; outputs are (n, K) scores
    mse             for numbers; the mean squared error over a sample's targets

A *metric* is a function `metric(targets, outputs) -> float` of NumPy arrays, called once per round
with the whole test set. In regression, outputs have the shape of the targets, so scikit-learn's
`r2_score` is a metric as it is. Which direction is better is said with it, `(metric, "lower")`, or
by its attribute `greater_is_better`; where nobody says so, selectors are not ranked by it.

A package registers its own under a name with an entry point in its pyproject.toml, in the group
`fedcor.losses` or `fedcor.metrics`. Settings are checked before anything is trained, so torch is
imported only when a loss is computed.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from fedcor.core.config import check_keys
from fedcor.core.describe import describe
from fedcor.core.errors import ConfigError, FedcorError, blame, suggest
from fedcor.core.registry import load_object
from fedcor.core.types import Array

if TYPE_CHECKING:
    from torch import Tensor

Loss: TypeAlias = "Callable[[Tensor, Tensor], Tensor]"  # (outputs, targets) -> (n,)
Metric: TypeAlias = Callable[[Array, Array], float]  # (targets, outputs)
# A function or its name; with its direction, as a pair or as a table of a file.
MetricSetting: TypeAlias = (
    str | Callable[..., float] | tuple[str | Callable[..., float], str] | Mapping[str, Any]
)


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    from torch.nn import functional

    n, classes = len(outputs), outputs.shape[1]
    if outputs.requires_grad or classes >= _vector_width(outputs):
        return functional.cross_entropy(outputs, targets, reduction="none")
    # The same bits in a fifth of the time: with the samples last, torch takes the exponentials of
    # many at once. It would treat the last ones differently, hence the padding.
    columns = outputs.new_zeros(classes, -(-n // _PADDING) * _PADDING)
    columns[:, :n] = outputs.t()
    scores = functional.log_softmax(columns, dim=0)[:, :n]
    return functional.nll_loss(scores.t(), targets, reduction="none")


_PADDING = 16  # numbers in the longest vector of any processor


def _vector_width(outputs: Tensor) -> int:
    """How many numbers a sum over the classes of one sample takes in at once; 0 if unknown."""
    import torch

    if outputs.device.type != "cpu" or outputs.dtype != torch.float32:
        return 0
    return {"AVX512": 16, "AVX2": 8}.get(torch.backends.cpu.get_cpu_capability(), 0)


def _squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    squares = (outputs - targets) ** 2
    return squares if squares.dim() == 1 else squares.flatten(1).mean(dim=1)


_BUILT_IN: dict[str, Loss] = {"cross_entropy": _cross_entropy, "mse": _squared_error}


@dataclass(frozen=True)
class Task:
    """A loss and metrics, for data of one kind. `build_task` makes one.

    Args:
        loss: The loss of each sample.
        classes: Number of classes; None for regression.
        metrics: Further metrics of the test data by name.

    Example:
        >>> import torch
        >>> task = build_task("mse", classes=None)
        >>> task.losses(torch.tensor([[1.0], [2.0]]), torch.tensor([1.0, 4.0]))
        tensor([0., 4.])
    """

    loss: Loss
    classes: int | None
    metrics: Mapping[str, Metric] = field(default_factory=dict)

    @property
    def is_cross_entropy(self) -> bool:
        """Whether the loss is the built-in one, whose gradient a trainer may have by hand."""
        return self.loss is _cross_entropy

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """(n,) the loss of each sample. Raises FedcorError for a loss of another shape."""
        outputs = self.shaped(outputs, targets)
        # Without this check, torch would broadcast, or fail on a label larger than the last score.
        wanted = tuple(outputs.shape)
        if self.loss is _cross_entropy:
            wanted = (len(targets), self.classes or 0)
        elif self.loss is _squared_error:
            wanted = tuple(targets.shape)
        if tuple(outputs.shape) != wanted:
            raise FedcorError(
                f"the model must give outputs of shape {wanted} for {len(targets)} samples, but "
                f"gave {tuple(outputs.shape)}"
            )
        losses = self.loss(outputs, targets)
        shape = getattr(losses, "shape", None)
        if shape != targets.shape[:1]:
            got = type(losses).__name__ if shape is None else f"the shape {tuple(shape)}"
            raise FedcorError(
                f"the loss must give one number per sample, so the shape ({len(targets)},), but "
                f'gave {got}; a loss of torch does so with reduction="none"'
            )
        return losses

    def mean_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """() the mean loss of a batch, to differentiate."""
        if self.is_cross_entropy:  # in one step: a mean of the losses may differ in its last bit
            from torch.nn import functional

            return functional.cross_entropy(outputs, targets)
        return self.losses(outputs, targets).mean()

    def predictions(self, outputs: Tensor) -> Tensor | None:
        """(n,) the class that each sample is given; None unless outputs are (n, classes) scores."""
        if self.classes is None or outputs.dim() != 2 or outputs.shape[1] != self.classes:
            return None
        return outputs.argmax(dim=1)

    def shaped(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The outputs; in regression, (n, 1) outputs of (n,) targets become (n,)."""
        if self.classes is None and outputs.shape == (*targets.shape, 1):
            return outputs.squeeze(-1)
        return outputs

    def measure(self, targets: Array, outputs: Array) -> dict[str, float]:
        """Each metric of the test data. Raises FedcorError for one that fails."""
        return {name: _measured(name, m, targets, outputs) for name, m in self.metrics.items()}


def _measured(name: str, metric: Metric, targets: Array, outputs: Array) -> float:
    shapes = f"targets of shape {targets.shape} and outputs of shape {outputs.shape}"
    with blame(f"the metric {name} failed on {shapes}"):
        value = metric(targets, outputs)
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise FedcorError(
            f"the metric {name} must give a number, but gave a {type(value).__name__}"
        ) from error


def build_task(
    loss: str | Loss | None = None,
    metrics: Mapping[str, MetricSetting] | None = None,
    *,
    classes: int | None,
) -> Task:
    """The task of a user's loss and metrics on data with `classes`.

    Args:
        loss: "cross_entropy", "mse", the name of an entry point, `module:function`, or a function
            `(outputs, targets) -> (n,)`. None: cross entropy for labels, else mean squared error.
        metrics: name -> a function `(targets, outputs) -> float`, `module:function`, or the name of
            an entry point; or a pair of one of these and "lower" or "higher", whichever is better.
        classes: Number of classes; None for regression.

    Raises:
        ConfigError: There is no such loss or metric, or the loss does not fit the data.

    Example:
        >>> build_task(classes=10).is_cross_entropy
        True
    """
    if loss is None:
        loss = "mse" if classes is None else "cross_entropy"
    found = find_loss(loss)
    if classes is None and found is _cross_entropy:
        allowed = "needs labels, which are whole numbers or texts, but the targets are floats"
        raise ConfigError("loss", loss, allowed)
    if classes is not None and found is _squared_error:
        allowed = "needs targets of type float, but they are labels: give y.astype(float)"
        raise ConfigError("loss", loss, allowed)
    return Task(found, classes, find_metrics(metrics or {}))


def find_loss(loss: str | Loss) -> Loss:
    """The loss as a function. Raises ConfigError about `loss` if there is none such."""
    if isinstance(loss, str) and loss in _BUILT_IN:
        return _BUILT_IN[loss]
    found: Loss = _function("loss", loss, "fedcor.losses", tuple(_BUILT_IN))
    return found


def find_metrics(metrics: Mapping[str, MetricSetting]) -> dict[str, Metric]:
    """The metrics as functions. Raises ConfigError about `metrics` if there is none such.

    Example:
        >>> list(find_metrics({"r2": "sklearn.metrics:r2_score"}))
        ['r2']
    """
    if not hasattr(metrics, "items"):
        allowed = 'must be a dictionary of names and functions, such as {"f1": macro_f1}'
        raise ConfigError("metrics", metrics, allowed)
    return {str(name): _metric(str(name), given)[1] for name, given in metrics.items()}


def describe_metrics(metrics: Mapping[str, MetricSetting]) -> dict[str, Any]:
    """What a record says of metrics: the function; with its direction, if there is one.

    Example:
        >>> describe_metrics({"mae": ("sklearn.metrics:mean_absolute_error", "lower")})
        {'mae': {'function': 'sklearn.metrics:mean_absolute_error', 'better': 'lower'}}
    """
    described = {}
    for name, setting in metrics.items():
        given, _, better = _metric(str(name), setting)
        function = describe(given)
        described[str(name)] = {"function": function, "better": better} if better else function
    return described


def _metric(name: str, setting: Any) -> tuple[Any, Metric, str | None]:
    """A metric as it was given, its function, and which direction is better; None if unsaid."""
    key, better = f"metrics.{name}", None
    where = key
    if isinstance(setting, Mapping):
        if set(setting) != {"function", "better"}:
            allowed = 'must be a table of function and better, {function = "m:f", better = "lower"}'
            raise ConfigError(key, dict(setting), allowed)
        setting, better, where = setting["function"], setting["better"], f"{key}.better"
    elif isinstance(setting, tuple | list):
        if len(setting) != 2:
            allowed = 'must be a function, or a pair of one and "lower" or "higher"'
            raise ConfigError(key, setting, allowed)
        setting, better = setting
    if better not in (None, "lower", "higher"):
        allowed = 'the direction that is better must be "lower" or "higher"'
        raise ConfigError(where, better, allowed)
    function = _function(key, setting, "fedcor.metrics")
    declared = getattr(function, "greater_is_better", None)
    if better is None and declared is not None:
        if not isinstance(declared, bool):
            raise ConfigError(f"{key}.greater_is_better", declared, "must be True or False")
        better = "higher" if declared else "lower"
    known = {"accuracy": "higher", "loss": "lower"}.get(name, better)
    if better != known and better is not None:
        raise ConfigError(key, better, f"{known} is better of {name}: choose another name")
    return setting, function, better


def _function(key: str, given: Any, group: str, built_in: tuple[str, ...] = ()) -> Any:
    """The function that `given` is, or names."""
    if isinstance(given, str):
        points = entry_points(group=group, name=given)
        if points:
            given = next(iter(points)).value
        elif ":" not in given:
            names = [*built_in, *sorted(point.name for point in entry_points(group=group))]
            known = f"must be one of {', '.join(names)}, or " if names else "must be "
            raise ConfigError(key, given, f"{known}module:function", suggest(given, names))
        found = load_object(given, key)
    else:
        found = given
    if not callable(found):
        raise ConfigError(key, given, "must be a function, or name one as module:function")
    return found


# Options of the built-in models, so that settings are checked without torch. A test holds them
# equal to the signatures of the factories in `fedcor.simulation.engine.models`.
MODEL_OPTIONS: dict[str, tuple[str, ...]] = {
    "mlp": ("hidden", "dropout"),
    "cnn": ("channels", "dense"),
    "logistic": (),
}


def check_model_options(name: str, options: Mapping[str, Any]) -> None:
    """Raises ConfigError for an unknown model, or for options that its factory does not take.

    Args:
        name: a built-in model, or the user's `module:factory`, which is imported.
        options: what the factory is to be called with, beside shape and number of classes.
    """
    known = MODEL_OPTIONS.get(name)
    if known is None:
        load_model_factory(name)
        known = _option_names(_named(name))
    if known is not None:
        check_keys(options, list(known))


def load_model_factory(given: Any) -> Callable[..., Any]:
    """A user's model as a factory, to be called as factory(shape, classes, **options).

    Args:
        given: `module:factory`; or a function or class, called with shape and number of classes
            unless it needs nothing, such as `lambda: MyModule()`; or a module, which is copied.
    """
    factory = _named(given) if isinstance(given, str) else given
    if callable(getattr(factory, "state_dict", None)) and not isinstance(factory, type):
        return lambda *_: copy.deepcopy(factory)
    if not callable(factory):
        raise ConfigError("name", given, "must be a function or class that makes a module")
    if _needs_nothing(factory):
        return lambda _shape, _classes, **options: factory(**options)
    return cast(Callable[..., Any], factory)


def _named(name: str) -> Any:
    if ":" not in name:
        allowed = f"must be one of {', '.join(MODEL_OPTIONS)}, or module:factory"
        raise ConfigError("name", name, allowed, suggest(name, MODEL_OPTIONS))
    return load_object(name, "name")


def _needs_nothing(factory: Callable[..., Any]) -> bool:
    """Whether a factory can be called without anything, so without shape and classes."""
    try:
        inspect.signature(factory).bind()
    except (TypeError, ValueError):  # some callables written in C have no signature
        return False
    return True


def _option_names(factory: Any) -> tuple[str, ...] | None:
    """The options that a factory takes; None if it takes any, or does not say."""
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return tuple(parameters)[0 if _needs_nothing(factory) else 2 :]
