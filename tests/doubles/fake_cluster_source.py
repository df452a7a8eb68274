"""FakeClusterSource: the cluster as the API shows it; it changes only when a test changes it."""

from __future__ import annotations

from shoal_service.views import ClusterView, NodeView


class FakeClusterSource:
    """A `shoal_api.http.context.ClusterSource`."""

    def __init__(self, *nodes: NodeView, owner: str = "me") -> None:
        self.view = ClusterView(
            connected=True,
            address="127.0.0.1:6379",
            nodes=nodes,
            cpus_total=4.0,
            cpus_free=1.0,
            gpus_total=0.0,
            gpus_free=0.0,
            owner=owner,
            epoch=1,
        )

    def snapshot(self) -> ClusterView:
        return self.view
