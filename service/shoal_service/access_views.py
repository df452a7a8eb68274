"""The resources of the REST API about tokens, sessions and the audit. Pure data, as those in `views`."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from shoal_service.core.access import Permission, Role
from shoal_workers.contract import Frozen, is_label, is_user

DEFAULT_TOKEN_S = 90 * 86400.0
_Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._@-]{0,61}[A-Za-z0-9])?$")]


class TokenRequest(Frozen):
    """A token to be made."""

    name: _Name
    """Who or what will use it; shown in the audit."""
    role: Role = Role.VIEWER
    projects: tuple[str, ...] | None = Field(None, min_length=1, max_length=100)
    """It sees and touches only jobs of these projects. Null: of all. Not for admins."""
    user: str | None = None
    """The user of the jobs that it submits. Null: `name`; an admin's jobs have the user that their spec names."""
    expires_in_s: float | None = Field(DEFAULT_TOKEN_S, gt=0, le=10 * 366 * 86400, allow_inf_nan=False)
    """Seconds until it ends. Null: never. Default: 90 days. A token that a token makes ends with it at the latest."""
    personal: bool = False
    """It is a person's, who may make tokens with it that have no more rights and end with it. Only admins say so."""

    @field_validator("projects")
    @classmethod
    def _are_projects(cls, names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for name in names or ():
            if not is_label(name):
                raise ValueError(f"{name!r} is not the name of a project.")
        return names

    @field_validator("user")
    @classmethod
    def _is_user(cls, name: str | None) -> str | None:
        if name is not None and not is_user(name):
            raise ValueError(f"{name!r} is not the name of a user.")
        return name

    @field_validator("role")
    @classmethod
    def _is_not_of_a_cluster(cls, role: Role) -> Role:
        if role is Role.GATEWAY:
            raise ValueError("a gateway's token is of one cluster: POST /v1/clusters/NAME/tokens makes it.")
        return role

    @model_validator(mode="after")
    def _admins_have_no_projects(self) -> Self:
        if self.role is Role.ADMIN and self.projects is not None:
            raise ValueError("role admin is about the whole service and has no projects; use operator.")
        return self


class ClusterTokenRequest(Frozen):
    """A token to be made for the gateway of a cluster."""

    name: _Name = "gateway"
    """Who or what will use it; shown in the audit."""
    expires_in_s: float | None = Field(None, gt=0, le=10 * 366 * 86400, allow_inf_nan=False)
    """Seconds until it ends; a gateway that shows it then ends. Null: never. Default: never."""

    def of(self, cluster: str) -> TokenRequest:
        """The token of this cluster."""
        return TokenRequest.model_construct(
            name=self.name,
            role=Role.GATEWAY,
            projects=None,
            user=f"cluster-{cluster}",
            expires_in_s=self.expires_in_s,
            personal=False,
        )


class TokenView(Frozen):
    """A token, without its secret."""

    id: str
    name: str
    role: Role
    projects: tuple[str, ...] | None
    user: str
    """Empty: the user that a spec names."""
    created_at: float
    created_by: str
    """Name of the principal that made it."""
    expires_at: float | None
    """Null: never."""
    revoked_at: float | None
    last_used_at: float | None
    """Last use, with a precision of a minute. Null: never."""
    cluster: str | None = None
    """The cluster whose gateway shows it. Null: it is not the token of a gateway."""
    parent: str | None = None
    """Id of the token that made it and that it ends with. Null: an admin made it, or a person with a JWT."""
    personal: bool = False
    """It is a person's, who may make tokens with it."""


class NewToken(TokenView):
    """A token that has just been made."""

    token: str
    """The token itself. It is shown only here: the service keeps its SHA-256."""


class Whoami(Frozen):
    """Who makes this request."""

    name: str
    role: Role
    projects: tuple[str, ...] | None
    user: str
    token_id: str
    """Empty: the token is one of the OIDC issuer."""
    expires_at: float | None
    permissions: tuple[Permission, ...]
    makes_tokens: bool = False
    """It may make tokens: it is a person's, or an admin's."""
    csrf_token: str = ""
    """Only with a session's cookie: the header X-CSRF-Token of every change."""


class AuditEvent(Frozen):
    """Something that was done through the API, or was refused."""

    number: int
    """Larger for later ones."""
    at: float
    actor: str
    """Name of the principal."""
    role: str
    token_id: str
    """Empty: it has shown a JWT of the issuer."""
    address: str
    """Where the request came from."""
    operation: str
    """Method and route."""
    path: str
    job_id: str
    """The job that it was about; empty: none."""
    outcome: str
    """`done`, or the code of the problem with which it was refused."""


class AuditPage(Frozen):
    """Newest first."""

    items: tuple[AuditEvent, ...]
    next_before: int | None
    """`before` of the next page; null: this is the last one."""


class SessionRequest(Frozen):
    """How a session of the page begins: with a token, or with the code of a link."""

    token: str = Field("", max_length=16_384)
    code: str = Field("", max_length=200)

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if bool(self.token) == bool(self.code):
            raise ValueError("give either token or code.")
        return self


class SessionLink(Frozen):
    """A link that logs a browser in, once."""

    path: str
    """Below the address of the server. The code is behind the #, so that it is neither sent nor logged."""
    code: str
    expires_at: float
