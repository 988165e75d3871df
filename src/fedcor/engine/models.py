"""The paper's models, logistic regression, users' models; a model as one flat vector.

Everywhere outside a module, a model is a float32 vector of P numbers: its parameters in order, then
its floating-point buffers (such as the running means of batch normalisation), which are averaged
like parameters but have no gradient.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedcor.errors import ConfigError
from fedcor.model_options import load_model_factory
from fedcor.rng import stream_seed

__all__ = ["ClientDropout", "ModelVector", "build_model", "cnn", "logistic", "mlp"]


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
    if any(isinstance(width, bool) or not isinstance(width, int) or width < 1 for width in hidden):
        raise ConfigError("hidden", list(hidden), "must be a list of whole numbers of at least 1")
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
        raise ConfigError(
            "name",
            "cnn",
            f"needs images (channels, height, width), but a sample has shape {tuple(shape)}",
        )
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


def model_factory(name: str) -> Callable[..., nn.Module]:
    """The factory of a built-in model, or the user's `module:factory`."""
    return MODELS[name] if name in MODELS else load_model_factory(name)


def build_model(
    name: str,
    shape: Sequence[int],
    classes: int,
    seed: int,
    options: Mapping[str, Any] | None = None,
) -> nn.Module:
    """A model with its initial weights, drawn from the stream (seed, "weights").

    Torch's global stream is left as it was. nn.Dropout layers become `ClientDropout`.

    Args:
        name: "mlp", "cnn", "logistic", or a user's `module:factory`.
        shape: Shape of a sample.
        classes: Number of classes.
        seed: The seed of the run.
        options: Options of the model by name.

    Raises:
        ConfigError: There is no such model, it cannot be built, or it does not fit the data.
    """
    factory = model_factory(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream_seed(seed, "weights"))
        try:
            module = factory(tuple(shape), classes, **(options or {}))
        except ConfigError:
            raise
        except Exception as error:  # a user's factory may fail in any way
            raise ConfigError(
                "name", name, f"could not be built for samples of shape {tuple(shape)}: {error}"
            ) from error
        if not isinstance(module, nn.Module):
            raise ConfigError(
                "name", name, f"must make a torch.nn.Module, but made a {type(module).__name__}"
            )
        _check_forward(name, module, shape, classes)
    return _with_client_dropout(module)


def _check_forward(name: str, module: nn.Module, shape: Sequence[int], classes: int) -> None:
    """Raise ConfigError unless the module gives one score per class for each of two samples."""
    training = module.training
    try:
        with torch.no_grad():
            scores = module.eval()(torch.zeros(2, *shape))
    except Exception as error:  # a user's module may fail in any way
        raise ConfigError(
            "name", name, f"cannot take samples of shape {tuple(shape)}: {error}"
        ) from error
    if not isinstance(scores, Tensor) or scores.shape != (2, classes):
        got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise ConfigError(
            "name",
            name,
            f"must give scores of shape (batch, {classes}), but two samples gave {got}",
        )
    module.train(training)


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
        """Views of (..., P) `vectors`: one (..., *shape) for each parameter and buffer."""
        shapes = (*self.parameters, *self.buffers)
        parts = torch.split(vectors, [math.prod(shape) for shape in shapes], dim=-1)
        lead = vectors.shape[:-1]
        return [part.reshape(*lead, *s) for part, s in zip(parts, shapes, strict=True)]
