"""The principal of a JWT's claims, by the rules of the settings. Pure; the signature was verified before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal_service.core.access.roles import Principal, Role
from shoal_workers.contract.placing import is_label, is_user


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRules:
    """Which claims say what."""

    user_claim: str = "sub"
    role_claim: str = "roles"
    roles: Mapping[str, Role] = field(default_factory=dict)
    """Value of the role claim -> role; the highest one counts."""
    projects_claim: str = ""
    """Empty: tokens of the issuer are not bound to projects."""


class ClaimsRefused(ValueError):
    """The token is genuine, and its claims give no access; the message says which."""


def principal_of(claims: Mapping[str, Any], rules: ClaimRules) -> Principal:
    """Raises ClaimsRefused."""
    user = claims.get(rules.user_claim)
    if not isinstance(user, str) or not is_user(user):
        raise ClaimsRefused(f"its claim {rules.user_claim!r} is not the name of a user.")
    found = [rules.roles[value] for value in _texts(claims.get(rules.role_claim)) if value in rules.roles]
    if not found:
        raise ClaimsRefused(f"no value of its claim {rules.role_claim!r} gives a role (SHOAL_OIDC_ROLES).")
    role = max(found, key=list(Role).index)
    projects = None
    if rules.projects_claim and role is not Role.ADMIN:
        projects = frozenset(value for value in _texts(claims.get(rules.projects_claim)) if is_label(value))
        if not projects:
            raise ClaimsRefused(f"its claim {rules.projects_claim!r} names no project.")
    return Principal(name=user, role=role, projects=projects, user=user, expires_at=float(claims["exp"]))


def _texts(value: Any) -> list[str]:
    """The texts of a list, or the words of one text with spaces between them, as the claim `scope` has them."""
    if isinstance(value, str):
        return value.split()
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []
