"""Runs on a Ray or Dask cluster that is already running: its address, and tasks with retries."""
