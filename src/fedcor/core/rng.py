"""Named streams of random numbers: the only place where a Generator is made.

A stream is fixed by (seed, purpose, keys...), for example (1, "shuffle", round, client). No stream
depends on how much was drawn from another. So two selectors with the same seed meet the same
partition, initial weights, shuffles and availability, and a resumed run needs no generator state.
"""

from __future__ import annotations

import zlib

import numpy as np


def _sequence(seed: int, purpose: str, keys: tuple[int, ...]) -> np.random.SeedSequence:
    return np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), *keys])


def stream(seed: int, purpose: str, *keys: int) -> np.random.Generator:
    """The generator of a stream. SFC64 is the fastest of NumPy's generators for bulk draws.

    Args:
        seed: The seed of the run.
        purpose: What is drawn, for example "shuffle".
        keys: Numbers that tell streams of one purpose apart, for example a round and a client.
    """
    return np.random.Generator(np.random.SFC64(_sequence(seed, purpose, keys)))


def stream_seed(seed: int, purpose: str, *keys: int) -> int:
    """A 63-bit seed from the same stream, for a library with random numbers of its own."""
    return int(_sequence(seed, purpose, keys).generate_state(1, np.uint64)[0] >> 1)
