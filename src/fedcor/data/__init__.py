"""Data sets, and how their training samples are spread over clients."""
