"""The ground that every room stands on: types, errors, random streams, settings, names."""
