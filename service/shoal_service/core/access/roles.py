"""Roles, permissions, principals, and the one function that decides whether a principal may do something.

`PERMISSIONS` is the table: docs/security.md shows it, every route names one of its rows, and tests/http/access asks
every operation of the API as each role. A permission that is not bound to projects is refused to a principal that is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

BOOTSTRAP = "bootstrap"
"""Name of the principal whose token `shoal serve` writes into its state directory."""


class Role(StrEnum):
    """What a token is for; each role from viewer on may do what the one before it may."""

    GATEWAY = "gateway"
    SCRAPER = "scraper"
    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"


ROLE_MEANINGS: Mapping[Role, str] = {
    Role.GATEWAY: "The gateway of one cluster: reports that cluster, carries out orders there, and nothing else.",
    Role.SCRAPER: "Prometheus: reads /metrics and nothing else.",
    Role.VIEWER: "Reads everything about jobs and the cluster, and changes nothing.",
    Role.OPERATOR: "Submits jobs, changes them, and looks into their workers.",
    Role.ADMIN: "Also changes nodes, quotas and tokens, and reads the audit.",
}


class Permission(StrEnum):
    """What a route needs."""

    WHOAMI = "whoami"
    METRICS_READ = "metrics:read"
    JOBS_READ = "jobs:read"
    CLUSTER_READ = "cluster:read"
    USERS_READ = "users:read"
    SPECS_CHECK = "specs:check"
    JOBS_SUBMIT = "jobs:submit"
    JOBS_CHANGE = "jobs:change"
    JOBS_INSPECT = "jobs:inspect"
    CLUSTER_CHANGE = "cluster:change"
    QUOTAS_CHANGE = "quotas:change"
    RETENTION_RUN = "retention:run"
    TOKENS_MANAGE = "tokens:manage"
    AUDIT_READ = "audit:read"
    CLUSTER_SERVE = "cluster:serve"
    ATTEMPT_SERVE = "attempt:serve"


@dataclass(frozen=True, slots=True)
class PermissionRow:
    """A row of the table."""

    roles: frozenset[Role]
    of_projects: bool
    """A principal that is bound to projects may have it too, for their jobs alone."""
    meaning: str


_GATEWAYS = frozenset({Role.GATEWAY})
_ALL = frozenset(Role) - _GATEWAYS
_VIEWERS = frozenset({Role.VIEWER, Role.OPERATOR, Role.ADMIN})
_OPERATORS = frozenset({Role.OPERATOR, Role.ADMIN})
_ADMINS = frozenset({Role.ADMIN})

PERMISSIONS: Mapping[Permission, PermissionRow] = {
    Permission.WHOAMI: PermissionRow(_ALL, True, "See its own name, role and projects; log in to the page and out."),
    Permission.METRICS_READ: PermissionRow(_ALL, True, "Read the metrics."),
    Permission.JOBS_READ: PermissionRow(
        _VIEWERS,
        True,
        "Read jobs with their specs, events, logs, series, checkpoints, profiles and webhooks; the queue.",
    ),
    Permission.CLUSTER_READ: PermissionRow(_VIEWERS, True, "Read the clusters, their nodes and maintenance windows."),
    Permission.USERS_READ: PermissionRow(_VIEWERS, False, "Read the users, their limits, and what they have."),
    Permission.SPECS_CHECK: PermissionRow(_VIEWERS, True, "Check specs, and predict layouts."),
    Permission.JOBS_SUBMIT: PermissionRow(_OPERATORS, True, "Upload code, and submit jobs."),
    Permission.JOBS_CHANGE: PermissionRow(
        _OPERATORS,
        True,
        "Change, move, pause, resume and cancel jobs; pin, verify and delete their checkpoints; delete ended jobs.",
    ),
    Permission.JOBS_INSPECT: PermissionRow(_OPERATORS, True, "Read stacks of running workers, and profile them."),
    Permission.CLUSTER_CHANGE: PermissionRow(
        _ADMINS,
        False,
        "Drain and cordon nodes, announce preemptions, plan maintenance windows; cordon, label and remove clusters.",
    ),
    Permission.QUOTAS_CHANGE: PermissionRow(_ADMINS, False, "Set the quotas of projects and the limits of users."),
    Permission.RETENTION_RUN: PermissionRow(_ADMINS, False, "Delete what ended jobs leave behind."),
    Permission.TOKENS_MANAGE: PermissionRow(_ADMINS, False, "Create, list and revoke tokens."),
    Permission.AUDIT_READ: PermissionRow(_ADMINS, False, "Read the audit."),
    Permission.CLUSTER_SERVE: PermissionRow(
        _GATEWAYS, False, "Report one cluster, read the orders to it and the code archives that they name."
    ),
    Permission.ATTEMPT_SERVE: PermissionRow(
        frozenset(), False, "Report for one attempt and read its directives: no role, only the token of that attempt."
    ),
}


@dataclass(frozen=True, slots=True)
class Principal:
    """Who makes a request."""

    name: str
    role: Role
    projects: frozenset[str] | None = None
    """The projects whose jobs it sees and touches; None: all."""
    user: str = ""
    """The user of the jobs that it submits; empty: the one that the spec names."""
    token_id: str = ""
    """Id of the token that it has shown; empty: it has shown a JWT of the issuer."""
    expires_at: float | None = None
    cluster: str = ""
    """The cluster that a gateway's token is for."""

    def sees(self, project: str) -> bool:
        return self.projects is None or project in self.projects


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a principal may not do something, for people."""

    reason: str


def refusal_of(principal: Principal, permission: Permission) -> Refusal | None:
    """None: the principal may do this, for the jobs that it sees."""
    row = PERMISSIONS[permission]
    if permission is Permission.CLUSTER_SERVE and principal.role is not Role.GATEWAY:
        return Refusal(
            f"{principal.name} has the role {principal.role}; {permission} needs the token of the cluster's gateway. "
            "An admin can make one: shoal token create NAME --cluster CLUSTER."
        )
    if not row.roles:
        return Refusal(
            f"{principal.name} has the role {principal.role}; {permission} needs the token of the attempt, which only "
            "its supervisor has."
        )
    if principal.role not in row.roles:
        needed = next(role for role in Role if role in row.roles)
        return Refusal(
            f"{principal.name} has the role {principal.role}; {permission} needs the role {needed}. An admin can make "
            f"such a token: shoal token create NAME --role {needed}."
        )
    if principal.projects is not None and not row.of_projects:
        shown = ", ".join(sorted(principal.projects)) or "none"
        return Refusal(
            f"{principal.name} is bound to projects ({shown}); {permission} is about the whole service and needs a "
            "token without projects."
        )
    return None
