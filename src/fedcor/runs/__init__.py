"""Runs on disk: record, checkpoints, resuming; many runs in processes or on a cluster; trackers."""
