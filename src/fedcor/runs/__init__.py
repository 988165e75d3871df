"""Runs on disk: record, checkpoint, folder, resume; several runs in processes or on a cluster; trackers."""
