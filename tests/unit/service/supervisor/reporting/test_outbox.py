"""A supervisor's reports are numbered and sent until they are acknowledged; a reader that counts gets each one once."""

import threading
import time

import pytest

from kit.views import incident_view, series_point
from shoal_service.core.downsampling import SeriesPoint
from shoal_service.core.endings import AttemptEnd
from shoal_service.reports import PendingEvent, PendingLog, SupervisorReports
from shoal_service.supervisor.journal import JournalEntry, Unacknowledged
from shoal_service.supervisor.reporting import reporter as module
from shoal_service.supervisor.reporting.reporter import Outbox
from shoal_service.views import CheckpointView, IncidentView, JobStatus
from shoal_workers.contract.job import EndReason, JobState

RUNNING = JobStatus(state=JobState.RUNNING, step=3)
END = AttemptEnd(reason=EndReason.FINISHED, message="done", step=12)


def event(number: int) -> PendingEvent:
    return PendingEvent(at=float(number), type="generation.formed", data={"n": number})


def log(number: int) -> PendingLog:
    return PendingLog(at=float(number), rank=0, worker_id="s", stream="stdout", text=str(number))


def point(step: int) -> SeriesPoint:
    return series_point(step, at=0.0)


def incident(id_: int, *, closed: bool = False) -> IncidentView:
    return incident_view(id_, witness="w", worker_ids=("s",), at=0.0, from_workers=2, closed=closed)


def checkpoint(step: int, state: str) -> CheckpointView:
    return CheckpointView(step=step, url="u", state=state, attempt=1, generation=1)


def opened(**known: object) -> Outbox:
    """With a first status, as an executor sets it before anything else."""
    outbox = Outbox(1, **known)
    outbox.set_status(RUNNING, ())
    return outbox


def numbers(reports: SupervisorReports) -> list[int]:
    return [e.data["n"] for e in reports.events]


def test_items_are_reported_in_order_with_the_number_of_the_last() -> None:
    outbox = opened()
    before = outbox.pull(0, 0.0).seq
    outbox.add(event(1), point(1), log(1))
    outbox.add(event(2))
    reports = outbox.pull(before, 0.0)
    assert numbers(reports) == [1, 2] and len(reports.series) == len(reports.logs) == 1
    assert reports.seq == before + 4 and reports.attempt == 1
    assert reports.status == RUNNING


def test_only_the_newest_view_of_an_incident_or_checkpoint_is_reported() -> None:
    outbox = opened()
    outbox.add(incident(1), incident(1, closed=True), incident(2))
    outbox.add(checkpoint(4, "committed"), checkpoint(4, "deleted"))
    reports = outbox.pull(0, 0.0)
    assert [(i.id, i.closed) for i in reports.incidents] == [(1, True), (2, False)]
    assert [c.state for c in reports.checkpoints] == ["deleted"]


def test_the_oldest_logs_and_series_are_dropped_and_events_never() -> None:
    outbox = opened()
    for number in range(module._MOST[PendingLog] + 10):
        outbox.add(log(number))
    for number in range(100):
        outbox.add(event(number))
    logs, events, seq = [], [], 0
    while True:
        reports = outbox.pull(seq, 0.0)
        if reports.seq == seq:
            break
        seq = reports.seq
        logs += [line.text for line in reports.logs]
        events += numbers(reports)
    assert logs == [str(n) for n in range(10, module._MOST[PendingLog] + 10)]
    assert events == list(range(100))


def test_an_answer_is_bounded_and_the_next_one_continues_where_it_ended() -> None:
    outbox = opened()
    total = 2 * module._MAX_PER_PULL + 5
    for number in range(total):
        outbox.add(event(number), log(number))
    seq, received, lines = 0, [], []
    while len(lines) < total:
        reports = outbox.pull(seq, 0.0)
        assert max(len(reports.events), len(reports.logs)) <= module._MAX_PER_PULL
        received += numbers(reports)
        lines += [int(line.text) for line in reports.logs]
        seq = reports.seq
    assert received == lines == list(range(total))


def test_the_end_is_reported_with_the_last_items_and_not_before() -> None:
    outbox = opened()
    for number in range(module._MAX_PER_PULL + 5):
        outbox.add(event(number))
    outbox.add_end(END)
    first = outbox.pull(0, 0.0)
    assert first.end is None and len(first.events) == module._MAX_PER_PULL
    last = outbox.pull(first.seq, 0.0)
    assert last.end == END and len(last.events) == 5
    assert outbox.pull(last.seq, 60.0).end == END, "an end that was not stored is reported again, without waiting"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("what", ["event", "log", "state", "end"])
def test_a_long_poll_wakes_when_a_report_arrives(what: str) -> None:
    outbox = opened()
    seq = outbox.pull(0, 0.0).seq
    answers: list[SupervisorReports] = []
    reader = threading.Thread(target=lambda: answers.append(outbox.pull(seq, 600.0)))
    reader.start()
    match what:
        case "event":
            outbox.add(event(1))
        case "log":
            outbox.add(log(1))
        case "state":
            outbox.set_status(JobStatus(state=JobState.RECOVERING), ())
        case "end":
            outbox.add_end(END)
    reader.join(60.0)
    assert answers and answers[0].seq > seq


def test_a_long_poll_without_reports_answers_after_its_time_with_the_newest_status() -> None:
    outbox = opened()
    seq = outbox.pull(0, 0.0).seq
    outbox.set_status(RUNNING.model_copy(update={"step": 4}), ())
    start = time.monotonic()
    reports = outbox.pull(seq, 0.05)
    assert time.monotonic() - start >= 0.04
    assert reports.seq == seq and reports.status.step == 4 and reports.events == ()


@pytest.mark.timeout(120)
def test_nothing_is_reported_before_the_first_status() -> None:
    """The empty status of a restarted supervisor would reset the job's step and loss."""
    outbox = Outbox(1, seq=7, unacknowledged=(Unacknowledged(seq=7, item=event(1)),))
    answers: list[SupervisorReports] = []
    reader = threading.Thread(target=lambda: answers.append(outbox.pull(0, 600.0)))
    reader.start()
    outbox.add(event(2))
    assert answers == []
    outbox.set_status(RUNNING, ())
    reader.join(60.0)
    assert answers[0].status == RUNNING and numbers(answers[0]) == [1, 2]


@pytest.mark.timeout(120)
def test_an_end_is_reported_even_without_a_status() -> None:
    outbox = Outbox(1)
    outbox.add_end(END)
    assert outbox.pull(0, 600.0).end == END


def test_after_a_restart_numbers_jump_beyond_all_earlier_ones() -> None:
    """Items may have been numbered between the journal's last entry and the death."""
    outbox = opened()
    outbox.add(event(1), event(2))
    seq, unacknowledged, end = outbox.unacknowledged()
    outbox.add(log(1), log(2), log(3))
    stored = outbox.pull(0, 0.0).seq
    restarted = opened(seq=seq + (1 << 32), unacknowledged=unacknowledged, end=end)
    restarted.add(event(3))
    reports = restarted.pull(stored, 0.0)
    assert numbers(reports) == [3], "1 and 2 were acknowledged with a number that the journal does not contain"
    assert reports.seq > stored


def test_unacknowledged_items_survive_json() -> None:
    items = (event(1), incident(2), checkpoint(4, "committed"))
    unacknowledged = tuple(Unacknowledged(seq=n, item=item) for n, item in enumerate(items, start=1))
    for item in unacknowledged:
        assert Unacknowledged.model_validate_json(item.model_dump_json()) == item
    assert JournalEntry.model_fields["unacknowledged"].annotation == tuple[Unacknowledged, ...]
