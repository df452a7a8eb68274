"""Decisions about webhooks: which events a hook selects, what hooks of specs may reach, and when a failed delivery is
tried again or given up.

Without the rules whoever submits a job has the server post to whatever the server reaches: its own loopback, the
metadata of a cloud machine (169.254.169.254), the hosts of a private network. Hooks of the settings are an
administrator's and have no rules.

A lane is one hook for one job. Its events are delivered in order: while one fails, the later ones wait.

    event 7   x  1 s  x  2 s  x  4 s  x ... 600 s  x ... 600 s  x     24 h after its first failure: given up,
    event 8   waits                                                   and with it all that have waited as long

Pure: `control/webhooks.py` resolves names and delivers, `store/webhooks` keeps the cursors. It never opens a connection
and never sees a secret.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from shoal_service.core.events.catalogue import CATALOGUE
from shoal_workers.contract import WebhookSpec, backoff_s, is_label

OF_JOBS = "jobs"
"""Name in metrics of the hooks of all specs together."""
_OWN = "webhook."
"""Events about deliveries are never delivered: two receivers that are away would cause each other's events for ever."""
ANY = "*"
"""Every project, or every secret."""
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_TRANSLATED = ipaddress.IPv6Network("64:ff9b::/96")
"""NAT64 (RFC 6052): the last four bytes are an IPv4 address."""


class ServiceWebhook(WebhookSpec):
    """A hook of the settings: events of all jobs."""

    name: str = Field(max_length=63)
    """Unique; lower-case letters, digits and dashes. Names the cursors in the store, and the hook in metrics."""

    @field_validator("name")
    @classmethod
    def _is_free(cls, name: str) -> str:
        if not is_label(name) or name == OF_JOBS:
            raise ValueError(
                f"name {name!r} is not valid: use at most 63 lower-case letters, digits and inner dashes, and not "
                f"{OF_JOBS!r}, which stands for the hooks of specs."
            )
        return name


def selects(patterns: Iterable[str], type_: str) -> bool:
    """Return whether a hook with these patterns is sent events of this type."""
    if type_.startswith(_OWN):
        return False
    return any(pattern in ("*", type_) or _is_below(pattern, type_) for pattern in patterns)


def unknown_patterns(patterns: Iterable[str]) -> tuple[str, ...]:
    """The patterns that select no type of the catalogue: probably typing errors."""
    return tuple(pattern for pattern in patterns if not any(selects((pattern,), type_) for type_ in CATALOGUE))


def _is_below(pattern: str, type_: str) -> bool:
    return pattern.endswith(".*") and type_.startswith(pattern.removesuffix("*"))


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookRules:
    """By default public addresses, and no secret."""

    hosts: frozenset[str] = frozenset()
    """Names in lower case that may have any address."""
    networks: tuple[_Network, ...] = ()
    """Reachable beside what is public."""
    secrets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By project: references that its specs may name. ANY stands for every project, and for every reference."""

    @staticmethod
    def read(receivers: str, secrets: Mapping[str, tuple[str, ...]]) -> WebhookRules:
        """`receivers`: names, addresses and networks, separated by commas. ValueError names one that is none."""
        hosts, networks = set(), []
        for receiver in filter(None, (part.strip().lower() for part in receivers.split(","))):
            try:
                networks.append(ipaddress.ip_network(receiver))
            except ValueError as error:
                if "/" in receiver or ":" in receiver or receiver.replace(".", "").isdigit():
                    raise ValueError(f"{receiver!r} is not a host, an address or a network: {error}.") from None
                hosts.add(receiver)
        return WebhookRules(hosts=frozenset(hosts), networks=tuple(networks), secrets=dict(secrets))

    def usable(self, host: str, addresses: Iterable[str]) -> tuple[str, ...]:
        """The addresses of `host` that a webhook may connect to, in their order."""
        if host.lower().rstrip(".") in self.hosts:
            return tuple(addresses)
        return tuple(address for address in addresses if self._allows(ipaddress.ip_address(address.partition("%")[0])))

    def refusal_of_receiver(self, hook: WebhookSpec) -> str:
        """Why the URL can never be called, as far as it can be known without resolving its name; empty: unknown."""
        host = (urlsplit(hook.url).hostname or "").lower().rstrip(".")
        is_own = host == "localhost" or host.endswith(".localhost")
        try:
            addresses = ["127.0.0.1"] if is_own else [str(ipaddress.ip_address(host))]
        except ValueError:
            return ""
        return "" if self.usable(host, addresses) else refused(host)

    def refusal_of_secret(self, hook: WebhookSpec, project: str) -> str:
        """Why specs of this project may not name the hook's secret; empty: they may."""
        given = {*self.secrets.get(project, ()), *self.secrets.get(ANY, ())}
        if ANY in given or hook.secret in given:
            return ""
        known = ", ".join(sorted(given)) or "none"
        return (
            f"the project {project!r} may not use the secret {hook.secret}; its secrets are: {known}. An administrator "
            "gives it one in SHOAL_WEBHOOK_PROJECT_SECRETS."
        )

    def _allows(self, address: _Address) -> bool:
        inner = _inner(address)
        if any(candidate in network for candidate in (address, inner) for network in self.networks):
            return True
        return inner.is_global and not (inner.is_multicast or inner.is_reserved or inner.is_unspecified)


UNRESTRICTED = WebhookRules(
    networks=(ipaddress.ip_network("0.0.0.0/0"), ipaddress.ip_network("::/0")), secrets={ANY: (ANY,)}
)
"""Rules that tests use, and applications that have no accounts."""


def refused(host: str) -> str:
    return (
        f"{host} has no address that webhooks of specs may reach: only public ones, and what an administrator lists in "
        "SHOAL_WEBHOOK_RECEIVERS"
    )


def _inner(address: _Address) -> _Address:
    """The IPv4 address that an IPv6 address leads to, if it leads to one."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _TRANSLATED:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    if address.teredo is not None:
        return address.teredo[1]
    return address.ipv4_mapped or address.sixtofour or address


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Durations in seconds."""

    first_s: float = 1.0
    """Pause before the second attempt; it doubles with each failure, up to `longest_s`."""
    longest_s: float = 600.0
    """Longest pause between two attempts."""
    give_up_s: float = 86_400.0
    """An event is given up after it has waited this long for a receiver that fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """What is known of the failures of a lane since its last success."""

    num_failed: int = 0
    failing_since: float | None = None
    """Wall-clock time of the first failure."""
    next_at: float | None = None
    """Wall-clock time of the next attempt; None means at once."""

    def is_due(self, now: float) -> bool:
        return self.next_at is None or self.next_at <= now


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What follows from a failed attempt."""

    retries: Retries
    num_given_up: int
    """Events at the head of the lane that are not tried any more."""
    reason: str


def after_failure(
    before: Retries, waiting: Sequence[float], *, now: float, spread: float, policy: RetryPolicy
) -> Verdict:
    """The attempt to deliver the first of the waiting events has failed at `now`.

    Args:
        waiting: wall-clock times of the waiting events, in their order; the first one has failed.
        spread: 0 to 1, different for each lane, so that lanes that failed together are not tried together.
    """
    assert waiting, "an attempt delivers an event"
    num_failed = before.num_failed + 1
    since = now if before.failing_since is None else min(before.failing_since, now)
    pause_s = backoff_s(num_failed, first_s=policy.first_s, longest_s=policy.longest_s) * (0.75 + spread / 2)
    expired = len(list(takewhile(lambda at: now - max(at, since) >= policy.give_up_s, waiting)))
    return Verdict(
        retries=Retries(num_failed=num_failed, failing_since=since, next_at=now + pause_s),
        num_given_up=expired,
        reason=f"failure {num_failed} in {now - since:.0f} s, next attempt in {pause_s:.1f} s"
        + (f", {expired} of {len(waiting)} given up after {policy.give_up_s:.0f} s" if expired else ""),
    )
