"""The verbs about the service and its cluster: nodes, drains, cordons, windows, webhooks, health, metrics."""

from __future__ import annotations

from urllib.parse import quote

from shoal_api.answers import Health, Readiness
from shoal_api.client.endpoint import JSON_CONTENT, Endpoint, job_path, node_path
from shoal_service.fleet_views import (
    ClusterView,
    CordonRequest,
    DeletionView,
    DrainRequest,
    FleetOverview,
    GcView,
    NodeView,
    NoticeRequest,
    WindowRequest,
    WindowView,
)
from shoal_service.views import Page, WebhookView

_DELETE_S = 120.0
"""The answer may take so long: files are deleted first."""


class Operations(Endpoint):
    """A part of `Client`."""

    def cluster(self) -> ClusterView:
        return self._get("/v1/cluster", ClusterView)

    def overview_of_all(
        self, *, search: str = "", label: str | None = None, offset: int = 0, limit: int = 50
    ) -> FleetOverview:
        """A page of jobs, newest first, jobs by state, the cluster's goodput, and what runs on each node. `search`: a
        words that are all in name, id, project, user or labels; `label`: NAME, !NAME, NAME=VALUE or NAME!=VALUE."""
        params = {"search": search, "label": label, "offset": offset, "limit": limit}
        return self._get("/v1/overview", FleetOverview, params)

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

    def cordon(self, node_id: str, *, reason: str = "cordon requested") -> NodeView:
        """Place no new worker on the node; those that are there stay."""
        body = CordonRequest(reason=reason).model_dump_json().encode()
        response = self._transport.send("POST", f"{node_path(node_id)}/cordon", headers=JSON_CONTENT, content=body)
        return NodeView.model_validate_json(response.content)

    def undo_cordon(self, node_id: str) -> NodeView:
        """Place workers on the node again."""
        response = self._transport.send("DELETE", f"{node_path(node_id)}/cordon")
        return NodeView.model_validate_json(response.content)

    def announce_preemption(
        self, node: str, *, deadline_s: float = 30.0, reason: str = "preemption notice"
    ) -> tuple[NodeView, ...]:
        """The machine with this address, or the node with this id, will be taken away in `deadline_s` seconds."""
        body = NoticeRequest(deadline_s=deadline_s, reason=reason).model_dump_json().encode()
        path = f"{node_path(node)}/preemption-notice"
        response = self._transport.send("POST", path, headers=JSON_CONTENT, content=body)
        return Page[NodeView].model_validate_json(response.content).items

    def maintenance_windows(self) -> tuple[WindowView, ...]:
        """The earliest first."""
        return self._get("/v1/maintenance-windows", Page[WindowView]).items

    def plan_maintenance(self, window: WindowRequest) -> WindowView:
        """The nodes are drained in time for the window, and used again after it."""
        body = window.model_dump_json().encode()
        response = self._transport.send(
            "POST", "/v1/maintenance-windows", headers=JSON_CONTENT, content=body, idempotent=False
        )
        return WindowView.model_validate_json(response.content)

    def cancel_maintenance(self, window_id: str) -> None:
        """Its nodes are used again."""
        path = f"/v1/maintenance-windows/{quote(window_id, safe='')}"
        self._transport.send("DELETE", path, idempotent=False)

    def delete_job(self, job_id: str, *, checkpoints: bool = True) -> DeletionView:
        """Delete a job that has ended, with its history; `checkpoints`: with its files in the storage too. It cannot be
        undone. `finished_at` is None if the storage does not answer: the server goes on later."""
        params = {"checkpoints": checkpoints}
        response = self._transport.send("DELETE", job_path(job_id), params=params, wait_s=_DELETE_S)
        return DeletionView.model_validate_json(response.content)

    def deletions(self, *, project: str | None = None, limit: int = 100) -> tuple[DeletionView, ...]:
        """Deletions of jobs, newest first; `project` None: of all."""
        return self._get("/v1/deletions", Page[DeletionView], {"project": project, "limit": limit}).items

    def gc(self, *, dry_run: bool = False) -> GcView:
        """Delete what ended jobs leave behind and is older than the settings allow, or say what would be deleted.
        Repeat it while `is_complete` is false."""
        response = self._transport.send("POST", "/v1/gc", params={"dry_run": dry_run}, wait_s=_DELETE_S)
        return GcView.model_validate_json(response.content)

    def webhooks(self, job_id: str | None = None, *, limit: int = 100) -> tuple[WebhookView, ...]:
        """What the hooks that concern a job have delivered; None: those of the settings over all jobs, and at most
        `limit` hooks of specs that fail."""
        params = {"job": job_id, "limit": limit}
        return self._get("/v1/webhooks", Page[WebhookView], params).items

    def health(self) -> Health:
        """Returns whether the server process answers."""
        return self._get("/healthz", Health)

    def ready(self) -> Readiness:
        """Raises ServerError with code not-ready if the store or the cluster cannot be reached."""
        return Readiness.model_validate_json(self._transport.send("GET", "/readyz", idempotent=False).content)

    def metrics(self) -> str:
        """The metrics in the text format of Prometheus."""
        return self._transport.send("GET", "/metrics").text
