"""Whom the ranks of a group that stands still wait for, which node has a bad link, and whom an incident suspects."""

from typing import Any

from shoal_service.core.attempt.state.attempt import GroupBefore, Incident
from shoal_service.core.culprit import Ends, Sample, suspect_of, whom_do_they_wait_for, whose_link
from shoal_workers.contract.job import IncidentCause
from shoal_workers.contract.messages import ExitKind, Frame, Phase, StackSource, WorkerExit, WorkerStack
from shoal_workers.contract.suspects import Collective, Link, Resource, Suspect

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


A, B, C = "10.0.0.1", "10.0.0.2", "10.0.0.3"


def link(peer: str, rtt_s: float = 0.0005, sent: int = 1000, resent: int = 0) -> Link:
    return Link(peer_ip=peer, rtt_s=rtt_s, sent=sent, resent=resent)


def test_the_node_at_which_all_slow_connections_end_is_suspected() -> None:
    found = whose_link(
        [
            Ends(0, A, [link(B), link(C, 0.08)]),
            Ends(1, B, [link(A), link(C, 0.081)]),
            Ends(2, C, [link(A, 0.08), link(B, 0.081)]),
        ]
    )
    assert found is not None
    assert (found.resource, found.ranks, found.node_ip) == (Resource.NETWORK, (2,), C)
    assert "10.0.0.1 - 10.0.0.3: a round trip takes 80 ms" in found.evidence


def test_so_is_the_one_that_loses_packets_with_all_its_ranks() -> None:
    found = whose_link(
        [
            Ends(0, A, [link(B, resent=40), link(C, resent=45)]),
            Ends(1, A, [link(B, resent=38)]),
            Ends(2, B, [link(A), link(C)]),
            Ends(3, C, [link(A, resent=12), link(B, resent=0)]),
        ]
    )
    assert found is not None and (found.ranks, found.node_ip) == ((0, 1), A)


def test_of_two_nodes_the_connection_is_named_and_no_node() -> None:
    found = whose_link([Ends(0, A, [link(B, 0.2)]), Ends(1, B, [link(A, 0.2)])])
    assert found is not None and (found.ranks, found.node_ip) == ((), "")
    assert found.evidence == (f"{A} - {B}: a round trip takes 200 ms",)


def test_good_connections_and_those_within_a_node_accuse_nobody() -> None:
    assert whose_link([Ends(0, A, [link(B), link(A, 9.0)]), Ends(1, B, [link(A, resent=1)])]) is None
    assert whose_link([]) is None


def test_a_single_bad_connection_of_three_suspects_neither_end() -> None:
    found = whose_link(
        [Ends(0, A, [link(B, 0.1), link(C)]), Ends(1, B, [link(A, 0.1), link(C)]), Ends(2, C, [link(A), link(B)])]
    )
    assert found is not None and found.ranks == ()


def incident(cause: IncidentCause, *ranks: int) -> Incident:
    before = GroupBefore(generation=1, num_workers=3)
    return Incident(
        id=1, cause=cause, witness="run call", message="killed by signal 9", ranks=ranks, before=before, at=1.0
    )


def left(rank: int, *suspects: int) -> WorkerExit:
    named = Suspect(resource=Resource.PROGRAM, ranks=suspects, evidence=("it called a barrier",)) if suspects else None
    return WorkerExit(generation=1, rank=rank, kind=ExitKind.COLLECTIVE_FAILED, step=4, suspect=named)


def test_a_lost_worker_is_suspected_with_its_end_as_evidence() -> None:
    found = suspect_of(incident(IncidentCause.WORKER_DIED, 2), (), all_left=False)
    assert found is not None and (found.resource, found.ranks) == (Resource.PROCESS, (2,))
    assert found.evidence == ("the worker's process died", "killed by signal 9", "noticed by: run call")


def test_a_rank_that_names_itself_is_suspected_once_all_have_left() -> None:
    broken, exits = incident(IncidentCause.COLLECTIVE_FAILED), (left(0), left(1, 1), left(2))
    assert suspect_of(broken, exits[:2], all_left=False) is None
    found = suspect_of(broken, exits, all_left=True)
    assert found is not None and (found.resource, found.ranks) == (Resource.PROGRAM, (1,))


def test_if_most_ranks_name_themselves_none_is_suspected() -> None:
    exits = (left(0, 0), left(1, 1), left(2))
    assert suspect_of(incident(IncidentCause.COLLECTIVE_FAILED), exits, all_left=True) is None


def test_a_group_that_broke_without_a_witness_suspects_nobody() -> None:
    assert suspect_of(incident(IncidentCause.COLLECTIVE_FAILED), (left(0), left(1)), all_left=True) is None
