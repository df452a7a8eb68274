"""The verbs about the service rather than one job: health, nodes, clusters, the queue, sweeps, quotas, clean-up, tokens
and the audit. A part of `Client`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import BinaryIO

from shoal_api.answers import Health, Readiness
from shoal_api.client.transport import Endpoint, api_path
from shoal_service.access_views import (
    AuditPage,
    ClusterTokenRequest,
    NewToken,
    SessionLink,
    TokenRequest,
    TokenView,
    Whoami,
)
from shoal_service.core.goodput import Period
from shoal_service.fleet_views import (
    ClusterPatch,
    ClusterSummary,
    ClusterView,
    CordonRequest,
    Curves,
    DeletionView,
    DrainRequest,
    FleetOverview,
    FleetTimeline,
    GcView,
    JobField,
    JobFields,
    NodeView,
    NoticeRequest,
    ProjectRules,
    ProjectUsage,
    ProjectView,
    QueueView,
    SavedView,
    SweepCurves,
    SweepSummary,
    SweepView,
    TableView,
    UserRules,
    UserView,
)
from shoal_service.views import Page, WebhookView

_DELETE_S = 120.0
"""Seconds to wait for the answer: files are deleted first."""


class Fleet(Endpoint):
    """The verbs about the service, its machines and who may use it. They raise what those of `Client` raise."""

    def cluster(self) -> ClusterView:
        return self._get("/v1/cluster", ClusterView)

    def overview_of_all(
        self, *, search: str = "", label: str | None = None, offset: int = 0, limit: int = 50
    ) -> FleetOverview:
        """Return a page of jobs, newest first, jobs by state, the cluster's goodput, and what runs on each node.
        `search`: words that must all be in name, id, project, user or labels; `label`: NAME, !NAME, NAME=VALUE or
        NAME!=VALUE."""
        params = {"search": search, "label": label, "offset": offset, "limit": limit}
        return self._get("/v1/overview", FleetOverview, params)

    def job_fields(self) -> tuple[JobField, ...]:
        """Return the names that `where`, `sort` and `columns` of a list of jobs can use."""
        return self._get("/v1/job-fields", JobFields).items

    def curves(
        self, metrics: Sequence[str] = ("loss",), *, jobs: Sequence[str] = (), where: str = "", points: int = 60
    ) -> Curves:
        """Return curves of many jobs: of those with these ids, or of the newest ones that `where` selects. `points`: of
        each curve at least; each is the mean of 1, 8, 64, 512 ... steps."""
        params = {"metric": list(metrics), "job": list(jobs), "where": where, "points": points}
        return self._get("/v1/curves", Curves, params)

    def views(self, project: str | None = None) -> tuple[SavedView, ...]:
        """Return the saved views of the table of jobs; `project` None means all projects."""
        return self._get("/v1/views", Page[SavedView], {"project": project}).items

    def save_view(self, project: str, name: str, view: TableView) -> SavedView:
        """Save a view of the table of jobs under a name; one with the same name is replaced."""
        return self._call("PUT", api_path("views", project, name), SavedView, body=view)

    def delete_view(self, project: str, name: str) -> None:
        self._transport.send("DELETE", api_path("views", project, name))

    def nodes(self) -> tuple[NodeView, ...]:
        return self._get("/v1/nodes", Page[NodeView]).items

    def node(self, node_id: str) -> NodeView:
        return self._get(api_path("nodes", node_id), NodeView)

    def drain(self, node_id: str, *, reason: str = "drain requested", deadline_s: float | None = None) -> NodeView:
        """Move jobs off the node at their next step boundary, and place nothing new there.

        `deadline_s`: seconds until the node is switched off.
        """
        return self._call(
            "POST",
            api_path("nodes", node_id, "drain"),
            NodeView,
            body=DrainRequest(reason=reason, deadline_s=deadline_s),
        )

    def undo_drain(self, node_id: str) -> NodeView:
        """End the drain of a node; the node is used again."""
        return self._call("DELETE", api_path("nodes", node_id, "drain"), NodeView)

    def cordon(self, node_id: str, *, reason: str = "cordon requested") -> NodeView:
        """Place no new worker on the node; those that are there stay."""
        return self._call("POST", api_path("nodes", node_id, "cordon"), NodeView, body=CordonRequest(reason=reason))

    def undo_cordon(self, node_id: str) -> NodeView:
        """Place workers on the node again."""
        return self._call("DELETE", api_path("nodes", node_id, "cordon"), NodeView)

    def announce_preemption(
        self, node: str, *, deadline_s: float = 30.0, reason: str = "preemption notice"
    ) -> tuple[NodeView, ...]:
        """Announce that the machine with this address, or the node with this id, will be taken away in `deadline_s`
        seconds. Returns the nodes that are drained."""
        return self._call(
            "POST",
            api_path("nodes", node, "preemption-notice"),
            Page[NodeView],
            body=NoticeRequest(deadline_s=deadline_s, reason=reason),
        ).items

    def deletions(self, *, project: str | None = None, limit: int = 100) -> tuple[DeletionView, ...]:
        """Return the deletions of jobs, newest first; `project` None means all projects."""
        return self._get("/v1/deletions", Page[DeletionView], {"project": project, "limit": limit}).items

    def gc(self, *, dry_run: bool = False) -> GcView:
        """Delete what ended jobs leave behind and is older than the settings allow, or say what would be deleted.
        Repeat it while `is_complete` is false."""
        return self._call("POST", "/v1/gc", GcView, params={"dry_run": dry_run}, wait_s=_DELETE_S)

    def webhooks(self, job_id: str | None = None, *, limit: int = 100) -> tuple[WebhookView, ...]:
        """Return what the webhooks that concern a job have delivered. Without a job, those of the settings over all
        jobs, and at most `limit` hooks of specs that fail."""
        params = {"job": job_id, "limit": limit}
        return self._get("/v1/webhooks", Page[WebhookView], params).items

    def health(self) -> Health:
        """Tell whether the server process answers."""
        return self._get("/healthz", Health)

    def ready(self) -> Readiness:
        """Return the readiness of the service. Raises ServerError with code not-ready if the store or the cluster
        cannot be reached."""
        return self._call("GET", "/readyz", Readiness, idempotent=False)

    def metrics(self) -> str:
        """Return the metrics in the text format of Prometheus."""
        return self._transport.send("GET", "/metrics").text

    def clusters(self) -> tuple[ClusterSummary, ...]:
        """Return the clusters that have joined, also those that are away; the service's own comes first."""
        return self._get("/v1/clusters", Page[ClusterSummary]).items

    def joined_cluster(self, name: str) -> ClusterSummary:
        return self._get(api_path("clusters", name), ClusterSummary)

    def label_cluster(self, name: str, labels: Mapping[str, str | None]) -> ClusterSummary:
        """Merge labels by name; None removes one. They are added to those of the cluster's nodes."""
        return self._call("PATCH", api_path("clusters", name), ClusterSummary, body=ClusterPatch(labels=dict(labels)))

    def cordon_cluster(self, name: str, *, reason: str = "cordon requested") -> ClusterSummary:
        """Let the cluster start no job and add no worker; those that are there stay."""
        return self._call(
            "POST", api_path("clusters", name, "cordon"), ClusterSummary, body=CordonRequest(reason=reason)
        )

    def uncordon_cluster(self, name: str) -> ClusterSummary:
        """Use the cluster again."""
        return self._call("DELETE", api_path("clusters", name, "cordon"), ClusterSummary)

    def remove_cluster(self, name: str, *, force: bool = False) -> None:
        """Forget the cluster, and revoke its tokens. `force` does so although jobs have attempts there, but only once
        its gateway is gone."""
        self._transport.send("DELETE", api_path("clusters", name), params={"force": force}, idempotent=False)

    def cluster_tokens(self, name: str) -> tuple[TokenView, ...]:
        """Return the tokens of the cluster's gateway, newest first, with those that have ended."""
        return self._get(api_path("clusters", name, "tokens"), Page[TokenView]).items

    def queue(self, *, limit: int = 1000) -> QueueView:
        """Return the queue in the order in which its jobs would start, and what each project uses."""
        return self._get("/v1/queue", QueueView, {"limit": limit})

    def timeline(self, *, hours: float = 24.0) -> FleetTimeline:
        """Return which job had how many workers when in the last hours, and why."""
        return self._get("/v1/timeline", FleetTimeline, {"hours": hours})

    def usage(
        self, *, by: Period = Period.WEEK, periods: int = 8, project: str | None = None
    ) -> tuple[ProjectUsage, ...]:
        """Return what each project has used in the last weeks or months, oldest first, without time in the queue."""
        return self._get("/v1/usage", Page[ProjectUsage], {"by": by, "periods": periods, "project": project}).items

    def export_usage(
        self, out: BinaryIO, *, by: Period = Period.WEEK, periods: int = 8, project: str | None = None
    ) -> None:
        """Write the same as CSV, in hours. Raises Disconnected: the answer broke off; `out` has a part of it."""
        self._save("/v1/usage", out, {"by": by, "periods": periods, "project": project, "csv": True})

    def sweeps(
        self,
        *,
        project: str | None = None,
        name: str | None = None,
        limit: int = 100,
        cursor: str | None = None,
    ) -> Page[SweepSummary]:
        """Return a page of sweeps, newest first; without `project` and `name` all of them."""
        params = {"project": project, "name": name, "limit": limit, "cursor": cursor}
        return self._get("/v1/sweeps", Page[SweepSummary], params)

    def sweep(self, project: str, name: str) -> SweepView:
        """Return the rules of a sweep, and its jobs, the best first."""
        return self._get(api_path("sweeps", project, name), SweepView)

    def sweep_curves(self, project: str, name: str, *, measure: str = "loss") -> SweepCurves:
        """Return the losses of all jobs of a sweep, the best so far, and how much each label matters; `measure`: loss
        or val_loss."""
        return self._get(api_path("sweeps", project, name, "curves"), SweepCurves, {"measure": measure})

    def cancel_sweep(self, project: str, name: str) -> SweepView:
        """Cancel the jobs of a sweep that have not ended; they are the jobs of the answer."""
        return self._call("POST", api_path("sweeps", project, name, "cancel"), SweepView)

    def projects(self) -> tuple[ProjectView, ...]:
        return self._get("/v1/projects", Page[ProjectView]).items

    def project(self, name: str) -> ProjectView:
        return self._get(api_path("projects", name), ProjectView)

    def set_project(self, name: str, rules: ProjectRules) -> ProjectView:
        """Define a project, or replace all of its quotas."""
        return self._call("PUT", api_path("projects", name), ProjectView, body=rules)

    def delete_project(self, name: str) -> None:
        """Delete the quotas of a project; its jobs go on under those of the project `default`."""
        self._transport.send("DELETE", api_path("projects", name), idempotent=False)

    def users(self) -> tuple[UserView, ...]:
        return self._get("/v1/users", Page[UserView]).items

    def user(self, name: str) -> UserView:
        return self._get(api_path("users", name), UserView)

    def set_user(self, name: str, rules: UserRules) -> UserView:
        """Replace the limits of a user. The limits of the user `default` apply to users without limits of their own."""
        return self._call("PUT", api_path("users", name), UserView, body=rules)

    def delete_user(self, name: str) -> None:
        """Delete the limits of a user; those of `default` then apply."""
        self._transport.send("DELETE", api_path("users", name), idempotent=False)

    def whoami(self) -> Whoami:
        """Return who this client is to the service: name, role, projects, permissions."""
        return self._get("/v1/whoami", Whoami)

    def session_link(self) -> SessionLink:
        """Make a link that logs a browser in once; it is valid for two minutes."""
        return self._call("POST", "/v1/session/link", SessionLink, idempotent=False)

    def create_token(self, request: TokenRequest) -> NewToken:
        """Make a token. Only the answer has it; it cannot be read again. If the client's token is not an admin's, the
        made one may do no more and ends with it."""
        return self._call("POST", "/v1/tokens", NewToken, body=request, idempotent=False)

    def create_cluster_token(self, cluster: str, request: ClusterTokenRequest) -> NewToken:
        """Make a token for the gateway of a cluster. Only the answer has it; it cannot be read again."""
        return self._call("POST", api_path("clusters", cluster, "tokens"), NewToken, body=request, idempotent=False)

    def tokens(self) -> tuple[TokenView, ...]:
        """Return the own tokens, or as an admin all tokens, newest first, with those that have ended."""
        return self._get("/v1/tokens", Page[TokenView]).items

    def audit(
        self, *, job_id: str | None = None, actor: str | None = None, before: int | None = None, limit: int = 100
    ) -> AuditPage:
        """Return who changed what through the API, newest first."""
        params = {"job": job_id, "actor": actor, "before": before, "limit": limit}
        return self._get("/v1/audit", AuditPage, params)

    def revoke_token(self, token_id: str) -> TokenView:
        """Revoke a token, and those that were made with it. Idempotent."""
        return self._call("DELETE", api_path("tokens", token_id), TokenView)
