"""Federated averaging of pfl-research, with clients selected by fedcor."""

import torch
from digits import rows, test_x, test_y, x, y
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import nn

import fedcor


class Net(nn.Sequential):
    def loss(self, x, y):
        return nn.functional.cross_entropy(self(x), y)

    def metrics(self, x, y):
        return {}


class Selected(FederatedAveraging):
    """For selectors that only ask clients to train, such as the default."""

    def get_next_central_contexts(self, *args, **kwargs):
        contexts, model, metrics = super().get_next_central_contexts(*args, **kwargs)
        if contexts is not None:  # there is another round
            self.question, self.updates = rounds.ask(), {}
            self.cohort = iter(self.question.clients)
        return contexts, model, metrics

    def train_one_user(self, before, model, user, context):
        update, metrics = super().train_one_user(before, model, user, context)
        self.updates[user.user_id] = {name: value.clone() for name, value in update.items()}
        return update, metrics

    def process_aggregated_statistics(self, context, metrics, model, statistics):
        rounds.tell(self.question, updates=self.updates)
        model.set_parameters(rounds.model)
        return model, Metrics()


torch.manual_seed(0)
net = Net(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
sizes = [len(own) for own in rows]
rounds = fedcor.Rounds(None, dict(net.named_parameters()), sizes=sizes, clients_per_round=4)
algorithm, data = Selected(), [(x[own], y[own]) for own in rows]
users = FederatedDataset.from_slices(data, lambda: next(algorithm.cohort))
training = NNTrainHyperParams(local_batch_size=16, local_num_epochs=5, local_learning_rate=0.1)
cohorts = NNAlgorithmParams(20, 100, train_cohort_size=4, val_cohort_size=None)
algorithm.run(cohorts, SimulatedBackend(users, users), model, training)
print(f"accuracy {(net(test_x).argmax(dim=1) == test_y).float().mean():.3f}")
