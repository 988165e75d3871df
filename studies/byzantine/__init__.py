"""Clients that lie: what it does to each selector, with and without a defence, and its price."""
