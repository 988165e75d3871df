"""FedLab's standalone pipeline, with clients selected by fedcor."""

import torch
from digits import rows, test_x, test_y, x, y
from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.contrib.dataset.basic_dataset import BaseDataset, FedDataset
from fedlab.core.standalone import StandalonePipeline
from fedlab.utils.functional import evaluate
from torch.utils.data import DataLoader

import fedcor

SELECTOR = None  # the default; or "fedcor", "power_of_choice", fedcor.Oort(4), ...


class Digits(FedDataset):
    def get_dataloader(self, id, batch_size):
        return DataLoader(BaseDataset(x[rows[id]], y[rows[id]]), batch_size, shuffle=True)


class SelectedPipeline(StandalonePipeline):
    def main(self):
        handler, trainer, sizes = self.handler, self.trainer, [len(own) for own in rows]
        rounds = fedcor.Rounds(SELECTOR, handler.model_parameters, sizes=sizes, clients_per_round=4)
        while rounds.number < handler.global_round:
            question = rounds.ask()
            if question.kind == "losses":
                handler.set_model(question.model)
                data = {k: trainer.dataset.get_dataloader(k, sizes[k]) for k in question.clients}
                losses = {k: evaluate(handler.model, trainer.criterion, data[k])[0] for k in data}
                rounds.tell(question, losses=losses)
            else:
                trainer.local_process([question.model], question.clients)
                sent = zip(question.clients, trainer.uplink_package, strict=True)
                rounds.tell(question, models={client: pack[0] for client, pack in sent})
        handler.set_model(rounds.model)


torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
trainer = SGDSerialClientTrainer(net, num_clients=20)
trainer.setup_dataset(Digits())
trainer.setup_optim(epochs=5, batch_size=16, lr=0.1)
handler = SyncServerHandler(net, global_round=20, sample_ratio=0.2)
SelectedPipeline(handler, trainer).main()
tests = DataLoader(BaseDataset(test_x, test_y), batch_size=300)
print(f"accuracy {evaluate(handler.model, trainer.criterion, tests)[1]:.3f}")
