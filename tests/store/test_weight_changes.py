"""A request for other weights of a mixture: the step that is planned, what is refused, and the event."""

from typing import Any

import pytest

from shoal_service.store import Store, histories, submissions
from shoal_service.views import DataPatch, JobPatch
from shoal_workers.contract.checks.spec_errors import SpecError, parse_spec

SOURCES = [{"path": "web/*", "name": "web", "weight": 3}, {"path": "chats", "weight": 1}]
HALF = {"web": 0.5, "chats": 0.5}


@pytest.fixture
def job_id(store: Store) -> str:
    spec = parse_spec({"data": {"sources": SOURCES}, "stop": {"steps": 90}})
    return store.writing(submissions.create)(spec, idempotency_key=None, now=1.0)[0].id


def _patch(store: Store, job_id: str, **data: Any) -> list[dict[str, Any]]:
    changes = JobPatch(data=DataPatch(**data))
    view = store.writing(submissions.patch)(job_id, changes, if_match=None, now=2.0)
    assert view == store.get_job(job_id)
    return list(view.spec.data.get("changes", []))


def test_the_service_chooses_the_step_and_says_which(store: Store, job_id: str) -> None:
    assert _patch(store, job_id, weights=HALF) == [{"at_step": 1, "weights": HALF}]
    [*_, event] = store.reading(histories.read_events)(job_id)
    assert (event.type, event.data["weights"], event.data["at_step"]) == ("job.patched", HALF, 1)
    num = len(store.reading(histories.read_events)(job_id))
    assert _patch(store, job_id, weights=HALF) == [{"at_step": 1, "weights": HALF}]
    assert len(store.reading(histories.read_events)(job_id)) == num, "a request that comes twice changes nothing"


def test_later_changes_give_way_to_one_that_begins_before_them(store: Store, job_id: str) -> None:
    _patch(store, job_id, weights=HALF, at_step=20)
    _patch(store, job_id, weights={"web": 0, "chats": 1}, at_step=40)
    found = _patch(store, job_id, weights={"web": 1, "chats": 0}, at_step=30)
    assert [(one["at_step"], one["weights"]["web"]) for one in found] == [(20, 0.5), (30, 1)]


@pytest.mark.parametrize(
    ("data", "path", "words"),
    [
        ({"weights": {"web": 1}}, "data", "the sources are 'web', 'chats'"),
        ({"weights": {"web": 0, "chats": 0}}, "data", "are all 0"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    data: dict[str, Any], path: str, words: str, store: Store, job_id: str
) -> None:
    with pytest.raises(SpecError) as caught:
        _patch(store, job_id, **data)
    [problem] = caught.value.problems
    assert problem.path == path and words in problem.message
    assert store.get_job(job_id).spec_version == 1


def test_a_job_without_a_mixture_has_no_weights(store: Store) -> None:
    spec = parse_spec({"data": {"corpus": "python-stdlib"}, "stop": {"steps": 90}})
    job, _ = store.writing(submissions.create)(spec, idempotency_key=None, now=1.0)
    with pytest.raises(SpecError, match=r"data\.weights: the job has no data\.sources"):
        _patch(store, job.id, weights=HALF)


def test_a_step_that_workers_may_have_begun_is_refused_while_they_train(
    store: Store, job_id: str, attempt: Any
) -> None:
    attempt.report(status_step=7, status_step_s=2.0, status_step_at=1.5)
    with pytest.raises(SpecError) as caught:
        _patch(store, job_id, weights=HALF, at_step=14)
    [problem] = caught.value.problems
    assert problem.path == "data.at_step" and "learn in time of what changes from step 15 on" in problem.message
    assert _patch(store, job_id, weights=HALF)[0]["at_step"] == 15
    attempt.report(status_step=13, status_step_s=2.0, status_step_at=1.5)
    assert _patch(store, job_id, weights=HALF, at_step=15)[0]["at_step"] == 15, "a request that comes twice"
