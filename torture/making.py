"""Bad input from a seeded generator: settings, JSON, bytes and arrays."""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedcor.optimisers import optimiser_names
from fedcor.selectors import selector_names

KEYS = (
    *("name", "selector", "target_accuracy", "data.name", "data.holdout", "data.noisy_clients"),
    *("partition.kind", "partition.clients", "partition.shards_per_client", "partition.alpha"),
    *(
        "partition.minimum_size",
        "partition",
        "model",
        "model.name",
        "model.hidden",
        "tags",
        "rules",
    ),
    *("model.dropout", "training.rounds", "training.clients_per_round", "training.batch_size"),
    *("training.local_steps", "training.learning_rate", "training.milestones", "training.factor"),
    *("training.weight_decay", "training.device", "training.loss", "optimiser", "optimiser.name"),
    *("optimiser.weighted", "faults", "faults.dropout", "faults.availability", "faults.stragglers"),
    *("selectors", "selectors.fedcor", "selectors.fedcor.warmup", "selectors.fedcor.interval"),
    *("selectors.fedcor.dimension", "selectors.fedcor.discount", "selectors.fedcor.noise"),
    *("selectors.complement.sketch", "metrics", "metrics.a", "training", "data", "tags.a.b"),
    *("rules.eligible", "rules.at_least", "rules.at_most", "optimiser.beta", "optimiser.trim"),
)
VALUES = (
    *("0", "-1", "1", "true", '""', "[]", "{}", "nan", "inf", "-inf", "1e308", "1e-308", "[1]"),
    *("2147483648", "9223372036854775807", "9" * 30, "9" * 400, "9" * 5000, "1e400", "-0.0"),
    *('"a\\u0000"', '"~x/y"', "'os:getcwd'", "'math:sin'", "'no:such'", "1979-05-27", "0.5"),
    *("[[1]]", "{a=1}", '["a"]', "'mlp'", "'cuda:9'", "'iid'", "'dirichlet'", "'../x'", "3"),
    *("'/etc/passwd'", "'x.npz'", "'\\e[2J'", "'[/b]'", '"a\\nb"', "[" * 900 + "]" * 900),
    *("{a={b=[1]}}", '{a="0-9"}', "'0-3, 7'", "'9-1'", "'full'"),
)


class Maker:
    """Makes bad input; the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        names = [*selector_names(), *optimiser_names()]
        self._values = [*VALUES, *(f"'{name}'" for name in names)]

    def pick(self, choices: Sequence[Any]) -> Any:
        """One of several."""
        return choices[int(self.rng.integers(len(choices)))]

    def text(self, most: int = 12) -> str:
        """Printable characters, and now and then others."""
        size = int(self.rng.integers(most + 1))
        if self.rng.random() < 0.8:
            return "".join(self.pick(string.printable) for _ in range(size))
        points = self.rng.integers(1, 0x10FFFF, size)
        return "".join(chr(point) for point in points if not 0xD800 <= point < 0xE000)

    def value(self) -> str:
        """A value as one types it."""
        kind = self.rng.random()
        if kind < 0.7:
            return str(self.pick(self._values))
        if kind < 0.8:
            return self.text()
        if kind < 0.9:
            return str(int(self.rng.integers(-(2**62), 2**62)) >> int(self.rng.integers(62)))
        return str(float(np.ldexp(self.rng.standard_normal(), int(self.rng.integers(-900, 900)))))

    def change(self) -> str:
        """What one gives to --set."""
        kind = self.rng.random()
        if kind < 0.85:
            return f"{self.pick(KEYS)}={self.value()}"
        return self.text(15) if kind < 0.92 else f"{self.text(8)}={self.value()}"

    def json(self, depth: int = 2) -> Any:
        """Any value of JSON."""
        kind = int(self.rng.integers(9 if depth else 7))
        if kind == 7:
            return [self.json(depth - 1) for _ in range(self.rng.integers(3))]
        if kind == 8:
            return {self.text(6): self.json(depth - 1) for _ in range(self.rng.integers(3))}
        special = (
            10**400,
            -1,
            2**63,
            1e308,
            "__main__:X",
            float("inf"),
            float("nan"),
            0,
            "",
            {},
            [],
        )
        choices = (None, True, float(self.rng.normal()), self.text(), self.pick(special))
        return self.pick((*choices, int(self.rng.integers(-9, 9))))

    def spoil_json(self, tree: Any) -> Any:
        """The tree with some of its values replaced by anything, or removed."""
        copy = json.loads(json.dumps(tree))
        for _ in range(int(self.rng.integers(1, 4))):
            here = copy
            while True:
                places = list(here) if isinstance(here, dict) else list(range(len(here)))
                if not places:
                    break
                place = self.pick(places)
                if isinstance(here[place], dict | list) and self.rng.random() < 0.7:
                    here = here[place]
                    continue
                if self.rng.random() < 0.8:
                    here[place] = self.json()
                else:
                    del here[place]
                break
        return copy

    def spoil(self, content: bytes, near_ends: int = 600) -> bytes:
        """The bytes with some of them changed, cut, moved, repeated or removed."""
        found = bytearray(content)
        for _ in range(int(self.rng.integers(1, 5))):
            if not found:
                break
            size, near = len(found), self.rng.random()
            place = int(self.rng.integers(size))
            if near < 0.6:  # most of what can go wrong is in headers, at both ends
                place = int(self.rng.integers(min(size, near_ends)))
                place = place if near < 0.3 else size - 1 - place
            end = place + int(self.rng.integers(1, 200))
            match int(self.rng.integers(7)):
                case 0 | 1:
                    found[place] = int(self.rng.integers(256))
                case 2:
                    del found[place:]
                case 3:
                    del found[place:end]
                case 4:
                    found[place:end] = bytes(len(found[place:end]))
                case 5:
                    found[place:place] = found[place:end]
                case _:
                    found[place:end] = b"\xff" * len(found[place:end])
        return bytes(found)
