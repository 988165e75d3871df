"""The short form of a user's own optimiser: a method `aggregate` on tensors of torch, no state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedcor.types import Array, Delivery, Population, State

__all__ = ["ShortForm"]


@dataclass(frozen=True)
class ShortForm:
    """An object with `aggregate(model, results, weights)` as an `Optimiser`.

    `model` is (P,) w^t and `results` are (m, P) the clients' models after local training, both
    float32 tensors; `weights` is a NumPy array (m,) that sums to 1. It returns (P,) the next model.

    Args:
        short_form: The object. Its attributes `weighted` and `proximal` are kept; what it does not
            have is as in `FedAvg()`.

    Example:
        >>> class HalfStep:  # goes half of the way to the clients' mean
        ...     def aggregate(self, model, results, weights):
        ...         return model + 0.5 * (results.mean(dim=0) - model)
        >>> ShortForm(HalfStep()).weighted
        False
    """

    short_form: Any

    needs_updates = True  # it is given every client's model

    @property
    def weighted(self) -> bool:
        """Whether a client's weight in the mean is proportional to its data."""
        return bool(getattr(self.short_form, "weighted", False))

    @property
    def proximal(self) -> float:
        """mu of the proximal term in local training; 0 for none."""
        return float(getattr(self.short_form, "proximal", 0.0))

    def init(self, population: Population, model: Array) -> State:  # noqa: ARG002
        """Nothing is remembered."""
        return {}

    def step(self, state: State, delivery: Delivery) -> tuple[Array, State]:
        """What `aggregate` returns, as a NumPy array."""
        import torch  # settings name an optimiser before anything is trained: not needed there

        # Copies: tensors cannot be read-only.
        model = torch.from_numpy(delivery.model.copy())
        results = model + torch.from_numpy(delivery.updates.copy())
        answer = self.short_form.aggregate(model, results, delivery.weights)
        tensor = isinstance(answer, torch.Tensor)
        return answer.detach().cpu().numpy() if tensor else answer, state
