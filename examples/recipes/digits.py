"""Twenty clients with two digits each: `rows[k]` are client k's rows of `x` and `y`."""

import numpy as np
import torch
from sklearn.datasets import load_digits

images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
test_x, test_y = x[1500:], y[1500:]
shards = np.array_split(np.argsort(labels[:1500], kind="stable"), 40)
rows = [np.concatenate([shards[k], shards[k + 20]]) for k in range(20)]
