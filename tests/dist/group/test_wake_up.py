"""Waking ranks out of a collective, repeatedly, and which sockets that affects."""

from __future__ import annotations

import socket
from typing import Any

from shoal_workers.contract.messages import ExitKind
from shoal_workers.engine.group.gloo import GlooSockets, listening_addresses

ROUNDS = 8
SPEC: dict[str, Any] = {
    "batch": {"global_size": 8, "micro_size": 1},
    "stop": {"steps": 1000},
    "checkpoint": {"every_steps": None},
    "validation": {"samples": 0},
    "elasticity": {"max_workers": 4},
}


def test_the_three_peers_of_a_stopped_rank_are_woken_long_before_their_timeout(make_job: Any) -> None:
    job = make_job(**SPEC)
    workers = job.workers(4)
    for turn in range(ROUNDS):
        held = workers[turn % 4]
        held.strike(("forward", "backward", "optimizer")[turn % 3], 1, "hold")
        job.start(workers)
        held.reached()
        others = [worker for worker in workers if worker is not held]
        exits = job.interrupt(others)
        # the last one may see that the others have left before its own interrupt arrives
        assert {e.kind for e in exits} <= {ExitKind.INTERRUPTED, ExitKind.COLLECTIVE_FAILED}
        held.call("interrupt", job.generation)
        held.call("go")
        assert held.exit().kind is ExitKind.INTERRUPTED


def test_only_connections_of_the_known_addresses_are_shut_and_never_a_listener() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        strangers = _connected(other)
        sockets = GlooSockets()
        sockets.before_groups()
        with socket.create_server(("127.0.0.1", 0)) as gloo:
            known = _connected(gloo)
            assert sockets.after_groups() == {gloo.getsockname()}
            assert sockets.sweep() == 1, "the accepted end of ours"
            known[1].settimeout(5)
            assert known[1].recv(1) == b"", "the waiting thread is woken"
            strangers[0].sendall(b"x")
            assert strangers[1].recv(1) == b"x"
            assert gloo.getsockname() in listening_addresses()
            late = _connected(gloo)
        for end in (*strangers, *known, *late):
            end.close()


def test_a_peers_port_is_recognised_by_its_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as peer:
        sockets = GlooSockets()
        sockets.before_groups()
        sockets.after_groups()
        ours, theirs = _connected(peer)
        sockets.learn_peers([("10.0.0.1", peer.getsockname()[1])])
        assert sockets.sweep() == 0, "the same port of another host"
        sockets.learn_peers([("0.0.0.0", peer.getsockname()[1])])
        assert sockets.sweep() == 1
        assert ours.recv(1) == b""
        ours.close()
        theirs.close()


def _connected(server: socket.socket) -> tuple[socket.socket, socket.socket]:
    ours = socket.create_connection(server.getsockname())
    theirs, _ = server.accept()
    return ours, theirs
