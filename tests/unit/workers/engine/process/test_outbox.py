from __future__ import annotations

import threading

from shoal_workers.contract.messages import LogLine, Phase, Progress
from shoal_workers.contract.worker_reports import SaveFailed
from shoal_workers.engine.process.outbox import Outbox

NOW = Progress(generation=1, phase=Phase.FORWARD, step=3, at=0.0)


def report(step: int) -> SaveFailed:
    return SaveFailed(generation=1, step=step, rank=0, directory="d", error="e")


def line(text: str) -> LogLine:
    return LogLine(at=0.0, stream="stdout", text=text)


def test_a_poll_returns_everything_newer_and_the_next_sequence_number() -> None:
    outbox = Outbox("worker-1")
    outbox.report(report(1))
    outbox.log(line("a"))
    first = outbox.poll(0, 0.0, NOW)
    assert (first.worker_id, first.seq, first.progress) == ("worker-1", 2, NOW)
    assert (first.reports, first.logs) == ((report(1),), (line("a"),))
    outbox.report(report(2))
    assert outbox.poll(first.seq, 0.0, NOW).reports == (report(2),)


def test_unacknowledged_reports_are_returned_again() -> None:
    outbox = Outbox()
    outbox.report(report(1))
    outbox.report(report(2))
    assert outbox.poll(0, 0.0, NOW).reports == outbox.poll(0, 0.0, NOW).reports == (report(1), report(2))
    assert outbox.poll(1, 0.0, NOW).reports == (report(2),)
    assert outbox.poll(0, 0.0, NOW).reports == (report(2),), "acknowledged reports are dropped"


def test_a_poll_waits_for_the_first_report_and_reads_progress_afterwards() -> None:
    outbox = Outbox()
    is_read = threading.Event()

    def progress() -> Progress:
        is_read.set()
        return NOW

    answers = []
    reader = threading.Thread(target=lambda: answers.append(outbox.poll(0, 30.0, progress)))
    reader.start()
    assert not is_read.is_set()
    outbox.report(report(1))
    reader.join(timeout=60)
    assert answers[0].reports == (report(1),)


def test_an_empty_poll_ends_after_its_wait_and_immediately_once_closed() -> None:
    outbox = Outbox()
    assert outbox.poll(0, 0.0, NOW).reports == ()
    outbox.close()
    assert outbox.poll(0, 3600.0, NOW).reports == ()


def test_only_log_lines_are_dropped_and_their_number_is_reported_once() -> None:
    outbox = Outbox(max_logs=2)
    for step in range(5):
        outbox.report(report(step))
        outbox.log(line(str(step)))
    answer = outbox.poll(0, 0.0, NOW)
    assert [item.step for item in answer.reports if isinstance(item, SaveFailed)] == [0, 1, 2, 3, 4]
    assert [entry.text for entry in answer.logs[1:]] == ["3", "4"]
    assert "3 log lines were dropped" in answer.logs[0].text
    assert len(outbox.poll(0, 0.0, NOW).logs) == 2


def test_unacknowledged_reports_are_kept_for_a_reader_that_lost_its_position() -> None:
    outbox = Outbox()
    for number in (1, 2, 3):
        outbox.report(report(number))
    assert outbox.poll(2, 0.0, NOW, acknowledged=1).reports == (report(3),)
    assert outbox.poll(0, 0.0, NOW, acknowledged=0).reports == (report(2), report(3))
