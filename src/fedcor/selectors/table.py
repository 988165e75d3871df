"""A table with one row per client in a selector's state, which many states share.

    name        (N, s) the table, where there are at most `ROWS` clients
    name/<i>    (ROWS, s) its i-th block of rows, where there are more

To replace some rows, a new state gets new arrays for the blocks that they are in. All others are
the arrays of the given state, which stays as it was: with many clients, a round copies little. A
state that holds a large table as one array, as earlier versions wrote it, is read as well.
"""

from __future__ import annotations

import numpy as np

from fedcor.types import Array, FloatArray, IntArray, State

__all__ = ["ROWS", "extend_table", "put_table", "replace_rows", "table_blocks", "table_rows"]

# In a block. Larger ones are read faster in a choice (they get huge pages of memory), but then most
# rounds of many clients would copy the whole table.
ROWS = 4096


def table_blocks(state: State, name: str) -> list[Array]:
    """The blocks of a table; nothing is copied."""
    if name in state:
        whole = state[name]
        return [whole[start : start + ROWS] for start in range(0, max(len(whole), 1), ROWS)]
    blocks: list[Array] = []
    while (block := state.get(f"{name}/{len(blocks)}")) is not None:
        blocks.append(block)
    return blocks


def table_rows(state: State, name: str, clients: IntArray) -> FloatArray:
    """(m, s) the rows of some clients, or of the same client again."""
    if name in state:
        rows: FloatArray = state[name][clients]
        return rows
    blocks, block_of = table_blocks(state, name), clients // ROWS
    order = np.argsort(block_of, kind="stable")
    ends = np.searchsorted(block_of[order], np.arange(len(blocks)), side="right")
    rows = np.empty((len(clients), blocks[0].shape[1]))
    for i, part in enumerate(np.split(order, ends[:-1])):
        rows[part] = blocks[i][clients[part] - i * ROWS]
    return rows


def put_table(state: State, name: str, table: list[Array]) -> dict[str, Array]:
    """The state with a table of these blocks, each but the last of `ROWS` rows."""
    rest = {k: v for k, v in state.items() if k != name and not k.startswith(f"{name}/")}
    if len(table) == 1:
        return {**rest, name: table[0]}
    return {**rest, **{f"{name}/{i}": block for i, block in enumerate(table)}}


def replace_rows(state: State, name: str, clients: IntArray, rows: FloatArray) -> dict[str, Array]:
    """The state in which `rows`, (m, s), are those of `clients`, (m,), each of them once."""
    table, block_of = table_blocks(state, name), clients // ROWS
    for i in np.unique(block_of).tolist():
        here = block_of == i
        table[i] = table[i].copy()
        table[i][clients[here] - i * ROWS] = rows[here]
    return put_table(state, name, table)


def extend_table(state: State, name: str, count: int) -> dict[str, Array]:
    """The state with a table for `count` clients: rows of zeros for those that are new."""
    table = table_blocks(state, name)
    width, missing = table[0].shape[1], count - sum(map(len, table))
    if missing:
        new = min(missing, ROWS - len(table[-1]))
        table[-1] = np.concatenate([table[-1], np.zeros((new, width))])
        later = range(len(table) * ROWS, count, ROWS)
        table += [np.zeros((min(ROWS, count - start), width)) for start in later]
    return put_table(state, name, table)
