"""What a supervisor has to tell is numbered, told until it is acknowledged, and told once to whoever keeps count."""

from __future__ import annotations

import threading
import time

import pytest

from shoal_service.reports import AttemptEnd, PendingEvent, PendingLog, SupervisorReports
from shoal_service.supervisor import outbox as module
from shoal_service.supervisor.journal import JournalEntry, Unacknowledged
from shoal_service.supervisor.outbox import Outbox
from shoal_service.views import CheckpointView, IncidentView, JobStatus, SeriesPoint
from shoal_workers.contract.job import EndReason, IncidentCause, JobState

RUNNING = JobStatus(state=JobState.RUNNING, step=3)
END = AttemptEnd(reason=EndReason.FINISHED, message="done", step=12)


def event(number: int) -> PendingEvent:
    return PendingEvent(at=float(number), type="generation.formed", data={"n": number})


def log(number: int) -> PendingLog:
    return PendingLog(at=float(number), rank=0, worker_id="s", stream="stdout", text=str(number))


def point(step: int) -> SeriesPoint:
    return SeriesPoint(
        step=step, at=0.0, loss=1.0, grad_norm=1.0, lr=0.1, tokens_per_s=1.0, step_s=1.0, world_size=2, generation=1
    )


def incident(id_: int, *, closed: bool = False) -> IncidentView:
    return IncidentView(
        id=id_, cause=IncidentCause.WORKER_DIED, witness="w", ranks=(1,), worker_ids=("s",), generation=1, at=0.0,
        from_workers=2, closed=closed,
    )  # fmt: skip


def checkpoint(step: int, state: str) -> CheckpointView:
    return CheckpointView(step=step, url="u", state=state, attempt=1, generation=1)


def opened(**known: object) -> Outbox:
    """With a status to show, as an executor gives it one before anything else."""
    desk = Outbox(1, **known)
    desk.show(RUNNING, ())
    return desk


def numbers(news: SupervisorReports) -> list[int]:
    return [e.data["n"] for e in news.events]


def test_items_are_told_in_order_with_the_number_of_the_last() -> None:
    desk = opened()
    before = desk.pull(0, 0.0).seq
    desk.tell(event(1), point(1), log(1))
    desk.tell(event(2))
    news = desk.pull(before, 0.0)
    assert numbers(news) == [1, 2] and len(news.series) == len(news.logs) == 1
    assert news.seq == before + 4 and news.attempt == 1
    assert news.status == RUNNING


def test_what_was_not_acknowledged_is_told_again() -> None:
    desk = opened()
    desk.tell(event(1))
    first = desk.pull(0, 0.0)
    desk.tell(event(2))
    assert numbers(desk.pull(0, 0.0)) == [1, 2]
    assert numbers(desk.pull(first.seq, 0.0)) == [2]
    assert numbers(desk.pull(0, 0.0)) == [2], "acknowledged once, forgotten for good"


def test_a_reader_that_keeps_count_is_told_everything_once() -> None:
    desk = opened()
    told, seq = [], 0
    for number in range(50):
        desk.tell(event(number))
        if number % 7 == 0:
            news = desk.pull(seq, 0.0)
            if number % 3 == 0:  # else the answer is lost on its way, and so is the number
                told += numbers(news)
                seq = news.seq
    told += numbers(desk.pull(seq, 0.0))
    assert told == list(range(50))


def test_of_an_incident_or_checkpoint_only_the_newest_word_is_told() -> None:
    desk = opened()
    desk.tell(incident(1), incident(1, closed=True), incident(2))
    desk.tell(checkpoint(4, "committed"), checkpoint(4, "deleted"))
    news = desk.pull(0, 0.0)
    assert [(i.id, i.closed) for i in news.incidents] == [(1, True), (2, False)]
    assert [c.state for c in news.checkpoints] == ["deleted"]


def test_of_logs_and_series_the_oldest_go_first_and_events_never() -> None:
    desk = opened()
    for number in range(module._MAX_LOGS + 10):
        desk.tell(log(number))
    for number in range(100):
        desk.tell(event(number))
    told_logs, told_events, seq = [], [], 0
    while True:
        news = desk.pull(seq, 0.0)
        if news.seq == seq:
            break
        seq = news.seq
        told_logs += [line.text for line in news.logs]
        told_events += numbers(news)
    assert told_logs == [str(n) for n in range(10, module._MAX_LOGS + 10)]
    assert told_events == list(range(100))


def test_an_answer_is_bounded_and_the_next_one_goes_on_where_it_ended() -> None:
    desk = opened()
    total = 2 * module._MAX_PER_PULL + 5
    for number in range(total):
        desk.tell(event(number), log(number))
    seq, told, lines = 0, [], []
    while len(lines) < total:
        news = desk.pull(seq, 0.0)
        assert max(len(news.events), len(news.logs)) <= module._MAX_PER_PULL
        told += numbers(news)
        lines += [int(line.text) for line in news.logs]
        seq = news.seq
    assert told == lines == list(range(total))


def test_the_end_is_told_with_the_last_items_and_not_before() -> None:
    desk = opened()
    for number in range(module._MAX_PER_PULL + 5):
        desk.tell(event(number))
    desk.end(END)
    first = desk.pull(0, 0.0)
    assert first.end is None and len(first.events) == module._MAX_PER_PULL
    last = desk.pull(first.seq, 0.0)
    assert last.end == END and len(last.events) == 5
    assert desk.pull(last.seq, 60.0).end == END, "an end that was not stored is told again, without waiting"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("what", ["event", "log", "state", "end"])
def test_a_long_poll_wakes_at_once(what: str) -> None:
    desk = opened()
    seq = desk.pull(0, 0.0).seq
    answers: list[SupervisorReports] = []
    reader = threading.Thread(target=lambda: answers.append(desk.pull(seq, 600.0)))
    reader.start()
    match what:
        case "event":
            desk.tell(event(1))
        case "log":
            desk.tell(log(1))
        case "state":
            desk.show(JobStatus(state=JobState.RECOVERING), ())
        case "end":
            desk.end(END)
    reader.join(15.0)
    assert answers and answers[0].seq > seq


def test_a_long_poll_without_news_answers_after_its_time_with_the_newest_status() -> None:
    desk = opened()
    seq = desk.pull(0, 0.0).seq
    desk.show(RUNNING.model_copy(update={"step": 4}), ())
    start = time.monotonic()
    news = desk.pull(seq, 0.05)
    assert time.monotonic() - start >= 0.04
    assert news.seq == seq and news.status.step == 4 and news.events == ()


@pytest.mark.timeout(20)
def test_nothing_is_told_before_there_is_a_status() -> None:
    """The empty status of a supervisor that has just been restarted would set the job's step and loss back."""
    desk = Outbox(1, seq=7, unacknowledged=(Unacknowledged(seq=7, item=event(1)),))
    answers: list[SupervisorReports] = []
    reader = threading.Thread(target=lambda: answers.append(desk.pull(0, 600.0)))
    reader.start()
    desk.tell(event(2))
    assert answers == []
    desk.show(RUNNING, ())
    reader.join(15.0)
    assert answers[0].status == RUNNING and numbers(answers[0]) == [1, 2]


@pytest.mark.timeout(20)
def test_an_end_is_told_even_if_there_never_was_a_status() -> None:
    desk = Outbox(1)
    desk.end(END)
    assert desk.pull(0, 600.0).end == END


def test_after_a_restart_numbers_jump_beyond_any_that_were_handed_out() -> None:
    """Between the journal's last entry and the death more may have been told: those numbers are taken."""
    desk = opened()
    desk.tell(event(1), event(2))
    seq, unacknowledged, end = desk.unacknowledged()
    desk.tell(log(1), log(2), log(3))
    stored = desk.pull(0, 0.0).seq
    restarted = opened(seq=seq + (1 << 32), unacknowledged=unacknowledged, end=end)
    restarted.tell(event(3))
    news = restarted.pull(stored, 0.0)
    assert numbers(news) == [3], "1 and 2 were acknowledged by the number that the journal did not know"
    assert news.seq > stored


def test_after_a_restart_the_untold_is_told() -> None:
    desk = opened()
    desk.tell(event(1), incident(1), log(1))
    acknowledged = desk.pull(0, 0.0).seq
    desk.pull(acknowledged, 0.0)
    desk.tell(event(2), checkpoint(4, "committed"), point(9))
    desk.end(END)
    seq, unacknowledged, end = desk.unacknowledged()
    restarted = opened(seq=seq + (1 << 32), unacknowledged=unacknowledged, end=end)
    news = restarted.pull(acknowledged, 0.0)
    assert numbers(news) == [2] and len(news.checkpoints) == 1 and news.incidents == ()
    assert news.end == END


def test_what_the_journal_keeps_survives_its_own_spelling() -> None:
    items = (event(1), incident(2), checkpoint(4, "committed"))
    unacknowledged = tuple(Unacknowledged(seq=n, item=item) for n, item in enumerate(items, start=1))
    for one in unacknowledged:
        assert Unacknowledged.model_validate_json(one.model_dump_json()) == one
    assert JournalEntry.model_fields["unacknowledged"].annotation == tuple[Unacknowledged, ...]
