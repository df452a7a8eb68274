"""gloo uses the interface of the route to the other ranks, also if a host's name resolves to loopback."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator

import pytest

from kit.processes.warm import warm_python
from kit.requirements import require
from shoal_workers.engine.group.network_interface import VARIABLE, choose_interface, find_interface, find_local_address

_PAIR = """
import ctypes, sys
from shoal_workers.node_test import pair_fault
namespace, rank, host, port = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
with open(f"/run/netns/{namespace}") as network:
    assert ctypes.CDLL(None).setns(network.fileno(), 0x40000000) == 0, "CLONE_NEWNET"
print(pair_fault(rank, host, port, round_name="pair", timeout_s=20.0) or "whole")
"""
_ADDRESSES = ("10.201.78.1", "10.201.78.2")
_PORT = 29777


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undoes what the function under test sets."""
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.delenv(VARIABLE)


def test_with_a_store_on_loopback_the_group_uses_loopback() -> None:
    choose_interface("127.0.0.1", 1)

    assert os.environ[VARIABLE] == "lo"


@pytest.mark.parametrize("elsewhere", ["127.0.0.1", "192.0.2.7", "::1"])
def test_the_route_to_another_host_is_an_interface_of_this_host(elsewhere: str) -> None:
    towards = find_local_address(elsewhere, 1)
    if towards is None:
        pytest.skip(f"nothing leads to {elsewhere} from here")

    assert find_interface(towards) in {name for _, name in socket.if_nameindex()}


def test_an_interface_that_the_user_has_set_is_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "ib0")

    choose_interface("127.0.0.1", 1)

    assert os.environ[VARIABLE] == "ib0"


def test_a_name_that_does_not_resolve_changes_nothing() -> None:
    choose_interface("no-such-host.invalid", 1)

    assert VARIABLE not in os.environ


def test_an_address_of_no_interface_has_no_name() -> None:
    assert find_interface("203.0.113.7") is None
    assert find_interface("2001:db8::7") is None


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a cable between them; the name of this host leads to neither."""
    require("ip", "ip")
    names = (f"shoaltest{os.getpid()}a", f"shoaltest{os.getpid()}b")
    try:
        for name in names:
            made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
            if made.returncode:
                pytest.skip(f"network namespaces cannot be made here: {made.stderr.strip()}")
        _ip("-n", names[0], "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for name, address in zip(names, _ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", "eth0", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def test_ranks_on_two_hosts_find_each_other(hosts: tuple[str, str]) -> None:
    """Their name resolves to loopback or to an address of neither, which is what gloo would announce."""
    ranks = [
        subprocess.Popen(
            [warm_python(), "-c", _PAIR, host, str(rank), _ADDRESSES[0], str(_PORT)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, host in enumerate(hosts)
    ]
    try:
        outputs = [rank.communicate(timeout=90) for rank in ranks]
    finally:
        for rank in ranks:
            rank.terminate()
            rank.communicate()

    assert [out.strip() for out, _ in outputs] == ["whole", "whole"], outputs


def _ip(*arguments: str) -> None:
    made = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"`ip {' '.join(arguments)}` is refused here: {made.stderr.strip()}")
