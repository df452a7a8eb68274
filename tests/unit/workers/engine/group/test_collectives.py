"""Collectives are waited for, logged, and replaced where their waits could not be left."""

from __future__ import annotations

import socket
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from shoal_workers.engine.group.collectives import CollectiveLog, _WaitingThread, replace_functional_all_reduce
from shoal_workers.engine.group.gloo import LinkMeter


class _Operation:
    """Stands for a collective and its tensors, which live as long as it does."""


def test_an_operation_is_freed_once_it_was_waited_for() -> None:
    thread, operation = _WaitingThread(), _Operation()
    freed = weakref.ref(operation)

    def plain_wait(work: Any) -> bool:
        return work is freed()

    thread.wait(plain_wait, operation, lambda: None)  # type: ignore[arg-type]
    del operation
    assert freed() is None
    thread.end()


SMALL, LARGE = torch.zeros(2), torch.zeros(100)


def step(log: CollectiveLog, *calls: tuple[str, object]) -> None:
    log.begin_step()
    for method, tensors in calls:
        log.called(method, (tensors,))
    log.end_step()


def test_the_newest_call_has_its_number_its_name_and_its_bytes() -> None:
    log = CollectiveLog()
    assert log.newest.describe() == "none number 0 (0 bytes)"
    step(log, ("_allgather_base", LARGE), ("allreduce", [SMALL]))
    log.called("broadcast", ([LARGE, SMALL],))
    assert log.newest.describe() == "broadcast number 3 (408 bytes)"


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


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("operation", ["sum", "max"])
def test_the_result_is_a_new_tensor(group: dist.ProcessGroup, operation: str) -> None:
    replace_functional_all_reduce()
    replace_functional_all_reduce()
    given = torch.arange(6.0).view(2, 3).t()
    reduced = functional.all_reduce(given, operation, group)
    assert torch.equal(reduced, given)
    assert reduced.data_ptr() != given.data_ptr()
