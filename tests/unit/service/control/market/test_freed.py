"""Where the workers of a job that starts are expected: on the places that others give back for it."""

from shoal_service.clusters.snapshot import Reservation
from shoal_service.control.market.outlook import freed_places
from shoal_service.core.scheduling.market import Preempt, Resize, Start, WorkerNeed

ONE = WorkerNeed(cpus=1.0)
HELD = [Reservation(f"shoal/a/1/worker-{index}", "a", f"n{index // 4}", ONE) for index in range(12)]
GRANTS = {"a": 12, "urgent": 0, "later": 0}


def test_a_job_that_shrinks_gives_up_its_newest_workers() -> None:
    changes = [Resize("a", 9, "r"), Start("urgent", 3, "r")]
    assert freed_places(changes, GRANTS, HELD) == {"urgent": {"n2": 3}}
    assert freed_places([Resize("a", 6, "r"), Start("urgent", 6, "r")], GRANTS, HELD) == {"urgent": {"n1": 2, "n2": 4}}


def test_a_preempted_job_gives_up_all_and_two_jobs_share_the_places() -> None:
    changes = [Preempt("a", "r", "urgent"), Start("urgent", 8, "r"), Start("later", 8, "r")]
    assert freed_places(changes, GRANTS, HELD) == {"urgent": {"n0": 4, "n1": 4}, "later": {"n2": 4}}


def test_nothing_is_expected_where_places_are_free_or_workers_are_not_alive() -> None:
    assert freed_places([Start("urgent", 3, "r")], GRANTS, HELD) == {}
    assert freed_places([Resize("a", 13, "r"), Start("urgent", 3, "r")], GRANTS, HELD) == {}
    starting = [Reservation(one.worker_id, one.job_id, one.node_id, ONE, is_alive=False) for one in HELD]
    assert freed_places([Preempt("a", "r", "urgent"), Start("urgent", 3, "r")], GRANTS, starting) == {}
