"""Whom an incident suspects without stacks."""

from shoal_service.core.attempt.state.attempt import GroupBefore, Incident
from shoal_service.core.culprit import suspect_of
from shoal_workers.contract.job import IncidentCause
from shoal_workers.contract.messages import ExitKind, WorkerExit
from shoal_workers.contract.suspects import Resource, Suspect


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
