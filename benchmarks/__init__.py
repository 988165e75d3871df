"""Speed, as ratios to something measured in the same run. `python -m benchmarks.run` runs all.

measure.py      a row of the table, its goal, timing in turn, the machine
replay.py       the rounds of a run once more, by other means of training and evaluation
fmnist.py       a round of the paper's MLP: against its matrix products and a plain loop
other_packages.py   the same round in FedLab and in Flower's simulation
cifar.py        a round of the paper's CNN: against its matrix products and a plain loop
own_module.py   a round of a user's own recurrent module
grid.py         a whole comparison in one and in two processes
growth.py       a round's cost as the number of clients grows
selection.py    the maths of the selectors, against its obvious form and as clients grow
scale.py        selection among a million clients: against reading memory, and its peak of memory
population.py   late rounds against early ones, of a hundred thousand clients
packages.py     FedLab and Flower, each in an environment of its own
asking.py       the selector with which packages are compared
"""
