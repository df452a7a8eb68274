"""Chooses the network interface that gloo uses: the one on the route to the rendezvous store.

By default gloo announces the address that the host's own name resolves to. On many machines that is 127.0.0.1 or
127.0.1.1, and ranks on other hosts then connect to themselves. Every rank can reach the store, so the interface on the
route to it is right. A GLOO_SOCKET_IFNAME that the user has set is not changed.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path

VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915
_NAME_SIZE = 16
_REQUEST_SIZE = 256
_ADDRESS = slice(20, 24)
"""Position of the address in struct ifreq: after the name, and after family and port of its sockaddr_in."""
_IPV6_TABLE = Path("/proc/net/if_inet6")


def choose_interface(store_host: str, store_port: int) -> None:
    """Set the variable that gloo reads each time it forms a group. From any thread, before the first group.

    Works on Linux; on other systems only for loopback. Without a match gloo's default is used.
    """
    if VARIABLE in os.environ:
        return
    name = find_interface(find_local_address(store_host, store_port))
    if name is not None:
        os.environ[VARIABLE] = name


def find_local_address(host: str, port: int) -> str | None:
    """Return this host's address on the route to another host; sends nothing.

    None if the name of the other host is unknown, or if there is no route.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in addresses:
        with socket.socket(family, kind, protocol) as probe:
            try:
                # A datagram socket that connects only looks up the route; nothing is sent.
                probe.connect(address)
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return None


def find_interface(address: str | None) -> str | None:
    """Return the name of the interface that has this address; None if there is no such interface."""
    if address is None:
        return None
    ip = ipaddress.ip_address(address.partition("%")[0])
    if ip.is_loopback:  # 127.0.0.2 is on `lo` too, although `lo` has another address
        return "lo" if Path("/sys/class/net/lo").exists() else "lo0"
    if ip.version == 6:
        return _read_ipv6_interfaces().get(str(ip))
    return next((name for _, name in socket.if_nameindex() if _read_ipv4_address(name) == address), None)


def _read_ipv4_address(interface: str) -> str | None:
    request = struct.pack(f"{_REQUEST_SIZE}s", interface.encode()[: _NAME_SIZE - 1])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[_ADDRESS])
        except OSError:  # the interface has no IPv4 address
            return None


def _read_ipv6_interfaces() -> dict[str, str]:
    """Return interfaces by address. A line of the table has address in hex, index, prefix, scope, flags, name."""
    if not _IPV6_TABLE.exists():
        return {}
    lines = [line.split() for line in _IPV6_TABLE.read_text().splitlines()]
    return {str(ipaddress.IPv6Address(bytes.fromhex(fields[0]))): fields[5] for fields in lines}
