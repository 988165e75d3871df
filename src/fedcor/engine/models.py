"""The paper's models, logistic regression, and any torch.nn.Module of the user's; a model as one flat vector.

A model travels as a float32 vector of P numbers: its parameters in order, then its floating-point buffers (running means of
a batch normalisation, say), which are averaged like parameters but take no gradient.
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
    """nn.Dropout whose masks come from the training client's own stream, not from torch's global one.

    So the masks depend on (seed, round, client) alone, whoever trains before or beside it, batched or not.
    """

    stream: np.random.Generator | None = None

    def mask(self, shape: Sequence[int]) -> Tensor:
        """0 with probability p, else 1 / (1 - p)."""
        if self.stream is None:
            raise RuntimeError("ClientDropout trains only with a client's stream")
        kept = self.stream.random(size=tuple(shape), dtype=np.float32) >= self.p
        return torch.from_numpy(kept.astype(np.float32) * mask_scale(self.p))

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return input
        return input * self.mask(input.shape).to(input.device)


def mask_scale(p: float) -> np.float32:
    """What a kept number is multiplied by, so that its mean stays."""
    return np.float32(1.0 / (1.0 - p) if p < 1 else 0.0)


def mlp(
    shape: Sequence[int], classes: int, hidden: Sequence[int] = (64, 30), dropout: float = 0.5
) -> nn.Module:
    """The paper's MLP; dropout stands before the ReLU, as in its published implementation."""
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
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))


def cnn(
    shape: Sequence[int], classes: int, channels: Sequence[int] = (32, 64, 64), dense: int = 64
) -> nn.Module:
    """The paper's CNN: 3x3 convolutions without padding, pooling and ReLU after the first two, ReLU after the third."""
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
    """A model with its initial weights drawn from the stream (seed, "weights"); torch's global stream is left alone."""
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
    """The module takes two samples and gives one score a class for each."""
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
    for name, child in module.named_children():
        if type(child) is nn.Dropout:
            setattr(module, name, ClientDropout(child.p))
        else:
            _with_client_dropout(child)
    return module


class ModelVector:
    """How a module's parameters and floating-point buffers lie in one flat vector."""

    def __init__(self, module: nn.Module) -> None:
        self.parameters = [parameter.shape for parameter in module.parameters()]
        self.buffers = [b.shape for b in module.buffers() if b.is_floating_point()]
        self.trained = sum(
            math.prod(shape) for shape in self.parameters
        )  # numbers that take a gradient
        self.size = self.trained + sum(math.prod(shape) for shape in self.buffers)  # P
        own = [
            sum(p.numel() for p in layer.parameters(recurse=False)) for layer in module.modules()
        ]
        last = next((numbers for numbers in reversed(own) if numbers), 0)
        self.head = slice(self.trained - last, self.trained)  # the last layer that has parameters

    @staticmethod
    def _tensors(module: nn.Module) -> list[Tensor]:
        return [*module.parameters(), *(b for b in module.buffers() if b.is_floating_point())]

    def read(self, module: nn.Module) -> Tensor:  # (P,)
        return torch.cat([tensor.detach().reshape(-1) for tensor in self._tensors(module)]).to(
            torch.float32
        )

    def write(self, module: nn.Module, vector: Tensor) -> None:
        with torch.no_grad():
            for tensor, values in zip(self._tensors(module), self.split(vector), strict=True):
                tensor.copy_(values)

    def split(self, vectors: Tensor) -> list[Tensor]:
        """Views of (..., P) as one (..., *shape) a tensor."""
        parts = torch.split(
            vectors, [math.prod(shape) for shape in (*self.parameters, *self.buffers)], dim=-1
        )
        lead = vectors.shape[:-1]
        return [
            part.reshape(*lead, *s)
            for part, s in zip(parts, (*self.parameters, *self.buffers), strict=True)
        ]
