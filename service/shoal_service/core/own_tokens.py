"""Tokens that people make for themselves: who may make one, what it may do, and which tokens are whose.

A token that was made with another one, its parent, has no more rights than it, ends with it at the latest, and makes no
further ones. So whatever holds a token gains nothing by making others: the admin who revokes the token revokes them
too. Tokens are for programs unless an admin says that one is a person's; only that one, and a JWT of the issuer, which
is always a person's, make others.

Decision 0039 has the reasons. Pure; the store (`store/access.py`) applies it and the HTTP edge asks it.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal_service.core.access import PERMISSIONS, Permission, Principal, Refusal, Role, refusal_of

MAX_OWN_TOKENS = 50
"""Valid tokens that one person has made, at most."""
MAX_NAME = 63


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a person asks for. `projects` None: those of the person; `user` None: the person's."""

    name: str
    role: Role
    projects: frozenset[str] | None
    user: str | None
    personal: bool
    expires_at: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What the token of a person gets."""

    name: str
    """`ada/laptop`: the audit shows whose it is, and no admin makes a name with a slash."""
    role: Role
    projects: frozenset[str] | None
    user: str
    expires_at: float | None
    parent: str
    """Id of the token that it ends with. Empty: it was made with a JWT, and ends when that one would."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What decides whose a stored token is."""

    token_id: str
    parent: str
    user: str
    role: Role
    projects: frozenset[str] | None


def manages(principal: Principal) -> bool:
    """Return whether it makes, sees and revokes the tokens of all."""
    return refusal_of(principal, Permission.TOKENS_MANAGE) is None


def makes_own(principal: Principal) -> bool:
    """Return whether it is a person, who may make tokens."""
    return refusal_of(principal, Permission.TOKENS_OWN) is None and (principal.personal or not principal.token_id)


def grant_of(principal: Principal, wish: Wish, num_valid: int) -> Grant | Refusal:
    """What a token that this person asks for gets. `num_valid`: the valid tokens that the person has made already."""
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
    if wish.user is not None and wish.user != principal.user:
        return Refusal(f"user is {wish.user!r}; jobs of a token of {principal.name} have the user {principal.user!r}.")
    if num_valid >= MAX_OWN_TOKENS:
        return Refusal(f"{principal.name} has made {num_valid} tokens that are valid, the most: revoke one first.")
    return Grant(
        name=name,
        role=wish.role,
        projects=projects,
        user=principal.user,
        expires_at=min((at for at in (wish.expires_at, principal.expires_at) if at is not None), default=None),
        parent=principal.token_id,
    )


def is_own(principal: Principal, token: Held) -> bool:
    """Return whether it may see and revoke the token: itself, what it has made, and, for a person, those of the same
    user that may do no more than the person's."""
    if principal.token_id and principal.token_id in (token.token_id, token.parent):
        return True
    is_of_user = bool(principal.user) and token.user == principal.user
    return makes_own(principal) and is_of_user and _covers(principal, token)


def _covers(principal: Principal, token: Held) -> bool:
    within = principal.projects is None or (token.projects is not None and token.projects <= principal.projects)
    return within and _rights(token.role) <= _rights(principal.role)


def _rights(role: Role) -> frozenset[Permission]:
    return frozenset(permission for permission, row in PERMISSIONS.items() if role in row.roles)
