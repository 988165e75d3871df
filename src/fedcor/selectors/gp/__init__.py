"""The Gaussian process over the clients' loss changes: arrays, not clients."""
