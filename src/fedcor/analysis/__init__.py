"""What the paper looks at beside accuracy: normality, stationarity, the map of clients, the toy experiment. Numbers, no ink."""
