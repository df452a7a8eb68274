"""The verbs about the service and its cluster: nodes, drains, health, metrics."""

from __future__ import annotations

from shoal_api.answers import Health, Readiness
from shoal_api.client.endpoint import JSON_CONTENT, Endpoint, node_path
from shoal_service.views import ClusterView, DrainRequest, NodeView, Page


class Operations(Endpoint):
    """A part of `Client`."""

    def cluster(self) -> ClusterView:
        return self._get("/v1/cluster", ClusterView)

    def nodes(self) -> tuple[NodeView, ...]:
        return self._get("/v1/nodes", Page[NodeView]).items

    def node(self, node_id: str) -> NodeView:
        return self._get(node_path(node_id), NodeView)

    def drain(self, node_id: str, *, reason: str = "drain requested", deadline_s: float | None = None) -> NodeView:
        """Move jobs off the node at their next step boundary, and place nothing new there.

        `deadline_s`: seconds until the node is switched off.
        """
        body = DrainRequest(reason=reason, deadline_s=deadline_s).model_dump_json().encode()
        response = self._transport.send("POST", f"{node_path(node_id)}/drain", headers=JSON_CONTENT, content=body)
        return NodeView.model_validate_json(response.content)

    def undo_drain(self, node_id: str) -> NodeView:
        """End the drain of a node; the node is used again."""
        response = self._transport.send("DELETE", f"{node_path(node_id)}/drain")
        return NodeView.model_validate_json(response.content)

    def health(self) -> Health:
        """Whether the server process answers."""
        return self._get("/healthz", Health)

    def ready(self) -> Readiness:
        """Raises ServerError with code not-ready if the store or the cluster cannot be reached."""
        return Readiness.model_validate_json(self._transport.send("GET", "/readyz", idempotent=False).content)

    def metrics(self) -> str:
        """The metrics in the text format of Prometheus."""
        return self._transport.send("GET", "/metrics").text
