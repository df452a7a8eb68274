"""The verbs of the client about the service, its machines, and who may use them: a part of `Client`. `@verb` makes the
body of a method from its route and its signature (verbs.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import BinaryIO

from shoal_api.answers import Health, Readiness
from shoal_api.client.verbs import Endpoint, verb
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

DELETE_S = 120.0
"""Seconds to wait for the answer: files are deleted first."""


class Fleet(Endpoint):
    """The methods raise what those of `Client` raise."""

    @verb("GET /v1/cluster")
    def cluster(self) -> ClusterView:
        """Return the nodes, what is free, and which control plane owns the jobs."""

    @verb("GET /v1/overview")
    def overview_of_all(
        self, *, search: str = "", label: str | None = None, offset: int = 0, limit: int = 50
    ) -> FleetOverview:
        """Return a page of jobs, newest first, jobs by state, the cluster's goodput, and what runs on each node.
        `search`: words that must all be in name, id, project, user or labels; `label`: NAME, !NAME, NAME=VALUE or
        NAME!=VALUE."""

    @verb("GET /v1/job-fields")
    def job_fields(self) -> tuple[JobField, ...]:
        """Return the names that `where`, `sort` and `columns` of a list of jobs can use."""

    def curves(
        self, metrics: Sequence[str] = ("loss",), *, jobs: Sequence[str] = (), where: str = "", points: int = 60
    ) -> Curves:
        """Return curves of many jobs: of those with these ids, or of the newest ones that `where` selects. `points`: of
        each curve at least; each is the mean of 1, 8, 64, 512 ... steps."""
        params = {"metric": list(metrics), "job": list(jobs), "where": where, "points": points}
        return self._get("/v1/curves", Curves, params)

    @verb("GET /v1/views")
    def views(self, project: str | None = None) -> tuple[SavedView, ...]:
        """Return the saved views of the table of jobs; `project` None means all projects."""

    @verb("PUT /v1/views/{project}/{name}")
    def save_view(self, project: str, name: str, view: TableView) -> SavedView:
        """Save a view of the table of jobs under a name; one with the same name is replaced."""

    @verb("DELETE /v1/views/{project}/{name}")
    def delete_view(self, project: str, name: str) -> None:
        """Delete a saved view. The jobs stay as they are."""

    @verb("GET /v1/nodes")
    def nodes(self) -> tuple[NodeView, ...]:
        """Return all nodes, also dead ones, with their resources, drains and probations."""

    @verb("GET /v1/nodes/{node_id}")
    def node(self, node_id: str) -> NodeView:
        """Return one node."""

    @verb("POST /v1/nodes/{node_id}/drain", body=DrainRequest)
    def drain(self, node_id: str, *, reason: str = "drain requested", deadline_s: float | None = None) -> NodeView:
        """Move jobs off the node at their next step boundary, and place nothing new there.

        `deadline_s`: seconds until the node is switched off.
        """

    @verb("DELETE /v1/nodes/{node_id}/drain")
    def undo_drain(self, node_id: str) -> NodeView:
        """End the drain of a node; the node is used again."""

    @verb("POST /v1/nodes/{node_id}/cordon", body=CordonRequest)
    def cordon(self, node_id: str, *, reason: str = "cordon requested") -> NodeView:
        """Place no new worker on the node; those that are there stay."""

    @verb("DELETE /v1/nodes/{node_id}/cordon")
    def undo_cordon(self, node_id: str) -> NodeView:
        """Place workers on the node again."""

    @verb("POST /v1/nodes/{node}/preemption-notice", body=NoticeRequest)
    def announce_preemption(
        self, node: str, *, deadline_s: float = 30.0, reason: str = "preemption notice"
    ) -> tuple[NodeView, ...]:
        """Announce that the machine with this address, or the node with this id, will be taken away in `deadline_s`
        seconds. Returns the nodes that are drained."""

    @verb("GET /v1/deletions")
    def deletions(self, *, project: str | None = None, limit: int = 100) -> tuple[DeletionView, ...]:
        """Return the deletions of jobs, newest first; `project` None means all projects."""

    @verb("POST /v1/gc", wait_s=DELETE_S)
    def gc(self, *, dry_run: bool = False) -> GcView:
        """Delete what ended jobs leave behind and is older than the settings allow, or say what would be deleted.
        Repeat it while `is_complete` is false."""

    def webhooks(self, job_id: str | None = None, *, limit: int = 100) -> tuple[WebhookView, ...]:
        """Return what the webhooks that concern a job have delivered. Without a job, those of the settings over all
        jobs, and at most `limit` hooks of specs that fail."""
        return self._get("/v1/webhooks", Page[WebhookView], {"job": job_id, "limit": limit}).items

    @verb("GET /healthz")
    def health(self) -> Health:
        """Tell whether the server process answers."""

    @verb("GET /readyz", idempotent=False)
    def ready(self) -> Readiness:
        """Return the readiness of the service. Raises ServerError with code not-ready if the store or the cluster
        cannot be reached."""

    @verb("GET /metrics")
    def metrics(self) -> str:
        """Return the metrics in the text format of Prometheus."""

    @verb("GET /v1/clusters")
    def clusters(self) -> tuple[ClusterSummary, ...]:
        """Return the clusters that have joined, also unreachable ones; the service's own comes first."""

    @verb("GET /v1/clusters/{name}")
    def joined_cluster(self, name: str) -> ClusterSummary:
        """Return one cluster."""

    @verb("PATCH /v1/clusters/{name}", body=ClusterPatch)
    def label_cluster(self, name: str, labels: Mapping[str, str | None]) -> ClusterSummary:
        """Merge labels by name; None removes one. They are added to those of the cluster's nodes."""

    @verb("POST /v1/clusters/{name}/cordon", body=CordonRequest)
    def cordon_cluster(self, name: str, *, reason: str = "cordon requested") -> ClusterSummary:
        """Let the cluster start no job and add no worker; those that are there stay."""

    @verb("DELETE /v1/clusters/{name}/cordon")
    def uncordon_cluster(self, name: str) -> ClusterSummary:
        """Use the cluster again."""

    @verb("DELETE /v1/clusters/{name}", idempotent=False)
    def remove_cluster(self, name: str, *, force: bool = False) -> None:
        """Forget the cluster, and revoke its tokens. `force` does so although jobs have attempts there, but only once
        its gateway is gone."""

    @verb("GET /v1/clusters/{name}/tokens")
    def cluster_tokens(self, name: str) -> tuple[TokenView, ...]:
        """Return the tokens of the cluster's gateway, newest first, with those that have ended."""

    @verb("GET /v1/queue")
    def queue(self, *, limit: int = 1000) -> QueueView:
        """Return the queue in the order in which its jobs would start, and what each project uses."""

    @verb("GET /v1/timeline")
    def timeline(self, *, hours: float = 24.0) -> FleetTimeline:
        """Return which job had how many workers when in the last hours, and why."""

    @verb("GET /v1/usage")
    def usage(
        self, *, by: Period = Period.WEEK, periods: int = 8, project: str | None = None
    ) -> tuple[ProjectUsage, ...]:
        """Return what each project has used in the last weeks or months, oldest first, without time in the queue."""

    def export_usage(
        self, out: BinaryIO, *, by: Period = Period.WEEK, periods: int = 8, project: str | None = None
    ) -> None:
        """Write the same as CSV, in hours. Raises Disconnected: the answer broke off; `out` has a part of it."""
        self._save("/v1/usage", out, {"by": by, "periods": periods, "project": project, "csv": True})

    @verb("GET /v1/sweeps")
    def sweeps(
        self,
        *,
        project: str | None = None,
        name: str | None = None,
        limit: int = 100,
        cursor: str | None = None,
    ) -> Page[SweepSummary]:
        """Return a page of sweeps, newest first; without `project` and `name` all of them."""

    @verb("GET /v1/sweeps/{project}/{name}")
    def sweep(self, project: str, name: str) -> SweepView:
        """Return the rules of a sweep, and its jobs, the best first."""

    @verb("GET /v1/sweeps/{project}/{name}/curves")
    def sweep_curves(self, project: str, name: str, *, measure: str = "loss") -> SweepCurves:
        """Return the losses of all jobs of a sweep, the best so far, and how much each label matters; `measure`: loss
        or val_loss."""

    @verb("POST /v1/sweeps/{project}/{name}/cancel")
    def cancel_sweep(self, project: str, name: str) -> SweepView:
        """Cancel the jobs of a sweep that have not ended; they are the jobs of the answer."""

    @verb("GET /v1/projects")
    def projects(self) -> tuple[ProjectView, ...]:
        """Return the projects that are defined or have jobs, with their quotas and what they use."""

    @verb("GET /v1/projects/{name}")
    def project(self, name: str) -> ProjectView:
        """Return the quotas of one project, and what its jobs use."""

    @verb("PUT /v1/projects/{name}")
    def set_project(self, name: str, rules: ProjectRules) -> ProjectView:
        """Define a project, or replace all of its quotas."""

    @verb("DELETE /v1/projects/{name}", idempotent=False)
    def delete_project(self, name: str) -> None:
        """Delete the quotas of a project; its jobs go on under those of the project `default`."""

    @verb("GET /v1/users")
    def users(self) -> tuple[UserView, ...]:
        """Return the users with limits, queued jobs or workers."""

    @verb("GET /v1/users/{name}")
    def user(self, name: str) -> UserView:
        """Return the limits that apply to a user, and what the user has."""

    @verb("PUT /v1/users/{name}")
    def set_user(self, name: str, rules: UserRules) -> UserView:
        """Replace the limits of a user. The limits of the user `default` apply to users without limits of their own."""

    @verb("DELETE /v1/users/{name}", idempotent=False)
    def delete_user(self, name: str) -> None:
        """Delete the limits of a user; those of `default` then apply."""

    @verb("GET /v1/whoami")
    def whoami(self) -> Whoami:
        """Return who this client is to the service: name, role, projects, permissions."""

    @verb("POST /v1/session/link", idempotent=False)
    def session_link(self) -> SessionLink:
        """Make a link that logs a browser in once; it is valid for two minutes."""

    @verb("POST /v1/tokens", idempotent=False)
    def create_token(self, request: TokenRequest) -> NewToken:
        """Make a token. Only the answer has it; it cannot be read again. If the client's token is not an admin's, the
        new one may do no more and ends with it."""

    @verb("POST /v1/clusters/{cluster}/tokens", idempotent=False)
    def create_cluster_token(self, cluster: str, request: ClusterTokenRequest) -> NewToken:
        """Make a token for the gateway of a cluster. Only the answer has it; it cannot be read again."""

    @verb("GET /v1/tokens")
    def tokens(self) -> tuple[TokenView, ...]:
        """Return the own tokens, or as an admin all tokens, newest first, with those that have ended."""

    def audit(
        self, *, job_id: str | None = None, actor: str | None = None, before: int | None = None, limit: int = 100
    ) -> AuditPage:
        """Return who changed what through the API, newest first."""
        return self._get("/v1/audit", AuditPage, {"job": job_id, "actor": actor, "before": before, "limit": limit})

    @verb("DELETE /v1/tokens/{token_id}")
    def revoke_token(self, token_id: str) -> TokenView:
        """Revoke a token, and those that were made with it. Idempotent."""
