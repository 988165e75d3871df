"""A Flower app whose clients are chosen by FedCor."""
