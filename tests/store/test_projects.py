import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest

from shoal_service.core.desired import Desired
from shoal_service.fleet_views import ProjectRules, UserRules
from shoal_service.store import ProjectConflict, QueueFull, Store, job_lists, queueing, submissions
from shoal_service.store.job_lists import FleetQuery

Submit = Callable[..., str]
Begin = Callable[..., Any]


def test_projects_form_a_tree(store: Store) -> None:
    with pytest.raises(ProjectConflict, match="its parent lab is not defined"):
        store.writing(queueing.put_project)("vision", ProjectRules(parent="lab"))
    store.writing(queueing.put_project)("lab", ProjectRules())
    store.writing(queueing.put_project)("vision", ProjectRules(parent="lab"))
    for parent in ("vision", "lab"):
        with pytest.raises(ProjectConflict, match="it would be above itself"):
            store.writing(queueing.put_project)("lab", ProjectRules(parent=parent))
    with pytest.raises(ProjectConflict, match="it is the parent of vision"):
        store.writing(queueing.remove_project)("lab")
    assert (
        store.reading(queueing.defined_projects)()["vision"].parent == "lab"
        and store.reading(queueing.defined_projects)()["lab"].parent is None
    )


def test_the_list_shows_what_each_project_uses(store: Store, submit: Submit, begin: Begin) -> None:
    store.writing(queueing.put_project)("vision", ProjectRules(limit=8))
    begin(submit(project="vision", elasticity={"max_workers": 4}), workers=3)
    begin(submit(project="audio"), workers=1)
    submit(project="vision")
    submit()
    shown = {one.name: one for one in store.reading(queueing.project_views)()}
    assert list(shown) == ["audio", "default", "vision"]
    vision, audio = shown["vision"], shown["audio"]
    assert (vision.queued, vision.running, vision.workers, vision.share, vision.is_defined) == (1, 1, 3, 0.75, True)
    assert (audio.queued, audio.running, audio.workers, audio.share, audio.is_defined) == (0, 1, 1, 0.25, False)
    assert (shown["default"].queued, shown["default"].share) == (1, 0.0)


def test_a_project_stays_in_the_list_when_its_last_job_has_ended(store: Store, submit: Submit) -> None:
    for project in ("audio", "vision", "audio"):
        job_id = submit(project=project)
        store.writing(submissions.request)(job_id, Desired.CANCEL, now=2.0)
    shown = {one.name: (one.queued, one.running) for one in store.reading(queueing.project_views)()}
    assert shown == {"audio": (0, 0), "default": (0, 0), "vision": (0, 0)}


class TestMaxQueued:
    def test_a_job_too_many_is_refused_and_not_stored(self, store: Store, submit: Submit, begin: Begin) -> None:
        store.writing(queueing.put_project)("vision", ProjectRules(max_queued=2))
        first = submit(project="vision")
        submit(project="vision")
        with pytest.raises(QueueFull, match="Project vision has 2 queued jobs, and its max_queued is 2"):
            submit(project="vision")
        submit(project="audio")
        assert len(store.reading(job_lists.page)(FleetQuery(project="vision")).items) == 2
        begin(first)
        submit(project="vision")

    def test_the_limit_of_a_parent_counts_the_jobs_below_it(self, store: Store, submit: Submit) -> None:
        store.writing(queueing.put_project)("lab", ProjectRules(max_queued=2))
        store.writing(queueing.put_project)("vision", ProjectRules(parent="lab"))
        store.writing(queueing.put_project)("audio", ProjectRules(parent="lab"))
        submit(project="vision")
        submit(project="audio")
        with pytest.raises(QueueFull, match="Project lab has 2"):
            submit(project="audio")

    def test_projects_without_rules_share_those_of_default(self, store: Store, submit: Submit) -> None:
        store.writing(queueing.put_project)("default", ProjectRules(max_queued=2))
        submit(project="one")
        submit()
        with pytest.raises(QueueFull, match="Project default"):
            submit(project="two")

    def test_a_repeated_request_finds_its_job_in_a_full_queue(self, store: Store, spec: Any) -> None:
        store.writing(queueing.put_project)("default", ProjectRules(max_queued=1))
        job, _ = store.writing(submissions.create)(spec, idempotency_key="k", now=1.0)
        again, is_new = store.writing(submissions.create)(spec, idempotency_key="k", now=2.0)
        assert not is_new and again.id == job.id

    def test_submissions_at_the_same_time_do_not_exceed_it(self, store: Store, submit: Submit) -> None:
        store.writing(queueing.put_project)("default", ProjectRules(max_queued=3))
        refused: list[QueueFull] = []

        def one() -> None:
            try:
                submit()
            except QueueFull as error:
                refused.append(error)

        threads = [threading.Thread(target=one) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(refused), store.reading(queueing.view)().num_queued) == (5, 3)


class TestUsers:
    def test_the_list_shows_what_each_user_has_and_which_limits_apply(
        self, store: Store, submit: Submit, begin: Begin
    ) -> None:
        store.writing(queueing.put_user)("default", UserRules(max_running=3))
        begin(submit(user="ada", elasticity={"max_workers": 4}), workers=3)
        submit(user="ada")
        submit()
        shown = {one.name: one for one in store.reading(queueing.user_views)()}
        assert list(shown) == ["ada", "default"]
        ada = shown["ada"]
        assert (ada.queued, ada.running, ada.workers, ada.max_running, ada.is_defined) == (1, 1, 3, 3, False)
        assert (shown["default"].queued, shown["default"].is_defined) == (1, True)

    def test_a_job_too_many_of_a_user_is_refused_and_not_stored(
        self, store: Store, submit: Submit, begin: Begin
    ) -> None:
        store.writing(queueing.put_user)("default", UserRules(max_queued=1))
        store.writing(queueing.put_user)("ada", UserRules(max_queued=2))
        first = submit(user="ada")
        submit(user="ada", project="vision")
        with pytest.raises(QueueFull, match="User ada has 2 queued jobs") as error:
            submit(user="ada")
        assert "shoal quota set-user ada --max-queued" in str(pickle.loads(pickle.dumps(error.value)))
        for user in ("bob", "eve"):  # each of them has the limit of `default` alone
            submit(user=user)
            with pytest.raises(QueueFull, match=f"User {user} has 1 "):
                submit(user=user)
        assert len(store.reading(job_lists.page)(FleetQuery(user="ada")).items) == 2
        begin(first)
        submit(user="ada")
