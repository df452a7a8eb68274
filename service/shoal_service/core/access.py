"""Who may do what: roles, permissions and principals, the principal of a JWT, the form of tokens, and rate limits.

`PERMISSIONS` is the table: docs/security.md shows it, every route names one of its rows, and tests/http/access asks
every operation of the API as each role. A permission that is not bound to projects is refused to a principal that is.

An API token is `shoal_`, an id of 8 letters and digits, `_`, and a secret of 256 bits. The token of an attempt is
`shoal-attempt_` and such a secret. The id names an API token everywhere and is no secret. Of a whole token the service
keeps only the SHA-256: the secret is random and long, so that a slow hash would add nothing.

The HTTP edge, the store and the clients call it. Pure: it reads no clock, no file and no environment, never sees a
stored token, and gets a JWT's claims only after the signature was verified.

Tokens that people make for themselves: who may make one, what it may do, and which tokens are whose.

A token that was made with another one, its parent, has no more rights than it, ends with it at the latest, and makes no
further ones. So whatever holds a token gains nothing by making others: the admin who revokes the token revokes them
too. Tokens are for programs unless an admin says that one is a person's; only that one, and a JWT of the issuer, which
is always a person's, make others.

Decision 0039 has the reasons. Pure; the store (`store/access.py`) applies it and the HTTP edge asks it.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

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
    TOKENS_OWN = "tokens:own"
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
    Permission.CLUSTER_READ: PermissionRow(_VIEWERS, True, "Read the clusters and their nodes."),
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
        "Drain and cordon nodes, announce preemptions; cordon, label and remove clusters.",
    ),
    Permission.QUOTAS_CHANGE: PermissionRow(_ADMINS, False, "Set the quotas of projects and the limits of users."),
    Permission.RETENTION_RUN: PermissionRow(_ADMINS, False, "Delete what ended jobs leave behind."),
    Permission.TOKENS_OWN: PermissionRow(
        _VIEWERS, True, "List and revoke its own tokens; make them, if it is a person's."
    ),
    Permission.TOKENS_MANAGE: PermissionRow(_ADMINS, False, "Create, list and revoke the tokens of all."),
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
    """The projects whose jobs it sees and touches; None means all."""
    user: str = ""
    """The user of the jobs that it submits; empty: the one that the spec names."""
    token_id: str = ""
    """Id of the token that it has shown; empty: it has shown a JWT of the issuer."""
    expires_at: float | None = None
    cluster: str = ""
    """The cluster that a gateway's token is for."""
    parent: str = ""
    """Id of the token that has made its token and that it ends with; empty: an admin or a JWT has made it."""
    personal: bool = False
    """Its token is a person's, who may make others, see `own_tokens.py`. False for a JWT, although it is a person's."""

    def sees(self, project: str) -> bool:
        return self.projects is None or project in self.projects


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a principal may not do something, for people."""

    reason: str


def refusal_of(principal: Principal, permission: Permission) -> Refusal | None:
    """None if the principal may do this, for the jobs that it sees."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRules:
    """Names of the claims, and what their values mean."""

    user_claim: str = "sub"
    role_claim: str = "roles"
    roles: Mapping[str, Role] = field(default_factory=dict)
    """Value of the role claim -> role; the highest one counts."""
    projects_claim: str = ""
    """Empty: tokens of the issuer are not bound to projects."""


class JwtRefused(ValueError):
    """The token gives no access; the message tells people why."""


def make_principal(claims: Mapping[str, Any], rules: ClaimRules) -> Principal:
    """Make a principal of the claims of a genuine token. Raises JwtRefused if they give no access."""
    # Here, because `shoal --help` shows the roles and must not load pydantic.
    from shoal_workers.contract.placing import is_label, is_user

    user = claims.get(rules.user_claim)
    if not isinstance(user, str) or not is_user(user):
        raise JwtRefused(f"its claim {rules.user_claim!r} is not the name of a user.")
    roles = [rules.roles[value] for value in _texts(claims.get(rules.role_claim)) if value in rules.roles]
    if not roles:
        raise JwtRefused(f"no value of its claim {rules.role_claim!r} gives a role (SHOAL_OIDC_ROLES).")
    role = max(roles, key=list(Role).index)
    projects = None
    if rules.projects_claim and role is not Role.ADMIN:
        projects = frozenset(value for value in _texts(claims.get(rules.projects_claim)) if is_label(value))
        if not projects:
            raise JwtRefused(f"its claim {rules.projects_claim!r} names no project.")
    return Principal(name=user, role=role, projects=projects, user=user, expires_at=float(claims["exp"]))


def _texts(value: Any) -> list[str]:
    """The texts of a list, or the words of one text with spaces between them, as the claim `scope` has them."""
    if isinstance(value, str):
        return value.split()
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


ADMIN_TOKEN_FILE = "admin-token"
"""Name of the file in the state directory that has the token of the server's owner."""
GATEWAY_TOKEN_FILE = "gateway-token"
"""The same, after the name of a cluster and a hyphen: the token of the gateway that the server starts."""
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_FORM = re.compile(r"shoal_([0-9a-z]{8})_[A-Za-z0-9_-]{43}")
_ATTEMPT_PREFIX = "shoal-attempt_"


def new_token() -> str:
    token_id = "".join(secrets.choice(_ALPHABET) for _ in range(8))
    return f"shoal_{token_id}_{secrets.token_urlsafe(32)}"


def new_attempt_token() -> str:
    """Make the token of one attempt, for its supervisor."""
    return f"{_ATTEMPT_PREFIX}{secrets.token_urlsafe(32)}"


def is_attempt_token(token: str) -> bool:
    """Return True if the text has the form of an attempt's token."""
    return token.startswith(_ATTEMPT_PREFIX)


def parse_token_id(token: str) -> str | None:
    """Return the id of a token; None if the text does not have the form of one."""
    match = _FORM.fullmatch(token)
    return match.group(1) if match else None


def hash_secret(secret: str) -> str:
    """Return the hash that is stored of a token, or of a session's cookie."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


@dataclass(frozen=True, slots=True)
class Rate:
    per_s: float
    burst: float


class TokenBuckets:
    """One bucket per key; the keys that were used last are kept. A key that was forgotten has a full bucket."""

    def __init__(self, rate: Rate, *, most_keys: int = 10_000) -> None:
        self._rate = rate
        self._most = most_keys
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_s(self, key: str, now_mono: float) -> float:
        """Takes one: 0. Or, if there is none, seconds until there is one again; then nothing is taken."""
        left, at = self._buckets.pop(key, (self._rate.burst, now_mono))
        left = min(self._rate.burst, left + max(0.0, now_mono - at) * self._rate.per_s)
        wait = 0.0 if left >= 1.0 else (1.0 - left) / self._rate.per_s
        self._buckets[key] = (left - 1.0 if not wait else left), now_mono
        if len(self._buckets) > self._most:
            self._buckets.popitem(last=False)
        return wait


MAX_OWN_TOKENS = 50
"""Valid tokens that one person has made, at most."""
MAX_NAME = 63


def manages(principal: Principal) -> bool:
    """Return whether it makes, sees and revokes the tokens of all."""
    return refusal_of(principal, Permission.TOKENS_MANAGE) is None


def makes_own(principal: Principal) -> bool:
    """Return whether it is a person, who may make tokens."""
    return refusal_of(principal, Permission.TOKENS_OWN) is None and (principal.personal or not principal.token_id)


def decide_grant(principal: Principal, wish: Principal, num_valid: int) -> Principal | Refusal:
    """Return the principal of a token that a person requests, or the reason of a refusal.

    Args:
        wish: the requested principal. Without `projects` or `user` the token gets those of the person.
        num_valid: the valid tokens that the person has made already.
    """
    if not makes_own(principal):
        return Refusal(
            f"The token {principal.token_id} ({principal.name}) was made for a program, so it makes no other tokens. "
            "An admin can make one for a person: shoal token create NAME --personal."
        )
    name = f"{principal.name}/{wish.name}"
    if len(name) > MAX_NAME:
        most = MAX_NAME - len(principal.name) - 1
        return Refusal(f"name {wish.name!r} has {len(wish.name)} letters: after {principal.name}/ at most {most} fit.")
    if wish.personal:
        return Refusal("personal is true, which only an admin may set: tokens that people make are for programs.")
    if not _rights(wish.role) <= _rights(principal.role):
        return Refusal(f"role {wish.role} may do more than {principal.role}, the role of {principal.name}.")
    projects = principal.projects if wish.projects is None else wish.projects
    if projects is not None and principal.projects is not None and not projects <= principal.projects:
        shown = ", ".join(sorted(principal.projects))
        other = ", ".join(sorted(projects - principal.projects))
        return Refusal(f"projects has {other}; {principal.name} has only {shown}.")
    if wish.user and wish.user != principal.user:
        return Refusal(f"user is {wish.user!r}; jobs of a token of {principal.name} have the user {principal.user!r}.")
    if num_valid >= MAX_OWN_TOKENS:
        return Refusal(f"{principal.name} has made {num_valid} tokens that are valid, the most: revoke one first.")
    return Principal(
        name=name,  # `ada/laptop`: the audit shows whose it is, and no admin makes a name with a slash
        role=wish.role,
        projects=projects,
        user=principal.user,
        expires_at=min((at for at in (wish.expires_at, principal.expires_at) if at is not None), default=None),
        parent=principal.token_id,
    )


def is_own(principal: Principal, token: Principal) -> bool:
    """Return whether it may see and revoke the token: itself, what it has made, and, for a person, those of the same
    user that may do no more than the person's."""
    if principal.token_id and principal.token_id in (token.token_id, token.parent):
        return True
    is_of_user = bool(principal.user) and token.user == principal.user
    return makes_own(principal) and is_of_user and _covers(principal, token)


def _covers(principal: Principal, token: Principal) -> bool:
    within = principal.projects is None or (token.projects is not None and token.projects <= principal.projects)
    return within and _rights(token.role) <= _rights(principal.role)


def _rights(role: Role) -> frozenset[Permission]:
    return frozenset(permission for permission, row in PERMISSIONS.items() if role in row.roles)
