"""All that this room uses of Flower's non-public modules, which may change with any release.

ErrorCode   tells a node that cannot be reached from an app that raised; `flwr.app.Error` carries
            the code, but its values have no public name
NodeInfo    what `Grid.get_nodes` returns; a type in the signature of a public abstract method
Run         what `Grid.run` and `Grid.set_run` exchange; likewise

`SAYS_KEYS` is whether a grid can say which key a node has: Flower can since 1.38.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

if TYPE_CHECKING:  # older releases have them elsewhere, and only signatures name them
    from flwr.proto.node_pb2 import NodeInfo
    from flwr.supercore.run import Run

__all__ = ["SAYS_KEYS", "ErrorCode", "NodeInfo", "Run"]

SAYS_KEYS = hasattr(Grid, "get_nodes")
