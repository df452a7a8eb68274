"""How free workers are joined with the jobs that left them."""

from shoal_service.core.worker_changes import FRESH_S, Change, ChangeKind, connected


def left(job: str, at: float, workers: int, cluster: str = "") -> Change:
    return Change(at=at, job=job, kind=ChangeKind.LEAVE, before=workers, after=0, cluster=cluster)


def grew(job: str, at: float, workers: int, others: tuple[tuple[str, int], ...] = (), cluster: str = "") -> Change:
    return Change(at=at, job=job, kind=ChangeKind.GROW, before=1, after=1 + workers, others=others, cluster=cluster)


def test_a_job_grows_because_another_one_has_ended() -> None:
    gone, grown = connected([grew("b", 12.0, 3), left("a", 10.0, 4)])
    assert (gone.job, gone.free, gone.taken_by) == ("a", 4, (("b", 3),))
    assert (grown.free, grown.freed_by) == (3, (("a", 3),))


def test_workers_that_were_left_go_to_one_job_once() -> None:
    _, first, second = connected([left("a", 10.0, 4), grew("b", 11.0, 3), grew("c", 12.0, 3)])
    assert first.freed_by == (("a", 3),) and second.freed_by == (("a", 1),), "the other two were free before"


def test_what_a_job_gives_by_a_decision_is_not_free() -> None:
    gone, grown = connected([left("a", 10.0, 4), grew("b", 11.0, 3, others=(("c", 3),))])
    assert grown.free == 0 and grown.freed_by == () and gone.taken_by == ()


def test_the_newest_workers_go_first_and_old_ones_have_no_giver() -> None:
    at = 10.0 + FRESH_S + 1
    _, _, grown = connected([left("a", 10.0, 4), left("b", at, 1), grew("c", at + 1, 3)])
    assert grown.freed_by == (("b", 1),)


def test_workers_stay_in_their_cluster() -> None:
    _, grown = connected([left("a", 10.0, 4, "east"), grew("b", 11.0, 2, cluster="west")])
    assert grown.freed_by == () and grown.free == 2


def test_an_incident_frees_no_worker() -> None:
    lost = Change(at=10.0, job="a", kind=ChangeKind.LOST, before=4, after=2)
    _, grown = connected([lost, grew("b", 11.0, 2)])
    assert lost.free == 0 and grown.freed_by == ()
