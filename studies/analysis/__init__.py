"""What the paper examines besides accuracy, as numbers; `fedcor.report` draws them.

Normality and stationarity of the loss changes, the map of client embeddings, the toy experiment.
"""
