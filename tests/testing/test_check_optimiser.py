"""The conformance suite of federated optimisers: it passes right ones, and catches each mistake."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest

import fedcor
from fedcor.testing import check_optimiser


@dataclass(frozen=True)
class Memory:
    """Right: remembers each client's last update, and corrects by it."""

    weighted: bool = True
    needs_updates: bool = True
    extra_down: int = 1

    def init(self, population, model):
        return {"count": np.array(population.count), "total": np.zeros(len(model))}

    def step(self, state, delivery):
        new = {f"update/{k}": u for k, u in zip(delivery.clients, delivery.updates, strict=True)}
        zero = np.zeros_like(delivery.model)
        change = sum(new[key] - state.get(key, zero) for key in new)
        total = state["total"] + change
        model = delivery.model + (total / state["count"]).astype(delivery.model.dtype)
        return model, {**state, **new, "total": total}

    def corrections(self, state, clients):
        zero = np.zeros(len(state["total"]))
        return np.stack([state.get(f"update/{k}", zero) for k in clients.tolist()])

    def join(self, state, population):
        return {**state, "count": np.array(population.count)}


@pytest.mark.parametrize(
    "optimiser",
    [fedcor.FedAvg(), fedcor.FedAvg(weighted=True), fedcor.FedProx(), Memory()],
    ids=str,
)
def test_right_ones_pass(optimiser):
    check_optimiser(optimiser)


def variant(**changes):
    """`Memory` with other fields, methods or attributes."""
    names = {field.name for field in dataclasses.fields(Memory)}
    methods = {name: value for name, value in changes.items() if name not in names}
    made = dataclasses.dataclass(frozen=True)(type("Mine", (Memory,), methods))
    return made(**{name: value for name, value in changes.items() if name in names})


def changing(after):
    """A step as that of `Memory`, and then `after(state, delivery, model, new state)`."""

    def step(self, state, delivery):
        model, new = Memory.step(self, state, delivery)
        return after(state, delivery, model, new)

    return step


def init_counting():
    calls = []

    def init(self, population, model):
        calls.append(1)
        return {**Memory.init(self, population, model), "calls": np.array(len(calls))}

    return init


def init_by_size(self, population, model):
    with np.errstate(divide="ignore"):
        return {
            **Memory.init(self, population, model),
            "pace": np.array((1.0 / population.sizes).max()),
        }


def init_writing(self, population, model):
    model[0] = 1.0
    return Memory.init(self, population, model)


def step_hidden():
    """Remembers outside of the state; a repeated call gives the same."""
    seen = set()

    def after(state, delivery, model, new):
        seen.add((delivery.round, delivery.clients.tobytes()))
        return model + np.float32(len(seen)), new

    return changing(after)


def step_random():
    rng = np.random.default_rng()
    return changing(lambda state, delivery, model, new: (model + rng.standard_normal(6), new))


def step_marked():
    """What it knows of an array is lost in a checkpoint."""

    class Marked(np.ndarray):
        pass

    def after(state, delivery, model, new):
        marked = isinstance(state["total"], Marked)
        return model + float(marked), {**new, "total": new["total"].view(Marked)}

    return changing(after)


def writing_state(state, delivery, model, new):
    state["total"][:] = new["total"]
    return model, new


def adding_to_state(state, delivery, model, new):
    state["more"] = np.zeros(1)
    return model, new


def writing_delivery(state, delivery, model, new):
    delivery.mean[:] = 0.0
    return model, new


def dividing(state, delivery, model, new):
    """Not finite where the updates are zero."""
    with np.errstate(all="ignore"):
        return model + delivery.mean / np.linalg.norm(delivery.mean), new


def by_company(self, state, clients):
    return Memory.corrections(self, state, clients) / len(clients)


def corrections_writing(self, state, clients):
    state["total"][0] += 1.0
    return Memory.corrections(self, state, clients)


def corrections_random():
    rng = np.random.default_rng()
    return lambda self, state, clients: rng.standard_normal((len(clients), 6))


def join_writing(self, state, population):
    state["count"][...] = population.count
    return state


def join_counting():
    calls = []

    def join(self, state, population):
        calls.append(1)
        return {**state, "count": np.array(population.count), "calls": np.array(len(calls))}

    return join


def join_growing(self, state, population):
    """Expects that somebody joins: the new sizes of those who are there are dropped."""
    grown = np.array(population.count)
    return {**state, "count": grown} if population.count > state["count"] else None


MISTAKES = {
    "not an object": (lambda: Memory, "this is a class"),
    "short form": (lambda: variant(step=None, aggregate=min), "short form"),
    "not frozen": (lambda: dataclasses.make_dataclass("Mine", [], bases=())(), "init and step"),
    "weighted": (lambda: variant(weighted=1), "weighted = 1: must be true"),
    "proximal": (lambda: variant(proximal=-0.5), "proximal = -0.5: must be"),
    "proximal is no number": (lambda: variant(proximal="strong"), "proximal = 'strong'"),
    "proximal is infinite": (lambda: variant(proximal=np.inf), "proximal = inf"),
    "extra_up": (lambda: variant(extra_up=0.5), "extra_up = 0.5"),
    "init changes": (lambda: variant(init=init_counting()), "init returned something else"),
    "init writes": (lambda: variant(init=init_writing), "init wrote into what it was given"),
    "init is no mapping": (lambda: variant(init=lambda *_: None), "init returned the state None"),
    "names": (lambda: variant(init=lambda *_: {3: np.zeros(1)}), "the name 3, not a text"),
    "a state of objects": (
        lambda: variant(init=lambda *_: {"x": np.array([None])}),
        "holds Python objects",
    ),
    "a number in the state": (
        lambda: variant(step=changing(lambda s, d, model, new: (model, {**new, "n": 3}))),
        "'n' is a int, not a NumPy array",
    ),
    "no state": (lambda: variant(step=changing(lambda s, d, model, new: model)), "not .model, st"),
    "hidden memory": (lambda: variant(step=step_hidden()), "tried and dropped"),
    "random": (lambda: variant(step=step_random()), "step returned something else"),
    "lost in a checkpoint": (lambda: variant(step=step_marked()), "went through a checkpoint"),
    "writes the state": (
        lambda: variant(step=changing(writing_state)),
        "step changed the state in place",
    ),
    "adds to the state": (
        lambda: variant(step=changing(adding_to_state)),
        "step changed the state in place",
    ),
    "writes the delivery": (
        lambda: variant(step=changing(writing_delivery)),
        "step wrote into what it was given",
    ),
    "not finite": (lambda: variant(step=changing(dividing)), "round 4: step .* not finite"),
    "nobody is excluded": (
        lambda: variant(
            init=init_by_size,
            step=changing(lambda s, d, model, new: (model + s["pace"], new)),
        ),
        "round 0: step .* not finite",
    ),
    "shape": (
        lambda: variant(step=changing(lambda s, d, model, new: (model[None], new))),
        r"shape \(1, 6\), not \(6,\)",
    ),
    "a list": (
        lambda: variant(step=changing(lambda s, d, model, new: (model.tolist(), new))),
        "returned a list",
    ),
    "whole numbers": (
        lambda: variant(step=changing(lambda s, d, model, new: (model.astype(int), new))),
        "of type int64, not floats",
    ),
    "reads updates": (lambda: variant(needs_updates=False), "declare needs_updates = True"),
    "shape of corrections": (
        lambda: variant(corrections=lambda self, state, clients: np.zeros(6)),
        "corrections returned an array of shape",
    ),
    "no corrections": (lambda: variant(corrections=lambda *_: None), "returned a NoneType"),
    "corrections by company": (
        lambda: variant(corrections=by_company),
        "depends on who trains beside it",
    ),
    "corrections that write": (
        lambda: variant(corrections=corrections_writing),
        "corrections changed the state in place",
    ),
    "random corrections": (
        lambda: variant(corrections=corrections_random()),
        "corrections returned something else",
    ),
    "clients cannot join": (lambda: variant(join=None), "give it `join`"),
    "join writes": (lambda: variant(join=join_writing), "join changed the state in place"),
    "join changes": (lambda: variant(join=join_counting()), "join returned something else"),
    "join expects more clients": (
        lambda: variant(join=join_growing),
        "join returned the state None",
    ),
    "join is no mapping": (lambda: variant(join=lambda *_: None), "join returned the state None"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_caught(mistake):
    make, message = MISTAKES[mistake]
    with pytest.raises(AssertionError, match=message):
        check_optimiser(make())


def test_one_that_is_not_frozen_is_refused():
    class Mine(fedcor.FedAvg.__mro__[-1]):
        init, step = fedcor.FedAvg.init, fedcor.FedAvg.step

    for made in (Mine(), dataclasses.dataclass(Mine)()):
        with pytest.raises(AssertionError, match="frozen dataclass"):
            check_optimiser(made)


def test_another_error_of_the_optimiser_is_its_own():
    def failing(self, state, delivery):
        raise ValueError("something of mine")

    with pytest.raises(ValueError, match="something of mine"):
        check_optimiser(variant(step=failing))
