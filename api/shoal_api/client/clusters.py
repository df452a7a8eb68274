"""The verbs about the clusters that have joined, and the one that moves a job to another of them."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote

from shoal_api.client.endpoint import JSON_CONTENT, Endpoint, job_path
from shoal_service.access_views import TokenView
from shoal_service.fleet_views import ClusterPatch, ClusterSummary, CordonRequest
from shoal_service.views import JobView, MoveRequest, Page


class Clusters(Endpoint):
    """A part of `Client`."""

    def clusters(self) -> tuple[ClusterSummary, ...]:
        """Those that have joined, also if they are away; the service's own first."""
        return self._get("/v1/clusters", Page[ClusterSummary]).items

    def joined_cluster(self, name: str) -> ClusterSummary:
        return self._get(_path(name), ClusterSummary)

    def label_cluster(self, name: str, labels: Mapping[str, str | None]) -> ClusterSummary:
        """Merge labels by name; None removes one. They are added to those of the cluster's nodes."""
        body = ClusterPatch(labels=dict(labels)).model_dump_json().encode()
        response = self._transport.send("PATCH", _path(name), headers=JSON_CONTENT, content=body)
        return ClusterSummary.model_validate_json(response.content)

    def cordon_cluster(self, name: str, *, reason: str = "cordon requested") -> ClusterSummary:
        """Start no job and add no worker there; those that are there stay."""
        body = CordonRequest(reason=reason).model_dump_json().encode()
        response = self._transport.send("POST", f"{_path(name)}/cordon", headers=JSON_CONTENT, content=body)
        return ClusterSummary.model_validate_json(response.content)

    def uncordon_cluster(self, name: str) -> ClusterSummary:
        """Use the cluster again."""
        response = self._transport.send("DELETE", f"{_path(name)}/cordon")
        return ClusterSummary.model_validate_json(response.content)

    def remove_cluster(self, name: str, *, force: bool = False) -> None:
        """Forget the cluster, and revoke its tokens. `force`: although jobs have attempts there; only once its gateway
        is gone."""
        self._transport.send("DELETE", _path(name), params={"force": force}, idempotent=False)

    def cluster_tokens(self, name: str) -> tuple[TokenView, ...]:
        """Tokens of the cluster's gateway, newest first, with those that have ended."""
        return self._get(f"{_path(name)}/tokens", Page[TokenView]).items

    def move(self, job_id: str, to: str, *, if_match: str | None = None) -> JobView:
        """Run a job in the cluster `to`: an attempt elsewhere saves and ends, and the job goes on there. `any`: in the
        cluster that the scheduler chooses, and an attempt stays where it is.

        Raises:
            Conflict: the job could not run there, or has ended; the message names the way out.
            PreconditionFailed: the job was changed in the meantime.
        """
        headers = JSON_CONTENT | ({"If-Match": f'"{if_match}"'} if if_match is not None else {})
        body = MoveRequest(to=to).model_dump_json().encode()
        response = self._transport.send(
            "POST", f"{job_path(job_id)}/move", headers=headers, content=body, idempotent=if_match is None
        )
        return JobView.model_validate_json(response.content)


def _path(name: str) -> str:
    return f"/v1/clusters/{quote(name, safe='')}"
