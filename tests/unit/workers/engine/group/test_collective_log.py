"""What the training thread calls, compared with its last step; and what the kernel tells of its connections."""

from __future__ import annotations

import socket

import torch

from shoal_workers.engine.group.collectives import CollectiveLog
from shoal_workers.engine.group.gloo import LinkMeter

SMALL, LARGE = torch.zeros(2), torch.zeros(100)


def step(log: CollectiveLog, *calls: tuple[str, object]) -> None:
    log.begin_step()
    for method, tensors in calls:
        log.called(method, (tensors,))
    log.end_step()


def test_the_newest_call_has_its_number_its_name_and_its_bytes() -> None:
    log = CollectiveLog()
    assert log.newest.words() == "none number 0 (0 bytes)"
    step(log, ("_allgather_base", LARGE), ("allreduce", [SMALL]))
    log.called("broadcast", ([LARGE, SMALL],))
    assert log.newest.words() == "broadcast number 3 (408 bytes)"


def test_a_step_that_repeats_the_last_one_does_not_deviate() -> None:
    log = CollectiveLog()
    for _ in range(3):
        step(log, ("allreduce", [SMALL]), ("reduce_scatter_single", LARGE))
        log.called("barrier", ())  # between two steps: a validation, a comparison of replicas
        assert log.newest.deviation == ""


def test_the_first_difference_to_the_last_step_is_named() -> None:
    for other, words in (
        (("allreduce", [LARGE]), "called an all-reduce of 400 bytes as number 2 of its step"),
        (("broadcast", [SMALL]), "called a broadcast of 8 bytes as number 2 of its step"),
    ):
        log = CollectiveLog()
        for _ in range(2):
            step(log, ("barrier", ()), ("allreduce", [SMALL]))
        log.begin_step()
        log.called("barrier", ())
        log.called(*(other[0], (other[1],)))
        log.called("allreduce", ([SMALL],))
        assert log.newest.deviation.startswith(words)
        assert log.newest.deviation.endswith("an all-reduce of 8 bytes")
    log.end_step()
    log.begin_step()
    assert log.newest.deviation == ""


def test_a_call_after_the_usual_ones_deviates_as_well() -> None:
    log = CollectiveLog()
    for _ in range(2):
        step(log, ("allreduce", [SMALL]))
    log.begin_step()
    for _ in range(2):
        log.called("allreduce", ([SMALL],))
    assert "no further collective" in log.newest.deviation


def test_the_kernel_tells_what_was_sent_to_each_peer_and_how_long_a_round_trip_takes() -> None:
    meter = LinkMeter()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        far, _ = server.accept()
        with far:
            for _ in range(5):
                near.sendall(b"x")
                assert far.recv(1) == b"x"
                far.sendall(b"y")
                assert near.recv(1) == b"y"
            [link] = meter.links([near])
            assert (link.peer_ip, link.resent) == ("127.0.0.1", 0)
            assert link.sent >= 5 and 0 < link.rtt_s < 1
        assert meter.links([]) == ()


def test_a_single_step_is_no_measure_of_the_next_one() -> None:
    log = CollectiveLog()
    step(log, ("broadcast", [SMALL]), ("allreduce", [SMALL]))  # the first of a generation agrees on names
    step(log, ("allreduce", [SMALL]))
    assert log.newest.deviation == ""
