"""Whom the ranks of a group that stands still wait for."""

from typing import Any

from shoal_service.core.culprit import Sample, whom_do_they_wait_for
from shoal_workers.contract.messages import Frame, Phase, StackSource, WorkerStack
from shoal_workers.contract.suspects import Collective, Link, Resource

STOPPED = Frame(function="do_signal_stop", file="<kernel>", line=0)


def rank(number: int, *, call: Collective | None = None, node: str = "", **stack: Any) -> Sample:
    shown = {"frames": (Frame(function="f", file="a.py", line=1),), "phase": Phase.FORWARD, "step": 40, **stack}
    return number, node or f"10.0.0.{number}", WorkerStack(worker_id=f"w/{number}", collective=call, **shown)


def called(number: int = 7, name: str = "all-reduce", *, waits: bool = True, deviation: str = "") -> Collective:
    return Collective(number=number, name=name, bytes=8, is_waiting=waits, deviation=deviation)


def test_a_rank_that_answers_nothing_is_suspected_before_all_others() -> None:
    silent = rank(1, frames=(STOPPED,), source=StackSource.PY_SPY)
    found = whom_do_they_wait_for([rank(0, call=called()), silent, rank(2, call=called(waits=False))])
    assert found is not None and (found.resource, found.ranks) == (Resource.PROCESS, (1,))
    assert found.evidence == ("rank 1 is stopped by a signal and answers no call",)


def test_a_rank_that_calls_others_than_in_its_last_step_is_suspected_in_a_group_of_two_as_well() -> None:
    odd = called(8, "broadcast", deviation="called a broadcast of 8 bytes")
    found = whom_do_they_wait_for([rank(0, call=called()), rank(1, call=odd)])
    assert found is not None and (found.resource, found.ranks) == (Resource.PROGRAM, (1,))
    assert found.evidence == ("rank 1 called a broadcast of 8 bytes",)


def test_if_all_ranks_deviate_none_is_suspected_for_it() -> None:
    samples = [rank(n, call=called(deviation="called a barrier of 0 bytes")) for n in range(3)]
    assert whom_do_they_wait_for(samples) is None


def test_the_one_that_does_not_wait_is_suspected_for_what_it_does() -> None:
    loader = Frame(function="of", file="shoal_workers/engine/step/batches.py", line=1)
    busy = rank(2, call=called(6, waits=False), frames=(Frame(function="g", file="shapes.py", line=4), loader))
    found = whom_do_they_wait_for([rank(0, call=called()), rank(1, call=called()), busy])
    assert found is not None and (found.resource, found.ranks) == (Resource.DATA, (2,))
    assert found.evidence[1] == "the others wait in all-reduce number 7 (8 bytes)"
    saving = rank(2, call=called(6, waits=False), phase=Phase.SAVING)
    found = whom_do_they_wait_for([rank(0, call=called()), saving])
    assert found is not None and (found.resource, found.ranks) == (Resource.STORAGE, (2,))


def test_the_one_that_is_behind_is_suspected_and_else_the_minority() -> None:
    found = whom_do_they_wait_for([rank(0, call=called()), rank(1, call=called(5)), rank(2, call=called())])
    assert found is not None and (found.resource, found.ranks) == (Resource.PROGRAM, (1,))
    found = whom_do_they_wait_for([rank(0, call=called()), rank(1, call=called()), rank(2, call=called(9))])
    assert found is not None and found.ranks == (2,)


def test_if_all_wait_in_the_same_collective_the_links_decide() -> None:
    def of(number: int, *peers: int) -> Sample:
        links = tuple(
            Link(peer_ip=f"10.0.0.{p}", rtt_s=0.3 if 2 in (p, number) else 0.001, sent=9, resent=0) for p in peers
        )
        return rank(number, call=called(), links=links)

    found = whom_do_they_wait_for([of(0, 1, 2), of(1, 0, 2), of(2, 0, 1)])
    assert found is not None and (found.resource, found.ranks) == (Resource.NETWORK, (2,))
    assert whom_do_they_wait_for([rank(0, call=called()), rank(1, call=called())]) is None
