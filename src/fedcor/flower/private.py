"""All that this room uses of Flower's non-public modules, which may change with any release.

ErrorCode   tells a node that cannot be reached from an app that raised; `flwr.app.Error` carries
            the code, but its values have no public name
NodeInfo    what `Grid.get_nodes` returns; a type in the signature of a public abstract method
Run         what `Grid.run` and `Grid.set_run` exchange; likewise
"""

from __future__ import annotations

from flwr.common.constant import ErrorCode
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.run import Run

__all__ = ["ErrorCode", "NodeInfo", "Run"]
