"""FedAvg in a plain PyTorch loop: twenty clients with two digits each, four train per round."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
shards = np.array_split(np.argsort(labels[:1500], kind="stable"), 40)
data = [np.concatenate([shards[k], shards[k + 20]]) for k in range(20)]
net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def train(model, client):
    net.load_state_dict(model)
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(5):
        for rows in torch.tensor(data[client])[torch.randperm(len(data[client]))].split(16):
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
            optimiser.step()
    return {name: value.clone() for name, value in net.state_dict().items()}


def accuracy(model):
    net.load_state_dict(model)
    with torch.no_grad():
        return (net(x[1500:]).argmax(dim=1) == y[1500:]).float().mean().item()


model = {name: value.clone() for name, value in net.state_dict().items()}
for number in range(30):
    clients = torch.randperm(20)[:4].tolist()
    models = {client: train(model, client) for client in clients}
    model = {name: sum(sent[name] for sent in models.values()) / 4 for name in model}
    print(f"round {number}: accuracy {accuracy(model):.3f}")
