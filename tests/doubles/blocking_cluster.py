"""BlockingCluster: a cluster whose verbs a test without an event loop may call."""

import asyncio
from typing import Any

from shoal_service.clusters.verbs import BY_METHOD


class BlockingCluster:
    """The verbs of a `protocols.Cluster` as calls that block; everything else is the cluster's."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.cluster, name)
        return value if name not in BY_METHOD else lambda *arguments, **named: asyncio.run(value(*arguments, **named))
