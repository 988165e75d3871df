"""Callbacks, called after every round, and trackers that log a run elsewhere."""
