"""Finds the address at which the supervisors of a cluster reach this server, and the certificate that it has there."""

from __future__ import annotations

import ipaddress
import logging
import re
import socket

from shoal_service.home import Home
from shoal_service.settings import Settings, is_loopback

_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----\n?", re.DOTALL)
_UNREACHABLE = (
    "The server listens on {host} only, and supervisors on other machines cannot report to it: their jobs train, and "
    "show no progress. Listen on an address that the nodes reach (--host), or set SHOAL_HOME_URL."
)
_log = logging.getLogger(__name__)


def find_home(settings: Settings, host: str, port: int) -> Home:
    """Return the home without a token. The server listens on `host` and `port`."""
    if settings.home_url:
        return Home(url=settings.home_url, ca=settings.home_ca.read_text() if settings.home_ca is not None else "")
    ray_host = (settings.ray_address or "").rpartition(":")[0].strip("[]")
    if ray_host and is_loopback(host) and not (ray_host == "auto" or is_loopback(ray_host)):
        _log.warning("home.unreachable", extra={"reason": _UNREACHABLE.format(host=host)})
    if ipaddress.ip_address(host).is_unspecified:
        host = _find_address_towards(ray_host) if ray_host else find_local_address(host)
    netloc = format_netloc(host, port)
    if settings.tls_cert is None:
        return Home(url=f"http://{netloc}")
    certificate = _CERTIFICATE.search(settings.tls_cert.read_text())
    return Home(url=f"https://{netloc}", ca=certificate[0] if certificate is not None else "", is_pinned=True)


def format_netloc(host: str, port: int) -> str:
    """Return host and port as a URL has them."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def find_local_address(host: str) -> str:
    """Return an address at which this machine reaches a server that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _find_address_towards(host: str) -> str:
    """Return the address of this machine that packets to this host have. Nothing is sent."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
