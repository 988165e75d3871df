"""Clients in blocks: so many rows of an embedding, and what is computed of them, fit into a core's
own cache. Then a large population costs its matrix products, and not the memory between them."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["BLOCK", "blocks"]

BLOCK = 4096


def blocks(count: int) -> Iterator[slice]:
    """0 .. count - 1 in blocks."""
    return (slice(start, start + BLOCK) for start in range(0, count, BLOCK))
