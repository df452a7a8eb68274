"""The verbs about the service rather than one job: health, nodes, clusters, the queue, sweeps, quotas, clean-up, tokens
and the audit. A part of `Client`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import quote

from shoal_api.answers import Health, Readiness
from shoal_api.client.transport import JSON_CONTENT, Endpoint, node_path
from shoal_service.access_views import (
    AuditPage,
    ClusterTokenRequest,
    NewToken,
    SessionLink,
    TokenRequest,
    TokenView,
    Whoami,
)
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
        """Return the saved views of the table of jobs; `project` None: of all projects."""
        return self._get("/v1/views", Page[SavedView], {"project": project}).items

    def save_view(self, project: str, name: str, view: TableView) -> SavedView:
        """Save a view of the table of jobs under a name; one with the same name is replaced."""
        path = f"/v1/views/{quote(project, safe='')}/{quote(name, safe='')}"
        response = self._transport.send("PUT", path, headers=JSON_CONTENT, content=view.model_dump_json().encode())
        return SavedView.model_validate_json(response.content)

    def delete_view(self, project: str, name: str) -> None:
        self._transport.send("DELETE", f"/v1/views/{quote(project, safe='')}/{quote(name, safe='')}")

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
        """Announce that the machine with this address, or the node with this id, will be taken away in `deadline_s`
        seconds. Returns the nodes that are drained."""
        body = NoticeRequest(deadline_s=deadline_s, reason=reason).model_dump_json().encode()
        path = f"{node_path(node)}/preemption-notice"
        response = self._transport.send("POST", path, headers=JSON_CONTENT, content=body)
        return Page[NodeView].model_validate_json(response.content).items

    def deletions(self, *, project: str | None = None, limit: int = 100) -> tuple[DeletionView, ...]:
        """Return the deletions of jobs, newest first; `project` None: those of all projects."""
        return self._get("/v1/deletions", Page[DeletionView], {"project": project, "limit": limit}).items

    def gc(self, *, dry_run: bool = False) -> GcView:
        """Delete what ended jobs leave behind and is older than the settings allow, or say what would be deleted.
        Repeat it while `is_complete` is false."""
        response = self._transport.send("POST", "/v1/gc", params={"dry_run": dry_run}, wait_s=_DELETE_S)
        return GcView.model_validate_json(response.content)

    def webhooks(self, job_id: str | None = None, *, limit: int = 100) -> tuple[WebhookView, ...]:
        """Return what the webhooks that concern a job have delivered. None: those of the settings over all jobs, and at
        most `limit` hooks of specs that fail."""
        params = {"job": job_id, "limit": limit}
        return self._get("/v1/webhooks", Page[WebhookView], params).items

    def health(self) -> Health:
        """Return whether the server process answers."""
        return self._get("/healthz", Health)

    def ready(self) -> Readiness:
        """Return the readiness of the service. Raises ServerError with code not-ready if the store or the cluster
        cannot be reached."""
        return Readiness.model_validate_json(self._transport.send("GET", "/readyz", idempotent=False).content)

    def metrics(self) -> str:
        """Return the metrics in the text format of Prometheus."""
        return self._transport.send("GET", "/metrics").text

    def clusters(self) -> tuple[ClusterSummary, ...]:
        """Return the clusters that have joined, also those that are away; the service's own comes first."""
        return self._get("/v1/clusters", Page[ClusterSummary]).items

    def joined_cluster(self, name: str) -> ClusterSummary:
        return self._get(_cluster_path(name), ClusterSummary)

    def label_cluster(self, name: str, labels: Mapping[str, str | None]) -> ClusterSummary:
        """Merge labels by name; None removes one. They are added to those of the cluster's nodes."""
        body = ClusterPatch(labels=dict(labels)).model_dump_json().encode()
        response = self._transport.send("PATCH", _cluster_path(name), headers=JSON_CONTENT, content=body)
        return ClusterSummary.model_validate_json(response.content)

    def cordon_cluster(self, name: str, *, reason: str = "cordon requested") -> ClusterSummary:
        """Let the cluster start no job and add no worker; those that are there stay."""
        body = CordonRequest(reason=reason).model_dump_json().encode()
        response = self._transport.send("POST", f"{_cluster_path(name)}/cordon", headers=JSON_CONTENT, content=body)
        return ClusterSummary.model_validate_json(response.content)

    def uncordon_cluster(self, name: str) -> ClusterSummary:
        """Use the cluster again."""
        response = self._transport.send("DELETE", f"{_cluster_path(name)}/cordon")
        return ClusterSummary.model_validate_json(response.content)

    def remove_cluster(self, name: str, *, force: bool = False) -> None:
        """Forget the cluster, and revoke its tokens. `force` does so although jobs have attempts there, but only once
        its gateway is gone."""
        self._transport.send("DELETE", _cluster_path(name), params={"force": force}, idempotent=False)

    def cluster_tokens(self, name: str) -> tuple[TokenView, ...]:
        """Return the tokens of the cluster's gateway, newest first, with those that have ended."""
        return self._get(f"{_cluster_path(name)}/tokens", Page[TokenView]).items

    def queue(self, *, limit: int = 1000) -> QueueView:
        """Return the queue in the order in which its jobs would start, and what each project uses."""
        return self._get("/v1/queue", QueueView, {"limit": limit})

    def timeline(self, *, hours: float = 24.0) -> FleetTimeline:
        """Return which job had how many workers when in the last hours, and why."""
        return self._get("/v1/timeline", FleetTimeline, {"hours": hours})

    def sweeps(
        self,
        *,
        project: str | None = None,
        name: str | None = None,
        limit: int = 100,
        cursor: str | None = None,
    ) -> Page[SweepSummary]:
        """Return a page of sweeps, newest first; `project` and `name` None: those of all."""
        params = {"project": project, "name": name, "limit": limit, "cursor": cursor}
        return self._get("/v1/sweeps", Page[SweepSummary], params)

    def sweep(self, project: str, name: str) -> SweepView:
        """Return the rules of a sweep, and its jobs, the best first."""
        return self._get(_sweep_path(project, name), SweepView)

    def sweep_curves(self, project: str, name: str, *, measure: str = "loss") -> SweepCurves:
        """Return the losses of all jobs of a sweep, the best so far, and how much each label matters; `measure`: loss
        or val_loss."""
        return self._get(f"{_sweep_path(project, name)}/curves", SweepCurves, {"measure": measure})

    def cancel_sweep(self, project: str, name: str) -> SweepView:
        """Cancel the jobs of a sweep that have not ended; they are the jobs of the answer."""
        response = self._transport.send("POST", f"{_sweep_path(project, name)}/cancel")
        return SweepView.model_validate_json(response.content)

    def projects(self) -> tuple[ProjectView, ...]:
        return self._get("/v1/projects", Page[ProjectView]).items

    def project(self, name: str) -> ProjectView:
        return self._get(_project_path(name), ProjectView)

    def set_project(self, name: str, rules: ProjectRules) -> ProjectView:
        """Define a project, or replace all of its quotas."""
        body = rules.model_dump_json().encode()
        response = self._transport.send("PUT", _project_path(name), headers=JSON_CONTENT, content=body)
        return ProjectView.model_validate_json(response.content)

    def delete_project(self, name: str) -> None:
        """Delete the quotas of a project; its jobs go on under those of the project `default`."""
        self._transport.send("DELETE", _project_path(name), idempotent=False)

    def users(self) -> tuple[UserView, ...]:
        return self._get("/v1/users", Page[UserView]).items

    def user(self, name: str) -> UserView:
        return self._get(_user_path(name), UserView)

    def set_user(self, name: str, rules: UserRules) -> UserView:
        """Replace the limits of a user. The limits of the user `default` apply to users without limits of their own."""
        body = rules.model_dump_json().encode()
        response = self._transport.send("PUT", _user_path(name), headers=JSON_CONTENT, content=body)
        return UserView.model_validate_json(response.content)

    def delete_user(self, name: str) -> None:
        """Delete the limits of a user; those of `default` then apply."""
        self._transport.send("DELETE", _user_path(name), idempotent=False)

    def whoami(self) -> Whoami:
        """Return who this client is to the service: name, role, projects, permissions."""
        return self._get("/v1/whoami", Whoami)

    def session_link(self) -> SessionLink:
        """Make a link that logs a browser in once; it is valid for two minutes."""
        answer = self._transport.send("POST", "/v1/session/link", idempotent=False)
        return SessionLink.model_validate_json(answer.content)

    def create_token(self, request: TokenRequest) -> NewToken:
        """Make a token. Only the answer has it; it cannot be read again. If the client's token is not an admin's, the
        made one may do no more and ends with it."""
        body = request.model_dump_json().encode()
        answer = self._transport.send("POST", "/v1/tokens", headers=JSON_CONTENT, content=body, idempotent=False)
        return NewToken.model_validate_json(answer.content)

    def create_cluster_token(self, cluster: str, request: ClusterTokenRequest) -> NewToken:
        """Make a token for the gateway of a cluster. Only the answer has it; it cannot be read again."""
        body, path = request.model_dump_json().encode(), f"/v1/clusters/{quote(cluster, safe='')}/tokens"
        answer = self._transport.send("POST", path, headers=JSON_CONTENT, content=body, idempotent=False)
        return NewToken.model_validate_json(answer.content)

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
        answer = self._transport.send("DELETE", f"/v1/tokens/{quote(token_id, safe='')}")
        return TokenView.model_validate_json(answer.content)


def _cluster_path(name: str) -> str:
    return f"/v1/clusters/{quote(name, safe='')}"


def _sweep_path(project: str, name: str) -> str:
    return f"/v1/sweeps/{quote(project, safe='')}/{quote(name, safe='')}"


def _user_path(name: str) -> str:
    return f"/v1/users/{quote(name, safe='')}"


def _project_path(name: str) -> str:
    return f"/v1/projects/{quote(name, safe='')}"
