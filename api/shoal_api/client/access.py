"""The verbs about access: who one is, links for the browser, tokens, the audit. A part of `Client`."""

from __future__ import annotations

from urllib.parse import quote

from shoal_api.client.endpoint import JSON_CONTENT, Endpoint
from shoal_service.access_views import (
    AuditPage,
    ClusterTokenRequest,
    NewToken,
    SessionLink,
    TokenRequest,
    TokenView,
    Whoami,
)
from shoal_service.views import Page


class Access(Endpoint):
    """Every method raises `ApiError` and `Disconnected`, as those of `Client`."""

    def whoami(self) -> Whoami:
        """Who this client is to the service: name, role, projects, permissions."""
        return self._get("/v1/whoami", Whoami)

    def session_link(self) -> SessionLink:
        """A link that logs a browser in, once; valid for two minutes."""
        answer = self._transport.send("POST", "/v1/session/link", idempotent=False)
        return SessionLink.model_validate_json(answer.content)

    def create_token(self, request: TokenRequest) -> NewToken:
        """The answer has the token; it cannot be read again."""
        body = request.model_dump_json().encode()
        answer = self._transport.send("POST", "/v1/tokens", headers=JSON_CONTENT, content=body, idempotent=False)
        return NewToken.model_validate_json(answer.content)

    def create_cluster_token(self, cluster: str, request: ClusterTokenRequest) -> NewToken:
        """For the gateway of a cluster. The answer has the token; it cannot be read again."""
        body, path = request.model_dump_json().encode(), f"/v1/clusters/{quote(cluster, safe='')}/tokens"
        answer = self._transport.send("POST", path, headers=JSON_CONTENT, content=body, idempotent=False)
        return NewToken.model_validate_json(answer.content)

    def tokens(self) -> tuple[TokenView, ...]:
        """Newest first, with those that have ended."""
        return self._get("/v1/tokens", Page[TokenView]).items

    def audit(
        self, *, job_id: str | None = None, actor: str | None = None, before: int | None = None, limit: int = 100
    ) -> AuditPage:
        """Who changed what through the API, newest first."""
        params = {"job": job_id, "actor": actor, "before": before, "limit": limit}
        return self._get("/v1/audit", AuditPage, params)

    def revoke_token(self, token_id: str) -> TokenView:
        """Idempotent."""
        answer = self._transport.send("DELETE", f"/v1/tokens/{quote(token_id, safe='')}")
        return TokenView.model_validate_json(answer.content)
