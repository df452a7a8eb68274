"""Drains and probation, on either database."""

from typing import Any

import pytest

from shoal_service.core.nodes import Cordon
from shoal_service.reports import SuspectedNode
from shoal_service.store import Lease, Store, histories, node_records
from shoal_service.store.node_records import Suspicion
from shoal_service.views import WorkerView


def test_a_cordon_lasts_until_it_is_undone_or_its_node_has_left(store: Store, lease: Lease) -> None:
    store.writing(node_records.cordon)("n1", reason="bad fan", now=1.0)
    store.writing(node_records.cordon)("n1", reason="new fan", now=2.0)
    assert store.reading(node_records.cordons)() == {"n1": Cordon(reason="new fan", requested_at=2.0)}
    assert store.writing(node_records.uncordon)("n1") and not store.writing(node_records.uncordon)("n1")
    store.writing(node_records.cordon)("n2", reason="r", now=3.0)
    store.writing(node_records.forget, lease.epoch)(frozenset({"n2"}))
    assert store.reading(node_records.cordons)() == {}


def worker(node_id: str) -> WorkerView:
    of_worker = {
        "worker_id": "w",
        "rank": 0,
        "state": "training",
        "pid": 7,
        "generation": 1,
        "phase": "idle",
        "step": 0,
    }
    return WorkerView.model_validate({**of_worker, "phase": "idle", "node_id": node_id, "node_ip": "10.0.0.1"})


def test_the_jobs_on_a_node_get_an_event_of_its_cordon(store: Store, submit: Any, begin: Any) -> None:
    there, elsewhere = begin(submit()), begin(submit())
    for attempt, node_id in ((there, "n1"), (elsewhere, "n2")):
        attempt.report(workers=(worker(node_id),))
    store.writing(node_records.cordon)("n1", reason="bad fan", now=20.0)
    assert [event.type for event in store.reading(histories.read_events)(there.job_id)][-1] == "node.cordoned"
    assert "node.cordoned" not in [event.type for event in store.reading(histories.read_events)(elsewhere.job_id)]


def test_the_control_loop_is_woken_by_a_drain(store: Store) -> None:
    reported: list[str] = []
    with store.subscribe(reported.append):
        store.writing(node_records.request_drain)("n1", reason="r", deadline=None, now=1.0)
        store.writing(node_records.undo_drain)("n1")
        store.writing(node_records.undo_drain)("n1")
    assert len(reported) == 2


@pytest.fixture
def attempt(submit: Any, begin: Any) -> Any:
    return begin(submit())


@pytest.fixture
def another(submit: Any, begin: Any) -> Any:
    return begin(submit())


@pytest.fixture
def suspected(store: Store, attempt: Any) -> Suspicion:
    """A node that a job's supervisor has suspected at 5, stored at 6; health.probation_s is 600."""
    attempt.report(now=6.0, suspects=(SuspectedNode(at=5.0, node_id="n1", reason="computes wrong"),))
    return store.reading(node_records.suspicions)()["n1"]


def test_a_suspicion_begins_a_probation_of_the_jobs_own_length(suspected: Suspicion, attempt: Any) -> None:
    assert suspected == Suspicion(
        node_id="n1",
        reason="computes wrong",
        since=5.0,
        job_id=attempt.job_id,
        attempt=1,
        probation_s=600.0,
        next_test_at=36.0,
        num_tests=0,
        job_ids=(attempt.job_id,),
        avoided_until=606.0,
    )


def test_the_evidence_of_each_job_is_kept_once(store: Store, suspected: Suspicion, attempt: Any, another: Any) -> None:
    attempt.report(now=20.0, suspects=(SuspectedNode(at=20.0, node_id="n1", reason="again"),))
    assert store.reading(node_records.suspicions)()["n1"].job_ids == (attempt.job_id,)
    another.report(now=30.0, suspects=(SuspectedNode(at=30.0, node_id="n1", reason="a GPU failed"),))
    after = store.reading(node_records.suspicions)()["n1"]
    assert after.job_ids == (attempt.job_id, another.job_id)
    assert (after.reason, after.since, after.avoided_until) == ("a GPU failed", 5.0, 630.0)


def test_a_test_that_passes_early_is_repeated(store: Store, suspected: Suspicion, attempt: Any, lease: Any) -> None:
    store.writing(node_records.repeat_test, lease.epoch)(suspected, next_test_at=606.0)
    after = store.reading(node_records.suspicions)()["n1"]
    assert (after.next_test_at, after.num_tests, after.job_ids) == (606.0, 0, (attempt.job_id,))


def test_a_test_that_fails_is_counted_and_repeated_later(store: Store, suspected: Suspicion, lease: Any) -> None:
    store.writing(node_records.postpone_test, lease.epoch)("n1", reason="matmul", next_test_at=1800.0)
    [after] = store.reading(node_records.suspicions)().values()
    assert (after.reason, after.next_test_at, after.num_tests, after.since) == ("matmul", 1800.0, 1, 5.0)


def test_a_node_that_passes_its_test_is_cleared_with_an_event_of_its_job(
    store: Store, suspected: Suspicion, attempt: Any, lease: Any
) -> None:
    assert store.writing(node_records.clear_suspicion, lease.epoch)(suspected, now=700.0)
    assert store.reading(node_records.suspicions)() == {}
    event = store.reading(histories.read_events)(attempt.job_id)[-1]
    assert event.type == "node.cleared"
    assert event.data == {"node_id": "n1", "suspected_s": 695.0, "reason": "computes wrong"}


def test_a_test_does_not_clear_a_newer_suspicion(store: Store, suspected: Suspicion, attempt: Any, lease: Any) -> None:
    again = (SuspectedNode(at=50.0, node_id="n1", reason="died again"),)
    attempt.report(now=51.0, suspects=again)
    assert not store.writing(node_records.clear_suspicion, lease.epoch)(suspected, now=700.0)
    [after] = store.reading(node_records.suspicions)().values()
    assert (after.reason, after.since, after.next_test_at) == ("died again", 5.0, 81.0)


def test_nodes_that_left_the_cluster_are_forgotten(store: Store, suspected: Suspicion, lease: Any) -> None:
    store.writing(node_records.request_drain)("n1", reason="r", deadline=None, now=1.0)
    store.writing(node_records.request_drain)("n2", reason="r", deadline=None, now=1.0)
    store.writing(node_records.forget, lease.epoch)(frozenset({"n1"}))
    assert store.reading(node_records.suspicions)() == {} and list(store.reading(node_records.drains)()) == ["n2"]
