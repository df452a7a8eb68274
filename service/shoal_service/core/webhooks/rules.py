"""What the webhooks of specs may do: which addresses they reach, and which secrets of the service sign their messages.

Without these rules whoever submits a job has the server post to whatever the server reaches: its own loopback, the
metadata of a cloud machine (169.254.169.254), the hosts of a private network. Hooks of the settings are an
administrator's and have no rules. Pure: the shell resolves names, and passes every address here before it connects.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from shoal_workers.contract.spec import WebhookSpec

ANY = "*"
"""Every project, or every secret."""
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_TRANSLATED = ipaddress.IPv6Network("64:ff9b::/96")
"""NAT64 (RFC 6052): the last four bytes are an IPv4 address."""


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
        for one in filter(None, (part.strip().lower() for part in receivers.split(","))):
            try:
                networks.append(ipaddress.ip_network(one))
            except ValueError as error:
                if "/" in one or ":" in one or one.replace(".", "").isdigit():
                    raise ValueError(f"{one!r} is not a host, an address or a network: {error}.") from None
                hosts.add(one)
        return WebhookRules(hosts=frozenset(hosts), networks=tuple(networks), secrets=dict(secrets))

    def usable(self, host: str, addresses: Iterable[str]) -> tuple[str, ...]:
        """The addresses of `host` that a webhook may connect to, in their order."""
        if host.lower().rstrip(".") in self.hosts:
            return tuple(addresses)
        return tuple(one for one in addresses if self._allows(ipaddress.ip_address(one.partition("%")[0])))

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
        if any(one in network for one in (address, inner) for network in self.networks):
            return True
        return inner.is_global and not (inner.is_multicast or inner.is_reserved or inner.is_unspecified)


UNRESTRICTED = WebhookRules(
    networks=(ipaddress.ip_network("0.0.0.0/0"), ipaddress.ip_network("::/0")), secrets={ANY: (ANY,)}
)
"""For tests, and for applications that have no accounts."""


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
