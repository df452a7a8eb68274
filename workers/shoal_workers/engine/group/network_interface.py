"""Which network interface gloo is to use: the one that leads to the others.

Left alone, gloo announces the address that the host's own name resolves to. That is 127.0.0.1 or 127.0.1.1 on many
machines, and ranks on other hosts then call themselves. The interface is taken from the route to the store instead,
which every rank can reach by definition. A GLOO_SOCKET_IFNAME that the user has set is left as it is.
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
"""Of struct ifreq: behind the name, and the family and port of its sockaddr_in."""
_IPV6_TABLE = Path("/proc/net/if_inet6")


def choose_interface(store_host: str, store_port: int) -> None:
    """Any thread, before the first group: gloo reads the variable each time it makes one. Linux; elsewhere, loopback
    only. Where no interface is found, gloo's own choice stands."""
    if VARIABLE in os.environ:
        return
    name = interface_of(address_towards(store_host, store_port))
    if name is not None:
        os.environ[VARIABLE] = name


def address_towards(host: str, port: int) -> str | None:
    """This host's own address on the route to another; None: no such name, or no route. Sends nothing."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(address)
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return None


def interface_of(address: str | None) -> str | None:
    """The name of the interface that has an address of this host."""
    if address is None:
        return None
    desired = ipaddress.ip_address(address.partition("%")[0])
    if desired.is_loopback:  # 127.0.0.2 is on `lo` too, though not its address
        return "lo" if Path("/sys/class/net/lo").exists() else "lo0"
    if desired.version == 6:
        return _ipv6_interfaces().get(str(desired))
    for _, name in socket.if_nameindex():
        if _ipv4_of(name) == address:
            return name
    return None


def _ipv4_of(name: str) -> str | None:
    request = struct.pack(f"{_REQUEST_SIZE}s", name.encode()[: _NAME_SIZE - 1])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            return socket.inet_ntoa(fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)[_ADDRESS])
        except OSError:  # it has none
            return None


def _ipv6_interfaces() -> dict[str, str]:
    """Address -> interface. A line of the table: address in hex, index, prefix, scope, flags, name."""
    if not _IPV6_TABLE.exists():
        return {}
    lines = [line.split() for line in _IPV6_TABLE.read_text().splitlines()]
    return {str(ipaddress.IPv6Address(bytes.fromhex(fields[0]))): fields[5] for fields in lines}
