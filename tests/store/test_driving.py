from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from shoal_service.core.desired import Desired
from shoal_service.core.endings import AttemptEnd
from shoal_service.core.events.job import JobPreempted
from shoal_service.core.events.service import SupervisorRestarted
from shoal_service.store import Lease, LeaseLost, RequestConflict, Store, driving, histories, job_deletion, submissions
from shoal_service.store.job_deletion import DeletionRequest
from shoal_service.views import JobPatch
from shoal_workers.contract.job import EndReason, JobState

Submit = Callable[..., str]
Begin = Callable[..., Any]


class TestLease:
    def test_one_owner_holds_it_and_renews_it_with_the_same_epoch(self, store: Store) -> None:
        first = store.acquire_lease("a", ttl_s=10, now=100)
        assert first is not None
        assert (first.owner, first.epoch, first.expires_at) == ("a", 1, 110)
        assert store.acquire_lease("b", ttl_s=10, now=109) is None
        renewed = store.acquire_lease("a", ttl_s=10, now=109)
        assert renewed is not None
        assert (renewed.epoch, renewed.expires_at) == (1, 119)
        assert store.read_lease() == renewed

    def test_an_expired_lease_changes_hands_with_a_higher_epoch(self, store: Store) -> None:
        store.acquire_lease("a", ttl_s=10, now=100)
        taken = store.acquire_lease("b", ttl_s=10, now=110)
        assert taken is not None
        assert taken.epoch == 2
        assert store.acquire_lease("a", ttl_s=10, now=111) is None

    def test_a_late_renewal_keeps_the_epoch_if_the_lease_was_not_taken(self, store: Store) -> None:
        store.acquire_lease("a", ttl_s=10, now=100)
        late = store.acquire_lease("a", ttl_s=10, now=500)
        assert late is not None
        assert late.epoch == 1

    def test_a_released_lease_is_free_and_its_epoch_is_never_reused(self, store: Store) -> None:
        store.acquire_lease("a", ttl_s=10, now=100)
        store.release_lease("b")
        assert store.read_lease() is not None
        store.release_lease("a")
        assert store.read_lease() is None
        back = store.acquire_lease("a", ttl_s=10, now=101)
        assert back is not None
        assert back.epoch == 2

    def test_every_write_of_a_former_owner_is_refused(self, store: Store, lease: Lease, job_id: str) -> None:
        store.release_lease(lease.owner)
        taken = store.acquire_lease("owner-2", ttl_s=10, now=1.0)
        assert taken is not None
        before = (store.get_job(job_id), store.reading(histories.read_events)(job_id))
        writes: list[Callable[[], Any]] = [
            lambda: store.writing(driving.begin_attempt, lease.epoch)(job_id, workers=1, now=2.0),
            lambda: store.writing(driving.set_grant, lease.epoch)(job_id, workers=2, reason="", now=2.0),
            lambda: store.writing(driving.requeue, lease.epoch)(
                job_id, reason=EndReason.CLUSTER_LOST, message="", now=2.0
            ),
            lambda: store.writing(driving.record_event, lease.epoch)(
                job_id, SupervisorRestarted(found=1, of=1), now=2.0
            ),
        ]
        for write in writes:
            with pytest.raises(LeaseLost) as error:
                write()
            assert (error.value.epoch, error.value.current_epoch, error.value.owner) == (1, 2, "owner-2")
        assert (store.get_job(job_id), store.reading(histories.read_events)(job_id)) == before


class TestAttempts:
    def test_beginning_one_grants_workers_and_follows_the_spec(
        self, store: Store, lease: Lease, submit: Submit
    ) -> None:
        job_id = submit(elasticity={"max_workers": 4})
        store.writing(submissions.patch)(job_id, JobPatch(priority=3), if_match=None, now=2.0)
        assert store.writing(driving.begin_attempt, lease.epoch)(job_id, workers=4, now=5.0) == 1
        job = store.get_job(job_id)
        assert job.status.state is JobState.STARTING
        assert (job.status.attempt, job.status.desired_workers, job.status.observed_generation) == (1, 4, 2)
        assert job.started_at == 5.0
        assert store.reading(histories.read_events)(job_id)[-1].data["to"] == "STARTING"

    @pytest.mark.parametrize("desired", [Desired.PAUSE, Desired.CANCEL])
    def test_a_job_that_left_the_queue_is_not_started(
        self, store: Store, lease: Lease, desired: Desired, job_id: str
    ) -> None:
        store.writing(submissions.request)(job_id, desired, now=2.0)
        with pytest.raises(RequestConflict):
            store.writing(driving.begin_attempt, lease.epoch)(job_id, workers=1, now=3.0)

    def test_a_lost_attempt_returns_to_the_queue_with_its_steps(
        self, store: Store, lease: Lease, begin: Begin, job_id: str
    ) -> None:
        begin(job_id).report(status_step=40, status_workers=1)
        store.writing(driving.requeue, lease.epoch)(job_id, reason=EndReason.SUPERVISOR_LOST, message="gone", now=9.0)
        status = store.get_job(job_id).status
        assert (status.state, status.step, status.workers, status.desired_workers) == (JobState.QUEUED, 40, 0, 0)
        assert (status.reason, status.message) == ("supervisor_lost", "gone")
        assert begin(job_id).number == 2

    @pytest.mark.parametrize(
        ("desired", "state"), [(Desired.PAUSE, JobState.PAUSED), (Desired.CANCEL, JobState.CANCELLED)]
    )
    def test_the_users_request_decides_the_state_after_a_lost_attempt(
        self, store: Store, lease: Lease, begin: Begin, desired: Desired, state: JobState, job_id: str
    ) -> None:
        begin(job_id)
        store.writing(submissions.request)(job_id, desired, now=6.0)
        store.writing(driving.requeue, lease.epoch)(job_id, reason=EndReason.CLUSTER_LOST, message="", now=9.0)
        assert store.get_job(job_id).status.state is state

    def test_what_a_lost_attempt_had_is_kept_until_the_job_trains_again(
        self, store: Store, lease: Lease, begin: Begin, points: Callable[..., Any], job_id: str
    ) -> None:
        lose = partial(
            store.writing(driving.requeue, lease.epoch), job_id, reason=EndReason.SUPERVISOR_LOST, message="gone"
        )
        fields = {"generation": 3, "workers": 2, "layout": "fsdp2", "step": 40, "checkpoint_step": 30}
        begin(job_id).report(**{f"status_{key}": value for key, value in fields.items()})
        lose(now=20.0)
        lost = store.get_job(job_id).status.lost
        assert lost is not None
        assert (lost.attempt, lost.generation, lost.workers, lost.layout, lost.step) == (1, 3, 2, "fsdp2", 40)
        assert (lost.at, lost.message) == (20.0, "gone")

        begin(job_id).report(status_step=0)
        lose(now=30.0)
        again = store.get_job(job_id).status.lost
        assert again is not None and (again.attempt, again.step) == (2, 40), "the second one had not come so far"

        begin(job_id).report(status_step=31, series=points({31: 0.5}))
        assert store.get_job(job_id).status.lost is None

    @pytest.mark.parametrize(("saved", "is_lost"), [(40, False), (30, True)])
    def test_an_attempt_that_the_server_ended_has_lost_what_is_not_saved(
        self, store: Store, lease: Lease, begin: Begin, saved: int, is_lost: bool, job_id: str
    ) -> None:
        end = AttemptEnd(reason=EndReason.SERVER_STOPPED, message="", step=40)
        begin(job_id).report(status_step=40, status_checkpoint_step=saved, end=end)
        status = store.get_job(job_id).status
        assert (status.state, status.reason) == (JobState.QUEUED, "server_stopped")
        assert (status.lost is not None) == is_lost

    def test_requeueing_a_job_without_an_attempt_does_nothing(self, store: Store, lease: Lease, job_id: str) -> None:
        store.writing(driving.requeue, lease.epoch)(job_id, reason=EndReason.CLUSTER_LOST, message="", now=9.0)
        assert len(store.reading(histories.read_events)(job_id)) == 1

    def test_a_grant_is_an_event_only_when_it_is_another_one(
        self, store: Store, lease: Lease, submit: Submit, begin: Begin
    ) -> None:
        job_id = submit(elasticity={"max_workers": 4})
        begin(job_id, workers=2)
        for _ in range(2):
            store.writing(driving.set_grant, lease.epoch)(job_id, workers=3, reason="room", now=6.0)
        assert store.get_job(job_id).status.desired_workers == 3
        granted = [event.data for event in store.reading(histories.read_events)(job_id) if event.type == "job.granted"]
        assert granted == [{"from": 2, "to": 3, "reason": "room"}]

    def test_a_preempted_attempt_has_no_grant_left_and_one_event(
        self, store: Store, lease: Lease, begin: Begin, job_id: str
    ) -> None:
        store.writing(driving.preempt, lease.epoch)(job_id, reason="early", beneficiary="job-b", now=4.0)
        begin(job_id)
        for now in (6.0, 7.0):
            store.writing(driving.preempt, lease.epoch)(job_id, reason="priority 50.", beneficiary="job-b", now=now)
        [row] = store.reading(driving.to_drive)()
        assert (row.state, row.desired, row.granted_workers) == (JobState.STARTING, Desired.RUN, 0)
        preempted = [
            event.data for event in store.reading(histories.read_events)(job_id) if event.type == "job.preempted"
        ]
        assert preempted == [{"workers": 1, "beneficiary": "job-b", "reason": "priority 50."}]

    def test_a_row_that_has_not_changed_is_the_same_value(self, store: Store, submit: Submit) -> None:
        quiet, busy, known = submit(), submit(), driving.KnownJobs()
        before = store.reading(driving.to_drive)(known)
        store.writing(submissions.patch)(busy, JobPatch(priority=-1), if_match=None, now=3.0)
        after = store.reading(driving.to_drive)(known)
        assert [row.id for row in after] == [quiet, busy]
        assert after[0] is before[0] and after[1].priority == -1

    def test_a_row_whose_other_columns_change_is_the_same_value_and_one_whose_status_changes_is_not(
        self, store: Store, lease: Lease, submit: Submit
    ) -> None:
        job_id, known = submit(), driving.KnownJobs()
        [before] = store.reading(driving.to_drive)(known)
        store.writing(driving.record_event, lease.epoch)(
            job_id, JobPreempted(workers=1, beneficiary="b", reason="r"), now=3.0
        )
        assert store.reading(driving.to_drive)(known)[0] is before, "only its event_seq, log_seq and updated_at are new"
        store.writing(driving.quarantine, lease.epoch)({job_id: "unreadable"}, now=4.0)
        assert before.status.message != "unreadable" == store.reading(driving.to_drive)(known)[0].status.message

    def test_a_job_with_the_number_of_a_deleted_one_has_its_own_spec(self, store: Store, submit: Submit) -> None:
        deleted, known = submit(seed=1), driving.KnownJobs()
        [row] = store.reading(driving.to_drive)(known)
        store.writing(submissions.request)(deleted, Desired.CANCEL, now=2.0)
        request = DeletionRequest(root="", with_checkpoints=False, by="ada")
        store.writing(job_deletion.begin)(deleted, request, now=3.0)
        while store.writing(job_deletion.remove_rows)(deleted):
            pass
        store.writing(job_deletion.finish)(deleted, now=4.0)
        following = submit(seed=2)
        [row] = store.reading(driving.to_drive)(known)
        assert (row.id, row.spec.seed) == (following, 2)


class TestQueue:
    def test_rows_that_another_control_plane_has_changed_are_read_again(
        self, store: Store, store_url: str, submit: Submit, begin: Begin
    ) -> None:
        running, starting, patched, cancelled = (submit() for _ in range(4))
        begin(running)
        other = Store.open(store_url)
        ours, theirs = driving.KnownJobs(), driving.KnownJobs()
        try:
            assert other.reading(driving.to_drive)(theirs) == store.reading(driving.to_drive)(ours)
            taken = other.acquire_lease("other", ttl_s=1e9, now=2e9)
            assert taken is not None
            other.writing(driving.requeue, taken.epoch)(running, reason=EndReason.CLUSTER_LOST, message="gone", now=2e9)
            other.writing(driving.begin_attempt, taken.epoch)(starting, workers=2, now=2e9)
            other.writing(submissions.patch)(patched, JobPatch(priority=7), if_match=None, now=2e9)
            other.writing(submissions.request)(cancelled, Desired.CANCEL, now=2e9)
            assert [row.id for row in store.reading(driving.to_drive)(ours, max_queued=0)] == [starting]
            seen = store.reading(driving.to_drive)(ours)
            assert [row.id for row in seen] == [starting, patched, running]
            assert seen == other.reading(driving.to_drive)(theirs)
        finally:
            other.close()

    def test_a_look_at_the_jobs_with_an_attempt_keeps_what_was_made_of_the_queue(
        self, store: Store, submit: Submit, begin: Begin
    ) -> None:
        running, waiting, known = submit(), submit(), driving.KnownJobs()
        begin(running)
        before = {row.id: row for row in store.reading(driving.to_drive)(known)}
        [held] = store.reading(driving.to_drive)(known, max_queued=0)
        after = {row.id: row for row in store.reading(driving.to_drive)(known)}
        assert held is before[running] is after[running] and after[waiting] is before[waiting]

    def test_jobs_to_drive_are_those_with_an_attempt_then_the_queue_in_its_order(
        self, store: Store, lease: Lease, submit: Submit, begin: Begin
    ) -> None:
        low, running, high, paused, ended = submit(), submit(), submit(priority=5), submit(), submit()
        begin(running)
        store.writing(submissions.request)(paused, Desired.PAUSE, now=2.0)
        store.writing(submissions.request)(ended, Desired.CANCEL, now=2.0)
        rows = store.reading(driving.to_drive)()
        assert [row.id for row in rows] == [running, high, low]
        assert [row.granted_workers for row in rows] == [1, 0, 0]
        assert [row.id for row in store.reading(driving.to_drive)(max_queued=1)] == [running, high]

    def test_a_patched_spec_is_what_is_driven(self, store: Store, job_id: str) -> None:
        assert store.reading(driving.to_drive)()[0].spec.priority == 0
        store.writing(submissions.patch)(job_id, JobPatch(priority=4), if_match=None, now=2.0)
        row = store.reading(driving.to_drive)()[0]
        assert (row.spec.priority, row.spec_version, row.priority) == (4, 2, 4)
