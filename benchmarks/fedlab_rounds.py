"""Given rounds of an experiment in FedLab, with its classes for standalone simulation.

    python -m benchmarks.fedlab_rounds PRESET SEED FOLDER

FOLDER has the model to start from (model.npy) and the rounds (plan.json); packages.py writes both.
The trainer, the server, the pipeline, the data set and the evaluation are FedLab's. What its users
have to add is added: which batches a client's loader gives, weight decay, whom the server samples
(given, so that the work is the same as ours), and what is evaluated.
"""

from __future__ import annotations

import json
import sys
import time
import types
from importlib.metadata import version
from pathlib import Path
from typing import Any

try:
    import torchvision  # noqa: F401
except Exception:  # absent, or for another build of torch: FedLab only names it in its data sets
    for name in ("torchvision", "torchvision.datasets", "torchvision.transforms"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["torchvision"].__dict__.update(
        datasets=sys.modules["torchvision.datasets"],
        transforms=sys.modules["torchvision.transforms"],
    )

import numpy as np
import torch
from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.contrib.dataset.basic_dataset import BaseDataset, FedDataset
from fedlab.core.standalone import StandalonePipeline
from fedlab.utils.functional import evaluate
from fedlab.utils.serialization import SerializationTool
from torch import nn
from torch.utils.data import DataLoader, Subset

from fedcor.simulation.build import build_simulation, use_one_thread
from fedcor.simulation.engine.engine import Engine
from fedcor.simulation.engine.models import ClientDropout
from fedcor.simulation.engine.train import Assignment
from fedcor.simulation.experiment_files import load_experiment


class Clients(FedDataset):
    """The clients' data. A loader gives the batches of the round, and sets its dropout masks."""

    def __init__(self, engine: Engine, module: nn.Module, seed: int) -> None:
        x, y, self.rows = engine.store.training(range(engine.population.count))
        self.data, self.engine, self.seed = BaseDataset(x, y), engine, seed
        self.dropouts = [m for m in module.modules() if isinstance(m, ClientDropout)]
        self.round = 0

    def get_dataset(self, id: int, type: str = "train") -> Subset:  # noqa: ARG002
        return Subset(self.data, self.rows[id].tolist())

    def get_dataloader(self, id: int, batch_size: int, type: str = "train") -> DataLoader:
        if type == "all":
            return DataLoader(self.get_dataset(id), batch_size=len(self.rows[id]))
        steps = self.engine.local_training.local_steps
        work = Assignment(id, self.round, self.seed, self.rows[id], steps)
        for layer in self.dropouts:
            layer.stream = work.dropout_stream()
        for layer in self.dropouts[1:]:
            layer.stream = self.dropouts[0].stream  # one stream for all layers of a client
        return DataLoader(self.data, batch_sampler=[b.tolist() for b in work.batches(batch_size)])


class Trainer(SGDSerialClientTrainer):
    """FedLab's, with weight decay."""

    def setup_optim(self, epochs: int, batch_size: int, lr: float, decay: float = 0.0) -> None:
        super().setup_optim(epochs, batch_size, lr)
        self.optimizer = torch.optim.SGD(self._model.parameters(), lr, weight_decay=decay)


class Server(SyncServerHandler):
    """FedLab's, with the clients of our run."""

    chosen: list[int]

    def sample_clients(self) -> list[int]:
        return self.chosen


class Pipeline(StandalonePipeline):
    """FedLab's loop; after each round, the test and what is asked of all clients."""

    def __init__(self, handler: Server, trainer: Trainer, plan: list[Any], test: DataLoader):
        super().__init__(handler, trainer)
        self.plan, self.test_loader = plan, test
        self.seconds: list[float] = []
        self.test_losses: list[float] = []
        self.next_round()

    def next_round(self) -> None:
        done = len(self.seconds)
        self.started = time.process_time()
        if done < len(self.plan):
            self.handler.chosen = self.plan[done]["chosen"]
            self.trainer.dataset.round = self.plan[done]["number"]
            for group in self.trainer.optimizer.param_groups:
                group["lr"] = self.plan[done]["learning_rate"]

    def evaluate(self) -> None:
        model, criterion = self.handler.model, nn.CrossEntropyLoss()
        dataset = self.trainer.dataset
        for _ in range(self.plan[len(self.seconds)]["evaluations"]):
            for client in range(self.trainer.num_clients):
                evaluate(model, criterion, dataset.get_dataloader(client, 0, "all"))
        total, _ = evaluate(model, criterion, self.test_loader)
        self.test_losses.append(total / len(self.test_loader))
        self.seconds.append(time.process_time() - self.started)
        self.next_round()


def main(preset: str, seed: int, folder: Path) -> None:
    use_one_thread()
    engine = build_simulation(load_experiment(preset, selector="random"), seed).engine
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    module, training = engine.module, engine.local_training
    start = torch.from_numpy(np.load(folder / "model.npy"))
    SerializationTool.deserialize_model(module, start)
    clients = engine.population.count
    handler = Server(module, len(plan), len(plan[0]["chosen"]) / clients)  # it copies the module
    trainer = Trainer(module, clients)
    trainer.setup_dataset(Clients(engine, trainer.model, seed))
    trainer.setup_optim(1, training.batch_size, training.learning_rate, training.weight_decay)
    test = DataLoader(BaseDataset(engine._test_x, engine._test_y), batch_size=1000)
    pipeline = Pipeline(handler, trainer, plan, test)
    pipeline.main()
    done = {"seconds": pipeline.seconds, "test_losses": pipeline.test_losses}
    print(json.dumps({**done, "version": version("fedlab")}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
