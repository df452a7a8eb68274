import math
from collections.abc import Callable
from typing import Any

import pytest

from kit.views import worker_view
from shoal_service.core.desired import Desired
from shoal_service.core.downsampling import SeriesPoint
from shoal_service.core.endings import AttemptEnd
from shoal_service.core.events.training import CheckpointCommitted
from shoal_service.reports import PendingEvent, PendingLog
from shoal_service.store import Lease, Store, checkpoint_rows, curves, driving, edit, histories, reporting, submissions
from shoal_service.store.reporting import DropReason
from shoal_service.views import CheckpointView, IncidentView
from shoal_workers.contract.job import EndReason, IncidentCause, JobState, UserFailure
from shoal_workers.contract.messages import LogStream

Begin = Callable[..., Any]


def _point(step: int, loss: float = 1.0, **fields: Any) -> SeriesPoint:
    values: dict[str, Any] = {
        "at": float(step),
        "grad_norm": 1.0,
        "lr": 0.1,
        "tokens_per_s": 10.0,
        "step_s": 0.5,
        "world_size": 2,
        "generation": 1,
    }
    return SeriesPoint(step=step, loss=loss, **(values | fields))


def dropped(store: Store) -> dict[DropReason, int]:
    """How often reports were dropped, by reason."""
    counts = store.tallies.counts.values().items()
    return {DropReason(reason): number for (kind, reason), number in counts if kind == "DropReason"}


def _line(text: str, rank: int | None = 0) -> PendingLog:
    return PendingLog(at=1.0, rank=rank, worker_id="worker-0", stream="stdout", text=text)


def _printed(store: Store, job_id: str) -> list[str]:
    """Without the lines of the job itself."""
    return [
        line.text
        for line in store.reading(histories.read_logs)(job_id, limit=100_000)
        if line.stream is not LogStream.SHOAL
    ]


def _incident(number: int = 1, **fields: Any) -> IncidentView:
    values: dict[str, Any] = {
        "cause": IncidentCause.WORKER_DIED,
        "witness": "reference",
        "ranks": (1,),
        "worker_ids": ("s-1",),
        "generation": 1,
        "at": 3.0,
        "from_workers": 4,
    }
    return IncidentView(id=number, **(values | fields))


def _end(reason: EndReason, step: int, failure: UserFailure | None = None) -> AttemptEnd:
    return AttemptEnd(reason=reason, message=failure.sentence if failure else "said", step=step, failure=failure)


class TestExactlyOnce:
    def test_everything_reported_is_stored(self, store: Store, job_id: str, attempt: Any) -> None:
        worker = worker_view(worker_id="s-0", node_id="n", node_ip="1.2.3.4", pid=7, step=3)
        checkpoint = CheckpointView(step=2, url="/c", state="committed", bytes=9, attempt=1, generation=1)
        attempt.report(
            events=(PendingEvent(at=2.0, type="group.formed", data={"workers": 1}),),
            incidents=(_incident(),),
            checkpoints=(checkpoint,),
            series=(_point(1), _point(2)),
            logs=(_line("hello"),),
            workers=(worker,),
            status_step=2,
            status_loss=1.0,
            status_message="trains",
        )
        status = store.get_job(job_id).status
        assert (status.state, status.step, status.loss, status.message) == (JobState.RUNNING, 2, 1.0, "trains")
        assert [e.type for e in store.reading(histories.read_events)(job_id)][2:] == ["group.formed", "job.state"]
        assert store.reading(histories.read_events)(job_id)[2].at == 2.0
        assert store.reading(histories.read_incidents)(job_id) == [_incident(attempt=1)]
        assert store.reading(checkpoint_rows.read_checkpoints)(job_id) == [checkpoint]
        assert store.reading(histories.read_series)(job_id) == [_point(1), _point(2)]
        assert _printed(store, job_id) == ["hello"]
        assert store.reading(histories.read_workers)(job_id) == [worker]
        assert store.reading(histories.read_workers_by_node)() == {"n": 1}

    def test_repeated_reports_only_refresh_status_and_workers(self, store: Store, job_id: str, attempt: Any) -> None:
        items: dict[str, Any] = {"events": (PendingEvent(at=2.0, type="x"),), "logs": (_line("once"),)}
        attempt.report(**items, status_step=1)
        attempt.repeat(**items, status_step=2)
        assert [e.type for e in store.reading(histories.read_events)(job_id)].count("x") == 1
        assert _printed(store, job_id) == ["once"]
        assert store.get_job(job_id).status.step == 2
        assert dropped(store) == {DropReason.DUPLICATE: 1}

    def test_reports_of_another_attempt_are_dropped_and_counted(
        self, store: Store, lease: Lease, job_id: str, attempt: Any, begin: Begin
    ) -> None:
        store.writing(driving.requeue, lease.epoch)(job_id, reason=EndReason.CLUSTER_LOST, message="", now=6.0)
        attempt.report(logs=(_line("ghost, queued"),))
        begin(job_id)
        attempt.report(logs=(_line("ghost"),), status_step=99)
        assert _printed(store, job_id) == []
        assert store.get_job(job_id).status.step == 0
        assert dropped(store) == {DropReason.STALE_ATTEMPT: 2}

    def test_a_new_attempt_numbers_its_reports_from_one(
        self, store: Store, lease: Lease, job_id: str, attempt: Any, begin: Begin
    ) -> None:
        for _ in range(3):
            attempt.report(logs=(_line("first"),))
        store.writing(driving.requeue, lease.epoch)(job_id, reason=EndReason.CLUSTER_LOST, message="", now=6.0)
        begin(job_id).report(logs=(_line("second"),))
        assert _printed(store, job_id) == ["first"] * 3 + ["second"]

    def test_a_step_that_is_done_again_replaces_itself(self, store: Store, job_id: str, attempt: Any) -> None:
        attempt.report(series=(_point(1, 5.0), _point(2, 4.0)))
        attempt.report(series=(_point(2, 3.5, generation=2),))
        assert [(p.step, p.loss, p.generation) for p in store.reading(histories.read_series)(job_id)] == [
            (1, 5.0, 1),
            (2, 3.5, 2),
        ]

    def test_incidents_and_checkpoints_are_updated_in_place(self, store: Store, job_id: str, attempt: Any) -> None:
        attempt.report(incidents=(_incident(),))
        attempt.report(incidents=(_incident(closed=True, recovery_s=2.0, steps_lost=3), _incident(2, steps_lost=1)))
        assert [(i.id, i.closed, i.recovery_s) for i in store.reading(histories.read_incidents)(job_id)] == [
            (1, True, 2.0),
            (2, False, None),
        ]
        status = store.get_job(job_id).status
        assert (status.incidents, status.steps_lost) == (2, 4)

    def test_incidents_of_different_attempts_are_separate_and_their_counts_add_up(
        self, store: Store, lease: Lease, job_id: str, attempt: Any, begin: Begin
    ) -> None:
        attempt.report(incidents=(_incident(steps_lost=2),))
        store.writing(driving.requeue, lease.epoch)(job_id, reason=EndReason.CLUSTER_LOST, message="", now=6.0)
        second = begin(job_id)
        second.report(incidents=(_incident(steps_lost=5),))
        second.report(status_steps_lost=5, status_incidents=1)
        assert [(i.attempt, i.id) for i in store.reading(histories.read_incidents)(job_id)] == [(1, 1), (2, 1)]
        status = store.get_job(job_id).status
        assert (status.incidents, status.steps_lost) == (2, 7)


class TestStates:
    def test_an_attempt_that_is_preempted_before_its_first_group_keeps_the_steps_of_those_before(
        self, store: Store, job_id: str, attempt: Any, begin: Begin
    ) -> None:
        attempt.report(status_generation=3, status_step=8, end=_end(EndReason.PREEMPTED, step=8))
        second = begin(job_id)
        second.report(JobState.STARTING)
        assert store.get_job(job_id).status.step == 8
        pausing: dict[str, Any] = {"status_reason": "preempted", "status_message": "gives way"}
        second.report(JobState.PAUSING, **pausing)
        second.report(JobState.PAUSING, **pausing, end=_end(EndReason.PREEMPTED, step=0))
        status = store.get_job(job_id).status
        assert (status.state, status.reason, status.step) == (JobState.QUEUED, "preempted", 8)
        assert status.message == "said Its workers went to another job. Back to the queue with 8 steps kept."
        moves = [
            (e.data["to"], e.data["reason"])
            for e in store.reading(histories.read_events)(job_id)
            if e.type == "job.state"
        ]
        assert moves[-3:] == [("STARTING", ""), ("PAUSING", "preempted"), ("QUEUED", "preempted")]

    def test_an_attempt_that_formed_a_group_reports_its_own_step(
        self, store: Store, job_id: str, attempt: Any, begin: Begin
    ) -> None:
        attempt.report(status_generation=3, status_step=8, end=_end(EndReason.PREEMPTED, step=8))
        begin(job_id).report(status_generation=1, status_step=6)  # its checkpoint is older
        assert store.get_job(job_id).status.step == 6

    def test_each_change_is_one_event(self, store: Store, job_id: str, attempt: Any) -> None:
        for state in (JobState.RUNNING, JobState.RUNNING, JobState.RECOVERING, JobState.RUNNING):
            attempt.report(state)
        moves = [
            (e.data["from"], e.data["to"])
            for e in store.reading(histories.read_events)(job_id)
            if e.type == "job.state"
        ]
        assert moves == [
            ("QUEUED", "STARTING"),
            ("STARTING", "RUNNING"),
            ("RUNNING", "RECOVERING"),
            ("RECOVERING", "RUNNING"),
        ]

    def test_a_report_that_crosses_a_cancel_does_not_undo_it(self, store: Store, job_id: str, attempt: Any) -> None:
        attempt.report(status_message="trains")
        store.writing(submissions.request)(job_id, Desired.CANCEL, now=6.0)
        attempt.report(status_step=5, status_message="still trains")
        status = store.get_job(job_id).status
        assert (status.state, status.step) == (JobState.CANCELLING, 5)
        assert status.message == "Cancelled on request."
        assert dropped(store) == {}

    @pytest.mark.parametrize("state", [JobState.QUEUED, JobState.SUCCEEDED, JobState.CANCELLED, JobState.CANCELLING])
    def test_a_state_that_makes_no_sense_is_refused_and_counted(
        self, store: Store, job_id: str, attempt: Any, state: JobState
    ) -> None:
        attempt.report(JobState.RUNNING)
        attempt.report(state, status_step=7)
        status = store.get_job(job_id).status
        assert (status.state, status.step) == (JobState.RUNNING, 7)
        assert dropped(store) == {DropReason.REFUSED_STATE: 1}

    def test_the_grant_is_set_by_the_scheduler_not_by_the_supervisor(
        self, store: Store, job_id: str, attempt: Any
    ) -> None:
        attempt.report(status_desired_workers=9)
        assert store.get_job(job_id).status.desired_workers == 1

    def test_waiting_shows_its_deadline_and_running_again_removes_it(
        self, store: Store, job_id: str, attempt: Any
    ) -> None:
        attempt.report(JobState.WAITING, status_deadline=99.0, status_reason="capacity")
        assert store.get_job(job_id).status.deadline == 99.0
        attempt.report(JobState.RUNNING)
        assert store.get_job(job_id).status.deadline is None


class TestEnds:
    def test_a_finished_job_keeps_its_figures_and_releases_its_workers(
        self, store: Store, job_id: str, attempt: Any
    ) -> None:
        attempt.report(status_step=100, status_loss=0.5, status_workers=1, end=_end(EndReason.FINISHED, 100), now=50.0)
        job = store.get_job(job_id)
        assert (job.status.state, job.status.reason, job.ended_at) == (JobState.SUCCEEDED, "finished", 50.0)
        assert (job.status.step, job.status.loss) == (100, 0.5)
        assert (job.status.workers, job.status.desired_workers) == (0, 0)
        assert store.reading(histories.read_workers)(job_id) == []
        assert store.reading(driving.to_drive)() == []

    def test_an_end_within_repeated_reports_counts(self, store: Store, job_id: str, attempt: Any) -> None:
        attempt.report()
        attempt.repeat(end=_end(EndReason.FINISHED, 100))
        attempt.repeat(end=_end(EndReason.INTERNAL, 100))
        assert store.get_job(job_id).status.state is JobState.SUCCEEDED

    @pytest.mark.parametrize("step", [0])
    def test_an_error_before_the_first_step_is_done_is_final(
        self, store: Store, job_id: str, attempt: Any, step: int
    ) -> None:
        failure = UserFailure(type="E", message="m", traceback="t", phase="building", ranks=(0, 1), step=step)
        attempt.report(end=_end(EndReason.USER_ERROR, step, failure))
        status = store.get_job(job_id).status
        assert (status.state, status.reason, status.failure) == (JobState.FAILED, "user_error", failure)
        assert status.message == "Your code raised E: m, on ranks 0, 1. Not retried: no step was completed."

    def test_an_error_later_is_tried_again_until_it_comes_back_at_the_same_step(
        self, store: Store, job_id: str, attempt: Any, begin: Begin
    ) -> None:
        attempt.report(end=_end(EndReason.USER_ERROR, 49))
        status = store.get_job(job_id).status
        assert status.state is JobState.QUEUED
        assert status.lost is not None and status.lost.cause is IncidentCause.RETRIED, "an incident of the next attempt"
        begin(job_id).report(end=_end(EndReason.USER_ERROR, 49))
        assert store.get_job(job_id).status.state is JobState.FAILED

    def test_a_job_that_fails_while_it_is_cancelled_is_not_tried_again(
        self, store: Store, job_id: str, attempt: Any
    ) -> None:
        attempt.report()
        store.writing(submissions.request)(job_id, Desired.CANCEL, now=6.0)
        attempt.report(JobState.CANCELLING, end=_end(EndReason.USER_ERROR, 50))
        assert store.get_job(job_id).status.state is JobState.CANCELLED

    def test_a_success_after_a_retry_forgets_the_failure(
        self, store: Store, job_id: str, attempt: Any, begin: Begin
    ) -> None:
        failure = UserFailure(type="E", message="m", traceback="t" * 100_000, phase="forward", ranks=(0,), step=5)
        attempt.report(end=_end(EndReason.USER_ERROR, 5, failure))
        stored = store.get_job(job_id).status.failure
        assert stored is not None and len(stored.traceback) == reporting.MAX_TRACEBACK_CHARS
        begin(job_id).report(end=_end(EndReason.FINISHED, 100))
        assert store.get_job(job_id).status.failure is None


class TestHostileValues:
    def test_losses_that_are_not_finite_are_kept(self, store: Store, job_id: str, attempt: Any) -> None:
        unknown = {"grad_norm": math.nan, "lr": math.nan, "tokens_per_s": math.nan}
        points = (_point(1, math.nan, **unknown, val_loss=math.nan), _point(2, math.inf))
        attempt.report(
            series=points, status_loss=math.nan, events=(PendingEvent(at=1, type="x", data={"a": math.nan}),)
        )
        first, second = store.reading(histories.read_series)(job_id)
        assert math.isnan(first.loss) and math.isnan(first.grad_norm) and first.val_loss is None
        assert math.isnan(first.lr) and math.isnan(first.tokens_per_s), "a script has not reported them"
        assert second.loss == math.inf
        assert store.get_job(job_id).status.loss is None
        assert store.reading(histories.read_events)(job_id)[2].data == {"a": None}

    def test_log_lines_are_made_storable(self, store: Store, job_id: str, attempt: Any) -> None:
        long = "x" * 100_000
        attempt.report(logs=(_line("a\x00b"), _line(long)))
        first, second = store.reading(histories.read_logs)(job_id, rank=0)
        assert first.text == r"a\x00b"
        assert len(second.text) == edit.MAX_LOG_LINE_CHARS

    def test_an_event_may_hold_anything(self, store: Store, job_id: str, attempt: Any) -> None:
        data = {"bad": "\udc80", "nul": "\x00", "deep": {"x": [1, None]}}
        attempt.report(events=(PendingEvent(at=1.0, type="user", data=data),))
        assert store.reading(histories.read_events)(job_id)[2].type == "user"


class TestHistory:
    def test_logs_can_be_followed_tailed_and_filtered_by_rank(self, store: Store, job_id: str, attempt: Any) -> None:
        attempt.report()
        begun = store.reading(histories.read_logs)(job_id, tail=1)[0].seq
        attempt.report(logs=tuple(_line(str(i), rank=i % 3 if i < 9 else None) for i in range(10)))

        def texts(**query: Any) -> list[str]:
            return [line.text for line in store.reading(histories.read_logs)(job_id, **query)]

        assert texts(after=begun, limit=3) == ["0", "1", "2"]
        assert texts(after=begun + 7) == ["7", "8", "9"]
        assert texts(tail=2) == ["8", "9"]
        assert texts(rank=1) == ["1", "4", "7"]
        assert texts(rank=1, tail=2) == ["4", "7"]
        assert texts(tail=5, limit=2) == ["8", "9"]

    def test_only_the_newest_lines_are_kept(self, store: Store, job_id: str, attempt: Any) -> None:
        most = edit.MAX_LOG_LINES
        attempt.report()
        begun = store.reading(histories.read_logs)(job_id, tail=1)[0].seq
        attempt.report(logs=tuple(_line(str(i)) for i in range(most)))
        attempt.report(logs=tuple(_line(str(most + i)) for i in range(10)))
        assert store.reading(histories.read_logs)(job_id, limit=1)[0].text == "10"
        assert store.reading(histories.read_logs)(job_id, tail=1)[0].seq == begun + most + 10
        attempt.report(logs=tuple(_line(str(i)) for i in range(most + 5)))
        assert [line.text for line in store.reading(histories.read_logs)(job_id, limit=1)] == ["5"]

    def test_the_log_tells_what_happens_to_a_job_that_prints_nothing(
        self, store: Store, lease: Lease, job_id: str, attempt: Any
    ) -> None:
        event = PendingEvent.of(CheckpointCommitted(name="step-10", step=10, generation=1), 2.0)
        printed = (_line("before").model_copy(update={"at": 1.9}), _line("after").model_copy(update={"at": 2.1}))
        attempt.report(events=(event,), logs=printed, end=_end(EndReason.FINISHED, 10))
        lines = store.reading(histories.read_logs)(job_id)
        own = [line for line in lines if line.stream is LogStream.SHOAL]
        assert [line.text for line in own] == [one.message for one in store.reading(histories.read_events)(job_id)][
            1:
        ]  # not job.created
        assert {(line.rank, line.worker_id) for line in own} == {(None, "")}
        texts = [line.text for line in lines]
        assert texts.index("before") < texts.index(own[1].text) < texts.index("after")
        assert [line.seq for line in lines] == list(range(1, len(lines) + 1))

    def test_a_long_series_is_sampled_down_to_its_means(self, store: Store, job_id: str, attempt: Any) -> None:
        attempt.report(series=tuple(_point(i, float(i)) for i in range(1, 101)))
        points = store.reading(curves.read_curve)(job_id, max_points=10)
        assert [(p.step, p.loss) for p in points] == [(10 * i, 10 * i - 4.5) for i in range(1, 11)]
        assert len(store.reading(curves.read_curve)(job_id, max_points=100)) == 100
        assert [p.step for p in store.reading(histories.read_series)(job_id, after_step=98)] == [99, 100]
        assert store.reading(curves.read_curve)(job_id, after_step=100, max_points=5) == []
