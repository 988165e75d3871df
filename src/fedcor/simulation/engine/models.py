"""Models and the batches they take: built-in and users' models, a model as one flat vector.

A *batch* is a tensor, or a dictionary of tensors, whose first dimension counts the samples. A
module is called as `module(batch)` with either.

Outside a module, a *model* is a float32 vector of P numbers: its parameters in order, then its
floating-point buffers (such as the running means of batch normalisation), which are averaged like
parameters but have no gradient.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from fedcor.core.config import check_at_least, check_counts
from fedcor.core.errors import ConfigError, FedcorError
from fedcor.core.rng import stream_seed
from fedcor.core.types import Array
from fedcor.data.datasets import Dataset
from fedcor.data.own_samples import Samples
from fedcor.simulation.tasks import Task, build_task, load_model_factory

Batch: TypeAlias = Tensor | dict[str, Tensor]
# A user's model: a factory, or a module. See `build_model`.
Model: TypeAlias = Callable[..., nn.Module] | nn.Module
Shape: TypeAlias = Sequence[int] | Mapping[str, tuple[int, ...]]


def as_tensor(array: Array) -> Tensor:
    """`array` as a tensor that shares its memory; nobody writes to it."""
    with warnings.catch_warnings():  # data that may only be read is welcome
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def as_batch(samples: Samples) -> Batch:
    """The samples of a data set as tensors that share their memory."""
    if isinstance(samples, Mapping):
        return {name: as_tensor(array) for name, array in samples.items()}
    return as_tensor(samples)


def transformed(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """`change` of every tensor."""
    if isinstance(batch, Tensor):
        return change(batch)
    return {name: change(tensor) for name, tensor in batch.items()}


def rows_of(batch: Batch, rows: Tensor | slice) -> Batch:
    """Some of the samples: those that `rows` numbers, or a slice of them."""
    return transformed(batch, lambda tensor: tensor[rows])


def tensors_of(batch: Batch) -> dict[str, Tensor]:
    """The tensors of a batch by name; a single tensor has the name ""."""
    return {"": batch} if isinstance(batch, Tensor) else batch


def size_of(batch: Batch) -> int:
    """The number of samples."""
    return len(next(iter(tensors_of(batch).values())))


def outputs_of(result: Any) -> Tensor:
    """What a module returned, as a tensor: itself, or its `.logits`, as in Hugging Face's."""
    found = result if isinstance(result, Tensor) else getattr(result, "logits", None)
    if not isinstance(found, Tensor):
        raise FedcorError(
            "the model must return a tensor, or an object with a tensor `.logits`, but returned a "
            f"{type(result).__name__}"
        )
    return found


class ClientDropout(nn.Dropout):
    """nn.Dropout with masks from the training client's own stream, not from torch's global one.

    So the masks depend on (seed, round, client) alone, and not on which clients train before or
    together with it.
    """

    stream: np.random.Generator | None = None

    def mask(self, shape: Sequence[int]) -> Tensor:
        """A mask of `shape`: each number is 0 with probability p, else 1 / (1 - p)."""
        if self.stream is None:
            raise RuntimeError("ClientDropout trains only with a client's stream")
        kept = self.stream.random(size=tuple(shape), dtype=np.float32) >= self.p
        return torch.from_numpy(kept.astype(np.float32) * mask_scale(self.p))

    def forward(self, input: Tensor) -> Tensor:
        """`input` times a mask in training, else unchanged."""
        if not self.training or self.p == 0:
            return input
        return input * self.mask(input.shape).to(input.device)


def mask_scale(p: float) -> np.float32:
    """The factor of the numbers that dropout keeps, so that the mean stays the same."""
    return np.float32(1.0 / (1.0 - p) if p < 1 else 0.0)


def mlp(
    shape: Sequence[int], classes: int, hidden: Sequence[int] = (64, 30), dropout: float = 0.5
) -> nn.Module:
    """The paper's MLP. Dropout comes before the ReLU, as in the published implementation.

    Args:
        shape: Shape of a sample; it is flattened.
        classes: Number of classes.
        hidden: Widths of the hidden layers.
        dropout: Probability of dropout in each hidden layer, in [0, 1).
    """
    if not 0.0 <= dropout < 1.0:
        raise ConfigError("dropout", dropout, "must lie in [0, 1)")
    check_counts("hidden", hidden)
    widths = [math.prod(shape), *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.Dropout(dropout), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], classes))


def logistic(shape: Sequence[int], classes: int) -> nn.Module:
    """Logistic regression on the flattened sample."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))


def cnn(
    shape: Sequence[int], classes: int, channels: Sequence[int] = (32, 64, 64), dense: int = 64
) -> nn.Module:
    """The paper's CNN: three 3x3 convolutions without padding, then a dense layer.

    A 2x2 max-pooling and a ReLU follow each of the first two convolutions, a ReLU the third.

    Args:
        shape: Shape of a sample: channels, height, width.
        classes: Number of classes.
        channels: Output channels of the three convolutions.
        dense: Width of the dense layer.
    """
    if len(shape) != 3:
        allowed = f"needs images (channels, height, width), but a sample has shape {tuple(shape)}"
        raise ConfigError("name", "cnn", allowed)
    check_counts("channels", channels)
    check_at_least("dense", dense, 1)
    first, second, third = channels
    features = nn.Sequential(
        nn.Conv2d(shape[0], first, 3), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(first, second, 3), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(second, third, 3), nn.ReLU(),
        nn.Flatten(),
    )  # fmt: skip
    width = features(torch.zeros(1, *shape)).shape[1]
    return nn.Sequential(*features, nn.Linear(width, dense), nn.ReLU(), nn.Linear(dense, classes))


MODELS: dict[str, Callable[..., nn.Module]] = {"mlp": mlp, "cnn": cnn, "logistic": logistic}


def count_parameters(
    name: str | Model, shape: Shape, classes: int, options: Mapping[str, Any] | None = None
) -> int:
    """How many parameters a built-in model has, counted without memory for them.

    0 for a user's model, and for one that cannot be built: `build_model` says why.
    """
    if not isinstance(name, str) or name not in MODELS:
        return 0
    try:
        with torch.device("meta"):
            module = MODELS[name](shape, classes, **(options or {}))
    except Exception:
        return 0
    return sum(parameter.numel() for parameter in module.parameters())


def build_model(
    name: str | Model,
    shape: Shape,
    classes: int,
    seed: int,
    options: Mapping[str, Any] | None = None,
    *,
    data: Dataset | None = None,
    task: Task | None = None,
) -> nn.Module:
    """A model with its initial weights, drawn from the stream (seed, "weights").

    Torch's global stream is left as it was. nn.Dropout layers become `ClientDropout`.

    Args:
        name: "mlp", "cnn", "logistic", or a user's `module:factory`, which is called as
            `factory(shape, classes, **options)`. Or an object: such a factory; a class or function
            that needs no arguments, such as `lambda: MyModule()`; or a module, which is copied, so
            that its weights are the initial ones for every seed.
        shape: Shape of a sample, or a dictionary of shapes (`Dataset.shape`).
        classes: Number of outputs (`Dataset.outputs`): of classes, or of targets per sample.
        seed: The seed of the run.
        options: Options of the model by name.
        data: The data, of which the model is tried on two samples; it is not tried without.
        task: What the model is for; the default of the data if it is not given.

    Raises:
        ConfigError: There is no such model, it cannot be built, or it does not fit the data.

    Example:
        >>> build_model(lambda: nn.Linear(4, 3), (4,), 3, seed=1)
        Linear(in_features=4, out_features=3, bias=True)
    """
    built_in = MODELS.get(name) if isinstance(name, str) else None
    factory = built_in or load_model_factory(name)
    if isinstance(shape, Mapping) and built_in:
        inputs = ", ".join(shape)
        allowed = f"takes one array per sample, but the data has {inputs}: give a model of your own"
        raise ConfigError("name", name, allowed)
    name = getattr(name, "__qualname__", None) or str(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream_seed(seed, "weights"))
        try:
            module = factory(shape, classes, **(options or {}))
        except ConfigError:
            raise
        except Exception as error:  # a user's factory may fail in any way
            allowed = f"could not be built for samples of shape {shape}: {error}"
            raise ConfigError("name", name, allowed) from error
        if not isinstance(module, nn.Module):
            allowed = f"must make a torch.nn.Module, but made a {type(module).__name__}"
            raise ConfigError("name", name, allowed)
        if data is not None:
            _check_forward(name, module, data, task or build_task(classes=data.classes))
    return _with_client_dropout(module)


def _check_forward(name: str, module: nn.Module, data: Dataset, task: Task) -> None:
    """Raise ConfigError unless the module gives outputs for two samples that its task can take."""
    training = module.training
    try:
        with torch.no_grad():
            result = module.eval()(rows_of(as_batch(data.test_x), slice(2)))
    except Exception as error:  # a user's module may fail in any way
        allowed = f"cannot take samples of shape {data.shape}: {error}"
        raise ConfigError("name", name, allowed) from error
    module.train(training)
    try:
        task.losses(outputs_of(result), as_tensor(data.test_y)[:2])
    except Exception as error:  # a user's loss may fail in any way
        raise ConfigError("name", name, f"does not fit the loss: {error}") from error


def _with_client_dropout(module: nn.Module) -> nn.Module:
    """Replace every nn.Dropout in `module`, in place."""
    for name, child in module.named_children():
        if type(child) is nn.Dropout:
            setattr(module, name, ClientDropout(child.p))
        else:
            _with_client_dropout(child)
    return module


class ModelVector:
    """The layout of a module's parameters and floating-point buffers in one flat vector.

    Attributes:
        parameters: Shapes of the parameters.
        buffers: Shapes of the floating-point buffers, which follow them.
        trained: Numbers that are parameters.
        size: P, all numbers.
        head: Where the parameters of the output layer are: the last layer that has any.
    """

    def __init__(self, module: nn.Module) -> None:
        self.parameters = [parameter.shape for parameter in module.parameters()]
        self.buffers = [b.shape for b in module.buffers() if b.is_floating_point()]
        self.trained = sum(math.prod(shape) for shape in self.parameters)
        self.size = self.trained + sum(math.prod(shape) for shape in self.buffers)
        own = [sum(p.numel() for p in m.parameters(recurse=False)) for m in module.modules()]
        last = next((numbers for numbers in reversed(own) if numbers), 0)
        self.head = slice(self.trained - last, self.trained)

    @staticmethod
    def _tensors(module: nn.Module) -> list[Tensor]:
        return [*module.parameters(), *(b for b in module.buffers() if b.is_floating_point())]

    def read(self, module: nn.Module) -> Tensor:
        """(P,) the numbers of `module`, a copy."""
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in self._tensors(module)])
        return flat.to(torch.float32)

    def write(self, module: nn.Module, vector: Tensor) -> None:
        """Copy the (P,) numbers of `vector` into `module`."""
        with torch.no_grad():
            for tensor, values in zip(self._tensors(module), self.split(vector), strict=True):
                tensor.copy_(values)

    def split(self, vectors: Tensor) -> list[Tensor]:
        """Views of (..., P) `vectors`: one (..., *shape) for each parameter and buffer.

        Vectors of `trained` numbers are of parameters alone.
        """
        buffers = self.buffers if vectors.shape[-1] > self.trained else []
        shapes = (*self.parameters, *buffers)
        parts = torch.split(vectors, [math.prod(shape) for shape in shapes], dim=-1)
        lead = vectors.shape[:-1]
        return [part.reshape(*lead, *s) for part, s in zip(parts, shapes, strict=True)]
